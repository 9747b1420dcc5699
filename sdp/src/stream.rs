//! Streams.

mod memory;

use std::{
    fmt,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use xwarp_verbs::cm::CmId;

use crate::{
    machine::End,
    moved::Successor,
    service::Sdp,
    socket::{Socket, State, Until},
};

pub use self::memory::{Received, Sending};

/// The state that the clones of a stream share. Dropping it closes the stream.
struct Handle {
    socket: Arc<Socket>,
    read_timeout: Mutex<Option<Duration>>,
    write_timeout: Mutex<Option<Duration>>,
    nonblocking: AtomicBool,
    nodelay: AtomicBool,
    // Dropped last: the service runs until the connection is closed.
    sdp: Sdp,
}

/// A stream, in the manner of [`std::net::TcpStream`].
///
/// Dropping the last clone closes it: written data is still sent, unless received data is unread, which resets the
/// connection as with TCP. The descriptor is readable while a read would not block; it says nothing about writes.
pub struct SdpStream(Arc<Handle>);

impl fmt::Debug for SdpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.socket.lock();
        f.debug_struct("SdpStream")
            .field("local", &state.local)
            .field("peer", &state.peer)
            .finish_non_exhaustive()
    }
}

fn value<T: Copy>(mutex: &Mutex<T>) -> T {
    *mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SdpStream {
    pub(crate) fn of(socket: Arc<Socket>, sdp: &Sdp) -> Self {
        Self(Arc::new(Handle {
            socket,
            read_timeout: Mutex::default(),
            write_timeout: Mutex::default(),
            nonblocking: AtomicBool::new(false),
            nodelay: AtomicBool::new(true),
            sdp: sdp.clone(),
        }))
    }

    /// Connects to the SDP listener at `peer`.
    pub fn connect(sdp: &Sdp, peer: SocketAddr) -> io::Result<Self> {
        Self::connect_until(sdp, peer, None)
    }

    /// Connects to the SDP listener at `peer`, at most for `limit`.
    pub fn connect_timeout(sdp: &Sdp, peer: SocketAddr, limit: Duration) -> io::Result<Self> {
        Self::connect_until(sdp, peer, Some(Instant::now() + limit))
    }

    fn connect_until(sdp: &Sdp, peer: SocketAddr, end: Option<Instant>) -> io::Result<Self> {
        Self::connect_from(sdp, sdp.0.core.identifier(None)?, peer, end)
    }

    pub(crate) fn connect_from(
        sdp: &Sdp,
        id: CmId,
        peer: SocketAddr,
        end: Option<Instant>,
    ) -> io::Result<Self> {
        let stream = Self::of(sdp.0.core.connect(id, peer)?, sdp);
        let socket = &stream.0.socket;
        let mut state = socket.lock();
        loop {
            if let Some(outcome) = state.connected() {
                drop(state);
                return outcome.map(|()| stream);
            }
            let (after, in_time) = socket.wait(state, Until::Changed, end);
            state = after;
            if !in_time {
                state.machine.abort();
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    pub(crate) fn socket(&self) -> &Arc<Socket> {
        &self.0.socket
    }

    fn is_nonblocking(&self) -> bool {
        self.0.nonblocking.load(Ordering::Relaxed)
    }

    /// Repeats `step` until it returns a value, or the machine has nothing more to do.
    pub(crate) fn attempt<R>(
        &self,
        state: &mut State,
        mut step: impl FnMut(&mut State) -> Option<io::Result<R>>,
    ) -> Option<io::Result<R>> {
        loop {
            let outcome = step(state);
            let acted = self.0.socket.drive_waiting(state);
            if outcome.is_some() || !acted {
                return outcome;
            }
        }
    }

    /// Repeats `step` until it returns a value; in between, the thread waits for a change that affects it.
    pub(crate) fn until<R>(
        &self,
        what: Until,
        limit: Option<Duration>,
        mut step: impl FnMut(&mut State) -> Option<io::Result<R>>,
    ) -> io::Result<R> {
        let end = limit.map(|limit| Instant::now() + limit);
        let socket = &self.0.socket;
        let mut state = socket.lock();
        loop {
            if let Some(outcome) = self.attempt(&mut state, &mut step) {
                return outcome;
            }
            if self.is_nonblocking() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let (after, in_time) = socket.wait(state, what, end);
            state = after;
            if !in_time {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
    }

    fn count(&self, name: &'static str, bytes: usize) {
        if bytes > 0 {
            self.0.sdp.0.core.count(name, bytes as u64);
        }
    }

    fn count_sent(&self, bytes: usize) {
        self.0.sdp.0.core.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn count_received(&self, bytes: usize) {
        self.0.sdp.0.core.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn receive(&self, out: &mut [u8], peek: bool) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.until(Until::Changed, value(&self.0.read_timeout), |state| self.read_step(state, out, peek))
    }

    /// The result of a read; `None` when it must wait.
    pub(crate) fn read_step(
        &self,
        state: &mut State,
        out: &mut [u8],
        peek: bool,
    ) -> Option<io::Result<usize>> {
        if state.read_shut {
            return Some(Ok(0));
        }
        let n = if peek { state.machine.peek(out) } else { state.machine.read(out) };
        if n > 0 {
            if !peek {
                self.count_received(n);
            }
            return Some(Ok(n));
        }
        if state.machine.at_eof() {
            return Some(Ok(0));
        }
        if let Some(error) = state.error() {
            return Some(Err(error));
        }
        state.machine.want_messages();
        None
    }

    /// Reads without taking the bytes out of the stream.
    pub fn peek(&self, out: &mut [u8]) -> io::Result<usize> {
        self.receive(out, true)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        self.until(Until::Changed, value(&self.0.write_timeout), |state| self.write_step(state, bytes))
    }

    /// The result of a write; `None` when it must wait.
    pub(crate) fn write_step(&self, state: &mut State, bytes: &[u8]) -> Option<io::Result<usize>> {
        if let Some(error) = broken(state) {
            return Some(Err(error));
        }
        let n = state.machine.write(bytes);
        self.count_sent(n);
        (n > 0).then_some(Ok(n))
    }

    /// Sends one byte out of band (`MSG_OOB`).
    pub fn send_oob(&self, byte: u8) -> io::Result<()> {
        self.until(Until::Changed, value(&self.0.write_timeout), |state| {
            if let Some(error) = broken(state) {
                return Some(Err(error));
            }
            state.machine.write_oob(byte).then_some(Ok(()))
        })
    }

    /// Takes the last out-of-band byte, if one has arrived (`MSG_OOB`). Reads stop at its place in the stream.
    pub fn recv_oob(&self) -> Option<u8> {
        let mut state = self.0.socket.lock();
        let byte = state.machine.take_oob();
        self.0.socket.drive(&mut state);
        byte
    }

    /// Whether the next byte to read follows the last out-of-band byte (`SIOCATMARK`).
    pub fn at_mark(&self) -> bool {
        self.0.socket.lock().machine.at_mark()
    }

    /// Shuts down one direction or both. The peer learns the end of the sending direction after all data, as by TCP's
    /// FIN.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        let mut state = self.0.socket.lock();
        if let Some(error) = state.error() {
            return Err(error);
        }
        if how != Shutdown::Read {
            state.machine.shutdown();
        }
        if how != Shutdown::Write {
            state.read_shut = true;
        }
        self.0.socket.drive(&mut state);
        Ok(())
    }

    /// Waits until the peer's host has received all written data, and the end of the stream if [`Self::shutdown`] was
    /// called; at most for `limit`.
    pub fn wait_sent(&self, limit: Option<Duration>) -> io::Result<()> {
        self.until(Until::Changed, limit, |state| {
            if let Some(error) = state.error() {
                return Some(Err(error));
            }
            let acknowledged = state.link.as_ref().is_none_or(|link| link.slots.all_free());
            (acknowledged && state.machine.is_all_sent()).then_some(Ok(()))
        })
    }

    /// Waits until the connection has ended; an error says that it did not end in order. Both ends in order after both have
    /// shut down their sending direction.
    pub fn wait_closed(&self) -> io::Result<()> {
        self.until(Until::Changed, None, |state| {
            if let Some(error) = state.error() {
                return Some(Err(error));
            }
            state.machine.ended().map(|_| Ok(()))
        })
    }

    /// Resets the connection: unsent data is discarded, and the peer's reads fail (`SO_LINGER` of 0 s, then close).
    pub fn abort(&self) {
        let mut state = self.0.socket.lock();
        state.machine.abort();
        self.0.socket.drive(&mut state);
    }

    /// Moves the connection to `to`, a service with the same address: another one of this device (socket duplication),
    /// or one of another device (managed failover). The peer suspends its transfers, and connects again to a port that
    /// `to` has chosen. Received and unread bytes move too. This stream and its clones then fail with
    /// [`io::ErrorKind::ConnectionAborted`].
    ///
    /// Fails with [`io::ErrorKind::ResourceBusy`] while a clone sends or receives memory, or a direction is about to end.
    pub fn hand_over(&self, to: &Sdp) -> io::Result<Self> {
        let successor = Successor::bind(to, self.local_addr()?.ip())?;
        let state = self.suspend(successor.port()?)?;
        successor.resume(&state)
    }

    /// The first half of [`Self::hand_over`], for a service of another process: asks the peer to suspend its transfers and to connect
    /// again to `port`, that of a [`Successor`]. Returns the state of the stream, with all received and unsent bytes, for
    /// [`Successor::resume`].
    pub fn suspend(&self, port: u16) -> io::Result<Vec<u8>> {
        self.0.socket.suspend(port)
    }

    /// Another handle to the same stream.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(Arc::clone(&self.0)))
    }

    /// Our address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.lock().local.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.lock().peer.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The error that ended the connection, if any.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.0.socket.lock().error())
    }

    /// Makes calls return [`io::ErrorKind::WouldBlock`] instead of waiting, at all clones.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.0.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Whether [`Self::set_nodelay`] was set. Data is always sent at once.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.0.nodelay.load(Ordering::Relaxed))
    }

    /// Stored for programs that ask. Data is always sent at once.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.0.nodelay.store(nodelay, Ordering::Relaxed);
        Ok(())
    }

    /// The time limit of reads.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(value(&self.0.read_timeout))
    }

    /// The time limit of writes.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(value(&self.0.write_timeout))
    }

    /// Sets the time limit of reads: after it they return [`io::ErrorKind::WouldBlock`]. A limit of zero is an error.
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        set_limit(&self.0.read_timeout, limit)
    }

    /// Sets the time limit of writes, like [`Self::set_read_timeout`].
    pub fn set_write_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        set_limit(&self.0.write_timeout, limit)
    }
}

fn set_limit(place: &Mutex<Option<Duration>>, limit: Option<Duration>) -> io::Result<()> {
    if limit.is_some_and(|limit| limit.is_zero()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    *place.lock().unwrap_or_else(PoisonError::into_inner) = limit;
    Ok(())
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// The error of a write that is not possible.
fn broken(state: &State) -> Option<io::Error> {
    if state.machine.is_shut_down() || state.machine.ended() == Some(End::Graceful) {
        return Some(io::ErrorKind::BrokenPipe.into());
    }
    state.error()
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.socket.lock();
        state.orphaned = Some(Instant::now());
        let was_open = state.machine.is_open() || state.made_again;
        if state.machine.buffered() > 0 || state.machine.has_offer() || !was_open {
            state.machine.abort();
        } else {
            state.machine.shutdown();
        }
        self.socket.drive(&mut state);
    }
}

impl Read for &SdpStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.receive(out, false)
    }
}

impl Write for &SdpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for SdpStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.receive(out, false)
    }
}

impl Write for SdpStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for SdpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.watched_bell().as_fd()
    }
}

impl AsRawFd for SdpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
