//! `xwarp-perf --perftest` and perftest's own programs over Linux Soft-iWARP, in both roles.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{path::PathBuf, thread, time::Duration};

use xwarp_checks::{
    lab::{Family, INTERFACE},
    siw_vm::{Near, Siw, SiwVm, VmOptions},
};

const SHORT: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(180);
/// Of perftest.
const PORT: u16 = 18515;

/// The program, where cargo puts it beside this test.
fn xwarp_perf() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("xwarp-perf");
    assert!(path.exists(), "{} is missing: cargo build --workspace --all-targets", path.display());
    path
}

struct Stage {
    vm: SiwVm,
    near: Near,
}

impl Stage {
    fn new() -> Self {
        let vm = SiwVm::boot(&VmOptions { siw: Siw::Tunable, ..VmOptions::default() }).unwrap();
        let near = vm.attach(1).unwrap();
        Self { vm, near }
    }

    /// perftest's server in the machine, and we its client.
    fn measure(&self, test: &str, options: &str) {
        let mut server = self.vm.spawn(&format!("ib_{test} -R -d siw0 -F {options}")).unwrap();
        self.vm.wait_listening(PORT, SHORT).unwrap();
        let address = self.vm.address(Family::V4).to_string();
        let mut words = vec![test, "--perftest", "--markers", "off", "-d", INTERFACE];
        words.extend(options.split_whitespace());
        words.push(&address);
        let said = self.near.start(xwarp_perf(), &words).unwrap().finish(LONG);
        let said = said.unwrap_or_else(|error| panic!("{test} {options}: {error}\n{:?}", server.output()));
        assert_eq!(rows(&said), rows_of(options), "{test} {options}:\n{said}");
        let theirs = server.wait(SHORT).unwrap();
        assert_eq!(theirs.status, Some(0), "{test} {options}:\n{}", theirs.text());
    }

    /// We the server, and perftest's client in the machine.
    fn serve(&self, test: &str, options: &str) {
        let mut words = vec![test, "--perftest", "-d", INTERFACE];
        words.extend(options.split_whitespace());
        let mut server = self.near.start(xwarp_perf(), &words).unwrap();
        server.wait_for("Waiting for a client", SHORT).unwrap();
        let address = self.near.address(Family::V4);
        let theirs = self.vm.run(&format!("ib_{test} -R -d siw0 -F {options} {address}"), LONG).unwrap();
        assert_eq!(theirs.status, Some(0), "{test} {options}:\n{}\n{}", theirs.text(), server.output());
        assert_eq!(rows(&theirs.stdout), rows_of(options), "{test} {options}:\n{}", theirs.stdout);
        let said = server.finish(SHORT);
        said.unwrap_or_else(|error| panic!("{test} {options}: {error}"));
    }
}

/// Rows of a table: lines of numbers.
fn rows(text: &str) -> usize {
    let numeric = |line: &&str| {
        line.split_whitespace().count() > 3 && line.split_whitespace().all(|word| word.parse::<f64>().is_ok())
    };
    text.lines().filter(numeric).count()
}

/// `-a` is each power of two from 2 to 8 MiB.
fn rows_of(options: &str) -> usize {
    if options.split_whitespace().any(|word| word == "-a") { 23 } else { 1 }
}

const CASES: [(&str, &str); 12] = [
    ("send_bw", "-n 200 -s 16384"),
    ("send_bw", "-n 1000 -s 64 -r 100"),
    ("send_bw", "-n 100 -s 4000 -q 4"),
    ("send_bw", "-n 100 -s 4000 -b"),
    ("send_lat", "-n 200 -s 16"),
    ("write_bw", "-n 200 -s 16384"),
    ("write_bw", "-n 50 -s 1 -q 4"),
    ("write_bw", "-n 100 -s 4000 -b"),
    ("read_bw", "-n 100 -s 16384"),
    ("read_bw", "-n 100 -s 4000 -q 2"),
    ("read_lat", "-n 100 -s 16"),
    ("read_bw", "-n 5 -s 1048576"),
];

#[test]
fn siw_perftest_serves_us() {
    let stage = Stage::new();
    for (test, options) in CASES {
        stage.measure(test, options);
    }
    // The server of write_lat speaks first, which only siw dares.
    stage.measure("write_lat", "-n 100 -s 16");
}

#[test]
fn siw_perftest_asks_us() {
    let stage = Stage::new();
    for (test, options) in CASES {
        stage.serve(test, options);
        // perftest's client tries once only.
        thread::sleep(Duration::from_millis(100));
    }
    // We as the server of write_lat may speak first when the client has said that it is ready to receive.
    stage.vm.tune("peer_to_peer", "1").unwrap();
    stage.serve("write_lat", "-n 100 -s 16");
}

#[test]
fn siw_perftest_runs_through_all_sizes() {
    let stage = Stage::new();
    stage.measure("send_bw", "-n 5 -a");
    stage.serve("write_bw", "-n 5 -a");
}
