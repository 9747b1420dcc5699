//! From addresses to devices: binding, and resolving addresses and routes.

use std::{
    ffi::c_int,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::errno::Errno;
use xwarp_verbs::fabric::host_number;

use super::{
    id::{self, Id, Inner, Sharing, Stage},
    parking,
};
use crate::{
    abi::{cm::sockaddr, device::ibv_context},
    boundary::{self, Handle, In, Object as _, Out},
    config::config,
    failure::{self, minus_one},
    sleep::uncancelled,
    verbs::{
        context::Context,
        device::{self, Port, free_list, ports},
    },
    wait::lock,
};

/// The connection manager's contexts, one for each device that it has opened.
static CONTEXTS: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());

/// The connection manager's context on a device.
fn context(port: &Arc<Port>) -> Result<Arc<Context>, Errno> {
    let mut contexts = lock(&CONTEXTS);
    contexts
        .retain(|context| context.card.device.failure().is_none() || !Arc::ptr_eq(&context.card.port, port));
    if let Some(context) = contexts.iter().find(|context| Arc::ptr_eq(&context.card.port, port)) {
        return Ok(Arc::clone(context));
    }
    let context = Context::open(port)?;
    contexts.push(Arc::clone(&context));
    Ok(context)
}

/// The contexts of all devices that can be opened.
fn all_contexts() -> Result<Vec<Arc<Context>>, Errno> {
    let mut last = Errno::ENODEV;
    let mut contexts = Vec::new();
    for port in ports()? {
        match context(&port) {
            Ok(context) => contexts.push(context),
            Err(error) => last = error,
        }
    }
    if contexts.is_empty() { Err(last) } else { Ok(contexts) }
}

/// The device that has an address.
fn context_at(address: IpAddr) -> Result<Arc<Context>, Errno> {
    let Some(port) = ports()?.into_iter().find(|port| port.has(address)) else {
        return Err(if is_local(address) { Errno::ENODEV } else { Errno::EADDRNOTAVAIL });
    };
    context(&port)
}

/// The address that a program's address stands for. No device has a loopback address: it stands for the first address of the first
/// device, so that programs that bind to `localhost` or connect to it find a device. The hosts of a fabric
/// have addresses of the loopback network, which stand for themselves.
fn on_device(address: SocketAddr) -> Result<SocketAddr, Errno> {
    if !address.ip().is_loopback() || host_number(address.ip()).is_some() {
        return Ok(address);
    }
    let of_family = |port: &Arc<Port>| port.address(address.is_ipv4());
    let found = ports()?.iter().find_map(of_family).ok_or(Errno::ENODEV)?;
    Ok(SocketAddr::new(found, address.port()))
}

/// Whether an interface of this host has the address.
fn is_local(address: IpAddr) -> bool {
    let bound = UdpSocket::bind(SocketAddr::new(address, 0));
    !bound.is_err_and(|error| error.kind() == std::io::ErrorKind::AddrNotAvailable)
}

/// The address from which the kernel would send to `peer`.
fn source_for(peer: SocketAddr) -> Result<IpAddr, Errno> {
    let any: SocketAddr = if peer.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let mut to = peer;
    to.set_port(peer.port().max(1));
    let local = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(to)?;
        socket.local_addr()
    });
    local.map(|local| local.ip()).map_err(|error| failure::io(&error))
}

/// The device from which a peer is reached: by the kernel's routes, or the only one of a fabric.
fn context_towards(peer: SocketAddr) -> Result<Arc<Context>, Errno> {
    match &config().fabric {
        Some(fabric) => context(&device::of_fabric(fabric)?),
        None => context_at(source_for(peer)?),
    }
}

/// Held while an identifier compares its address with those of others.
static BINDING: Mutex<()> = Mutex::new(());

/// Attempts to find a port that is free on all devices.
const PORT_ATTEMPTS: usize = 16;

impl Id {
    /// Binds to an address: to one device, or for a wildcard to each.
    pub fn bind(self: &Arc<Self>, address: SocketAddr) -> Result<(), Errno> {
        let address = on_device(address)?;
        let _binding = lock(&BINDING);
        let sharing = Sharing { bound: Some(address), ..lock(&self.inner).sharing };
        self.compare(&sharing)?;
        let mut inner = lock(&self.inner);
        if inner.stage != Stage::Idle || !inner.ends.is_empty() {
            return Err(Errno::EINVAL);
        }
        let contexts =
            if address.ip().is_unspecified() { all_contexts()? } else { vec![context_at(address.ip())?] };
        let mut bound = Err(Errno::EADDRINUSE);
        for _ in 0..PORT_ATTEMPTS {
            bound = self.bind_ends(&mut inner, &contexts, address);
            if bound.is_ok() {
                break;
            }
            inner.drop_ends(|_| false);
            // The port that the first device chose is taken on another one.
            if bound != Err(Errno::EADDRINUSE) || address.port() != 0 || contexts.len() < 2 {
                break;
            }
        }
        bound
    }

    /// Checks that this identifier may have the address of `sharing` beside all others.
    fn compare(self: &Arc<Self>, sharing: &Sharing) -> Result<(), Errno> {
        if sharing.bound.is_none_or(|address| address.port() == 0) {
            return Ok(());
        }
        let others = boundary::objects::<Self>();
        others.iter().filter(|other| !Arc::ptr_eq(other, self)).try_for_each(|other| {
            let (own, is_listening) = {
                let inner = lock(&other.inner);
                (inner.sharing, inner.stage == Stage::Listening)
            };
            own.excludes(is_listening, sharing)
        })
    }

