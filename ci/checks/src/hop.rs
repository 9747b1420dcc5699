//! The impairment hop: a userspace bridge in its own namespace between the two ends of the lab, with the
//! fault model of the simulator. The kernel's netem would not see frames sent by AF_XDP, which bypass the
//! queueing disciplines.
//!
//! The program is `xwarp-hop`; tests start it with [`Hop::start`].

mod bridge;
pub mod options;
mod socket;

use std::{path::Path, sync::atomic::AtomicBool, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use rustix::process::{Signal, setpriority_process};
use serde_json::Value;

use self::options::HopArgs;
pub use self::{bridge::Bridge, socket::RawSocket};
use crate::{
    lab::{HOP_INTERFACES, Lab},
    process::Running,
};

/// Printed by the program when it forwards frames.
const READY: &str = "Frames pass between";

/// Runs the program `xwarp-hop`.
pub fn main() -> Result<()> {
    static STOP: AtomicBool = AtomicBool::new(false);
    let args = HopArgs::parse();
    ctrlc::set_handler(|| STOP.store(true, std::sync::atomic::Ordering::Relaxed))?;
    // Makes sleeps precise. This is the only priority of a hop that was started by hand; without root it is
    // skipped.
    let _ = nix::sys::prctl::set_timerslack(1);
    let _ = setpriority_process(None, -20);
    let mut bridge = Bridge::new([&args.a, &args.b], args.faults(), args.seed)?;
    println!("{READY} {} and {}.", args.a, args.b);
    bridge.run(&STOP, args.spin)?;
    println!("{}", bridge.report());
    Ok(())
}

/// A lab's running hop, which forwards frames until it is stopped or dropped.
#[derive(Debug)]
pub struct Hop(Running);

impl Hop {
    /// Starts `program` (`xwarp-hop`) with the options in `line` and waits until it forwards frames. It has
    /// real-time priority, because a wire is never preempted.
    pub fn start(lab: &Lab, program: impl AsRef<Path>, line: &str) -> Result<Self> {
        let mut command = lab.hop_command("chrt");
        command
            .args(["--fifo", "50"])
            .arg(program.as_ref())
            .args(HOP_INTERFACES)
            .args(line.split_whitespace());
        let mut running = Running::start(command)?;
        running.wait_for(READY, Duration::from_secs(20))?;
        Ok(Self(running))
    }

    /// Stops the hop and returns its report, see [`Bridge::report`].
    pub fn stop(self) -> Result<Value> {
        self.0.signal(Signal::TERM)?;
        let printed = self.0.finish(Duration::from_secs(20))?;
        let last = printed.lines().last().unwrap_or_default();
        let report: Value =
            serde_json::from_str(last).with_context(|| format!("no report in '{printed}'"))?;
        ensure!(report["a_to_b"]["frames"].is_u64(), "no report in '{printed}'");
        Ok(report)
    }
}
