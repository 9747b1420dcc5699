//! `rdma_getaddrinfo`: names and services to addresses.

use std::{
    ffi::c_int,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
};

use nix::errno::Errno;
use xwarp_verbs::fabric::{Place, find_host};

use crate::{
    abi::{
        cm::{PS_TCP, rai, rdma_addrinfo, sockaddr, socklen_t},
        queue::QPT_RC,
    },
    boundary::{self, In, Out, Text, zeroed},
    config::config,
    failure::minus_one,
    sleep::uncancelled,
};

fn len(address: SocketAddr) -> socklen_t {
    (if address.is_ipv4() { size_of::<libc::sockaddr_in>() } else { size_of::<libc::sockaddr_in6>() })
        as socklen_t
}

/// The addresses of a host of the fabric, if this process is on one that has a host of this name.
pub fn on_fabric(node: &str) -> Vec<IpAddr> {
    let Some(fabric) = config().fabric.as_ref().filter(|_| node.parse::<IpAddr>().is_err()) else {
        return Vec::new();
    };
    let found = Place::of(Some(&fabric.name)).ok().and_then(|place| find_host(&place, node, false).ok());
    found.map(|host| host.addresses).unwrap_or_default()
}

/// The address of a node and a service. Without a node: the wildcard.
fn resolve(
    node: Option<&str>,
    service: Option<&str>,
    flags: c_int,
    family: c_int,
) -> Result<SocketAddr, Errno> {
    let port = match service {
        None | Some("") => 0,
        Some(service) => service.parse().map_err(|_| Errno::EINVAL)?,
    };
    let wanted = |address: &SocketAddr| match family {
        libc::AF_INET => address.is_ipv4(),
        libc::AF_INET6 => address.is_ipv6(),
        _ => true,
    };
    let Some(node) = node else {
        let any: IpAddr = if family == libc::AF_INET6 { [0u16; 8].into() } else { [0; 4].into() };
        return Ok(SocketAddr::new(any, port));
    };
    if flags & rai::NUMERICHOST != 0 && node.parse::<IpAddr>().is_err() {
        return Err(Errno::EINVAL);
    }
    if let Some(found) = on_fabric(node).into_iter().map(|ip| SocketAddr::new(ip, port)).find(wanted) {
        return Ok(found);
    }
    let found = (node, port).to_socket_addrs().ok().and_then(|mut found| found.find(wanted));
    // The name has these addresses (RFC 6761), also in a root without /etc/hosts.
    let loopback = [SocketAddr::from(([127, 0, 0, 1], port)), ([0, 0, 0, 0, 0, 0, 0, 1], port).into()];
    let localhost = || loopback.into_iter().filter(|_| node == "localhost").find(wanted);
    found.or_else(localhost).ok_or(Errno::ENODATA)
}

pub extern "C" fn rdma_getaddrinfo(
    node: Text,
    service: Text,
    hints: In<rdma_addrinfo>,
    out: Out<*mut rdma_addrinfo>,
) -> c_int {
    let get = || {
        if node.is_null() && service.is_null() && hints.as_ptr().is_null() {
            return Err(Errno::EINVAL);
        }
        let hints = hints.read().unwrap_or_else(zeroed);
        let is_passive = hints.ai_flags & rai::PASSIVE != 0;
        let named = !node.is_null() || !service.is_null();
        let family =
            if hints.ai_flags & rai::FAMILY != 0 || hints.ai_family != 0 { hints.ai_family } else { 0 };
        let address =
            if named { Some(resolve(node.read(), service.read(), hints.ai_flags, family)?) } else { None };
        let given = |pointer: *mut sockaddr| boundary::read_address(In::of(pointer.cast_const()));
        let [source, peer] = if is_passive {
            [address.or_else(|| given(hints.ai_src_addr)), None]
        } else {
            [given(hints.ai_src_addr), address.or_else(|| given(hints.ai_dst_addr))]
        };
        if out.is_null() {
            return Err(Errno::EINVAL);
        }
        out.write(answer(&hints, source, peer)?)
    };
    minus_one(uncancelled(get))
}

/// The answer to `hints`, whose flags it repeats. Each part is a block of its own, as with librdmacm: programs free the answer by
/// `free()`, or replace an address by one of their own, which [`rdma_freeaddrinfo`] then frees.
fn answer(
    hints: &rdma_addrinfo,
    source: Option<SocketAddr>,
    peer: Option<SocketAddr>,
) -> Result<*mut rdma_addrinfo, Errno> {
    let mut c: rdma_addrinfo = zeroed();
    c.ai_flags = hints.ai_flags;
    let first = source.or(peer);
    c.ai_family = if first.is_none_or(|address| address.is_ipv4()) { libc::AF_INET } else { libc::AF_INET6 };
    c.ai_qp_type = if hints.ai_qp_type == 0 { QPT_RC } else { hints.ai_qp_type };
    c.ai_port_space = if hints.ai_port_space == 0 { PS_TCP } else { hints.ai_port_space };
    let block = |address: SocketAddr| boundary::c_block(&[boundary::address(address)]).cast::<sockaddr>();
    if let Some(source) = source {
        (c.ai_src_addr, c.ai_src_len) = (block(source), len(source));
    }
    if let Some(peer) = peer {
        (c.ai_dst_addr, c.ai_dst_len) = (block(peer), len(peer));
    }
    let found = boundary::c_block(&[c]);
    if found.is_null() { Err(Errno::ENOMEM) } else { Ok(found) }
}

pub extern "C" fn rdma_freeaddrinfo(info: In<rdma_addrinfo>) {
    let mut next = info;
    while let Some(c) = next.read() {
        boundary::c_free(c.ai_dst_canonname);
        boundary::c_free(c.ai_dst_addr);
        boundary::c_free(c.ai_src_canonname);
        boundary::c_free(c.ai_src_addr);
        boundary::c_free(c.ai_route);
        boundary::c_free(c.ai_connect);
        boundary::c_free(next.as_ptr().cast_mut());
        next = In::of(c.ai_next.cast_const());
    }
}
