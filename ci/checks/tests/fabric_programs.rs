//! The distribution's RDMA programs under `xwarp run --fabric`, as a user without any capability. They need no namespace, no interface
//! and no root; as root, the tests become `nobody` first.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use xwarp_checks::documents::root;
use xwarp_checks::process::Running;
use xwarp_checks::pyverbs::{expected, found};
use xwarp_checks::user::{LIMIT, User, finish};

/// Whether only its owner may enter a directory.
fn is_private(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(directory).is_ok_and(|found| found.mode().trailing_zeros() >= 6)
}

/// What a program has said so far.
fn so_far(running: &mut Running) -> String {
    running.arrived().join("\n")
}

/// Starts a client, again if it came too early, and waits until its server says `words`.
fn start_until(user: &User, client: &str, serving: &mut Running, words: &str) -> Running {
    let mut running = user.start(client);
    let end = Instant::now() + LIMIT;
    while !so_far(serving).contains(words) {
        assert!(Instant::now() < end, "{}", so_far(serving));
        if running.wait(Duration::from_millis(1)).is_ok() {
            running = user.start(client);
        }
        thread::sleep(Duration::from_millis(5));
    }
    running
}

#[test]
fn fabric_rping_runs_without_privileges() {
    let user = User::new("rping");
    assert!(user.run("fabric show").contains("does not run"));
    let client = "run --fabric rping -c -a 127.0.0.1 -C 5 -V -v";
    let said = user.pair("run --fabric rping -s -C 5 -V", client);
    assert_eq!(said.matches("rdma-ping-").count(), 5, "{said}");
    user.pair("run --fabric rping -s -a ::1 -C 3 -V -S 4001", "run --fabric rping -c -a ::1 -C 3 -V -S 4001");
    let shown = user.run("fabric show");
    assert!(shown.contains("localhost") && shown.contains("fabric.carried"), "{shown}");
    assert!(is_private(&user.directory().join("xwarp")), "others may enter");
    let devices = user.run("run --fabric ibv_devinfo -v");
    assert!(devices.contains("fabric") && devices.contains("PORT_ACTIVE"), "{devices}");
    // It ends when it is told to, and starts again.
    user.run("fabric stop");
    assert!(user.run("fabric show").contains("does not run"));
    user.run("fabric start");
    user.run("fabric start");
    assert!(user.run("fabric show").contains("localhost"));
}

#[test]
fn fabric_perftest_measures_by_the_manager_and_by_number() {
    let user = User::new("perftest");
    for (program, options) in [
        ("ib_write_bw", "-R -F -n 50 -s 65536"),
        ("ib_send_bw", "-R -F -n 50 -s 4096"),
        ("ib_read_bw", "-R -F -n 50 -s 65536"),
        ("ib_send_lat", "-R -F -n 50 -s 64 -e"),
        ("ib_write_lat", "-F -n 50 -x 0"),
        ("ib_atomic_bw", "-F -n 50 -x 0"),
    ] {
        let line = format!("run --fabric {program} {options}");
        let said = user.pair(&line, &format!("{line} localhost"));
        assert!(
            said.lines().any(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit())),
            "{said}"
        );
    }
    user.pair("run --fabric ibv_rc_pingpong -g 0 -n 50", "run --fabric ibv_rc_pingpong -g 0 -n 50 localhost");
}

#[test]
fn fabric_hosts_find_each_other_by_name() {
    let user = User::new("hosts");
    // The numbers of hosts are in the order in which they come.
    for host in ["a", "b"] {
        user.run(&format!("run --fabric --host {host} true"));
    }
    let rping = |host: &str, rest: &str| format!("run --fabric --host {host} rping {rest}");
    user.pair(&rping("a", "-s -C 3 -V"), &rping("b", "-c -a a -C 3 -V"));
    user.pair(&rping("a", "-s -a fd77:7761:7270::1 -C 3 -V"), &rping("b", "-c -a fd77:7761:7270::1 -C 3 -V"));
    // A host reaches itself by its name and as localhost.
    for address in ["a", "localhost"] {
        user.pair(&rping("a", "-s -C 3 -V"), &rping("a", &format!("-c -a {address} -C 3 -V")));
    }
    // By numbers that are exchanged over the kernel's TCP.
    let write = "ib_write_lat -F -n 20 -x 0";
    user.pair(
        &format!("run --fabric --host a {write}"),
        &format!("run --fabric --host b {write} 127.77.0.1"),
    );
    // By the connection manager's own look-up.
    user.pair("run --fabric --host a rdma_server", "run --fabric --host b rdma_client -s a");
    let shown = user.run("fabric show");
    assert!(shown.contains("127.77.0.2") && shown.contains("fd77:7761:7270::2"), "{shown}");
    // localhost is no part of the others' network.
    let (success, said) = user.outcome("run --fabric rping -c -a a -C 1");
    assert!(!success, "{said}");
}

