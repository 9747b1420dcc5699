//! Our TCP on AF_XDP against the kernel's, through the impairment hop. Both ends send at the same time; each
//! opens and closes first, over IPv4 and IPv6. The kernel's end is an ordinary socket whose application
//! encodes and decodes FPDUs; the kernel chooses its segmentation. Speed does not affect the outcome.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    env,
    io::Write as _,
    net::{Shutdown, SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant as Clock},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::{Timeout, set_socket_timeout},
};
use serde_json::Value;
use xwarp_checks::{
    hop::Hop,
    hostile::{self, SocketPeer},
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};
use xwarp_driver::{DriverConfig, Interface, reserve_port};
use xwarp_tcp::{
    link::Link as _,
    mpa::MpaConfig,
    secret::Secret,
    sim::{self, Node as _, numbered},
    stack::{ConnectParams, StackConfig},
    tcp::TcpCounters,
    time::Instant,
    wire::Flow,
};

const HOP: &str = env!("CARGO_BIN_EXE_xwarp-hop");

/// Time limit of an exchange, which takes a second or two on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Delay before the kernel's application reads, when it is late: long enough for several window probes.
const LATE: Duration = Duration::from_millis(1500);

/// Number of ULPDUs that we send (1.1 MB), and that the kernel's end sends (1.5 MB).
const OURS: u32 = 1000;
const KERNELS: u32 = 1000;

/// Longest sleep of our end, which retries frames that the interface did not accept.
const LOOK: Duration = Duration::from_millis(2);

type End = sim::End<Interface>;

/// The end that acts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    We,
    Kernel,
}

/// One connection and its transfer.
#[derive(Debug, Clone, Copy)]
struct Exchange {
    family: Family,
    opens: Who,
    closes: Who,
    /// The kernel's application begins to read after its window has been closed for a while.
    late: bool,
}

/// Exchanges that cover every pair of values of the three choices.
const EXCHANGES: [Exchange; 4] = [
    Exchange { family: Family::V4, opens: Who::We, closes: Who::We, late: false },
    Exchange { family: Family::V4, opens: Who::Kernel, closes: Who::Kernel, late: false },
    Exchange { family: Family::V6, opens: Who::We, closes: Who::Kernel, late: false },
    Exchange { family: Family::V6, opens: Who::Kernel, closes: Who::We, late: false },
];

/// The kernel's end: sends everything, receives everything, closes.
fn kernel_end(mut peer: SocketPeer, Exchange { closes, late, .. }: Exchange) {
    let stream: Vec<u8> = (0..KERNELS).flat_map(|number| peer.frame(&numbered(number))).collect();
    let mut sender = peer.sender().unwrap();
    let (heard, end) = thread::scope(|scope| {
        scope.spawn(move || {
            sender.write_all(&stream).unwrap();
            if closes == Who::Kernel {
                sender.shutdown(Shutdown::Write).unwrap();
            }
        });
        thread::sleep(if late { LATE } else { Duration::ZERO });
        peer.to_the_end().unwrap()
    });
    assert_eq!(end, hostile::End::Closed, "{} ULPDUs came", heard.len());
    assert_eq!(heard.len(), OURS as usize);
    for (number, ulpdu) in (0..).zip(&heard) {
        assert!(!ulpdu.is_empty() && numbered(number).starts_with(ulpdu), "ULPDU {number}");
    }
    if closes == Who::We {
        peer.finish().unwrap();
    }
}

/// Drives our end until its connection is gone.
fn run(end: &mut End, context: &str) {
    let began = Clock::now();
    let now = || Instant::from_nanos(began.elapsed().as_nanos() as u64);
    while end.ulp.closed.is_none() || end.stack.connections() > 0 {
        let info = end.conn.and_then(|conn| end.stack.info(conn));
        assert!(began.elapsed() < LIMIT, "{context}: {:?} of {KERNELS}, {info:?}", end.ulp.delivered);
        if end.turn(now()) {
            continue;
        }
        let wait = end.next_deadline().map_or(LOOK, |deadline| deadline.since(now()).min(LOOK));
        let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut sockets: Vec<_> =
            end.link.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        poll(&mut sockets, Some(&wait)).unwrap();
    }
}

