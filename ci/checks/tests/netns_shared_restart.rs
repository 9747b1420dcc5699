//! Restarts of `xwarpd --keep`: devices, connections and bytes of its clients go on.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::PathBuf,
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    lasting::Crowd,
    process::{self, Running},
    shared::SharedInterface,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

/// A server on this host and clients, all behind the same helper.
fn crowd(kept: &Kept, clients: usize) -> Crowd {
    let address = format!("{}:7000", kept.lab.address(Side::A, Family::V4));
    Crowd::start(&address, clients, |args| kept.shared.start_unprivileged(NOBODYS, args)).unwrap()
}

/// The helper that the keeper has started.
fn helper(shared: &SharedInterface) -> Pid {
    let only = || if let [pid] = shared.helper.children()[..] { Pid::from_raw(pid) } else { None };
    process::wait_until("a helper", LIMIT, only).unwrap()
}

/// A helper that keeps its devices, and whose program is a file of the lab.
struct Kept {
    lab: Lab,
    program: PathBuf,
    shared: SharedInterface,
}

fn kept(options: &[&str]) -> Kept {
    kept_by(&[], options)
}

/// The same, started by a command that precedes it.
fn kept_by(starter: &[&str], options: &[&str]) -> Kept {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = lab.file("xwarpd");
    fs::copy(HELPER, &program).unwrap();
    let options = [&[INTERFACE, "--keep"], options].concat();
    let shared = SharedInterface::start_by(lab.file("xwarpd.sock"), &options, |args| {
        let words = [starter, &[program.to_str().unwrap()], args].concat();
        lab.start(Side::A, words[0], &words[1..])
    });
    Kept { shared: shared.unwrap(), lab, program }
}

impl Kept {
    /// Ends the helper by a signal, and waits until another one serves.
    fn restart(&mut self, signal: Signal) {
        let goes_on = |shared: &mut SharedInterface| {
            shared.helper.arrived().iter().filter(|line| line.contains("ready")).count()
        };
        let before = goes_on(&mut self.shared);
        kill_process(helper(&self.shared), signal).unwrap();
        wait_until("no helper serves", || goes_on(&mut self.shared) > before);
    }

