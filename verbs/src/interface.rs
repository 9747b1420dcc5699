//! [`Interface`]: the services that a device needs from a network interface in addition to sending and receiving
//! frames. The AF_XDP driver implements it with the feature `af-xdp`, the in-memory wire with the feature `sim`, and
//! applications may implement it themselves.

use std::{
    any::Any,
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use xwarp_tcp::link::QueueId;
pub use xwarp_tcp::{
    link::{Kick, Link},
    stack::NextHop,
    wire::{Flow, Mac, Path, VlanTags},
};

/// The path of frames between the network and us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransferMode {
    /// The NIC reads and writes our frames by DMA.
    ZeroCopy,
    /// The kernel copies each frame once.
    Copy,
    /// The kernel first makes a socket buffer of each frame; works on every interface.
    Generic,
    /// Frames are passed in memory, without a kernel.
    Memory,
}

impl fmt::Display for TransferMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy",
            Self::Generic => "generic",
            Self::Memory => "memory",
        })
    }
}

/// The current state of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAttributes {
    /// Its name in the kernel.
    pub name: String,
    /// Whether it belongs to the helper `xwarpd`, which shares it among processes; otherwise this process owns it.
    pub shared: bool,
    /// Its index in the kernel.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Largest IP packet in bytes that connections may use.
    pub mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Its addresses, shared with the kernel.
    pub addresses: Vec<IpAddr>,
    /// The path of frames between the network and us.
    pub mode: TransferMode,
    /// Receive queues that have a socket.
    pub queues: u16,
}

/// A change of the interface; [`Interface::attributes`] has the new state.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterfaceChange {
    /// It went up or down, or its carrier appeared or disappeared.
    Carrier {
        /// Whether it can carry frames now.
        up: bool,
    },
    /// It has a new address.
    AddressAdded(IpAddr),
    /// It lost an address; the connections from this address end.
    AddressRemoved(IpAddr),
    /// Its MTU changed, in bytes of IP packet.
    Mtu(u16),
    /// Its Ethernet address changed.
    Mac(Mac),
    /// The Ethernet addresses of these neighbours are known or changed.
    Neighbours(BTreeMap<IpAddr, Mac>),
    /// The kernel has given up a neighbour, which did not answer.
    NeighbourLost(IpAddr),
    /// Some route or rule changed: connections may have other next hops now.
    Routes,
    /// It was removed and no longer carries frames.
    Removed {
        /// Why, for people.
        cause: String,
    },
}

/// The route to a peer: a [`Path`] without the ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Our address towards the peer.
    pub source: IpAddr,
    /// Ethernet address that our frames carry.
    pub source_mac: Mac,
    /// IP address of the next hop: a gateway's, or the peer's own.
    pub next_hop: IpAddr,
    /// Ethernet address of the next hop.
    pub next_hop_mac: Mac,
    /// Tags that our frames carry.
    pub vlan: VlanTags,
    /// Largest IP packet on the way, in bytes.
    pub mtu: u16,
    /// Number of queues. The ports choose the queue on which the connection's first frames leave.
    pub queues: u16,
}

impl Route {
    /// The path of the connection from `port` to `peer`. A scope id of `peer` is left out: frames carry none, so a
    /// flow with one would match no received segment.
    pub fn path(&self, port: u16, peer: SocketAddr) -> Path {
        let remote = SocketAddr::new(peer.ip(), peer.port());
        Path {
            flow: Flow { local: SocketAddr::new(self.source, port), remote },
            source_mac: self.source_mac,
            next_hop: Some(self.next_hop),
            next_hop_mac: self.next_hop_mac,
            vlan: self.vlan,
            mtu: self.mtu,
            queue: QueueId((port ^ peer.port()) % self.queues.max(1)),
        }
    }
}

/// Why there is no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// The address cannot be reached through this interface, or cannot be used; the text names the reason and a remedy.
    #[error("{0}")]
    Address(String),
    /// The next hop does not answer, or the network reports the peer as unreachable.
    #[error("{0}")]
    Unreachable(String),
    /// The time limit passed before the next hop was resolved.
    #[error("{0}")]
    TimedOut(String),
}

/// A TCP port that the kernel reserves for us until this is dropped.
pub struct PortReservation {
    /// The port.
    pub port: u16,
    /// Keeps the reservation.
    _guard: Box<dyn Any + Send + Sync>,
}

