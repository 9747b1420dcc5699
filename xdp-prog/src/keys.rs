//! Map keys as bytes, laid out as the C structures of `bpf/steer.bpf.c`: addresses as IPv6 or
//! IPv4-mapped, everything in network byte order.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::skeleton::types;

pub(crate) const ADDRESS_BYTES: usize = 16;
pub(crate) const FLOW_BYTES: usize = 2 * ADDRESS_BYTES + 4;
pub(crate) const LISTENER_BYTES: usize = ADDRESS_BYTES + 4;

const _: () = assert!(size_of::<types::address>() == ADDRESS_BYTES);
const _: () = assert!(size_of::<types::flow_key>() == FLOW_BYTES);
const _: () = assert!(size_of::<types::listener_key>() == LISTENER_BYTES);

pub(crate) fn address(address: IpAddr) -> [u8; ADDRESS_BYTES] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

pub(crate) fn flow(local: SocketAddr, remote: SocketAddr) -> [u8; FLOW_BYTES] {
    let mut key = [0; FLOW_BYTES];
    key[..16].copy_from_slice(&address(local.ip()));
    key[16..32].copy_from_slice(&address(remote.ip()));
    key[32..34].copy_from_slice(&local.port().to_be_bytes());
    key[34..].copy_from_slice(&remote.port().to_be_bytes());
    key
}

/// The wildcard of both families is all zero: the unspecified addresses mean it too.
pub(crate) fn listener(local: Option<IpAddr>, port: u16) -> [u8; LISTENER_BYTES] {
    let local = local.filter(|a| !a.is_unspecified()).unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let mut key = [0; LISTENER_BYTES];
    key[..16].copy_from_slice(&address(local));
    key[16..18].copy_from_slice(&port.to_be_bytes());
    key
}
