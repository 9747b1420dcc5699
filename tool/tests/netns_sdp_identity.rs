//! Which program gets a connection over SDP, and the names that it sees: the same as over the kernel's TCP. No program sees a peer of
//! another host as one of its own, whoever executes, forks, shares or leaves a port.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env, fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
};
use xwarp_sdp::mapper::{Asked, Question};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");
/// One that every user may run.
const PYTHON: &str = "/usr/bin/python3";
const LIMIT: Duration = Duration::from_secs(60);
const PORT: u16 = 7900;

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Sdp,
    Tcp,
    /// TCP, by a user without privileges.
    Nobody,
}

struct Hosts {
    lab: Lab,
    program: PathBuf,
}

impl Hosts {
    fn up() -> Self {
        let lab = Lab::up(LabOptions::default()).unwrap();
        let program = lab.file("identity.py");
        fs::write(&program, include_str!("python/identity.py")).unwrap();
        Self { lab, program }
    }

    fn address(&self, side: Side) -> IpAddr {
        self.lab.address(side, Family::V4)
    }

    fn start(&self, side: Side, by: By, arguments: &str) -> Running {
        let mut command = match by {
            By::Sdp => {
                let library = env::current_exe().unwrap().with_file_name("libxwarp_sdp_preload.so");
                let mut command = self.lab.command(side, XWARP);
                command.args(["sdp", "--statistics", "--library"]).arg(library).args(["--", PYTHON]);
                command
            }
            By::Tcp => self.lab.command(side, PYTHON),
            By::Nobody => {
                let mut command = self.lab.command(side, "setpriv");
                command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", PYTHON]);
                command
            }
        };
        command.arg(&self.program).args(arguments.split_ascii_whitespace());
        Running::start(command).unwrap()
    }

    /// Starts a program at B that listens, and waits until the port mapper knows the service, if it is one over SDP.
    fn serve(&self, by: By, arguments: &str) -> Running {
        let mut server = self.start(Side::B, by, arguments);
        server.wait_for("listens", LIMIT).unwrap();
        if by == By::Sdp {
            let from = SocketAddr::new(self.address(Side::A), 1);
            let question = Question::new(from, SocketAddr::new(self.address(Side::B), PORT));
            let end = Instant::now() + LIMIT;
            while !matches!(self.lab.within(Side::A, || question.ask(1)).unwrap(), Ok(Asked::Accepted(..))) {
                assert!(Instant::now() < end, "no service\n{}", server.output());
                thread::sleep(Duration::from_millis(20));
            }
        }
        server
    }

    /// What `count` connections from A over SDP are answered.
    fn ask(&self, count: u32, words: &str) -> String {
        let ask = format!("ask {} {PORT} {count} {words}", self.address(Side::B));
        self.start(Side::A, By::Sdp, &ask).finish(LIMIT).unwrap()
    }
}

fn answers(output: &str) -> Vec<&str> {
    output.lines().filter_map(|line| line.strip_prefix("answer ")).collect()
}

/// Bytes that the statistics of a program show as received over SDP.
fn received(output: &str) -> u64 {
    let counts = output.lines().filter_map(|line| line.split(" received ").nth(1));
    counts.filter_map(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok()).sum()
}

