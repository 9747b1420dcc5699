//! The virtual wire: [`Wire`] connects in-memory [`Link`]s, with seeded [`Faults`] in each direction and time as an
//! argument. The same engines run over it as over AF_XDP, and every frame that they send is audited.
//!
//! Without faults and delay the wire needs no clock, so two threads can also use it in real time. [`Direction`] alone
//! is the fault model, for frames of any origin.
//!
//! [`Link`]: crate::link::Link

mod audit;
mod congestion;
mod direction;
mod end;
mod faults;
mod hostile;
mod packet;
mod raw_peer;
mod recorded;
mod run;
mod seeds;
#[cfg(test)]
mod tests;
mod ulpdu;
mod wire;
pub mod words;

#[cfg(test)]
pub(crate) use congestion::CongestionCheck;
pub use direction::{Direction, Tally};
pub use end::{Counting, End, numbered, numbered_len};
pub use faults::{Aim, Blackout, Faults, Gilbert, PathMtu, Recut, Resets};
pub use hostile::{HostileConfig, HostileHost, Purpose};
pub use packet::complete_checksums;
pub use raw_peer::{RawPeer, RawSegment, fpdu};
pub use recorded::compare_with_record;
pub use run::{Node, Outcome, run, run_for};
pub use seeds::run_seeds;
pub use ulpdu::{PulledUlpdu, pull, pull_into};
pub use wire::{Census, Checksums, SimLink, Wire, WireConfig};

use std::net::SocketAddr;

use crate::{
    link::QueueId,
    wire::{Flow, Mac, Path, VlanTags},
};

/// The path of a connection over a wire: Ethernet without tags, an MTU of 1500, hardware addresses that end in 1 and 2.
pub fn path(local: impl Into<SocketAddr>, remote: impl Into<SocketAddr>) -> Path {
    Path {
        flow: Flow { local: local.into(), remote: remote.into() },
        source_mac: Mac([2, 0, 0, 0, 0, 1]),
        next_hop: None,
        next_hop_mac: Mac([2, 0, 0, 0, 0, 2]),
        vlan: VlanTags::default(),
        mtu: 1500,
        queue: QueueId(0),
    }
}
