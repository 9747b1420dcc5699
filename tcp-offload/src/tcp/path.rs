//! The network below a connection: what its path carries, what routers say, where frames leave.

use std::net::IpAddr;

use super::{
    Connection, SoftError, State,
    pmtu::{PathMtu, Verdict},
    sender::After,
};
use crate::{
    link::QueueId,
    time::Instant,
    ulp::CloseReason,
    wire::{Headers, IcmpError, IcmpKind, Mac, TIMESTAMPS_BYTES},
};

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Smallest EMSS that we fall to, whatever a peer or a router says. Below it one FPDU with its headers and markers
/// would not fit a segment, and tiny segments are a known attack on senders.
const LEAST_EMSS: usize = 256;

/// Payload of a full segment on Ethernet.
const ORDINARY_SEGMENT: usize = 1460;

/// RFC 4821 section 7.6.3: after a probe whose loss only a time-out told, the pause is longer by this factor.
const TIMEOUT_PAUSE: u32 = 5;

impl Connection {
    /// Bytes of IP and TCP headers without options.
    fn fixed_headers(&self) -> usize {
        TCP_HEADER + if self.path.flow.local.is_ipv6() { 40 } else { 20 }
    }

    /// Bytes of the options of a segment with payload.
    pub(super) fn option_bytes(&self) -> usize {
        if self.clock.is_some() { TIMESTAMPS_BYTES } else { 0 }
    }

    /// The MSS that we tell: what the interface can take, options not subtracted (RFC 9293 section 3.7.1).
    pub(super) fn own_mss(&self) -> usize {
        usize::from(self.path.mtu).saturating_sub(self.fixed_headers())
    }

    /// Computes the EMSS anew: the smaller of the peer's MSS and the path's, less the options of a data segment, and no
    /// more than the peer's window has room for.
    pub(super) fn resize(&mut self) {
        let path = usize::from(self.mtu.bytes()).saturating_sub(self.fixed_headers());
        let most = self.snd_mss.min(path).saturating_sub(self.option_bytes());
        self.emss = most.min(self.most_in_window()).max(LEAST_EMSS);
        self.tx.resize(self.emss, &self.config);
    }

    /// Three eighths of the largest window that the peer has offered, unless that is less than an ordinary segment. An FPDU
    /// never leaves in parts, so one that is longer than the window would never leave; and to avoid the silly window
    /// syndrome, a peer may open only half of its window (RFC 9293 section 3.8.6.2.2), rounded down to its scale.
    fn most_in_window(&self) -> usize {
        match self.tx.max_window() as usize {
            0 => usize::MAX,
            window => window.min((window / 8 * 3).max(ORDINARY_SEGMENT)),
        }
    }

    /// The size of an IP packet with `payload` bytes.
    fn packet_bytes(&self, payload: u64) -> u16 {
        let headers = (self.fixed_headers() + self.option_bytes()) as u64;
        u16::try_from(payload + headers).unwrap_or(u16::MAX)
    }

    // ----- path MTU -----

    /// What is known of the path's MTU.
    pub fn path_mtu(&self) -> PathMtu {
        self.mtu
    }

    /// Whether [`Self::take_mtu_news`] would return an estimate.
    pub fn has_mtu_news(&self) -> bool {
        self.mtu_news
    }

    /// The estimate of the path, when it has changed since the last call: for other connections of the path (RFC 8201
    /// section 5.2).
    pub fn take_mtu_news(&mut self) -> Option<PathMtu> {
        std::mem::take(&mut self.mtu_news).then_some(self.mtu)
    }

    /// Another connection has learnt this of the path.
    pub fn adopt_mtu(&mut self, now: Instant, mtu: PathMtu) {
        self.mtu = mtu.over(self.path.mtu);
        self.follow_mtu(now);
    }

    /// The first hop carries packets of `mtu` bytes from now on (interface or route).
    pub fn link_mtu(&mut self, now: Instant, mtu: u16) {
        self.path.mtu = mtu;
        self.mtu.link_changed(mtu);
        self.follow_mtu(now);
    }

    /// Segments sent from now on fit the path; those in flight that do not are sent again, cut to size (RFC 8201
    /// section 5.4). That is no sign of congestion.
    fn follow_mtu(&mut self, now: Instant) {
        let before = self.emss;
        self.resize();
        if self.emss < before {
            self.resend_what_is_too_long(now);
        }
    }

    fn resend_what_is_too_long(&mut self, now: Instant) {
        self.tx.prober.inconclusive();
        if self.tx.queue.mark_lost_longer_than(self.emss) {
            self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
        }
    }

    /// Nothing has come through for a while: perhaps a router drops large packets and does not say so. `step` counts the
    /// time-outs in a row that say so, from 0.
    pub(super) fn full_stop(&mut self, now: Instant, step: u32) {
        let before = self.mtu;
        self.mtu.black_hole(step, &self.config.path_mtu);
        self.mtu_news |= self.mtu != before;
        self.follow_mtu(now);
    }

