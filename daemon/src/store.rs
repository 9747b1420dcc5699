//! [`Store`]: whoever has started this process hears that it serves, and keeps copies of the descriptors that survive it.
//!
//! That is systemd (`Type=notify`, `sd_notify(3)`, `FileDescriptorStoreMax=`), or the [keeper](crate::keeper) of this program,
//! which speaks the same protocol. Messages never wait: what cannot be sent now is sent when the other end reads.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use xwarp_leg::message::send_message;

use crate::names::Name;
use crate::watchdog::{REPORT, Watchdog};

/// Largest sum of the lengths of all names, in bytes: the next process gets them in one variable of its environment, which may
/// have 128 KiB.
pub(crate) const MAX_NAMES_BYTES: usize = 120 << 10;
/// Messages that wait for a reader, each with a descriptor.
const MAX_WAITING: usize = 4096;
/// How long this process waits at its end for the reader of the last messages.
const LAST_MESSAGES: Duration = Duration::from_secs(2);

/// The other end, and the names of what it keeps.
#[derive(Debug, Default)]
pub(crate) struct Store {
    socket: Option<OwnedFd>,
    /// It keeps descriptors.
    keeps: bool,
    /// It is the keeper of this program, whose end is the end of everything.
    is_keeper: bool,
    names: BTreeSet<Name>,
    names_bytes: usize,
    waiting: VecDeque<(String, Option<OwnedFd>)>,
    /// The other end restarts this process when its loop is stuck.
    watchdog: Option<Watchdog>,
}

/// The length of a name, and of a colon between two.
fn length(name: &Name) -> usize {
    name.to_string().len() + 1
}

impl Store {
    /// The keeper, if there is one, or else the service manager, which keeps descriptors only if `keeps`. `names` are kept
    /// already.
    pub(crate) fn open(keeper: Option<OwnedFd>, keeps: bool, names: BTreeSet<Name>) -> Self {
        let names_bytes = names.iter().map(length).sum();
        let is_keeper = keeper.is_some();
        let socket = keeper.or_else(|| {
            let name = std::env::var_os("NOTIFY_SOCKET")?;
            connect(&name)
                .inspect_err(|error| tracing::warn!(%error, "the service manager cannot be reached"))
                .ok()
        });
        let keeps = socket.is_some() && keeps;
        let watchdog = Watchdog::of_environment(Instant::now()).filter(|_| socket.is_some());
        Self { socket, keeps, is_keeper, names, names_bytes, waiting: VecDeque::new(), watchdog }
    }

    /// Whether descriptors outlive this process.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }

    /// The keeper, which hangs up at its end.
    pub(crate) fn keeper(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().filter(|_| self.is_keeper).map(OwnedFd::as_fd)
    }

    /// Whether names of this many bytes may be added.
    pub(crate) fn has_room(&self, names: &[Name]) -> bool {
        self.keeps && self.names_bytes + names.iter().map(length).sum::<usize>() <= MAX_NAMES_BYTES
    }

    /// Keeps a copy of a descriptor, unless there is no room.
    pub(crate) fn keep(&mut self, name: Name, descriptor: BorrowedFd<'_>) {
        if !self.has_room(std::slice::from_ref(&name)) || self.names.contains(&name) {
            return;
        }
        match descriptor.try_clone_to_owned() {
            Ok(copy) => {
                self.send(format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), Some(copy));
                self.names_bytes += length(&name);
                self.names.insert(name);
            }
            Err(error) => tracing::warn!(%error, "a descriptor does not survive a restart"),
        }
    }

    /// Keeps the copy of this name no longer.
    pub(crate) fn forget(&mut self, name: &Name) {
        if self.names.remove(name) {
            self.names_bytes -= length(name);
            self.send(format!("FDSTOREREMOVE=1\nFDNAME={name}"), None);
        }
    }

    /// Keeps the copies of these names no longer.
    pub(crate) fn forget_all<'a>(&mut self, names: impl IntoIterator<Item = &'a Name>) {
        for name in names {
            self.forget(name);
        }
    }

    /// Keeps only the copies of these names.
    pub(crate) fn retain(&mut self, keep: impl Fn(&Name) -> bool) {
        let others: Vec<Name> = self.names.iter().filter(|name| !keep(name)).cloned().collect();
        self.forget_all(&others);
    }

    /// Reports that this process serves.
    pub(crate) fn ready(&mut self) {
        self.send("READY=1".into(), None);
    }

    /// Reports that the loop runs, if that is due and nothing waits: reports do not use up the room of what is to be kept. Returns the
    /// time until the next report.
    pub(crate) fn report_running(&mut self, now: Instant) -> Option<Duration> {
        let (is_due, next) = self.watchdog.as_mut()?.due(now);
        if is_due && !self.is_behind() {
            self.send(REPORT.into(), None);
        }
        Some(next)
    }

    /// Reports that this process ends for good, with everything that is kept.
    pub(crate) fn stopping(&mut self) {
        self.send("STOPPING=1".into(), None);
        self.finish();
    }

    fn send(&mut self, message: String, descriptor: Option<OwnedFd>) {
        if self.socket.is_none() {
            return;
        }
        self.waiting.push_back((message, descriptor));
        self.flush();
        if self.waiting.len() > MAX_WAITING {
            tracing::error!("who keeps descriptors does not read: devices will end with this process");
            self.waiting.clear();
            (self.socket, self.keeps) = (None, false);
        }
    }

    /// Sends what waits as far as the other end reads.
    pub(crate) fn flush(&mut self) {
        let Some(socket) = &self.socket else { return };
        while let Some((message, descriptor)) = self.waiting.front() {
            let descriptor = descriptor.as_ref().map(OwnedFd::as_fd);
            match send_message(socket.as_fd(), message.as_bytes(), descriptor.as_slice()) {
                Ok(()) => drop(self.waiting.pop_front()),
                Err(Errno::INTR) => {}
                // The last one: the kernel bounds the descriptors in flight.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return,
                Err(error) => {
                    tracing::warn!(%error, "who has started xwarpd does not hear from it");
                    self.waiting.pop_front();
                }
            }
        }
    }

    /// Whether messages wait: call [`flush`](Self::flush) in some milliseconds.
    pub(crate) fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Waits until the last message is sent, or for some seconds.
    pub(crate) fn finish(&mut self) {
        let end = Instant::now() + LAST_MESSAGES;
        self.flush();
        while self.is_behind() && Instant::now() < end {
            let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let Some(socket) = &self.socket else { return };
            let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], Some(&pause));
            self.flush();
        }
    }
}

