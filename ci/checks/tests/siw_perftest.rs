//! `xwarp-perf --perftest` against perftest's own programs over Linux Soft-iWARP, in both roles. perftest 4.5
//! supports only IPv4 with `-R`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{collections::BTreeMap, env, fs, process, thread, time::Duration};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE},
    process::Running,
    vm::{Ending, Job, Kernel, LONG, SHORT, Stage},
};

/// Port of perftest.
const PORT: u16 = 18515;

/// Options of both ends. A row of perftest has at least five messages.
const CASES: [(&str, &[&str]); 6] = [
    ("send_bw", &["-n 100 -s 1", "-n 1000 -s 64 -r 100", "-n 100 -s 4000 -q 4", "-n 100 -s 4000 -b", BIG]),
    ("send_lat", &["-n 200 -s 16", "-n 5 -s 1048576"]),
    ("write_bw", &["-n 50 -s 1 -q 4", "-n 200 -s 16384", "-n 100 -s 4000 -b", BIG]),
    ("write_lat", &["-n 100 -s 16", "-n 5 -s 1048576"]),
    ("read_bw", &["-n 100 -s 1", "-n 100 -s 4000 -q 4", "-n 50 -s 4000 -b", BIG]),
    ("read_lat", &["-n 100 -s 16", "-n 5 -s 1048576"]),
];
/// Signals each completion, because `xwarp-perf` waits at most half a minute for one and the machine may be
/// slow.
const BIG: &str = "-n 5 -s 1048576 -Q 1";
/// Time until a stream runs, also on a loaded machine.
const WARM: Duration = Duration::from_secs(5);
/// Fewest bytes of a stream in that time; the connections take a few kilobytes.
const STREAM_BYTES: u64 = 1 << 18;

/// Starts perftest's server in the machine.
fn their_server(stage: &Stage, test: &str, options: &str) -> Job {
    stage.serve(&format!("ib_{test} -R -d siw0 -F {options}"), PORT).unwrap()
}

fn our_client(stage: &Stage, test: &str, options: &str) -> Running {
    let address = stage.vm.address(Family::V4);
    let line = format!("{test} --perftest --markers off -d {INTERFACE} {options} {address}");
    stage.start("xwarp-perf", &line).unwrap()
}

fn our_server(stage: &Stage, test: &str, options: &str) -> Running {
    let mut server =
        stage.start("xwarp-perf", &format!("{test} --perftest -d {INTERFACE} {options}")).unwrap();
    server.wait_for("Waiting for a client", SHORT).unwrap();
    server
}

/// Starts perftest's client, which connects only once without retrying.
fn their_client(stage: &Stage, test: &str, options: &str) -> Job {
    let address = stage.near.address(Family::V4);
    stage.vm.spawn(&format!("ib_{test} -R -d siw0 -F {options} {address}")).unwrap()
}

fn measure(stage: &Stage, test: &str, options: &str) {
    let mut server = their_server(stage, test, options);
    let said = our_client(stage, test, options).finish(LONG);
    let said = said.unwrap_or_else(|error| panic!("{test} {options}: {error}\n{:?}", server.output()));
    assert_eq!(rows(&said), rows_of(options), "{test} {options}:\n{said}");
    let theirs = server.wait(SHORT).unwrap();
    assert_eq!(theirs.status, Some(0), "{test} {options}:\n{}", theirs.text());
}

fn serve(stage: &Stage, test: &str, options: &str) {
    let server = our_server(stage, test, options);
    let theirs = their_client(stage, test, options).wait(LONG).unwrap();
    assert_eq!(theirs.status, Some(0), "{test} {options}:\n{}\n{}", theirs.text(), server.output());
    assert_eq!(rows(&theirs.stdout), rows_of(options), "{test} {options}:\n{}", theirs.stdout);
    let said = server.finish(SHORT);
    said.unwrap_or_else(|error| panic!("{test} {options}: {error}"));
    thread::sleep(Duration::from_millis(100));
}

