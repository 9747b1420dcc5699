//! Identifiers (`rdma_cm_id`) and their state.

use std::{
    ffi::{c_int, c_void},
    net::SocketAddr,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::errno::Errno;
use xwarp_verbs::{
    CloseReason,
    cm::{CmId, EventKind},
};

use super::{
    channel::{Channel, Lane},
    event::{CmEvent, acknowledge},
    parking,
    rsocket::{PRIVATE_BYTES, opens_rsocket},
};
use crate::{
    abi::{
        cm::{PS_IB, PS_IPOIB, PS_TCP, PS_UDP, event, rdma_cm_id},
        queue::{QPT_RC, qp_state},
    },
    boundary::{self, CPart, Handle, Object as _, Out, object, zeroed},
    failure::{self, minus_one},
    sleep::{Attempt, Next, cancellable, uncancelled, wait},
    verbs::{context::Context, qp::Qp},
    wait::{Unacknowledged, lock},
};

/// The state of an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Idle,
    Resolving,
    AddressResolved,
    RouteResolved,
    Listening,
    Requested,
    Connecting,
    Connected,
    /// Disconnected, or never connected.
    Ended,
}

/// An identifier of ours on one device.
pub struct End {
    pub lane: Arc<Lane>,
    pub cm: CmId,
}

/// The attributes with which a passive endpoint creates a queue pair for each connection.
#[derive(Clone, Copy)]
pub struct QpTemplate(pub Handle<crate::verbs::memory::Pd>, pub crate::abi::queue::ibv_qp_init_attr);

/// The mutable state of an identifier.
pub struct Inner {
    pub stage: Stage,
    pub channel: Arc<Channel>,
    /// The program has given no channel: calls wait for their events.
    pub is_sync: bool,
    /// Calls wait even when the descriptor is non-blocking.
    is_rsocket: bool,
    /// One, or one for each device while the identifier is bound to a wildcard address.
    pub ends: Vec<End>,
    pub qp: Weak<Qp>,
    /// For a request: the `responder_resources` and `initiator_depth` that the peer requested.
    pub depths: [u16; 2],
    /// The event that the last synchronous call waited for.
    event: Option<Handle<CmEvent>>,
    pub dscp: Option<u8>,
    pub sharing: Sharing,
}

impl Inner {
    /// Drops the identifiers on devices for which `keeps` is false.
    pub fn drop_ends(&mut self, keeps: impl Fn(&End) -> bool) {
        self.ends.retain(|end| {
            let kept = keeps(end);
            if !kept {
                end.lane.remove(end.cm.key());
            }
            kept
        });
    }
}

/// An identifier's address, and the rules for sharing it with other identifiers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sharing {
    /// The program's address, with the assigned port.
    pub bound: Option<SocketAddr>,
    /// `RDMA_OPTION_ID_REUSEADDR`.
    pub reuses: bool,
    /// `RDMA_OPTION_ID_AFONLY`: a wildcard address stands for its own family only.
    pub only_family: bool,
}

impl Sharing {
    /// Whether an identifier with this address excludes another one with `other`, as in the kernel's connection
    /// manager. Only one of the identifiers that share an address may listen.
    pub fn excludes(&self, is_listening: bool, other: &Self) -> Result<(), Errno> {
        let (Some(own), Some(new)) = (self.bound, other.bound) else { return Ok(()) };
        let shares = self.reuses && other.reuses && !is_listening;
        let apart = self.only_family && other.only_family && own.is_ipv4() != new.is_ipv4();
        if own.port() != new.port() || shares || apart {
            Ok(())
        } else if own.ip().is_unspecified() || new.ip().is_unspecified() {
            Err(Errno::EADDRNOTAVAIL)
        } else if own.ip() == new.ip() {
            Err(Errno::EADDRINUSE)
        } else {
            Ok(())
        }
    }
}

/// Which events of an identifier are reported to the program. Asked before an event is queued, because an event that is queued
/// makes the channel's descriptor readable, and then `rdma_get_cm_event` must not wait.
#[derive(Default)]
pub struct Reports {
    /// The end of the connection was queued.
    end: AtomicBool,
    /// The identifier is bound to a wildcard address, and so on no interface.
    wildcard: AtomicBool,
}

