//! One TCP connection as a pure state machine: RFC 9293 with the extensions that modern stacks have.
//!
//! [`Connection`] owns its retransmit queue of frame tokens and keeps no received data: the framing
//! layer takes payloads straight from receive frames. The stack calls it: [`Connection::receive`] for a
//! segment, [`Connection::payload_taken`] when the payload was taken, [`Connection::on_timer`] when
//! [`Connection::deadline`] has passed, then [`Connection::transmit`].
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod ack;
mod clock;
mod config;
mod congestion;
mod connection;
mod input;
mod isn;
mod output;
mod path;
mod pmtu;
mod queue;
mod rack;
mod receiver;
mod recovery;
mod rtt;
mod sender;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod timeouts;
mod timers;

pub use config::{Algorithm, Keepalive, TcpConfig, Tuning};
pub(crate) use connection::ChallengeBudget;
pub use connection::Connection;
pub use isn::IsnKey;
pub use pmtu::{PathMtu, PathMtuConfig};

use std::time::Duration;

use crate::{link::FrameWriter, seq::StreamOffset, time::Instant, ulp::CloseReason};

/// Payload of one segment that fits the receive window, trimmed of what came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewPayload {
    /// Stream offset of its first byte.
    pub offset: StreamOffset,
    /// Where that byte lies in the frame.
    pub start: usize,
    /// Bytes; never 0. It may overlap what was taken before only beyond a gap (never below
    /// [`Connection::contiguous`]).
    pub len: usize,
    /// `RCV.NXT` as an offset once this payload is taken: everything below is then there.
    pub contiguous: StreamOffset,
}

/// What [`Source::fill`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// Payload of this many bytes (at least 1) was written.
    Segment(usize),
    /// Nothing to send now, or nothing that fits into the room offered.
    Nothing,
    /// Nothing to send ever again: send a FIN after what was filled before.
    Finish,
}

/// Where the payload of new segments comes from: the framing layer.
pub trait Source {
    /// Whether [`Source::fill`] may return anything but [`Filled::Nothing`], so that a frame is worth allocating.
    fn has_data(&self) -> bool;

    /// Writes the payload of one segment that starts at `offset`, at most `out.room()` bytes. The room is the EMSS; less
    /// when the peer's window allows only less; more for a probe of the path's MTU, to be filled to the last byte.
    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled;
}

/// The states of RFC 9293 section 3.3.2. LISTEN belongs to the stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// SYN sent.
    SynSent,
    /// SYN received, and ours sent.
    SynReceived,
    /// Data flows.
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
    /// Gone.
    Closed,
}

/// What one received segment led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Receipt {
    /// Payload to take. When the framing layer takes it, [`Connection::payload_taken`] must follow before the next
    /// segment is received; when it does not, the payload counts as lost.
    pub arrival: Option<NewPayload>,
    /// The connection has just become ESTABLISHED.
    pub established: bool,
    /// The peer has newly acknowledged all data below this offset.
    pub acked: Option<StreamOffset>,
    /// The connection has just ended for its user; in TIME-WAIT it lives on only to answer old segments.
    pub closed: Option<CloseReason>,
}

/// What [`Connection::transmit`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Frames submitted.
    pub frames: usize,
    /// `room` was used up and there may be more to send.
    pub more: bool,
    /// A free frame, a ring slot, or the end of a frame's earlier transmission is missing: flush the link and
    /// call again.
    pub starved: bool,
    /// Something was not sent because others, or this connection itself, retain too many frames.
    pub short_of_frames: bool,
    /// The connection has just ended.
    pub closed: Option<CloseReason>,
}

/// Trouble that a connection may survive (RFC 9293 section 3.9.1.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SoftError {
    /// A router says that the peer cannot be reached (section 3.9.2.2).
    Unreachable,
    /// R1: several time-outs in a row without an answer (section 3.8.3).
    NoAnswer,
}

/// A look at one connection, for tools and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// State.
    pub state: State,
    /// Smoothed round-trip time, when measured.
    pub srtt: Option<Duration>,
    /// Smallest round-trip time seen.
    pub min_rtt: Option<Duration>,
    /// Retransmission time-out, without back-off.
    pub rto: Duration,
    /// Congestion window, in bytes.
    pub cwnd: u64,
    /// Slow start threshold, in bytes.
    pub ssthresh: u64,
    /// Bytes believed to be in the network.
    pub in_flight: u64,
    /// The peer's window, in bytes.
    pub snd_wnd: u64,
    /// The window that we last advertised, less what was taken since, in bytes.
    pub rcv_wnd: u64,
    /// Effective maximum segment size: payload bytes of a full segment.
    pub emss: usize,
    /// Bytes of the largest IP packet on the path that is no probe.
    pub path_mtu: u16,
    /// Chunks of the frames retained until acknowledged.
    pub chunks_retained: usize,
    /// Bytes retained on the heap instead.
    pub spilled_bytes: usize,
    /// The last trouble that did not end the connection, and when (RFC 9293 section 3.9.1.8).
    pub soft_error: Option<(SoftError, Instant)>,
    /// When the connection began.
    pub opened: Instant,
    /// Counters since then.
    pub counters: TcpCounters,
}

crate::counters! {
    /// Events of one connection, counted.
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
        /// Times recovery was entered by loss detection (not by time-out).
        recoveries,
        /// Recoveries or time-outs found spurious and undone.
        undone,
        /// D-SACK blocks received (RFC 2883).
        dsacks_in,
        /// Payload segments that arrived beyond a gap.
        out_of_order,
        /// Payload segments that held nothing new.
        duplicates,
        /// Segments outside the window.
        out_of_window,
        /// Segments beyond gaps that were not taken: there were too many gaps.
        crowded,
        /// Payload segments dropped without an acknowledgement because nobody reads any more.
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
        /// Frames cut anew after the path MTU had dropped.
        recut,
        /// Probes of the path's MTU sent (RFC 4821).
        mtu_probes,
        /// Of those, lost for their size.
        mtu_probes_lost,
    }
}
