//! One TCP connection as a pure state machine: RFC 9293 with the extensions of modern stacks.
//!
//! [`Connection`] owns its retransmit queue of frames and stores no received data: the framing layer takes payloads
//! directly from receive frames. The stack calls [`Connection::receive`] for a segment, [`Connection::payload_taken`]
//! when its payload was taken, [`Connection::on_timer`] when [`Connection::deadline`] has passed, then
//! [`Connection::transmit`].
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod ack;
mod clock;
mod config;
mod congestion;
mod connection;
mod input;
mod isn;
mod marks;
mod output;
mod path;
mod pmtu;
mod postponed;
mod prediction;
mod queue;
mod rack;
mod receiver;
mod recovery;
mod rtt;
mod sender;
mod stage;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod timeouts;
mod timers;

pub use config::{Algorithm, Keepalive, TcpConfig, Tuning, UnknownAlgorithm};
pub(crate) use connection::ChallengeBudget;
pub use connection::Connection;
pub use isn::{Isn, IsnKey};
pub use pmtu::{PathMtu, PathMtuConfig};
pub use prediction::Run;

use std::time::Duration;

use crate::{link::FrameWriter, seq::StreamOffset, time::Instant, ulp::CloseReason};

/// New payload of one segment: the part within the receive window that was not received before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPayload {
    /// Stream offset of its first byte.
    pub offset: StreamOffset,
    /// Position of that byte in the frame.
    pub start: usize,
    /// Bytes; never 0. It may overlap payload taken earlier only beyond a gap (never below [`Connection::contiguous`]).
    pub len: usize,
    /// `RCV.NXT` as an offset once this payload is taken.
    pub contiguous: StreamOffset,
    /// Whether the peer had nothing more to send (PSH; RFC 9293 section 3.9.1.2).
    pub pushed: bool,
}

/// What [`Source::fill`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// Payload was written.
    Segment {
        /// Number of bytes, at least 1.
        len: usize,
        /// Whether [`Source::has_data`] is still true.
        more: bool,
    },
    /// Nothing to send now, or nothing that fits the room offered.
    Nothing,
    /// No more data will follow: send a FIN after the data filled before.
    Finish,
}

/// The source of payload for new segments: the framing layer.
pub trait Source {
    /// Whether [`Source::fill`] may return anything but [`Filled::Nothing`], so that it is worth allocating a frame.
    fn has_data(&self) -> bool;

    /// Whether [`Source::has_data`] is probably true, as far as is known without a look.
    fn may_have_data(&self) -> bool {
        self.has_data()
    }

    /// Writes the payload of one segment that starts at `offset`, at most `out.room()` bytes. The room is the EMSS,
    /// less when the peer's window is smaller, and more for a path MTU probe, which must be filled to the last byte.
    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled;
}

/// The states of RFC 9293 section 3.3.2. LISTEN belongs to the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// SYN sent.
    SynSent,
    /// SYN received, and our own sent.
    SynReceived,
    /// Data can flow in both directions.
    Established,
    /// We closed; our FIN is not acknowledged yet.
    FinWait1,
    /// We closed and the peer acknowledged that; it may still send.
    FinWait2,
    /// The peer closed; we may still send.
    CloseWait,
    /// Both closed at the same time; our FIN is not acknowledged yet.
    Closing,
    /// The peer closed first, then we; our FIN is not acknowledged yet.
    LastAck,
    /// Both closed; old duplicates die out.
    TimeWait,
    /// The connection has ended.
    Closed,
}

/// The outcome of one received segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Receipt {
    /// Payload to take. When the framing layer takes it, [`Connection::payload_taken`] must follow before the next
    /// segment is received. When the framing layer does not take it, the payload counts as lost.
    pub arrival: Option<NewPayload>,
    /// The connection has just become ESTABLISHED.
    pub established: bool,
    /// The peer has newly acknowledged all data below this offset.
    pub acked: Option<StreamOffset>,
    /// The connection has just ended for its user. In TIME-WAIT it continues to answer old segments.
    pub closed: Option<CloseReason>,
}

/// The next segment that a connection has to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// Something.
    Yes,
    /// New data, if the source has any.
    NewData,
    /// Nothing.
    Nothing,
}