impl PortReservation {
    /// A reservation of `port` that lasts as long as `guard`.
    pub fn new(port: u16, guard: impl Any + Send + Sync) -> Self {
        Self { port, _guard: Box::new(guard) }
    }
}

impl fmt::Debug for PortReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortReservation").field("port", &self.port).finish_non_exhaustive()
    }
}

/// Routes, neighbours and ports: the part of an interface that any thread can use without the engine's lock.
pub trait Resolver: Send + Sync {
    /// The route to `peer`, from `source` or from the address that the kernel prefers. Waits at most `limit` for
    /// the next hop's Ethernet address; with zero it must be known already.
    fn resolve(&self, peer: SocketAddr, source: Option<IpAddr>, limit: Duration)
    -> Result<Route, RouteError>;

    /// Whether the peer's segments of `flow` arrive at the part of the interface that has this resolver, as far as that is known: of
    /// an interface with several engines, each has a part of the queues, and a NIC chooses the queue by the four-tuple.
    fn arrives_here(&self, flow: &Flow) -> bool {
        let _ = flow;
        true
    }

    /// Reserves `port` (0: any free one) on `address` (`None`: on all addresses of both families).
    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation>;
}

/// A network interface: its frames, attributes, changes, routes and neighbours.
pub trait Interface: Link {
    /// Its current state.
    fn attributes(&self) -> InterfaceAttributes;

    /// Descriptors of which at least one is readable while frames or [changes](Self::change) wait. They are
    /// duplicates, so that the progress thread polls them without the engine's lock.
    fn readiness(&self) -> io::Result<Vec<OwnedFd>>;

    /// Routes, neighbours and ports.
    fn resolver(&self) -> Arc<dyn Resolver>;

    /// Takes over the kicks: from now on [`Link::flush`] only requests them, and the caller serves the requests after it
    /// has released the engine's lock. `None` for an interface that sends without a system call.
    fn kicker(&mut self) -> Option<Arc<dyn Kick>> {
        None
    }

    /// The next change since the last call, if any.
    fn change(&mut self) -> Option<InterfaceChange>;

    /// The next hop from `flow.local` to `flow.remote` by the current routes, and its Ethernet address if the kernel
    /// knows it; otherwise an [`InterfaceChange::Neighbours`] follows. `unanswered`: the peer does not answer, so the
    /// kernel is asked to confirm the neighbour. `None` if it is not known, so that the connection keeps its next hop.
    fn next_hop(&mut self, flow: &Flow, unanswered: bool) -> Option<NextHop> {
        let _ = (flow, unanswered);
        None
    }

    /// Whether frames wait that no [descriptor](Self::readiness) announces, so that no thread may sleep.
    fn has_frames(&self) -> bool {
        false
    }

    /// Calls `tell` with the stable name and the value of every counter.
    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64));
}

/// Implements the named methods of [`Interface`] by those of a field, in the `impl` block of an interface around another
/// one; [`forward_link!`](xwarp_tcp::forward_link) does it for its [`Link`].
#[macro_export]
macro_rules! forward_interface {
    ($inner:tt: $($method:ident),+ $(,)?) => {
        $($crate::forward_interface!(@$method $inner);)+
    };
    (@attributes $inner:tt) => {
        fn attributes(&self) -> $crate::interface::InterfaceAttributes {
            self.$inner.attributes()
        }
    };
    (@readiness $inner:tt) => {
        fn readiness(&self) -> ::std::io::Result<Vec<::std::os::fd::OwnedFd>> {
            self.$inner.readiness()
        }
    };
    (@resolver $inner:tt) => {
        fn resolver(&self) -> ::std::sync::Arc<dyn $crate::interface::Resolver> {
            self.$inner.resolver()
        }
    };
    (@kicker $inner:tt) => {
        fn kicker(&mut self) -> Option<::std::sync::Arc<dyn $crate::interface::Kick>> {
            self.$inner.kicker()
        }
    };
    (@change $inner:tt) => {
        fn change(&mut self) -> Option<$crate::interface::InterfaceChange> {
            self.$inner.change()
        }
    };
    (@next_hop $inner:tt) => {
        fn next_hop(
            &mut self,
            flow: &$crate::interface::Flow,
            unanswered: bool,
        ) -> Option<$crate::interface::NextHop> {
            self.$inner.next_hop(flow, unanswered)
        }
    };
    (@counters $inner:tt) => {
        fn counters(&self, tell: &mut dyn FnMut(&'static str, u64)) {
            self.$inner.counters(tell);
        }
    };
}
