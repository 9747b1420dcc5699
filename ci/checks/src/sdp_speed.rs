//! `xwarp-sdp-speed`: the speed of unmodified programs over SDP beside the same programs over kernel TCP. Rounds are interleaved: each
//! round measures every subject once. The page has medians and ranges over the rounds.

use std::{
    fmt,
    fmt::Write as _,
    net::SocketAddr,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use rustix::process::{Pid, Signal, kill_process};
use xwarp_perf::stats::{Limit, Spread};
use xwarp_sdp::mapper::{Asked, Question};

use crate::{
    lab::{Family, Lab, LabOptions, Side},
    process::Running,
    rounds::{self, Samples},
};

/// Time allowed beyond the duration of a measurement.
const PATIENCE: Duration = Duration::from_mins(1);
/// Additional duration of the runs in which system calls are counted, in seconds.
const COUNT_MARGIN: u32 = 4;
/// Time from the start of the client to the count. The client sends its first request after more than two seconds.
const BEFORE_COUNT: Duration = Duration::from_secs(3);
/// Requests a second of clients that let both ends sleep between them.
const FEW: f64 = 500.0;
/// A rate below this counts as no system call for a request: threads that check whether the program still polls make some hundred
/// calls a second, whatever the number of requests.
const NONE_A_REQUEST: f64 = 0.02;
/// MTUs of the wire.
const MTUS: [u32; 3] = [1500, 9000, 65535];

/// The speed of unmodified programs over SDP, as a page
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-sdp-speed")]
pub struct SdpSpeedArgs {
    /// Number of rounds; each measures everything once
    #[arg(long, value_name = "COUNT", default_value_t = 5)]
    pub rounds: u32,
    /// Duration of each measurement in seconds
    #[arg(short = 'D', long, value_name = "SECONDS", default_value_t = 2)]
    pub duration: u32,
    /// Measure only the rows whose names contain this text, for instance `Sdp, Sleeping`; see the lines of a run
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Also write the page to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// The transport of the program's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    Sdp,
    Tcp,
    /// Kernel TCP without segmentation and receive offloads.
    PlainTcp,
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sdp => "SDP",
            Self::Tcp => "TCP",
            Self::PlainTcp => "TCP, offloads off",
        })
    }
}

/// One row of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// iperf3 with writes of 1 MiB at this MTU.
    Bulk(By, u32),
    /// sockperf with requests and answers of 64 bytes.
    Requests(By, Calls),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Calls {
    /// Non-blocking ones, by which both ends poll.
    Polling,
    Blocking,
    /// Blocking ones of a client that sends [`FEW`] requests a second: the server sleeps before each.
    Sleeping,
}

impl Calls {
    const ALL: [Self; 3] = [Self::Polling, Self::Blocking, Self::Sleeping];

    fn name(self) -> &'static str {
        match self {
            Self::Polling => "non-blocking",
            Self::Blocking => "blocking",
            Self::Sleeping => "blocking, 500 requests a second",
        }
    }
}

impl Subject {
    fn all() -> Vec<Self> {
        let mut all = vec![Self::Bulk(By::PlainTcp, 1500)];
        for by in [By::Sdp, By::Tcp] {
            all.extend(MTUS.map(|mtu| Self::Bulk(by, mtu)));
            all.extend(Calls::ALL.map(|calls| Self::Requests(by, calls)));
        }
        all
    }
}

/// A figure of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    /// Gb/s.
    Bandwidth,
    /// Percent of the received bytes.
    ZeroCopy,
    /// Half round trip in microseconds.
    Latency,
    /// System calls of the server's process for each request and its answer.
    SystemCalls,
    /// The same without `sendto`, by which the library makes the kernel transmit frames, and which kernel TCP's servers call.
    OtherCalls,
}

/// A figure of a subject.
type Key = (Subject, Figure);

fn cell(samples: &Samples<Key>, subject: Subject, figure: Figure, digits: usize) -> String {
    samples.spread(&(subject, figure)).map_or_else(
        || "-".into(),
        |Spread { median, min, max, .. }| format!("{median:.digits$} ({min:.digits$}..{max:.digits$})"),
    )
}

