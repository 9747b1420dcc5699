//! Connections that a SYN asked for and nobody has confirmed: a bounded cache of SYNs (RFC 4987 section 3.5).
//!
//! A passive connection before its ACK is a pure function of the SYN, the initial sequence number and the time, so this is
//! all that is kept: the [`Connection`] is made for each segment of the handshake and thrown away, until one
//! completes it. Why no cookies: `docs/decisions/0007-half-open-connections-are-their-syns.md`.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use super::{Stack, listen::path_of};
use crate::{
    link::{FrameWriter, Link, Steer},
    seq::{SeqNum, StreamOffset},
    tcp::{Connection, Filled, Source},
    time::{Duration, Instant},
    ulp::{ListenerId, Ulp},
    wire::{Flow, Segment},
};

/// SYN-ACKs sent for one SYN, if nothing answers: at once and after 1, 3 and 7 s (RFC 6298 section 2.1 and rule 5.5).
const MOST_SYN_ACKS: u32 = 4;

/// One SYN: 376 bytes with its places in the two maps.
#[derive(Debug, Clone, Copy)]
struct HalfOpen {
    listener: ListenerId,
    syn: Segment,
    isn: SeqNum,
    /// When the SYN came: timestamps count from it.
    since: Instant,
    /// SYN-ACKs sent, and when last.
    sent: u32,
    sent_at: Instant,
    /// Its place in the order of what is due.
    due: (Instant, u64),
}

/// The SYNs, by flow and by when something is due for them.
#[derive(Debug, Default)]
pub(super) struct HalfOpens {
    by_flow: HashMap<Flow, HalfOpen>,
    by_due: BTreeMap<(Instant, u64), Flow>,
    serial: u64,
}

impl HalfOpens {
    pub(super) fn len(&self) -> usize {
        self.by_flow.len()
    }

    pub(super) fn holds(&self, flow: &Flow) -> bool {
        self.by_flow.contains_key(flow)
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.by_due.keys().next().map(|key| key.0)
    }

    fn insert(&mut self, mut half: HalfOpen, due: Instant) {
        self.serial += 1;
        half.due = (due, self.serial);
        self.by_due.insert(half.due, half.syn.flow);
        self.by_flow.insert(half.syn.flow, half);
    }

    fn take(&mut self, flow: &Flow) -> Option<HalfOpen> {
        let half = self.by_flow.remove(flow)?;
        self.by_due.remove(&half.due);
        Some(half)
    }
}

/// A connection in the handshake sends no data.
struct NoData;

impl Source for NoData {
    fn fill(&mut self, _offset: StreamOffset, _out: &mut FrameWriter<'_>) -> Filled {
        Filled::Nothing
    }
}

impl<U: Ulp> Stack<U> {
    /// A SYN for `listener`: answered, and remembered. When too many are, that is forgotten whose turn to be repeated is
    /// next, which is the oldest of those that were answered once: an honest peer has confirmed by then.
    pub(super) fn open_half(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        syn: &Segment,
        listener: ListenerId,
    ) {
        if self.half_open.len() >= self.config.most_half_open
            && let Some(flow) = self.half_open.by_due.values().next().copied()
        {
            self.counters.half_open_evicted += 1;
            self.forget_half(link, &flow);
        }
        if link.steer(Steer::Flow(syn.flow)).is_err() {
            self.counters.steering_refused += 1;
            return;
        }
        self.counters.half_open += 1;
        let isn = self.isn.isn(now, &syn.flow);
        let half = HalfOpen { listener, syn: *syn, isn, since: now, sent: 0, sent_at: now, due: (now, 0) };
        self.answer_half(now, link, half);
    }

    /// The connection as it stands.
    fn awaken(&self, now: Instant, half: &HalfOpen, segment: &Segment) -> Connection {
        let mtu = self.listeners.get(half.listener.0 as usize).map_or(0, |l| l.mtu);
        let path = path_of(segment, mtu);
        let mut tcp = Connection::accept(half.since, &self.tcp, path, &half.syn, half.isn);
        tcp.syn_ack_was_sent(half.sent, half.sent_at);
        self.adopt_path(now, &mut tcp);
        tcp
    }

