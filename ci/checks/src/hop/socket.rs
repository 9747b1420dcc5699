//! [`RawSocket`]: every frame that comes in on one interface, and a way to send frames out of it.

use std::{
    io::{self, ErrorKind},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
};

use anyhow::{Context as _, Result};
use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, bind, recvfrom, send,
        setsockopt, socket, sockopt,
    },
};

/// `PACKET_OUTGOING` of packet(7): what we sent ourselves comes back with this mark.
const OUTGOING: u8 = 4;

/// Room for the bursts of a peer while the bridge does not run: some 10 000 full frames.
const BUFFER_BYTES: usize = 32 << 20;

/// A packet socket on one interface.
#[derive(Debug)]
pub(super) struct RawSocket {
    socket: OwnedFd,
    index: usize,
}

impl RawSocket {
    /// On the interface of this name.
    pub(super) fn open(interface: &str) -> Result<Self> {
        let address = getifaddrs()?
            .filter(|found| found.interface_name == interface)
            .find_map(|found| found.address?.as_link_addr().copied())
            .with_context(|| format!("there is no interface {interface}"))?;
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll)
            .context("cannot open a packet socket (it needs root)")?;
        bind(socket.as_raw_fd(), &address).with_context(|| format!("cannot bind to {interface}"))?;
        setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_BYTES).context("receive buffer")?;
        setsockopt(&socket, sockopt::SndBufForce, &BUFFER_BYTES).context("send buffer")?;
        Ok(Self { socket, index: address.ifindex() })
    }

    /// The next frame that came in, if one waits: its length in `buffer`.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), buffer) {
                // Before it was bound, the socket took frames of all interfaces.
                Ok((len, Some(from))) if from.ifindex() == self.index && from.pkttype() != OUTGOING => {
                    return Ok(Some(len));
                }
                Ok(_) => {}
                Err(errno) => {
                    let error = io::Error::from(errno);
                    return if error.kind() == ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
                }
            }
        }
    }

    /// Sends a frame; whether the interface took it.
    pub(super) fn send(&self, frame: &[u8]) -> bool {
        send(self.socket.as_raw_fd(), frame, MsgFlags::empty()).is_ok()
    }
}

impl AsFd for RawSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