fn goals(samples: &Samples<Key>) -> String {
    let ratio = |of, to, figure| samples.ratio(&(of, figure), &(to, figure));
    let plain = Subject::Bulk(By::PlainTcp, 1500);
    let best = MTUS
        .iter()
        .filter_map(|mtu| ratio(Subject::Bulk(By::Sdp, *mtu), plain, Figure::Bandwidth))
        .max_by(|a, b| a.median.total_cmp(&b.median));
    let requests = |by| Subject::Requests(by, Calls::Polling);
    let sdp = |calls| Subject::Requests(By::Sdp, calls);
    let rows = [
        (
            "bandwidth of 1 MiB writes: SDP at its best MTU / TCP, offloads off, at MTU 1500",
            Limit::AtLeast(1.0),
            best,
        ),
        (
            "64 B requests, both ends polling, half round trip: SDP / TCP",
            Limit::AtMost(1.0),
            ratio(requests(By::Sdp), requests(By::Tcp), Figure::Latency),
        ),
        (
            "system calls a request beside those that transmit frames, both ends polling",
            Limit::AtMost(NONE_A_REQUEST),
            samples.spread(&(sdp(Calls::Polling), Figure::OtherCalls)),
        ),
        (
            "the same, blocking calls",
            Limit::AtMost(2.0),
            samples.spread(&(sdp(Calls::Blocking), Figure::OtherCalls)),
        ),
        (
            "the same, a server that sleeps before each request",
            Limit::AtMost(2.0),
            samples.spread(&(sdp(Calls::Sleeping), Figure::OtherCalls)),
        ),
    ];
    let mut text = "## Goals\n\nRatios are those of interleaved measurements.\n\n\
         | goal | limit | median | min | max | rounds | met |\n|---|---|--:|--:|--:|--:|---|\n"
        .to_owned();
    for (goal, limit, found) in rows {
        let _ = match found {
            Some(Spread { median, min, max, count }) => {
                let met = if limit.is_met(median) == Some(true) { "yes" } else { "no" };
                // A call in thousands of requests is not none.
                let digits = if goal.starts_with("system calls") { 4 } else { 2 };
                writeln!(
                    text,
                    "| {goal} | {limit} | {median:.digits$} | {min:.digits$} | {max:.digits$} | {count} | {met} |"
                )
            }
            None => writeln!(text, "| {goal} | {limit} | - | - | - | 0 | - |"),
        };
    }
    text
}

fn tables(samples: &Samples<Key>) -> String {
    let mut text = goals(samples);
    text.push_str(
        "\n## iperf3, writes of 1 MiB\n\n| MTU | by | Gb/s | received by RDMA, % |\n|--:|---|--:|--:|\n",
    );
    for subject in Subject::all() {
        let Subject::Bulk(by, mtu) = subject else { continue };
        let [rate, share] =
            [Figure::Bandwidth, Figure::ZeroCopy].map(|figure| cell(samples, subject, figure, 2));
        let _ = writeln!(text, "| {mtu} | {by} | {rate} | {share} |");
    }
    text.push_str(
        "\n## sockperf, requests and answers of 64 bytes\n\n| calls | by | half round trip, us | system calls a request | without sendto |\n|---|---|--:|--:|--:|\n",
    );
    for subject in Subject::all() {
        let Subject::Requests(by, calls) = subject else { continue };
        let [time, system, others] =
            [(Figure::Latency, 2), (Figure::SystemCalls, 3), (Figure::OtherCalls, 3)]
                .map(|(figure, digits)| cell(samples, subject, figure, digits));
        let _ = writeln!(text, "| {} | {by} | {time} | {system} | {others} |", calls.name());
    }
    text
}

struct Bench {
    /// A lab for each MTU, then one without offloads.
    labs: Vec<Lab>,
    programs: PathBuf,
    duration: u32,
    port: u16,
}

