//! Devices of running processes, asked through their sockets (see [`xwarp_verbs::observe`]).

use std::{
    fmt, fs,
    io::{self, Read as _, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::observe::{self, DIRECTORY_OF_USERS, DIRECTORY_VARIABLE, OBSERVE_VARIABLE, Socket};

/// Longest time to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer about a device: some ten thousands of queue pairs.
const MOST_ANSWER_BYTES: u64 = 64 << 20;
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
    fn ask(&self, line: &str) -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.0.path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        writeln!(stream, "{line}")?;
        Ok(stream)
    }

    /// The answer to `stat`.
    pub fn describe(&self) -> io::Result<String> {
        let mut answer = String::new();
        self.ask("stat")?.take(MOST_ANSWER_BYTES).read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// The directories with sockets that are visible to this user: for root, those of all users.
fn directories() -> Vec<PathBuf> {
    let mut found: Vec<_> = observe::directory().into_iter().collect();
    let usual = std::env::var_os(DIRECTORY_VARIABLE).is_none_or(|directory| directory.is_empty());
    if usual && rustix::process::geteuid().is_root() {
        let users = fs::read_dir("/run/user").into_iter().flatten().flatten();
        found.extend(users.map(|user| user.path().join(DIRECTORY_OF_USERS)));
    }
    found
}

/// The chosen devices. If there is none, the error names a remedy.
pub fn find(choice: &Choice) -> Result<Vec<Device>> {
    let found = directories().into_iter().flat_map(|directory| observe::sockets(&directory));
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
    let mut stream = device.ask("capture").with_context(|| format!("cannot ask {device}"))?;
    let begin = Instant::now();
    let mut first = [0; 3];
    stream.read_exact(&mut first).with_context(|| format!("{device} does not answer"))?;
    if first != *b"ok\n" {
        let mut rest = String::new();
        stream.take(200).read_to_string(&mut rest)?;
        bail!("{device}: {}{}", String::from_utf8_lossy(&first), rest.trim_end());
    }
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
