//! Devices of running processes, asked through their sockets (see [`xwarp_verbs::observe`]).

use std::{
    fmt, fs,
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::{fs::MetadataExt as _, net::UnixStream},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::observe::{self, DIRECTORY_OF_USERS, DIRECTORY_VARIABLE, OBSERVE_VARIABLE, Socket};

/// Longest time to wait for the whole answer of a device, from the connection on.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer about a device: some ten thousands of queue pairs.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Longest refusal of a capture.
const MAX_REFUSAL_BYTES: u64 = 200;
/// Pause before a process that accepts no connection at the moment is asked again.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Longest wait for frames before the end of a capture is checked.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The selected devices.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// Of this process.
    pub pid: Option<u32>,
    /// On this interface.
    pub interface: Option<String>,
}

/// A device that can be asked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device(Socket);

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of process {}", self.0.interface, self.0.pid)
    }
}

impl Device {
    /// The user of the process.
    pub fn owner(&self) -> u32 {
        self.0.owner
    }

    /// Connects and sends `line`. The process is not trusted: everything together ends at `end`.
    fn ask(&self, line: &str, end: Instant) -> io::Result<Answer> {
        let mut stream = loop {
            match self.0.connect() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                    thread::sleep(CONNECT_PAUSE);
                }
                other => break other?,
            }
        };
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        writeln!(stream, "{line}")?;
        Ok(Answer { stream, end })
    }

    /// The answer to `stat`.
    pub fn describe(&self) -> io::Result<String> {
        let mut answer = String::new();
        let end = Instant::now() + PATIENCE;
        self.ask("stat", end)?.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// The answer of a device, which must come before its end.
struct Answer {
    stream: UnixStream,
    end: Instant,
}

impl Read for Answer {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

/// A text of another process, without the characters that control a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// The directories with sockets that are visible to this user, each with its owner: for root, those of all users.
fn directories() -> Vec<(PathBuf, u32)> {
    let user = rustix::process::geteuid();
    let named = std::env::var_os(DIRECTORY_VARIABLE).is_some_and(|directory| !directory.is_empty());
    // Root may name the directory of another user.
    let owner = |directory: &PathBuf| match fs::symlink_metadata(directory) {
        Ok(found) if named && user.is_root() => found.uid(),
        _ => user.as_raw(),
    };
    let own = observe::directory();
    let mut found: Vec<_> = own.into_iter().map(|directory| (owner(&directory), directory)).collect();
    if !named && user.is_root() {
        let users = fs::read_dir("/run/user").into_iter().flatten().flatten();
        found.extend(users.filter_map(|user| {
            let owner = user.file_name().to_str()?.parse().ok()?;
            Some((owner, user.path().join(DIRECTORY_OF_USERS)))
        }));
    }
    found.into_iter().map(|(owner, directory)| (directory, owner)).collect()
}

/// The chosen devices. If there is none, the error names a remedy.
pub fn find(choice: &Choice) -> Result<Vec<Device>> {
    let found = directories().into_iter().flat_map(|(directory, owner)| observe::sockets(&directory, owner));
    let mut devices: Vec<_> = found.map(Device).collect();
    let all = devices.len();
    devices.retain(|device| {
        choice.pid.is_none_or(|pid| pid == device.0.pid)
            && choice.interface.as_ref().is_none_or(|name| *name == device.0.interface)
    });
    devices.sort();
    match (devices.is_empty(), all) {
        (false, _) => Ok(devices),
        (true, 0) => bail!(
            "no device can be observed: start the program with {OBSERVE_VARIABLE}=1 in its environment, as the same user \
             (root sees those of all users)"
        ),
        (true, all) => bail!("none of the {all} devices that can be observed is the chosen one: xwarp stat"),
    }
}

/// The chosen device; there must be one only.
pub fn one(choice: &Choice) -> Result<Device> {
    let mut devices = find(choice)?;
    match (devices.pop(), &devices[..]) {
        (Some(device), []) => Ok(device),
        (last, others) => {
            let list: Vec<_> = others.iter().chain(&last).map(ToString::to_string).collect();
            bail!("there are several devices: {}; choose one with --pid or --interface", list.join(", "))
        }
    }
}

/// Writes all frames of a device to `out` until the device closes, for `limit`, or until `ended` is set.
pub fn capture(
    device: &Device,
    limit: Option<Duration>,
    ended: &AtomicBool,
    out: &mut dyn Write,
) -> Result<()> {
    let begin = Instant::now();
    let mut answer =
        device.ask("capture", begin + PATIENCE).with_context(|| format!("cannot ask {device}"))?;
    let mut first = [0; 3];
    answer.read_exact(&mut first).with_context(|| format!("{device} does not answer"))?;
    if first != *b"ok\n" {
        let mut rest = first.to_vec();
        answer.take(MAX_REFUSAL_BYTES).read_to_end(&mut rest)?;
        bail!("{device}: {}", printable(&String::from_utf8_lossy(&rest)));
    }
    let mut stream = answer.stream;
    stream.set_read_timeout(Some(LOOK_EVERY))?;
    let mut bytes = vec![0; 1 << 18];
    let mut last = None;
    loop {
        if last.is_none()
            && (ended.load(Ordering::Relaxed) || limit.is_some_and(|limit| begin.elapsed() >= limit))
        {
            // The device sends what it has recorded so far, and closes its direction.
            stream.shutdown(Shutdown::Write)?;
            last = Some(Instant::now());
        }
        if last.is_some_and(|last| last.elapsed() > PATIENCE) {
            break;
        }
        match stream.read(&mut bytes) {
            Ok(0) => break,
            Ok(len) => out.write_all(bytes.get(..len).unwrap_or_default())?,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error).context("reading the capture"),
        }
    }
    out.flush()?;
    Ok(())
}
