//! The machines themselves: Soft-iWARP with itself, and xwarp with itself on the machine's kernel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{thread, time::Duration};

use xwarp_checks::{
    lab::Family,
    tshark,
    vm::{Kernel, Vm, VmOptions, built, bundle},
};

const SHORT: Duration = Duration::from_secs(20);
const LONG: Duration = Duration::from_secs(90);

#[test]
fn siw_talks_to_siw() {
    let server = Vm::boot(&VmOptions { kernel: Kernel::TunableSiw, ..VmOptions::default() }).unwrap();
    let client = server
        .boot_beside(&VmOptions { kernel: Kernel::TunableSiw, host: 3, ..VmOptions::default() })
        .unwrap();
    client.tune("mpa_crc_required", "1").unwrap();
    let path = std::env::temp_dir().join(format!("siw_talks_to_siw-{}.pcapng", std::process::id()));
    let capture = server.capture(&path).unwrap();
    for family in [Family::V4, Family::V6] {
        let to = server.address(family);
        let mut listening = server.spawn(&format!("rping -s -v -a {to} -C 20 -S 4000")).unwrap();
        // rping prints nothing when it starts to listen.
        thread::sleep(Duration::from_secs(1));
        let said = client.check(&format!("rping -c -v -V -a {to} -C 20 -S 4000"), LONG).unwrap();
        assert_eq!(said.matches("ping data:").count(), 20, "{said}");
        // The server's last output reports the disconnection, which it treats as an error.
        assert!(listening.wait(SHORT).unwrap().stdout.contains("server ping data"));
    }
    capture.finish().unwrap();
    let verdict = tshark::judge(&path, false).unwrap();
    assert!(verdict.complaints.is_empty(), "{:?}", verdict.complaints);
    assert!(verdict.good_crcs > 100, "{verdict:?}");
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn siw_machine_runs_commands_like_a_shell() {
    let machine = Vm::boot(&VmOptions::default()).unwrap();
    let finished = machine.run("echo out; echo 'it''s' >&2; exit 7", SHORT).unwrap();
    assert_eq!(finished.status, Some(7));
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "its\n"));
    // Large binary output, while another command runs.
    let mut sleeper = machine.spawn("echo awake; exec sleep 100").unwrap();
    sleeper.wait_for("awake", SHORT).unwrap();
    let many = machine.check("seq 100000", LONG).unwrap();
    assert_eq!(many.lines().count(), 100_000);
    sleeper.signal("TERM").unwrap();
    assert_eq!(sleeper.wait(SHORT).unwrap().status, Some(128 + 15));
    let hung = machine.run("echo before; sleep 100", Duration::from_secs(1)).unwrap_err().to_string();
    assert!(hung.contains("still ran") && hung.contains("before"), "{hung}");
    assert!(machine.check("ibv_devinfo -d siw0", SHORT).unwrap().contains("PORT_ACTIVE"));
    machine.kill().unwrap();
    machine.run("true", SHORT).unwrap_err();
}

/// A command may end while its output so far is requested: it is answered once.
#[test]
fn siw_machine_tells_of_commands_that_end_meanwhile() {
    let machine = Vm::boot(&VmOptions::default()).unwrap();
    for round in 0..20 {
        let mut job = machine.spawn(&format!("echo {round}; exit 3")).unwrap();
        let finished = loop {
            let so_far = job.output().unwrap();
            if so_far.status.is_some() {
                break so_far;
            }
        };
        assert_eq!((finished.status, finished.stdout), (Some(3), format!("{round}\n")));
    }
}

/// Both ends on Debian's kernel 6.1, with its AF_XDP and veth.
#[test]
fn siw_machine_kernel_runs_xwarp() {
    let share = std::env::temp_dir().join(format!("siw_machine_kernel_runs_xwarp-{}", std::process::id()));
    bundle(&built("xwarp-perf").unwrap(), &share).unwrap();
    let machine = Vm::boot(&VmOptions { share: Some(share.clone()), ..VmOptions::default() }).unwrap();
    for command in [
        "ip netns add a && ip netns add b && ip link add xw0 netns a type veth peer name xw0 netns b",
        "ip -n a addr add 10.78.0.1/24 dev xw0 && ip -n a link set xw0 up",
        "ip -n b addr add 10.78.0.2/24 dev xw0 && ip -n b link set xw0 up",
    ] {
        machine.check(command, SHORT).unwrap();
    }
    for (test, mode) in [("write_bw", "copy"), ("read_bw", "copy"), ("send_bw", "generic")] {
        let line = format!("/host/xwarp-perf {test} -e --verify -d xw0 --mode {mode} -s 65536 -n 50");
        let mut server = machine.spawn(&format!("ip netns exec b {line}")).unwrap();
        server.wait_for("Waiting for a client", SHORT).unwrap();
        let said = machine.check(&format!("ip netns exec a {line} 10.78.0.2"), LONG).unwrap();
        assert!(said.contains("65536      50 "), "{test}: {said}");
        server.succeed(SHORT).unwrap();
    }
    std::fs::remove_dir_all(&share).unwrap();
}

/// A client without privileges behind `xwarpd`, on Debian's kernel 6.1, which does not map the rings of a bound socket.
#[test]
fn siw_machine_kernel_shares_its_interface() {
    let name = "siw_machine_kernel_shares_its_interface";
    let share = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
    for program in ["xwarp-perf", "xwarpd"] {
        bundle(&built(program).unwrap(), &share).unwrap();
    }
    let machine = Vm::boot(&VmOptions { share: Some(share.clone()), ..VmOptions::default() }).unwrap();
    for command in [
        "ip netns add a && ip netns add b && ip link add xw0 netns a type veth peer name xw0 netns b",
        "ip -n a addr add 10.78.0.1/24 dev xw0 && ip -n a link set xw0 up",
        "ip -n b addr add 10.78.0.2/24 dev xw0 && ip -n b link set xw0 up",
        "ip netns add empty && echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd",
    ] {
        machine.check(command, SHORT).unwrap();
    }
    let mut helper =
        machine.spawn("ip netns exec a /host/xwarpd xw0 --socket /run/xwarpd.sock --mode 666 2>&1").unwrap();
    helper.wait_for("ready", SHORT).unwrap();
    // With its own limit on locked memory, and with none, when xwarpd registers the memory.
    for (locked, test) in [("unlimited", "write_bw"), ("0", "read_bw")] {
        let line = format!("{test} -e --verify -d xw0 -s 65536 -n 50");
        let mut server =
            machine.spawn(&format!("ip netns exec b /host/xwarp-perf {line} --mode copy")).unwrap();
        server.wait_for("Waiting for a client", SHORT).unwrap();
        let client = format!(
            "ulimit -l {locked}; exec ip netns exec empty busybox su -s /bin/sh nobody -c \
             'XWARP_HELPER=/run/xwarpd.sock /host/xwarp-perf {line} 10.78.0.2'"
        );
        let said = machine.check(&client, LONG).unwrap();
        assert!(said.contains("65536      50 "), "{test}: {said}");
        server.succeed(SHORT).unwrap();
    }
    helper.signal("TERM").unwrap();
    helper.wait(SHORT).unwrap();
    std::fs::remove_dir_all(&share).unwrap();
}