    /// Checks that no other identifier shares the address of this one, which is about to listen.
    pub fn claim(self: &Arc<Self>) -> Result<(), Errno> {
        let _binding = lock(&BINDING);
        let sharing = lock(&self.inner).sharing;
        self.compare(&Sharing { reuses: false, ..sharing })
    }

    fn bind_ends(
        self: &Arc<Self>,
        inner: &mut Inner,
        contexts: &[Arc<Context>],
        address: SocketAddr,
    ) -> Result<(), Errno> {
        let mut address = address;
        self.reports.set_wildcard(address.ip().is_unspecified());
        for context in contexts {
            self.add_end(inner, context)?;
            let Some(end) = inner.ends.last() else { continue };
            if address.ip().is_unspecified() {
                parking::close_covered(&context.card, address.port());
            }
            end.cm.bind(address).map_err(|error| failure::cm(&error))?;
            // All devices share the port that the first one got.
            if let Some(local) = end.cm.local_address() {
                address.set_port(local.port());
            }
        }
        inner.sharing.bound = Some(address);
        self.c.update(|c| c.route.addr.src = boundary::address(address));
        if !address.ip().is_unspecified()
            && let [context] = contexts
        {
            self.bind_to(context);
        }
        Ok(())
    }

    fn resolve(
        self: &Arc<Self>,
        source: Option<SocketAddr>,
        peer: SocketAddr,
        limit: Duration,
    ) -> Result<(), Errno> {
        if let Some(source) = source.filter(|source| !source.ip().is_unspecified() || source.port() != 0)
            && lock(&self.inner).ends.is_empty()
        {
            self.bind(source)?;
        }
        let peer = on_device(peer)?;
        let mut inner = lock(&self.inner);
        if inner.stage != Stage::Idle {
            return Err(Errno::EINVAL);
        }
        if inner.ends.len() != 1 {
            let context = context_towards(peer)?;
            if inner.ends.is_empty() {
                self.add_end(&mut inner, &context)?;
            } else {
                inner.drop_ends(|end| Arc::ptr_eq(&end.lane.context, &context));
            }
        }
        self.reports.set_wildcard(false);
        let [end] = &inner.ends[..] else { return Err(Errno::ENETUNREACH) };
        end.cm.resolve_address(peer, limit).map_err(|error| failure::cm(&error))?;
        inner.stage = Stage::Resolving;
        self.c.update(|c| c.route.addr.dst = boundary::address(peer));
        Ok(())
    }
}

pub extern "C" fn rdma_bind_addr(id: Handle<Id>, address: In<sockaddr>) -> c_int {
    minus_one(uncancelled(|| bind(id, address)))
}

pub fn bind(id: Handle<Id>, address: In<sockaddr>) -> Result<(), Errno> {
    let address = boundary::read_address(address).ok_or(Errno::EINVAL)?;
    id.object()?.bind(address)
}

fn milliseconds(limit: c_int) -> Duration {
    Duration::from_millis(u64::try_from(limit).unwrap_or(0))
}

pub extern "C-unwind" fn rdma_resolve_addr(
    id: Handle<Id>,
    source: In<sockaddr>,
    peer: In<sockaddr>,
    limit_ms: c_int,
) -> c_int {
    id::finish(begin_resolve(id, source, peer, limit_ms), id)
}

extern "C" fn begin_resolve(
    id: Handle<Id>,
    source: In<sockaddr>,
    peer: In<sockaddr>,
    limit_ms: c_int,
) -> c_int {
    id::begin(id, |id| resolve_address(id, source, peer, limit_ms))
}

/// Begins to resolve an address; the caller completes the step.
pub fn resolve_address(
    id: &Arc<Id>,
    source: In<sockaddr>,
    peer: In<sockaddr>,
    limit_ms: c_int,
) -> Result<(), Errno> {
    let peer = boundary::read_address(peer).ok_or(Errno::EINVAL)?;
    id.resolve(boundary::read_address(source), peer, milliseconds(limit_ms))
}

/// With iWARP the route is known with the address.
pub extern "C-unwind" fn rdma_resolve_route(id: Handle<Id>, _limit_ms: c_int) -> c_int {
    id::finish(begin_route(id), id)
}

extern "C" fn begin_route(id: Handle<Id>) -> c_int {
    id::begin(id, |id| resolve_route(id))
}

/// Begins to resolve a route; the caller completes the step.
pub fn resolve_route(id: &Id) -> Result<(), Errno> {
    let inner = lock(&id.inner);
    let [end] = &inner.ends[..] else { return Err(Errno::EINVAL) };
    end.cm.resolve_route().map_err(|error| failure::cm(&error))
}

pub extern "C" fn rdma_get_devices(number: Out<c_int>) -> *mut *mut ibv_context {
    number.write_if_wanted(0);
    match uncancelled(all_contexts) {
        Ok(contexts) => {
            number.write_if_wanted(c_int::try_from(contexts.len()).unwrap_or(c_int::MAX));
            device::list(&contexts.iter().map(|context| context.c_ptr()).collect::<Vec<_>>())
        }
        Err(error) => {
            error.set();
            std::ptr::null_mut()
        }
    }
}

pub extern "C" fn rdma_free_devices(devices: *mut *mut ibv_context) {
    free_list(devices);
}