impl Reports {
    pub fn wants(&self, kind: &EventKind) -> bool {
        match kind {
            EventKind::Closed(CloseReason::InterfaceRemoved) | EventKind::MacChanged => {
                !self.wildcard.load(Ordering::Relaxed)
            }
            EventKind::Disconnected | EventKind::Closed(_) => self.ends(),
            EventKind::Streaming
            | EventKind::StreamRequest(_)
            | EventKind::StreamReadable
            | EventKind::MpaRequest { .. } => false,
            _ => true,
        }
    }

    /// Whether the end of the connection is to be reported: once, as a kernel does.
    fn ends(&self) -> bool {
        !self.end.swap(true, Ordering::Relaxed)
    }

    /// Records whether the identifier is bound to a wildcard address.
    pub fn set_wildcard(&self, is_wildcard: bool) {
        self.wildcard.store(is_wildcard, Ordering::Relaxed);
    }
}

/// An identifier.
#[repr(C)]
pub struct Id {
    pub c: CPart<rdma_cm_id>,
    /// Lies behind `c`.
    _private: [u8; PRIVATE_BYTES],
    pub inner: Mutex<Inner>,
    pub reports: Arc<Reports>,
    pub unacknowledged: Unacknowledged,
    pub template: CPart<Option<QpTemplate>>,
}

object!(Id: rdma_cm_id);

impl Id {
    pub fn new(channel: &Arc<Channel>, is_sync: bool, context: *mut c_void, ps: c_int) -> Arc<Self> {
        let mut c: rdma_cm_id = zeroed();
        (c.context, c.ps, c.qp_type) = (context, ps, QPT_RC);
        c.channel = channel.c_ptr();
        let inner = Inner {
            stage: Stage::Idle,
            channel: Arc::clone(channel),
            is_sync,
            is_rsocket: opens_rsocket(),
            ends: Vec::new(),
            qp: Weak::new(),
            depths: [0; 2],
            event: None,
            dscp: None,
            sharing: Sharing::default(),
        };
        let id = Arc::new(Self {
            c: CPart::new(c),
            _private: [0; PRIVATE_BYTES],
            inner: Mutex::new(inner),
            reports: Arc::default(),
            unacknowledged: Unacknowledged::default(),
            template: CPart::new(None),
        });
        Handle::publish(Arc::clone(&id));
        id
    }

    /// The identifier of a peer's request, on the channel and with the program's pointer of its listener.
    pub fn of_request(
        channel: &Arc<Channel>,
        lane: &Lane,
        listener: &Arc<Self>,
        cm: CmId,
        [local, peer]: [SocketAddr; 2],
        depths: [u16; 2],
    ) -> Option<Arc<Self>> {
        let (context, ps) = listener.c.update(|c| (c.context, c.ps));
        let id = Self::new(channel, false, context, ps);
        let lane = channel.lane(&lane.context).ok()?;
        id.c.update(|c| {
            c.route.addr.src = boundary::address(local);
            c.route.addr.dst = boundary::address(peer);
        });
        lane.add(cm.key(), &id);
        let mut inner = lock(&id.inner);
        inner.stage = Stage::Requested;
        inner.depths = depths;
        id.bind_to(&lane.context);
        inner.ends.push(End { lane, cm });
        drop(inner);
        Some(id)
    }

    /// Stores the identifier's device in the C structure.
    pub fn bind_to(&self, context: &Arc<Context>) {
        let pd = context.default_pd().map_or(std::ptr::null_mut(), |pd| pd.c_ptr());
        self.c.update(|c| {
            c.verbs = context.c_ptr();
            c.port_num = 1;
            if c.pd.is_null() {
                c.pd = pd;
            }
        });
    }

    /// Adds an identifier of ours on a device.
    pub fn add_end(self: &Arc<Self>, inner: &mut Inner, context: &Arc<Context>) -> Result<(), Errno> {
        let lane = inner.channel.lane(context)?;
        let cm = CmId::new(&context.card.device, &lane.events);
        if let Some(dscp) = inner.dscp {
            super::options::tune(&cm, dscp)?;
        }
        lane.add(cm.key(), self);
        inner.ends.push(End { lane, cm });
        Ok(())
    }

    pub fn set_stage(&self, stage: Stage) {
        lock(&self.inner).stage = stage;
    }

    pub fn qp(&self) -> Option<Arc<Qp>> {
        lock(&self.inner).qp.upgrade()
    }

    /// The address was resolved: stores both addresses in the C structure.
    pub fn resolved(&self) {
        let mut inner = lock(&self.inner);
        inner.stage = Stage::AddressResolved;
        self.show_addresses(&inner);
    }

