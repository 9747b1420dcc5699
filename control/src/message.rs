//! The messages.

use std::fmt;
use std::net::IpAddr;

use xwarp_tcp::wire::Mac;

/// Version of the protocol. Client and helper must have the same version.
pub const VERSION: u16 = 3;

/// Largest message in bytes.
pub const MAX_BYTES: usize = 2048;

/// Largest number of addresses in [`Device::addresses`]; the others follow as [`Event::AddressAdded`].
pub const MAX_ADDRESSES: usize = 64;

/// Largest number of counters in a [`Description`].
pub const MAX_COUNTERS: usize = 32;

/// A request or a reply with the number that joins them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tagged<T> {
    /// Chosen by the client.
    pub id: u32,
    /// The message.
    pub body: T,
}

/// The interface that a client requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// The one with this name.
    Name(String),
    /// The one that has this address.
    Address(IpAddr),
}

/// Sizes of frame memory and rings, chosen by the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Receive chunks of 4096 bytes.
    pub receive_chunks: u32,
    /// Transmit chunks.
    pub transmit_chunks: u32,
    /// Descriptors of the transmit ring, a power of two.
    pub ring: u32,
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The first message.
    Hello {
        /// The client's [`VERSION`].
        version: u16,
    },
    /// Opens a device; once for each connection to the helper.
    Open {
        /// The interface.
        interface: Choice,
        /// The sizes of the frame memory that the client will register.
        sizes: Sizes,
    },
    /// Has the helper register the frame memory that comes with the request, because the client's limit on locked memory is too
    /// low: a sealed memfd of the announced size, all of whose pages are present. At most once for each device.
    Register,
    /// Reserves a port.
    Reserve {
        /// On this address; `None`: on all addresses of both families.
        address: Option<IpAddr>,
        /// The port; 0: any free one.
        port: u16,
    },
    /// Gives a port back. Not answered.
    Release {
        /// As it was reserved.
        address: Option<IpAddr>,
        /// The port.
        port: u16,
    },
    /// Looks up how to reach an address. The client repeats the request while the neighbour is
    /// [pending](Neighbour::Pending).
    Resolve {
        /// The peer.
        destination: IpAddr,
        /// The local address; `None`: the one that the kernel prefers.
        source: Option<IpAddr>,
    },
    /// Looks up the next hop of an established connection.
    NextHop {
        /// The peer.
        destination: IpAddr,
        /// The local address.
        source: IpAddr,
        /// The peer's port: rules and the choice among several paths may depend on the ports.
        destination_port: u16,
        /// The local port.
        source_port: u16,
        /// The peer does not answer: the neighbour is to be confirmed.
        confirm: bool,
    },
    /// Asks for the state of a shared interface. Needs no device.
    Describe {
        /// The first interface is 0.
        number: u16,
    },
    /// Looks up a host of a fabric. Needs no device. A helper that shares interfaces has no hosts.
    Host {
        /// Its name.
        name: String,
        /// It is added to the table if it is not there.
        join: bool,
    },
    /// Changes the faults between two hosts of a fabric. Needs no device.
    Faults {
        /// The host from which frames come.
        from: String,
        /// The host to which they go.
        to: String,
        /// The change in words.
        words: String,
    },
}

/// A host of a fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its number in the table.
    pub number: u16,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

/// The hook at which a helper receives frames from the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// XDP in the network driver.
    Native,
    /// XDP after the kernel has made a socket buffer.
    Generic,
    /// Traffic control (tc), behind XDP: a foreign program has the interface's XDP hook.
    TrafficControl,
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native XDP",
            Self::Generic => "generic XDP",
            Self::TrafficControl => "tc behind another XDP program",
        })
    }
}

/// An opened device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The interface, in the helper's network namespace.
    pub name: String,
    /// The interface that carries the frames: the parent of a VLAN interface, else the same.
    pub carrier: String,
    /// Index of the interface.
    pub index: u32,
    /// Index of the interface to whose queue 0 the client binds the AF_XDP socket, in the network namespace of that socket.
    pub socket_index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Largest path MTU in bytes.
    pub path_mtu: u16,
    /// Largest IP packet that frames can carry, in bytes.
    pub largest_mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// The hook at which frames from the wire are taken.
    pub hook: Hook,
    /// Frames may have several chunks.
    pub multi_buffer: bool,
    /// VLAN ids of frames, outermost first.
    pub vlans: Vec<u16>,
    /// The kernel's id of the program on the interface.
    pub program_id: u32,
    /// Addresses of the interface.
    pub addresses: Vec<IpAddr>,
}