/// Transfers data in both directions, then closes; runs in the namespace of A. Returns the interface and our
/// TCP's counters.
fn exchange(lab: &Lab, interface: Interface, what: Exchange, port: u16) -> (Interface, TcpCounters) {
    let Exchange { family, opens, closes, .. } = what;
    let [here, there] = [Side::A, Side::B].map(|side| SocketAddr::new(lab.address(side, family), port));
    let _held = reserve_port(None, Some(port), 0).unwrap();
    let secret = Secret::from_number(port.into());
    let mut end = End::new(interface, StackConfig { secret, ..StackConfig::default() });
    (end.ulp.to_send, end.ulp.finish) = (OURS, closes == Who::We);
    thread::scope(|scope| {
        let kernel = if opens == Who::We {
            let listener = lab.within(Side::B, || TcpListener::bind(there).unwrap()).unwrap();
            set_socket_timeout(&listener, Timeout::Recv, Some(LIMIT)).unwrap();
            let path = end.link.resolve(Flow { local: here, remote: there }, LIMIT).unwrap();
            let (mpa, params) =
                (MpaConfig::default(), ConnectParams { ird: 4, ord: 4, private_data: Vec::new() });
            end.conn = Some(end.stack.connect(Instant::ZERO, &mut end.link, path, mpa, params).unwrap());
            lab.enter(scope, Side::B, move || {
                kernel_end(SocketPeer::accepted(&listener, LIMIT).unwrap(), what);
            })
        } else {
            end.stack.listen(&mut end.link, None, port, 1, 1500, MpaConfig::default()).unwrap();
            lab.enter(scope, Side::B, move || {
                kernel_end(SocketPeer::started(here, true, LIMIT).unwrap(), what);
            })
        };
        run(&mut end, &format!("{what:?}"));
        kernel.unwrap().join().unwrap();
    });
    end.check_success(KERNELS, &format!("{what:?}"));
    end.link.flush();
    let census = end.link.frame_census();
    assert_eq!((census.retained, census.received), (0, 0), "{what:?}: frames leaked: {census:?}");
    (end.link, end.stack.tcp_counters())
}

/// Runs `exchanges` through a hop with the options `line`, after applying `settings` to the kernel's end;
/// returns our TCP's counters and the hop's report.
fn through(line: &str, exchanges: &[Exchange], settings: &[&str]) -> (TcpCounters, Value) {
    through_mtu(1500, line, exchanges, settings)
}

fn through_mtu(mtu: u32, line: &str, exchanges: &[Exchange], settings: &[&str]) -> (TcpCounters, Value) {
    let lab = Lab::up(LabOptions { mtu, hop: true, ..LabOptions::default() }).unwrap();
    for setting in settings {
        lab.run(Side::B, "sysctl", &["-qw", setting]).unwrap();
    }
    // `XWARP_SEED` changes the hop's seed; the frames that a fault hits still depend on the machine's timing.
    let seed = env::var("XWARP_SEED").unwrap_or_else(|_| "1".to_owned());
    let hop = Hop::start(&lab, HOP, &format!("{line} --seed {seed}")).unwrap();
    let all = || {
        let mut interface = Interface::open(INTERFACE, &DriverConfig::default()).unwrap();
        let mut sum = TcpCounters::default();
        for (port, what) in (4791..).zip(exchanges) {
            let began = Clock::now();
            let counted;
            (interface, counted) = exchange(&lab, interface, *what, port);
            println!("{what:?}: {:?}, {} sent again", began.elapsed(), counted.retransmits);
            sum += counted;
        }
        sum
    };
    let sum = lab.within(Side::A, all).unwrap();
    (sum, hop.stop().unwrap())
}

fn count(report: &Value, what: &str) -> u64 {
    ["a_to_b", "b_to_a"].iter().map(|direction| report[direction][what].as_u64().unwrap()).sum()
}

/// Asserts that the hop applied all of these faults in both directions.
fn assert_happened(report: &Value, what: &[&str]) {
    for what in what {
        for direction in ["a_to_b", "b_to_a"] {
            assert!(report[direction][what].as_u64().unwrap() > 0, "{what} {direction}: {report:#}");
        }
    }
}

#[test]
fn netns_hop_kernel_over_a_clean_line() {
    let others =
        EXCHANGES.map(|e| Exchange { closes: if e.closes == Who::We { Who::Kernel } else { Who::We }, ..e });
    let (_, report) = through("--rate 200M --rtt 1ms --jitter 100us", &[EXCHANGES, others].concat(), &[]);
    assert_eq!(count(&report, "lost") + count(&report, "queue_full"), 0, "{report:#}");
}

#[test]
fn netns_hop_kernel_loss() {
    let line = "--loss 2% --bursts 0.2%,50%,80% --rtt 1ms --jitter 200us --rate 500M";
    let (ours, report) = through(line, &EXCHANGES, &[]);
    assert_happened(&report, &["lost"]);
    assert!(ours.retransmits > 0 && ours.out_of_order > 0, "{ours:?}");
}

