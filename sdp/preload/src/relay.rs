//! Copying between a leg, which is the library's end of a connection on the loopback, and a stream over SDP.
//!
//! Each direction has a thread. A direction that ends in order is closed behind its data at the other side; a reset at one
//! side resets the other.

use std::{
    io::{self, Write as _},
    net::{Shutdown, SocketAddr},
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, acceptfrom_with, bind, connect,
        connect_unspec, getsockname, listen, recv, send, shutdown, socket_with, sockopt,
    },
};
use xwarp_sdp::SdpStream;
use xwarp_verbs::{Memory, Pages};

/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 256 << 10;
/// Stack of a thread, in bytes.
const STACK_BYTES: usize = 128 << 10;
/// Shorter pieces go in messages.
const ADVERTISED_BYTES: usize = 64 << 10;
/// How often a leg without data is looked at, at the end of the process: the kernel moves bytes from the program's socket
/// to the leg when the leg has room again.
const LAST_LOOKS: u32 = 3;
/// How long the program's socket may take to arrive at the leg.
const ARRIVAL: Duration = Duration::from_secs(2);

/// The relays of a process.
#[derive(Debug, Default)]
pub struct Relays {
    /// Directions towards the network that have not ended.
    sending: Mutex<u64>,
    ended: Condvar,
    /// Bytes that went towards the network.
    moved: AtomicU64,
    /// Readable when the process ends.
    ending: OnceLock<OwnedFd>,
}

/// A listening socket on the loopback for one connection.
#[derive(Debug)]
pub struct Gate {
    socket: OwnedFd,
    pub address: SocketAddr,
}

fn loopback(six: bool) -> SocketAddr {
    if six { ([0, 0, 0, 0, 0, 0, 0, 1], 0).into() } else { ([127, 0, 0, 1], 0).into() }
}