    /// Stores the connection manager's addresses in the C structure.
    pub fn show_addresses(&self, inner: &Inner) {
        let [end, ..] = &inner.ends[..] else { return };
        let (local, peer) = (end.cm.local_address(), end.cm.peer_address());
        self.c.update(|c| {
            if let Some(local) = local {
                c.route.addr.src = boundary::address(local);
            }
            if let Some(peer) = peer {
                c.route.addr.dst = boundary::address(peer);
            }
        });
        self.bind_to(&end.lane.context);
    }

    pub fn established(&self) {
        let mut inner = lock(&self.inner);
        inner.stage = Stage::Connected;
        self.show_addresses(&inner);
        if let Some(qp) = inner.qp.upgrade() {
            qp.set_state(qp_state::RTS);
        }
    }

    /// The queue pair was destroyed, and its connection with it, which reports no event: the program gets its
    /// `DISCONNECTED` event here.
    pub fn queue_pair_gone(self: &Arc<Self>) {
        let mut inner = lock(&self.inner);
        if inner.stage == Stage::Connected && !inner.is_sync && self.reports.ends() {
            inner.stage = Stage::Ended;
            inner.channel.push_ended(self);
        }
    }

    /// Disconnects at the end of the process.
    pub fn hang_up(&self) {
        if let Ok(inner) = self.inner.try_lock() {
            for end in &inner.ends {
                let _ = end.cm.disconnect();
            }
        }
    }

    /// A synchronous call waits for its event, whose failure is the call's.
    pub fn complete(&self) -> Result<(), Errno> {
        wait(|| self.completed())
    }

    /// Whether a synchronous call has its event, or how to wait for it. A call for an rsocket waits even when the program has made the
    /// descriptor non-blocking.
    fn completed(&self) -> Result<Next<()>, Errno> {
        let always = lock(&self.inner).is_rsocket;
        let found = match self.next_event(always)? {
            None => return Ok(Next::Found(())),
            Some(Next::Sleep(units)) => return Ok(Next::Sleep(units)),
            Some(Next::Found(found)) => found,
        };
        match (found.kind(), found.status()) {
            (event::REJECTED, _) => Err(Errno::ECONNREFUSED),
            (_, 0) => Ok(Next::Found(())),
            (_, status) => Err(Errno::from_raw(status.abs())),
        }
    }

    /// The next event of a synchronous identifier, which keeps it until the next call that waits; `None` for an asynchronous one.
    /// `always`: waits for it even when the program has made the descriptor non-blocking.
    pub fn next_event(&self, always: bool) -> Result<Option<Next<Arc<CmEvent>>>, Errno> {
        let channel = {
            let mut inner = lock(&self.inner);
            if !inner.is_sync {
                return Ok(None);
            }
            self.forget_event(&mut inner);
            Arc::clone(&inner.channel)
        };
        let next = channel.next(always)?;
        if let Next::Found(found) = &next {
            let handle = Handle::publish(Arc::clone(found));
            lock(&self.inner).event = Some(handle);
            self.c.update(|c| c.event = handle.as_ptr());
        }
        Ok(Some(next))
    }

    fn forget_event(&self, inner: &mut Inner) {
        if let Some(event) = inner.event.take() {
            let _ = acknowledge(event);
            self.c.update(|c| c.event = std::ptr::null_mut());
        }
    }

    /// Takes over the listener's event, which is that of this request: its private data lives until the next call that waits.
    pub fn take_event(&self, listener: &Self) {
        lock(&self.inner).is_rsocket = lock(&listener.inner).is_rsocket;
        let event = lock(&listener.inner).event.take();
        listener.c.update(|c| c.event = std::ptr::null_mut());
        self.c.update(|c| c.event = event.map_or(std::ptr::null_mut(), Handle::as_ptr));
        lock(&self.inner).event = event;
    }

    /// Moves the identifier to a channel; without one, to one of its own.
    fn migrate(self: &Arc<Self>, to: Option<Arc<Channel>>) -> Result<(), Errno> {
        let is_sync = to.is_none();
        let to = to.map_or_else(Channel::new, Ok)?;
        let mut inner = lock(&self.inner);
        self.forget_event(&mut inner);
        for end in &mut inner.ends {
            let lane = to.lane(&end.lane.context)?;
            // Programs also move an identifier to the channel that it is on (libfabric).
            if Arc::ptr_eq(&lane, &end.lane) {
                continue;
            }
            lane.add(end.cm.key(), self);
            end.cm.migrate(&lane.events);
            end.lane.remove(end.cm.key());
            end.lane = lane;
        }
        if !Arc::ptr_eq(&inner.channel, &to) && inner.channel.forget_ended(self) {
            to.push_ended(self);
        }
        self.c.update(|c| c.channel = to.c_ptr());
        (inner.channel, inner.is_sync) = (to, is_sync);
        Ok(())
    }
}

