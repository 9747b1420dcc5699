//! Listeners, and segments that belong to no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).

use std::net::IpAddr;

use super::{ListenError, MOST_RESETS, Stack};
use crate::{
    link::{Link, Steer},
    mpa::{MpaConfig, Session},
    tcp::Connection,
    time::Instant,
    ulp::{ListenerId, Ulp},
    wire::{Path, Segment},
};

/// A port that takes connections.
#[derive(Debug)]
pub(super) struct Listener {
    addr: Option<IpAddr>,
    port: u16,
    /// Most connections that may be in start-up or wait for the application.
    backlog: usize,
    pending: usize,
    mpa: MpaConfig,
    /// Largest IP packet of the interface, for the path of what comes in.
    pub(super) mtu: u16,
}

impl Listener {
    fn takes(&self, ip: IpAddr, port: u16) -> bool {
        self.port == port && self.addr.is_none_or(|a| a == ip)
    }
}

impl<U: Ulp> Stack<U> {
    /// Takes connections to `port` of `addr` (`None`: of every address of the interface). `mtu` is the
    /// interface's: the path of a connection that comes in starts with it.
    pub fn listen(
        &mut self,
        link: &mut dyn Link,
        addr: Option<IpAddr>,
        port: u16,
        backlog: usize,
        mtu: u16,
        mpa: MpaConfig,
    ) -> Result<ListenerId, ListenError> {
        if self.listeners.iter().any(|(_, l)| l.port == port && l.addr == addr) {
            return Err(ListenError::AddressInUse);
        }
        self.fit_window(link);
        link.steer(Steer::Listener { addr, port })?;
        let listener = Listener { addr, port, backlog: backlog.max(1), pending: 0, mpa, mtu };
        Ok(ListenerId(self.listeners.insert(listener) as u32))
    }

    /// Takes no more connections. Those in start-up go on; the caller may abort them.
    pub fn unlisten(&mut self, link: &mut dyn Link, id: ListenerId) {
        if let Some(listener) = self.listeners.try_remove(id.0 as usize) {
            link.unsteer(Steer::Listener { addr: listener.addr, port: listener.port });
            for (_, slot) in &mut self.slots {
                slot.pending_at = slot.pending_at.filter(|l| *l != id);
            }
            self.forget_halves_of(link, id);
        }
    }

    /// A connection leaves its listener's backlog: answered, or gone.
    pub(super) fn no_longer_pending(&mut self, index: u32) {
        let listener = self.slots.get_mut(index as usize).and_then(|slot| slot.pending_at.take());
        if let Some(listener) = listener.and_then(|id| self.listeners.get_mut(id.0 as usize)) {
            listener.pending = listener.pending.saturating_sub(1);
        }
    }

    pub(super) fn receive_unknown(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) {
        let (ip, port) = (segment.flow.local.ip(), segment.flow.local.port());
        // An exact address goes before the wildcard.
        let listener = self
            .listeners
            .iter()
            .filter(|(_, l)| l.takes(ip, port))
            .max_by_key(|(_, l)| l.addr.is_some())
            .map(|(key, _)| key);
        match listener {
            Some(key) if segment.flags.is_plain_syn() => self.open_passive(now, link, segment, key),
            _ => {
                self.counters.no_connection += 1;
                if !segment.flags.rst && self.resets.len() < MOST_RESETS {
                    self.resets.push_back(*segment);
                }
            }
        }
    }

    fn open_passive(&mut self, now: Instant, link: &mut dyn Link, syn: &Segment, key: usize) {
        self.make_room(link);
        let full = self.slots.len() >= self.config.most_connections;
        let Some(listener) = self.listeners.get_mut(key) else { return };
        if full || listener.pending >= listener.backlog {
            self.counters.backlog_full += 1;
            return;
        }
        self.open_half(now, link, syn, ListenerId(key as u32));
    }

    /// Counts one more connection in start-up, if the listener is there and allows it.
    pub(super) fn enter_backlog(&mut self, id: ListenerId) -> bool {
        let Some(listener) = self.listeners.get_mut(id.0 as usize) else { return false };
        let free = listener.pending < listener.backlog;
        listener.pending += usize::from(free);
        free
    }

    /// A connection that came to `id` is open: MPA begins.
    pub(super) fn insert_passive(&mut self, now: Instant, tcp: Connection, id: ListenerId) {
        let Some(listener) = self.listeners.get(id.0 as usize) else { return };
        let mpa = Session::responder(now, listener.mpa.clone(), id);
        self.counters.passive_opens += 1;
        self.insert(tcp.flow(), tcp, mpa, Some(id));
    }
}

/// The path back to the sender of a segment, over an interface that carries packets of `mtu` bytes.
pub(super) fn path_of(segment: &Segment, mtu: u16) -> Path {
    Path {
        flow: segment.flow,
        source_mac: segment.destination_mac,
        next_hop_mac: segment.source_mac,
        vlan: segment.vlan,
        mtu,
        queue: segment.queue,
    }
}