fn tcp_socket(six: bool) -> io::Result<OwnedFd> {
    let family = if six { AddressFamily::INET6 } else { AddressFamily::INET };
    Ok(socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn local_address(socket: &OwnedFd) -> io::Result<SocketAddr> {
    getsockname(socket)?.try_into().map_err(|_| io::ErrorKind::AddrNotAvailable.into())
}

impl Gate {
    /// Opens a gate of the family of the program's socket.
    pub fn open(six: bool) -> io::Result<Self> {
        let socket = tcp_socket(six)?;
        bind(&socket, &loopback(six))?;
        listen(&socket, 4)?;
        Ok(Self { address: local_address(&socket)?, socket })
    }

    /// The leg: the connection that comes from `program`. Others, which may be anybody's on this host, are closed.
    pub fn pass(&self, program: SocketAddr) -> io::Result<OwnedFd> {
        let end = Instant::now() + ARRIVAL;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout: Timespec = left.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let (leg, from) = acceptfrom_with(&self.socket, SocketFlags::CLOEXEC)?;
            if from.and_then(|from| SocketAddr::try_from(from).ok()) == Some(program) {
                return Ok(leg);
            }
        }
    }
}

/// A leg to the program's listening socket at `service`. `name` is called with the leg's own address before the program can
/// see the connection.
pub fn call(service: SocketAddr, name: impl FnOnce(SocketAddr)) -> io::Result<OwnedFd> {
    let leg = tcp_socket(service.is_ipv6())?;
    bind(&leg, &SocketAddr::new(service.ip(), 0))?;
    name(local_address(&leg)?);
    connect(&leg, &service)?;
    Ok(leg)
}

/// Resets the program's connection.
pub fn reset(leg: &OwnedFd) {
    // The kernel sends a reset when a connected socket is dissolved. It refuses that while another thread waits in a call
    // on the socket for a moment.
    for _ in 0..100 {
        if connect_unspec(leg) != Err(Errno::BUSY) {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

impl Relays {
    /// Starts to copy.
    pub fn start(self: &Arc<Self>, leg: OwnedFd, stream: SdpStream) -> io::Result<()> {
        // Small messages are not held back on the way to the program.
        sockopt::set_tcp_nodelay(&leg, true)?;
        let (leg, stream) = (Arc::new(leg), Arc::new(stream));
        let thread = |name: &str| thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
        let receives = (Arc::clone(&leg), Arc::clone(&stream));
        let relays = Arc::clone(self);
        if self.ending.get().is_none() {
            let _ = self.ending.set(eventfd(0, EventfdFlags::CLOEXEC)?);
        }
        *self.sending.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let sends = move || {
            if relays.send_all(&leg, &stream).is_err() {
                stream.abort();
            }
            *relays.sending.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            relays.ended.notify_all();
        };
        if let Err(error) = thread("xwarp-sdp-send").spawn(sends) {
            *self.sending.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            return Err(error);
        }
        let (leg, stream) = receives;
        thread("xwarp-sdp-recv").spawn(move || {
            if receive_all(&leg, &stream).is_err() {
                stream.abort();
                reset(&leg);
            }
        })?;
        Ok(())
    }

    /// The process ends. Waits until the peers have what the program has sent, as long as bytes move within each `patience`.
    pub fn finish(&self, patience: Duration) {
        let Some(ending) = self.ending.get() else { return };
        // Readable from now on.
        let _ = rustix::io::write(ending, &1u64.to_ne_bytes());
        let mut sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        while *sending > 0 {
            let before = self.moved.load(Ordering::Relaxed);
            let (after, waited) =
                self.ended.wait_timeout(sending, patience).unwrap_or_else(PoisonError::into_inner);
            sending = after;
            if waited.timed_out() && self.moved.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }

    /// Sends what the program sends. Long pieces are advertised, so that the peer's relay reads them by RDMA.
    fn send_all(&self, leg: &OwnedFd, stream: &SdpStream) -> io::Result<()> {
        let mut bytes = vec![0; CHUNK_BYTES];
        let memory = Memory::anonymous(CHUNK_BYTES, Pages::Normal)?;
        let mut last_looks = LAST_LOOKS;
        loop {
            let ends = self.wait_readable(leg)?;
            let len = match recv(leg, &mut *bytes, RecvFlags::DONTWAIT) {
                Ok((_, len)) => len,
                Err(Errno::AGAIN) if ends && last_looks > 0 => {
                    last_looks -= 1;
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(Errno::AGAIN) if ends => 0,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if len == 0 {
                stream.shutdown(Shutdown::Write)?;
                return stream.wait_sent(None);
            }
            last_looks = LAST_LOOKS;
            let piece = bytes.get(..len).unwrap_or_default();
            if len < ADVERTISED_BYTES {
                let mut stream = stream;
                stream.write_all(piece)?;
            } else {
                memory.write(0, piece).map_err(io::Error::other)?;
                stream.send_memory(&memory, 0..len)?;
            }
            self.moved.fetch_add(len as u64, Ordering::Relaxed);
        }
    }

    /// Waits until the leg is readable, or the process ends; returns whether it does. A call that waits in the leg itself
    /// would keep the kernel from resetting it.
    fn wait_readable(&self, leg: &OwnedFd) -> io::Result<bool> {
        let Some(ending) = self.ending.get() else { return Ok(false) };
        let mut waits = [leg, ending].map(|fd| PollFd::new(fd, PollFlags::IN));
        loop {
            match poll(&mut waits, None) {
                Ok(_) => return Ok(!waits[1].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What the peer sends.
fn receive_all(leg: &OwnedFd, stream: &SdpStream) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK_BYTES];
    let memory = Memory::anonymous(CHUNK_BYTES, Pages::Normal)?;
    loop {
        let len = stream.recv_memory(&memory, 0..CHUNK_BYTES)?;
        if len == 0 {
            // The program may have closed its socket already.
            let _ = shutdown(leg, rustix::net::Shutdown::Write);
            return Ok(());
        }
        let piece = bytes.get_mut(..len).unwrap_or_default();
        memory.read(0, piece).map_err(io::Error::other)?;
        let mut rest: &[u8] = piece;
        while !rest.is_empty() {
            match send(leg, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
