//! Test suites and storage programs that users run, over the drop-in libraries.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side, distribution},
    process::Running,
    pyverbs::{Outcomes, expected, found},
    shared::SharedInterface,
    unmodified::{LIMIT, compiled, start_with},
};

const MTU: u32 = 9000;
const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
/// Time limit of pyverbs' suite, most of whose tests take some milliseconds.
const SUITE_LIMIT: Duration = Duration::from_mins(5);
/// Set to write the file of expected outcomes instead of comparing with it. The reasons of known outcomes are kept.
const WRITE: &str = "XWARP_WRITE_TABLES";

fn lab() -> Lab {
    Lab::up(LabOptions { mtu: MTU, ..LabOptions::default() }).unwrap()
}

/// Starts `line` as root at a side, over an interface that a helper shares.
fn start_beside(lab: &Lab, side: Side, shared: &SharedInterface, line: &str) -> Running {
    start_with(lab, side, &[("XWARP_HELPER", shared.socket().to_str().unwrap())], line).unwrap()
}

fn compat_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat").join(name)
}

/// Writes the file of expected outcomes, with the known reasons of the outcomes that did not change.
fn rewrite(file: &Path, text: &str, outcomes: &Outcomes<'_>) {
    let known = expected(text);
    let head = text.lines().take_while(|line| line.starts_with('#'));
    let mut new: String = head.flat_map(|line| [line, "\n"]).collect();
    for (name, (outcome, said)) in outcomes {
        let reason = match known.get(name) {
            Some((before, reason)) if before == outcome => reason,
            _ => said,
        };
        let reason = if reason.is_empty() { String::new() } else { format!(" # {reason}") };
        writeln!(new, "{outcome} {name}{reason}").unwrap();
    }
    fs::write(file, new).unwrap();
}

/// The suite of pyverbs of a Debian release, whose tests open and close the device again and again in one process. A file says which
/// tests do not pass, and why.
fn pyverbs(suite: &'static str, outcomes: &str) {
    let lab =
        Lab::up(LabOptions { mtu: MTU, distribution: distribution(suite), ..LabOptions::default() }).unwrap();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let (program, copy) = (compat_file("pyverbs_suite.py"), lab.file("suite"));
    let line = format!("--sysfs /usr/bin/python3 {} {} --dev xw0", program.display(), copy.display());
    let mut suite = start_beside(&lab, Side::A, &shared, &line);
    let status = suite.wait(SUITE_LIMIT);
    let said = suite.output();
    assert!(status.as_ref().is_ok_and(std::process::ExitStatus::success), "{status:?}\n{said}");

    let found = found(&said);
    let (file, found) = (compat_file(outcomes), found.unwrap_or_else(|| panic!("{said}")));
    let text = fs::read_to_string(&file).unwrap_or_default();
    if env::var_os(WRITE).is_some() {
        return rewrite(&file, &text, &found);
    }
    let known = expected(&text);
    let mut changes = String::new();
    for name in found.keys().chain(known.keys().filter(|name| !found.contains_key(*name))) {
        let (now, before) = (found.get(name), known.get(name));
        if now.map(|(outcome, _)| outcome) != before.map(|(outcome, _)| outcome) {
            writeln!(changes, "{name}: expected {before:?}, is {now:?}").unwrap();
        }
    }
    assert!(changes.is_empty(), "{changes}(with {WRITE}=1 this test writes {})", file.display());
    for (name, (outcome, reason)) in known {
        assert!(outcome == "ok" || !reason.is_empty(), "{name} has no reason in {}", file.display());
    }
}

#[test]
fn netns_compat_pyverbs_own_suite_of_debian_12_ends_as_expected() {
    pyverbs("bookworm", "pyverbs_outcomes.txt");
}

