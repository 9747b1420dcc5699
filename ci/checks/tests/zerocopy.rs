//! AF_XDP in zero-copy mode, which veth does not have: on a network card that qemu emulates, in a virtual machine with a
//! kernel whose `virtio_net` has it. The peer is xwarp in copy mode on the same wire. Emulation says nothing about speed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{path::PathBuf, time::Duration};

use xwarp_checks::{
    lab::Family,
    vm::{Kernel, Near, Vm, VmOptions, built, bundle},
};

const SHORT: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(120);

/// A machine with zero-copy, and a namespace on its wire.
struct Wire {
    machine: Vm,
    near: Near,
    share: PathBuf,
}

impl Wire {
    fn new(name: &str, mtu: u32) -> Self {
        let share = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
        bundle(&built("xwarp-perf").unwrap(), &share).unwrap();
        let options =
            VmOptions { kernel: Kernel::Newest, mtu, share: Some(share.clone()), ..VmOptions::default() };
        let machine = Vm::boot(&options).unwrap();
        let near = machine.attach(1).unwrap();
        Self { machine, near, share }
    }

    /// Runs a test with the server in the machine, and returns the output of server and client.
    fn machine_serves(&self, test: &str, family: Family, mode: &str) -> (String, String) {
        let mut server = self.machine.spawn(&end_inside(test, mode)).unwrap();
        server.wait_for("Waiting for a client", SHORT).unwrap();
        let mut client = self.near_end(test, Some(self.machine.address(family).to_string()));
        let status = client.wait(LONG).unwrap();
        assert!(status.success(), "{test}: {}", client.output());
        (server.succeed(SHORT).unwrap(), client.output())
    }

    /// The same with the client in the machine.
    fn machine_asks(&self, test: &str, family: Family, mode: &str) -> (String, String) {
        let mut server = self.near_end(test, None);
        server.wait_for("Waiting for a client", SHORT).unwrap();
        let to = self.near.address(family);
        let said = self.machine.check(&format!("{} {to}", end_inside(test, mode)), LONG).unwrap();
        assert!(server.wait(SHORT).unwrap().success(), "{test}: {}", server.output());
        (server.output(), said)
    }

    fn near_end(&self, test: &str, server: Option<String>) -> xwarp_checks::process::Running {
        let mut args: Vec<&str> = test.split_whitespace().collect();
        args.extend(["-d", "xw0", "--mode", "copy"]);
        args.extend(server.as_deref());
        self.near.start(built("xwarp-perf").unwrap(), &args).unwrap()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.share);
    }
}

/// The command of a test's end in the machine.
fn end_inside(test: &str, mode: &str) -> String {
    format!("/host/xwarp-perf {test} -d eth0 --mode {mode} --stats")
}

/// The value of a counter that `--stats` printed.
fn counter(said: &str, name: &str) -> u64 {
    let line = said.lines().find(|line| line.trim_start().starts_with(name));
    line.and_then(|line| line.split_whitespace().nth(1)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Sends, Writes and Reads in both directions, with both ends polling and both asleep, compared byte for byte.
#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn zerocopy_carries_every_verb_in_both_directions() {
    let wire = Wire::new("zerocopy_verbs", 1500);
    for (number, test) in ["send_bw", "write_bw -e", "read_bw", "send_bw -e", "read_bw -e"].iter().enumerate()
    {
        let test = format!("{test} --verify -s 65536 -n 50");
        let family = if number.is_multiple_of(2) { Family::V4 } else { Family::V6 };
        let (inside, outside) = wire.machine_serves(&test, family, "zerocopy");
        assert!(inside.contains("XDP mode        : zero-copy"), "{test}: {inside}");
        assert!(outside.contains("XDP mode        : copy"), "{test}: {outside}");
        assert!(outside.contains("all as they were sent"), "{test}: {outside}");
        let (_, inside) = wire.machine_asks(&test, family, "zerocopy");
        assert!(inside.contains("XDP mode        : zero-copy"), "{test}: {inside}");
        assert!(inside.contains("all as they were sent"), "{test}: {inside}");
    }
}

/// A device gets zero-copy by default, and the kernel is woken only when it requests a wake-up.
#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn zerocopy_is_the_first_choice_and_kicks_are_fewer_than_frames() {
    let wire = Wire::new("zerocopy_kicks", 1500);
    let (_, inside) = wire.machine_asks("write_bw --verify -s 65536 -n 50", Family::V4, "auto");
    assert!(inside.contains("XDP mode        : zero-copy"), "{inside}");
    let (kicks, frames) = (counter(&inside, "link.kicks"), counter(&inside, "link.sent_frames"));
    assert!(0 < kicks && 2 * kicks < frames, "{kicks} kicks for {frames} frames:\n{inside}");
}

/// `virtio_net` has no zero-copy mode for frames of several chunks, nor for single chunks where the MTU is longer than
/// one: a device with the default mode gets long frames in copy mode, and reports it.
#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn zerocopy_gives_way_to_frames_of_several_chunks() {
    let wire = Wire::new("zerocopy_large", 9000);
    let (inside, outside) = wire.machine_serves("send_bw --verify -s 65536 -n 20", Family::V4, "auto");
    assert!(outside.contains("all as they were sent"), "{outside}");
    assert!(
        inside.contains("XDP mode        : copy") && inside.contains("Mtu             : 9000[B]"),
        "{inside}"
    );
    let insisting = "/host/xwarp-perf send_bw -d eth0 --mode zerocopy";
    let refused = wire.machine.run(insisting, SHORT).unwrap();
    assert_eq!(refused.status, Some(1), "{}", refused.text());
    assert!(refused.stderr.contains("does not support zero-copy mode"), "{}", refused.stderr);
}
