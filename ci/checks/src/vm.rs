//! [`Vm`]: a small virtual machine (`ci/vm/`) with Linux Soft-iWARP or a new kernel, [`Near`]: a namespace on the same
//! wire for our programs, and [`Stage`]: both, with checkers of the traffic between them.

mod port;
mod stage;

use std::{
    fs::File,
    net::IpAddr,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustix::{
    process::Signal,
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

use crate::{lab::Family, process::Running};
use port::Port;
pub use port::{Finished, Job};
pub use stage::{Ending, LONG, Record, SHORT, Stage, built};

/// The kernel that the machine boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kernel {
    /// Debian 12's kernel, with siw as its source has it.
    #[default]
    Siw,
    /// The same with another build of siw: the driver's constants are parameters (`ci/vm/tunable.sed`), changed by [`Vm::tune`], and an
    /// early first FPDU that is left in the socket is processed after an accept.
    TunableSiw,
    /// The newest kernel that Debian offers for its stable release, whose `virtio_net` has AF_XDP in zero-copy mode
    /// (transmission since 6.13). Without siw.
    Newest,
}

/// Parameters of a machine.
#[derive(Debug, Clone)]
pub struct VmOptions {
    /// The kernel to boot.
    pub kernel: Kernel,
    /// MTU of its interface and its wire, in bytes.
    pub mtu: u32,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Last part of its addresses: 10.77.0.HOST and `fd77::HOST`.
    pub host: u8,
    /// A folder that the machine sees as `/host`.
    pub share: Option<PathBuf>,
}

impl Default for VmOptions {
    fn default() -> Self {
        Self { kernel: Kernel::Siw, mtu: 1500, cpus: 1, host: 2, share: None }
    }
}

/// A running machine; killed when dropped.
#[derive(Debug)]
pub struct Vm {
    name: String,
    host: u8,
    port: Arc<Port>,
}

impl Vm {
    /// Starts a machine on its own wire, which takes about 2 seconds when its parts and the saved state of its kind are cached.
    pub fn boot(options: &VmOptions) -> Result<Self> {
        Self::boot_on(options, None)
    }

    /// Boots another machine on this machine's wire.
    pub fn boot_beside(&self, options: &VmOptions) -> Result<Self> {
        Self::boot_on(options, Some(&self.name))
    }

    fn boot_on(options: &VmOptions, wire: Option<&str>) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let id = std::process::id();
        let name = format!("xwv{id}-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let kernel = match options.kernel {
            Kernel::Siw => "siw",
            Kernel::TunableSiw => "tunable-siw",
            Kernel::Newest => "newest",
        };
        let mut boot = script("boot", &name);
        boot.args(["--kernel", kernel, "--owner", &id.to_string()]);
        boot.args(["--mtu", &options.mtu.to_string(), "--cpus", &options.cpus.to_string()]);
        boot.args(["--address", &addresses(options.host)]);
        if let Some(folder) = &options.share {
            boot.arg("--share").arg(folder);
        }
        if let Some(wire) = wire {
            boot.args(["--wire", wire]);
        }
        finish(boot)?;
        let state = state_folder().join(&name).join("harness");
        match Port::connect(&state) {
            Ok(port) => Ok(Self { name, host: options.host, port }),
            Err(error) => {
                finish(script("stop", &name))?;
                Err(error)
            }
        }
    }

    /// The machine's address.
    pub fn address(&self, family: Family) -> IpAddr {
        address(self.host, family)
    }

    /// Runs a command until it exits, with any status.
    pub fn run(&self, command: &str, limit: Duration) -> Result<Finished> {
        self.port.spawn(command)?.wait(limit)
    }

    /// Runs a command, which must succeed, and returns its standard output.
    pub fn check(&self, command: &str, limit: Duration) -> Result<String> {
        self.port.spawn(command)?.succeed(limit)
    }

    /// Starts a command.
    pub fn spawn(&self, command: &str) -> Result<Job> {
        self.port.spawn(command)
    }

    /// Waits until a program in the machine listens on a TCP port, because programs with buffered output do
    /// not report it.
    pub fn wait_listening(&self, port: u16, limit: Duration) -> Result<()> {
        let listens = format!("grep -qE ':{port:04X} .* 0A ' /proc/net/tcp /proc/net/tcp6");
        self.check(&format!("until {listens}; do usleep 20000; done"), limit)
            .map(drop)
            .with_context(|| format!("no program listens on port {port}"))
    }

    /// Changes a parameter of the tunable driver for later connections.
    pub fn tune(&self, parameter: &str, value: &str) -> Result<()> {
        let command = format!("echo {value} > /sys/module/siw/parameters/{parameter}");
        self.check(&command, Duration::from_secs(20)).map(drop)
    }

    /// Creates a namespace on the machine's wire.
    pub fn attach(&self, host: u8) -> Result<Near> {
        let namespace = format!("{}-n{host}", self.name);
        let mut attach = script("attach", &self.name);
        attach.args([namespace.as_str(), "--address", &addresses(host)]);
        finish(attach)?;
        Ok(Near { namespace, host })
    }

    /// Captures the traffic of the machine's interface to a pcapng file until the capture is finished.
    pub fn capture(&self, path: &Path) -> Result<WireCapture> {
        let mut capture = script("capture", &self.name);
        capture.arg(path);
        let mut running = Running::start(capture)?;
        running.wait_for("File:", Duration::from_secs(20))?;
        Ok(WireCapture { running })
    }

    /// Kills the machine like a power failure: it sends no FIN, no RST and no further reply.
    pub fn kill(&self) -> Result<()> {
        self.port.close();
        finish(script("kill", &self.name))
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.port.close();
        if let Err(error) = finish(script("stop", &self.name)) {
            eprintln!("{}: {error:#}", self.name);
        }
    }
}