/// Number of rows in a table: lines of numbers.
fn rows(text: &str) -> usize {
    let numeric = |line: &&str| {
        line.split_whitespace().count() > 3 && line.split_whitespace().all(|word| word.parse::<f64>().is_ok())
    };
    text.lines().filter(numeric).count()
}

/// Number of rows of a test; `-a` has each power of two from 2 bytes to 8 MiB.
fn rows_of(options: &str) -> usize {
    if options.split_whitespace().any(|word| word == "-a") { 23 } else { 1 }
}

/// Runs all cases, with one capture and check for each program.
fn every_case(stage: &Stage, run: impl Fn(&Stage, &str, &str)) {
    for (test, lines) in CASES {
        let record = stage.judged(Ending::Orderly, || {
            for options in lines {
                run(stage, test, options);
            }
        });
        let record = record.unwrap_or_else(|error| panic!("{test}: {error:#}"));
        // One more for the control connection.
        assert!(record.connections.len() >= 2 * lines.len(), "{test}: {}", record.connections.len());
        assert!(record.connections.iter().all(|c| c.crc && c.terminates == 0), "{test}");
    }
}

/// Includes `write_lat`, whose server sends first; siw accepts that (docs/decisions/0008).
#[test]
fn siw_perftest_is_the_server() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    every_case(&stage, measure);
}

#[test]
fn siw_perftest_is_the_client() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    every_case(&stage, |stage, test, options| {
        // As the server of write_lat we may send first only after the client has declared that it is ready to
        // receive.
        stage.vm.tune("peer_to_peer", if test == "write_lat" { "1" } else { "0" }).unwrap();
        serve(stage, test, options);
    });
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn siw_perftest_runs_through_all_sizes() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        measure(&stage, "send_bw", "-n 5 -a");
        serve(&stage, "write_bw", "-n 5 -a");
    });
    record.unwrap();
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn siw_perftest_latency_of_the_largest_reads() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        measure(&stage, "read_lat", "-n 5 -s 8388608");
        serve(&stage, "read_lat", "-n 5 -s 8388608");
    });
    record.unwrap();
}

#[test]
fn siw_perftest_completes_despite_loss_and_reordering() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    stage.disturb("delay 1ms loss 1% reorder 5%").unwrap();
    let record = stage.judged(Ending::Orderly, || {
        for (test, options) in [("send_bw", "-n 20 -s 65536"), ("write_bw", "-n 20 -s 65536 -b")] {
            measure(&stage, test, options);
            serve(&stage, test, options);
        }
        measure(&stage, "read_bw", "-n 20 -s 65536");
        serve(&stage, "read_bw", "-n 20 -s 65536");
        serve(&stage, "send_lat", "-n 50 -s 64");
    });
    record.unwrap();
}

/// Path of each value in the sections that perftest writes, and whether the value is a number. perftest 4.5 leaves the
/// quotation marks out; with them removed from ours, both files have one value a line.
fn values(text: &str) -> BTreeMap<String, bool> {
    let (mut section, mut values) = (String::new(), BTreeMap::new());
    for line in text.lines() {
        let line = line.replace('"', "");
        let Some((name, value)) = line.trim().trim_end_matches(',').split_once(':') else { continue };
        let (name, value) = (name.trim(), value.trim());
        match value {
            "{" => name.clone_into(&mut section),
            _ => drop(values.insert(format!("{section}.{name}"), value.parse::<f64>().is_ok())),
        }
    }
    values
}

