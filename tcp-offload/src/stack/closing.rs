//! Connections on their way out: TIME-WAIT is bounded, and gives way to a new connection; those that a device or an
//! address takes along are reset.

use std::net::IpAddr;

use super::{Slot, Stack};
use crate::{link::Link, tcp, time::Instant, ulp::Ulp, wire::Segment};

impl<P> Slot<P> {
    fn is_unfinished(&self) -> bool {
        !self.told_closed && self.tcp.state() != tcp::State::FinWait2
    }
}

impl<U: Ulp> Stack<U> {
    /// A SYN may end the TIME-WAIT of the connection before it (RFC 9293 section 3.10.7.4).
    pub(super) fn make_way_for_syn(&mut self, link: &mut dyn Link, segment: &Segment) {
        if !segment.flags.syn {
            return;
        }
        let Some(&index) = self.flows.get(&segment.flow) else { return };
        if self.slots.get(index as usize).is_some_and(|s| s.tcp.replaceable_by(segment)) {
            self.remove(link, index);
        }
    }

    /// Ends the oldest connections in TIME-WAIT until there are at most `most`.
    pub(super) fn bound_time_wait(&mut self, link: &mut dyn Link, most: usize) {
        while self.time_waiting.len() > most {
            let Some(conn) = self.time_waiting.pop_front() else { return };
            let waits =
                |s: &Slot<_>| s.generation == conn.generation && s.tcp.state() == tcp::State::TimeWait;
            if self.slots.get(conn.index as usize).is_some_and(waits) {
                self.counters.time_wait_cut += 1;
                self.remove(link, conn.index);
            }
        }
    }

    /// When the table of connections is full, those that only wait make room.
    pub(super) fn make_room(&mut self, link: &mut dyn Link) {
        while self.slots.len() >= self.config.most_connections && !self.time_waiting.is_empty() {
            self.bound_time_wait(link, self.time_waiting.len() - 1);
        }
    }

    /// The interface lost the address `ip`: its connections end, those that are half open too.
    pub fn address_removed(&mut self, now: Instant, link: &mut dyn Link, ip: IpAddr) {
        self.abort_halves_at(now, link, ip);
        self.abort_where(|slot| slot.tcp.flow().local.ip() == ip);
    }

    /// How many connections still have something to say: data or a FIN that is not acknowledged. A peer that
    /// has all of ours and keeps its own direction open does not count, nor does TIME-WAIT.
    pub fn unfinished_connections(&self) -> usize {
        self.slots.iter().filter(|(_, slot)| slot.is_unfinished()).count()
    }

    /// Resets the connections that still have something to say; [`Stack::transmit`] tells their peers.
    pub fn abort_unfinished(&mut self) {
        self.abort_where(Slot::is_unfinished);
    }

    fn abort_where(&mut self, which: impl Fn(&Slot<U::Placed>) -> bool) {
        let indices: Vec<u32> =
            self.slots.iter().filter(|(_, slot)| which(slot)).map(|(key, _)| key as u32).collect();
        for index in indices {
            if let Some(slot) = self.slots.get_mut(index as usize) {
                slot.tcp.abort();
                self.make_ready(index);
            }
        }
    }
}
