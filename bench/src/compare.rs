//! `xwarp-perf compare`: our verbs and kernel TCP on the same veth pair, in one run. Each round measures
//! every subject once, one after the other, so that a disturbance of the machine affects all of them alike.
//! Results are compared only within a round, and only when the distance between the two cores was the same
//! for both.

mod ends;
mod offloads;
mod table;

use std::time::Duration;

use anyhow::{Context as _, Result};

use self::{
    ends::{Ends, Outcome},
    offloads::Interfaces,
    table::{Samples, Subject},
};
use crate::{
    cpu::{self, Distance},
    options::{CompareArgs, DEFAULT_PORT, ModeArg},
    progress::Progress,
};

/// Time allowed to one measurement beyond its requested duration; it includes opening and closing a device.
const OVERHEAD: Duration = Duration::from_secs(30);

/// Runs the comparison and prints its tables.
pub fn run(args: &CompareArgs) -> Result<()> {
    let cpus = args.cpus.unwrap_or_else(|| match *cpu::allowed().as_slice() {
        [a, b, ..] => (a, b),
        [a] => (a, a),
        [] => (0, 0),
    });
    ends::stop_in_order()?;
    let interfaces = Interfaces::remember([&args.netns_a, &args.netns_b], &args.device)?;
    let ends = Ends::new(args, cpus)?;
    let mut samples = Samples::default();
    let steps = steps(args);
    let mut progress = Progress::new(u64::from(args.rounds) * steps.len() as u64, 0, false);
    let mut done = 0;
    for round in 0..args.rounds {
        for step in &steps {
            interfaces.arrange(step.subject.kernel_offloads(), our_mtu(args, step.subject))?;
            let before = Distance::measure(cpus.0, cpus.1);
            let outcome = ends
                .measure(&step.command, step.limit)
                .with_context(|| format!("measuring {} with {} bytes", step.subject.name(), step.bytes))?;
            let after = Distance::measure(cpus.0, cpus.1);
            samples.add(round, step.subject, step.bytes, outcome, before, after);
            done += 1;
            progress.at(std::time::Instant::now(), done, done);
        }
    }
    drop(progress);
    interfaces.restore()?;
    table::print(args, &samples, cpus);
    if let Some(path) = &args.out_json_file {
        let mut text = serde_json::to_string_pretty(&samples.to_json())?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// One measurement of a round.
struct Step {
    subject: Subject,
    bytes: u64,
    command: Vec<String>,
    limit: Duration,
}

fn our_mtu(args: &CompareArgs, subject: Subject) -> Option<u32> {
    if subject.is_ours() { args.our_mtu } else { None }
}

fn steps(args: &CompareArgs) -> Vec<Step> {
    let mut steps = Vec::new();
    for &bytes in &args.latency_sizes {
        for subject in Subject::LATENCIES {
            let mut command = vec![subject.test().to_owned(), "-s".into(), bytes.to_string()];
            command.extend(["-n".into(), args.iters.to_string()]);
            if subject == Subject::TcpSleeping {
                command.push("-e".into());
            }
            ours(args, subject, &mut command);
            // 1000 exchanges a second: anything that works is faster.
            let limit = OVERHEAD + Duration::from_millis(args.iters);
            steps.push(Step { subject, bytes, command, limit });
        }
    }
    for &bytes in &args.bandwidth_sizes {
        for subject in Subject::BANDWIDTHS {
            let mut command = vec![subject.test().to_owned(), "-s".into(), bytes.to_string()];
            command.extend(["-D".into(), args.duration.as_secs_f64().to_string()]);
            command.extend(["--report_gbits".into(), "--cpu_util".into()]);
            ours(args, subject, &mut command);
            steps.push(Step { subject, bytes, command, limit: OVERHEAD + args.duration });
        }
    }
    steps
}

/// Options of our own tests, and the port of the kernel's tests. The kernel's connections stay in TIME-WAIT
/// on their port, where we could not reserve it.
fn ours(args: &CompareArgs, subject: Subject, command: &mut Vec<String>) {
    if !subject.is_ours() {
        command.extend(["-p".into(), (DEFAULT_PORT + 1).to_string()]);
        return;
    }
    let mode = match args.mode {
        ModeArg::Auto => "auto",
        ModeArg::Zerocopy => "zerocopy",
        ModeArg::Copy => "copy",
        ModeArg::Generic => "generic",
    };
    command.extend(["-d".into(), args.device.clone(), "--mode".into(), mode.into()]);
}

impl Outcome {
    /// Reads the JSON of a run: latency in microseconds (the median), bandwidth in Gb/sec.
    fn parse(text: &str) -> Result<Self> {
        let all: serde_json::Value = serde_json::from_str(text)?;
        let row = all["xwarp"]["rows"].get(0).context("no result in the JSON")?;
        let value = row["latency"]["typical"].as_f64().or_else(|| row["bw_average"].as_f64());
        let ends = [row["cpu_sec_per_gib_local"].as_f64(), row["cpu_sec_per_gib_remote"].as_f64()];
        Ok(Self {
            value: value.context("no figure in the JSON")?,
            tail: row["latency"]["p99"].as_f64(),
            cpu: ends.into_iter().flatten().reduce(|a, b| a + b),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::options::{Cli, Command};

    #[test]
    fn every_command_of_a_round_is_one_that_we_understand() {
        let cli = Cli::try_parse_from(["xwarp-perf", "compare", "--mode", "generic"]).unwrap();
        let Command::Compare(args) = cli.command else { panic!("not compare") };
        let steps = steps(&args);
        assert!(steps.iter().any(|s| s.subject == Subject::SendLat && s.bytes == 64));
        for step in steps {
            let line = std::iter::once("xwarp-perf".to_owned()).chain(step.command);
            assert!(Cli::try_parse_from(line).is_ok());
        }
    }

    #[test]
    fn both_kinds_of_results_are_read() {
        let latency = r#"{"xwarp": {"rows": [{"bytes": 64, "latency": {"typical": 1.5, "p99": 2.5}}]}}"#;
        let outcome = Outcome::parse(latency).unwrap();
        assert_eq!((outcome.value, outcome.tail, outcome.cpu), (1.5, Some(2.5), None));
        let bandwidth = r#"{"xwarp": {"rows": [{"bw_average": 20.0, "cpu_sec_per_gib_local": 0.25, "cpu_sec_per_gib_remote": 0.5}]}}"#;
        let outcome = Outcome::parse(bandwidth).unwrap();
        assert_eq!((outcome.value, outcome.cpu), (20.0, Some(0.75)));
        assert!(Outcome::parse(r#"{"xwarp": {"rows": []}}"#).is_err());
    }
}