    /// Sends the SYN-ACK (again) and waits. Connections that are open have the first right to frames: without one, the
    /// SYN-ACK counts as lost.
    fn answer_half(&mut self, now: Instant, link: &mut dyn Link, mut half: HalfOpen) {
        if link.tx_available() > self.config.tcp.reserve_frames as usize {
            let mut tcp = self.awaken(now, &half, &half.syn);
            tcp.repeat_syn();
            self.finish_awake(now, link, tcp);
        }
        let wait = self.config.tcp.rto_initial.saturating_mul(1 << half.sent.min(16));
        (half.sent, half.sent_at) = (half.sent + 1, now);
        self.half_open.insert(half, now + wait);
    }

    /// Lets a connection that was made for one segment send its answer. Returns whether it is over.
    fn finish_awake(&mut self, now: Instant, link: &mut dyn Link, mut tcp: Connection) -> bool {
        tcp.transmit(now, link, &mut NoData, 2);
        self.closed_tcp += tcp.counters();
        tcp.is_closed()
    }

    /// A segment of a flow that is half open. When it confirms the handshake, there is a connection afterwards, whose
    /// segment this is.
    pub(super) fn receive_half(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) {
        let Some(half) = self.half_open.by_flow.get(&segment.flow).copied() else { return };
        let confirms = segment.flags.ack
            && !segment.flags.syn
            && !segment.flags.rst
            && segment.ack == half.isn.add(1)
            && segment.seq.at_or_after(half.syn.seq.add(1));
        if confirms {
            return self.promote(now, link, &half, segment);
        }
        let mut tcp = self.awaken(now, &half, segment);
        tcp.receive(now, link, segment);
        if self.finish_awake(now, link, tcp) {
            self.forget_half(link, &segment.flow);
        }
    }

    /// The peer exists. Where the listener has no room, the segment is ignored; the peer's next one, or its answer to our
    /// next SYN-ACK, finds room perhaps.
    fn promote(&mut self, now: Instant, link: &mut dyn Link, half: &HalfOpen, segment: &Segment) {
        self.make_room(link);
        if self.slots.len() >= self.config.most_connections || !self.enter_backlog(half.listener) {
            self.counters.backlog_full += 1;
            return;
        }
        let tcp = self.awaken(now, half, segment);
        self.half_open.take(&segment.flow);
        self.insert_passive(now, tcp, half.listener);
    }

    fn forget_half(&mut self, link: &mut dyn Link, flow: &Flow) {
        if self.half_open.take(flow).is_some() {
            link.unsteer(Steer::Flow(*flow));
        }
    }

    /// A listener is gone, and what was on the way to it.
    pub(super) fn forget_halves_of(&mut self, link: &mut dyn Link, listener: ListenerId) {
        let halves = self.half_open.by_flow.values().filter(|half| half.listener == listener);
        let flows: Vec<Flow> = halves.map(|half| half.syn.flow).collect();
        for flow in flows {
            self.forget_half(link, &flow);
        }
    }

    /// The local address `ip` is gone, and so is what was on the way to it: reset, as RFC 9293 section 3.10.5 has it for
    /// SYN-RECEIVED.
    pub(super) fn abort_halves_at(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        let flows: Vec<Flow> =
            self.half_open.by_flow.keys().filter(|flow| flow.local.ip() == ip).copied().collect();
        for flow in flows {
            let Some(half) = self.half_open.take(&flow) else { continue };
            let mut tcp = self.awaken(now, &half, &half.syn);
            tcp.abort();
            self.finish_awake(now, link, tcp);
            link.unsteer(Steer::Flow(flow));
        }
    }

    /// Repeats SYN-ACKs, and forgets those that nobody answers.
    pub(super) fn half_open_timer(&mut self, now: Instant, link: &mut dyn Link) {
        while let Some((&(due, _), &flow)) = self.half_open.by_due.first_key_value() {
            if due > now {
                return;
            }
            let Some(half) = self.half_open.take(&flow) else { return };
            let patience = self.config.tcp.connect_timeout.min(Duration::from_mins(3));
            if half.sent >= MOST_SYN_ACKS || now.since(half.since) >= patience {
                self.counters.half_open_expired += 1;
                link.unsteer(Steer::Flow(flow));
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
