//! A process's connection to `xwarpd`, which grants it a device on an interface that many processes share.
//!
//! Any thread may call. The first thread that finds no other thread reading the socket reads it for all. Events arrive
//! on a socket of their own, which the interface reads.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io, thread};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use xwarp_control::{Reason, Refusal, Reply, Request, Tagged, VERSION};
use xwarp_leg::message::{receive_message, send_message};

use crate::sys::NotInherited;

/// Longest wait for the answer to a call that does not name a limit.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Pause before a helper whose queue of connections is full is tried again.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) enum CallError {
    /// The helper refuses.
    Refused(Refusal),
    /// The helper has ended, or violates the protocol.
    Gone(io::Error),
    /// The helper did not answer in time.
    TimedOut,
}

impl From<CallError> for io::Error {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(refusal) => Self::other(refusal),
            CallError::Gone(source) => Self::new(
                source.kind(),
                format!("xwarpd is gone ({source}): open the device again when it runs"),
            ),
            CallError::TimedOut => Self::new(io::ErrorKind::TimedOut, "xwarpd did not answer in time"),
        }
    }
}

impl From<Errno> for CallError {
    fn from(errno: Errno) -> Self {
        Self::Gone(errno.into())
    }
}

/// A connection to the helper.
pub(crate) struct Helper {
    /// A child that kept the connection would keep the device.
    _not_inherited: NotInherited,
    socket: OwnedFd,
    next_id: AtomicU32,
    answers: Mutex<Answers>,
    arrived: Condvar,
    /// A refusal was written to the log.
    told: AtomicBool,
}

#[derive(Default)]
struct Answers {
    /// The requests whose callers wait, by id.
    waiting: BTreeMap<u32, Waiting>,
    /// A thread reads the socket.
    reading: bool,
}

/// A request, which is repeated when another helper takes over.
struct Waiting {
    request: Request,
    /// `None` until it arrives.
    answer: Option<Reply>,
}

impl Answers {
    fn unanswered(&self) -> Vec<Tagged<Request>> {
        let open = self.waiting.iter().filter(|(_, waiting)| waiting.answer.is_none());
        open.map(|(id, waiting)| Tagged { id: *id, body: waiting.request.clone() }).collect()
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Helper {
    /// Connects to the helper at `path`.
    ///
    /// # Errors
    /// No process listens there, or it accepts no connection in time.
    pub(crate) fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let address = SocketAddrUnix::new(path)?;
        let end = Instant::now() + PATIENCE;
        loop {
            match connect(&socket, &address) {
                // Its queue of connections is full.
                Err(Errno::AGAIN) if Instant::now() < end => thread::sleep(CONNECT_PAUSE),
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                connected => break connected?,
            }
        }
        Ok(Self {
            _not_inherited: NotInherited::new([socket.as_fd()]),
            socket,
            next_id: AtomicU32::new(1),
            answers: Mutex::default(),
            arrived: Condvar::new(),
            told: AtomicBool::new(false),
        })
    }

    /// Compares versions. The first call of a connection.
    pub(crate) fn greet(&self) -> Result<(), CallError> {
        match self.call(Request::Hello { version: VERSION }, PATIENCE) {
            Ok(Reply::Hello { version: VERSION }) => Ok(()),
            Ok(other) => Err(unexpected(&other)),
            // The helper may have refused the connection, and have closed it, before the request was sent.
            Err(gone @ CallError::Gone(_)) => Err(match receive_message(self.socket.as_fd()) {
                Ok((bytes, _)) => {
                    Tagged::<Reply>::decode(&bytes).ok().and_then(refusal_of_all).unwrap_or(gone)
                }
                Err(_) => gone,
            }),
            Err(error) => Err(error),
        }
    }

    /// Sends a request that carries a descriptor, or whose answer carries some. No other thread may use the connection meanwhile.
    pub(crate) fn exchange(
        &self,
        body: Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Vec<OwnedFd>), CallError> {
        let end = Instant::now() + PATIENCE;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.send(&Tagged { id, body }, descriptor, end)?;
        loop {
            let (reply, descriptors) = self.receive(end)?;
            match reply.body {
                // The request may be lost, and a descriptor cannot be sent twice.
                Reply::Restarted => return Err(Errno::CONNRESET.into()),
                Reply::Refused(refusal) if reply.id == id => return Err(CallError::Refused(refusal)),
                body if reply.id == id => return Ok((body, descriptors)),
                _ => {}
            }
        }
    }

    /// Sends a request and waits for its answer, at most `limit`.
    pub(crate) fn call(&self, body: Request, limit: Duration) -> Result<Reply, CallError> {
        let end = Instant::now() + limit;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.lock().waiting.insert(id, Waiting { request: body.clone(), answer: None });
        let answer = self.send(&Tagged { id, body }, None, end).and_then(|()| self.wait(id, end));
        self.lock().waiting.remove(&id);
        match answer? {
            Reply::Refused(refusal) => {
                // Callers turn it into error numbers; the words, which name an option of xwarpd, are said once.
                if is_limit(refusal.reason) && !self.told.swap(true, Ordering::Relaxed) {
                    tracing::warn!(reason = refusal.text, "xwarpd refuses");
                }
                Err(CallError::Refused(refusal))
            }
            reply => Ok(reply),
        }
    }

    /// Sends a request that has no answer. Errors are ignored: the helper may have ended.
    pub(crate) fn notify(&self, body: Request) {
        let _ = self.send(&Tagged { id: 0, body }, None, Instant::now() + PATIENCE);
    }

    fn lock(&self) -> MutexGuard<'_, Answers> {
        // The map changes in single steps.
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, id: u32, end: Instant) -> Result<Reply, CallError> {
        let mut answers = self.lock();
        loop {
            if let Some(reply) = answers.waiting.get_mut(&id).and_then(|waiting| waiting.answer.take()) {
                return Ok(reply);
            }
            if answers.reading {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(CallError::TimedOut);
                }
                let waited = self.arrived.wait_timeout(answers, left);
                answers = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            answers.reading = true;
            drop(answers);
            let received = self.receive(end);
            answers = self.lock();
            answers.reading = false;
            // The other threads look for their answers, and one of them continues to read.
            self.arrived.notify_all();
            let (reply, _) = received?;
            if reply.body == Reply::Restarted {
                let lost = answers.unanswered();
                drop(answers);
                lost.iter().try_for_each(|request| self.send(request, None, end))?;
                answers = self.lock();
            } else if let Some(place) = answers.waiting.get_mut(&reply.id) {
                place.answer = Some(reply.body);
            }
        }
    }

