//! [`Lab`]: the namespaces and the veth pair of `ci/lab`, with a unique name for each test. They are removed
//! when the test ends, also after a panic.

use std::{
    fmt, fs,
    fs::File,
    net::IpAddr,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Once, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::Running;

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client's end by convention.
    A,
    /// The server's end by convention.
    B,
}

impl Side {
    fn letter(self) -> char {
        match self {
            Self::A => 'a',
            Self::B => 'b',
        }
    }

    /// Last part of this side's addresses.
    fn host(self) -> u16 {
        match self {
            Self::A => 1,
            Self::B => 2,
        }
    }

    /// The opposite side.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// The address family of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// 10.77.0.0/24.
    V4,
    /// `fd77::/64`.
    V6,
}

/// Parameters of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LabOptions {
    /// MTU of the veth pair, in bytes.
    pub mtu: u32,
    /// Number of receive and transmit queues of each end.
    pub queues: u32,
    /// Also create an 802.1Q interface with this ID on each end.
    pub vlan: Option<u16>,
    /// Keep the kernel's segmentation and receive offloads on.
    pub offloads: bool,
    /// Add a third namespace between the two, for a [`Hop`](crate::hop::Hop); this turns all offloads off.
    pub hop: bool,
    /// The Debian release in whose root file system [`Lab::program`] runs programs, by the name that `ci/distributions` takes; this
    /// machine's own without it. The default is that of the environment variable `XWARP_DISTRIBUTION`.
    pub distribution: Option<&'static str>,
}

impl Default for LabOptions {
    fn default() -> Self {
        Self {
            mtu: 1500,
            queues: 1,
            vlan: None,
            offloads: true,
            hop: false,
            distribution: chosen_distribution(),
        }
    }
}

/// The release that [`DISTRIBUTION_VARIABLE`] names.
fn chosen_distribution() -> Option<&'static str> {
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var(DISTRIBUTION_VARIABLE).ok()).as_deref()
}

/// `suite`, unless it is this machine's own release: [`LabOptions::distribution`] for tests of a certain release.
pub fn distribution(suite: &'static str) -> Option<&'static str> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let is_own = release.lines().any(|line| line == format!("VERSION_CODENAME={suite}"));
    (!is_own).then_some(suite)
}

/// Environment variable with the default of [`LabOptions::distribution`]: `XWARP_DISTRIBUTION=trixie cargo nextest run netns_compat`.
const DISTRIBUTION_VARIABLE: &str = "XWARP_DISTRIBUTION";

/// Name of the interface in both namespaces.
pub const INTERFACE: &str = "xw0";

/// Names of the interfaces in the hop's namespace, towards A and towards B.
pub const HOP_INTERFACES: [&str; 2] = ["xa", "xb"];

/// Prefix of test namespaces, which are called `xwt<pid>-<number>-a`, `-b` and `-hop`.
const PREFIX: &str = "xwt";

/// Two namespaces and the veth pair between them, until it is dropped.
pub struct Lab {
    name: String,
    scratch: PathBuf,
    distribution: Option<&'static str>,
}

