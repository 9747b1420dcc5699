//! [`Inspection`]: facts about an interface that need no open interface, for programs that examine a machine.

use std::{io, net::IpAddr};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::os::fd::AsFd;
use xwarp_prog::Attached;

use crate::{
    config::DriverConfig,
    error::OpenError,
    grant,
    netlink::{Netlink, link::KernelLink},
    open, sys,
};

pub use xwarp_control::{Description, Hook, Quota};

/// The oldest supported kernel, as major and minor version.
pub use crate::open::OLDEST_KERNEL;
/// The first kernel that gives frames of several chunks to AF_XDP sockets (`XDP_USE_SG`).
pub const MULTI_BUFFER_KERNEL: (u32, u32) = (6, 6);

/// An interface as [`Interface::open`](crate::Interface::open) would find it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// The interface.
    pub link: KernelLink,
    /// The interface that carries its frames: the one below a VLAN interface, else itself.
    pub carrier: KernelLink,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The XDP program on the carrier.
    pub program: Option<Attached>,
    /// Receive queues in use, each of which would get a socket.
    pub receive_queues: u16,
    /// Bytes of frame memory, which is locked.
    pub locked_bytes: u64,
    /// Whether VLAN tags are taken off received frames before XDP sees them.
    pub strips_vlan_tags: bool,
    /// Whether received segments are joined by the kernel (GRO), or by the device (LRO).
    pub joins_segments: (bool, bool),
}

/// Inspects interface `name` of the calling thread's network namespace. Needs no privileges.
pub fn inspect(name: &str, config: &DriverConfig) -> Result<Inspection, OpenError> {
    let system = |doing| move |source| OpenError::System { doing, source };
    let mut netlink = Netlink::open().map_err(system("opening a netlink socket"))?;
    let found = open::find(&mut netlink, name, config)?;
    let addresses = netlink.addresses(found.link.index).map_err(system("reading addresses"))?;
    let sizes = open::sizes(&found, config)?;
    let program = xwarp_prog::attached_to(found.carrier.index).map_err(system("asking for XDP programs"))?;
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| OpenError::System { doing: "opening a socket", source: errno.into() })?;
    let carrier = &found.carrier.name;
    Ok(Inspection {
        addresses,
        program,
        receive_queues: sizes.queues,
        locked_bytes: sizes.bytes(),
        strips_vlan_tags: sys::strips_vlan_tags(socket.as_fd(), carrier),
        joins_segments: sys::joins_segments(socket.as_fd(), carrier),
        link: found.link,
        carrier: found.carrier,
    })
}

/// The interfaces that the helper shares, and this user's resources on them.
///
/// # Errors
/// [`OpenError::NoHelper`] when no helper listens, [`OpenError::NotInGroup`] or [`OpenError::Excluded`] when this process may not connect.
pub fn shared_interfaces(config: &DriverConfig) -> Result<Vec<Description>, OpenError> {
    grant::describe(config).map_err(grant::Unshared::into_error)
}

/// The running kernel's release, and its major and minor version.
pub fn kernel_release() -> Option<(String, (u32, u32))> {
    open::kernel_release()
}

/// Whether the kernel has AF_XDP sockets, and this process may make one.
pub fn probe_af_xdp() -> io::Result<()> {
    let made = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
    made.map(drop).map_err(io::Error::from)
}
