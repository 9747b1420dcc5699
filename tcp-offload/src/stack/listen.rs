//! Listeners, and segments that belong to no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).

use std::{collections::BTreeMap, net::IpAddr};

use super::{ListenError, Stack};
use crate::{
    framing::{AnySession, FramingConfig, either},
    link::{Link, Steer},
    tcp::Connection,
    time::{Duration, Instant},
    ulp::{ConnId, ListenerId, Ulp},
    wire::{Path, Segment},
};

/// Time within which an honest peer sends its MPA Request after the ACK that ends the handshake. When the backlog is
/// full, a connection that stays silent for longer is evicted for a newer one.
///
/// The initiator need not wait for an answer to that ACK, so the limit contains no round trip: xwarp sends both in
/// one segment, siw within a system call. 20 ms leave time for a busy peer; to keep a backlog of 128 full, an
/// attacker then needs 6400 handshakes a second.
const SILENCE_ALLOWED: Duration = Duration::from_millis(20);

/// A listening port with its backlog.
#[derive(Debug)]
pub(super) struct Listener {
    addr: Option<IpAddr>,
    port: u16,
    /// Largest number of connections that wait for their MPA Request or for the application.
    backlog: usize,
    /// Connections whose MPA Request has not arrived: table index and opening time by [`ConnId::generation`], oldest
    /// first.
    silent: BTreeMap<u64, (u32, Instant)>,
    /// Connections whose MPA Request waits for the application's answer.
    requests: usize,
    framing: FramingConfig,
    /// Largest IP packet of the interface, in bytes: the initial MTU of accepted connections.
    pub(super) mtu: u16,
}

/// The place of one connection in a listener's backlog.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pending {
    pub(super) listener: ListenerId,
    /// The MPA Request of the connection has arrived.
    pub(super) requested: bool,
}

impl Listener {
    pub(super) fn accepts(&self, ip: IpAddr, port: u16) -> bool {
        let covers = |a: IpAddr| if a.is_unspecified() { a.is_ipv4() == ip.is_ipv4() } else { a == ip };
        self.port == port && self.addr.is_none_or(covers)
    }

    /// The specificity of the listener's address: the most specific listener that accepts a segment receives it.
    pub(super) fn precision(&self) -> u8 {
        match self.addr {
            None => 0,
            Some(addr) if addr.is_unspecified() => 1,
            Some(_) => 2,
        }
    }

    /// The steering rule, which listeners may share: that of a wildcard is for both families.
    fn rule(&self) -> Steer {
        rule_of(self.addr, self.port)
    }

    /// Whether the backlog has a free place or a silent connection that can be evicted.
    fn has_room(&self, now: Instant) -> bool {
        self.requests + self.silent.len() < self.backlog || self.oldest_silent(now).is_some()
    }

    /// The connection that has been silent for longest, if for longer than [`SILENCE_ALLOWED`].
    fn oldest_silent(&self, now: Instant) -> Option<ConnId> {
        let (&generation, &(index, opened)) = self.silent.first_key_value()?;
        (now.since(opened) > SILENCE_ALLOWED).then_some(ConnId { index, generation })
    }
}

fn rule_of(addr: Option<IpAddr>, port: u16) -> Steer {
    Steer::Listener { addr: addr.filter(|addr| !addr.is_unspecified()), port }
}

impl<U: Ulp> Stack<U> {
    /// Accepts connections to `port` of `addr`. `None` stands for every address of the interface, the unspecified address
    /// of a family for every address of that family. `mtu` is the interface's MTU in bytes, with which the path of an accepted
    /// connection starts.
    pub fn listen(
        &mut self,
        link: &mut dyn Link,
        addr: Option<IpAddr>,
        port: u16,
        backlog: usize,
        mtu: u16,
        framing: impl Into<FramingConfig>,
    ) -> Result<ListenerId, ListenError> {
        if self.listeners.values().any(|l| l.port == port && l.addr == addr) {
            return Err(ListenError::AddressInUse);
        }
        let framing = framing.into();
        if matches!(&framing, FramingConfig::Either(mpa, _) if mpa.streaming.is_some()) {
            return Err(ListenError::StreamingBeforeEither);
        }
        self.fit_window(link);
        link.steer(rule_of(addr, port))?;
        let backlog = backlog.max(1);
        let listener = Listener { addr, port, backlog, silent: BTreeMap::new(), requests: 0, framing, mtu };
        let id = ListenerId(self.next_listener);
        self.next_listener += 1;
        self.listeners.insert(id, listener);
        Ok(id)
    }