/// Runs the program.
pub fn main() -> Result<()> {
    let args = SdpSpeedArgs::parse();
    let programs = rounds::programs()?;
    let lab = |mtu, offloads| Lab::up(LabOptions { mtu, offloads, ..LabOptions::default() });
    let mut labs = MTUS.iter().map(|mtu| lab(*mtu, true)).collect::<Result<Vec<_>>>()?;
    labs.push(lab(1500, false)?);
    let mut bench = Bench { labs, programs, duration: args.duration, port: 20_000 };
    let mut samples = Samples::default();
    let mut all = Subject::all();
    all.retain(|subject| format!("{subject:?}").contains(&args.only));
    for round in 0..args.rounds {
        for subject in rounds::order(round, &all) {
            let figures = bench.measure(subject).with_context(|| format!("{subject:?}"))?;
            eprintln!("round {round}: {subject:?}: {figures:.2?}");
            for (figure, value) in figures {
                samples.add((subject, figure), value);
            }
        }
    }
    let page = format!("{}\n{}", setting(&args), tables(&samples));
    rounds::publish(&page, args.out.as_deref())
}

impl Bench {
    fn lab(&self, subject: Subject) -> Result<&Lab> {
        let index = match subject {
            Subject::Bulk(By::PlainTcp, _) => MTUS.len(),
            Subject::Bulk(_, mtu) => MTUS.iter().position(|known| *known == mtu).unwrap_or(0),
            Subject::Requests(..) => 0,
        };
        self.labs.get(index).context("a lab for each MTU")
    }

    fn measure(&mut self, subject: Subject) -> Result<Vec<(Figure, f64)>> {
        match subject {
            Subject::Bulk(by, _) => self.bulk(subject, by),
            Subject::Requests(by, calls) => {
                let timed = self.requests(subject, by, calls, false)?;
                // Counting slows system calls down.
                let counted = self.requests(subject, by, calls, true)?;
                let requests = counted.rate * f64::from(self.duration);
                Ok(vec![
                    (Figure::Latency, timed.time),
                    (Figure::SystemCalls, counted.calls / requests),
                    (Figure::OtherCalls, (counted.calls - counted.sent) / requests),
                ])
            }
        }
    }

    /// A port at which no connection of the kernel rests.
    fn next_port(&mut self) -> u16 {
        self.port += 1;
        self.port
    }

    fn bulk(&mut self, subject: Subject, by: By) -> Result<Vec<(Figure, f64)>> {
        let (port, duration) = (self.next_port(), self.duration);
        let lab = self.lab(subject)?;
        let address = SocketAddr::new(lab.address(Side::B, Family::V4), port);
        let mut server = self.start(lab, Side::B, by, &format!("iperf3 -s -1 -p {port}"))?;
        wait_for_listener(lab, by, address, &mut server)?;
        let client = format!("iperf3 -c {} -p {port} -t {duration} -l 1M -f m", address.ip());
        let said = self.start(lab, Side::A, by, &client)?.finish(2 * PATIENCE)?;
        let served = server.finish(PATIENCE)?;
        let rate = bandwidth(&said).with_context(|| format!("no bandwidth in: {said}"))?;
        let mut figures = vec![(Figure::Bandwidth, rate)];
        figures.extend(zero_copy(&served).map(|share| (Figure::ZeroCopy, share)));
        ensure!(by != By::Sdp || figures.len() == 2, "not over SDP: {served}\n{said}");
        Ok(figures)
    }

