//! The end of connections: it is reported to the upper layer and frees them, TIME-WAIT is bounded and yields to new
//! connections, and connections end when their interface or address is removed.

use std::{fmt, net::IpAddr};

use super::{ConnSlot, Stack, turns::Work};
use crate::{
    framing::either,
    link::{Link, Steer},
    tcp,
    time::Instant,
    ulp::{CloseReason, ConnId, Event, Ulp},
    wire::{Flow, Segment},
};

/// The part of a connection's end that was reported to the upper layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reported {
    Nothing,
    /// The peer's FIN.
    PeerClosed,
    /// [`Event::Closed`]. The slot stays only while TCP is in TIME-WAIT.
    Closed,
}

impl<P: Copy + fmt::Debug> ConnSlot<P> {
    /// Whether [`Stack::report`] may have something to report.
    fn has_news(&self) -> bool {
        self.tcp.has_ended()
            || self.tcp.peer_closed() && self.reported == Reported::Nothing
            || either!(&self.session => failed()).is_some()
    }

    fn is_unfinished(&self) -> bool {
        self.reported != Reported::Closed && self.tcp.state() != tcp::State::FinWait2
    }
}

impl<U: Ulp> Stack<U> {
    /// Reports pending events of the connection to the upper layer, frees the connection when TCP has closed, and
    /// updates its shares of the stack's memory. `closed` is the reason that TCP has just returned.
    pub(super) fn report_and_free(
        &mut self,
        link: &mut dyn Link,
        index: u32,
        closed: Option<CloseReason>,
        ulp: &mut U,
    ) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        if closed.is_some() || slot.has_news() {
            self.report(link, index, closed, ulp);
        }
        self.count_memory(index);
        let Some(slot) = self.slots.get(index as usize) else { return };
        if slot.reported == Reported::Closed && slot.tcp.is_closed() {
            self.remove(link, index);
        }
    }

    /// Reports the peer's FIN and the end of the connection to the upper layer, each once. Without a reason in
    /// `closed`, it takes one that TCP has not returned yet.
    fn report(&mut self, link: &mut dyn Link, index: u32, closed: Option<CloseReason>, ulp: &mut U) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let conn = ConnId { index, generation: slot.generation };
        if slot.reported == Reported::Nothing
            && slot.tcp.peer_closed()
            && !either!(&slot.session => holds_undelivered())
        {
            slot.reported = Reported::PeerClosed;
            either!(&mut slot.session => peer_closed(ulp, conn, link));
        }
        if let Some(error) = either!(&slot.session => failed())
            && slot.reported != Reported::Closed
        {
            // After a failed start-up there is no message that the peer would understand, only a reset.
            slot.tcp.abort_with(CloseReason::Startup(error));
        }
        if let Some(reason) = closed.or_else(|| slot.tcp.take_close_reason()) {
            slot.reported = Reported::Closed;
            either!(&mut slot.session => release(link));
            let waits = slot.tcp.state() == tcp::State::TimeWait;
            self.leave_backlog(index);
            ulp.event(conn, Event::Closed(reason));
            if waits {
                self.time_waiting.push_back(conn);
                self.bound_time_wait(link, self.config.most_time_wait);
            }
        }
    }

    pub(super) fn remove(&mut self, link: &mut dyn Link, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.tcp.release(link);
        either!(&mut slot.session => release(link));
        self.count_memory(index);
        let Some(slot) = self.slots.try_remove(index as usize) else { return };
        self.turns.set(index, Work::Nothing);
        self.lookups.remove(&index);
        self.timers.remove(index);
        self.closed_tcp += slot.tcp.counters();
        self.closed_framing += either!(&slot.session => counters());
        let flow = slot.tcp.flow();
        self.flows.remove(&flow);
        self.recent.forget();
        self.unsteer_unless_used(link, flow);
    }

    /// Removes the steering rule of `flow`, unless an open or half-open connection of this four-tuple still needs it.
    pub(super) fn unsteer_unless_used(&self, link: &mut dyn Link, flow: Flow) {
        if !self.has_connection(&flow) && !self.half_open.holds(&flow) {
            link.unsteer(Steer::Flow(flow));
        }
    }

    /// Removes a connection in TIME-WAIT when `segment` is a SYN that may replace it (RFC 9293 section 3.10.7.4).
    pub(super) fn replace_time_wait(&mut self, link: &mut dyn Link, segment: &Segment) {
        if !segment.flags.syn {
            return;
        }
        let Some(&index) = self.flows.get(&segment.flow) else { return };
        let replaceable = |s: &ConnSlot<_>| s.reported == Reported::Closed && s.tcp.replaceable_by(segment);
        if self.slots.get(index as usize).is_some_and(|slot| replaceable(slot)) {
            self.remove(link, index);
        }
    }

    /// Removes the oldest connections in TIME-WAIT until at most `most` remain.
    pub(super) fn bound_time_wait(&mut self, link: &mut dyn Link, most: usize) {
        while self.time_waiting.len() > most {
            let Some(conn) = self.time_waiting.pop_front() else { return };
            let waits =
                |s: &ConnSlot<_>| s.generation == conn.generation && s.tcp.state() == tcp::State::TimeWait;
            if self.slots.get(conn.index as usize).is_some_and(|slot| waits(slot)) {
                self.counters.time_wait_cut += 1;
                self.remove(link, conn.index);
            }
        }
    }

    /// Removes connections in TIME-WAIT, oldest first, while the connection table is full.
    pub(super) fn make_room(&mut self, link: &mut dyn Link) {
        while self.slots.len() >= self.config.most_connections && !self.time_waiting.is_empty() {
            self.bound_time_wait(link, self.time_waiting.len() - 1);
        }
    }

    /// Announces that the upper layer will close `conn` by `Pulled::Finish` as soon as its data is sent. From now on
    /// the connection ends when the peer accepts no data for the user timeout, even if it answers window probes.
    pub fn close_when_sent(&mut self, conn: ConnId) {
        if let Some(slot) = self.slot(conn) {
            slot.tcp.close_when_sent();
            self.make_ready(conn.index);
        }
    }

    /// Resets all open and half-open connections of the local address `ip`, which the interface has lost.
    pub fn address_removed(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        self.abort_halves_at(now, link, ip);
        for (_, slot) in self.slots.iter_mut().filter(|(_, slot)| slot.tcp.flow().local.ip() == ip) {
            // Their output is held, because the kernel has no route from the address.
            slot.tcp.release_output();
        }
        self.abort_where(CloseReason::AddressRemoved, |slot| slot.tcp.flow().local.ip() == ip);
    }

    /// Ends every connection after the interface was removed, without a RST, which could not be sent. The next
    /// [`Stack::transmit`] reports the events.
    pub fn interface_removed(&mut self) {
        let indices: Vec<u32> = self.slots.iter().map(|(key, _)| key as u32).collect();
        for index in indices {
            if let Some(slot) = self.slots.get_mut(index as usize) {
                slot.tcp.interface_removed();
                self.make_ready(index);
            }
        }
    }

    /// Number of connections with unfinished work: not closed, and neither in FIN-WAIT-2 (the peer has acknowledged
    /// our FIN and keeps its own direction open) nor in TIME-WAIT.
    pub fn unfinished_connections(&self) -> usize {
        self.slots.iter().filter(|(_, slot)| slot.is_unfinished()).count()
    }

    /// Aborts the connections that [`Stack::unfinished_connections`] counts; the next [`Stack::transmit`] sends their
    /// resets.
    pub fn abort_unfinished(&mut self) {
        self.abort_where(CloseReason::Aborted, ConnSlot::is_unfinished);
    }

    fn abort_where(&mut self, reason: CloseReason, which: impl Fn(&ConnSlot<U::Placed>) -> bool) {
        let indices: Vec<u32> =
            self.slots.iter().filter(|(_, slot)| which(slot)).map(|(key, _)| key as u32).collect();
        for index in indices {
            if let Some(slot) = self.slots.get_mut(index as usize) {
                slot.tcp.abort_with(reason);
                self.make_ready(index);
            }
        }
    }
}