    fn send(
        &self,
        message: &Tagged<Request>,
        descriptor: Option<BorrowedFd<'_>>,
        end: Instant,
    ) -> Result<(), CallError> {
        let bytes = message.encode();
        loop {
            match send_message(self.socket.as_fd(), &bytes, descriptor.as_slice()) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.ready(PollFlags::OUT, end)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn receive(&self, end: Instant) -> Result<(Tagged<Reply>, Vec<OwnedFd>), CallError> {
        loop {
            match receive_message(self.socket.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => return Err(Errno::CONNRESET.into()),
                Ok((bytes, descriptors)) => {
                    let reply = Tagged::<Reply>::decode(&bytes);
                    let reply = reply.map_err(|error| CallError::Gone(io::Error::other(error)))?;
                    return match reply {
                        Tagged { id: 0, body: Reply::Restarted } => Ok((reply, descriptors)),
                        Tagged { id: 0, .. } => Err(refusal_of_all(reply)
                            .unwrap_or_else(|| CallError::Gone(io::ErrorKind::InvalidData.into()))),
                        reply => Ok((reply, descriptors)),
                    };
                }
                Err(Errno::AGAIN) => self.ready(PollFlags::IN, end)?,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits until the socket is ready.
    fn ready(&self, flags: PollFlags, end: Instant) -> Result<(), CallError> {
        let left = end.saturating_duration_since(Instant::now());
        // A limit beyond the range of `Timespec` counts as no limit.
        let limit = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(&self.socket, flags)], limit.as_ref()) {
            Ok(0) => Err(CallError::TimedOut),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Whether a refusal comes from a limit that the administrator has set.
fn is_limit(reason: Reason) -> bool {
    matches!(reason, Reason::Limit | Reason::Permission | Reason::PortsExhausted)
}

/// The helper's refusal of the whole connection.
fn refusal_of_all(reply: Tagged<Reply>) -> Option<CallError> {
    match reply {
        Tagged { id: 0, body: Reply::Refused(refusal) } => Some(CallError::Refused(refusal)),
        _ => None,
    }
}

/// The error for an answer of another kind than the request's.
pub(crate) fn unexpected(reply: &Reply) -> CallError {
    CallError::Gone(io::Error::new(io::ErrorKind::InvalidData, format!("an unexpected answer: {reply:?}")))
}
