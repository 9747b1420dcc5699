//! `xwarp run` and `xwarp sdp` as a person uses them: names of interfaces, statuses, and programs into which no library can be loaded.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env, fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

use rustix::{
    fs::{XattrFlags, setxattr},
    process::Signal,
};
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::NOBODY,
    vm::built,
};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");
/// A user who is not the caller.
const SOMEBODY: u32 = 65533;
const LIMIT: Duration = Duration::from_secs(60);
/// Processes that are started at once.
const CROWD: usize = 64;

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// `xwarp` with these arguments at side A.
fn xwarp(lab: &Lab, line: &[&str]) -> Output {
    let mut command = lab.command(Side::A, XWARP);
    command.args(line).env("XWARP_LIBRARY", built("libxwarp_compat.so").unwrap());
    command.output().unwrap()
}

/// The same as a user without privileges, with more options of setpriv.
fn xwarp_as_nobody(lab: &Lab, options: &[&str], line: &[&str]) -> Output {
    let mut command = lab.command(Side::A, "setpriv");
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
    command.args(options).arg(XWARP).args(line).env("XWARP_LIBRARY", built("libxwarp_compat.so").unwrap());
    command.output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A copy of a program of `/usr/bin` that everybody may run.
fn copy(lab: &Lab, program: &str, name: &str) -> PathBuf {
    let path = lab.file(name);
    fs::copy(Path::new("/usr/bin").join(program), &path).unwrap();
    path
}

/// Gives the file of a program the capability `CAP_NET_ADMIN`, as `setcap cap_net_admin+ep` does.
fn set_capability(path: &Path) {
    let words: [u32; 5] = [0x0200_0001, 1 << 12, 0, 0, 0];
    setxattr(path, "security.capability", words.map(u32::to_le_bytes).as_flattened(), XattrFlags::empty())
        .unwrap();
}

#[test]
fn netns_run_refuses_interfaces_that_cannot_be_devices() {
    let lab = lab();
    let ip = |line: &str| lab.run(Side::A, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    ip("link add idle0 type veth peer name idle1");
    ip("link add down0 type veth peer name down1");
    // Without carrier, an interface gets no address of its own.
    ip("link set idle0 up");
    for (name, text) in [
        ("nosuch", "no interface \"nosuch\" in this network namespace; there are: "),
        ("", "no interface \"\" in this network namespace"),
        ("lo", "lo is not an Ethernet interface"),
        ("down0", "down0 is down: ip link set dev down0 up"),
        ("idle0", "idle0 has no IP address: ip addr add"),
    ] {
        for how in ["run", "sdp"] {
            let output = xwarp(&lab, &[how, "--device", name, "--", "echo", "started"]);
            let said = errors(&output);
            assert_eq!(output.status.code(), Some(1), "{how} {name}: {said}");
            assert!(output.stdout.is_empty() && said.contains(text), "{how} {name}: {said}");
        }
    }
    let mut command = lab.command(Side::A, XWARP);
    command.args(["run", "echo", "started"]).env("XWARP_DEVICES", format!("{INTERFACE},nosuch"));
    let output = command.env("XWARP_LIBRARY", built("libxwarp_compat.so").unwrap()).output().unwrap();
    assert!(output.stdout.is_empty() && errors(&output).contains("\"nosuch\""), "{output:?}");
}

#[test]
fn netns_run_and_sdp_return_the_statuses_of_shells() {
    let lab = lab();
    let library = built("libxwarp_compat.so").unwrap();
    // Any library can be preloaded.
    let sdp = ["sdp", "--library", library.to_str().unwrap(), "--"];
    for how in [&["run"][..], &sdp] {
        for (program, status) in [("no-such-program", 127), ("/etc/passwd", 126), ("/tmp", 126)] {
            let output = xwarp(&lab, &[how, &[program]].concat());
            assert_eq!(output.status.code(), Some(status), "{how:?} {program}: {output:?}");
            let said = errors(&output);
            assert!(said.starts_with(&format!("xwarp: cannot run {program}: ")), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        let output = xwarp(&lab, &[how, &["sh", "-c", "exit 7"]].concat());
        assert_eq!(output.status.code(), Some(7), "{output:?}");
    }
}

/// The dynamic linker ignores `LD_LIBRARY_PATH` and `LD_PRELOAD` for a program that gains privileges.
#[test]
fn netns_run_names_the_remedy_for_programs_that_gain_privileges() {
    let lab = lab();
    let devices = copy(&lab, "ibv_devices", "devices");
    set_capability(&devices);
    let set_user = copy(&lab, "ibv_devices", "set-user");
    chown(&set_user, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    fs::set_permissions(&set_user, fs::Permissions::from_mode(0o4755)).unwrap();
    let set_group = copy(&lab, "ibv_devices", "set-group");
    chown(&set_group, Some(NOBODY), Some(SOMEBODY)).unwrap();
    fs::set_permissions(&set_group, fs::Permissions::from_mode(0o2755)).unwrap();
    let shell = copy(&lab, "dash", "shell");
    set_capability(&shell);
    let script = lab.file("script");
    fs::write(&script, format!("#!{}\nibv_devices\n", shell.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();

    let library = built("libxwarp_compat.so").unwrap();
    let sdp = ["sdp", "--library", library.to_str().unwrap()];
    for (program, culprit, remedy) in [
        (&devices, &devices, "setcap -r"),
        (&set_user, &set_user, "chmod ug-s"),
        (&set_group, &set_group, "chmod ug-s"),
        (&script, &shell, "setcap -r"),
    ] {
        let name = program.to_str().unwrap();
        let output = xwarp_as_nobody(&lab, &[], &["run", "--device", INTERFACE, name]);
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(126), "{name}: {said}");
        for text in [&format!("{remedy} {}", culprit.display()), "xwarpd IFACE", "--ambient-caps +net_admin"]
        {
            assert!(said.contains(text), "{name}: no {text:?} in {said}");
        }
        assert!(output.stdout.is_empty(), "{output:?}");
        let output = xwarp_as_nobody(&lab, &[], &[&sdp[..], &["--only", "--", name]].concat());
        assert_eq!(output.status.code(), Some(126), "{name}: {output:?}");
        let output = xwarp_as_nobody(&lab, &[], &[&sdp[..], &["--", name]].concat());
        assert!(errors(&output).contains("its connections stay with TCP"), "{name}: {output:?}");
    }
    // Where no program gains privileges, the libraries are loaded.
    let nobody = |program: &Path| {
        let line = ["run", "--device", INTERFACE, program.to_str().unwrap()];
        xwarp_as_nobody(&lab, &["--no-new-privs"], &line)
    };
    for output in [
        xwarp(&lab, &["run", "--device", INTERFACE, devices.to_str().unwrap()]),
        nobody(&set_user),
        nobody(&set_group),
    ] {
        assert!(String::from_utf8_lossy(&output.stdout).contains(INTERFACE), "{output:?}");
    }
}

/// The way that the texts of errors name leads to an open device.
#[test]
fn netns_run_works_with_ambient_capabilities() {
    let lab = lab();
    let text = xwarp_driver::RIGHTS_OF_A_USER;
    let (_, options) = text.split_once("--init-groups ").unwrap();
    let (options, _) = options.split_once(" PROGRAM").unwrap();
    let options: Vec<&str> = options.split_whitespace().collect();
    let line = ["run", "--device", INTERFACE, "ibv_devinfo"];
    let output = xwarp_as_nobody(&lab, &options, &line);
    assert!(String::from_utf8_lossy(&output.stdout).contains("PORT_ACTIVE"), "{output:?}");
    let output = xwarp_as_nobody(&lab, &[], &line);
    let said = errors(&output);
    assert!(said.contains("cannot open xw0") && said.contains(text), "{output:?}");
}

/// A program without rights stays with TCP, and otherwise nothing distinguishes it from one over SDP.
#[test]
fn netns_run_sdp_says_once_that_it_lacks_rights() {
    let lab = lab();
    let library = env::current_exe().unwrap().with_file_name("libxwarp_sdp_preload.so");
    // Two connections of one process, both refused by the kernel of side B.
    let connect = format!(": </dev/tcp/{}/9", lab.address(Side::B, Family::V4));
    let script = format!("{connect}; {connect}; exit 3");
    for only in [&["--only"][..], &[]] {
        let options = ["sdp", "--device", INTERFACE, "--library", library.to_str().unwrap()];
        let line = [&options[..], only, &["--", "bash", "-c", &script]].concat();
        let output = xwarp_as_nobody(&lab, &[], &line);
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert_eq!(said.matches("xwarp-sdp: no SDP on xw0").count(), 1, "{said}");
        assert!(said.contains(xwarp_driver::RIGHTS_OF_A_USER), "{said}");
    }
}

#[test]
fn netns_run_warns_of_programs_without_the_dynamic_linker() {
    let lab = lab();
    let source = lab.file("static.c");
    fs::write(&source, "int main(void) { return 7; }\n").unwrap();
    let program = lab.file("static");
    let compiled = Command::new("cc").arg("-static").arg("-o").arg(&program).arg(&source).status().unwrap();
    assert!(compiled.success());
    let output = xwarp(&lab, &["run", program.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(errors(&output).contains("is linked statically: it cannot load"), "{output:?}");
}

/// An installation of root's, which has no links yet.
#[test]
fn netns_run_starts_for_many_users_at_once_from_a_directory_of_root() {
    let lab = lab();
    let installed = lab.file("installed");
    fs::create_dir(&installed).unwrap();
    fs::set_permissions(&installed, fs::Permissions::from_mode(0o755)).unwrap();
    let library = installed.join("libxwarp_compat.so");
    fs::copy(built("libxwarp_compat.so").unwrap(), &library).unwrap();
    let temporary = lab.file("temporary");
    fs::create_dir(&temporary).unwrap();
    fs::set_permissions(&temporary, fs::Permissions::from_mode(0o1777)).unwrap();
    let start = |line: &[&str]| {
        let mut command = lab.command(Side::A, "setpriv");
        command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".to_owned()]);
        command.arg(XWARP).args(line).env("XWARP_LIBRARY", &library).env("TMPDIR", &temporary);
        command.env_remove("XDG_RUNTIME_DIR").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let crowd: Vec<_> = (0..CROWD).map(|_| start(&["run", "true"])).collect();
    for process in crowd {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
    let output = start(&["run", "--device", INTERFACE, "ibv_devices"]).wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains(INTERFACE), "{output:?}");
    assert_eq!(fs::read_dir(&installed).unwrap().count(), 1, "something was written beside the library");

    // Nobody else may prepare the directory of a user.
    let own = fs::read_dir(&temporary).unwrap().next().unwrap().unwrap().path();
    chown(&own, Some(SOMEBODY), Some(SOMEBODY)).unwrap();
    let output = start(&["run", "true"]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(errors(&output).contains("is not a directory that only this user may write"), "{output:?}");
}

/// The lists of devices for scripts are seen by the program alone, and other entries of the directories stay.
#[test]
fn netns_run_lists_devices_in_sysfs_on_request() {
    let lab = lab();
    let script = "cat /sys/class/infiniband/xw0/node_type /sys/class/infiniband/xw0/ports/1/gids/0 \
                  /sys/class/infiniband_verbs/uverbs0/ibdev && ls /sys/class/infiniband/xw0/device/net \
                  /sys/class/net/xw0/address /dev/pts/ptmx && test -c /dev/infiniband/xwarp-xw0 && echo >/dev/null && ibv_devices";
    let output = xwarp(&lab, &["run", "--device", INTERFACE, "--sysfs", "sh", "-c", script]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    for text in
        ["4: RNIC\n", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n", "\nxw0\n", "/sys/class/net/xw0/address\n"]
    {
        assert!(said.contains(text), "no {text:?} in {said}");
    }
    assert!(!Path::new("/dev/infiniband/xwarp-xw0").exists(), "seen outside");
    // The lists show the same kind of device as the library.
    let line = ["run", "--device", INTERFACE, "--as", "roce", "--sysfs", "sh", "-c"];
    let script =
        "cat /sys/class/infiniband/xw0/node_type /sys/class/infiniband/xw0/ports/1/gid_attrs/types/0";
    let output = xwarp(&lab, &[&line[..], &[script]].concat());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1: CA\nRoCE v2\n", "{output:?}");
    // Without the option nothing changes.
    let output = xwarp(&lab, &["run", "--device", INTERFACE, "test", "-e", "/dev/infiniband/xwarp-xw0"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

/// The capture of a program that starts another one with the same environment.
#[test]
fn netns_run_writes_a_capture_for_each_process() {
    let lab = lab();
    let capture = lab.file("capture.pcapng");
    let ip = |line: &str| lab.run(Side::A, "ip", &line.split_whitespace().collect::<Vec<_>>()).unwrap();
    ip("link add two0 type veth peer name two1");
    ip("addr add 10.80.0.1/24 dev two0");
    ip("link set two0 up");
    let start = |device: &str| {
        let mut command = lab.command(Side::A, XWARP);
        command.args(["run", "--device", device, "stdbuf", "-oL", "ibv_asyncwatch"]);
        command.env("XWARP_LIBRARY", built("libxwarp_compat.so").unwrap()).env("XWARP_CAPTURE", &capture);
        let mut running = Running::start(command).unwrap();
        running.wait_for("async event FD", LIMIT).unwrap();
        running
    };
    let (first, second) = (start(INTERFACE), start("two0"));
    let other = lab.file(&format!("capture-{}.pcapng", second.id()));
    assert!(other.exists(), "no {}", other.display());
    for running in [&first, &second] {
        running.signal(Signal::TERM).unwrap();
    }
}

#[test]
fn netns_run_warns_of_bad_variables() {
    let lab = lab();
    for (variable, value, text) in [
        ("XWARP_VENDOR_ID", "acme", "XWARP_VENDOR_ID=acme is no number"),
        (
            "XWARP_PAIRING_PORT",
            "70000",
            "XWARP_PAIRING_PORT=70000 is no number from 0 to 65535: 4794 is used",
        ),
        ("XWARP_ENGINES", "0", "XWARP_ENGINES=0 is no number from 1"),
        ("XWARP_AS", "infiniband", "XWARP_AS=infiniband is none of iwarp, unspecified, roce"),
        ("XWARP_CRC", "maybe", "XWARP_CRC=maybe is none of on, off"),
        ("XWARP_CONGESTION", "vegas", "XWARP_CONGESTION=vegas is none of reno, cubic, dctcp, bbr"),
    ] {
        let mut command = lab.command(Side::A, XWARP);
        command.args(["run", "--device", INTERFACE, "ibv_devices"]).env(variable, value);
        let output = command.env("XWARP_LIBRARY", built("libxwarp_compat.so").unwrap()).output().unwrap();
        assert!(output.status.success() && errors(&output).contains(text), "{variable}: {output:?}");
    }
}
