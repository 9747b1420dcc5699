//! Our rping (an example of xwarp-verbs) and the one of rdmacm-utils over Linux Soft-iWARP, in both roles.
//! What passed between them is read by Wireshark and by our own second reading of MPA.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;
use xwarp_checks::{
    capture,
    framing::{self, Connection},
    lab::{Family, INTERFACE},
    process::Running,
    siw_vm::{Job, Near, Siw, SiwVm, VmOptions},
    tshark::{self, Verdict},
};

const SHORT: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(120);
/// Of rping.
const PORT: u16 = 7174;

/// The example, where cargo puts it beside this test.
fn rping() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.ancestors().nth(2).unwrap().join("examples/rping");
    assert!(path.exists(), "{} is missing: cargo build --workspace --all-targets", path.display());
    path
}

/// A machine and a namespace on its wire, with a capture of what passes.
struct Stage {
    vm: SiwVm,
    near: Near,
}

impl Stage {
    fn new(siw: Siw) -> Self {
        let vm = SiwVm::boot(&VmOptions { siw, ..VmOptions::default() }).unwrap();
        let near = vm.attach(1).unwrap();
        Self { vm, near }
    }

    /// rping as a server in the machine.
    fn server(&self, family: Family, size: usize) -> Job {
        let address = self.vm.address(family);
        let server = self.vm.spawn(&format!("rping -s -v -a {address} -S {size}")).unwrap();
        self.vm.wait_listening(PORT, SHORT).unwrap();
        server
    }

    /// Our rping as a client of it.
    fn client(&self, family: Family, size: usize, more: &[&str]) -> Running {
        let (address, size) = (self.vm.address(family).to_string(), size.to_string());
        let mut words = vec![INTERFACE, "-c", "-a", &address, "-S", &size];
        words.extend(more);
        self.near.start(rping(), &words).unwrap()
    }

    /// Our rping as a server.
    fn our_server(&self, family: Family, size: usize, more: &[&str]) -> Running {
        let (address, size) = (self.near.address(family).to_string(), size.to_string());
        let mut words = vec![INTERFACE, "-s", "-a", &address, "-S", &size];
        words.extend(more);
        let mut server = self.near.start(rping(), &words).unwrap();
        server.wait_for("listening", SHORT).unwrap();
        server
    }

    /// rping as a client in the machine; verifies what it gets back.
    fn siw_client(&self, family: Family, size: usize, count: usize) -> Job {
        let address = self.near.address(family);
        self.vm.spawn(&format!("rping -c -v -V -a {address} -S {size} -C {count}")).unwrap()
    }

    /// Keeping FPDUs and segments aligned is asked of us; siw leaves it to TCP how its bytes are cut.
    fn is_siws(&self, fault: &str) -> bool {
        let from_siw = [Family::V4, Family::V6].iter().any(|family| {
            let address = SocketAddr::new(self.vm.address(*family), 0).to_string();
            fault.starts_with(address.trim_end_matches('0'))
        });
        from_siw && fault.ends_with("does not begin with an FPDU")
    }

    /// Runs `work` while the wire is recorded, and returns what the judges say of the record.
    fn judged(&self, name: &str, work: impl FnOnce()) -> (Verdict, Vec<Connection>) {
        let path = std::env::temp_dir().join(format!("{name}-{}.pcapng", std::process::id()));
        let recording = self.vm.capture(&path).unwrap();
        work();
        recording.finish().unwrap();
        let verdict = tshark::judge(&path, false).unwrap();
        assert!(verdict.complaints.is_empty(), "{}: {:?}", path.display(), verdict.complaints);
        let connections = framing::connections(&capture::streams(&path).unwrap());
        let faults: Vec<&String> =
            connections.iter().flat_map(|c| &c.faults).filter(|fault| !self.is_siws(fault)).collect();
        assert!(faults.is_empty(), "{}: {faults:?}", path.display());
        forget(&path);
        (verdict, connections)
    }
}

fn forget(path: &Path) {
    std::fs::remove_file(path).unwrap();
}

#[test]
fn siw_rping_serves_us() {
    let stage = Stage::new(Siw::Tunable);
    let (verdict, connections) = stage.judged("siw_rping_serves_us", || {
        for (family, size, more) in [
            (Family::V4, 64, &["-C", "20", "--markers", "off"][..]),
            (Family::V6, 64, &["-C", "20", "--markers", "off"]),
            (Family::V4, 4001, &["-C", "10", "--markers", "off"]),
            (Family::V6, 65535, &["-C", "5", "--markers", "off"]),
            (Family::V4, 20000, &["-C", "5", "--markers", "off", "--no-crc"]),
            (Family::V4, 64, &["-C", "5", "--markers", "off", "--private-data", "252"]),
        ] {
            let mut server = stage.server(family, size);
            let said = stage.client(family, size, more).finish(LONG).unwrap();
            assert!(said.contains(" rounds"), "{said}");
            // The server takes the end of its only client for an error only when it comes in a round.
            assert_eq!(server.wait(SHORT).unwrap().status, Some(0));
        }
    });
    assert_eq!(connections.len(), 6);
    assert_eq!(connections.iter().filter(|c| c.crc).count(), 5);
    assert!(connections.iter().all(|c| c.revision == 2 && c.terminates == 0 && c.markers == (false, false)));
    assert!(verdict.good_crcs > 200, "{verdict:?}");
}