    /// Requests for the duration of a measurement, during which the server's system calls may be counted.
    fn requests(&mut self, subject: Subject, by: By, calls: Calls, counts: bool) -> Result<Exchange> {
        let (port, seconds) = (self.next_port(), self.duration + if counts { COUNT_MARGIN } else { 0 });
        let lab = self.lab(subject)?;
        let address = SocketAddr::new(lab.address(Side::B, Family::V4), port);
        let host = address.ip();
        let polling = if calls == Calls::Polling { "--nonblocked" } else { "" };
        let pace = if calls == Calls::Sleeping { format!("--mps {FEW}") } else { String::new() };
        let server = format!("sockperf server --tcp -i {host} -p {port} {polling}");
        let mut server = self.start(lab, Side::B, by, &server)?;
        wait_for_listener(lab, by, address, &mut server)?;
        let client =
            format!("sockperf ping-pong --tcp -i {host} -p {port} -t {seconds} -m 64 {polling} {pace}");
        let client = self.start(lab, Side::A, by, &client)?;
        let (calls, sent) = if counts { self.count_calls(server.id())? } else { (0.0, 0.0) };
        let said = client.finish(2 * PATIENCE)?;
        ensure!(by != By::Sdp || said.contains("by RDMA"), "not over SDP: {said}");
        // The server has no other end.
        let server_id = Pid::from_raw(server.id().try_into()?).context("a process")?;
        kill_process(server_id, Signal::INT)?;
        let _ = server.wait(PATIENCE)?;
        let (time, rate) = latency(&said).with_context(|| format!("no latency in: {said}"))?;
        Ok(Exchange { time, rate, calls, sent })
    }

    /// The system calls of a process that has begun to serve requests, for the duration of a measurement: all of them,
    /// and those of `sendto`.
    fn count_calls(&self, process: u32) -> Result<(f64, f64)> {
        thread::sleep(BEFORE_COUNT);
        let (process, seconds) = (process.to_string(), self.duration.to_string());
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter,syscalls:sys_enter_sendto"]);
        let counted = perf.args(["-p", &process, "--", "sleep", &seconds]).output()?;
        let counted = String::from_utf8_lossy(&counted.stderr);
        let count =
            |event| system_calls(&counted, event).with_context(|| format!("no {event} in: {counted}"));
        Ok((count("raw_syscalls:sys_enter")?, count("syscalls:sys_enter_sendto")?))
    }

    /// Starts a program on the CPU of its side, with helpers of its own.
    fn start(&self, lab: &Lab, side: Side, by: By, program: &str) -> Result<Running> {
        let cpu = if side == Side::A { "1" } else { "0" };
        let mut command = lab.command(side, "taskset");
        command.args(["-c", cpu]);
        if by == By::Sdp {
            // Named explicitly, since `xwarp sdp` prefers an installed library by default.
            let library = self.programs.join("libxwarp_sdp_preload.so");
            command.arg(self.programs.join("xwarp")).args(["sdp", "--statistics", "--library"]);
            command.arg(library).arg("--");
        }
        command.args(program.split_whitespace()).env("XWARP_HELPER", lab.file("none"));
        Running::start(command)
    }
}

fn wait_for_listener(lab: &Lab, by: By, address: SocketAddr, server: &mut Running) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let listens = if by == By::Sdp {
            let from = SocketAddr::new(lab.address(Side::A, Family::V4), 1);
            matches!(lab.within(Side::A, || Question::new(from, address).ask(1))?, Ok(Asked::Accepted(..)))
        } else {
            let filter = format!("sport = :{}", address.port());
            !lab.run(Side::B, "ss", &["-Hltn", &filter])?.trim().is_empty()
        };
        if listens {
            return Ok(());
        }
        let ended = server.wait(Duration::from_millis(20));
        ensure!(ended.is_err() && Instant::now() < end, "nobody listens: {ended:?}\n{}", server.output());
    }
}

/// The word before the first occurrence of `unit` in a line with `mark`, as a number.
fn number(text: &str, mark: &str, unit: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains(mark))?;
    line.split(unit).next()?.split_whitespace().next_back()?.parse().ok()
}

/// The receiver's bandwidth reported by iperf3, in Gb/s.
fn bandwidth(said: &str) -> Option<f64> {
    Some(number(said, "receiver", "Mbits/sec")? / 1000.0)
}

/// Percent of the bytes that a process received by RDMA.
fn zero_copy(said: &str) -> Option<f64> {
    number(said, "by RDMA", "% of them")
}

/// A run of sockperf: half of a round trip in microseconds, requests a second, and the counted system calls of the server's process.
struct Exchange {
    time: f64,
    rate: f64,
    calls: f64,
    sent: f64,
}

