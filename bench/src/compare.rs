//! `xwarp-perf compare`: our verbs, raw AF_XDP and kernel TCP on the same veth pair, in one run. Each round
//! measures every subject once, one after the other, so that a disturbance of the machine affects all of them
//! alike. Results are compared only within a round, and only when the distance between the two cores was the
//! same for both.
//!
//! | file | owns |
//! |---|---|
//! | `plan` | what a round measures |
//! | `ends`, `offloads` | the two processes of a measurement, and the interfaces' settings |
//! | `load` | the busy loops |
//! | `libfabric` | libfabric's program |
//! | `samples` | all measurements, medians and ratios |
//! | `goals` | the goals of the performance milestone |
//! | `results` | the page's sections |
//! | `page`, `plot` | the page as Markdown and HTML |

mod ends;
mod goals;
mod libfabric;
mod load;
mod offloads;
mod page;
mod plan;
mod plot;
mod results;
mod samples;

use std::{fs, path::Path, time::Instant};

use anyhow::{Context as _, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use self::{
    ends::Ends,
    load::Load,
    offloads::Interfaces,
    page::Table,
    plan::{Step, Subject},
    results::{Machine, Run, minutes},
    samples::Samples,
};
use crate::{
    cpu::{self, Distance},
    options::CompareArgs,
};

/// Runs the comparison, prints the page, and writes the files.
pub fn run(args: &CompareArgs) -> Result<()> {
    let cpus = args.cpus.unwrap_or_else(|| match *cpu::allowed().as_slice() {
        [a, b, ..] => (a, b),
        [a] => (a, a),
        [] => (0, 0),
    });
    let siw = args.siw.as_deref().map(siw_table).transpose()?;
    ends::stop_in_order()?;
    let interfaces = Interfaces::remember([&args.netns_a, &args.netns_b], &args.device)?;
    let machine = Machine::describe();
    let mut rounds = Rounds {
        ends: Ends::new(args, cpus)?,
        interfaces: &interfaces,
        cpus,
        libfabric: libfabric::is_installed(),
        samples: Samples::default(),
        failures: Vec::new(),
    };
    let begin = Instant::now();
    rounds.run_all(args)?;
    interfaces.restore()?;
    let Rounds { samples, failures, libfabric, .. } = rounds;
    ensure!(!samples.is_empty(), "nothing was measured: {}", failures.join("; "));
    let goals = goals::goals(args, &samples);
    let run = Run { args, cpus, machine, elapsed: begin.elapsed(), libfabric, siw, samples, goals, failures };
    let page = run.page();
    print!("{}", page.markdown());
    if let Some(path) = &args.html {
        write(path, &page.html()?)?;
    }
    if let Some(path) = &args.json {
        let all = json!({
            "machine": run.machine.lines(), "goals": run.goals, "failures": run.failures,
            "samples": run.samples.to_json(),
        });
        write(path, &format!("{}\n", serde_json::to_string_pretty(&all)?))?;
    }
    Ok(())
}

/// The table of Soft-iWARP in the page at `path`.
fn siw_table(path: &Path) -> Result<Table> {
    let page = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Table::first_of(&page).with_context(|| format!("{} has no table", path.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The measurements of all rounds.
struct Rounds<'a> {
    ends: Ends,
    interfaces: &'a Interfaces,
    cpus: (usize, usize),
    /// Whether libfabric's program is installed.
    libfabric: bool,
    samples: Samples,
    /// Measurements that failed. The run continues without them.
    failures: Vec<String>,
}

impl Rounds<'_> {
    fn run_all(&mut self, args: &CompareArgs) -> Result<()> {
        let mut steps = plan::steps(args, |subject| self.libfabric || subject != Subject::Libfabric);
        let rounds = args.rounds();
        let bar = bar(u64::from(rounds) * steps.len() as u64);
        let begin = Instant::now();
        for round in 0..rounds {
            // The order within a table rotates, so that slow changes of the machine favour none of the subjects.
            for table in steps.chunk_by_mut(|a, b| (a.group, a.x) == (b.group, b.x)) {
                if round > 0 {
                    table.rotate_left(1);
                }
            }
            for step in &steps {
                bar.set_message(step.title());
                if let Err(error) = self.measure(round, step) {
                    ends::go_on()?;
                    self.failures.push(format!("round {}: {}: {error:#}", round + 1, step.title()));
                }
                bar.inc(1);
            }
            let left = begin.elapsed() / (round + 1) * (rounds - round - 1);
            bar.suspend(|| {
                eprintln!("round {} of {rounds} is done, {} to go", round + 1, minutes(left));
            });
        }
        bar.finish_and_clear();
        Ok(())
    }

    fn measure(&mut self, round: u32, step: &Step) -> Result<()> {
        self.interfaces.arrange(step.subject.kernel_offloads(), Some(step.mtu))?;
        let before = Distance::measure(self.cpus.0, self.cpus.1);
        let load = step.group.is_busy().then(|| Load::start(self.cpus)).transpose()?;
        let outcomes = match step.subject {
            Subject::Device => vec![self.ends.measure_alone(&step.command, step.limit)?],
            Subject::Libfabric => {
                let bytes = step.x.unwrap_or_default();
                vec![self.ends.measure_libfabric(&step.command, bytes, step.limit)?]
            }
            _ => self.ends.measure(&step.command, step.limit)?,
        };
        drop(load);
        let after = Distance::measure(self.cpus.0, self.cpus.1);
        for outcome in outcomes {
            let case = (step.group, step.x.unwrap_or(outcome.bytes), step.subject);
            self.samples.add(round, case, outcome, before, after);
        }
        Ok(())
    }
}

/// The progress line, which is hidden when standard error is not a terminal.
fn bar(steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if let Ok(style) = ProgressStyle::with_template("  {bar:30} {pos}/{len}  {msg}") {
        bar.set_style(style);
    }
    bar
}