/// Frames of several chunks, both ways.
#[test]
fn netns_hop_kernel_loss_of_frames_of_many_chunks() {
    for mtu in [9000, 65_535] {
        let line = "--loss 3% --rtt 1ms --jitter 200us --rate 1G";
        let (ours, report) = through_mtu(mtu, line, &[EXCHANGES, EXCHANGES].concat(), &[]);
        assert!(count(&report, "lost") > 0 && ours.retransmits > 0, "MTU {mtu}: {ours:?} {report:#}");
    }
}

#[test]
fn netns_hop_kernel_loss_without_timestamps_sack_and_window_scaling() {
    let settings = ["net.ipv4.tcp_timestamps=0", "net.ipv4.tcp_sack=0", "net.ipv4.tcp_window_scaling=0"];
    let (ours, report) = through("--loss 1% --rtt 1ms --jitter 200us --rate 500M", &EXCHANGES, &settings);
    assert_happened(&report, &["lost"]);
    assert!(ours.retransmits > 0 && ours.dsacks_in == 0, "{ours:?}");
}

/// A megabyte for a late reader: its window closes, and the update that reopens it may be lost.
#[test]
fn netns_hop_kernel_zero_window() {
    let line = "--loss 2% --rtt 1ms --rate 500M";
    let (ours, _) = through(line, &EXCHANGES.map(|e| Exchange { late: true, ..e }), &[]);
    assert!(ours.window_probes > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_reordering_and_duplication() {
    let line = "--reorder 5% --depth 40 --reorder-by 2ms --duplicate 5% --rtt 500us --rate 500M";
    let (ours, report) = through(line, &EXCHANGES, &[]);
    assert_happened(&report, &["reordered", "duplicated"]);
    assert!(ours.duplicates > 0 && ours.out_of_order > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_corruption() {
    let (ours, report) = through("--corrupt 2% --rtt 500us --rate 500M", &EXCHANGES, &[]);
    assert_happened(&report, &["corrupted"]);
    assert!(ours.retransmits > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_ecn_marks() {
    let line = "--rate 50M --rtt 5ms --queue 200 --mark 10";
    let (ours, report) = through(line, &EXCHANGES, &["net.ipv4.tcp_ecn=1"]);
    assert_happened(&report, &["marked"]);
    assert_eq!(count(&report, "queue_full"), 0, "both ends heed the marks: {report:#}");
    assert!(ours.ecn_echoes > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_a_long_path_with_a_short_queue() {
    let (ours, report) = through("--rate 50M --rtt 40ms --queue 20 --loss 0.5%", &EXCHANGES, &[]);
    assert_happened(&report, &["queue_full", "lost"]);
    assert!(ours.recoveries > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_blackouts() {
    // Each transfer takes longer than the time between two blackouts.
    let line = "--blackout 1s,50ms,430ms --rate 20M --rtt 1ms";
    let (ours, report) = through(line, &EXCHANGES, &[]);
    assert_happened(&report, &["lost"]);
    assert!(ours.retransmits > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_decreasing_path_mtu() {
    let line = "--path-mtu 1300 --path-mtu-from 1500ms --rate 50M --rtt 1ms";
    let (_, report) = through(line, &EXCHANGES, &[]);
    assert_happened(&report, &["too_big"]);
}

/// Tests only our end: the kernel needs many time-outs, and only probes when it is configured to.
#[test]
fn netns_hop_kernel_path_mtu_black_hole() {
    let line = "--path-mtu 1300 --filter-icmp --only a --rate 50M --rtt 1ms";
    let (_, report) = through(line, &EXCHANGES[1..3], &[]);
    assert!(report["a_to_b"]["too_big"].as_u64().unwrap() > 0, "{report:#}");
}

#[test]
fn netns_hop_kernel_resegmenting_middlebox() {
    let (ours, report) = through("--split 20% --loss 1% --rtt 500us --rate 500M", &EXCHANGES, &[]);
    assert_happened(&report, &["split"]);
    assert!(ours.retransmits > 0, "{ours:?}");
}

#[test]
fn netns_hop_kernel_all_faults_combined() {
    let line = "--loss 1% --bursts 0.1%,50%,80% --reorder 3% --depth 20 --reorder-by 2ms --duplicate 2% --corrupt 1% \
                --split 10% --jitter 300us --rtt 2ms --rate 100M --queue 50 --mark 20";
    let (_, report) = through(line, &EXCHANGES, &["net.ipv4.tcp_ecn=1"]);
    let faults = ["lost", "reordered", "duplicated", "corrupted", "split", "marked"];
    assert_happened(&report, &faults);
}