    /// Closes the listener. Its half-open connections are dropped; those in MPA start-up continue, and the caller may
    /// abort them.
    pub fn unlisten(&mut self, link: &mut dyn Link, id: ListenerId) {
        if let Some(listener) = self.listeners.remove(&id) {
            let rule = listener.rule();
            if !self.listeners.values().any(|other| other.rule() == rule) {
                link.unsteer(rule);
            }
            for (_, slot) in &mut self.slots {
                slot.pending = slot.pending.filter(|p| p.listener != id);
            }
            self.drop_half_open_of(link, id);
        }
    }

    /// Moves connection `index` from the silent connections of its backlog to the requests, once its MPA Request has
    /// arrived.
    pub(super) fn note_request(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let awaited = either!(&slot.session => is_silent());
        if let Some(pending) = slot.pending.as_mut().filter(|p| !p.requested && !awaited) {
            pending.requested = true;
            if let Some(listener) = self.listeners.get_mut(&pending.listener) {
                listener.requests += usize::from(listener.silent.remove(&slot.generation).is_some());
            }
        }
    }

    /// Removes connection `index` from its listener's backlog, when it was answered or has ended.
    pub(super) fn leave_backlog(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let (Some(pending), generation) = (slot.pending.take(), slot.generation) else { return };
        let Some(listener) = self.listeners.get_mut(&pending.listener) else { return };
        if pending.requested {
            listener.requests = listener.requests.saturating_sub(1);
        } else {
            listener.silent.remove(&generation);
        }
    }

    pub(super) fn open_passive(&mut self, now: Instant, link: &mut dyn Link, syn: &Segment, id: ListenerId) {
        self.make_room(link);
        let full = self.slots.len() >= self.config.most_connections;
        if full || !self.listeners.get(&id).is_some_and(|l| l.has_room(now)) {
            self.counters.backlog_full += 1;
            return;
        }
        self.open_half(now, link, syn, id);
    }

    /// Makes room for one more connection in the backlog of `id`, by evicting a silent connection if necessary.
    /// Returns whether there is room.
    pub(super) fn reserve_backlog(&mut self, now: Instant, id: ListenerId) -> bool {
        let Some(listener) = self.listeners.get(&id) else { return false };
        if listener.requests + listener.silent.len() < listener.backlog {
            return true;
        }
        let Some(oldest) = listener.oldest_silent(now) else { return false };
        self.counters.startup_evicted += 1;
        self.leave_backlog(oldest.index);
        self.abort(oldest);
        true
    }

    /// Inserts an open connection that was accepted by listener `id`, and starts its session.
    pub(super) fn insert_passive(&mut self, now: Instant, tcp: Connection, id: ListenerId) {
        let random = self.random();
        let Some(listener) = self.listeners.get(&id) else { return };
        let session = AnySession::responder(now, listener.framing.clone(), random, id);
        self.counters.passive_opens += 1;
        let pending = Pending { listener: id, requested: false };
        let conn = self.insert(tcp.flow(), tcp, session, Some(pending));
        if let Some(listener) = self.listeners.get_mut(&id) {
            listener.silent.insert(conn.generation, (conn.index, now));
        }
    }
}

/// The path back to the sender of a segment, over an interface that carries packets of `mtu` bytes.
pub(super) fn path_of(segment: &Segment, mtu: u16) -> Path {
    Path {
        flow: segment.flow,
        source_mac: segment.destination_mac,
        next_hop: None,
        next_hop_mac: segment.source_mac,
        vlan: segment.vlan,
        mtu,
        queue: segment.queue,
    }
}
