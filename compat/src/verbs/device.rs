//! The device list: every network interface that can carry us. Nothing is opened for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{c_char, c_int},
    net::IpAddr,
    ptr,
    sync::{Arc, Mutex},
};

use nix::{errno::Errno, ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use xwarp_verbs::fabric::{PREFIX, Place, find_host};

use crate::{
    abi::device::{
        NODE_CA, NODE_RNIC, SYSFS_NAME_MAX, TRANSPORT_IB, TRANSPORT_IWARP, TRANSPORT_UNSPECIFIED, ibv_device,
    },
    boundary::{self, CPart, Handle, Object as _, Out, object},
    config::{Face, OfFabric, config},
    sleep::uncancelled,
    wait::lock,
};

/// An interface as a device. It exists until the process ends, so that programs may keep the pointer.
#[repr(C)]
pub struct Port {
    c: CPart<ibv_device>,
    /// Fields that hardware drivers compare to find their devices: zero, so that no driver claims this one.
    _driver: [usize; 16],
    pub name: String,
    /// The name by which [`Device::open`](xwarp_verbs::Device::open) opens it.
    pub opens: String,
    mac: [u8; 6],
    pub index: u32,
    /// The addresses when the list was made last.
    addresses: Mutex<Vec<IpAddr>>,
}

object!(Port: ibv_device);

/// An interface as reported by the kernel.
#[derive(Default)]
struct Found {
    up: bool,
    mac: Option<[u8; 6]>,
    index: u32,
    addresses: Vec<IpAddr>,
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    // The last one stays the terminating zero.
    for (to, from) in out.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    out
}

impl Port {
    fn new(name: &str, opens: String, mac: [u8; 6], index: u32) -> Self {
        let (node_type, transport_type) = match config().face {
            Face::Iwarp => (NODE_RNIC, TRANSPORT_IWARP),
            Face::Unspecified => (NODE_RNIC, TRANSPORT_UNSPECIFIED),
            Face::Roce => (NODE_CA, TRANSPORT_IB),
        };
        let c = ibv_device {
            ops: [ptr::null(); 2],
            node_type,
            transport_type,
            name: chars::<SYSFS_NAME_MAX>(name),
            dev_name: chars(&format!("xwarp-{name}")),
            dev_path: chars(&format!("/sys/class/net/{name}")),
            ibdev_path: chars(&format!("/sys/class/net/{name}")),
        };
        Self {
            c: CPart::new(c),
            _driver: [0; 16],
            name: name.to_owned(),
            opens,
            mac,
            index,
            addresses: Mutex::default(),
        }
    }

    /// The node's identifier in network byte order: the EUI-64 of the Ethernet address.
    pub fn guid(&self) -> u64 {
        let mut eui = [0, 0, 0, 0xff, 0xfe, 0, 0, 0];
        eui[..3].copy_from_slice(&self.mac[..3]);
        eui[5..].copy_from_slice(&self.mac[3..]);
        // The bit that says whether the address is of local administration is inverted in an EUI-64.
        eui[0] ^= 2;
        u64::from_ne_bytes(eui)
    }

    /// The first address of a family that is not link-local, when the list was made last.
    pub fn address(&self, is_ipv4: bool) -> Option<IpAddr> {
        let link_local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let of_family = |address: &&IpAddr| address.is_ipv4() == is_ipv4 && !link_local(address);
        lock(&self.addresses).iter().find(of_family).copied()
    }

    /// Whether the interface had `address` when the list was made last.
    pub fn has(&self, address: IpAddr) -> bool {
        lock(&self.addresses).contains(&address)
    }
}

/// The interfaces of this process's network namespace that can carry us: Ethernet, up, with an address.
fn interfaces() -> Result<BTreeMap<String, Found>, Errno> {
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    for entry in getifaddrs()? {
        if entry.flags.contains(InterfaceFlags::IFF_LOOPBACK) || !config().allows(&entry.interface_name) {
            continue;
        }
        let interface = found.entry(entry.interface_name).or_default();
        interface.up |= entry.flags.contains(InterfaceFlags::IFF_UP);
        let Some(address) = entry.address else { continue };
        if let Some(link) = address.as_link_addr() {
            interface.mac = link.addr().filter(|_| link.halen() == 6);
            interface.index = u32::try_from(link.ifindex()).unwrap_or(0);
        } else if let Some(v4) = address.as_sockaddr_in() {
            interface.addresses.push(v4.ip().into());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            interface.addresses.push(v6.ip().into());
        }
    }
    found.retain(|_, interface| interface.up && interface.mac.is_some() && !interface.addresses.is_empty());
    Ok(found)
}

/// Every device that this process has seen.
static SEEN: Mutex<Vec<Arc<Port>>> = Mutex::new(Vec::new());

/// Adds a device that this process has not seen before.
fn publish(seen: &mut Vec<Arc<Port>>, port: Arc<Port>) -> Arc<Port> {
    Handle::publish(Arc::clone(&port));
    seen.push(Arc::clone(&port));
    port
}

/// The device of a process on a fabric, which is its only one. Its host never changes.
pub fn of_fabric(fabric: &OfFabric) -> Result<Arc<Port>, Errno> {
    let mut seen = lock(&SEEN);
    if let Some(port) = seen.first() {
        return Ok(Arc::clone(port));
    }
    let found = Place::of(Some(&fabric.name))
        .map_err(|error| error.to_string())
        .and_then(|place| find_host(&place, &fabric.host, true).map_err(|error| error.to_string()));
    let host = found.map_err(|error| {
        say!("the fabric gives no device: {error}");
        Errno::ENODEV
    })?;
    let opens = format!("{PREFIX}{}", fabric.host);
    let port = Port::new("fabric", opens, host.mac, u32::from(host.number) + 1);
    *lock(&port.addresses) = host.addresses;
    Ok(publish(&mut seen, Arc::new(port)))
}

/// The current devices, in the configured order, else by name.
pub fn ports() -> Result<Vec<Arc<Port>>, Errno> {
    if let Some(fabric) = &config().fabric {
        return Ok(vec![of_fabric(fabric)?]);
    }
    let found = interfaces()?;
    let mut seen = lock(&SEEN);
    let mut ports = Vec::new();
    for (name, interface) in found {
        let mac = interface.mac.unwrap_or_default();
        let known =
            seen.iter().find(|port| port.name == name && port.index == interface.index && port.mac == mac);
        let port = known.cloned().unwrap_or_else(|| {
            let port = Arc::new(Port::new(&name, name.clone(), mac, interface.index));
            publish(&mut seen, port)
        });
        *lock(&port.addresses) = interface.addresses;
        ports.push(port);
    }
    if let Some(order) = &config().devices {
        ports.sort_by_key(|port| order.iter().position(|name| *name == port.name));
    }
    Ok(ports)
}

/// Addresses of the arrays that programs have. One that a program frees by `free()` stays here until it is used again.
static LISTS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// An array of pointers that ends with null, which the program gives back to [`free_list`], or frees itself by `free()`.
pub fn list<T>(pointers: &[*mut T]) -> *mut *mut T {
    let all: Vec<*mut T> = pointers.iter().copied().chain([ptr::null_mut()]).collect();
    let list = boundary::c_block(&all);
    lock(&LISTS).insert(list.addr());
    list
}

/// Frees an array of [`list`]; does nothing for any other pointer.
pub fn free_list<T>(list: *mut *mut T) {
    if lock(&LISTS).remove(&list.addr()) {
        boundary::c_free(list);
    }
}

pub extern "C" fn ibv_get_device_list(number: Out<c_int>) -> *mut *mut ibv_device {
    number.write_if_wanted(0);
    match uncancelled(ports) {
        Ok(ports) => {
            number.write_if_wanted(c_int::try_from(ports.len()).unwrap_or(c_int::MAX));
            list(&ports.iter().map(|port| port.c_ptr()).collect::<Vec<_>>())
        }
        Err(error) => {
            error.set();
            ptr::null_mut()
        }
    }
}

pub extern "C" fn ibv_free_device_list(devices: *mut *mut ibv_device) {
    free_list(devices);
}

pub extern "C" fn ibv_get_device_name(device: Handle<Port>) -> *const c_char {
    // The field of any structure, also of one that is not ours: programs that imitate devices have such.
    if device.is_null() {
        return ptr::null();
    }
    device.as_ptr().wrapping_byte_add(std::mem::offset_of!(ibv_device, name)).cast()
}

pub extern "C" fn ibv_get_device_guid(device: Handle<Port>) -> u64 {
    device.object().map_or(0, |port| port.guid())
}

pub extern "C" fn ibv_get_device_index(device: Handle<Port>) -> c_int {
    device.object().map_or(-1, |port| c_int::try_from(port.index).unwrap_or(-1))
}