    /// Ends the helper, and lets no other start before [`back`](Self::back).
    fn away(&self) {
        self.shared.helper.signal(Signal::STOP).unwrap();
        let helper = helper(&self.shared);
        kill_process(helper, Signal::KILL).unwrap();
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{}/stat", helper.as_raw_nonzero())).unwrap();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
        };
        wait_until("the helper does not end", state);
    }

    fn back(&mut self) {
        self.shared.helper.signal(Signal::CONT).unwrap();
    }

    fn ip(&self, line: &str) {
        self.lab.run(Side::A, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    process::wait_until(what, LIMIT, || is().then_some(())).unwrap();
}

/// Restarts by TERM and KILL in turn under the verified traffic of clients.
fn restarts(clients: usize, restarts: usize) {
    let mut kept = kept(&["--devices-per-user", "16"]);
    let mut crowd = crowd(&kept, clients);
    for signal in [Signal::TERM, Signal::KILL].into_iter().cycle().take(restarts) {
        kept.restart(signal);
        crowd.goes_on().unwrap();
    }
}

#[test]
fn netns_shared_restart_by_term_and_by_kill_ends_nothing() {
    restarts(2, 3);
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_shared_restart_of_many_clients_many_times_ends_nothing() {
    restarts(10, 20);
}

/// While no helper is there, clients come and go, and the interface changes.
#[test]
fn netns_shared_restart_what_happens_meanwhile_is_not_lost() {
    let mut kept = kept(&["--quarantine", "0"]);
    let mut crowd = crowd(&kept, 2);
    kept.ip("address add 10.77.0.8/24 dev xw0");
    crowd.clients[0].wait_for("10.77.0.8", LIMIT).unwrap();
    let address = |port| format!("{}:{port}", kept.lab.address(Side::A, Family::V4));
    let (lasting, dying) = (address(7000), address(7001));
    let server = |shared: &SharedInterface| shared.start_unprivileged(NOBODYS, &["serve", &dying]).unwrap();
    let mut dies = server(&kept.shared);
    dies.wait_for("listens", LIMIT).unwrap();
    kept.away();
    // One client dies, another one comes.
    dies.signal(Signal::KILL).unwrap();
    dies.wait(LIMIT).unwrap();
    crowd.clients.push(kept.shared.start_unprivileged(NOBODYS, &["last", &lasting]).unwrap());
    kept.ip("address add 10.77.0.9/24 dev xw0");
    kept.ip("address del 10.77.0.8/24 dev xw0");
    kept.ip("link set dev xw0 mtu 1400");
    kept.back();
    crowd.goes_on().unwrap();
    for client in &mut crowd.clients {
        client.wait_for("10.77.0.9", LIMIT).unwrap();
        client.wait_for("mtu 1400", LIMIT).unwrap();
        let told = client.arrived().iter().rfind(|line| line.starts_with("mtu ")).unwrap();
        assert!(!told.contains("10.77.0.8"), "{told}");
    }
    // What the dead one had is free, and events go on.
    server(&kept.shared).wait_for("listens", LIMIT).unwrap();
    kept.ip("link set dev xw0 mtu 1300");
    crowd.clients[0].wait_for("mtu 1300", LIMIT).unwrap();
    // Nothing of the past is in the way of another restart.
    kept.restart(Signal::KILL);
    crowd.goes_on().unwrap();
}

/// An upgrade puts another file in the place of the program. One that cannot go on with the devices leaves them to the former program.
#[test]
fn netns_shared_restart_runs_the_new_program_or_else_the_former_one() {
    let mut kept = kept(&[]);
    let mut crowd = crowd(&kept, 1);
    let running = |kept: &Kept| {
        fs::metadata(format!("/proc/{}/exe", helper(&kept.shared).as_raw_nonzero())).unwrap().ino()
    };
    let at_path = |kept: &Kept| fs::metadata(&kept.program).unwrap().ino();
    let new = kept.lab.file("new");
    fs::copy(HELPER, &new).unwrap();
    fs::rename(&new, &kept.program).unwrap();
    assert_ne!(running(&kept), at_path(&kept));
    kept.restart(Signal::TERM);
    crowd.goes_on().unwrap();
    let upgraded = running(&kept);
    assert_eq!(upgraded, at_path(&kept), "the old program runs on");
    fs::write(&new, "#!/bin/sh\nexit 1\n").unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(&new, &kept.program).unwrap();
    kept.restart(Signal::TERM);
    crowd.goes_on().unwrap();
    assert_eq!(running(&kept), upgraded);
    kept.shared.helper.wait_for("the former program goes on", LIMIT).unwrap();
}

/// A helper whose loop is stuck is killed, and the next one goes on. One that runs is left alone.
#[test]
fn netns_shared_restart_a_stuck_helper_is_replaced() {
    let mut kept = kept_by(&["env", "WATCHDOG_USEC=4000000", "WATCHDOG_PID=1"], &[]);
    let mut crowd = crowd(&kept, 1);
    let stuck = helper(&kept.shared);
    // Longer than the limit, by its reports.
    thread::sleep(Duration::from_secs(6));
    assert_eq!(helper(&kept.shared), stuck);
    kill_process(stuck, Signal::STOP).unwrap();
    kept.shared.helper.wait_for("has not answered for 4s, and is killed", LIMIT).unwrap();
    wait_until("the stuck helper stays", || helper(&kept.shared) != stuck);
    crowd.goes_on().unwrap();
}

/// A helper that finds descriptors of another version changes nothing.
#[test]
fn netns_shared_restart_descriptors_of_another_version_are_refused() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let socket = lab.file("xwarpd.sock");
    let script = format!(
        "exec 3</dev/null 4</dev/null; LISTEN_FDS=2 LISTEN_FDNAMES=keeper:2h exec {HELPER} xw0 --keep --socket {}",
        socket.display()
    );
    let mut helper = lab.start(Side::A, "sh", &["-c", &script]).unwrap();
    helper.wait_for("another version of xwarpd left a descriptor (2h)", LIMIT).unwrap();
    assert!(!helper.wait(LIMIT).unwrap().success());
}

/// TERM ends everything, for a reason that clients hear; so does the death of the keeper. Nothing is left.
#[test]
fn netns_shared_restart_ends_with_the_keeper() {
    for (signal, reason) in
        [(Signal::TERM, "xwarpd was stopped"), (Signal::KILL, "the keeper of xwarpd has ended")]
    {
        let mut kept = kept(&[]);
        let mut crowd = crowd(&kept, 1);
        kept.restart(Signal::KILL);
        crowd.goes_on().unwrap();
        let helper = helper(&kept.shared);
        kept.shared.helper.signal(signal).unwrap();
        crowd.server.wait_for(reason, LIMIT).unwrap();
        assert!(!crowd.clients[0].wait(LIMIT).unwrap().success());
        assert_eq!(kept.shared.helper.wait(LIMIT).unwrap().success(), signal == Signal::TERM);
        wait_until("the helper goes on", || test_kill_process(helper).is_err());
        assert!(!kept.shared.socket().exists());
        let links = kept.lab.run(Side::A, "ip", &["link", "show", "xw0"]).unwrap();
        assert!(!links.contains("xdp"), "{links}");
    }
}

/// Clients that fill their connections while no helper is there, with nonsense and with descriptors whose closing takes long, are hung
/// up on, and honest ones go on.
#[test]
fn netns_shared_restart_attack_nonsense_meanwhile_is_bounded() {
    let mut kept = kept(&[]);
    let mut crowd = crowd(&kept, 1);
    let go = kept.lab.file("go");
    let ways = ["junk", "empty", "linger", "leave"];
    let start = |way: &&str| {
        // In a namespace with a loopback.
        let mut command = kept.lab.command(Side::B, "setpriv");
        command.args(["--reuid=7777", "--regid=7777", "--clear-groups", "--no-new-privs"]);
        command.args(["--inh-caps=-all", "--bounding-set=-all", NOBODYS, "meanwhile", way]).arg(&go);
        command.env("XWARP_HELPER", kept.shared.socket());
        Running::start(command).unwrap()
    };
    let mut hostile: Vec<Running> = ways.iter().map(start).collect();
    for one in &mut hostile {
        one.wait_for("opened", LIMIT).unwrap();
    }
    kept.away();
    fs::write(&go, "").unwrap();
    for one in &mut hostile {
        one.wait_for("sent", LIMIT).unwrap();
    }
    kept.back();
    crowd.goes_on().unwrap();
    for one in &mut hostile {
        one.wait_for("hung up", LIMIT).unwrap();
    }
    kept.restart(Signal::TERM);
    crowd.goes_on().unwrap();
    // The keeper has nothing left of them: a namespace, a helper's socket and seven descriptors for each of two devices.
    let kept_now = || fs::read_dir(format!("/proc/{}/fd", kept.shared.helper.id())).unwrap().count();
    wait_until("the keeper keeps what nobody needs", || kept_now() < 40);
}
