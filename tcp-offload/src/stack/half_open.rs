//! Half-open connections, whose handshake is not confirmed: a bounded cache of their SYNs (RFC 4987 section 3.5).
//!
//! The state of a passive connection in SYN-RECEIVED is a pure function of the SYN, the initial sequence number and the
//! time, so only these are kept. A [`Connection`] is rebuilt for each segment of the handshake and dropped afterwards,
//! until a segment completes the handshake. `docs/decisions/0007-half-open-connections-are-their-syns.md` has the
//! reasons against SYN cookies.

use std::{collections::BTreeMap, net::IpAddr};

use super::{Stack, listen::path_of};
use crate::{
    keyed::{KeyedHash, KeyedMap},
    link::{FrameWriter, Link, Steer},
    secret::Secret,
    seq::StreamOffset,
    tcp::{ChallengeBudget, Connection, Filled, Isn, Source, TcpConfig},
    time::Instant,
    ulp::{CloseReason, ListenerId, Ulp},
    wire::{Flow, Mac, Segment},
};

/// Largest number of challenge ACKs and other bare ACKs that all half-open connections together send in a
/// [period](crate::tcp::TcpConfig::challenge_period). A half-open connection is rebuilt for each segment and has no
/// budget of its own. The budget of a period is drawn at random between a third and two thirds of this number, because
/// an off-path attacker can measure the rest of a fixed shared budget (CVE-2016-5696, an exploit of RFC 5961 section
/// 7).
const MAX_CHALLENGES: u32 = 192;

/// One half-open connection: 376 bytes with its entries in the two maps.
#[derive(Debug, Clone, Copy)]
pub(super) struct HalfOpen {
    listener: ListenerId,
    syn: Segment,
    isn: Isn,
    /// Arrival of the SYN, from which the clock of the timestamps option counts.
    since: Instant,
    /// Number of SYN-ACKs sent, and the time of the last one.
    sent: u32,
    sent_at: Instant,
    /// Its key in [`HalfOpens::by_due`].
    due: (Instant, u64),
}

/// The half-open connections, by flow and by the time at which their next SYN-ACK or their expiry is due.
#[derive(Debug)]
pub(super) struct HalfOpens {
    by_flow: KeyedMap<Flow, HalfOpen>,
    by_due: BTreeMap<(Instant, u64), Flow>,
    serial: u64,
    challenges: ChallengeBudget,
}

impl HalfOpens {
    /// An empty table. `secret` keys its hash.
    pub(super) fn new(secret: &Secret) -> Self {
        let by_flow = KeyedMap::with_hasher(KeyedHash::new(secret));
        Self { by_flow, by_due: BTreeMap::new(), serial: 0, challenges: ChallengeBudget::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.by_flow.len()
    }

    pub(super) fn holds(&self, flow: &Flow) -> bool {
        self.by_flow.contains_key(flow)
    }

    #[inline]
    pub(super) fn next(&self) -> Option<Instant> {
        // The table is nearly always empty, and a look-up in an empty map takes longer than this test.
        if self.by_due.is_empty() { None } else { self.first_due() }
    }

    #[cold]
    fn first_due(&self) -> Option<Instant> {
        self.by_due.keys().next().map(|key| key.0)
    }

    /// Sends further SYN-ACKs from the interface's new Ethernet address.
    pub(super) fn source_mac_changed(&mut self, mac: Mac) {
        for half in self.by_flow.values_mut() {
            half.syn.destination_mac = mac;
        }
    }

    fn insert(&mut self, mut half: HalfOpen, due: Instant) {
        self.serial += 1;
        half.due = (due, self.serial);
        self.by_due.insert(half.due, half.syn.flow);
        self.by_flow.insert(half.syn.flow, half);
    }

    pub(super) fn remove(&mut self, flow: &Flow) -> Option<HalfOpen> {
        let half = self.by_flow.remove(flow)?;
        self.by_due.remove(&half.due);
        Some(half)
    }

    /// The flows that `which` selects, in the order in which they are due.
    fn flows_where(&self, which: impl Fn(&HalfOpen) -> bool) -> Vec<Flow> {
        let wanted = |flow: &&Flow| self.by_flow.get(*flow).is_some_and(&which);
        self.by_due.values().filter(wanted).copied().collect()
    }
}

/// The source of a connection in the handshake, which sends no data.
struct NoData;

impl Source for NoData {
    fn has_data(&self) -> bool {
        false
    }

    fn fill(&mut self, _offset: StreamOffset, _out: &mut FrameWriter<'_>) -> Filled {
        Filled::Nothing
    }
}

impl<U: Ulp> Stack<U> {
    /// Answers a SYN for `listener` and stores it. When the table is full, the entry whose SYN-ACK is due next is
    /// evicted. In a flood this is the oldest of the entries that were answered once, and an honest peer has confirmed
    /// by then.
    pub(super) fn open_half(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        syn: &Segment,
        listener: ListenerId,
    ) {
        let isn = self.isn.isn(now, &syn.flow);
        let half = HalfOpen { listener, syn: *syn, isn, since: now, sent: 0, sent_at: now, due: (now, 0) };
        if !self.rebuild(now, &half, syn).carries_segments() {
            self.counters.small_segments += 1;
            return self.answer_by_reset(syn);
        }
        if self.half_open.len() >= self.config.most_half_open
            && let Some(flow) = self.half_open.by_due.values().next().copied()
        {
            self.counters.half_open_evicted += 1;
            self.drop_half_open(link, &flow);
        }
        if link.steer(Steer::Flow(syn.flow)).is_err() {
            self.counters.steering_refused += 1;
            return;
        }
        self.counters.half_open += 1;
        self.answer_half(now, link, half);
    }

