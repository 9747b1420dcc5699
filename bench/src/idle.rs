//! `idle`: the cost of an unused device, and of registering memory. Neither depends on a peer.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use serde_json::json;
use xwarp_verbs::{
    Access,
    memory::{Memory, Pages},
};

use crate::{cpu, options::IdleArgs, rnic::Endpoint, stats::Spread, units::short_bytes};

/// Number of registrations, of whose times the median counts.
const REGISTRATIONS: usize = 100;

/// Time for a new device to come to rest.
const REST: Duration = Duration::from_millis(100);

/// Opens a device, registers memory, and sleeps.
pub fn run(args: &IdleArgs) -> Result<()> {
    if let Some(cpu) = args.pin {
        cpu::pin(cpu)?;
    }
    let endpoint = Endpoint::open(&args.device)?;
    let memory = Memory::anonymous(usize::try_from(args.size)?, Pages::Normal)?;
    let mut times = Vec::with_capacity(REGISTRATIONS);
    for _ in 0..REGISTRATIONS {
        let part = memory.slice(0, memory.len())?;
        let start = Instant::now();
        let region = endpoint.pd.register(part, Access::LOCAL_WRITE | Access::REMOTE)?;
        times.push(start.elapsed().as_nanos() as f64 / 1000.0);
        drop(region);
    }
    let registration = Spread::of(&times).context("nothing was registered")?;
    thread::sleep(REST);
    let (before, start) = (cpu::process_time(), Instant::now());
    thread::sleep(args.duration);
    let spent = cpu::process_time().saturating_sub(before);
    let percent = 100.0 * spent.as_secs_f64() / start.elapsed().as_secs_f64();
    println!("An idle device uses {percent:.3} % of one CPU.");
    println!(
        "Registering {} bytes takes {:.2} us (median of {REGISTRATIONS}; {:.2} to {:.2}).",
        short_bytes(args.size),
        registration.median,
        registration.min,
        registration.max
    );
    if let Some(path) = &args.json {
        let all = json!({ "cpu_percent": percent, "registration_us": registration.median });
        fs::write(path, format!("{all:#}\n")).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
