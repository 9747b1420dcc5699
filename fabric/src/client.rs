//! [`Client`]: one connection to the fabric: its process, its device, its leg.

use std::os::fd::{AsFd as _, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use xwarp_control::{Event, Reply, Tagged};
use xwarp_leg::memif::Master;
use xwarp_leg::message::send_message;

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    pub control: OwnedFd,
    /// Its process, as the kernel reports it; 0 if that is not visible.
    pub pid: i32,
    /// It has said hello.
    pub greeted: bool,
    pub device: Option<Device>,
    /// Ports that it has reserved.
    pub ports: usize,
}

/// The device of a client.
#[derive(Debug)]
pub(crate) struct Device {
    /// The host to which it belongs.
    pub host: u16,
    /// Its leg's handshake.
    pub master: Master,
    events: OwnedFd,
    /// Bytes of its memory.
    pub bytes: u64,
}

impl Client {
    pub(crate) fn new(control: OwnedFd) -> Result<Self, Errno> {
        let pid = sockopt::socket_peercred(&control)?.pid.as_raw_nonzero().get();
        Ok(Self { control, pid, greeted: false, device: None, ports: 0 })
    }

    /// Answers a request. Fails for a client that does not read answers, or has hung up.
    pub(crate) fn reply(&self, id: u32, body: Reply, descriptors: &[OwnedFd]) -> Result<(), Errno> {
        let descriptors: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
        send_message(self.control.as_fd(), &Tagged { id, body }.encode(), &descriptors)
    }

    /// Tells it that its device has ended, and why.
    pub(crate) fn revoke(&self, reason: &str) {
        let Some(device) = &self.device else { return };
        let event = Event::Revoked { text: reason.to_owned() };
        // A client that does not read finds its sockets closed.
        let _ = send_message(device.events.as_fd(), &event.encode(), &[]);
        device.master.disconnect(reason);
    }
}

impl Device {
    /// A device on a host, and what its client gets: the socket of its leg, and that of its events.
    pub(crate) fn new(host: u16, bytes: u64) -> std::io::Result<(Self, [OwnedFd; 2])> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let ((leg, their_leg), (events, their_events)) = (pair()?, pair()?);
        let device = Self { host, master: Master::new(leg, bytes)?, events, bytes };
        Ok((device, [their_leg, their_events]))
    }
}
