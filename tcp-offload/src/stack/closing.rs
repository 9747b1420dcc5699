//! The end of connections: TIME-WAIT is bounded and yields to new connections, and connections end when their
//! interface or address is removed.

use std::net::IpAddr;

use super::{ConnSlot, Stack};
use crate::{
    link::Link,
    tcp,
    time::Instant,
    ulp::{CloseReason, ConnId, Ulp},
    wire::Segment,
};

/// What was reported of a connection's end to the upper layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reported {
    Nothing,
    /// The peer's FIN.
    PeerClosed,
    /// [`Event::Closed`](crate::ulp::Event::Closed). The slot stays only while TCP is in TIME-WAIT.
    Closed,
}

impl<P> ConnSlot<P> {
    fn is_unfinished(&self) -> bool {
        self.reported != Reported::Closed && self.tcp.state() != tcp::State::FinWait2
    }
}

impl<U: Ulp> Stack<U> {
    /// Removes a connection in TIME-WAIT when `segment` is a SYN that may replace it (RFC 9293 section 3.10.7.4).
    pub(super) fn replace_time_wait(&mut self, link: &mut dyn Link, segment: &Segment) {
        if !segment.flags.syn {
            return;
        }
        let Some(&index) = self.flows.get(&segment.flow) else { return };
        let replaceable = |s: &ConnSlot<_>| s.reported == Reported::Closed && s.tcp.replaceable_by(segment);
        if self.slots.get(index as usize).is_some_and(replaceable) {
            self.remove(link, index);
        }
    }

    /// Removes the oldest connections in TIME-WAIT until at most `most` remain.
    pub(super) fn bound_time_wait(&mut self, link: &mut dyn Link, most: usize) {
        while self.time_waiting.len() > most {
            let Some(conn) = self.time_waiting.pop_front() else { return };
            let waits =
                |s: &ConnSlot<_>| s.generation == conn.generation && s.tcp.state() == tcp::State::TimeWait;
            if self.slots.get(conn.index as usize).is_some_and(waits) {
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
