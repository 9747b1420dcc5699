//! The tests of the RNIC itself: `send`, `write` and `read`, `_bw` and `_lat`.
//!
//! | file | owns |
//! |---|---|
//! | `plan` | what both ends agree on |
//! | `endpoint` | the device, and waiting |
//! | `control` | the connection over which both ends agree: the only place that knows its messages |
//! | `links` | the test connections and their memory |
//! | `bandwidth`, `sender`, `receiver`, `rounds` | rows of bandwidth |
//! | `latency` | rows of latency |

mod bandwidth;
pub(crate) mod control;
pub(crate) mod endpoint;
mod latency;
pub(crate) mod links;
mod plan;
mod receiver;
mod rounds;
mod sender;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use xwarp_verbs::{
    Counters,
    cm::{ListenOptions, Listener},
};

pub use self::plan::{Kind, Plan, Test, Verb};
use self::{
    bandwidth::Bandwidth,
    control::Control,
    endpoint::Endpoint,
    latency::Latency,
    links::{Links, Role},
};
use crate::{
    baseline::resolve,
    cpu,
    options::{BandwidthArgs, LatencyArgs, RnicArgs},
    perftest::{self, Meet},
    report::{BandwidthRow, Info, Report, Row},
};

/// Version of what the two ends say to each other.
const VERSION: u64 = 1;

/// A command line, as far as it is not the plan.
struct Line<'a> {
    args: &'a RnicArgs,
    /// Do not report the peak.
    no_peak: bool,
    /// Print every sample, sorted or as it came.
    samples: Option<Order>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Sorted,
    AsMeasured,
}

/// Runs `send_bw`, `write_bw` or `read_bw`.
pub fn bandwidth(verb: Verb, args: &BandwidthArgs) -> Result<()> {
    let plan = Plan::bandwidth(verb, args)?;
    run(&Line { args: &args.rnic, no_peak: args.no_peak, samples: None }, plan)
}

/// Runs `send_lat`, `write_lat` or `read_lat`.
pub fn latency(verb: Verb, args: &LatencyArgs) -> Result<()> {
    let plan = Plan::latency(verb, args)?;
    let samples = match (args.histogram, args.unsorted) {
        (_, true) => Some(Order::AsMeasured),
        (true, false) => Some(Order::Sorted),
        (false, false) => None,
    };
    run(&Line { args: &args.rnic, no_peak: true, samples }, plan)
}

fn run(line: &Line<'_>, plan: Plan) -> Result<()> {
    if let Some(cpu) = line.args.output.pin {
        cpu::pin(cpu)?;
    }
    let endpoint = Endpoint::open(&line.args.device)?;
    let before = endpoint.device.counters();
    if line.args.device.perftest {
        return with_perftest(line, &endpoint, &plan, &before);
    }
    match &line.args.meet.server {
        None => serve(line, &endpoint, &plan, &before),
        Some(server) => {
            let server = resolve(server, &line.args.meet)?;
            measure(line, &endpoint, plan, server, &before)
        }
    }
}

/// The other end is a program of perftest's.
fn with_perftest(line: &Line<'_>, endpoint: &Endpoint, plan: &Plan, before: &Counters) -> Result<()> {
    let listener = match line.args.meet.server {
        None => Some(listen(line, endpoint, plan)?),
        Some(_) => None,
    };
    let mut report = Report::begin(&line.args.output, info(line, endpoint, plan));
    let meet = match (&listener, &line.args.meet.server) {
        (Some(listener), _) => Meet::Listener(listener),
        (None, server) => Meet::Server(resolve(server.as_deref().unwrap_or_default(), &line.args.meet)?),
    };
    perftest::run(endpoint, plan, meet, &mut report)?;
    end(line, endpoint, report, before)
}

/// The client's part.
fn measure(
    line: &Line<'_>,
    endpoint: &Endpoint,
    plan: Plan,
    server: SocketAddr,
    before: &Counters,
) -> Result<()> {
    let mut control = Control::connect(endpoint, server)?;
    control.exchange(endpoint, &json!({ "version": VERSION, "plan": plan.to_json() }))?;
    let links = Links::connect(endpoint, &mut control, &plan, server)?;
    walk(line, endpoint, control, links, &plan, Role::Client, before)
}

/// The server's part: one test, then the end, as perftest does it.
fn serve(line: &Line<'_>, endpoint: &Endpoint, own: &Plan, before: &Counters) -> Result<()> {
    let listener = listen(line, endpoint, own)?;
    let mut control = Control::accept(endpoint, &listener)?;
    match agree(endpoint, &mut control, own) {
        Ok(plan) => {
            let links = accept(endpoint, &mut control, &plan, &listener)?;
            drop(listener);
            walk(line, endpoint, control, links, &plan, Role::Server, before)
        }
        Err(error) => {
            // The client shall know why, too.
            control.send(endpoint, &json!({ "error": error.to_string() }))?;
            control.flush(endpoint)?;
            control.close()?;
            Err(error)
        }
    }
}

