//! Queries and settings of a network driver, by the ethtool ioctl.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `struct ethtool_channels` of `linux/ethtool.h`.
#[repr(C)]
#[derive(Default)]
struct EthtoolChannels {
    cmd: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx_count: u32,
    tx_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// `struct ethtool_value` of `linux/ethtool.h`.
#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GGRO: u32 = 0x2b;
const ETHTOOL_GTXCSUM: u32 = 0x16;
const ETHTOOL_STXCSUM: u32 = 0x17;
const ETH_FLAG_LRO: u32 = 1 << 15;
const ETH_FLAG_RXVLAN: u32 = 1 << 8;

/// Receive and transmit queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueCounts {
    pub receive: u32,
    pub transmit: u32,
}

/// The queues of an interface that are in use now (not the maximum), as reported by its driver; `None` if it does not
/// report them.
pub(crate) fn active_queues(any_socket: BorrowedFd<'_>, name: &str) -> Option<QueueCounts> {
    let mut channels = EthtoolChannels { cmd: ETHTOOL_GCHANNELS, ..Default::default() };
    // SAFETY: ETHTOOL_GCHANNELS writes one `ethtool_channels`, which `channels` is laid out as.
    unsafe { ethtool(any_socket, name, (&raw mut channels).cast()) }.then(|| QueueCounts {
        receive: channels.rx_count + channels.combined_count,
        transmit: channels.tx_count + channels.combined_count,
    })
}

/// Whether the interface takes VLAN tags off received frames before XDP sees them.
pub(crate) fn strips_vlan_tags(any_socket: BorrowedFd<'_>, name: &str) -> bool {
    ethtool_value(any_socket, name, ETHTOOL_GFLAGS) & ETH_FLAG_RXVLAN != 0
}

/// Whether received segments are joined by the kernel (GRO), or by the device (LRO).
pub(crate) fn joins_segments(any_socket: BorrowedFd<'_>, name: &str) -> (bool, bool) {
    let flags = ethtool_value(any_socket, name, ETHTOOL_GFLAGS);
    (ethtool_value(any_socket, name, ETHTOOL_GGRO) != 0, flags & ETH_FLAG_LRO != 0)
}

/// Whether checksums of transmitted packets are left to the device.
pub(crate) fn offloads_checksums(any_socket: BorrowedFd<'_>, name: &str) -> bool {
    ethtool_value(any_socket, name, ETHTOOL_GTXCSUM) != 0
}

/// Has the kernel complete the checksums of packets before the interface transmits them, instead of the device.
pub(crate) fn complete_checksums(any_socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut value = EthtoolValue { cmd: ETHTOOL_STXCSUM, data: 0 };
    // SAFETY: ETHTOOL_STXCSUM reads one `ethtool_value`, which `value` is laid out as.
    let set = unsafe { ethtool(any_socket, name, (&raw mut value).cast()) };
    if set { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The answer to a request that reads one number; 0 when the driver does not report it.
fn ethtool_value(any_socket: BorrowedFd<'_>, name: &str, cmd: u32) -> u32 {
    let mut value = EthtoolValue { cmd, data: 0 };
    // SAFETY: the requests that are passed here write one `ethtool_value`, which `value` is laid out as.
    let reported = unsafe { ethtool(any_socket, name, (&raw mut value).cast()) };
    if reported { value.data } else { 0 }
}

/// One SIOCETHTOOL request about interface `name`; whether it succeeded.
///
/// # Safety
/// `command` points to the structure that belongs to the command in its first field, writable.
unsafe fn ethtool(any_socket: BorrowedFd<'_>, name: &str, command: *mut libc::c_char) -> bool {
    // SAFETY: `ifreq` is plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays zero: the kernel reads a C string.
    if name.len() >= request.ifr_name.len() {
        return false;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = command;
    // SAFETY: SIOCETHTOOL reads the name, and accesses the structure as the caller guarantees; both live longer than
    // the call.
    unsafe { libc::ioctl(any_socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) == 0 }
}
