//! The units of `xwarpd` as they are shipped, under systemd as process 1 of an overlay of this system.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    lasting::Crowd,
    process::{Running, wait_until},
    shared::NOBODY,
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A booted system, in the network namespace of side A.
struct System {
    scratch: PathBuf,
    /// The program around process 1.
    outer: Option<Running>,
    /// Process 1, as it is numbered outside.
    init: String,
}

impl System {
    fn boot(lab: &Lab) -> Self {
        let scratch = lab.file(&format!("xwarp-systemd-{}", std::process::id()));
        fs::create_dir(&scratch).unwrap();
        // `ip netns exec` would hide the control groups.
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", lab.namespace(Side::A)));
        command
            .arg(folder("tests/shared/systemd_root"))
            .arg("boot")
            .arg(&scratch)
            .arg(folder("../../daemon/systemd"))
            .args([HELPER, NOBODYS]);
        let mut system = Self { scratch, outer: None, init: String::new() };
        let outer = system.outer.insert(Running::start(command).unwrap());
        let is_init =
            |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "systemd\n");
        system.init =
            wait_until("process 1", LIMIT, || Some(outer.children().into_iter().find(is_init)?.to_string()))
                .unwrap();
        system.serving("");
        system
    }

    /// A command that enters the system.
    fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init, "--all", "--root", "--wd"]);
        command
    }

    fn systemctl(&self, args: &[&str]) -> Output {
        self.inside().arg("systemctl").args(args).output().unwrap()
    }

    /// The number of the helper, when it serves and is not `former`.
    fn serving(&self, former: &str) -> String {
        wait_until("a helper that serves", LIMIT, || {
            let shown = self.systemctl(&["show", "--property=ActiveState,MainPID", "xwarpd.service"]);
            let shown = String::from_utf8(shown.stdout).unwrap();
            let process = shown.lines().find_map(|line| line.strip_prefix("MainPID="))?;
            (shown.contains("ActiveState=active") && process != former).then(|| process.to_owned())
        })
        .unwrap()
    }

    /// Starts a program of a member of the socket's group.
    fn member(&self, args: &[&str]) -> anyhow::Result<Running> {
        let group = self.inside().args(["getent", "group", "xwarp"]).output()?;
        let group = String::from_utf8(group.stdout)?.split(':').nth(2).unwrap_or_default().to_owned();
        let mut command = self.inside();
        command.args([
            "unshare",
            "--net",
            "setpriv",
            &format!("--reuid={NOBODY}"),
            &format!("--regid={group}"),
        ]);
        command.args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
        command.arg("/usr/bin/nobody").args(args);
        Running::start(command)
    }
}

impl Drop for System {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = self.inside().args(["journalctl", "--no-pager", "-u", "xwarpd"]).output();
            println!(
                "{}",
                log.map_or(String::new(), |log| String::from_utf8_lossy(&log.stdout).into_owned())
            );
        }
        // Process 1 ends with the program around it.
        self.outer = None;
        let limit = Instant::now() + LIMIT;
        while Path::new("/proc").join(&self.init).exists() && Instant::now() < limit {
            thread::sleep(Duration::from_millis(10));
        }
        let script = folder("tests/shared/systemd_root");
        let _ = Command::new(script).arg("clean").arg(&self.scratch).status();
    }
}

/// `systemctl restart`, a kill, and a loop that is stuck end nothing of what clients have; `systemctl stop` ends all. It needs control
/// groups that can be written.
#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_systemd_a_restart_ends_nothing_and_a_stuck_helper_is_restarted() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let system = System::boot(&lab);
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let mut crowd = Crowd::start(&address, 2, |args| system.member(args)).unwrap();
    let kill = ["kill", "--kill-who=main"];
    let kill = |signal| [&kill[..], &[signal, "xwarpd.service"]].concat();
    for way in [vec!["restart", "xwarpd.service"], kill("--signal=KILL"), kill("--signal=STOP")] {
        let former = system.serving("");
        let done = system.systemctl(&way);
        assert!(done.status.success(), "{way:?}: {done:?}");
        system.serving(&former);
        crowd.goes_on().unwrap_or_else(|error| panic!("{way:?}: {error:#}"));
    }
    assert!(system.systemctl(&["stop", "xwarpd.socket", "xwarpd.service"]).status.success());
    for client in &mut crowd.clients {
        assert!(!client.wait(LIMIT).unwrap().success());
    }
    let links = lab.run(Side::A, "ip", &["link", "show", INTERFACE]).unwrap();
    assert!(!links.contains("xdp"), "{links}");
    assert!(!system.inside().args(["test", "-e", "/run/xwarp/xwarpd.sock"]).status().unwrap().success());
}