/// A namespace on a machine's wire; removed with the machine.
#[derive(Debug, Clone)]
pub struct Near {
    namespace: String,
    host: u8,
}

impl Near {
    /// The namespace's address.
    pub fn address(&self, family: Family) -> IpAddr {
        address(self.host, family)
    }

    /// A command to run in the namespace.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program.as_ref());
        command
    }

    /// Starts a program in the namespace and reads its output.
    pub fn start(&self, program: impl AsRef<Path>, args: &[&str]) -> Result<Running> {
        let mut command = self.command(program);
        command.args(args);
        Running::start(command)
    }

    /// Runs `work` on a thread of this process that is moved into the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = Path::new("/run/netns").join(&self.namespace);
        let namespace = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        thread::scope(|scope| {
            let inside = scope.spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root can enter a namespace that it created");
                work()
            });
            inside.join().map_err(|_| anyhow::anyhow!("a panic in {}", self.namespace))
        })
    }
}

/// A running capture.
#[derive(Debug)]
pub struct WireCapture {
    running: Running,
}

impl WireCapture {
    /// Ends the capture; all frames that passed before are in the file.
    pub fn finish(mut self) -> Result<()> {
        // dumpcap reads its ring periodically and drops the rest when it exits.
        thread::sleep(Duration::from_millis(500));
        self.running.signal(Signal::INT)?;
        let status = self.running.wait(Duration::from_secs(20))?;
        ensure!(status.success(), "dumpcap: {status}: {}", self.running.output());
        Ok(())
    }
}

/// Puts one of our programs into a folder shared with machines, where it is started by its name.
pub fn bundle(program: &Path, folder: &Path) -> Result<()> {
    let mut command = tool("bundle");
    command.arg(program).arg(folder);
    finish(command)
}

fn address(host: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([10, 77, 0, host]),
        Family::V6 => IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, u16::from(host)]),
    }
}

fn addresses(host: u8) -> String {
    format!("{}/24,{}/64", address(host, Family::V4), address(host, Family::V6))
}

/// The folder with the sockets of `ci/vm/vm`'s machines.
fn state_folder() -> PathBuf {
    std::env::var_os("XWARP_RUN").map_or_else(|| PathBuf::from("/run/xwarp-vm"), PathBuf::from)
}

/// Path of a script of `ci/vm/`.
fn tool(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../vm").join(name))
}

fn script(verb: &str, name: &str) -> Command {
    let mut command = tool("vm");
    command.args([verb, name]).stdin(Stdio::null());
    command
}

/// Runs a script; its output is in the error. Its children may keep the output open, so this waits for the
/// exit of the script instead of the end of its output.
fn finish(mut command: Command) -> Result<()> {
    let said = tempfile()?;
    command.stdout(Stdio::null()).stderr(said.1.try_clone()?);
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    let words = std::fs::read_to_string(&said.0).unwrap_or_default();
    // The file only adds detail to the error, so a failure to read it is ignored.
    let _ = std::fs::remove_file(&said.0);
    ensure!(status.success(), "{command:?}: {status}: {}", words.trim());
    Ok(())
}

fn tempfile() -> Result<(PathBuf, File)> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("xwv{}-{number}.txt", std::process::id()));
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok((path, file))
}
