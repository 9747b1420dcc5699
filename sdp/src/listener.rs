//! Listeners.

use std::{
    collections::VecDeque,
    fmt, io,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use xwarp_verbs::cm::{CmId, ListenOptions};

use crate::{
    moved::Resumption,
    service::Sdp,
    socket::{Bell, Socket, Tasks},
    stream::SdpStream,
};

/// Connections of a listener that wait to be accepted.
pub(crate) struct Backlog {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    bell: Bell,
    most: usize,
    /// The only connection that this listener accepts: a suspended one that its peer makes again.
    pub(crate) resumes: Option<Mutex<Resumption>>,
}

#[derive(Default)]
pub(crate) struct Waiting {
    sockets: VecDeque<Arc<Socket>>,
    /// Connections that are being established.
    pending: usize,
    failed: bool,
    pub(crate) tasks: Tasks,
}

impl Backlog {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a place in the backlog for a connection that is being established; false if all are taken.
    pub(crate) fn reserve(&self) -> bool {
        let mut waiting = self.lock();
        let free = waiting.sockets.len() + waiting.pending < self.most;
        waiting.pending += usize::from(free);
        free
    }

    /// Frees the place of a connection that was not established.
    pub(crate) fn release(&self) {
        let mut waiting = self.lock();
        waiting.pending = waiting.pending.saturating_sub(1);
    }

    /// Adds an established connection, which has a place.
    pub(crate) fn push(&self, socket: Arc<Socket>) {
        let mut waiting = self.lock();
        waiting.pending = waiting.pending.saturating_sub(1);
        waiting.sockets.push_back(socket);
        waiting.tasks.wake();
        self.bell.set(true);
        self.changed.notify_one();
    }

    /// The device has failed, or its interface was removed.
    pub(crate) fn fail(&self) {
        let mut waiting = self.lock();
        waiting.failed = true;
        waiting.tasks.wake();
        self.bell.set(true);
        self.changed.notify_all();
    }
}

/// A socket that listens, in the manner of [`std::net::TcpListener`]. The descriptor is readable while a connection waits.
pub struct SdpListener {
    id: CmId,
    pub(crate) backlog: Arc<Backlog>,
    nonblocking: AtomicBool,
    pub(crate) sdp: Sdp,
}

impl fmt::Debug for SdpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SdpListener").field("local", &self.id.local_address()).finish_non_exhaustive()
    }
}

impl SdpListener {
    /// Listens at `address`. The IP address may be a wildcard; port 0 chooses a free port. It is a port of iWARP: the kernel's
    /// listener at the same port does not get its connections.
    pub fn bind(sdp: &Sdp, address: SocketAddr) -> io::Result<Self> {
        Self::bind_for(sdp, address, None)
    }

    /// Does the same, for the peer of one suspended connection only, if there is one.
    pub(crate) fn bind_for(
        sdp: &Sdp,
        address: SocketAddr,
        resumes: Option<Mutex<Resumption>>,
    ) -> io::Result<Self> {
        let core = &sdp.0.core;
        let most = if resumes.is_some() { 1 } else { core.options.backlog.max(1) };
        let (waiting, changed, bell) = (Mutex::default(), Condvar::new(), Bell::new()?);
        let backlog = Backlog { waiting, changed, bell, most, resumes };
        let backlog = Arc::new(backlog);
        let id = CmId::new(&core.device, &core.events);
        id.bind(address).map_err(|error| io::Error::new(io::ErrorKind::AddrInUse, error))?;
        core.listen(&backlog, id.key());
        let options =
            ListenOptions { backlog: most, framing: Some(core.framing()), ..ListenOptions::default() };
        let listener = Self { id, backlog, nonblocking: AtomicBool::new(false), sdp: sdp.clone() };
        listener.id.listen(options).map_err(io::Error::other)?;
        Ok(listener)
    }

    /// Takes the next connection, if one waits.
    pub(crate) fn next(&self, waiting: &mut Waiting) -> Option<io::Result<(SdpStream, SocketAddr)>> {
        if let Some(socket) = waiting.sockets.pop_front() {
            self.backlog.bell.set(!waiting.sockets.is_empty());
            let stream = SdpStream::of(socket, &self.sdp);
            return Some(stream.peer_addr().map(|peer| (stream, peer)));
        }
        waiting.failed.then(|| Err(io::Error::other("the device has failed")))
    }

    /// The next connection and its peer's address.
    pub fn accept(&self) -> io::Result<(SdpStream, SocketAddr)> {
        self.accept_until(None)
    }

    /// Does the same, until `end` at the latest.
    pub(crate) fn accept_until(&self, end: Option<Instant>) -> io::Result<(SdpStream, SocketAddr)> {
        let mut waiting = self.backlog.lock();
        loop {
            if let Some(accepted) = self.next(&mut waiting) {
                return accepted;
            }
            if self.nonblocking.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            waiting = match end.map(|end| end.saturating_duration_since(Instant::now())) {
                None => self.backlog.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(io::ErrorKind::TimedOut.into()),
                Some(left) => {
                    let waited = self.backlog.changed.wait_timeout(waiting, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Iterates over the connections.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<SdpStream>> + '_ {
        std::iter::from_fn(|| Some(self.accept().map(|(stream, _)| stream)))
    }

    /// The bound address, with the chosen port if port 0 was requested.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.id.local_address().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Makes [`Self::accept`] return [`io::ErrorKind::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
    }
}

impl AsFd for SdpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.backlog.bell.as_fd()
    }
}

impl AsRawFd for SdpListener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for SdpListener {
    fn drop(&mut self) {
        self.sdp.0.core.unlisten(self.id.key());
        // Connections that are not accepted are reset.
        for socket in std::mem::take(&mut self.backlog.lock().sockets) {
            drop(SdpStream::of(socket, &self.sdp));
        }
    }
}
