//! Our rping (an example of xwarp-verbs) and the one of rdmacm-utils over Linux Soft-iWARP, in both roles.
//! Wireshark and our own MPA parser check the traffic.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::time::Duration;

use xwarp_checks::{
    lab::{Family, INTERFACE},
    process::Running,
    vm::{Ending, Job, Kernel, LONG, SHORT, Stage},
};

/// Port of rping.
const PORT: u16 = 7174;

/// Starts rping as a server in the machine.
fn server(stage: &Stage, family: Family, size: usize) -> Job {
    stage.serve(&format!("rping -s -v -a {} -S {size}", stage.vm.address(family)), PORT).unwrap()
}

/// Starts our rping as its client.
fn client(stage: &Stage, family: Family, size: usize, more: &str) -> Running {
    let line = format!("{INTERFACE} -c -a {} -S {size} {more}", stage.vm.address(family));
    stage.start("examples/rping", &line).unwrap()
}

/// Starts our rping as a server.
fn our_server(stage: &Stage, family: Family, size: usize, more: &str) -> Running {
    stage.serve_ours("rping", &format!("-a {} -S {size} {more}", stage.near.address(family))).unwrap()
}

/// Starts rping as a client in the machine; it verifies the returned data.
fn siw_client(stage: &Stage, family: Family, size: usize, count: usize) -> Job {
    let address = stage.near.address(family);
    stage.vm.spawn(&format!("rping -c -v -V -a {address} -S {size} -C {count}")).unwrap()
}

/// Waits until rping in the machine has received `count` pings and has exited. At its end, rping closes the event channel that
/// another of its threads reads; if that thread notices before the process is gone, it exits with an error of this call.
fn finish_pings(mut rping: Job, limit: Duration, count: usize) {
    let ended = rping.wait(limit).unwrap();
    let said = ended.text();
    assert_eq!(said.matches("ping data:").count(), count, "{said}");
    let by_itself = ended.status == Some(255) && said.contains("rdma_get_cm_event: Bad file descriptor");
    assert!(ended.status == Some(0) || by_itself, "{:?}: {said}", ended.status);
}

#[test]
fn siw_rping_is_the_server() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let cases = [
        (Family::V4, 64, 20, ""),
        (Family::V6, 64, 20, ""),
        (Family::V4, 4001, 10, ""),
        (Family::V6, 65535, 5, ""),
        (Family::V4, 20000, 5, "--no-crc"),
        // siw's responder accepts a Write or a Read as RTR.
        (Family::V4, 64, 5, "--p2p write"),
        (Family::V6, 64, 5, "--p2p read"),
        (Family::V4, 64, 5, "--p2p empty,send,read,write"),
    ];
    let record = stage.judged(Ending::Orderly, || {
        for (family, size, count, more) in cases {
            let server = server(&stage, family, size);
            let said = client(&stage, family, size, &format!("--markers off -C {count} {more}"))
                .finish(LONG)
                .unwrap();
            assert!(said.contains(" rounds"), "{more}: {said}");
            // The server treats the end of its only client as an error only during a round.
            finish_pings(server, SHORT, count);
        }
    });
    let record = record.unwrap();
    assert_eq!(record.connections.len(), cases.len());
    assert_eq!(record.connections.iter().filter(|c| c.crc).count(), cases.len() - 1);
    assert!(
        record
            .connections
            .iter()
            .all(|c| c.revision == 2 && c.terminates == 0 && c.markers == (false, false))
    );
    assert!(record.verdict.good_crcs > 200, "{:?}", record.verdict);
}

#[test]
fn siw_rping_is_the_client() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    // Parameters persist across cases: from the third on, peer-to-peer mode with a Write or a Read as RTR,
    // then only a Read, then only a Write.
    let cases = [
        (Family::V4, 64, 20, "mpa_crc_required", "0"),
        (Family::V6, 64, 20, "mpa_crc_required", "1"),
        (Family::V4, 4001, 10, "peer_to_peer", "1"),
        (Family::V6, 65535, 5, "rtr_write", "0"),
        (Family::V4, 64, 5, "rtr_write", "1"),
        (Family::V6, 64, 5, "rtr_read", "0"),
    ];
    let record = stage.judged(Ending::Orderly, || {
        for (family, size, count, parameter, value) in cases {
            stage.vm.tune(parameter, value).unwrap();
            let server = our_server(&stage, family, size, "");
            finish_pings(siw_client(&stage, family, size, count), LONG, count);
            let said = server.finish(SHORT).unwrap();
            assert!(said.contains(&format!("{count} rounds, the client disconnected")), "{said}");
        }
    });
    let record = record.unwrap();
    assert_eq!(record.connections.len(), cases.len());
    // We always request CRCs; siw never requests markers.
    assert!(record.connections.iter().all(|c| c.crc && c.revision == 2 && c.terminates == 0));
    assert!(record.verdict.good_crcs > 200, "{:?}", record.verdict);
}

#[test]
fn siw_rping_falls_back_without_markers() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        let _server = stage.serve("rping -s -P", PORT).unwrap();
        let said = client(&stage, Family::V4, 64, "-C 3").finish(SHORT).unwrap();
        assert!(said.contains("3 rounds"), "{said}");
        let mut refused = client(&stage, Family::V4, 64, "-C 3 --markers require");
        assert!(!refused.wait(SHORT).unwrap().success());
        assert!(refused.output().contains("markers"), "{}", refused.output());
    });
    let [first, second, third] = &record.unwrap().connections[..] else { panic!("not three connections") };
    let rejected = [first, second, third].map(|connection| connection.rejected);
    assert_eq!(rejected.iter().filter(|rejected| **rejected).count(), 2, "{rejected:?}");
}

#[test]
fn siw_rping_is_refused_without_a_listener() {
    let stage = Stage::new(Kernel::Siw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        let mut refused = client(&stage, Family::V4, 64, "");
        assert!(!refused.wait(SHORT).unwrap().success());
        assert!(refused.output().contains("refused"), "{}", refused.output());
    });
    assert!(record.unwrap().connections.is_empty());
}

/// The machine is killed, so the peer sends nothing more.
#[test]
fn siw_rping_detects_a_power_failure_of_its_peer() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Cut, || {
        let mut server = our_server(&stage, Family::V4, 20000, "--wait 10 -v");
        let _client = siw_client(&stage, Family::V4, 20000, 100_000);
        server.wait_for("rdma-ping-10:", LONG).unwrap();
        stage.vm.kill().unwrap();
        assert!(!server.wait(SHORT).unwrap().success(), "{}", server.output().len());
    });
    assert_eq!(record.unwrap().connections.len(), 1);
}

#[test]
fn siw_rping_completes_despite_loss_and_reordering() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    stage.disturb("delay 2ms loss 2% reorder 5%").unwrap();
    let record = stage.judged(Ending::Orderly, || {
        for crc in ["", "--no-crc"] {
            let mut server = server(&stage, Family::V4, 60000);
            let line = format!("-C 5 --markers off {crc}");
            let said = client(&stage, Family::V4, 60000, &line).finish(LONG).unwrap();
            assert!(said.contains("5 rounds"), "{said}");
            server.wait(SHORT).unwrap();
        }
        let server = our_server(&stage, Family::V4, 60000, "");
        finish_pings(siw_client(&stage, Family::V4, 60000, 5), LONG, 5);
        server.finish(SHORT).unwrap();
    });
    assert_eq!(record.unwrap().connections.iter().filter(|c| c.crc).count(), 2);
}
