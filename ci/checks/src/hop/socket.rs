//! [`RawSocket`]: receives every frame of one interface and sends frames on it.

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

/// `PACKET_OUTGOING` of packet(7): the type of our own frames, which the socket also receives.
const OUTGOING: u8 = 4;

/// Size of the socket buffers: about 10 000 full frames, for bursts of a peer while the bridge does not run.
const BUFFER_BYTES: usize = 32 << 20;

/// A packet socket on one interface.
#[derive(Debug)]
pub struct RawSocket {
    socket: OwnedFd,
    index: usize,
}

impl RawSocket {
    /// Opens a socket on the interface with this name.
    pub fn open(interface: &str) -> Result<Self> {
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

    /// Receives the next frame into `buffer` and returns its length; `None` if no frame is waiting.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), buffer) {
                // Before it is bound, the socket receives frames of all interfaces.
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

    /// Sends a frame; returns whether the interface accepted it.
    pub fn send(&self, frame: &[u8]) -> bool {
        send(self.socket.as_raw_fd(), frame, MsgFlags::empty()).is_ok()
    }
}

impl AsFd for RawSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