/// Ends an identifier, then waits until its events are acknowledged. Events that the program has not read leave the channel
/// before: its descriptor is not readable for them while this waits.
pub fn destroy(id: Handle<Id>) -> Result<(), Errno> {
    let id = id.withdraw()?;
    let (ends, stage, sharing, channel) = {
        let mut inner = lock(&id.inner);
        id.forget_event(&mut inner);
        (std::mem::take(&mut inner.ends), inner.stage, inner.sharing, Arc::clone(&inner.channel))
    };
    for end in ends {
        end.lane.remove(end.cm.key());
        if stage == Stage::Listening {
            parking::park(end, sharing.only_family);
        }
    }
    channel.forget_ended(&id);
    id.unacknowledged.drain();
    Ok(())
}

/// Begins a step of an identifier. Returns -1 with `errno`, or whether [`finish`] has to wait for the event of the step, as for a
/// synchronous identifier. An asynchronous one may be gone when this returns: another thread of the program may have read the
/// events of the step, and destroyed the identifier.
pub fn begin(id: Handle<Id>, step: impl FnOnce(&Arc<Id>) -> Result<(), Errno>) -> c_int {
    failure::count(uncancelled(|| {
        let id = id.object()?;
        let is_sync = lock(&id.inner).is_sync;
        step(&id).map(|()| is_sync.into())
    }))
}

/// The rest of a call whose step has begun with the result `begun`: waits for the event of a synchronous identifier.
pub fn finish(begun: c_int, id: Handle<Id>) -> c_int {
    if begun > 0 { cancellable(|_| try_complete(id)) } else { begun }
}

extern "C" fn try_complete(id: Handle<Id>) -> Attempt {
    Attempt::of(|| {
        id.object().and_then(|id| {
            // The frames of the distribution's rsockets below ours may not be unwound.
            let is_rsocket = lock(&id.inner).is_rsocket;
            if is_rsocket { id.complete().map(Next::Found) } else { id.completed() }
        })
    })
}

pub extern "C" fn rdma_create_id(
    channel: Handle<Channel>,
    out: Out<*mut rdma_cm_id>,
    context: *mut c_void,
    ps: c_int,
) -> c_int {
    if out.is_null() {
        return minus_one(Err(Errno::EINVAL));
    }
    minus_one(uncancelled(|| create(channel, context, ps)).and_then(|id| out.write(id.c_ptr())))
}

/// A new identifier, on `channel` or on one of its own.
pub fn create(channel: Handle<Channel>, context: *mut c_void, ps: c_int) -> Result<Arc<Id>, Errno> {
    match ps {
        PS_TCP => {}
        // Datagrams need UD, and InfiniBand's own services its addresses.
        PS_IPOIB | PS_UDP | PS_IB => return Err(Errno::EPROTONOSUPPORT),
        _ => return Err(Errno::EINVAL),
    }
    let is_sync = channel.is_null();
    let channel = if is_sync { Channel::new()? } else { channel.object()? };
    Ok(Id::new(&channel, is_sync, context, ps))
}

pub extern "C" fn rdma_destroy_id(id: Handle<Id>) -> c_int {
    minus_one(uncancelled(|| destroy(id)))
}

pub extern "C" fn rdma_migrate_id(id: Handle<Id>, channel: Handle<Channel>) -> c_int {
    let migrate = || {
        let to = if channel.is_null() { None } else { Some(channel.object()?) };
        id.object()?.migrate(to)
    };
    failure::minus_one(migrate())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As when a thread of the program accepts a request, and another one meanwhile reads the events up to DISCONNECTED and destroys
    /// the identifier.
    #[test]
    fn an_identifier_may_be_destroyed_before_the_call_that_has_begun_its_step_returns() {
        let channel = Channel::new().unwrap();
        let id = Handle::<Id>::of(Id::new(&channel, false, std::ptr::null_mut(), PS_TCP).c_ptr());
        let begun = begin(id, |_| destroy(id));
        assert_eq!(finish(begun, id), 0);
        assert_eq!(begin(id, |_| Ok(())), -1);
    }
}
