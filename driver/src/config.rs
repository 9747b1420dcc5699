//! Settings of an interface ([`DriverConfig`]), and its state ([`Attributes`], [`LinkCounters`]).

use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use xwarp_control::{Hook, Sizes};
use xwarp_tcp::wire::Mac;

/// The largest IP packet that fits one chunk as every driver can receive it (native XDP on veth
/// accepts programs without fragments up to this MTU; beyond it frames may need several chunks).
pub const SINGLE_CHUNK_MTU: u16 = 3506;

/// The path of frames between the kernel and our rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The NIC's DMA reads and writes the frames themselves.
    ZeroCopy,
    /// Native XDP in the driver; the kernel copies each frame once into our memory.
    Copy,
    /// XDP runs after the kernel has made a socket buffer: works on every interface.
    Generic,
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ZeroCopy => "zero-copy",
            Self::Copy => "copy (native XDP)",
            Self::Generic => "generic (skb)",
        })
    }
}

/// The mode of a device on an interface that a helper shares.
impl From<Hook> for Mode {
    fn from(hook: Hook) -> Self {
        match hook {
            Hook::Native => Self::Copy,
            Hook::Generic | Hook::TrafficControl => Self::Generic,
        }
    }
}

/// Which [`Mode`] to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ModePreference {
    /// The first mode that works of zero-copy, copy, generic; on a veth of one queue, generic before copy.
    /// [`Attributes::mode`] has the chosen mode.
    #[default]
    Probe,
    /// This mode; opening fails if it does not work.
    Force(Mode),
}

/// The owner of an open interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// This process owns the interface alone.
    Owned,
    /// The helper `xwarpd` owns it and shares it: this process has a device of its own on it, and needs no privileges.
    Granted,
}

/// Which [`Origin`] to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OriginPreference {
    /// Granted when a helper that shares the interface answers, else owned. Also owned if other settings need the
    /// owner's rights: a mode, a VLAN, or the replacement of a program.
    #[default]
    Probe,
    /// This origin; opening fails if it is not possible.
    Force(Origin),
}

/// Where XDP runs on the ends of pairs that a helper holds, which send the frames of its clients to the shared interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FromClients {
    /// Native if the interface's driver announces that it sends redirected frames, else generic.
    #[default]
    Probe,
    /// In the driver of the pair. An interface that does not send redirected frames drops them silently.
    Native,
    /// After the kernel has made a socket buffer, which every interface sends.
    Generic,
}

/// How a helper shares an interface among its clients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sharing {
    /// Where XDP runs on the frames that clients send.
    pub from_clients: FromClients,
    /// The only peers on the network that clients may talk to; empty: all. Clients of one host always reach each other.
    pub peers: Vec<IpNet>,
    /// What each client may send out of the interface, in bits per second.
    pub bits_per_second: Option<u64>,
}

/// How to open an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverConfig {
    /// Zero-copy, copy or generic, probed or forced.
    pub mode: ModePreference,
    /// Use the VLAN with this id (802.1Q) on the interface: frames we send carry the tag, and only frames with
    /// exactly this tag are ours. Not needed for an interface of kind vlan (`eth0.42`), which is recognised and
    /// opened on its parent. XDP must see the tags: switch off VLAN offload on a NIC that strips them (`ethtool -k`:
    /// rx-vlan-offload).
    pub vlan: Option<u16>,
    /// An outer 802.1ad tag around [`vlan`](Self::vlan).
    pub service_vlan: Option<u16>,
    /// Receive chunks of each queue, 4096 bytes of memory each, which hold 3840 of a frame. They bound the bytes that
    /// peers may have in flight to us: with fewer chunks than the peer's transmit chunks, many connections can overrun
    /// them. The kernel fills all of them in turn, so a smaller number stays in the cache more often.
    pub receive_chunks: u32,
    /// Transmit chunks of all queues together. A frame stays in use until its data is acknowledged, or for some milliseconds
    /// when frames are scarce. Busy connections use all chunks, and the frames wait at the peer: a larger number adds delay and
    /// cache misses. A long path may need more: one connection has at most four fifths of them in flight before data moves to the
    /// heap.
    pub transmit_chunks: u32,
    /// Descriptors in each transmit and completion ring; a power of two. If there are fewer than
    /// [`transmit_chunks`](Self::transmit_chunks), a filled frame may find the ring full; it then counts as lost and is
    /// retransmitted.
    pub ring_size: u32,
    /// Replace another owner's XDP program instead of failing, unless it is that of a living process of xwarp. It is put back if
    /// the interface cannot be opened.
    pub replace_program: bool,
    /// Time for which a busy queue is retried: the kernel frees a queue only some milliseconds after its last owner
    /// closed it, and later on a busy machine. [`Duration::MAX`] retries without end.
    pub busy_retry: Duration,
    /// Time for which an address may be missing before the connections from it end, not counting the time without a carrier.
    /// Programs that configure interfaces remove addresses and add them again, and virtual addresses move between hosts; until
    /// then, the connections only stall, like those of the kernel's TCP. A helper uses its own setting.
    pub address_limit: Duration,
    /// Send buffer of each AF_XDP socket, in bytes; the kernel's default stops after about 90 frames. A helper uses its own
    /// setting.
    pub send_buffer_bytes: usize,
    /// Whether this process opens the interface itself or asks the helper for a device on it.
    pub origin: OriginPreference,
    /// The helper's socket. `None`: the path in the environment variable `XWARP_HELPER`, else `/run/xwarp/xwarpd.sock`.
    pub helper: Option<PathBuf>,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            mode: ModePreference::Probe,
            vlan: None,
            service_vlan: None,
            receive_chunks: 1024,
            transmit_chunks: 512,
            ring_size: 512,
            replace_program: false,
            busy_retry: Duration::from_secs(1),
            address_limit: Duration::from_secs(30),
            send_buffer_bytes: 4 << 20,
            origin: OriginPreference::Probe,
            helper: None,
        }
    }
}