/// Each value in a file that perftest wrote is in our file of the same test and role, in the same section and of the same
/// type. Later versions write valid JSON and more values: `json_has_perftests_keys_nesting_and_types` of xwarp-perf.
#[test]
fn siw_perftest_writes_the_json_that_we_write() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let folder = env::temp_dir();
    let written = |role: &str| {
        let path = folder.join(format!("xwarp-{}-{role}.json", process::id()));
        (format!("-n 100 -s 4000 --out_json --out_json_file {}", path.display()), path)
    };
    let theirs = |role| format!("-n 100 -s 4000 --out_json --out_json_file=/tmp/{role}.json");
    for test in ["send_bw", "write_lat"] {
        stage.vm.tune("peer_to_peer", if test == "write_lat" { "1" } else { "0" }).unwrap();
        let (options, client_file) = written("client");
        let mut server = their_server(&stage, test, &theirs("server"));
        our_client(&stage, test, &options).finish(LONG).unwrap();
        let ended = server.wait(SHORT).unwrap();
        assert_eq!(ended.status, Some(0), "{test}:\n{}", ended.text());
        let (options, server_file) = written("server");
        let server = our_server(&stage, test, &options);
        let client = their_client(&stage, test, &theirs("client")).wait(LONG).unwrap();
        assert_eq!(client.status, Some(0), "{test}:\n{}", client.text());
        server.finish(SHORT).unwrap();
        for (role, ours) in [("client", client_file), ("server", server_file)] {
            let text = stage.vm.check(&format!("cat /tmp/{role}.json"), SHORT).unwrap();
            let (written, expected) = (values(&fs::read_to_string(&ours).unwrap()), values(&text));
            fs::remove_file(&ours).unwrap();
            assert!(expected.len() > 15, "{text}");
            for (name, number) in &expected {
                assert_eq!(written.get(name), Some(number), "{name} of {test}, {role}:\n{text}");
            }
        }
    }
}

/// Bytes that have arrived at our interface.
fn received_bytes(stage: &Stage) -> u64 {
    let mut cat = stage.near.command("cat");
    let output = cat.arg(format!("/sys/class/net/{INTERFACE}/statistics/rx_bytes")).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

/// Starts perftest's server and our client, and returns them while their stream runs. In one run, the server never accepted the
/// test connection, although its kernel had acknowledged the MPA Request, and waited forever. Then both start again.
fn streaming(stage: &Stage, test: &str, options: &str) -> (Job, Running) {
    for _ in 0..3 {
        let before = received_bytes(stage);
        let mut theirs = their_server(stage, test, options);
        let mut ours = our_client(stage, test, options);
        thread::sleep(WARM);
        if received_bytes(stage) - before > STREAM_BYTES {
            return (theirs, ours);
        }
        ours.signal(Signal::KILL).unwrap();
        ours.wait(SHORT).unwrap();
        theirs.signal("KILL").unwrap();
        theirs.wait(SHORT).unwrap();
    }
    panic!("{test} {options}: no stream in three attempts");
}

/// Kills an end during a stream. A killed end sends nothing; its kernel answers further segments with a
/// reset, so the other end must be sending.
#[test]
fn siw_perftest_survives_the_death_of_a_peer() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let endless = "-n 1000000 -s 262144";
    let record = stage.judged(Ending::Cut, || {
        let both = format!("{endless} -b");
        let (mut theirs, mut ours) = streaming(&stage, "write_bw", &both);
        ours.signal(Signal::KILL).unwrap();
        ours.wait(SHORT).unwrap();
        assert_ne!(theirs.wait(SHORT).unwrap().status, Some(0));
        let mut ours = our_server(&stage, "send_bw", endless);
        let mut theirs = their_client(&stage, "send_bw", endless);
        thread::sleep(WARM);
        ours.signal(Signal::KILL).unwrap();
        ours.wait(SHORT).unwrap();
        assert_ne!(theirs.wait(SHORT).unwrap().status, Some(0));
        // The other program is killed: its kernel closes the connection.
        let ours = our_server(&stage, "write_bw", endless);
        let theirs = their_client(&stage, "write_bw", endless);
        thread::sleep(WARM);
        theirs.signal("KILL").unwrap();
        let error = ours.finish(SHORT).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("the other end is gone"), "{error}");
    });
    assert!(record.unwrap().connections.len() >= 6);
}
