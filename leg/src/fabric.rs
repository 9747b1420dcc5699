//! [`Fabric`]: a process's connection to the fabric of its user, a switch in user space. Any thread may call.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
use rustix::process::geteuid;
use xwarp_control::{
    Choice, Device, Event, Host, Neighbour, Reason, Refusal, Reply, Request, Sizes, Tagged, VERSION,
};

use crate::hosts::is_name;
use crate::memif::Handshake;
use crate::message::{receive_message, send_message};
use crate::near::{Bells, Leg, LegSizes};
use crate::place::Place;
use crate::sys::NotInherited;

/// Longest wait for an answer, and for a fabric to start.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause before a fabric that is ending, or whose queue of connections is full, is tried again.
const PAUSE: Duration = Duration::from_millis(5);
/// Largest number of events that are read at a time.
const MAX_EVENTS: usize = 64;

/// Why the fabric does not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The directory of its socket cannot be used, or its program cannot be started; the text has a remedy.
    #[error("{0}")]
    Place(#[source] io::Error),
    /// Another user's process serves at the socket.
    #[error("{} is served by a process of user {uid}, not of this one: XWARP_FABRIC_DIRECTORY", socket.display())]
    OtherUser {
        /// The socket.
        socket: PathBuf,
        /// The process's user.
        uid: u32,
    },
    /// It refuses.
    #[error("the fabric refuses: {}", .0.text)]
    Refused(Refusal),
    /// It has ended, or does not answer.
    #[error("the fabric is gone ({0})")]
    Gone(#[source] io::Error),
}

impl FabricError {
    /// Why it refuses, if it does.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Refused(refusal) => Some(refusal.reason),
            _ => None,
        }
    }
}

impl FabricError {
    /// The kind of the error as of a system call.
    pub fn kind(&self) -> io::ErrorKind {
        match self.reason() {
            Some(Reason::PortInUse | Reason::PortsExhausted) => io::ErrorKind::AddrInUse,
            Some(Reason::NotOurAddress) => io::ErrorKind::AddrNotAvailable,
            Some(Reason::Permission) => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::Other,
        }
    }
}

impl From<Errno> for FabricError {
    fn from(errno: Errno) -> Self {
        Self::Gone(errno.into())
    }
}

/// A connection to the fabric.
#[derive(Debug)]
pub struct Fabric {
    /// A child that kept the connection would keep the device and its ports.
    _not_inherited: NotInherited,
    socket: OwnedFd,
    /// The number of the last request. A request and its answer are one step.
    last: Mutex<u32>,
}

/// A device of the fabric.
#[derive(Debug)]
pub struct Opened {
    /// Its leg.
    pub leg: Leg,
    /// Its attributes.
    pub device: Device,
    /// What the fabric announces.
    pub events: Events,
}

/// What the fabric announces to one device.
#[derive(Debug)]
pub struct Events {
    socket: OwnedFd,
    _not_inherited: NotInherited,
}

impl Events {
    /// Readable when there is something to [read](Self::read).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads the events that have come, without waiting.
    ///
    /// # Errors
    /// The device has ended; the text says why, for people.
    pub fn read(&self, mut notify: impl FnMut(Event)) -> Result<(), String> {
        for _ in 0..MAX_EVENTS {
            match receive_message(self.socket.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => return Err("the fabric has ended".into()),
                Ok((bytes, _)) => match Event::decode(&bytes) {
                    Ok(Event::Revoked { text }) => return Err(text),
                    Ok(event) => notify(event),
                    Err(error) => return Err(error.to_string()),
                },
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.to_string()),
            }
        }
        Ok(())
    }
}