#[test]
fn fabric_a_killed_program_leaves_nothing() {
    let user = User::new("killed");
    let mut serving = user.start("run --fabric stdbuf -oL rping -s -a 127.0.0.1 -C 100000 -v");
    let client = "run --fabric stdbuf -oL rping -c -a 127.0.0.1 -C 100000 -v";
    let client = start_until(&user, client, &mut serving, "rdma-ping-10:");
    serving.signal(Signal::KILL).unwrap();
    serving.wait(LIMIT).unwrap();
    let begin = Instant::now();
    let (_, said) = finish(client);
    assert!(said.contains("DISCONNECT"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(15), "it was not told: {:?}", begin.elapsed());
    // The port is free.
    user.pair("run --fabric rping -s -a 127.0.0.1 -C 2", "run --fabric rping -c -a 127.0.0.1 -C 2");
}

/// Faults between hosts while programs run: TCP and MPA mend them, a cut stops the bytes, and its end lets them go on.
#[test]
fn fabric_faults_are_mended_and_cuts_heal() {
    let user = User::new("faults");
    for host in ["a", "b"] {
        user.run(&format!("run --fabric --host {host} true"));
    }
    let (success, said) = user.outcome("fabric set a c --loss 1%");
    assert!(!success && said.contains("no host"), "{said}");
    let (success, said) = user.outcome("fabric set a b --loss 200%");
    assert!(!success && said.contains("probability"), "{said}");
    user.run("fabric set a b --loss 3% --reorder 5% --reorder-by 1ms --duplicate 2% --corrupt 1% --delay 1ms --seed 7");
    user.pair(
        "run --fabric --host a rping -s -C 100 -S 2000 -V",
        "run --fabric --host b rping -c -a a -C 100 -S 2000 -V",
    );
    let shown = user.run("fabric show");
    assert!(shown.contains("fabric.faulty"), "{shown}");
    // A cut in the middle: with this delay it takes seconds.
    user.run("fabric set a b --clear --delay 1ms");
    let line = "stdbuf -oL rping -v -C 600 -S 100";
    let mut serving = user.start(&format!("run --fabric --host a {line} -s"));
    let client = format!("run --fabric --host b {line} -c -a a");
    let client = start_until(&user, &client, &mut serving, "rdma-ping-20:");
    user.run("fabric cut a b");
    // Nothing is on its way any more.
    let mut before = so_far(&mut serving).len();
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = so_far(&mut serving).len();
        if now == before {
            break;
        }
        before = now;
    }
    assert!(!so_far(&mut serving).contains("rdma-ping-599"), "it has ended before the cut");
    user.run("fabric heal a b");
    serving.wait_for("rdma-ping-599", LIMIT).unwrap();
    let (success, said) = finish(client);
    assert!(success, "{said}");
}

/// A cut that hits a moment of a test: it begins with a frame, and ends by itself.
#[test]
fn fabric_a_cut_begins_after_frames_and_ends() {
    let user = User::new("moment");
    for host in ["a", "b"] {
        user.run(&format!("run --fabric --host {host} true"));
    }
    let (success, said) = user.outcome("fabric cut a b --after soon");
    assert!(!success && said.contains("not a time"), "{said}");
    user.run("fabric cut a b --after 40 --for 300ms");
    assert!(!user.run("fabric show").contains("fabric.cut"), "it has not begun");
    user.pair("run --fabric --host a rping -s -C 50 -V", "run --fabric --host b rping -c -a a -C 50 -V");
    let shown = user.run("fabric show");
    assert!(shown.contains("fabric.cut"), "{shown}");
}

#[test]
fn fabric_programs_end_with_it() {
    let user = User::new("ends");
    let mut serving = user.start("run --fabric rping -s -a 127.0.0.1 -C 2");
    let end = Instant::now() + LIMIT;
    while !user.run("fabric show").contains("1 devices") {
        assert!(Instant::now() < end, "{}", so_far(&mut serving));
        thread::sleep(Duration::from_millis(20));
    }
    user.run("fabric stop");
    serving.wait_for("the device fabric has ended", LIMIT).unwrap();
}

/// A file of `tests/compat`.
fn compat_file(name: &str) -> String {
    root().join("ci/checks/tests/compat").join(name).display().to_string()
}

/// libfabric looks for the addresses of the host and, as every program may, loads the libraries after libc.
#[test]
fn fabric_libfabric_finds_the_addresses_and_verifies_data() {
    let user = User::new("libfabric");
    for (host, address) in [("--host a", "127.77.0.1"), ("--host b", "127.77.0.2"), ("", "127.0.0.1")] {
        let said = user.run(&format!("run --fabric {host} fi_info -p verbs -v"));
        assert!(said.contains("FI_PROTO_IWARP") && said.contains(address), "{said}");
    }
    let transfers = [
        ("-p verbs -e msg -I 50 -c", ["--host a", "--host b"], "a"),
        ("-p verbs;ofi_rxm -e rdm -I 50 -c", ["--host a", "--host b"], "127.77.0.1"),
        ("-p verbs -e msg -I 50 -c", ["", ""], "localhost"),
    ];
    for (options, hosts, address) in transfers {
        // Server and client exchange addresses over the kernel's TCP.
        let [server, client] = hosts.map(|host| format!("run --fabric {host} fi_pingpong {options}"));
        let said = user.pair(&server, &format!("{client} {address}"));
        assert!(said.lines().any(|line| line.starts_with("1m ")), "{said}");
    }
}

