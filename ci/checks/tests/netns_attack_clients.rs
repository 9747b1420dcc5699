//! Attacks of local users on `xwarpd`: on its threads, descriptors, ports, identity and monitors. Honest clients beside them work.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);
const MONITORS: &str = "127.0.0.1:9815";

fn lab() -> Lab {
    let lab = Lab::up(LabOptions::default()).unwrap();
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    lab
}

/// Two clients exchange messages.
fn works(lab: &Lab, shared: &SharedInterface) {
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let server = shared.serve(NOBODYS, &address, "1").unwrap();
    shared.start_unprivileged(NOBODYS, &["talk", &address, "20"]).unwrap().finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
}

/// A client of a user, which says why it is refused.
fn says(shared: &SharedInterface, uid: u32, args: &[&str], text: &str) {
    let mut command = shared.unprivileged_as(uid, NOBODYS);
    command.args(args);
    let mut client = Running::start(command).unwrap();
    client.wait_for(text, LIMIT).unwrap();
}

/// Connections beyond a user's number are refused with a reason, and closing them holds nobody up although they carry sockets that
/// linger for an hour.
#[test]
fn netns_attack_lingering_sockets_of_refused_connections_hold_nobody_up() {
    let lab = lab();
    let shared =
        SharedInterface::start(&lab, HELPER, &["--quarantine", "0", "--devices-per-user", "2"]).unwrap();
    says(
        &shared,
        NOBODY - 2,
        &["crowd"],
        "this user has 18 connections to xwarpd already (--devices-per-user",
    );
    let mut hostile: Vec<Running> = Vec::new();
    for _ in 0..6 {
        let mut command = lab.command(Side::B, "setpriv");
        let user = (NOBODY - 1).to_string();
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
        command.args(["--inh-caps=-all", "--bounding-set=-all", NOBODYS, "linger", "early"]);
        command.env("XWARP_HELPER", shared.socket());
        hostile.push(Running::start(command).unwrap());
    }
    for hostile in &mut hostile {
        hostile.wait_for("passed", LIMIT).unwrap();
    }
    let begin = Instant::now();
    works(&lab, &shared);
    assert!(begin.elapsed() < LIMIT / 2, "{:?}", begin.elapsed());
    let threads = fs::read_dir(format!("/proc/{}/task", shared.helper.id())).unwrap().count();
    assert!(threads < 64, "{threads} threads");
}

/// Root without a capability, as in a container, is no root of the host; the host's own ports can be kept.
#[test]
fn netns_attack_root_of_a_container_gets_no_privileged_port() {
    let lab = lab();
    let address = lab.address(Side::A, Family::V4);
    let port = |port: u16| format!("{address}:{port}");
    let shared = SharedInterface::start(&lab, HELPER, &["--quarantine", "0"]).unwrap();
    says(&shared, 0, &["serve", &port(80), "1"], "ports below 1024");
    // Root of the host itself.
    let mut command = lab.command(Side::B, NOBODYS);
    command.args(["serve", &port(80), "1"]).env("XWARP_HELPER", shared.socket());
    Running::start(command).unwrap().wait_for("listens", LIMIT).unwrap();
    drop(shared);
    let range = ["--quarantine", "0", "--ports", "20000-20015", "--privileged-ports", "none"];
    let shared = SharedInterface::start(&lab, HELPER, &range).unwrap();
    says(&shared, NOBODY, &["serve", &port(7000), "1"], "clients may have the ports");
    let mut server = shared.serve(NOBODYS, &port(20000), "1").unwrap();
    let talk = ["talk", &port(20000), "3"];
    shared.start_unprivileged(NOBODYS, &talk).unwrap().finish(LIMIT).unwrap();
    server.wait(LIMIT).unwrap();
    // All users together leave the rest to the kernel.
    says(&shared, NOBODY, &["ports", "16"], "all users together have 16 ports already");
}

/// After the start, no thread has a way back to the capabilities that were dropped, and each has a list of system calls.
#[test]
fn netns_attack_dropped_capabilities_cannot_be_regained() {
    let lab = lab();
    let options = ["--metrics", MONITORS];
    let shared = SharedInterface::start(&lab, HELPER, &options).unwrap();
    works(&lab, &shared);
    // CAP_NET_BIND_SERVICE, NET_ADMIN, NET_RAW, IPC_LOCK, BPF.
    let kept: u64 = 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 39;
    for task in fs::read_dir(format!("/proc/{}/task", shared.helper.id())).unwrap() {
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        assert_eq!(field("NoNewPrivs:"), 1, "{status}");
        // A list of system calls.
        assert_eq!(field("Seccomp:"), 2, "{status}");
        // The thread that makes pairs enters the network namespaces of clients, and parses no request (CAP_SYS_ADMIN).
        let kept = if status.contains("xwarpd-pairs") { kept | 1 << 21 } else { kept };
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:", "CapBnd:"] {
            assert_eq!(field(set) & !kept, 0, "{set} {status}");
        }
    }
}

/// So few descriptors that those of a message might not fit are refused at the start.
#[test]
fn netns_attack_too_few_descriptors_are_refused_at_the_start() {
    let lab = lab();
    let socket = lab.file("few.sock");
    let args = ["--nofile=60:60", HELPER, INTERFACE, "--socket", socket.to_str().unwrap()];
    let mut helper = lab.start(Side::A, "prlimit", &args).unwrap();
    helper.wait_for("xwarpd may have 60 descriptors, and needs 1024", LIMIT).unwrap();
    // With few more, clients are refused with the reason, and served again when descriptors are free.
    let shared = SharedInterface::start_by(
        lab.file("some.sock"),
        &[INTERFACE, "--devices-per-user", "4095"],
        |args| lab.start(Side::A, "prlimit", &[&["--nofile=1024:1024", HELPER], args].concat()),
    );
    let shared = shared.unwrap();
    says(&shared, NOBODY - 1, &["crowd"], "xwarpd has no descriptors left");
    works(&lab, &shared);
}

/// Monitors that send nothing, as many as a local user likes, keep no other monitor from its answer.
#[test]
fn netns_attack_idle_monitors_delay_no_other() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &["--metrics", MONITORS]).unwrap();
    let asked = || {
        let idle: Vec<_> = (0..100).map(|_| TcpStream::connect(MONITORS).unwrap()).collect();
        let begin = Instant::now();
        let mut stream = TcpStream::connect(MONITORS).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        drop(idle);
        (answer, begin.elapsed())
    };
    let (answer, time) = lab.within(Side::A, asked).unwrap();
    assert!(answer.ends_with("# EOF\n") && time < Duration::from_secs(10), "{time:?}: {answer}");
    let mut client = shared.start_unprivileged(NOBODYS, &["watch"]).unwrap();
    client.wait_for("watches", LIMIT).unwrap();
    says(&shared, NOBODY, &["serve", "10.77.0.1:80", "1"], "ports below 1024");
    let (answer, _) = lab.within(Side::A, asked).unwrap();
    for sample in [
        format!("xwarpd_user_devices{{uid=\"{NOBODY}\"}} 1"),
        format!("xwarpd_client_losses_total{{interface=\"{INTERFACE}\",reason=\"receive_ring_full\"}} 0"),
        "xwarpd_refused_requests_total{reason=\"permission\"} 1".to_owned(),
        "xwarpd_closing_waiting 0".to_owned(),
    ] {
        assert!(answer.lines().any(|line| line == sample), "{sample}: {answer}");
    }
    client.signal(Signal::KILL).unwrap();
}
