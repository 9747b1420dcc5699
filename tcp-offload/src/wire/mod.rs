//! Frames to headers and back: Ethernet (with VLAN tags), IPv4, IPv6, TCP with its options, and the
//! ICMP errors that concern TCP. Checksums are made and verified here; nothing here keeps state.

use std::net::{IpAddr, SocketAddr};

use crate::link::QueueId;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Mac(pub [u8; 6]);

/// The four-tuple of a connection, seen from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Our address and port.
    pub local: SocketAddr,
    /// The peer's.
    pub remote: SocketAddr,
}

/// Up to two 802.1Q/802.1ad tags, outermost first: each a (EtherType, TCI) pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VlanTags(pub [Option<(u16, u16)>; 2]);

/// Everything that the headers of one connection's frames need: who, by which next hop, how large.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Addresses and ports.
    pub flow: Flow,
    /// Our interface's address.
    pub source_mac: Mac,
    /// The next hop's address.
    pub next_hop_mac: Mac,
    /// Tags that frames carry.
    pub vlan: VlanTags,
    /// Largest IP packet on this path, in bytes (the interface's or route's MTU, not the Ethernet frame).
    pub mtu: u16,
    /// Queue on which frames leave: that on which the peer's arrive.
    pub queue: QueueId,
}

impl Flow {
    /// The peer's address.
    pub fn remote_ip(&self) -> IpAddr {
        self.remote.ip()
    }
}
