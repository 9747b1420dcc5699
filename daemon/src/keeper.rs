//! The keeper (`--keep` without systemd): a parent process that starts the helper, keeps copies of the descriptors that must
//! survive it, and starts it again when it ends.
//!
//! It speaks the protocol of systemd's descriptor store ([`store`](crate::store)) with its child alone, over a pair of sockets.
//! It looks into no descriptor, opens nothing that anybody but root can change, and has no capability in effect. A list of system
//! calls is not possible: the child would inherit it.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};
use xwarp_leg::message::{has_message, receive_message};

use crate::former::KEEPER;
use crate::privileges;
use crate::signals::{self, Signals};
use crate::store::MAX_NAMES_BYTES;
use crate::watchdog;

/// Descriptors that the keeper uses at most: one half has low numbers, from 3 on, and is for the child while it starts; the other
/// half is the keeper's own.
const MAX_DESCRIPTORS: u64 = 1 << 16;
/// Descriptors of the keeper beside those that it keeps: those of a message, and some.
const SPARE_DESCRIPTORS: usize = 253 + 32;
/// Time until a helper that has ended is started again: the first, doubled each time that it does not serve; and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// The longest such time of a helper that has served.
const SERVED_PAUSE: Duration = Duration::from_millis(200);
/// How often sockets with unread messages are looked at, which their helper empties before they are closed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The longest time without a report of a serving helper, unless the environment names another one, as systemd's does.
const WATCHDOG: Duration = Duration::from_secs(30);

/// What is kept, and what the child has said.
#[derive(Debug)]
struct Table {
    entries: Vec<(String, OwnedFd)>,
    own: Own,
    most: usize,
    /// Sockets that are kept no longer, but whose closing would close descriptors of strangers, which may take long.
    unread: Vec<OwnedFd>,
    /// The child serves.
    ready: bool,
    /// The child ends for good.
    stopping: bool,
}

impl Table {
    fn new(own: Own) -> Self {
        let most = (own.0 as usize).saturating_sub(SPARE_DESCRIPTORS);
        Self { entries: Vec::new(), own, most, unread: Vec::new(), ready: false, stopping: false }
    }

    fn hear(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) {
        let text = String::from_utf8_lossy(message);
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let is = |name: &str| value(name) == Some("1");
        self.ready |= is("READY");
        self.stopping |= is("STOPPING");
        let Some(name) = value("FDNAME") else { return };
        if is("FDSTORE") {
            for descriptor in descriptors {
                self.keep(name, descriptor);
            }
        } else if is("FDSTOREREMOVE") {
            for (_, descriptor) in self.entries.extract_if(.., |(kept, _)| kept == name) {
                if has_message(descriptor.as_fd()) {
                    self.unread.push(descriptor);
                }
            }
        }
    }

    fn keep(&mut self, name: &str, descriptor: OwnedFd) {
        let bytes: usize = self.entries.iter().map(|(name, _)| name.len() + 1).sum();
        let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
        let fits = bytes + name.len() <= MAX_NAMES_BYTES + KEEPER.len() && self.entries.len() < self.most;
        match self.own.copy(descriptor) {
            Ok(copy) if is_name && fits => self.entries.push((name.to_owned(), copy)),
            _ => tracing::warn!(name, "no room: this does not survive a restart"),
        }
    }

    fn names(&self) -> String {
        let names = self.entries.iter().map(|(name, _)| name.as_str());
        [KEEPER].into_iter().chain(names).collect::<Vec<_>>().join(":")
    }
}

/// The lowest number of the keeper's own descriptors.
#[derive(Debug, Clone, Copy)]
struct Own(i32);

impl Own {
    fn copy(self, descriptor: impl AsFd) -> Result<OwnedFd> {
        fcntl_dupfd_cloexec(descriptor, self.0).context("copying a descriptor")
    }
}

/// A running helper.
struct Helper {
    child: Child,
    socket: OwnedFd,
    /// It has closed its end.
    hung_up: bool,
    /// When it last said something.
    heard: Instant,
    /// Its program, which goes on when a newer one does not come to serve.
    program: File,
}

struct Keeper {
    table: Table,
    signals: OwnedFd,
    /// The path of the program, where an upgrade puts the next one.
    path: PathBuf,
    /// The program that served last.
    served: Option<File>,
    /// A signal asks for the end.
    ending: bool,
    /// A serving helper that says nothing for so long is killed.
    watchdog: Duration,
}

