//! [`Stage`]: a machine and a namespace on its wire, where what passes is recorded and judged.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Result, ensure};

use super::{Job, Near, Siw, SiwVm, VmOptions};
use crate::{
    capture,
    framing::{self, Connection},
    lab::{Family, INTERFACE},
    process::Running,
    tshark::{self, Verdict},
};

/// For what takes no work of an emulated machine to speak of.
pub const SHORT: Duration = Duration::from_secs(30);
/// For what does.
pub const LONG: Duration = Duration::from_secs(180);

/// A program that cargo has put beside the running test: of `examples/NAME` or `NAME`.
pub fn built(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folder = test.ancestors().nth(2).unwrap_or(&test);
    let path = folder.join(name);
    ensure!(path.exists(), "{} is missing: cargo build --workspace --all-targets", path.display());
    Ok(path)
}

/// Whose connections are cut off on purpose, in the middle of whatever they were doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Nobody's.
    Orderly,
    /// Somebody is killed.
    Cut,
}

/// What the judges found on a wire on which nothing was wrong.
#[derive(Debug)]
pub struct Record {
    /// Wireshark's opinion.
    pub verdict: Verdict,
    /// Our own reading.
    pub connections: Vec<Connection>,
}

/// A machine that plays the peer, and a namespace on its wire for our end.
#[derive(Debug)]
pub struct Stage {
    /// The peer.
    pub vm: SiwVm,
    /// Where our programs run.
    pub near: Near,
}

impl Stage {
    /// Boots a machine.
    pub fn new(siw: Siw) -> Result<Self> {
        let vm = SiwVm::boot(&VmOptions { siw, ..VmOptions::default() })?;
        let near = vm.attach(1)?;
        Ok(Self { vm, near })
    }

    /// Starts one of our programs at our end: the interface is the first word, or follows `-d`.
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

    /// Starts one of our examples as a server, and waits until it listens.
    pub fn serve_ours(&self, example: &str, line: &str) -> Result<Running> {
        let mut server = self.start(&format!("examples/{example}"), &format!("{INTERFACE} -s {line}"))?;
        server.wait_for("listening", SHORT)?;
        Ok(server)
    }

    /// Puts loss, delay and disorder on both directions of the machine's interface: what it receives passes
    /// by an intermediate device.
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

    /// Runs `work` while the wire is recorded, and returns where.
    pub fn recorded(&self, work: impl FnOnce()) -> Result<PathBuf> {
        let test = std::thread::current().name().unwrap_or("siw").replace(':', "_");
        let path = std::env::temp_dir().join(format!("{test}-{}.pcapng", std::process::id()));
        let recording = self.vm.capture(&path)?;
        work();
        recording.finish()?;
        Ok(path)
    }

    /// Runs `work` while the wire is recorded; an error when a judge finds anything wrong in the record,
    /// which is then kept.
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

    /// Keeping FPDUs and segments aligned is asked of us; siw leaves it to TCP how its bytes are cut, and its
    /// pads hold what was there (docs/decisions/0008).
    fn is_siws(&self, fault: &str) -> bool {
        let from_siw = [Family::V4, Family::V6].iter().any(|family| {
            let address = SocketAddr::new(self.vm.address(*family), 0).to_string();
            fault.starts_with(address.trim_end_matches('0'))
        });
        from_siw && (fault.ends_with("does not begin with an FPDU") || framing::is_of_the_pad(fault))
    }
}
