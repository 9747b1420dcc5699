//! `getaddrinfo` of programs on a fabric: the names of its hosts, which no name service of the machine knows.
//!
//! Programs look names up themselves, by the C library's function, and pass the addresses to `rdma_resolve_addr`. On a fabric, the name of
//! a host becomes its address in text; everything else, and all names without a fabric, are the C library's.

use std::{
    ffi::{CString, c_int},
    net::IpAddr,
    sync::OnceLock,
};

use super::addrinfo::on_fabric;
use crate::{
    boundary::{In, Text},
    library::{Function, next},
};

/// Whether this process is on a fabric; looked up apart from the configuration, because any program calls `getaddrinfo`.
pub fn is_on_fabric() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| std::env::var_os("XWARP_FABRIC").is_some_and(|name| !name.is_empty()))
}

/// The address in text of a host of the fabric, of the family that is asked for.
fn address_of(node: Text, hints: In<libc::addrinfo>) -> Option<CString> {
    let node = node.read().filter(|_| is_on_fabric())?;
    let hints = hints.read();
    let numeric = hints.as_ref().is_some_and(|hints| hints.ai_flags & libc::AI_NUMERICHOST != 0);
    let family = hints.map_or(libc::AF_UNSPEC, |hints| hints.ai_family);
    let wanted = |address: &IpAddr| match family {
        libc::AF_INET => address.is_ipv4(),
        libc::AF_INET6 => address.is_ipv6(),
        _ => true,
    };
    if numeric {
        return None;
    }
    CString::new(on_fabric(node).into_iter().find(wanted)?.to_string()).ok()
}

pub extern "C" fn getaddrinfo(node: Text, service: usize, hints: In<libc::addrinfo>, out: usize) -> c_int {
    static OF_C: OnceLock<Option<Function>> = OnceLock::new();
    let Some(of_c) = *OF_C.get_or_init(|| next(c"getaddrinfo")) else { return libc::EAI_SYSTEM };
    let known = address_of(node, hints);
    let node = known.as_ref().map_or(node.as_ptr(), |address| address.as_ptr());
    let arguments = [node.expose_provenance(), service, hints.as_ptr().expose_provenance(), out, 0, 0];
    of_c.call(arguments) as c_int
}
