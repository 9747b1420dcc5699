//! `--perftest`: the same tests against perftest's own programs (`ib_send_bw -R` and so on, version 4.5)
//! instead of another `xwarp-perf`. The messages between the two ends and their order are perftest's. Nothing
//! is negotiated: both command lines must match.
//!
//! | file | owns |
//! |---|---|
//! | `exchange` | the control connection and its messages |
//! | `ends` | the test connections and their memory |
//! | `streams` | rows of bandwidth |
//! | `pings` | rows of latency |

mod ends;
mod exchange;
mod pings;
mod streams;

use std::time::Duration;

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
    rnic::{
        Kind, Plan, Verb,
        endpoint::Endpoint,
        links::{CLOSE_LIMIT, Role},
    },
    stats::Summary,
};

const MIB: f64 = (1 << 20) as f64;

/// Longest time that the client of `write_lat` waits for the server to complete its last Write and to close.
const LAST_COMPLETION: Duration = Duration::from_millis(300);

/// Runs the test. The report already has its information block.
pub fn run(endpoint: &Endpoint, plan: &Plan, meet: Meet<'_>, report: &mut Report) -> Result<()> {
    ensure!(
        matches!(plan.test.verb, Verb::Send | Verb::Write | Verb::Read) && !plan.reversed && !plan.infinite,
        "--perftest offers Sends, RDMA Writes and RDMA Reads, without --write_with_imm, --reversed, --run_infinitely"
    );
    ensure!(!plan.verify, "--verify needs xwarp-perf at both ends: perftest sends unpatterned memory");
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

/// Synchronizes the two ends before the rows; the programs of perftest do this in different ways.
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
    // The server of one-directional RDMA Writes or Reads only waits.
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
            // The programs for Sends differ from the others in the steps between these two.
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

/// Converts a result to perftest's units.
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
    // The programs for the latency of Writes exit without a last message. The client has the last word there: its
    // last Write has arrived before it has completed at the client, and would fail if the server closed at once. The
    // server's last Write may also have arrived before siw completes it, so the client does not close at once either.
    match (verb, role) {
        (Verb::Write, Role::Server) => ends.await_departure(CLOSE_LIMIT),
        (Verb::Write, Role::Client) => ends.await_departure(LAST_COMPLETION),
        _ => ends.meet(endpoint, exchange),
    }
}