#[test]
fn netns_sdp_identity_an_executed_program_sees_the_true_names() {
    let hosts = Hosts::up();
    let mut server = hosts.serve(By::Sdp, &format!("execute 0.0.0.0 {PORT}"));
    assert_eq!(answers(&hosts.ask(1, "")), ["shown soon"], "{}", server.output());
    let shown = server.wait_for("bare", LIMIT).unwrap();
    let output = server.output();
    let (a, b) = (hosts.address(Side::A), hosts.address(Side::B));
    let child = |kind: &str| {
        let line = output.lines().find(|line| line.starts_with(kind)).unwrap();
        line.split_ascii_whitespace().skip(2).map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let keeps = child("keeps");
    assert_eq!(
        [&keeps[0], &keeps[2], &keeps[3]],
        [&a.to_string(), &b.to_string(), &PORT.to_string()],
        "{output}"
    );
    // Without the table of names, a remote peer is never one of the loopback.
    for kind in ["closes", "bare"] {
        assert!(!child(kind)[0].starts_with("127."), "{shown} {output}");
    }
}

#[test]
fn netns_sdp_identity_the_next_owner_of_a_port_gets_no_connection_of_the_first() {
    let hosts = Hosts::up();
    let mut first = hosts.serve(By::Sdp, &format!("leave 0.0.0.0 {PORT}"));
    assert_eq!(answers(&hosts.ask(1, "")), ["once soon"]);
    first.wait_for("left", LIMIT).unwrap();
    let mut heir = hosts.serve(By::Nobody, &format!("serve heir 0.0.0.0 {PORT}"));
    // The first connections may find the old service, and are reset.
    let end = Instant::now() + LIMIT;
    let expected = format!("heir sees {} ", hosts.address(Side::A));
    while !hosts.ask(1, "").contains(&expected) {
        assert!(Instant::now() < end, "{}", heir.output());
    }
    for seen in heir.arrived().iter().filter(|line| line.contains("sees")) {
        assert!(seen.contains(&expected), "{seen}");
    }
}

#[test]
fn netns_sdp_identity_a_process_that_shares_the_port_gets_no_connection_of_the_other() {
    const COUNT: u32 = 30;
    let hosts = Hosts::up();
    let mut first = hosts.serve(By::Sdp, &format!("serve first 0.0.0.0 {PORT} reuse"));
    let mut second = hosts.serve(By::Tcp, &format!("serve second 0.0.0.0 {PORT} reuse"));
    let output = hosts.ask(COUNT, "");
    let expected = format!("first sees {} ", hosts.address(Side::A));
    assert_eq!(answers(&output).len(), COUNT as usize, "{output}");
    assert!(answers(&output).iter().all(|answer| answer.starts_with(&expected)), "{output}");
    assert!(received(&output) > 0 && !second.arrived().iter().any(|line| line.contains("sees")), "{output}");
    assert!(first.arrived().iter().filter(|line| line.contains("sees")).all(|line| line.contains(&expected)));
}

#[test]
fn netns_sdp_identity_a_listener_for_ipv6_gets_no_ipv4_client() {
    let hosts = Hosts::up();
    let _six = hosts.start(Side::B, By::Sdp, &format!("serve six :: {PORT} six"));
    let _four = hosts.serve(By::Nobody, &format!("serve four 0.0.0.0 {PORT}"));
    let end = Instant::now() + LIMIT;
    let six = SocketAddr::new(hosts.lab.address(Side::B, Family::V6), PORT);
    let question = Question::new(SocketAddr::new(hosts.lab.address(Side::A, Family::V6), 1), six);
    while !matches!(hosts.lab.within(Side::A, || question.ask(1)).unwrap(), Ok(Asked::Accepted(..))) {
        assert!(Instant::now() < end, "no service");
    }
    let output = hosts.ask(2, "");
    let expected = format!("four sees {} ", hosts.address(Side::A));
    assert!(answers(&output).iter().all(|answer| answer.starts_with(&expected)), "{output}");
}

#[test]
fn netns_sdp_identity_hosts_without_ipv6_serve_ipv4_by_a_listener_of_both() {
    let hosts = Hosts::up();
    for side in [Side::A, Side::B] {
        hosts.lab.run(side, "sysctl", &["-qw", "net.ipv6.conf.all.disable_ipv6=1"]).unwrap();
    }
    let server = hosts.serve(By::Sdp, &format!("serve both :: {PORT} both"));
    let output = hosts.ask(5, "");
    let expected = format!("both sees ::ffff:{} ", hosts.address(Side::A));
    assert_eq!(answers(&output).len(), 5, "{output}");
    assert!(
        answers(&output).iter().all(|answer| answer.starts_with(&expected)),
        "{output} {}",
        server.output()
    );
    assert!(received(&output) > 0, "{output}");
}

#[test]
fn netns_sdp_identity_the_names_of_an_ended_connection_go_to_nobody_else() {
    let hosts = Hosts::up();
    let mut server = hosts.serve(By::Sdp, &format!("serve one 0.0.0.0 {PORT}"));
    let output = hosts.ask(1, "");
    assert!(output.contains(&format!("one sees {} ", hosts.address(Side::A))), "{output}");
    let line = server.wait_for(" leg ", LIMIT).unwrap();
    let leg = line.rsplit(' ').next().unwrap();
    let own = hosts.address(Side::B);
    // On a machine that gives the loopback's addresses to legs, the second one would have the port.
    for source in [own.to_string(), "127.0.0.1".into()] {
        let local = format!("local {source} {PORT} {source} {leg}");
        let output = hosts.start(Side::B, By::Nobody, &local).finish(LIMIT).unwrap();
        assert!(output.contains(&format!("one sees {source} {leg}")), "{output}");
    }
}

#[test]
fn netns_sdp_identity_a_socket_bound_to_an_interface_uses_tcp_at_once() {
    let hosts = Hosts::up();
    let mut server = hosts.serve(By::Sdp, &format!("serve one 0.0.0.0 {PORT}"));
    let output = hosts.ask(1, &format!("device {INTERFACE}"));
    let shown = answers(&output);
    assert!(shown.len() == 1 && shown[0].ends_with("soon"), "{output}");
    assert_eq!(received(&output), 0, "{output}");
    let seen = server.arrived().iter().filter(|line| line.contains("sees")).count();
    assert!(seen <= 1, "a second connection: {}", server.output());
}

#[test]
fn netns_sdp_identity_a_child_accepts_what_waited_in_its_parent() {
    let hosts = Hosts::up();
    let server = hosts.serve(By::Sdp, &format!("pending 0.0.0.0 {PORT}"));
    let output = hosts.start(Side::A, By::Sdp, &format!("send {} {PORT}", hosts.address(Side::B)));
    let output = output.finish(LIMIT).unwrap();
    assert!(output.contains("got 300 of 300"), "{output} {}", server.output());
    assert!(received(&output) > 0, "{output}");
}

/// A client that starts before its server, and whose server is restarted at another port of SDP, uses SDP again within seconds.
#[test]
fn netns_sdp_identity_a_server_that_starts_late_is_found() {
    let hosts = Hosts::up();
    let ask = format!("ask {} {PORT} 40 slowly", hosts.address(Side::B));
    let mut client = hosts.start(Side::A, By::Sdp, &ask);
    client.wait_for("answer ConnectionRefusedError", LIMIT).unwrap();
    let mut bytes = 0;
    for name in ["first", "second"] {
        let mut server = hosts.serve(By::Sdp, &format!("serve {name} 0.0.0.0 {PORT}"));
        client.wait_for(&format!("answer {name}"), LIMIT).unwrap();
        thread::sleep(Duration::from_secs(3));
        server.signal(rustix::process::Signal::TERM).unwrap();
        let _ = server.wait(LIMIT).unwrap();
        bytes += server.arrived().iter().filter(|line| line.contains("sees")).count();
    }
    let output = client.finish(LIMIT).unwrap();
    let shown = answers(&output).iter().filter(|answer| answer.contains(" sees ")).count();
    let carried = output.lines().filter(|line| line.starts_with("xwarp-sdp: ")).count();
    // Each answer has more than 20 bytes. The first of each server may use TCP.
    assert!(bytes > 4 && shown > 4 && carried > 0, "{output}");
    assert!(received(&output) > 20 * (shown as u64 - 8).max(4), "{shown} answers: {output}");
}
