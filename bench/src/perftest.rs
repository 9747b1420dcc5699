//! `--perftest`: the same tests against perftest's own programs (`ib_send_bw -R` and so on, version 4.5)
//! instead of another `xwarp-perf`. What the two ends say to each other and in which order is perftest's;
//! nothing is agreed on: both command lines must be the same.
//!
//! | file | owns |
//! |---|---|
//! | `exchange` | the control connection, and what is said over it |
//! | `ends` | the test connections and their memory |
//! | `streams` | rows of bandwidth |
//! | `pings` | rows of latency |

mod ends;
mod exchange;
mod pings;
mod streams;

use anyhow::{Context as _, Result, ensure};

use self::{
    ends::{Ends, has_credits},
    exchange::{Exchange, Measured},
    pings::Pings,
    streams::{Moved, Streams},
};
pub use ends::Meet;

use crate::{
    report::{BandwidthRow, LatencyRow, Report, Row},
    rnic::{Kind, Plan, Verb, endpoint::Endpoint, links::Role},
    stats::Summary,
};

const MIB: f64 = (1 << 20) as f64;

/// Runs the test. The report has its information block already.
pub fn run(endpoint: &Endpoint, plan: &Plan, meet: Meet<'_>, report: &mut Report) -> Result<()> {
    ensure!(!plan.verify, "--verify needs xwarp-perf at both ends: perftest sends what its memory has");
    ensure!(!plan.shared_receive_queue, "--use-srq is not offered with --perftest");
    let role = meet.role();
    let mut exchange = match &meet {
        Meet::Server(server) => Exchange::connect(endpoint, *server)?,
        Meet::Listener(listener) => Exchange::accept(endpoint, listener)?,
    };
    if let (Some(local), Some(remote)) = exchange.addresses() {
        report.note(&format!("local address: {local} remote address: {remote}"));
    }
    let smallest = exchange.greet(endpoint)?;
    let mut ends = Ends::new(endpoint, &mut exchange, plan, smallest, meet)?;
    open(endpoint, &mut exchange, &mut ends, plan)?;
    match plan.test.kind {
        Kind::Bandwidth => bandwidth(endpoint, &mut exchange, &ends, plan, role, report)?,
        Kind::Latency => latency(endpoint, &mut exchange, &ends, plan, role, report)?,
    }
    ends.close()
}

/// How the ends meet before the rows: not every program of perftest does it alike.
fn open(endpoint: &Endpoint, exchange: &mut Exchange, ends: &mut Ends, plan: &Plan) -> Result<()> {
    let sends = plan.test.verb == Verb::Send;
    if plan.test.kind == Kind::Latency && !sends {
        ends.meet(endpoint, exchange)?;
    }
    ends.swap_keys(endpoint, exchange)?;
    if sends {
        ends.meet(endpoint, exchange)?;
    }
    ends.swap_keys(endpoint, exchange)?;
    if !sends {
        ends.meet(endpoint, exchange)?;
    }
    Ok(())
}

fn bandwidth(
    endpoint: &Endpoint,
    exchange: &mut Exchange,
    ends: &Ends,
    plan: &Plan,
    role: Role,
    report: &mut Report,
) -> Result<()> {
    let sends = has_credits(plan);
    // The server of RDMA Writes and Reads in one direction only waits.
    let idle = role == Role::Server && !sends && !plan.bidirectional;
    let mut streams = Streams::new(endpoint, ends, plan, role)?;
    let mut measured = Measured::default();
    for &size in &plan.sizes {
        if idle {
            break;
        }
        streams.prepare(size)?;
        if sends || plan.bidirectional {
            ends.meet(endpoint, exchange)?;
        }
        let moved = streams.run(size)?;
        measured = measure(size, moved);
        let all = plan.sizes.len() > 1;
        if plan.bidirectional {
            // Between these two the programs for Sends and for the others differ.
            if !sends && all {
                ends.meet(endpoint, exchange)?;
            }
            let theirs = exchange.swap_reports(endpoint, &measured)?;
            report.row(row(size, 2 * moved.messages, measured.average + theirs.average));
        } else {
            report.row(row(size, moved.messages, measured.average));
        }
        if sends && all {
            ends.meet(endpoint, exchange)?;
        }
    }
    if !sends && !plan.bidirectional {
        ends.meet(endpoint, exchange)?;
        let theirs = exchange.swap_reports(endpoint, &measured)?;
        if idle {
            report.note(&format!("the client measured {:.2} MiB/s", theirs.average));
        }
    }
    ends.meet(endpoint, exchange)
}

/// In perftest's units.
fn measure(size: u64, moved: Moved) -> Measured {
    let seconds = moved.elapsed.as_secs_f64().max(1e-9);
    let rate = moved.messages as f64 / seconds;
    let average = rate * size as f64 / MIB;
    Measured { bytes: size, iterations: moved.messages, peak: average, average, message_rate: rate / 1e6 }
}

fn row(size: u64, iterations: u64, average: f64) -> Row {
    Row::Bandwidth(BandwidthRow { bytes: size, iterations, peak: None, average: average * MIB, cpu: None })
}

fn latency(
    endpoint: &Endpoint,
    exchange: &mut Exchange,
    ends: &Ends,
    plan: &Plan,
    role: Role,
    report: &mut Report,
) -> Result<()> {
    let verb = plan.test.verb;
    let mut pings = Pings::new(endpoint, ends, plan, role)?;
    for &size in &plan.sizes {
        if verb == Verb::Read && role == Role::Server {
            break;
        }
        pings.prepare(size)?;
        if verb == Verb::Send {
            ends.meet(endpoint, exchange)?;
        }
        let samples = pings.run(size)?;
        let summary = Summary::of(&samples).context("no message was measured")?;
        report.row(Row::Latency(LatencyRow { bytes: size, iterations: samples.len() as u64, summary }));
    }
    // The program for latency of Writes just ends.
    if verb == Verb::Write { Ok(()) } else { ends.meet(endpoint, exchange) }
}
