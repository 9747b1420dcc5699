//! The AF_XDP driver of xwarp: it turns a Linux network interface into a [`Link`](xwarp_tcp::link::Link).
//!
//! It loads and attaches the steering program, binds one AF_XDP socket to each receive queue (all on one shared UMEM),
//! tracks the place of every frame, and asks the kernel by netlink for addresses, routes, next hops and the MTU. If the
//! helper `xwarpd` shares the interface, the driver asks the helper for a socket, for routes and for ports instead. The
//! verbs' device owns an [`Interface`] and lends it to the engine as `&mut dyn Link`; its connection manager keeps a
//! [`Resolver`] and [`PortReservation`]s, which work without the interface.
//!
//! | module | owns |
//! |---|---|
//! | [`config`], [`error`] | settings, attributes and counters; errors |
//! | [`inspect`] | facts about an interface without opening it, for diagnosis |
//! | `interface`, `open`, `state` | opening, attributes, counters, events |
//! | `upkeep` | what the kernel does not announce: a program that is detached, queues that are added |
//! | `grant`, [`helper`] | a device that a helper grants, and the connection to the helper |
//! | [`shared`] | the helper's side: an interface that it shares |
//! | `resolver` | from a peer's address to a path |
//! | `rss` | the queue that a NIC chooses for a flow |
//! | `deadline` | the end of a wait with a limit |
//! | `reassembly` | IP packets that arrive in fragments |
//! | `link` | the `Link` implementation: rings to tokens and back |
//! | `lease`, `inbox` | one of several owners of an interface: its steering rules, and frames of its flows from other owners' queues |
//! | `kick` | the transmit kick, callable from any thread |
//! | `sys` | everything `unsafe`: rings, frame memory, one ioctl |
//! | [`netlink`] | links, addresses, routes, neighbours, notifications |
//! | [`port`] | port reservation in the kernel |
//!
//! The crate starts no threads. Calls that depend on a network namespace (open, resolver, ports) act in that of the
//! calling thread.
#![deny(unsafe_code)]

pub mod config;
mod deadline;
pub mod error;
mod grant;
mod helper;
mod inbox;
pub mod inspect;
mod interface;
mod kick;
mod lease;
mod link;
pub mod netlink;
mod open;
pub mod port;
mod reassembly;
mod resolver;
mod rss;
pub mod shared;
mod state;
mod sys;
mod upkeep;

pub use config::{
    Attributes, DriverConfig, FromClients, LinkCounters, Mode, ModePreference, Origin, OriginPreference,
    SINGLE_CHUNK_MTU, Sharing,
};
pub use error::{CAPABILITIES, OpenError, PortError, RIGHTS_OF_A_USER, ResolveError, one_line};
pub use interface::Interface;
pub use kick::Kicker;
pub use netlink::monitor::Event;
pub use netlink::route::Question;
pub use port::{PortReservation, ephemeral_range, reserve_port, reserve_port_in};
pub use resolver::{NextHop, Resolver, Route};
pub use rss::Arrivals;
pub use sys::{close_inherited, inherited};
pub use xwarp_leg::FrameCensus;
pub use xwarp_prog::{AttachMode, Attached, Holder, PROGRAM_NAME, ProgramCounters, af_xdp_users};
