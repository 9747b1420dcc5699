//! [`Connection`]: the parts of one connection and what the stack calls.

use crate::{
    link::{Link, QueueId},
    seq::{SeqNum, StreamOffset},
    tcp::{Arrival, Counters, Info, Receipt, Sent, Source, State, TcpConfig},
    time::Instant,
    ulp::CloseReason,
    wire::{Flow, IcmpError, Mac, Path, Segment},
};

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    config: TcpConfig,
    path: Path,
    state: State,
}

impl Connection {
    /// An active open: SYN-SENT, with a SYN due. `isn` comes from `tcp::isn`.
    pub fn connect(now: Instant, config: &TcpConfig, path: Path, isn: SeqNum) -> Self {
        let _ = (now, isn);
        Self { config: *config, path, state: State::SynSent }
    }

    /// A passive open from the peer's `syn`: SYN-RECEIVED, with a SYN-ACK due.
    pub fn accept(now: Instant, config: &TcpConfig, path: Path, syn: &Segment, isn: SeqNum) -> Self {
        let _ = (now, isn, syn);
        Self { config: *config, path, state: State::SynReceived }
    }

    /// Processes a segment of this flow: everything but taking the payload.
    pub fn receive(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) -> Receipt {
        let _ = (now, link, segment);
        Receipt::default()
    }

    /// The framing layer has taken the payload of `arrival`.
    pub fn take(&mut self, now: Instant, arrival: &Arrival) {
        let _ = (now, arrival);
    }

    /// Whether all that the peer sent, up to its FIN, was taken.
    pub fn peer_closed(&self) -> bool {
        false
    }

    /// Sends what is due: control segments, retransmissions, new data from `source`, ACKs. At most `room` frames.
    pub fn transmit(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        source: &mut dyn Source,
        room: usize,
    ) -> Sent {
        let _ = (now, link, source, room);
        Sent::default()
    }

    /// Makes an ACK that merely waits for company due at once (an idle poll). Returns whether there was one:
    /// then [`Connection::transmit`] wants to be called.
    pub fn flush_ack(&mut self) -> bool {
        false
    }

    /// Acts on the timers that have run out. Afterwards [`Connection::transmit`] wants to be called.
    /// Returns the reason when the connection has just ended.
    pub fn on_timer(&mut self, now: Instant) -> Option<CloseReason> {
        let _ = now;
        None
    }

    /// When [`Connection::on_timer`] wants to be called.
    pub fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Closes our direction after what was filled: no more calls of [`Source::fill`], then a FIN.
    pub fn close(&mut self) {}

    /// Ends the connection at once, with a RST where RFC 9293 section 3.10.5 wants one (sent by the next
    /// [`Connection::transmit`]).
    pub fn abort(&mut self) {
        self.abort_with(CloseReason::Aborted);
    }

    /// As [`Connection::abort`], for another reason.
    pub fn abort_with(&mut self, reason: CloseReason) {
        let _ = reason;
    }

    /// Gives every frame back. The connection is [`State::Closed`] afterwards.
    pub fn release(&mut self, link: &mut dyn Link) {
        let _ = link;
    }

    /// The framing layer holds `bytes` that it can neither place nor deliver: the window shrinks by as many.
    pub fn withheld(&mut self, bytes: usize) {
        let _ = bytes;
    }

    /// An ICMP error that quotes this flow. Ignored unless its sequence number is in flight (RFC 5927 section 4).
    /// Returns the reason when the connection has just ended.
    pub fn icmp(&mut self, now: Instant, error: &IcmpError) -> Option<CloseReason> {
        let _ = (now, error);
        None
    }

    /// The path's MTU has become `mtu` (interface or route). Segments sent from now on fit it.
    pub fn path_mtu(&mut self, now: Instant, mtu: u16) {
        let _ = (now, mtu);
    }

    /// The peer's frames arrive on `queue`: ours leave on it too.
    pub fn follow_queue(&mut self, queue: QueueId) {
        self.path.queue = queue;
    }

    /// The next hop has a new Ethernet address.
    pub fn redirect(&mut self, next_hop: Mac) {
        self.path.next_hop_mac = next_hop;
    }

    /// State.
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether nothing is left of the connection but the frames that [`Connection::release`] gives back.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Counters since the connection began.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Four-tuple.
    pub fn flow(&self) -> Flow {
        self.path.flow
    }

    /// Path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Payload bytes of a full segment: the send MSS less the options that every segment carries (RFC 9293
    /// section 3.7.1).
    pub fn emss(&self) -> usize {
        0
    }

    /// `RCV.NXT` as an offset: all below has been taken.
    pub fn contiguous(&self) -> StreamOffset {
        0
    }

    /// Whether [`Connection::transmit`] has something to do besides asking its source for new data.
    pub fn wants_transmit(&self) -> bool {
        false
    }

    /// Whether new data could be sent now, as far as the windows go.
    pub fn can_send(&self) -> bool {
        false
    }

    /// A look inside.
    pub fn info(&self) -> Info {
        let _ = self.config;
        Info {
            state: self.state,
            srtt: None,
            min_rtt: None,
            rto: self.config.rto_initial,
            cwnd: 0,
            ssthresh: 0,
            in_flight: 0,
            snd_wnd: 0,
            emss: 0,
            frames_retained: 0,
            counters: Counters::default(),
        }
    }

    /// Whether a SYN may replace this connection in TIME-WAIT (RFC 9293 section 3.10.7.4, RFC 6191 section 2).
    pub fn replaceable_by(&self, syn: &Segment) -> bool {
        let _ = syn;
        false
    }
}
