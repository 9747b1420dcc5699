//! `getifaddrs` of programs on a fabric: the addresses of their host, on an interface that the machine does not have.
//!
//! libfabric, and therefore Open MPI, binds to the addresses that it finds so, except those of `lo`, to learn which device has them. On a
//! fabric the C library's list has one interface more; without a fabric it stays as it is.

use std::{
    ffi::{c_char, c_int},
    mem::offset_of,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ptr,
    sync::OnceLock,
};

use libc::{ifaddrs, sockaddr_storage};
use xwarp_verbs::fabric::{Place, find_host, host_number};

use super::names::is_on_fabric;
use crate::{
    boundary::{In, Out, address, c_block},
    config::config,
    library::next,
    sleep::uncancelled,
};

/// The interface, named as the device is.
const NAME: &[u8; 7] = b"fabric\0";
/// Netmasks of the hosts' addresses: they are neighbours.
const NETMASKS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(255, 255, 240, 0)),
    IpAddr::V6(Ipv6Addr::new(0xffff, 0xffff, 0xffff, 0, 0, 0, 0, 0)),
];
/// The address of `localhost` in place of 127.0.0.1 and `::1`, which libfabric refuses, and which `lo` has already. As each address of the
/// loopback network that is no host's, it stands for 127.0.0.1 in our calls.
const OF_LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 77, 16, 1));

/// An entry of the list, and what it points to.
#[derive(Clone, Copy)]
#[repr(C)]
struct Entry {
    list: ifaddrs,
    address: sockaddr_storage,
    netmask: sockaddr_storage,
    name: [c_char; NAME.len()],
}

impl Entry {
    /// The entry of an address, without its pointers.
    fn new(own: IpAddr) -> Self {
        let list = ifaddrs {
            ifa_next: ptr::null_mut(),
            ifa_name: ptr::null_mut(),
            ifa_flags: (libc::IFF_UP | libc::IFF_RUNNING).cast_unsigned(),
            ifa_addr: ptr::null_mut(),
            ifa_netmask: ptr::null_mut(),
            ifa_ifu: ptr::null_mut(),
            ifa_data: ptr::null_mut(),
        };
        let netmask = NETMASKS[usize::from(own.is_ipv6())];
        let [own, netmask] = [own, netmask].map(|ip| address(SocketAddr::new(ip, 0)));
        Self { list, address: own, netmask, name: NAME.map(u8::cast_signed) }
    }
}

/// A list of these addresses in one block, which `freeifaddrs` of glibc can free: it frees the block of the first entry. Null without
/// addresses or memory.
fn list(addresses: &[IpAddr]) -> *mut ifaddrs {
    let entries: Vec<Entry> = addresses.iter().map(|own| Entry::new(*own)).collect();
    let block = if entries.is_empty() { ptr::null_mut() } else { c_block(&entries) };
    if block.is_null() {
        return ptr::null_mut();
    }
    let place = |index: usize, offset: usize| block.wrapping_add(index).wrapping_byte_add(offset);
    for (index, entry) in entries.iter().enumerate() {
        let is_last = index + 1 == entries.len();
        let list = ifaddrs {
            ifa_next: if is_last {
                ptr::null_mut()
            } else {
                place(index + 1, offset_of!(Entry, list)).cast()
            },
            ifa_name: place(index, offset_of!(Entry, name)).cast(),
            ifa_addr: place(index, offset_of!(Entry, address)).cast(),
            ifa_netmask: place(index, offset_of!(Entry, netmask)).cast(),
            ..entry.list
        };
        Out::of(block).write_at(index, Entry { list, ..*entry });
    }
    block.cast()
}

/// What the list has for a host with these addresses.
fn shown(addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    if addresses.iter().any(|own| host_number(*own).is_some()) { addresses } else { vec![OF_LOCALHOST] }
}

/// The addresses of this process's host for the list, once they are known; none without a fabric.
fn own_addresses() -> &'static [IpAddr] {
    static FOUND: OnceLock<Vec<IpAddr>> = OnceLock::new();
    let look_up = || {
        let fabric = config().fabric.as_ref()?;
        let host = find_host(&Place::of(Some(&fabric.name)).ok()?, &fabric.host, true).ok()?;
        Some(FOUND.get_or_init(|| shown(host.addresses)))
    };
    if !is_on_fabric() {
        return &[];
    }
    FOUND.get().or_else(|| uncancelled(look_up)).map_or(&[], Vec::as_slice)
}

/// Appends the entries of our interface to a list of the C library, which is not empty. Its `freeifaddrs` frees its own block, and leaves
/// these entries, which all lists share.
fn append(head: *mut ifaddrs, own: &[IpAddr]) {
    static APPENDED: OnceLock<usize> = OnceLock::new();
    if own.is_empty() {
        return;
    }
    let ours = *APPENDED.get_or_init(|| list(own).expose_provenance());
    let mut last = head;
    while let Some(entry) = In::of(last.cast_const()).read() {
        if entry.ifa_next.is_null() {
            let entry = ifaddrs { ifa_next: ptr::with_exposed_provenance_mut(ours), ..entry };
            let _ = Out::of(last).write(entry);
            return;
        }
        last = entry.ifa_next;
    }
}

pub extern "C" fn getifaddrs(out: Out<*mut ifaddrs>) -> c_int {
    let own = own_addresses();
    let mut head: *mut ifaddrs = ptr::null_mut();
    let place = (&raw mut head).expose_provenance();
    let result = next(c"getifaddrs").map_or(-1, |of_c| of_c.call([place, 0, 0, 0, 0, 0]) as c_int);
    if result == 0 && !head.is_null() {
        append(head, own);
    } else {
        // The kernel does not answer, or has no interface.
        head = list(own);
    }
    if result != 0 && head.is_null() {
        return result;
    }
    let _ = out.write(head);
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, address and flags of each entry.
    fn read(mut head: *mut ifaddrs) -> Vec<(u32, IpAddr, IpAddr)> {
        let mut found = Vec::new();
        while let Some(entry) = In::of(head.cast_const()).read() {
            let [own, netmask] = [entry.ifa_addr, entry.ifa_netmask].map(|place| {
                crate::boundary::read_address(In::of(place.cast_const().cast())).expect("an address").ip()
            });
            let name = In::of(entry.ifa_name.cast_const().cast::<[c_char; NAME.len()]>()).read();
            assert_eq!(name, Some(NAME.map(u8::cast_signed)));
            found.push((entry.ifa_flags, own, netmask));
            head = entry.ifa_next;
        }
        found
    }

    #[test]
    fn a_list_has_the_addresses_with_their_netmasks() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let up = (libc::IFF_UP | libc::IFF_RUNNING).cast_unsigned();
        let block = list(&[ip("127.77.0.3"), ip("fd77:7761:7270::3")]);
        let expected = [("127.77.0.3", "255.255.240.0"), ("fd77:7761:7270::3", "ffff:ffff:ffff::")]
            .map(|(a, b)| (up, ip(a), ip(b)));
        assert_eq!(read(block), expected);
        crate::boundary::c_free(block);
        let block = list(&shown(vec![ip("127.0.0.1"), ip("::1")]));
        assert_eq!(read(block), [(up, ip("127.77.16.1"), ip("255.255.240.0"))]);
        // Appended behind another list, of which only the own block is freed.
        append(block, &[ip("127.77.0.3")]);
        assert_eq!(read(block).len(), 2);
        crate::boundary::c_free(block);
        assert!(list(&[]).is_null());
    }
}
