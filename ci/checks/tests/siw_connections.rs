//! Start and end of connections with Linux Soft-iWARP: private data, rejections, MPA revision 1, and the shortest
//! programs of rdmacm-utils against one of our examples.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, INTERFACE},
    vm::{Ending, Kernel, LONG, SHORT, Stage},
};

/// Port of `cm` (`ci/vm/cm.c`), and of our rping for it.
const PORT: u16 = 7500;
/// Port of `rdma_server`.
const ECHO_PORT: u16 = 7471;
/// Private data limit of siw, including IRD and ORD: 256 bytes. siw stores the length of sent data in a byte,
/// so its sending limit is one less.
const MOST: usize = 252;
const MAX_OF_SIW: usize = 251;
/// Number of repetitions of exchanges that siw does not always handle correctly.
const TRIES: usize = 12;

#[test]
fn siw_private_data_passes_up_to_its_limit() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let address = stage.vm.address(Family::V4);
    let ours = stage.near.address(Family::V4);
    let record = stage.judged(Ending::Orderly, || {
        for (bytes, back) in [(0, 0), (1, 2), (MOST, MAX_OF_SIW)] {
            let mut server = stage.serve(&format!("cm accept {address} {PORT} {back}"), PORT).unwrap();
            let line =
                format!("{INTERFACE} -c -a {address} -p {PORT} -C 0 --markers off --private-data {bytes}");
            let said = stage.start("examples/rping", &line).unwrap().finish(SHORT).unwrap();
            assert!(said.contains(&format!("connected, {back} bytes of private data")), "{said}");
            server.wait_for("disconnected", SHORT).unwrap();
            let heard = server.output().unwrap().text();
            assert!(heard.contains(&format!("request {bytes}\n")) && !heard.contains("wrong"), "{heard}");
        }
        for (bytes, back) in [(0, 0), (1, 2), (MAX_OF_SIW, MOST)] {
            let line = format!("-a {ours} -p {PORT} --private-data {back}");
            let server = stage.serve_ours("rping", &line).unwrap();
            let heard = stage.vm.check(&format!("cm connect {ours} {PORT} {bytes}"), SHORT).unwrap();
            let came = format!("established {back}\n");
            assert!(heard.contains(&came) && !heard.contains("wrong"), "{heard}");
            let said = server.finish(SHORT).unwrap();
            assert!(said.contains(&format!("asks, {bytes} bytes of private data")), "{said}");
        }
    });
    assert_eq!(record.unwrap().connections.len(), 6);
}

/// Private data beyond the limit of siw requires an option; with it siw resets a connection of revision 2, whose IRD and
/// ORD exceed its limit, and accepts the next one, of revision 1 (RFC 6581 section 10). Its machine survives.
#[test]
fn siw_private_data_beyond_its_limit_needs_an_option() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let address = stage.vm.address(Family::V4);
    let _server = stage.serve(&format!("cm accept {address} {PORT} 0"), PORT).unwrap();
    let ask = |more: &str| {
        let line =
            format!("{INTERFACE} -c -a {address} -p {PORT} -C 0 --markers off --private-data 253 {more}");
        let mut client = stage.start("examples/rping", &line).unwrap();
        (client.wait(SHORT).unwrap().success(), client.output())
    };
    let record = stage.judged(Ending::Orderly, || {
        let (connected, said) = ask("");
        assert!(!connected && said.contains("253 bytes of private data"), "{said}");
        let (connected, said) = ask("--long-private-data");
        assert!(connected, "{said}");
        stage.vm.check("true", SHORT).unwrap();
    });
    assert_eq!(record.unwrap().connections.len(), 2);
}