/// Sockperf's results: half of a round trip in microseconds, and requests a second.
fn latency(said: &str) -> Option<(f64, f64)> {
    let time = number(said, "Latency is", "usec")?;
    let value = |name: &str| {
        let value = said.split(name).nth(1)?;
        value.split(|c: char| !c.is_ascii_digit() && c != '.').next()?.parse::<f64>().ok()
    };
    Some((time, value("SentMessages=")? / value("RunTime=")?))
}

/// The count of an event that perf has written.
fn system_calls(text: &str, event: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.contains(event))?;
    line.split(',').next()?.parse().ok()
}

fn setting(args: &SdpSpeedArgs) -> String {
    let SdpSpeedArgs { rounds, duration, .. } = args;
    format!(
        "# Speed of unmodified programs over SDP\n\n\
         Written by `ci/sdp --out docs/measurements/sdp.md`. Medians, with the smallest and the largest value, of {rounds} interleaved \
         rounds of {duration} s each, between two namespaces on one machine that a veth pair joins. Each program, with all threads of \
         `libxwarp-sdp.so`, has one CPU. The same programs over kernel TCP use the same veth pair. System calls are those of \
         all threads of the server's process, counted by perf for {duration} s in the middle of another run than the timed one, and \
         divided by the number of requests at that run's rate. The kernel's TCP has one to receive and one to \
         send, more if a receive finds nothing. `sendto` is the call by which the library makes the kernel transmit frames.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_what_the_programs_print() {
        let iperf3 = "[ 5] 0.00-2.00 sec 1.2 GBytes 5010 Mbits/sec 0 sender\n\
                      [ 5] 0.00-2.00 sec 1.2 GBytes 4990 Mbits/sec      receiver\n";
        assert_eq!(bandwidth(iperf3), Some(4.99));
        assert_eq!(
            zero_copy("xwarp-sdp: iperf3[7] xw0: sent 1 bytes, received 9 bytes, 99 % of them by RDMA"),
            Some(99.0)
        );
        assert_eq!(zero_copy("iperf3: done"), None);
        let sockperf = "sockperf: [Total Run] RunTime=2.000 sec; Warm up time=400 msec; SentMessages=1000; ReceivedMessages=999\n\
                        sockperf: Summary: Latency is 4.500 usec\n";
        assert_eq!(latency(sockperf), Some((4.5, 500.0)));
        let counted = "# started on\n\n2048,,raw_syscalls:sys_enter,1,100.00,,\n\
                       7,,syscalls:sys_enter_sendto,1,100.00,,\n";
        assert_eq!(system_calls(counted, "raw_syscalls:sys_enter"), Some(2048.0));
        assert_eq!(system_calls(counted, "syscalls:sys_enter_sendto"), Some(7.0));
        assert_eq!(system_calls(counted, "syscalls:sys_enter_read"), None);
    }

    #[test]
    fn the_page_compares_the_best_mtu_with_plain_tcp() {
        let mut samples = Samples::default();
        for (by, mtu, rate) in [(By::PlainTcp, 1500, 4.0), (By::Sdp, 1500, 1.0), (By::Sdp, 9000, 6.0)] {
            (0..3).for_each(|_| samples.add((Subject::Bulk(by, mtu), Figure::Bandwidth), rate));
        }
        for (by, time) in [(By::Sdp, 9.0), (By::Tcp, 6.0)] {
            (0..3).for_each(|_| samples.add((Subject::Requests(by, Calls::Polling), Figure::Latency), time));
        }
        let tables = tables(&samples);
        assert!(tables.contains("at MTU 1500 | at least 1 | 1.50 | 1.50 | 1.50 | 3 | yes |"), "{tables}");
        assert!(tables.contains("SDP / TCP | at most 1 | 1.50 | 1.50 | 1.50 | 3 | no |"), "{tables}");
        assert!(tables.contains("| the same, blocking calls | at most 2 | - | - | - | 0 | - |"), "{tables}");
        assert!(tables.contains("| 9000 | SDP | 6.00 (6.00..6.00) | - |"), "{tables}");
        assert!(tables.contains("| non-blocking | TCP | 6.00 (6.00..6.00) | - | - |"), "{tables}");
    }
}