impl fmt::Debug for Lab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Lab {
    /// Builds a lab. The first one of a process also removes labs whose process has died.
    pub fn up(options: LabOptions) -> Result<Self> {
        static SWEEP: Once = Once::new();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        SWEEP.call_once(sweep);
        if let Some(suite) = options.distribution {
            // In the namespaces there is no way to a mirror.
            let output = Command::new(ci_script("distributions")).args(["make", suite]).output();
            let output = output.context("cannot run ci/distributions")?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "ci/distributions make {suite}: {said}");
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let scratch = std::env::temp_dir().join(&name);
        fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        let lab = Self { name, scratch, distribution: options.distribution };
        let mut command = lab.script("up");
        command.args(["--mtu", &options.mtu.to_string(), "--queues", &options.queues.to_string()]);
        if let Some(vlan) = options.vlan {
            command.args(["--vlan", &vlan.to_string()]);
        }
        command.args(["--offloads", if options.offloads { "on" } else { "off" }]);
        command.args(options.hop.then_some("--hop"));
        let output = command.output().context("cannot run ci/lab")?;
        ensure!(output.status.success(), "ci/lab up: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(lab)
    }

    fn script(&self, command: &str) -> Command {
        let mut script = Command::new(ci_script("lab"));
        script.args(["--name", &self.name, command]);
        script
    }

    /// Name of a side's namespace.
    pub fn namespace(&self, side: Side) -> String {
        format!("{}-{}", self.name, side.letter())
    }

    /// Address of a side.
    pub fn address(&self, side: Side, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from([10, 77, 0, side.host() as u8]),
            Family::V6 => IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, side.host()]),
        }
    }

    /// Path of a file of this lab. The file is removed with the lab, unless the test fails.
    pub fn file(&self, name: &str) -> PathBuf {
        self.scratch.join(name)
    }

    /// A command to run in one namespace.
    pub fn command(&self, side: Side, program: impl AsRef<Path>) -> Command {
        inside(&self.namespace(side), program)
    }

    /// A command to run in one namespace, in the root of the lab's distribution. Paths of this repository, of what cargo has built and
    /// of this lab's files are the same there.
    pub fn program(&self, side: Side, program: impl AsRef<Path>) -> Command {
        let Some(suite) = self.distribution else { return self.command(side, program) };
        let mut command = self.command(side, ci_script("distributions"));
        command.args(["run", suite]).arg(program.as_ref());
        command
    }

    /// Name of the hop's namespace.
    pub fn hop_namespace(&self) -> String {
        format!("{}-hop", self.name)
    }

    /// A command to run in the hop's namespace.
    pub fn hop_command(&self, program: impl AsRef<Path>) -> Command {
        inside(&self.hop_namespace(), program)
    }

    /// Starts a program in one namespace and reads its output.
    pub fn start(&self, side: Side, program: impl AsRef<Path>, args: &[&str]) -> Result<Running> {
        let mut command = self.command(side, program);
        command.args(args);
        Running::start(command)
    }

    /// Runs a short command and returns its output; an error if it fails.
    pub fn run(&self, side: Side, program: &str, args: &[&str]) -> Result<String> {
        let output = self
            .command(side, program)
            .args(args)
            .output()
            .with_context(|| format!("cannot run {program}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("{program} {}: {text}{}", args.join(" "), String::from_utf8_lossy(&output.stderr));
        }
        Ok(text)
    }

    /// Turns checksum offload off on one side, for captures: to Wireshark, partial checksums are wrong.
    pub fn without_checksum_offload(&self, side: Side) -> Result<()> {
        self.run(side, "ethtool", &["-K", INTERFACE, "tx", "off"]).map(drop)
    }

    /// Runs `work` on a thread of this process that is moved into one namespace; threads that it starts and
    /// sockets that it opens belong to that namespace too.
    pub fn within<T: Send>(&self, side: Side, work: impl FnOnce() -> T + Send) -> Result<T> {
        thread::scope(|scope| {
            let inside = self.enter(scope, side, work)?;
            inside
                .join()
                .map_err(|panic| anyhow::anyhow!("in {}: {}", self.namespace(side), message(&*panic)))
        })
    }

    /// Starts such a thread; a test uses two of them as client and server.
    pub fn enter<'scope, T: Send + 'scope>(
        &self,
        scope: &'scope thread::Scope<'scope, '_>,
        side: Side,
        work: impl FnOnce() -> T + Send + 'scope,
    ) -> Result<thread::ScopedJoinHandle<'scope, T>> {
        let path = Path::new("/run/netns").join(self.namespace(side));
        let namespace = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(scope.spawn(move || {
            let moved = move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network));
            moved.expect("root can enter a namespace that it created");
            work()
        }))
    }
}

fn inside(namespace: &str, program: impl AsRef<Path>) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program.as_ref());
    command
}

/// Message of a panicked thread.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without words")
}

impl Drop for Lab {
    fn drop(&mut self) {
        let down = self.script("down").output();
        if !down.is_ok_and(|output| output.status.success()) {
            eprintln!("{self:?}: ci/lab down failed");
        }
        if thread::panicking() {
            eprintln!("{self:?}: files kept in {}", self.scratch.display());
        } else if let Err(error) = fs::remove_dir_all(&self.scratch) {
            eprintln!("{self:?}: {}: {error}", self.scratch.display());
        }
    }
}

/// Path of a script of `ci`.
pub fn ci_script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// Removes namespaces of tests whose process no longer exists.
fn sweep() {
    let Ok(entries) = fs::read_dir("/run/netns") else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(lab) = ["-a", "-b", "-hop"].iter().find_map(|end| name.strip_suffix(end)) else { continue };
        let Some(pid) = owner(lab) else { continue };
        if !Path::new(&format!("/proc/{pid}")).exists() {
            // Another process may sweep at the same time, so failures are ignored.
            let _ = Command::new(ci_script("lab")).args(["--name", lab, "down"]).output();
        }
    }
}

/// Process ID in the name of a lab.
fn owner(lab: &str) -> Option<u32> {
    let (pid, number) = lab.strip_prefix(PREFIX)?.split_once('-')?;
    let _: u32 = number.parse().ok()?;
    pid.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_names_have_an_owner() {
        assert_eq!(owner("xwt123-0"), Some(123));
        for other in ["xw", "xw-a", "xwt", "xwt12", "xwtx-0", "xwt12-x", "other12-0"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }
}
