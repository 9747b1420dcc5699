//! Map keys as bytes, laid out as the C structures of `bpf/frame.h`: everything in network byte order,
//! except the IP version beside each address.

use std::net::{IpAddr, SocketAddr};

use crate::skeleton::types;

pub(crate) const ADDRESS_BYTES: usize = 18;
pub(crate) const FLOW_BYTES: usize = 2 * ADDRESS_BYTES + 4;
pub(crate) const PORT_BYTES: usize = ADDRESS_BYTES + 2;

/// Stands for every address of the interface, of both families.
const WILDCARD: [u8; ADDRESS_BYTES] = [0; ADDRESS_BYTES];

const _: () = assert!(size_of::<types::address>() == ADDRESS_BYTES);
const _: () = assert!(size_of::<types::flow_key>() == FLOW_BYTES);
const _: () = assert!(size_of::<types::port_key>() == PORT_BYTES);

/// The address with its version, so that an IPv6 address never equals an IPv4 one.
pub(crate) fn address(address: IpAddr) -> [u8; ADDRESS_BYTES] {
    let mut key = [0; ADDRESS_BYTES];
    let version: u16 = match address {
        IpAddr::V4(v4) => {
            key[..4].copy_from_slice(&v4.octets());
            4
        }
        IpAddr::V6(v6) => {
            key[..16].copy_from_slice(&v6.octets());
            6
        }
    };
    key[16..].copy_from_slice(&version.to_ne_bytes());
    key
}

pub(crate) fn flow(local: SocketAddr, remote: SocketAddr) -> [u8; FLOW_BYTES] {
    let mut key = [0; FLOW_BYTES];
    key[..18].copy_from_slice(&address(local.ip()));
    key[18..36].copy_from_slice(&address(remote.ip()));
    key[36..38].copy_from_slice(&local.port().to_be_bytes());
    key[38..].copy_from_slice(&remote.port().to_be_bytes());
    key
}

/// The unspecified address of either family also stands for the wildcard.
pub(crate) fn port(local: Option<IpAddr>, port: u16) -> [u8; PORT_BYTES] {
    let mut key = [0; PORT_BYTES];
    key[..18].copy_from_slice(&local.filter(|a| !a.is_unspecified()).map_or(WILDCARD, address));
    key[18..].copy_from_slice(&port.to_be_bytes());
    key
}