#[test]
fn siw_rejections_carry_private_data() {
    let stage = Stage::new(Kernel::Siw).unwrap();
    let address = stage.vm.address(Family::V6);
    let ours = stage.near.address(Family::V6);
    let record = stage.judged(Ending::Orderly, || {
        let _server = stage.serve(&format!("cm reject {address} {PORT} 100"), PORT).unwrap();
        let line = format!("{INTERFACE} -c -a {address} -p {PORT} --markers off");
        let mut client = stage.start("examples/rping", &line).unwrap();
        assert!(!client.wait(SHORT).unwrap().success());
        let said = client.output();
        assert!(said.contains("rejected") && said.contains("100 bytes of private data"), "{said}");
        // siw loses the private data if the FIN arrives before it has read the reply (docs/decisions/0008).
        let heard = (0..TRIES).any(|_| {
            let line = format!("-a {ours} -p {PORT} --reject --private-data {MOST}");
            let server = stage.serve_ours("rping", &line).unwrap();
            let heard = stage.vm.run(&format!("cm connect {ours} {PORT} 7"), SHORT).unwrap();
            assert_eq!(heard.status, Some(1), "{}", heard.text());
            assert!(server.finish(SHORT).unwrap().contains("asks, 7 bytes of private data"));
            assert!(heard.stdout.contains("rejected"), "{}", heard.stdout);
            heard.stdout.contains(&format!("rejected {MOST}\n"))
        });
        assert!(heard, "never with private data");
    });
    let record = record.unwrap();
    assert!(record.connections.len() >= 2 && record.connections.iter().all(|c| c.rejected));
}

/// The shortest programs of rdmacm-utils: one message in each direction.
#[test]
fn siw_rdma_client_and_rdma_server_echo() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let record = stage.judged(Ending::Orderly, || {
        echo_with_server(&stage, Family::V4);
        echo_with_client(&stage, Family::V4);
        echo_with_server(&stage, Family::V6);
    });
    let record = record.unwrap();
    // The first attempt requests markers, which siw refuses.
    assert_eq!(record.connections.iter().filter(|c| c.rejected).count(), 2);
    let with_fpdus = |fpdus| {
        let connections = record.connections.iter();
        connections.filter(|c| c.crc && c.revision == 2 && c.fpdus == fpdus).count()
    };
    assert_eq!(with_fpdus(2), 1);
    // Where ours is the initiator, its ready-to-receive message comes first (RFC 6581 section 4.3).
    assert_eq!(with_fpdus(3), 2);
}

fn echo_with_server(stage: &Stage, family: Family) {
    // It serves one client, and a refused attempt does not count as one.
    let mut server = stage.serve(&format!("rdma_server -s {}", stage.vm.address(family)), ECHO_PORT).unwrap();
    let peer = std::net::SocketAddr::new(stage.vm.address(family), ECHO_PORT);
    let said =
        stage.start("examples/echo", &format!("{INTERFACE} -c {peer}")).unwrap().finish(SHORT).unwrap();
    assert!(said.contains("answered"), "{said}");
    assert_eq!(server.wait(SHORT).unwrap().status, Some(0));
}

fn echo_with_client(stage: &Stage, family: Family) {
    let server = stage.serve_ours("echo", &ECHO_PORT.to_string()).unwrap();
    let address = stage.near.address(family);
    let said = stage.vm.check(&format!("rdma_client -s {address}"), LONG).unwrap();
    assert!(said.contains("rdma_client: end 0"), "{said}");
    server.finish(SHORT).unwrap();
}

/// RFC 6581 section 10: a peer that speaks revision 1 gets a revision 1 reply, without IRD, ORD and S.
#[test]
fn siw_revision_1_in_both_directions() {
    let stage = Stage::new(Kernel::TunableSiw).unwrap();
    let ours = stage.near.address(Family::V4);
    let record = stage.judged(Ending::Orderly, || {
        let address = stage.vm.address(Family::V4);
        let line = format!("{INTERFACE} -c -a {address} -p {PORT} -C 0");
        let _server = stage.serve(&format!("cm accept {address} {PORT} 9"), PORT).unwrap();
        let said = stage.start("examples/rping", &format!("{line} --markers off --mpa-rev 1")).unwrap();
        assert!(said.finish(SHORT).unwrap().contains("connected, 9 bytes of private data"));
        stage.vm.tune("mpa_version", "1").unwrap();
        echo_with_client(&stage, Family::V4);
        let server = stage.serve_ours("rping", &format!("-a {ours} -S 4001")).unwrap();
        let said = stage.vm.check(&format!("rping -c -v -V -a {ours} -S 4001 -C 5"), LONG).unwrap();
        assert_eq!(said.matches("ping data:").count(), 5, "{said}");
        server.finish(SHORT).unwrap();
    });
    let record = record.unwrap();
    assert_eq!(record.connections.iter().map(|c| c.revision).collect::<Vec<_>>(), [1; 3]);
}