/// Keeps descriptors until a signal asks for the end. Returns the exit code of the helper.
pub(crate) fn run(signals: Signals) -> Result<ExitCode> {
    xwarp_driver::close_inherited().context("closing inherited descriptors")?;
    let limit = privileges::raise_descriptor_limit()?;
    let own = Own(limit.min(MAX_DESCRIPTORS) as i32 / 2);
    let shared = own.copy(signals.fd())?;
    drop(signals);
    let path = std::env::current_exe().context("finding this program")?;
    let limit = std::env::var(watchdog::LIMIT_VARIABLE).ok();
    let watchdog = watchdog::limit(limit.as_deref(), None, std::process::id()).unwrap_or(WATCHDOG);
    let table = Table::new(own);
    let mut keeper = Keeper { table, signals: shared, path, served: None, ending: false, watchdog };
    let mut pause = FIRST_PAUSE;
    // A program that does not come to serve is followed by the one that served last, and that by the one at the path again.
    let mut former_next = false;
    loop {
        // A copy with a low number would be in the way.
        let former =
            keeper.served.as_ref().filter(|_| former_next).map(|served| own.copy(served)).transpose()?;
        former_next = former.is_none();
        let started = Instant::now();
        match keeper
            .start(former.map(File::from))
            .and_then(|mut helper| Ok((keeper.serve(&mut helper)?, helper)))
        {
            Ok((status, helper)) => {
                let was_ready = std::mem::take(&mut keeper.table.ready);
                // Without devices, a program that never served has wrong options, or misses something.
                let hopeless = !was_ready && keeper.served.is_none();
                if keeper.ending || keeper.table.stopping || hopeless {
                    return Ok(code(status));
                }
                tracing::warn!(%status, kept = keeper.table.entries.len(), "xwarpd has ended, and is started again");
                if was_ready {
                    (keeper.served, former_next) = (Some(helper.program), false);
                }
                pause = match started.elapsed() {
                    _ if !was_ready => pause,
                    served if served > LAST_PAUSE => FIRST_PAUSE,
                    // It serves, but not for long: its clients wait for 10 s.
                    _ => pause.min(SERVED_PAUSE),
                };
            }
            // In the middle of an upgrade there may be no program.
            Err(error) if keeper.served.is_some() => tracing::warn!("xwarpd is not started: {error:#}"),
            Err(error) => return Err(error),
        }
        keeper.wait(pause)?;
        if keeper.ending {
            return Ok(ExitCode::SUCCESS);
        }
        pause = LAST_PAUSE.min(2 * pause);
    }
}

fn code(status: ExitStatus) -> ExitCode {
    // As a shell does.
    let of_signal = || status.signal().map(|signal| 128 + signal);
    ExitCode::from(status.code().or_else(of_signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

impl Keeper {
    /// Starts the program at the path, or that one.
    fn start(&mut self, program: Option<File>) -> Result<Helper> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let own = self.table.own;
        let (ours, theirs) = (own.copy(ours)?, own.copy(theirs)?);
        let (path, program) = if let Some(program) = program {
            tracing::warn!("the former program goes on");
            (PathBuf::from(format!("/proc/self/fd/{}", program.as_raw_fd())), program)
        } else {
            let file = File::open(&self.path).with_context(|| format!("{}", self.path.display()))?;
            (self.path.clone(), own.copy(file)?.into())
        };
        let kept = self.table.entries.iter().map(|(_, descriptor)| descriptor);
        let mut copies = Vec::new();
        for (number, descriptor) in (3..).zip([&theirs].into_iter().chain(kept)) {
            // The lowest free number.
            let copy = rustix::io::dup(descriptor).context("copying a descriptor")?;
            ensure!(copy.as_raw_fd() == number, "descriptor {number} is in use");
            copies.push(copy);
        }
        let mut command = Command::new(path);
        command.arg0("xwarpd").args(std::env::args_os().skip(1));
        command.env("LISTEN_FDS", copies.len().to_string()).env("LISTEN_FDNAMES", self.table.names());
        command.env_remove("LISTEN_PID").env_remove(watchdog::PROCESS_VARIABLE);
        command.env(watchdog::LIMIT_VARIABLE, self.watchdog.as_micros().to_string());
        let child = command.spawn().context("starting xwarpd")?;
        Ok(Helper { child, socket: ours, hung_up: false, heard: Instant::now(), program })
    }

    /// Serves a helper until it has ended.
    fn serve(&mut self, helper: &mut Helper) -> Result<ExitStatus> {
        loop {
            // The last messages of a helper are in the socket when it has ended.
            let ended = helper.child.try_wait().context("waiting for xwarpd")?;
            self.hear(helper);
            if let Some(status) = ended {
                return Ok(status);
            }
            let left = self.watch(helper);
            let socket = (!helper.hung_up).then_some(&helper.socket);
            if self.sleep(socket, left)? {
                // It tells its clients why they end.
                let child = Pid::from_raw(helper.child.id().cast_signed());
                let _ = child.map(|child| kill_process(child, Signal::INT));
            }
        }
    }

    /// Kills a serving helper whose loop is stuck: it says nothing. Returns the time until it would be.
    fn watch(&self, helper: &mut Helper) -> Option<Duration> {
        if !self.table.ready {
            return None;
        }
        let left = (helper.heard + self.watchdog).saturating_duration_since(Instant::now());
        if !left.is_zero() {
            return Some(left);
        }
        tracing::error!("xwarpd has not answered for {:?}, and is killed", self.watchdog);
        let _ = helper.child.kill();
        helper.heard = Instant::now();
        Some(self.watchdog)
    }

    fn hear(&mut self, helper: &mut Helper) {
        while !helper.hung_up {
            match receive_message(helper.socket.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => helper.hung_up = true,
                Ok((bytes, descriptors)) => {
                    helper.heard = Instant::now();
                    self.table.hear(&bytes, descriptors);
                }
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Waits for a time, or until a signal asks for the end.
    fn wait(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while !self.ending && Instant::now() < end {
            self.sleep(None, Some(end.saturating_duration_since(Instant::now())))?;
        }
        Ok(())
    }

    /// Sleeps until something happens. Returns whether a signal asks for the end.
    fn sleep(&mut self, socket: Option<&OwnedFd>, limit: Option<Duration>) -> Result<bool> {
        self.table.unread.retain(|socket| has_message(socket.as_fd()));
        let look = (!self.table.unread.is_empty()).then_some(LOOK_EVERY);
        let limit = [limit, look].into_iter().flatten().min();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut awaited = vec![PollFd::new(&self.signals, PollFlags::IN)];
        awaited.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut awaited, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("waiting for xwarpd"),
        }
        let mut asked = false;
        while let Some(signal) = signals::read(self.signals.as_fd()) {
            asked |= signal != nix::sys::signal::Signal::SIGCHLD;
        }
        self.ending |= asked;
        Ok(asked)
    }
}
