//! [`PrivateNamespace`]: the network namespace of one client's socket.
//!
//! The namespace contains the far end of the client's pair and the loopback, nothing else. Therefore the helper may pass the
//! client a socket that is not bound: there is nothing but its own pair that the client could bind it to. The socket keeps the
//! namespace in the kernel, also after the pair was removed, so a device is charged to its user until the last socket of its
//! namespace is closed.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns, unshare};
use xwarp_driver::netlink::Netlink;
use xwarp_driver::netlink::veth::VethEnd;
use xwarp_driver::{DriverConfig, SINGLE_CHUNK_MTU, shared};
use xwarp_prog::Switch;

/// Name of each far end.
const FAR: &str = "far";

/// Index of the far end of slot 0. Each namespace numbers its interfaces from 1 on, and the switch tells ends apart by their
/// index alone.
const FAR_INDEX: u32 = 1 << 30;

/// MTU of far ends whose programs take chains of chunks, in bytes. The near end of a pair drops what its interface cannot send,
/// so the MTU of the far end is the largest possible one and never changes.
const CHAINS_MTU: u32 = 65535;

/// Index of the far end of a slot, in the namespace of its client's socket.
pub(crate) fn far_index(slot: u32) -> u32 {
    FAR_INDEX + slot
}

/// A request for a pair, with a socket in the namespace of its far end.
pub(crate) struct Order {
    pub client: u64,
    pub uid: u32,
    pub slot: u32,
    pub switch: Arc<Switch>,
    pub multi_buffer: bool,
    pub mtu: u32,
    pub generic: bool,
}

/// The namespace of one client's socket.
#[derive(Debug)]
pub(crate) struct PrivateNamespace {
    /// `/proc/net/protocols` of the namespace.
    protocols: File,
}

/// The far end of a new pair, up and with its program.
pub(crate) struct FarEnd {
    pub index: u32,
    pub link: OwnedFd,
    pub socket: OwnedFd,
    pub namespace: PrivateNamespace,
}

/// Makes a pair with the far end in a new namespace and the near end, which is down and has the name `near`, in `home`, the
/// namespace of the calling thread.
pub(crate) fn make_far_end(home: &OwnedFd, near: &str, order: &Order) -> Result<FarEnd> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace for a client")?;
    let made = inside(home, near, order);
    setns(home, CloneFlags::CLONE_NEWNET).context("returning from the network namespace of a client")?;
    made
}

/// Makes the far end in the calling thread's namespace.
fn inside(home: &OwnedFd, near: &str, order: &Order) -> Result<FarEnd> {
    let protocols = File::open("/proc/thread-self/net/protocols").context("opening /proc/net/protocols")?;
    let mut netlink = Netlink::open().context("opening a netlink socket")?;
    let index = far_index(order.slot);
    let mtu = if order.multi_buffer { CHAINS_MTU } else { u32::from(SINGLE_CHUNK_MTU) };
    let far = VethEnd { name: FAR, index, mtu };
    netlink
        .create_veth(far, VethEnd { name: near, index: 0, mtu: order.mtu }, home.as_fd())
        .context("creating a pair of virtual interfaces (veth)")?;
    let made = finish(&mut netlink, index, &order.switch);
    let (link, socket) = made.inspect_err(|_| {
        let _ = netlink.delete_link(index);
    })?;
    Ok(FarEnd { index, link, socket, namespace: PrivateNamespace { protocols } })
}

fn finish(netlink: &mut Netlink, far: u32, switch: &Switch) -> Result<(OwnedFd, OwnedFd)> {
    set_up(netlink, far)?;
    let link = switch.attach_far(far).context("attaching a program to the far end of a pair")?;
    let socket = shared::client_socket(FAR, DriverConfig::default().send_buffer_bytes)
        .context("making an AF_XDP socket for a client")?;
    Ok((link, socket))
}

/// Sets an end of a pair up, without an address.
pub(crate) fn set_up(netlink: &mut Netlink, end: u32) -> Result<()> {
    if let Err(error) = netlink.without_link_local(end) {
        tracing::debug!(%error, "an end of a pair has a link-local address");
    }
    netlink.set_up(end).context("setting an end of a pair up")
}

impl PrivateNamespace {
    /// The namespace whose `/proc/net/protocols` this is.
    pub(crate) fn of(protocols: OwnedFd) -> Self {
        Self { protocols: protocols.into() }
    }

    /// `/proc/net/protocols` of the namespace.
    pub(crate) fn protocols(&self) -> BorrowedFd<'_> {
        self.protocols.as_fd()
    }

    /// Whether no AF_XDP socket of the namespace is open any more, so that nothing of the client's is left in it.
    pub(crate) fn is_empty(&mut self) -> bool {
        let mut text = String::new();
        let read = self.protocols.rewind().and_then(|()| self.protocols.read_to_string(&mut text));
        if let Err(error) = read {
            tracing::warn!(%error, "the sockets of a namespace cannot be counted");
            return true;
        }
        xdp_sockets(&text) == 0
    }
}

/// The number of AF_XDP sockets in the text of `/proc/net/protocols`: its columns are name, size and sockets.
fn xdp_sockets(protocols: &str) -> u32 {
    let line = protocols.lines().find(|line| line.split_whitespace().next() == Some("XDP"));
    line.and_then(|line| line.split_whitespace().nth(2)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted_by_their_protocol() {
        let text = "protocol  size sockets  memory press maxhdr  slab module     cl co di\n\
                    XDP        960      3      -1   NI       0   no   kernel      n  n  n\n\
                    UNIX      1024     26      -1   NI       0   yes  kernel      y  n  n\n";
        assert_eq!(xdp_sockets(text), 3);
        assert_eq!(xdp_sockets(""), 0);
    }
}