impl Fabric {
    /// Connects to the fabric at `place`, which is started if it does not run.
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn connect(place: &Place) -> Result<Self, FabricError> {
        let end = Instant::now() + PATIENCE;
        loop {
            match Self::connect_once(place) {
                // It is not there, or has ended while this process connected.
                Err(FabricError::Gone(error)) if Instant::now() < end => match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                        place.start().map_err(FabricError::Place)?;
                    }
                    io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::WouldBlock => {
                        thread::sleep(PAUSE);
                    }
                    _ => return Err(FabricError::Gone(error)),
                },
                connected => return connected,
            }
        }
    }

    /// Connects to the fabric at `place` if it runs.
    ///
    /// # Errors
    /// See [`FabricError`]; [`FabricError::Gone`] also if it does not run.
    pub fn connect_once(place: &Place) -> Result<Self, FabricError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let path = place.socket();
        connect(&socket, &SocketAddrUnix::new(&path)?)?;
        let server = sockopt::socket_peercred(&socket)?.uid;
        // Root's processes can do everything anyway.
        if server != geteuid() && !server.is_root() {
            return Err(FabricError::OtherUser { socket: path, uid: server.as_raw() });
        }
        let fabric =
            Self { _not_inherited: NotInherited::new([socket.as_fd()]), socket, last: Mutex::new(0) };
        match fabric.call(Request::Hello { version: VERSION })? {
            Reply::Hello { version: VERSION } => Ok(fabric),
            other => Err(unexpected(&other)),
        }
    }

    /// The process id of the fabric.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn pid(&self) -> io::Result<u32> {
        Ok(sockopt::socket_peercred(&self.socket)?.pid.as_raw_nonzero().get() as u32)
    }

    /// Opens a device on the host `host`, which is added to the table if it is not there; once for each connection.
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn open(&self, host: &str, sizes: LegSizes) -> Result<Opened, FabricError> {
        check_name(host)?;
        let request = Request::Open {
            interface: Choice::Name(host.into()),
            sizes: Sizes {
                receive_chunks: 1 << sizes.receive_log2,
                transmit_chunks: 1 << sizes.transmit_log2,
                ring: 1 << sizes.transmit_log2,
            },
        };
        let (reply, descriptors) = self.exchange(request)?;
        let Reply::Opened(device) = reply else { return Err(unexpected(&reply)) };
        let Ok([leg, events]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            return Err(FabricError::Gone(io::Error::new(io::ErrorKind::InvalidData, "it passed no leg")));
        };
        let handshake = Handshake { id: 0, secret: "", patience: PATIENCE };
        let leg = Bells::of_sockets().and_then(|bells| Leg::connect(leg, sizes, bells, &handshake));
        let leg = leg.map_err(FabricError::Gone)?;
        let events = Events { _not_inherited: NotInherited::new([events.as_fd()]), socket: events };
        Ok(Opened { leg, device, events })
    }

    /// The host `name` of the table; with `join` it is added if it is not there.
    ///
    /// # Errors
    /// See [`FabricError`]; [`Reason::NotServed`] if there is no such host.
    pub fn host(&self, name: &str, join: bool) -> Result<Host, FabricError> {
        check_name(name)?;
        match self.call(Request::Host { name: name.into(), join })? {
            Reply::Host(host) => Ok(host),
            other => Err(unexpected(&other)),
        }
    }

    /// Changes the faults for frames from one host to another, by words such as `loss 3% delay 5ms seed 7`, `cut`, `heal`, `clear`.
    ///
    /// # Errors
    /// See [`FabricError`]; [`Reason::State`] if there is no such host, or a word is wrong.
    pub fn set_faults(&self, from: &str, to: &str, words: &str) -> Result<(), FabricError> {
        check_name(from)?;
        check_name(to)?;
        match self.call(Request::Faults { from: from.into(), to: to.into(), words: words.into() })? {
            Reply::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Reserves `port` (0: any free one) on `address` (`None`: all addresses of the device's host).
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn reserve(&self, address: Option<IpAddr>, port: u16) -> Result<u16, FabricError> {
        match self.call(Request::Reserve { address, port })? {
            Reply::Reserved { port } => Ok(port),
            other => Err(unexpected(&other)),
        }
    }

    /// Gives a port back, as it was reserved. Errors are ignored: the fabric may have ended.
    pub fn release(&self, address: Option<IpAddr>, port: u16) {
        let message = Tagged { id: 0, body: Request::Release { address, port } };
        let _ = self.send(&message, Instant::now() + PATIENCE);
    }

    /// How to reach an address: our address, and the Ethernet address of the peer.
    ///
    /// # Errors
    /// See [`FabricError`]; [`Reason::Route`] if no host has the address.
    pub fn resolve(
        &self,
        destination: IpAddr,
        source: Option<IpAddr>,
    ) -> Result<(IpAddr, xwarp_tcp::wire::Mac), FabricError> {
        match self.call(Request::Resolve { destination, source })? {
            Reply::Resolved { source, neighbour: Neighbour::Known(mac), .. } => Ok((source, mac)),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks something of the fabric.
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn call(&self, body: Request) -> Result<Reply, FabricError> {
        self.exchange(body).map(|(reply, _)| reply)
    }

    fn exchange(&self, body: Request) -> Result<(Reply, Vec<OwnedFd>), FabricError> {
        let end = Instant::now() + PATIENCE;
        // Held for one round trip, so that each thread reads its own answer.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = last.wrapping_add(1).max(1);
        let id = *last;
        self.send(&Tagged { id, body }, end)?;
        loop {
            match receive_message(self.socket.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => return Err(Errno::CONNRESET.into()),
                Ok((bytes, descriptors)) => {
                    let reply = Tagged::<Reply>::decode(&bytes);
                    let reply = reply.map_err(|error| FabricError::Gone(io::Error::other(error)))?;
                    match reply.body {
                        Reply::Refused(refusal) if reply.id == id || reply.id == 0 => {
                            return Err(FabricError::Refused(refusal));
                        }
                        body if reply.id == id => return Ok((body, descriptors)),
                        // The answer to a request that was given up.
                        _ => {}
                    }
                }
                Err(Errno::AGAIN) => self.ready(PollFlags::IN, end)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn send(&self, message: &Tagged<Request>, end: Instant) -> Result<(), FabricError> {
        let bytes = message.encode();
        loop {
            match send_message(self.socket.as_fd(), &bytes, &[]) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.ready(PollFlags::OUT, end)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn ready(&self, flags: PollFlags, end: Instant) -> Result<(), FabricError> {
        let limit = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(&self.socket, flags)], limit.as_ref()) {
            Ok(0) => Err(FabricError::Gone(io::ErrorKind::TimedOut.into())),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Refuses a name that no host has: in a message it would be cut.
fn check_name(name: &str) -> Result<(), FabricError> {
    if is_name(name) {
        return Ok(());
    }
    let text = format!("{name:?} is no name of a host: letters, digits, '-', '.' and '_', at most 15");
    Err(FabricError::Refused(Refusal { reason: Reason::NotServed, text }))
}

fn unexpected(reply: &Reply) -> FabricError {
    FabricError::Gone(io::Error::new(io::ErrorKind::InvalidData, format!("an unexpected answer: {reply:?}")))
}