/// What [`Connection::transmit`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Frames submitted.
    pub frames: usize,
    /// `room` was used up and there may be more to send.
    pub more: bool,
    /// The source has no more data.
    pub dry: bool,
    /// No frame or ring slot is free, or the link still reads a frame that has to be retransmitted: flush the link and
    /// call again.
    pub starved: bool,
    /// A segment was not sent because this connection, or others, retain too many frames.
    pub short_of_frames: bool,
    /// The connection has just ended.
    pub closed: Option<CloseReason>,
}

impl Sent {
    /// Whether all that the source had was sent, and nothing has to be reported.
    #[inline]
    pub(crate) fn is_all(&self) -> bool {
        self.dry && !(self.more | self.starved | self.short_of_frames) && self.closed.is_none()
    }
}

/// An error that a connection may survive (RFC 9293 section 3.9.1.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SoftError {
    /// A router reports the peer as unreachable (section 3.9.2.2).
    Unreachable,
    /// R1: several time-outs in a row without an answer (section 3.8.3).
    NoAnswer,
}

/// A snapshot of one connection, for tools and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// State.
    pub state: State,
    /// Smoothed round-trip time, once measured.
    pub srtt: Option<Duration>,
    /// Smallest round-trip time of the last 5 to 10 s.
    pub min_rtt: Option<Duration>,
    /// Retransmission time-out, without back-off.
    pub rto: Duration,
    /// Congestion control.
    pub congestion: Algorithm,
    /// Congestion window, in bytes.
    pub cwnd: u64,
    /// Slow start threshold, in bytes.
    pub ssthresh: u64,
    /// Rate at which segments are paced, in bytes per second; `None` with a congestion control that does not pace.
    pub pacing_rate: Option<u64>,
    /// Bytes believed to be in the network.
    pub in_flight: u64,
    /// The peer's window, in bytes.
    pub snd_wnd: u64,
    /// The window last advertised, less the data taken since, in bytes.
    pub rcv_wnd: u64,
    /// Effective maximum segment size: payload bytes of a full segment.
    pub emss: usize,
    /// Largest IP packet on the path that is not a probe, in bytes.
    pub path_mtu: u16,
    /// Chunks of the frames retained until they are acknowledged.
    pub chunks_retained: usize,
    /// Bytes of unacknowledged payload on the heap.
    pub spilled_bytes: usize,
    /// The last error that did not end the connection, and when it occurred (RFC 9293 section 3.9.1.8).
    pub soft_error: Option<(SoftError, Instant)>,
    /// When the connection was opened.
    pub opened: Instant,
    /// Counters since the connection was opened.
    pub counters: TcpCounters,
}

crate::counters! {
    /// Event counts of one connection.
    pub struct TcpCounters in "tcp" {
        /// Segments received that belong to this connection.
        segments_in,
        /// Segments sent, retransmissions included.
        segments_out,
        /// Payload bytes sent for the first time.
        bytes_out,
        /// Payload bytes taken.
        bytes_in,
        /// Segments without payload sent only to acknowledge.
        acks_out,
        /// Segments retransmitted, for any reason.
        retransmits,
        /// Retransmission time-outs.
        rto_expired,
        /// Tail loss probes sent (RFC 8985 section 7).
        tlp_probes,
        /// Recoveries entered by loss detection (not by a time-out).
        recoveries,
        /// Recoveries or time-outs found spurious and undone.
        undone,
        /// D-SACK blocks received (RFC 2883).
        dsacks_in,
        /// Payload segments that arrived beyond a gap.
        out_of_order,
        /// Payload segments without new data.
        duplicates,
        /// Segments outside the window.
        out_of_window,
        /// Segments beyond gaps that were dropped because there were too many gaps.
        crowded,
        /// Payload segments dropped without an acknowledgement because the local end no longer reads.
        unread,
        /// Segments dropped as old by their timestamps (RFC 7323 section 5).
        paws_dropped,
        /// Challenge ACKs sent (RFC 5961).
        challenge_acks,
        /// Zero-window probes sent.
        window_probes,
        /// Keepalive probes sent.
        keepalives,
        /// ACKs received that carried ECN-Echo.
        ecn_echoes,
        /// Reductions of the congestion window because of ECN-Echo (RFC 3168 section 6.1.2).
        ecn_reductions,
        /// Times at which the pacer held the next segment back (`Algorithm::Bbr`).
        paced,
        /// Segments cut into smaller ones, or given longer headers, before they were retransmitted.
        recut,
        /// Path MTU probes sent (RFC 4821).
        mtu_probes,
        /// Path MTU probes lost because of their size.
        mtu_probes_lost,
    }
}
