//! The distribution's programs over xwarp's drop-in libraries on one side, and over Linux Soft-iWARP on the other, in both roles.
//! Wireshark and our own MPA parser check the traffic.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    net::IpAddr,
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    lab::{Family, INTERFACE},
    process::Running,
    vm::{Ending, Finished, Kernel, LONG, SHORT, Stage, built},
};

/// Ports of the programs' servers.
const RPING: u16 = 7174;
const UCMATOSE: u16 = 7471;
const PERFTEST: u16 = 18515;
const RSTREAM: u16 = 7471;

/// Output of clients when no server listens yet.
const REFUSALS: [&str; 4] = ["REJECTED", "refused", "event: 8", "error -111"];

/// The port, the addresses' family, and the command lines of a server and its client, in which ADDRESS is the server's.
type Case = (u16, Family, &'static str, &'static str);

/// One case of each kind: Sends, Writes and Reads.
const SHORT_LIST: [Case; 4] = [
    (RPING, Family::V4, "rping -s -a ADDRESS -S 4001 -C 5 -V", "rping -c -a ADDRESS -S 4001 -C 5 -V"),
    (RPING, Family::V6, "rping -s -a ADDRESS -C 5", "rping -c -a ADDRESS -C 5 -V"),
    (PERFTEST, Family::V4, "ib_write_bw -F -R -n 20 -s 16384", "ib_write_bw -F -R -n 20 -s 16384 ADDRESS"),
    (PERFTEST, Family::V4, "ib_send_lat -F -R -n 5 -s 64", "ib_send_lat -F -R -n 5 -s 64 ADDRESS"),
];

const RSOCKETS: [Case; 3] = [
    (RSTREAM, Family::V4, "rstream -b ADDRESS -S 64 -C 10 -T v", "rstream -s ADDRESS -S 64 -C 10 -T v"),
    (RSTREAM, Family::V6, "rstream -b ADDRESS -S 16384 -C 10 -T v", "rstream -s ADDRESS -S 16384 -C 10 -T v"),
    (RSTREAM, Family::V4, "riostream -b ADDRESS -S 64 -C 10 -T v", "riostream -s ADDRESS -S 64 -C 10 -T v"),
];

const LONG_LIST: [Case; 8] = [
    (RPING, Family::V4, "rping -s -a ADDRESS -S 65535 -C 5 -V", "rping -c -a ADDRESS -S 65535 -C 5 -V"),
    (UCMATOSE, Family::V4, "ucmatose -b ADDRESS -c 4 -C 20", "ucmatose -s ADDRESS -c 4 -C 20"),
    (
        PERFTEST,
        Family::V4,
        "ib_send_bw -F -R -n 50 -s 4000 -q 4",
        "ib_send_bw -F -R -n 50 -s 4000 -q 4 ADDRESS",
    ),
    (PERFTEST, Family::V4, "ib_send_bw -F -R -n 50 -s 4000 -b", "ib_send_bw -F -R -n 50 -s 4000 -b ADDRESS"),
    (
        PERFTEST,
        Family::V4,
        "ib_write_bw -F -R -n 50 -s 4000 -b",
        "ib_write_bw -F -R -n 50 -s 4000 -b ADDRESS",
    ),
    (PERFTEST, Family::V4, "ib_read_bw -F -R -n 20 -s 16384", "ib_read_bw -F -R -n 20 -s 16384 ADDRESS"),
    (PERFTEST, Family::V4, "ib_read_lat -F -R -n 5 -s 16", "ib_read_lat -F -R -n 5 -s 16 ADDRESS"),
    (
        PERFTEST,
        Family::V4,
        "ib_send_lat -F -R -e -n 5 -s 1048576",
        "ib_send_lat -F -R -e -n 5 -s 1048576 ADDRESS",
    ),
];

/// Delay of each direction while the servers are in the machine. perftest's server asks its client to connect before it listens,
/// and in an emulated machine that takes longer than it does the client to connect.
const DELAY: &str = "delay 150ms";

/// Starts `line`, a program and its arguments, over xwarp.
fn ours(stage: &Stage, line: &str) -> Running {
    built("libxwarp_compat.so").unwrap();
    stage.start("xwarp", &format!("run --device {INTERFACE} {line}")).unwrap()
}

fn at(address: IpAddr, line: &str) -> String {
    line.replace("ADDRESS", &address.to_string())
}

/// The server is in the machine.
fn connect(stage: &Stage, (port, family, server, client): Case) {
    let [server, client] = [server, client].map(|line| at(stage.vm.address(family), line));
    let mut theirs = stage.serve(&server, port).unwrap();
    let said = ours(stage, &client).finish(LONG);
    said.unwrap_or_else(|error| panic!("{client}: {error:#}\n{:?}", theirs.output()));
    let theirs = theirs.wait(SHORT).unwrap();
    assert_eq!(theirs.status, Some(0), "{server}:\n{}", theirs.text());
}

/// Whether a client found no server that listens.
fn is_refused(said: &Finished) -> bool {
    REFUSALS.iter().any(|words| said.text().contains(words))
}

/// Runs a client in the machine. A refused one is killed, because rping then waits forever for its connection.
fn run_client(stage: &Stage, line: &str) -> Finished {
    let mut theirs = stage.vm.spawn(line).unwrap();
    if is_refused(&theirs.watch(LONG, is_refused).unwrap()) {
        theirs.signal("KILL").unwrap();
    }
    theirs.wait(SHORT).unwrap()
}

/// The client is in the machine. Programs do not report when they listen, so a refused client is restarted.
fn serve(stage: &Stage, (_, family, server, client): Case) {
    let [server, client] = [server, client].map(|line| at(stage.near.address(family), line));
    let running = ours(stage, &server);
    let begin = Instant::now();
    loop {
        let theirs = run_client(stage, &client);
        if theirs.status == Some(0) {
            break;
        }
        let is_early = is_refused(&theirs) && begin.elapsed() < SHORT;
        assert!(is_early, "{client}:\n{}\n{}", theirs.text(), running.output());
        thread::sleep(Duration::from_millis(200));
    }
    running.finish(SHORT).unwrap_or_else(|error| panic!("{server}: {error:#}"));
}

/// Runs the cases in both roles.
fn exchange(cases: &[Case]) {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        for case in cases {
            // The server of ucmatose sends first, which a responder may do in peer-to-peer mode only.
            let sends_first = case.0 == UCMATOSE;
            stage.vm.tune("peer_to_peer", if sends_first { "1" } else { "0" }).unwrap();
            serve(&stage, *case);
        }
        stage.vm.tune("peer_to_peer", "0").unwrap();
        stage.disturb(DELAY).unwrap();
        for case in cases {
            connect(&stage, *case);
        }
    });
    let record = record.unwrap();
    // siw rejects the first attempt of our initiator, which requests markers.
    let made: Vec<_> = record.connections.iter().filter(|connection| !connection.rejected).collect();
    assert!(made.len() >= 2 * cases.len(), "{}", made.len());
    assert!(made.iter().all(|connection| connection.crc && connection.terminates == 0));
    assert!(record.verdict.good_crcs > 100, "{:?}", record.verdict);
}

/// rsockets send by RDMA Writes and Sends over iWARP.
#[test]
fn siw_compat_rsockets_carry_streams() {
    exchange(&RSOCKETS);
}

#[test]
fn siw_compat_programs_talk_to_themselves_over_siw() {
    exchange(&SHORT_LIST);
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn siw_compat_more_programs_talk_to_themselves_over_siw() {
    exchange(&LONG_LIST);
}
