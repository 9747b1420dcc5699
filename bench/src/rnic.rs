//! The tests of the RNIC itself: `send`, `write`, `read` and `atomic`, `_bw` and `_lat`.
//!
//! | file | owns |
//! |---|---|
//! | `plan` | the parameters that both ends agree on |
//! | `endpoint` | the device, and waiting |
//! | `control` | the control connection and its messages |
//! | `links` | the test connections and their memory |
//! | `session` | one engine's connections; several engines |
//! | `bandwidth`, `sender`, `receiver`, `rounds` | rows of bandwidth |
//! | `latency` | rows of latency |

mod bandwidth;
mod closing;
pub(crate) mod control;
pub(crate) mod endpoint;
mod latency;
mod limiter;
pub(crate) mod links;
mod plan;
mod receiver;
mod rounds;
mod sender;
mod session;

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use xwarp_verbs::{Counters, cm::Listener};

use self::{
    bandwidth::{Bandwidth, sum_up},
    control::Control,
    latency::Latency,
    links::Links,
    session::{Session, in_parallel},
};
pub use self::{
    control::CONNECT_LIMIT,
    endpoint::{Endpoint, interface_name},
    links::Role,
    plan::{Kind, Plan, Test, Verb},
};
use crate::{
    baseline::resolve,
    cpu,
    failure::{BelowLimit, PeerGone, one_line},
    options::{BandwidthArgs, LatencyArgs, RnicArgs},
    perftest::{self, Meet},
    report::{BandwidthRow, DeviceInfo, Info, RdmaInfo, Report, Row, TestInfo},
    units::RateUnit,
};

/// The options of this end that are not part of the plan.
struct Line<'a> {
    args: &'a RnicArgs,
    /// Omit the peak.
    no_peak: bool,
    /// Print every sample, in this order.
    samples: Option<Order>,
    /// Results below these limits are failures.
    limits: Limits,
}

/// `--limit_bw`, in the unit of the report, and `--limit_msgrate`, in millions of messages a second.
#[derive(Debug, Clone, Copy, Default)]
struct Limits {
    bandwidth: Option<f64>,
    rate: Option<f64>,
}