#[test]
fn netns_compat_pyverbs_own_suite_of_debian_13_ends_as_expected() {
    pyverbs("trixie", "pyverbs_outcomes_debian_13.txt");
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_pyverbs_own_suite_of_sid_ends_as_expected() {
    pyverbs("sid", "pyverbs_outcomes_sid.txt");
}

/// The jobs of fio: each is a process, and has a connection.
fn fio_jobs(options: &str) -> String {
    let jobs = [7101, 7102].map(|port| format!("[port{port}]\nport={port}\n"));
    let common = "ioengine=rdma\nbs=16k\nsize=4m\niodepth=4\nverify_state_save=0\n";
    format!("[global]\n{common}{options}{}", jobs.concat())
}

/// Sends from side B to side A by fio with these options of the sender. Returns whether the receiver found what it expected, and its
/// output.
fn fio(sender: &str) -> (bool, String) {
    let lab = lab();
    let near = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let far = SharedInterface::start_beyond(&lab, HELPER).unwrap();
    let address = lab.address(Side::A, Family::V4);
    let [receive, send] = ["receive", "send"].map(|name| lab.file(name).with_extension("fio"));
    fs::write(&receive, fio_jobs("rw=read\nverify=crc32c\n")).unwrap();
    fs::write(&send, fio_jobs(&format!("rw=write\nhostname={address}\nverb=send\n{sender}"))).unwrap();
    let mut receiver = start_beside(&lab, Side::A, &near, &format!("fio {}", receive.display()));
    for port in [7101, 7102] {
        await_listener_beyond(&lab, (address, port).into());
    }
    let sender = start_beside(&lab, Side::B, &far, &format!("fio {}", send.display()));
    let status = receiver.wait(LIMIT).unwrap();
    if status.success() {
        sender.finish(LIMIT).unwrap();
    }
    (status.success(), receiver.output())
}

/// Waits until side A listens at `address`, by connecting with the kernel of side B.
fn await_listener_beyond(lab: &Lab, address: std::net::SocketAddr) {
    let end = Instant::now() + LIMIT;
    let connect = || lab.within(Side::B, || std::net::TcpStream::connect_timeout(&address, LIMIT)).unwrap();
    while let Err(error) = connect() {
        assert!(Instant::now() < end, "nobody listens at {address}: {error}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_compat_fio_verifies_data_of_two_processes() {
    let (verified, said) = fio("verify=crc32c\ndo_verify=0\n");
    assert!(verified && said.matches("err= 0").count() == 2, "{said}");
    // The receiver does check: blocks without fio's checksum are refused.
    let (verified, said) = fio("");
    assert!(!verified && said.contains("verify: bad magic header"), "{said}");
}

/// Name of the target, and the initiator that `tests/compat/iser.c` is.
const TARGET: &str = "iqn.2026-11.example:disk";
const INITIATOR: &str = "iqn.2026-11.example:initiator";
/// Size of the disk, as in `tests/compat/iser.c`.
const DISK_BYTES: usize = 4096 * 512;

/// Starts tgtd with a disk on side B; `control` is the number of its control socket.
fn tgtd(lab: &Lab, control: &str) -> Running {
    let disk = lab.file("disk");
    fs::write(&disk, vec![0; DISK_BYTES]).unwrap();
    // Its iSCSI would listen at iSER's port, which is the same over iWARP.
    let line = format!("tgtd -f -C {control} --iser pool_sz_mb=16 --iscsi portal=127.0.0.1:3261");
    let server = start_with(lab, Side::B, &[], &line).unwrap();
    let tgtadm = |line: &str| {
        let arguments: Vec<_> = ["-C", control].into_iter().chain(line.split_whitespace()).collect();
        lab.run(Side::B, "tgtadm", &arguments)
    };
    let end = Instant::now() + LIMIT;
    while let Err(error) = tgtadm("--op show --mode system") {
        assert!(Instant::now() < end, "tgtd does not answer: {error}\n{}", server.output());
        std::thread::sleep(Duration::from_millis(100));
    }
    let target = |rest: &str| tgtadm(&format!("--lld iser --mode {rest}")).unwrap();
    target(&format!("target --op new --tid 1 --targetname {TARGET}"));
    target(&format!("logicalunit --op new --tid 1 --lun 1 --backing-store {}", disk.display()));
    target("target --op bind --tid 1 -I ALL");
    target(&format!("target --op bind --tid 1 -Q {INITIATOR}"));
    server
}

/// Log-in, random writes and reads that are compared, log-out, and again: several times in one process, and in another process.
#[test]
fn netns_compat_iser_of_tgtd_and_libiscsi_verifies_data() {
    let lab = lab();
    let control = std::process::id().to_string();
    let server = tgtd(&lab, &control);
    let program = compiled(&lab, "iser", &["-liscsi"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    for rounds in [3, 1] {
        // libiscsi 1.19 forgets to clear memory, and crashes at the second log-in of a process, unless malloc clears it.
        let clear = [("MALLOC_PERTURB_", "255")];
        let line = format!("{program} {address}:3260 {TARGET} {rounds} {rounds}");
        let said = start_with(&lab, Side::A, &clear, &line).unwrap().finish(LIMIT);
        let said = said.unwrap_or_else(|error| panic!("{error:#}\ntgtd: {}", server.output()));
        assert!(said.contains("done") && said.matches("logged out").count() == rounds, "{said}");
    }
    server.signal(Signal::KILL).unwrap();
    let _ = fs::remove_file(format!("/var/run/tgtd/socket.{control}"));
    let _ = fs::remove_file(format!("/var/run/tgtd/socket.{control}.lock"));
}
