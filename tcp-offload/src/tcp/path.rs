//! The path of a connection: its MTU, ICMP errors, the transmit queue, the next hop, and times without a way to the peer.

use std::net::IpAddr;

use super::{
    Connection, SoftError,
    pmtu::{PathMtu, Verdict},
    recovery::RecoveryPhase,
    sender::After,
    stage::Stage,
    timers::{TICK, Timer},
};
use crate::{
    link::QueueId,
    time::Instant,
    ulp::CloseReason,
    wire::{Headers, IcmpError, IcmpKind, Mac, TIMESTAMPS_BYTES},
};

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Smallest EMSS, whatever a peer or a router announces. One FPDU with headers and markers would not fit a smaller
/// segment, and forcing a sender to tiny segments is a known attack.
const LEAST_EMSS: usize = 256;

/// Payload of a full segment on Ethernet.
const ETHERNET_SEGMENT: usize = 1460;

/// RFC 4821 section 7.6.3: the pause after a failed probe is longer by this factor when a time-out detected the loss.
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

    /// The MSS that we announce: what the interface can receive, options not subtracted (RFC 9293 section 3.7.1).
    pub(super) fn own_mss(&self) -> usize {
        usize::from(self.path.mtu).saturating_sub(self.fixed_headers())
    }

    /// Whether the peer's MSS and the first hop carry segments of [`LEAST_EMSS`] bytes. Otherwise nothing would arrive.
    pub(crate) fn carries_segments(&self) -> bool {
        self.snd_mss.min(self.own_mss()) >= LEAST_EMSS + self.option_bytes()
    }

    /// Recomputes the EMSS: the smaller of the peer's MSS and the path's, less the options of a data segment, and no
    /// more than the peer's window allows.
    pub(super) fn resize(&mut self) {
        let path = usize::from(self.mtu.bytes()).saturating_sub(self.fixed_headers());
        let most = self.snd_mss.min(path).saturating_sub(self.option_bytes());
        self.emss = most.min(self.most_in_window()).max(LEAST_EMSS);
        self.plan = None;
        self.tx.resize(self.emss, &self.config);
    }

    /// Largest EMSS for the peer's window: three eighths of the largest window offered, but at least an Ethernet
    /// segment where the window allows it. An FPDU is never sent in parts, so one longer than the window would never be
    /// sent; and to avoid the silly window syndrome, a peer may open only half of its window (RFC 9293 section
    /// 3.8.6.2.2), rounded down to its scale.
    fn most_in_window(&self) -> usize {
        match self.tx.max_window() as usize {
            0 => usize::MAX,
            window => window.min((window / 8 * 3).max(ETHERNET_SEGMENT)),
        }
    }

    /// The size of an IP packet with `payload` bytes.
    fn packet_bytes(&self, payload: u64) -> u16 {
        let headers = (self.fixed_headers() + self.option_bytes()) as u64;
        u16::try_from(payload + headers).unwrap_or(u16::MAX)
    }

    // ----- path MTU -----

    /// The estimate of the path MTU.
    pub fn path_mtu(&self) -> PathMtu {
        self.mtu
    }

    /// Whether [`Self::take_mtu_news`] would return an estimate.
    pub fn has_mtu_news(&self) -> bool {
        self.mtu_news
    }

    /// The estimate of the path MTU if it has changed since the last call, to be shared with other connections of the
    /// path (RFC 8201 section 5.2).
    pub fn take_mtu_news(&mut self) -> Option<PathMtu> {
        std::mem::take(&mut self.mtu_news).then(|| {
            self.note_largest();
            self.mtu
        })
    }

    /// Adopts the estimate of another connection of the same path.
    pub fn adopt_mtu(&mut self, now: Instant, mtu: PathMtu) {
        self.note_largest();
        self.mtu = mtu.over(self.path.mtu);
        self.follow_mtu(now);
    }

    /// Sets the MTU of the first hop (interface or route) to `mtu` bytes.
    pub fn link_mtu(&mut self, now: Instant, mtu: u16) {
        self.note_largest();
        self.path.mtu = mtu;
        self.mtu.link_changed(mtu);
        self.follow_mtu(now);
    }

    /// Fits new segments to the path MTU. Segments in flight that are too long are cut and retransmitted (RFC 8201
    /// section 5.4), which is no sign of congestion.
    fn follow_mtu(&mut self, now: Instant) {
        let before = self.emss;
        self.resize();
        if self.emss < before {
            self.resend_oversized(now);
        }
    }

    fn resend_oversized(&mut self, now: Instant) {
        self.tx.prober.inconclusive();
        if self.tx.queue.mark_lost_longer_than(self.emss) {
            self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
        }
    }

    /// Handles a full-stop time-out (RFC 4821 section 7.7): a router may drop large packets without reporting it.
    /// `step` counts such time-outs in a row, from 0.
    pub(super) fn full_stop(&mut self, now: Instant, step: u32) {
        self.note_largest();
        let before = self.mtu;
        self.mtu.black_hole(step, &self.config.path_mtu);
        self.mtu_news |= self.mtu != before;
        self.follow_mtu(now);
    }

    /// Payload bytes of the next path MTU probe, if one may be sent now (RFC 4821 section 7.4).
    #[inline(never)]
    pub(super) fn probe_room(&mut self, now: Instant) -> Option<usize> {
        if !self.mtu.is_searching(now) || !self.config.path_mtu.probing || !self.tx.may_probe_mtu(now) {
            return None;
        }
        let headers = self.fixed_headers();
        let limit = u16::try_from(self.snd_mss + headers).unwrap_or(u16::MAX);
        let size = self.mtu.probe_size(now, limit)?;
        let room = usize::from(size).checked_sub(headers + self.option_bytes())?;
        Some(self.tx.room_for_probe(now, room, self.emss)).filter(|room| *room > self.emss)
    }

    /// Records that a path MTU probe with `payload` bytes was sent.
    #[inline(never)]
    pub(super) fn mtu_probe_sent(&mut self, payload: usize) {
        self.counters.mtu_probes += 1;
        let size = self.packet_bytes(payload as u64);
        self.tx.prober.sent(self.tx.nxt(), size);
    }

    /// Tells the estimate of the path MTU the largest packet delivered since the last call. This precedes each change of the
    /// estimate, because only then does it matter.
    fn note_largest(&mut self) {
        let largest = self.tx.prober.take_largest();
        if largest > 0 {
            self.mtu.delivered(self.packet_bytes(largest));
        }
    }

    /// Updates the path MTU after ACKs and timers have shown how probes and full segments fared.
    #[inline]
    pub(super) fn act_on_probe_outcome(&mut self, now: Instant) {
        if let Some(verdict) = self.tx.prober.take_verdict() {
            self.act_on_verdict(now, verdict);
        }
    }

    #[inline(never)]
    fn act_on_verdict(&mut self, now: Instant, verdict: Verdict) {
        self.note_largest();
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

    /// Processes an ICMP error that quotes this flow. It is ignored unless its sequence number is in flight (RFC 5927
    /// section 4.1). Returns the reason when the connection has just ended.
    pub fn icmp(&mut self, now: Instant, error: &IcmpError) -> Option<CloseReason> {
        let connecting = matches!(self.stage, Stage::SynSent(..) | Stage::SynReceived(..));
        let quoted = self.tx.offset_of(error.seq);
        let in_flight = quoted.is_some_and(|o| (self.tx.una()..self.tx.nxt()).contains(&o));
        if !(in_flight || connecting && error.seq == self.tx.iss()) {
            return None;
        }
        match error.kind {
            IcmpKind::TooBig { mtu } => self.too_big(now, mtu),
            // RFC 1122 section 4.2.3.9 lets hard errors abort; RFC 5927 section 5.2 only in the handshake.
            IcmpKind::Unreachable { hard: true } if matches!(self.stage, Stage::SynSent(..)) => {
                self.end(CloseReason::Unreachable);
            }
            IcmpKind::Unreachable { .. } => self.record_soft_error(now, SoftError::Unreachable),
        }
        self.stage.take_ended()
    }

    /// Processes a Packet Too Big message: RFC 1191 section 5 and RFC 8201 section 4. A message about a probe gives the
    /// next size to try and shows that the probe is lost.
    fn too_big(&mut self, now: Instant, mtu: u32) {
        self.note_largest();
        if self.mtu.too_big(now, mtu, &self.config.path_mtu) {
            self.mtu_news = true;
            self.resize();
            self.resend_oversized(now);
        }
    }

    // ----- below IP -----

    /// Sends on `queue` from now on, because the peer's frames arrive there.
    pub fn follow_queue(&mut self, queue: QueueId) {
        self.path.queue = queue;
    }

    /// Sets the IP address of the next hop towards the peer.
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

    /// Sends nothing from now on, while the host has no route to the peer. The timers run as if the network lost everything, so the
    /// user timeout decides when the connection ends.
    pub fn hold_output(&mut self) {
        self.held = true;
        self.plan = None;
    }

    /// Ends [`Self::hold_output`] for a last segment.
    pub fn release_output(&mut self) {
        self.held = false;
    }

    /// Whether output is held.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Notes that the way to the peer has changed or come back: ends [`Self::hold_output`], and retransmits at once if time-outs have
    /// delayed the next retransmission, as RFC 6069 does when a route comes back. Returns whether [`Self::transmit`] has something to
    /// send.
    pub fn way_found(&mut self, now: Instant) -> bool {
        let was_held = std::mem::take(&mut self.held);
        if !was_held && self.tx.rtt.backoff() == 0 && self.window_probes == 0 {
            return false;
        }
        self.tx.rtt.forgive();
        if let Some(syn) = self.stage.syn_mut() {
            syn.due |= syn.sent > 0;
            return true;
        }
        if self.tx.queue.is_empty() {
            if self.window_probes > 0 {
                self.window_probes = 0;
                self.timers.arm(Timer::Persist, now + TICK);
            }
            return was_held;
        }
        if was_held && !matches!(self.tx.phase, RecoveryPhase::Loss { .. }) {
            self.tx.on_timeout(now, false);
            self.tx.rtt.forgive();
        } else {
            self.tx.queue.mark_lost(0);
        }
        self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
        true
    }

    /// Ends the connection without a RST, because the interface that would carry it is gone.
    pub fn interface_removed(&mut self) {
        self.end(CloseReason::InterfaceRemoved);
    }
}
