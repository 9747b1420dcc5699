//! [`Interface`]: what a device needs of a network interface beyond moving frames. The AF_XDP driver is
//! adapted to it behind the feature `af-xdp`, the in-memory wire behind the feature `sim`, and an
//! application may bring its own.

use std::{
    any::Any,
    fmt, io,
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
    time::Duration,
};

use xwarp_tcp::{
    link::{Link, QueueId},
    wire::{Flow, Mac, Path, VlanTags},
};

/// How frames cross between the network and us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransferMode {
    /// The network card reads and writes our frames itself.
    ZeroCopy,
    /// The kernel copies each frame once.
    Copy,
    /// The kernel makes a socket buffer of each frame first; works on every interface.
    Generic,
    /// There is no kernel: frames are handed over in memory.
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

/// What an interface is, as of now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceAttributes {
    /// The kernel's name of it.
    pub name: String,
    /// The kernel's index of it.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Largest IP packet in bytes that connections may use.
    pub mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Its addresses, shared with the kernel.
    pub addresses: Vec<IpAddr>,
    /// How frames cross.
    pub mode: TransferMode,
    /// Receive queues that are served.
    pub queues: u16,
}

/// Something about the interface is not as it was; [`Interface::attributes`] has the new state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum InterfaceChange {
    /// It went up or down, or its carrier did.
    Carrier {
        /// Whether it can carry frames now.
        up: bool,
    },
    /// It has one more address.
    AddressAdded(IpAddr),
    /// An address is no longer its own: connections from it end.
    AddressRemoved(IpAddr),
    /// Its largest IP packet has these bytes now.
    Mtu(u16),
    /// A next hop has another Ethernet address.
    NextHop {
        /// The address until now.
        old: Mac,
        /// The address from now on.
        new: Mac,
    },
    /// It is gone, or no longer ours: nothing will be received any more.
    Removed,
}

/// The way to a peer: everything of a [`Path`] but the ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Our address towards it.
    pub source: IpAddr,
    /// Ethernet address that our frames carry.
    pub source_mac: Mac,
    /// Ethernet address of the next hop.
    pub next_hop_mac: Mac,
    /// Tags that our frames carry.
    pub vlan: VlanTags,
    /// Largest IP packet on the way, in bytes.
    pub mtu: u16,
    /// Queues on which frames may leave: a connection takes one by its ports.
    pub queues: u16,
}

impl Route {
    /// The path of the connection from `port` to `peer`.
    pub fn path(&self, port: u16, peer: SocketAddr) -> Path {
        Path {
            flow: Flow { local: SocketAddr::new(self.source, port), remote: peer },
            source_mac: self.source_mac,
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
    /// The address cannot be reached through this interface, or cannot be used; the text says why and
    /// what to do.
    #[error("{0}")]
    Address(String),
    /// The network says that nobody is there.
    #[error("{0}")]
    Unreachable(String),
    /// Not known within the time limit.
    #[error("{0}")]
    TimedOut(String),
}

/// A port that is ours until this is dropped; the kernel gives it to nobody else.
pub struct PortReservation {
    /// The port.
    pub port: u16,
    /// What holds it.
    _guard: Box<dyn Any + Send + Sync>,
}

impl PortReservation {
    /// `port`, held as long as `guard` lives.
    pub fn new(port: u16, guard: impl Any + Send + Sync) -> Self {
        Self { port, _guard: Box::new(guard) }
    }
}

impl fmt::Debug for PortReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortReservation").field("port", &self.port).finish_non_exhaustive()
    }
}

/// Routes, neighbours and ports: the part of an interface that works without holding it, from any thread.
pub trait Resolver: Send + Sync {
    /// The way to `destination`, from `source` or from an address of the interface's choice. Waits for
    /// the next hop's Ethernet address at most `limit`; zero means: only what is known already.
    fn resolve(
        &self,
        destination: IpAddr,
        source: Option<IpAddr>,
        limit: Duration,
    ) -> Result<Route, RouteError>;

    /// Takes `port` (0: a free one) of `address` (`None`: of all addresses of both families).
    fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> io::Result<PortReservation>;
}

/// A network interface with its surroundings.
pub trait Interface: Link {
    /// What it is, as of now.
    fn attributes(&self) -> InterfaceAttributes;

    /// Descriptors of which at least one is readable while frames or [changes](Self::change) wait. They
    /// are duplicates: the progress thread polls them without holding the interface.
    fn readiness(&self) -> io::Result<Vec<OwnedFd>>;

    /// Routes, neighbours and ports.
    fn resolver(&self) -> Arc<dyn Resolver>;

    /// The next change since the last call, if any.
    fn change(&mut self) -> Option<InterfaceChange>;

    /// Tells every counter of the interface by its stable name.
    fn counters(&self, tell: &mut dyn FnMut(&'static str, u64));
}
