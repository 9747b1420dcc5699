//! Counters and table sizes of a stack, and access to those of its connections.

use super::Stack;
use crate::{
    framing::{FramingCounters, either},
    tcp::{self, TcpCounters},
    ulp::{ConnId, Ulp},
};

crate::counters! {
    /// Counters of frames and connections. Plain numbers that only grow.
    pub struct StackCounters in "stack" {
        /// Frames received.
        frames_in,
        /// Malformed frames, dropped.
        malformed,
        /// Fragments of IP packets.
        fragments,
        /// Frames with a wrong IP, TCP or ICMP checksum, dropped. Part of `malformed`.
        bad_checksum,
        /// Frames between IPv4-mapped IPv6 addresses, dropped. Part of `malformed`.
        mapped_addresses,
        /// Segments whose checksum a local sender left to its hardware.
        partial_checksum,
        /// Frames that are neither TCP nor an ICMP error about us, dropped.
        foreign,
        /// Frames of connections of other engines, handed over to them.
        handed_over,
        /// Segments for no connection and no listener.
        no_connection,
        /// SYNs refused because the peer's MSS or the interface's MTU is too small for segments of 256 bytes.
        small_segments,
        /// Resets sent in answer to such segments.
        resets_sent,
        /// ICMP errors about one of our connections.
        icmp_errors,
        /// Payloads not taken because the connection, or all connections together, already held too many bytes; the
        /// peer retransmits them.
        refused_payloads,
        /// Connections whose held bytes were evicted because other connections needed the memory and the gap was too
        /// old.
        holders_evicted,
        /// Connections that this end opened.
        active_opens,
        /// Connections that listeners accepted.
        passive_opens,
        /// SYNs and ACKs of the handshake dropped because a backlog or the table of connections was full.
        backlog_full,
        /// Connections reset before their MPA Request arrived, because their listener's backlog was full and a newer
        /// connection needed the place.
        startup_evicted,
        /// SYNs answered and remembered.
        half_open,
        /// Half-open connections evicted because the table was full.
        half_open_evicted,
        /// Half-open connections that timed out.
        half_open_expired,
        /// SYNs dropped because the interface refused a steering rule for their flow.
        steering_refused,
        /// Connections whose TIME-WAIT was cut short because there were too many.
        time_wait_cut,
        /// Connections visited because their timer was due; idle connections are never visited.
        timer_looks,
        /// Times that sending stopped because no transmit frame or ring slot was free.
        starved,
        /// Bytes of unacknowledged payload moved to the heap because frames were scarce.
        spilled_bytes,
        /// Connections reset because their data stayed unacknowledged for too long while frames were scarce.
        stalled_resets,
    }
}

impl StackCounters {
    /// Counts `frames` received frames, whose checksums are `partial` or not.
    #[inline]
    pub(super) fn note_frames(&mut self, frames: u64, partial: bool) {
        self.frames_in += frames;
        if partial {
            self.partial_checksum += frames;
        }
    }
}

/// Number of entries in each table of a stack that a peer can fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableSizes {
    /// Connections of all kinds.
    pub connections: usize,
    /// SYNs answered and not confirmed.
    pub half_open: usize,
    /// Entries of the timer heap, including entries whose deadline has moved to a later time.
    pub timers: usize,
    /// Connections that wait for their turn to send.
    pub ready: usize,
    /// Connections that owe an ACK and nothing else.
    pub owing: usize,
    /// Connections in TIME-WAIT, including entries of connections that were removed early.
    pub time_waiting: usize,
    /// Resets that wait for a frame.
    pub resets: usize,
}

impl<U: Ulp> Stack<U> {
    /// The number of entries in each table.
    pub fn table_sizes(&self) -> TableSizes {
        TableSizes {
            connections: self.slots.len(),
            half_open: self.half_open.len(),
            timers: self.timers.len(),
            ready: self.turns.sends() + self.turns.waiting(),
            owing: self.turns.acks(),
            time_waiting: self.time_waiting.len(),
            resets: self.resets.len(),
        }
    }

    /// A snapshot of a connection's TCP.
    pub fn info(&self, conn: ConnId) -> Option<tcp::Info> {
        self.slots.get(conn.index as usize).filter(|s| s.generation == conn.generation).map(|s| s.tcp.info())
    }

    /// Payload bytes of a full segment of a connection that has data in flight; `None` when nothing is in flight.
    pub fn emss_in_flight(&self, conn: ConnId) -> Option<usize> {
        let slot = self.slots.get(conn.index as usize).filter(|s| s.generation == conn.generation)?;
        slot.tcp.has_unacknowledged().then(|| slot.tcp.emss())
    }

    /// The framing's counters of a connection.
    pub fn framing_counters_of(&self, conn: ConnId) -> Option<FramingCounters> {
        let slot = self.slots.get(conn.index as usize).filter(|s| s.generation == conn.generation)?;
        Some(either!(&slot.session => counters()))
    }

    /// Bytes that all connections hold now because they cannot be placed or delivered yet.
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// Number of connections, including those in TIME-WAIT.
    pub fn connections(&self) -> usize {
        self.slots.len()
    }

    /// Number of half-open connections: SYNs answered and not confirmed.
    pub fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Counters of frames and connections.
    pub fn counters(&self) -> StackCounters {
        self.counters
    }

    /// TCP's counters, summed over all connections, past and present.
    pub fn tcp_counters(&self) -> TcpCounters {
        let mut sum = self.closed_tcp;
        for (_, slot) in &self.slots {
            sum += slot.tcp.counters();
        }
        sum
    }

    /// The framing's counters, summed over all connections, past and present.
    pub fn framing_counters(&self) -> FramingCounters {
        let mut sum = self.closed_framing;
        for (_, slot) in &self.slots {
            sum += either!(&slot.session => counters());
        }
        sum
    }
}
