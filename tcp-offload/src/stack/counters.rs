//! What the stack counted, over all its connections, and a look at them.

use super::Stack;
use crate::{
    mpa, tcp,
    ulp::{ConnId, Ulp},
};

crate::counters! {
    /// Frames and connections by what became of them. Plain numbers that only grow.
    pub struct StackCounters in "stack" {
        /// Frames received.
        frames_in,
        /// Frames that no header parser accepted, dropped.
        malformed,
        /// Of those, a wrong IP or TCP checksum.
        bad_checksum,
        /// Frames whose checksum a local sender left to its hardware.
        partial_checksum,
        /// Frames that are neither TCP nor an ICMP error about us, dropped.
        foreign,
        /// Segments for no connection and no listener.
        no_connection,
        /// Resets sent in answer to them.
        resets_sent,
        /// ICMP errors about one of our connections.
        icmp_errors,
        /// Payloads not taken because the connection, or all together, held too much already; the peer sends them
        /// again.
        refused_payloads,
        /// Connections we opened.
        active_opens,
        /// Connections that came to our listeners.
        passive_opens,
        /// SYNs and ACKs of the handshake dropped because a backlog or the table of connections was full.
        backlog_full,
        /// SYNs answered and remembered.
        half_open,
        /// Of those, forgotten because too many came after them.
        half_open_evicted,
        /// Of those, forgotten because nobody answered.
        half_open_expired,
        /// SYNs dropped because the interface took no rule for their flow.
        steering_refused,
        /// Connections whose TIME-WAIT was cut short because there were too many.
        time_wait_cut,
        /// Connections looked at because their timer was due; idle ones never are.
        timer_looks,
        /// Times that sending stopped because no transmit frame or ring slot was free.
        starved,
    }
}

impl<U: Ulp> Stack<U> {
    /// What TCP knows about a connection.
    pub fn info(&self, conn: ConnId) -> Option<tcp::Info> {
        self.slots.get(conn.index as usize).filter(|s| s.generation == conn.generation).map(|s| s.tcp.info())
    }

    /// Bytes that are held now because they cannot be placed or delivered yet, of all connections.
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// How many connections there are, those in TIME-WAIT included.
    pub fn connections(&self) -> usize {
        self.slots.len()
    }

    /// How many SYNs are answered and not confirmed.
    pub fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Counters of frames and connections.
    pub fn counters(&self) -> StackCounters {
        self.counters
    }

    /// TCP's counters, summed over all connections that are and were.
    pub fn tcp_counters(&self) -> tcp::Counters {
        let mut sum = self.closed_tcp;
        for (_, slot) in &self.slots {
            sum += slot.tcp.counters();
        }
        sum
    }

    /// MPA's counters, summed over all connections that are and were.
    pub fn mpa_counters(&self) -> mpa::Counters {
        let mut sum = self.closed_mpa;
        for (_, slot) in &self.slots {
            sum += slot.mpa.counters();
        }
        sum
    }
}