    /// Room for the payload of a segment that probes the path, when it is time for one (RFC 4821 section 7.4).
    pub(super) fn probe_room(&mut self, now: Instant) -> Option<usize> {
        if !self.mtu.is_searching(now) || !self.config.path_mtu.probing || !self.tx.may_probe_mtu(now) {
            return None;
        }
        let headers = self.fixed_headers();
        let limit = u16::try_from(self.snd_mss + headers).unwrap_or(u16::MAX);
        let size = self.mtu.probe_size(now, limit)?;
        let room = usize::from(size).checked_sub(headers + self.option_bytes())?;
        Some(self.tx.room_for_probe(room, self.emss)).filter(|room| *room > self.emss)
    }

    /// A segment larger than the EMSS was sent.
    pub(super) fn mtu_probe_sent(&mut self, payload: usize) {
        self.counters.mtu_probes += 1;
        let size = self.packet_bytes(payload as u64);
        self.tx.prober.sent(self.tx.nxt(), size);
    }

    /// Acts on what ACKs and timers have shown of the path's MTU.
    pub(super) fn act_on_probe_outcome(&mut self, now: Instant) {
        let largest = self.tx.prober.take_largest();
        if largest > 0 {
            self.mtu.delivered(self.packet_bytes(largest));
        }
        let Some(verdict) = self.tx.prober.take_verdict() else { return };
        let config = self.config.path_mtu;
        match verdict {
            Verdict::Succeeded(size) => {
                self.tx.prober.watch(self.mtu.bytes(), self.emss as u64);
                self.mtu.probe_succeeded(size);
            }
            Verdict::Failed { size, by_timeout } => {
                self.counters.mtu_probes_lost += 1;
                self.mtu.probe_failed(now, size, &config);
                let factor = if by_timeout { TIMEOUT_PAUSE } else { 1 };
                self.tx.pause_probes(now, factor);
            }
            Verdict::Unreliable { above } => self.mtu.probe_failed(now, above.saturating_add(1), &config),
        }
        self.mtu_news = true;
        self.follow_mtu(now);
    }

    // ----- ICMP -----

    /// An ICMP error that quotes this flow. Ignored unless its sequence number is in flight (RFC 5927 section 4.1).
    /// Returns the reason when the connection has just ended.
    pub fn icmp(&mut self, now: Instant, error: &IcmpError) -> Option<CloseReason> {
        let connecting = matches!(self.state, State::SynSent | State::SynReceived);
        let quoted = self.tx.offset_of(error.seq);
        let in_flight = quoted.is_some_and(|o| (self.tx.una()..self.tx.nxt()).contains(&o));
        if !(in_flight || connecting && error.seq == self.tx.iss()) {
            return None;
        }
        match error.kind {
            IcmpKind::TooBig { mtu } => self.too_big(now, mtu),
            // RFC 1122 section 4.2.3.9 lets hard errors abort; RFC 5927 section 5.2 only in the handshake.
            IcmpKind::Unreachable { hard: true } if self.state == State::SynSent => {
                self.end(CloseReason::Unreachable);
            }
            IcmpKind::Unreachable { .. } => self.record_soft_error(now, SoftError::Unreachable),
        }
        self.ended.take()
    }

    /// RFC 1191 section 5 and RFC 8201 section 4. A message about a probe says what to try next, and that the probe is
    /// lost.
    fn too_big(&mut self, now: Instant, mtu: u32) {
        if self.mtu.too_big(now, mtu, &self.config.path_mtu) {
            self.mtu_news = true;
            self.resize();
            self.resend_what_is_too_long(now);
        }
    }

    // ----- below IP -----

    /// The peer's frames arrive on `queue`: ours leave on it too.
    pub fn follow_queue(&mut self, queue: QueueId) {
        self.path.queue = queue;
    }

    /// The next hop towards the peer has the IP address `address`.
    pub fn set_next_hop(&mut self, address: IpAddr) {
        self.path.next_hop = Some(address);
    }

    /// Sets the Ethernet addresses that frames carry from now on, retransmitted ones included.
    pub fn redirect(&mut self, source: Mac, next_hop: Mac) {
        if (self.path.source_mac, self.path.next_hop_mac) != (source, next_hop) {
            (self.path.source_mac, self.path.next_hop_mac) = (source, next_hop);
            self.headers = Headers::new(&self.path).with_service(self.config.dscp, self.config.hop_limit);
        }
    }

    /// Ends the connection without a RST, because the interface that would carry it is gone.
    pub fn interface_removed(&mut self) {
        self.end(CloseReason::InterfaceRemoved);
    }
}