impl Limits {
    fn check(self, row: &BandwidthRow, unit: RateUnit) -> Result<(), BelowLimit> {
        let below = |quantity, found: f64, limit: Option<f64>| match limit {
            Some(limit) if found < limit => Err(BelowLimit { quantity, found, limit }),
            _ => Ok(()),
        };
        below("the average bandwidth", unit.convert(row.average), self.bandwidth)?;
        below("the message rate", row.message_rate(), self.rate)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Sorted,
    AsMeasured,
}

/// Runs a bandwidth test.
pub fn bandwidth(verb: Verb, args: &BandwidthArgs) -> Result<()> {
    let plan = Plan::bandwidth(verb, args)?;
    let limits = Limits { bandwidth: args.limit_bw, rate: args.limit_msgrate };
    run(&Line { args: &args.rnic, no_peak: args.no_peak, samples: None, limits }, plan)
}

/// Runs a latency test.
pub fn latency(verb: Verb, args: &LatencyArgs) -> Result<()> {
    let plan = Plan::latency(verb, args)?;
    let samples = match (args.histogram, args.unsorted) {
        (_, true) => Some(Order::AsMeasured),
        (true, false) => Some(Order::Sorted),
        (false, false) => None,
    };
    run(&Line { args: &args.rnic, no_peak: true, samples, limits: Limits::default() }, plan)
}

fn run(line: &Line<'_>, plan: Plan) -> Result<()> {
    if let Some(cpu) = line.args.output.pin {
        cpu::pin(cpu)?;
    }
    let endpoints = Endpoint::open_engines(&line.args.device, plan.engines)?;
    let before = only(&endpoints)?.device.counters();
    if line.args.device.perftest {
        return with_perftest(line, &endpoints, &plan, &before);
    }
    match &line.args.meet.server {
        None => serve(line, &endpoints, &plan, &before),
        Some(server) => {
            let server = resolve(server, &line.args.meet)?;
            measure(line, &endpoints, &plan, server, &before)
        }
    }
}

/// Runs the test against a program of perftest.
fn with_perftest(line: &Line<'_>, endpoints: &[Endpoint], plan: &Plan, before: &Counters) -> Result<()> {
    let endpoint = only(endpoints)?;
    let listener = match line.args.meet.server {
        None => Some(listen(line, endpoint, plan)?),
        Some(_) => None,
    };
    let role = if line.args.meet.server.is_some() { Role::Client } else { Role::Server };
    let mut report = Report::begin(&line.args.output, info(line, endpoint, plan, role));
    let meet = match (&listener, &line.args.meet.server) {
        (Some(listener), _) => Meet::Listener(listener),
        (None, server) => Meet::Server(resolve(server.as_deref().unwrap_or_default(), &line.args.meet)?),
    };
    perftest::run(endpoint, plan, meet, &mut report)?;
    end(line, endpoints, report, before, None)
}

/// The endpoint of a test that has one engine, or the first one.
fn only(endpoints: &[Endpoint]) -> Result<&Endpoint> {
    endpoints.first().context("a test needs an engine")
}

/// Runs the client.
fn measure(
    line: &Line<'_>,
    endpoints: &[Endpoint],
    plan: &Plan,
    server: SocketAddr,
    before: &Counters,
) -> Result<()> {
    let sessions = session::connect(endpoints, plan, server)?;
    walk(line, endpoints, sessions, plan, Role::Client, before)
}

/// Runs the server: it ends after one test, as perftest's does.
fn serve(line: &Line<'_>, endpoints: &[Endpoint], own: &Plan, before: &Counters) -> Result<()> {
    let listener = listen(line, only(endpoints)?, own)?;
    let (sessions, plan) = session::accept(endpoints, &listener, own)?;
    drop(listener);
    walk(line, endpoints, sessions, &plan, Role::Server, before)
}

/// Listens, in all engines of the device.
fn listen(line: &Line<'_>, endpoint: &Endpoint, plan: &Plan) -> Result<Listener> {
    let meet = &line.args.meet;
    let listener = session::listen(endpoint, meet.source, meet.port, plan)?;
    println!("Waiting for a client on port {} ({})", meet.port, plan.test.name());
    Ok(listener)
}

/// Runs all rows, closes the connections and ends the report, on either end.
fn walk(
    line: &Line<'_>,
    endpoints: &[Endpoint],
    sessions: Vec<Session>,
    plan: &Plan,
    role: Role,
    before: &Counters,
) -> Result<()> {
    let mut report = Report::begin(&line.args.output, info(line, only(endpoints)?, plan, role));
    let (mut controls, links): (Vec<_>, Vec<_>) =
        sessions.into_iter().map(|Session { control, links }| (control, links)).unzip();
    for (control, links) in controls.iter().zip(&links) {
        tell_addresses(&report, control, links);
    }
    let grown: Option<u64> = links.iter().map(|links| links.grown).sum();
    let outcome = rows(line, endpoints, &mut controls, &links, plan, role, &mut report)
        .and_then(|ours| Ok((add_up(endpoints, &mut controls, &ours.bytes)?, ours.within)));
    let (verified, within) = match outcome {
        Ok(outcome) => outcome,
        Err(error) => {
            // Otherwise the other end would wait until its time limit.
            if error.downcast_ref::<PeerGone>().is_none() {
                let reason = json!({ "error": one_line(&error) });
                for (endpoint, control) in endpoints.iter().zip(&mut controls) {
                    let _ = control.send(endpoint, &reason).and_then(|()| control.flush(endpoint));
                }
            }
            return Err(error);
        }
    };
    for links in links {
        links.close()?;
    }
    // The client closes first, after its last message has been read.
    for control in controls {
        control.close()?;
    }
    if plan.verify {
        report.note(&format!("verified {verified} bytes at both ends, all as they were sent"));
    }
    let memory = grown.map(|bytes| {
        // With its queue pair and what this program keeps for it; completion queues and regions are there before.
        json!({ "bytes_per_connection": bytes as f64 / f64::from(plan.queue_pairs) })
    });
    end(line, endpoints, report, before, memory)?;
    Ok(within?)
}

/// Prints the counters of the device and ends the report.
fn end(
    line: &Line<'_>,
    endpoints: &[Endpoint],
    report: Report,
    before: &Counters,
    memory: Option<Value>,
) -> Result<()> {
    let counters: BTreeMap<_, _> = only(endpoints)?.device.counters().since(before).iter().collect();
    if line.args.device.stats {
        for (name, value) in &counters {
            report.note(&format!("{name:<40} {value}"));
        }
    }
    let memory = memory.map(|memory| ("memory".to_owned(), memory));
    report.end([("counters".to_owned(), json!(counters))].into_iter().chain(memory).collect())
}

/// Sum of the bytes that both ends verified; `verified` has those of each engine at this end.
fn add_up(endpoints: &[Endpoint], controls: &mut [Control], verified: &[u64]) -> Result<u64> {
    let mut sum = 0;
    for ((endpoint, control), verified) in endpoints.iter().zip(controls).zip(verified) {
        let theirs = control.exchange(endpoint, &json!({ "verified": verified }))?;
        sum += verified + theirs["verified"].as_u64().context("unexpected message from the other end")?;
    }
    Ok(sum)
}

/// The outcome of all rows.
struct Verified {
    /// Number of verified bytes of each engine.
    bytes: Vec<u64>,
    /// The first result below a limit of the command line.
    within: Result<(), BelowLimit>,
}

/// Runs all rows, each in all engines at once.
fn rows(
    line: &Line<'_>,
    endpoints: &[Endpoint],
    controls: &mut [Control],
    links: &[Links],
    plan: &Plan,
    role: Role,
    report: &mut Report,
) -> Result<Verified> {
    let part = plan.part();
    match plan.test.kind {
        Kind::Bandwidth => {
            let mut tests = endpoints
                .iter()
                .zip(links)
                .map(|(endpoint, links)| Bandwidth::new(endpoint, links, &part, role))
                .collect::<Result<Vec<_>>>()?;
            let mut within = Ok(());
            loop {
                for &size in &plan.sizes {
                    let engines = tests.iter_mut().zip(controls.iter_mut()).collect();
                    let measured = in_parallel(engines, |(test, control)| test.row(control, size))?;
                    let row = sum_up(size, &measured);
                    within = within.and(line.limits.check(&row, line.args.output.unit()));
                    let peak = row.peak.filter(|_| !line.no_peak);
                    report.row(Row::Bandwidth(BandwidthRow { peak, ..row }));
                }
                if !plan.infinite {
                    break;
                }
            }
            Ok(Verified { bytes: tests.iter().map(Bandwidth::verified_bytes).collect(), within })
        }
        Kind::Latency => {
            let control = controls.first_mut().context("a control connection")?;
            let links = links.first().context("a connection")?;
            let mut test = Latency::new(only(endpoints)?, links, &part, role)?;
            for &size in &plan.sizes {
                if let Some((row, samples)) = test.row(control, size)? {
                    report.row(row);
                    tell_samples(line, report, samples);
                }
            }
            Ok(Verified { bytes: vec![test.verified_bytes()], within: Ok(()) })
        }
    }
}

fn tell_samples(line: &Line<'_>, report: &Report, mut samples: Vec<f64>) {
    let Some(order) = line.samples else { return };
    if order == Order::Sorted {
        samples.sort_by(f64::total_cmp);
    }
    report.note("#, usec");
    for (number, sample) in samples.iter().enumerate() {
        report.note(&format!("{}, {sample:.3}", number + 1));
    }
}

fn tell_addresses(report: &Report, control: &Control, links: &Links) {
    if let (Some(local), Some(remote)) = control.addresses() {
        report.note(&format!("local address: {local} remote address: {remote}"));
    }
    report.note(&format!(
        "local keys: {:#010x} {:#010x} remote key: {:#010x}",
        links.sink.key().value(),
        links.source.key().value(),
        links.peer.key.value()
    ));
}

fn info(line: &Line<'_>, endpoint: &Endpoint, plan: &Plan, role: Role) -> Info {
    let attributes = endpoint.device.attributes();
    let bandwidth = plan.test.kind == Kind::Bandwidth;
    let device = DeviceInfo {
        name: attributes.interface.name.clone(),
        mtu: attributes.interface.mtu.into(),
        events: line.args.device.events,
        tos: line.args.device.tos,
    };
    let test_info = TestInfo::Rdma(Box::new(RdmaInfo::new(plan, role, device)));
    let mut info = Info::new(plan.title(), test_info)
        .line("Dual-port", "OFF")
        .line("Device", attributes.interface.name.clone())
        .line("Number of qps", plan.queue_pairs)
        .line("Transport type", "IW")
        .line("Connection type", "RC")
        .line("Using SRQ", if plan.shared_receive_queue { "ON" } else { "OFF" })
        .line("ibv_wr* API", "OFF");
    if plan.engines > 1 {
        info = info.line("Engines", plan.engines);
    }
    if bandwidth || plan.test.verb == Verb::Send {
        info = info.line("TX depth", plan.tx_depth);
    }
    if plan.test.verb.takes_receives() {
        info = info.line("RX depth", plan.rx_depth);
    }
    if bandwidth {
        info = info.line("CQ Moderation", plan.cq_mod);
    }
    if plan.test.verb.fetches() {
        info = info.line("Outstand reads", plan.reads);
    }
    info.line("Mtu", format!("{}[B]", attributes.interface.mtu))
        .line("Link type", "Ethernet")
        .line("Max inline data", format!("{}[B]", plan.inline))
        .line("rdma_cm QPs", "ON")
        .line("Data ex. method", "rdma_cm")
        .line("XDP mode", attributes.interface.mode.to_string())
        .line("CRC", if line.args.device.no_crc { "if the peer asks" } else { "ON" })
        .line("Verify", if plan.verify { "ON" } else { "OFF" })
}