fn listen(line: &Line<'_>, endpoint: &Endpoint, plan: &Plan) -> Result<Listener> {
    let any = line.args.meet.source.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let address = SocketAddr::new(any, line.args.meet.port);
    let backlog = plan.queue_pairs as usize + 16;
    let listener = endpoint
        .device
        .listen(address, ListenOptions { backlog, ..ListenOptions::default() })
        .with_context(|| format!("cannot listen on {address}"))?;
    println!("Waiting for a client on port {} ({})", line.args.meet.port, plan.test.name());
    Ok(listener)
}

fn agree(endpoint: &Endpoint, control: &mut Control, own: &Plan) -> Result<Plan> {
    let message = control.receive(endpoint)?;
    anyhow::ensure!(
        message["version"] == VERSION,
        "the client speaks version {} and this server version {VERSION}",
        message["version"]
    );
    Plan::from_json(&message["plan"], own.test)
}

fn accept(endpoint: &Endpoint, control: &mut Control, plan: &Plan, listener: &Listener) -> Result<Links> {
    control.send(endpoint, &json!({ "ok": true }))?;
    Links::accept(endpoint, control, plan, listener)
}

/// Both ends' way through the rows.
fn walk(
    line: &Line<'_>,
    endpoint: &Endpoint,
    mut control: Control,
    links: Links,
    plan: &Plan,
    role: Role,
    before: &Counters,
) -> Result<()> {
    let mut report = Report::begin(&line.args.output, info(line, endpoint, plan));
    tell_addresses(&report, &control, &links);
    let verified = rows(line, endpoint, &mut control, &links, plan, role, &mut report)
        .and_then(|verified| add_up(endpoint, &mut control, verified));
    let verified = match verified {
        Ok(verified) => verified,
        Err(error) => {
            // The other end would wait for its time limit. It may be gone, so failing is fine.
            let words = json!({ "error": error.to_string() });
            let _ = control.send(endpoint, &words).and_then(|()| control.flush(endpoint));
            return Err(error);
        }
    };
    links.close()?;
    // The client closes first: its last message has been read by then.
    control.close()?;
    if plan.verify {
        report.note(&format!("verified {verified} bytes at both ends, all as they were sent"));
    }
    end(line, endpoint, report, before)
}

/// Counters, and the end of the report.
fn end(line: &Line<'_>, endpoint: &Endpoint, report: Report, before: &Counters) -> Result<()> {
    let counters = endpoint.device.counters().since(before);
    if line.args.device.stats {
        for (name, value) in counters.iter() {
            report.note(&format!("{name:<40} {value}"));
        }
    }
    let counters: Value =
        counters.iter().map(|(name, value)| (name.to_owned(), Value::from(value))).collect();
    report.end(Some(("counters", counters)))
}

/// Bytes that both ends verified.
fn add_up(endpoint: &Endpoint, control: &mut Control, verified: u64) -> Result<u64> {
    let theirs = control.exchange(endpoint, &json!({ "verified": verified }))?;
    Ok(verified + theirs["verified"].as_u64().context("the other end is out of step")?)
}

/// All rows; how many bytes this end verified.
fn rows(
    line: &Line<'_>,
    endpoint: &Endpoint,
    control: &mut Control,
    links: &Links,
    plan: &Plan,
    role: Role,
    report: &mut Report,
) -> Result<u64> {
    match plan.test.kind {
        Kind::Bandwidth => {
            let mut test = Bandwidth::new(endpoint, links, plan, role)?;
            for &size in &plan.sizes {
                let row = test.row(control, size)?;
                let peak = row.peak.filter(|_| !line.no_peak);
                report.row(Row::Bandwidth(BandwidthRow { peak, ..row }));
            }
            Ok(test.verified_bytes())
        }
        Kind::Latency => {
            let mut test = Latency::new(endpoint, links, plan, role)?;
            for &size in &plan.sizes {
                if let Some((row, samples)) = test.row(control, size)? {
                    report.row(row);
                    tell_samples(line, report, samples);
                }
            }
            Ok(test.verified_bytes())
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

fn info(line: &Line<'_>, endpoint: &Endpoint, plan: &Plan) -> Info {
    let attributes = endpoint.device.attributes();
    let bandwidth = plan.test.kind == Kind::Bandwidth;
    let mut info = Info::new(plan.test.title(plan.bidirectional))
        .line("Dual-port", "OFF")
        .line("Device", attributes.interface.name.clone())
        .line("Number of qps", plan.queue_pairs)
        .line("Transport type", "IW")
        .line("Connection type", "RC")
        .line("Using SRQ", if plan.shared_receive_queue { "ON" } else { "OFF" })
        .line("ibv_wr* API", "OFF");
    if bandwidth || plan.test.verb == Verb::Send {
        info = info.line("TX depth", plan.tx_depth);
    }
    if plan.test.verb == Verb::Send {
        info = info.line("RX depth", plan.rx_depth);
    }
    if bandwidth {
        info = info.line("CQ Moderation", plan.cq_mod);
    }
    if plan.test.verb == Verb::Read {
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
