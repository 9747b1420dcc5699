//! The impairment hop: a userspace bridge in a namespace of its own between the two ends of the laboratory, with
//! the fault model of the simulator. The kernel's own (netem) would not see what AF_XDP sends, which goes past the
//! queueing disciplines.
//!
//! The program is `xwarp-hop`; tests start it by [`Hop::start`].

mod bridge;
pub mod options;
mod socket;

use std::{path::Path, sync::atomic::AtomicBool, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use rustix::process::{Signal, setpriority_process};
use serde_json::Value;

pub use self::bridge::Bridge;
use self::options::HopArgs;
use crate::{
    lab::{HOP_INTERFACES, Lab},
    process::Running,
};

/// What the program says when it carries frames.
const READY: &str = "Frames pass between";

/// The program `xwarp-hop`.
pub fn main() -> Result<()> {
    static STOP: AtomicBool = AtomicBool::new(false);
    let args = HopArgs::parse();
    ctrlc::set_handler(|| STOP.store(true, std::sync::atomic::Ordering::Relaxed))?;
    // Sleeps end when they should. By hand it has no priority but this one; without root it goes on.
    let _ = nix::sys::prctl::set_timerslack(1);
    let _ = setpriority_process(None, -20);
    let mut bridge = Bridge::new([&args.a, &args.b], args.faults(), args.seed)?;
    println!("{READY} {} and {}.", args.a, args.b);
    bridge.run(&STOP, args.spin)?;
    println!("{}", bridge.report());
    Ok(())
}

/// A hop of a laboratory, carrying frames until it is stopped or dropped.
#[derive(Debug)]
pub struct Hop(Running);

impl Hop {
    /// Starts `program` (`xwarp-hop`) with the options in `line` and waits until it carries frames. A wire has no
    /// time slices: it runs before everything else.
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

    /// Stops it; what it did to the frames, as [`Bridge::report`] has it.
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