#[test]
fn siw_rping_asks_us() {
    let stage = Stage::new(Siw::Tunable);
    let (verdict, connections) = stage.judged("siw_rping_asks_us", || {
        for (family, size, count, tuned) in [
            (Family::V4, 64, 20, ("mpa_crc_required", "0")),
            (Family::V6, 64, 20, ("mpa_crc_required", "1")),
            (Family::V4, 4001, 10, ("peer_to_peer", "1")),
            (Family::V6, 65535, 5, ("rtr_write", "0")),
        ] {
            stage.vm.tune(tuned.0, tuned.1).unwrap();
            let server = stage.our_server(family, size, &[]);
            let said = stage.siw_client(family, size, count).succeed(LONG).unwrap();
            assert_eq!(said.matches("ping data:").count(), count, "{tuned:?}");
            let said = server.finish(SHORT).unwrap();
            assert!(said.contains(&format!("{count} rounds, the client disconnected")), "{said}");
        }
    });
    assert_eq!(connections.len(), 4);
    // We always ask for CRC; siw never asks for markers.
    assert!(connections.iter().all(|c| c.crc && c.revision == 2 && c.terminates == 0));
    assert!(verdict.good_crcs > 200, "{verdict:?}");
}

#[test]
fn siw_rping_falls_back_without_markers() {
    let stage = Stage::new(Siw::Tunable);
    let _server = stage.vm.spawn("rping -s -P").unwrap();
    stage.vm.wait_listening(PORT, SHORT).unwrap();
    let said = stage.client(Family::V4, 64, &["-C", "3"]).finish(SHORT).unwrap();
    assert!(said.contains("3 rounds"), "{said}");
    let mut refused = stage.client(Family::V4, 64, &["-C", "3", "--markers", "require"]);
    assert!(!refused.wait(SHORT).unwrap().success());
    assert!(refused.output().contains("markers"), "{}", refused.output());
}

#[test]
fn siw_rping_is_rejected_and_refused() {
    let stage = Stage::new(Siw::Pristine);
    let server = stage.our_server(Family::V4, 64, &["--reject", "--private-data", "100"]);
    let rejected = stage.siw_client(Family::V4, 64, 1).wait(SHORT).unwrap();
    assert_ne!(rejected.status, Some(0), "{}", rejected.text());
    assert!(rejected.text().contains("RDMA_CM_EVENT_REJECTED"), "{}", rejected.text());
    server.finish(SHORT).unwrap();
    // Nobody listens in the machine.
    let mut refused = stage.client(Family::V4, 64, &[]);
    assert!(!refused.wait(SHORT).unwrap().success());
    assert!(refused.output().contains("refused"), "{}", refused.output());
}

#[test]
fn siw_rping_survives_the_death_of_a_peer() {
    let stage = Stage::new(Siw::Tunable);
    // Our process is killed: the kernel, which knows nothing of the connection, resets it.
    let mut server = stage.server(Family::V4, 20000);
    let mut client = stage.client(Family::V4, 20000, &["-C", "100000", "-v", "--markers", "off"]);
    client.wait_for("rdma-ping-10:", LONG).unwrap();
    client.signal(Signal::KILL).unwrap();
    client.wait(SHORT).unwrap();
    server.wait_for("DISCONNECT EVENT", SHORT).unwrap();
    drop(server);
    // The machine is killed: nobody says anything any more.
    let mut server = stage.our_server(Family::V4, 20000, &["--wait", "10", "-v"]);
    let _client = stage.siw_client(Family::V4, 20000, 100_000);
    server.wait_for("rdma-ping-10:", LONG).unwrap();
    stage.vm.kill().unwrap();
    assert!(!server.wait(SHORT).unwrap().success(), "{}", server.output().len());
}

#[test]
fn siw_rping_gets_through_loss_and_disorder() {
    let stage = Stage::new(Siw::Tunable);
    // What the machine sends, and what it receives, by way of an intermediate device.
    for command in [
        "tc qdisc add dev eth0 root netem delay 2ms loss 2% reorder 5% limit 1000",
        "modprobe ifb numifbs=1 && ip link set ifb0 up",
        "modprobe sch_ingress && tc qdisc add dev eth0 ingress",
        "modprobe act_mirred && tc filter add dev eth0 parent ffff: matchall action mirred egress redirect dev ifb0",
        "tc qdisc add dev ifb0 root netem delay 2ms loss 2% reorder 5% limit 1000",
    ] {
        stage.vm.check(command, SHORT).unwrap();
    }
    let mut server = stage.server(Family::V4, 60000);
    let said = stage.client(Family::V4, 60000, &["-C", "10", "--markers", "off"]).finish(LONG).unwrap();
    assert!(said.contains("10 rounds"), "{said}");
    server.wait(SHORT).unwrap();
    let server = stage.our_server(Family::V4, 60000, &[]);
    stage.siw_client(Family::V4, 60000, 10).succeed(LONG).unwrap();
    server.finish(SHORT).unwrap();
}