/// Two ranks of one host, by libfabric: messages of many lengths and sums over iWARP, and synchronous sends, which need the other face.
#[test]
fn fabric_mpi_delivers_right_data() {
    let user = User::new("mpi");
    for (program, face, words) in [("ring", "iwarp", "data are right"), ("ssend", "roce", "200 rounds")] {
        let compiled = user.directory().join(program);
        let source = compat_file(&format!("{program}.c"));
        assert!(Command::new("mpicc").arg("-o").arg(&compiled).arg(source).status().unwrap().success());
        let mut command = user.xwarp(&format!("run --fabric --as {face} mpirun --oversubscribe -np 2"));
        command.args(["--mca", "pml", "cm", "--mca", "mtl", "ofi"]);
        command.args(["--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm"]).arg(compiled);
        // Ranks that poll share two processors with everything else.
        command.env("OMPI_MCA_mpi_yield_when_idle", "1");
        let (success, said) = finish(Running::start(command).unwrap());
        assert!(success && said.matches(words).count() == 2, "{said}");
    }
}

/// The runtime of `AddressSanitizer` ends programs with a library before it, as a preloaded one is.
#[test]
fn fabric_programs_with_address_sanitizer_start() {
    let user = User::new("sanitized");
    let program = user.directory().join("gid");
    let source = compat_file("gid.c");
    let options = ["-fsanitize=address", "-o"];
    let built = Command::new("gcc")
        .args(options)
        .args([program.display().to_string(), source])
        .arg("-libverbs")
        .status();
    assert!(built.unwrap().success());
    let mut command = user.xwarp(&format!("run --fabric {}", program.display()));
    command.env("ASAN_OPTIONS", "detect_leaks=0");
    let (success, said) = finish(Running::start(command).unwrap());
    assert!(success && said.contains("gid type"), "{said}");
}

/// The receiver of fio compares checksums in the blocks that the sender writes.
#[test]
fn fabric_fio_verifies_data() {
    let user = User::new("fio");
    let job = |name: &str, options: &str| {
        let common = "ioengine=rdma\nport=7101\nbs=16k\nsize=2m\niodepth=4\nthread=1\nverify_state_save=0\n";
        let file = user.directory().join(name);
        fs::write(&file, format!("[job]\n{common}{options}")).unwrap();
        format!("run --fabric fio {}", file.display())
    };
    let receiver = job("receive", "rw=read\nverify=crc32c\n");
    for (checksums, words) in [("verify=crc32c\ndo_verify=0\n", "err= 0"), ("", "verify: bad magic header")] {
        let sender = job("send", &format!("rw=write\nhostname=127.0.0.1\nverb=send\n{checksums}"));
        let mut receiving = user.start(&receiver);
        let end = Instant::now() + LIMIT;
        let mut sending = user.start(&sender);
        // A sender that comes too early is refused, and ends with success. One that is refused later does not end.
        while receiving.wait(Duration::from_millis(300)).is_err() {
            assert!(Instant::now() < end, "{}", so_far(&mut receiving));
            if sending.wait(Duration::from_millis(1)).is_ok() {
                sending = user.start(&sender);
            }
        }
        let (success, said) = finish(receiving);
        assert!(success != checksums.is_empty() && said.contains(words), "{said}");
    }
}

/// pyverbs' own tests end as over AF_XDP, except those of the connection manager, which look for the device in `/sys`.
#[test]
fn fabric_pyverbs_own_suite_ends_as_expected() {
    let user = User::new("pyverbs");
    let copy = user.directory().join("suite");
    let said = user.run(&format!(
        "run --fabric python3 {} {} --dev fabric",
        compat_file("pyverbs_suite.py"),
        copy.display()
    ));
    // The suite is that of this machine's release.
    let is_here = |suite: &'static str| xwarp_checks::lab::distribution(suite).is_none();
    let outcomes = match ["bookworm", "trixie"].map(is_here) {
        [true, _] => "pyverbs_outcomes.txt",
        [_, true] => "pyverbs_outcomes_debian_13.txt",
        _ => "pyverbs_outcomes_sid.txt",
    };
    let text = fs::read_to_string(compat_file(outcomes)).unwrap();
    let (expected, found) = (expected(&text), found(&said).unwrap_or_else(|| panic!("{said}")));
    assert!(expected.keys().eq(found.keys()), "other tests: {said}");
    for (name, (outcome, reason)) in found {
        let has_no_interface = outcome == "skip" && reason.contains("doesn't have net interface");
        assert!(outcome == expected[name].0 || has_no_interface, "{outcome} {name}: {reason}");
    }
}