fn connect(name: &OsStr) -> io::Result<OwnedFd> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use xwarp_leg::message::receive_message;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn systemd_hears_it_at_a_path_and_at_an_abstract_name() {
        let directory = std::env::temp_dir().join(format!("xwarpd-notify-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("socket");
        let abstract_name = format!("xwarpd-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let listeners = [
            (UnixDatagram::bind(&path).unwrap(), path.clone().into_os_string()),
            (UnixDatagram::bind_addr(&address).unwrap(), format!("@{abstract_name}").into()),
        ];
        for (listener, name) in listeners {
            let mut store = Store { socket: Some(connect(&name).unwrap()), ..Store::default() };
            store.ready();
            let mut heard = [0; 16];
            let len = listener.recv(&mut heard).unwrap();
            assert_eq!(&heard[..len], b"READY=1");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn descriptors_are_kept_once_and_withdrawn_by_name() {
        let (ours, theirs) = pair();
        let mut store = Store::open(Some(ours), true, BTreeSet::new());
        let name = Name::Port { slot: 7, request: 42 };
        for _ in 0..2 {
            store.keep(name.clone(), theirs.as_fd());
        }
        store.forget(&name);
        store.forget(&name);
        let heard: Vec<_> = std::iter::from_fn(|| receive_message(theirs.as_fd()).ok()).collect();
        let texts: Vec<_> = heard.iter().map(|(bytes, _)| String::from_utf8_lossy(bytes)).collect();
        assert_eq!(texts, ["FDSTORE=1\nFDNAME=1p7.42\nFDPOLL=0", "FDSTOREREMOVE=1\nFDNAME=1p7.42"]);
        assert_eq!([heard[0].1.len(), heard[1].1.len()], [1, 0]);
        assert_eq!(store.names_bytes, 0);
    }

    /// The names fit in a variable of the environment, and a reader that has stopped costs no more than some descriptors.
    #[test]
    fn attack_names_and_messages_that_wait_are_bounded() {
        let (ours, theirs) = pair();
        let mut store = Store::open(Some(ours), true, BTreeSet::new());
        let port = |request| Name::Port { slot: 4095, request };
        let few = || rustix::io::fcntl_dupfd_cloexec(&theirs, 0).unwrap().as_raw_fd();
        let before = few();
        for request in 0..20_000 {
            store.keep(port(request), theirs.as_fd());
            if !store.keeps() {
                break;
            }
            assert!(store.names_bytes <= MAX_NAMES_BYTES);
        }
        assert!(!store.keeps() && !store.is_behind(), "{} messages wait", store.waiting.len());
        assert!(few() <= before + 1);
        // A reader hears of as many as fit.
        let (ours, theirs) = pair();
        let mut store = Store::open(Some(ours), true, BTreeSet::new());
        for request in 0..20_000 {
            store.keep(port(request), theirs.as_fd());
            while receive_message(theirs.as_fd()).is_ok() {}
        }
        assert!(store.keeps() && store.names_bytes <= MAX_NAMES_BYTES && !store.has_room(&[port(20_000)]));
    }
}