/// The state of a shared interface, for users and monitors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Number of shared interfaces.
    pub interfaces: u16,
    /// Name of the interface, in the helper's network namespace.
    pub name: String,
    /// The interface that carries the frames: the parent of a VLAN interface, else the same.
    pub carrier: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// The hook at which frames from the wire are taken.
    pub hook: Hook,
    /// XDP on the frames that clients send runs after the kernel has made a socket buffer: the interface does not take frames that
    /// native XDP redirects.
    pub generic_clients: bool,
    /// Devices of all users on this interface.
    pub devices: u32,
    /// Devices of this user on all interfaces.
    pub own_devices: Quota,
    /// Ports of this user.
    pub own_ports: Quota,
    /// Frame memory of this user, in bytes.
    pub own_memory_bytes: Quota,
    /// Frames by the switch's action, at most [`MAX_COUNTERS`] counters.
    pub counters: Vec<(String, u64)>,
}

/// The resources of one user, and their limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Quota {
    /// The resources in use.
    pub used: u64,
    /// The limit.
    pub most: u64,
}

/// The state of a next hop's Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    /// It is known.
    Known(Mac),
    /// It is being resolved.
    Pending,
    /// The neighbour did not answer; the kernel asks it again.
    Failed,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The helper has another version.
    Version,
    /// The request does not fit the state of the connection.
    State,
    /// The helper does not share this interface.
    NotServed,
    /// A limit of this user is reached.
    Limit,
    /// This user opens devices faster than former ones are removed: ask again in some milliseconds.
    Rate,
    /// The port is in use.
    PortInUse,
    /// The port needs more privileges.
    Permission,
    /// The address is not the interface's.
    NotOurAddress,
    /// No ephemeral port is free.
    PortsExhausted,
    /// A device could not be made: its pair of interfaces, its namespace or its socket.
    Device,
    /// The memory that came with the request cannot be used.
    Memory,
    /// There is no route.
    Route,
    /// A system call failed.
    System,
}

impl Reason {
    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::State => "state",
            Self::NotServed => "not_served",
            Self::Limit => "limit",
            Self::Rate => "rate",
            Self::PortInUse => "port_in_use",
            Self::Permission => "permission",
            Self::NotOurAddress => "not_our_address",
            Self::PortsExhausted => "ports_exhausted",
            Self::Device => "device",
            Self::Memory => "memory",
            Self::Route => "route",
            Self::System => "system",
        }
    }
}

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For the program.
    pub reason: Reason,
    /// Text for users: the problem and its remedy.
    pub text: String,
}

/// The helper's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// To [`Request::Hello`].
    Hello {
        /// The helper's [`VERSION`].
        version: u16,
    },
    /// To [`Request::Open`]. Carries the AF_XDP socket, which is neither registered nor bound, and the socket of events.
    Opened(Device),
    /// To [`Request::Register`].
    Registered,
    /// To [`Request::Reserve`].
    Reserved {
        /// The reserved port.
        port: u16,
    },
    /// To [`Request::Resolve`].
    Resolved {
        /// The local address.
        source: IpAddr,
        /// The neighbour to send to.
        next_hop: IpAddr,
        /// Its Ethernet address.
        neighbour: Neighbour,
        /// Largest IP packet on the way, in bytes.
        mtu: u16,
    },
    /// To [`Request::NextHop`].
    NextHop {
        /// The neighbour to send to.
        address: IpAddr,
        /// Its Ethernet address, if it is known.
        mac: Option<Mac>,
        /// Largest IP packet of the route, in bytes.
        mtu: u16,
    },
    /// To [`Request::Describe`].
    Described(Description),
    /// To [`Request::Host`].
    Host(Host),
    /// To [`Request::Faults`].
    Done,
    /// To any request; with the id 0, to the connection as a whole, which ends.
    Refused(Refusal),
    /// With the id 0: another helper has taken the connection over. Requests that were not answered may be lost; the client
    /// repeats them with their ids. A request with the id of one that was answered gets the same answer.
    Restarted,
}

/// A change that the helper announces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The interface has a new address.
    AddressAdded(IpAddr),
    /// The interface lost an address.
    AddressRemoved(IpAddr),
    /// The interface went up or down.
    LinkState {
        /// Whether it is up and has a carrier.
        up: bool,
    },
    /// The path MTU changed, in bytes.
    Mtu(u16),
    /// The Ethernet address changed.
    Mac(Mac),
    /// The interface is gone.
    LinkRemoved,
    /// The Ethernet address of a neighbour is known, or changed.
    Neighbour {
        /// The neighbour.
        address: IpAddr,
        /// Its Ethernet address.
        mac: Mac,
    },
    /// Some route changed.
    Routes,
    /// Another helper has taken the device over. The whole state of the interface follows, up to [`Event::Routes`]: addresses that
    /// are not repeated are gone.
    Restarted,
    /// The helper takes the device away; the connection ends.
    Revoked {
        /// Why.
        text: String,
    },
}