    /// Rebuilds the connection in its current state, with the path of `segment`.
    fn rebuild(&self, now: Instant, half: &HalfOpen, segment: &Segment) -> Connection {
        let mtu = self.listeners.get(&half.listener).map_or(0, |l| l.mtu);
        let path = path_of(segment, mtu);
        let mut tcp = Connection::accept(half.since, &self.tcp, path, &half.syn, half.isn);
        tcp.restore_syn_ack(half.sent, half.sent_at);
        self.adopt_path(now, &mut tcp);
        tcp
    }

    /// Sends or retransmits the SYN-ACK and schedules the next one.
    fn answer_half(&mut self, now: Instant, link: &mut dyn Link, mut half: HalfOpen) {
        let mut tcp = self.rebuild(now, &half, &half.syn);
        tcp.schedule_syn();
        self.send_answer(now, link, tcp);
        let wait = self.config.tcp.rto_initial.saturating_mul(1 << half.sent.min(16));
        (half.sent, half.sent_at) = (half.sent + 1, now);
        self.half_open.insert(half, now + wait);
    }

    /// Sends the answer of a connection that was rebuilt for one segment. Open connections have precedence: when only reserved
    /// frames are left, the answer counts as lost. Returns whether the connection is closed.
    fn send_answer(&mut self, now: Instant, link: &mut dyn Link, mut tcp: Connection) -> bool {
        if link.tx_available() > self.config.tcp.reserve_chunks as usize {
            tcp.transmit(now, link, &mut NoData, 2);
        }
        self.closed_tcp += tcp.counters();
        tcp.is_closed()
    }

    /// Processes a segment of a half-open flow. A segment that confirms the handshake turns the flow into a
    /// connection, which then receives this segment.
    pub(super) fn receive_half(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) {
        let Some(half) = self.half_open.by_flow.get(&segment.flow).copied() else { return };
        let confirms = segment.flags.ack
            && !segment.flags.syn
            && !segment.flags.rst
            && segment.ack == half.isn.seq.add(1)
            && segment.seq.at_or_after(half.syn.seq.add(1));
        if confirms {
            return self.promote(now, link, &half, segment);
        }
        let mut tcp = self.rebuild(now, &half, segment);
        // The connection that may follow does not know of this answer, so it promises no more than the SYN-ACK.
        tcp.keep_window();
        tcp.receive_one(now, link, segment);
        if tcp.owes_bare_ack() && !self.may_challenge(now) {
            tcp.drop_bare_ack();
        }
        if self.send_answer(now, link, tcp) {
            self.drop_half_open(link, &segment.flow);
        }
    }

    /// Spends one challenge ACK of the budget that half-open connections share.
    fn may_challenge(&mut self, now: Instant) -> bool {
        let period = self.config.tcp.challenge_period;
        let number = now.as_nanos() / (period.as_nanos() as u64).max(1);
        let extra = self.isn.draw(number, MAX_CHALLENGES / 3);
        self.half_open.challenges.spend(now, MAX_CHALLENGES / 3 + extra, period)
    }

    /// Turns a confirmed half-open connection into a connection. When the backlog has no room, the segment is
    /// ignored; a later segment of the peer, or its answer to our next SYN-ACK, may find room.
    fn promote(&mut self, now: Instant, link: &mut dyn Link, half: &HalfOpen, segment: &Segment) {
        self.make_room(link);
        if self.slots.len() >= self.config.most_connections || !self.reserve_backlog(now, half.listener) {
            self.counters.backlog_full += 1;
            return;
        }
        let tcp = self.rebuild(now, half, segment);
        self.half_open.remove(&segment.flow);
        self.insert_passive(now, tcp, half.listener);
    }

    fn drop_half_open(&mut self, link: &mut dyn Link, flow: &Flow) {
        if self.half_open.remove(flow).is_some() {
            self.unsteer_unless_used(link, *flow);
        }
    }

    /// Drops the half-open connections of a closed listener.
    pub(super) fn drop_half_open_of(&mut self, link: &mut dyn Link, listener: ListenerId) {
        let flows = self.half_open.flows_where(|half| half.listener == listener);
        for flow in flows {
            self.drop_half_open(link, &flow);
        }
    }

    /// Resets the half-open connections of the removed local address `ip`, as RFC 9293 section 3.10.5 requires in
    /// SYN-RECEIVED.
    pub(super) fn abort_halves_at(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        let flows = self.half_open.flows_where(|half| half.syn.flow.local.ip() == ip);
        for flow in flows {
            let Some(half) = self.half_open.remove(&flow) else { continue };
            let mut tcp = self.rebuild(now, &half, &half.syn);
            tcp.abort_with(CloseReason::AddressRemoved);
            self.send_answer(now, link, tcp);
            self.unsteer_unless_used(link, flow);
        }
    }

    /// Retransmits the SYN-ACKs that are due, and drops the half-open connections that have timed out.
    pub(super) fn half_open_timer(&mut self, now: Instant, link: &mut dyn Link) {
        while let Some((&(due, _), &flow)) = self.half_open.by_due.first_key_value() {
            if due > now {
                return;
            }
            let Some(half) = self.half_open.remove(&flow) else { return };
            let TcpConfig { syn_acks, syn_ack_timeout, .. } = self.config.tcp;
            if half.sent >= syn_acks || now.since(half.since) >= syn_ack_timeout {
                self.counters.half_open_expired += 1;
                self.unsteer_unless_used(link, flow);
            } else {
                self.answer_half(now, link, half);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_open_connection_is_small() {
        let bytes = size_of::<(Flow, HalfOpen)>() + size_of::<((Instant, u64), Flow)>();
        assert!(bytes <= 384, "{bytes} bytes");
    }
}
