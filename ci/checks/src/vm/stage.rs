//! [`Stage`]: a machine and a namespace on its wire, with captures and checks of the traffic.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, ensure};

use super::{Job, Kernel, Near, Vm, VmOptions};
use crate::{
    capture,
    framing::{self, Connection},
    lab::{Family, INTERFACE},
    process::Running,
    tshark::{self, Verdict},
};

/// Time limit for work that is quick even on an emulated machine.
pub const SHORT: Duration = Duration::from_secs(30);
/// Time limit for work that is slow on an emulated machine.
pub const LONG: Duration = Duration::from_secs(180);

/// Path of a program that cargo built beside the running test: `examples/NAME` or `NAME`.
pub fn built(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folder = test.ancestors().nth(2).unwrap_or(&test);
    let path = folder.join(name);
    ensure!(path.exists(), "{} is missing: cargo build --workspace --all-targets", path.display());
    Ok(path)
}

/// Whether connections may be cut off in the middle of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// All connections end in order.
    Orderly,
    /// A program or machine is killed.
    Cut,
}

/// The findings in a capture without faults.
#[derive(Debug)]
pub struct Record {
    /// Wireshark's verdict.
    pub verdict: Verdict,
    /// The connections, read by our own parser.
    pub connections: Vec<Connection>,
}

/// A machine that plays the peer, and a namespace on its wire for our end.
#[derive(Debug)]
pub struct Stage {
    /// The peer.
    pub vm: Vm,
    /// The namespace of our programs.
    pub near: Near,
}

impl Stage {
    /// Boots a machine.
    pub fn new(kernel: Kernel) -> Result<Self> {
        let vm = Vm::boot(&VmOptions { kernel, ..VmOptions::default() })?;
        let near = vm.attach(1)?;
        Ok(Self { vm, near })
    }

    /// Starts one of our programs in the namespace; the interface is the first word of `line` or follows
    /// `-d`.
    pub fn start(&self, program: &str, line: &str) -> Result<Running> {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.near.start(built(program)?, &words)
    }

    /// Starts a server in the machine, and waits until it listens on `port`.
    pub fn serve(&self, command: &str, port: u16) -> Result<Job> {
        let job = self.vm.spawn(command)?;
        self.vm.wait_listening(port, SHORT)?;
        Ok(job)
    }

    /// Starts one of our examples as a server and waits until it listens.
    pub fn serve_ours(&self, example: &str, line: &str) -> Result<Running> {
        let mut server = self.start(&format!("examples/{example}"), &format!("{INTERFACE} -s {line}"))?;
        server.wait_for("listening", SHORT)?;
        Ok(server)
    }

    /// Applies loss, delay and reordering to both directions of the machine's interface; received frames pass
    /// an intermediate device (ifb).
    pub fn disturb(&self, netem: &str) -> Result<()> {
        for command in [
            &format!("tc qdisc add dev eth0 root netem {netem} limit 1000"),
            "modprobe ifb numifbs=1 && ip link set ifb0 up",
            "modprobe sch_ingress && tc qdisc add dev eth0 ingress",
            "modprobe act_mirred && tc filter add dev eth0 parent ffff: matchall action mirred egress redirect dev ifb0",
            &format!("tc qdisc add dev ifb0 root netem {netem} limit 1000"),
        ] {
            self.vm.check(command, SHORT)?;
        }
        Ok(())
    }

    /// Captures the wire while `work` runs, and returns the path of the capture.
    pub fn recorded(&self, work: impl FnOnce()) -> Result<PathBuf> {
        let test = std::thread::current().name().unwrap_or("siw").replace(':', "_");
        let path = std::env::temp_dir().join(format!("{test}-{}.pcapng", std::process::id()));
        let recording = self.vm.capture(&path)?;
        work();
        recording.finish()?;
        Ok(path)
    }

    /// Captures the wire while `work` runs; an error if a checker finds a fault in the capture, which is then
    /// kept.
    pub fn judged(&self, ending: Ending, work: impl FnOnce()) -> Result<Record> {
        let path = self.recorded(work)?;
        let verdict = tshark::judge(&path, false)?;
        ensure!(verdict.complaints.is_empty(), "{}: {:#?}", path.display(), verdict.complaints);
        let connections = framing::connections(&capture::streams(&path)?);
        let faults: Vec<&String> = connections
            .iter()
            .flat_map(|connection| &connection.faults)
            .filter(|fault| !(self.is_siws(fault) || ending == Ending::Cut && framing::is_cut_off(fault)))
            .collect();
        ensure!(faults.is_empty(), "{}: {faults:#?}", path.display());
        std::fs::remove_file(&path)?;
        Ok(Record { verdict, connections })
    }

    /// Whether the fault is a known property of siw: alignment of FPDUs with segments is required only of us,
    /// siw leaves segmentation to TCP, and its pads hold stale bytes (docs/decisions/0008).
    fn is_siws(&self, fault: &str) -> bool {
        let from_siw = [Family::V4, Family::V6].iter().any(|family| {
            let address = SocketAddr::new(self.vm.address(*family), 0).to_string();
            fault.starts_with(address.trim_end_matches('0'))
        });
        from_siw && (fault.ends_with("does not begin with an FPDU") || framing::is_of_the_pad(fault))
    }
}