impl DriverConfig {
    /// The sizes of frame memory and rings.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            receive_chunks: self.receive_chunks,
            transmit_chunks: self.transmit_chunks,
            ring: self.ring_size,
        }
    }
}

/// Attributes of an open interface, including the choices made at opening. Names and indices of a granted interface are
/// those of the helper's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attributes {
    /// The owner.
    pub origin: Origin,
    /// Its name.
    pub name: String,
    /// Name of the interface that carries the frames: the parent of a VLAN interface, else `name`.
    pub carrier: String,
    /// Index of the interface `name`.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// The kernel's MTU of the interface, in bytes of IP packet.
    pub mtu: u32,
    /// Largest path MTU through this driver, in bytes of IP packet: the interface's MTU (less a second VLAN tag), at
    /// most [`largest_mtu`](Self::largest_mtu).
    pub path_mtu: u16,
    /// Largest IP packet that frames can carry while the interface is open, in bytes. [`SINGLE_CHUNK_MTU`] if the
    /// interface's MTU was not larger at opening, or if the kernel supports no frames of several chunks (before 6.6).
    pub largest_mtu: u16,
    /// Whether the interface is up and has a carrier.
    pub up: bool,
    /// The path of frames between kernel and rings.
    pub mode: Mode,
    /// Receive queues that have a socket: all active ones, or the owner's part of them
    /// ([`Interface::open_several`](crate::Interface::open_several)).
    pub queues: u16,
    /// VLAN tags of our frames, outermost first, as ids.
    pub vlans: Vec<u16>,
    /// The kernel's id of our steering program.
    pub program_id: u32,
}

xwarp_tcp::counters! {
    /// Counters since the interface was opened. Frames are counted once, bytes from the Ethernet header on.
    pub struct LinkCounters in "link" {
        /// Frames taken from the receive rings.
        received_frames,
        /// Their bytes.
        received_bytes,
        /// Received frames with a descriptor that named memory outside our chunks, or with too many chunks: dropped.
        receive_malformed,
        /// Frames put on the transmit rings.
        sent_frames,
        /// Their bytes.
        sent_bytes,
        /// Kicks: system calls that made the kernel send.
        kicks,
        /// Kicks that returned EAGAIN: frames stay on the ring and the next kick continues.
        kick_again,
        /// Kicks that returned EBUSY: each lost one frame (the path's queue was full).
        kick_lost,
        /// Kicks that returned ENOBUFS: the kernel had no memory; frames stay on the ring.
        kick_no_buffers,
        /// Kicks that returned ENETDOWN or ENXIO: the interface is down or removed.
        kick_down,
        /// Kicks that failed with another error.
        kick_failed,
        /// Frames that arrived on another engine's queue of the interface and were handed over to us.
        handed_in,
        /// Frames dropped because the inbox of the engine that owns their flow was full, or to make room in it for others.
        hand_over_full,
        /// Fragments of IP packets that arrived.
        fragments,
        /// Packets that were reassembled from fragments.
        reassembled,
        /// Submissions of a frame to a full transmit ring.
        transmit_ring_full,
        /// Allocations of a transmit frame while none was free.
        transmit_exhausted,
        /// The kernel's count of frames that it dropped at our sockets (`XDP_STATISTICS.rx_dropped`).
        kernel_rx_dropped,
        /// ... because a receive ring was full.
        kernel_rx_ring_full,
        /// ... because a fill ring was empty: raise [`DriverConfig::receive_chunks`].
        kernel_fill_ring_empty,
        /// Receive descriptors that the kernel refused.
        kernel_rx_invalid,
        /// Transmit descriptors that the kernel refused.
        kernel_tx_invalid,
    }
}
