//! What calls of the drop-in libraries answer, beside rdma-core with a kernel driver of iWARP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, run, start},
};

const LIBRARIES: [&str; 2] = ["-libverbs", "-lrdmacm"];

/// Runs `program s ADDRESS` on side B and, once it listens, `program c ADDRESS` on side A. Returns their output.
fn both(lab: &Lab, program: &str) -> [String; 2] {
    let program = compiled(lab, program, &LIBRARIES).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(lab, Side::B, &format!("{program} s {address}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start(lab, Side::A, &format!("{program} c {address}")).unwrap();
    let said = [server.finish(LIMIT), client.finish(LIMIT)];
    said.map(|said| said.unwrap_or_else(|error| panic!("{program}: {error:#}")))
}

#[test]
fn netns_compat_calls_of_one_end_are_answered_as_by_rdma_core() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "one_end", &LIBRARIES).unwrap();
    let said = run(&lab, Side::A, &program).unwrap();
    assert!(said.contains(" 0 differ"), "{said}");
}

/// Programs ask for one piece and post two, as siw and others take it (LDMS).
#[test]
fn netns_compat_queue_pairs_take_six_pieces() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let [server, client] = both(&lab, "pieces");
    assert!(client.contains("granted: 6 send pieces, 6 receive pieces"), "{client}");
    assert!(client.contains("Send of two pieces: ok"), "{client}");
    assert!(server.contains("received 8 bytes, status 0"), "{server}");
}

#[test]
fn netns_compat_remote_invalidation_is_announced() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let [server, client] = both(&lab, "invalidate");
    for said in [&server, &client] {
        assert!(said.contains("IBV_DEVICE_MEM_MGT_EXTENSIONS: 1"), "{said}");
    }
    assert!(client.contains("receive: success, invalidated 1"), "{client}");
}

#[test]
fn netns_compat_a_queue_pair_moves_to_another_identifier() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let said = both(&lab, "moved");
    assert!(said.iter().all(|said| said.contains("done")), "{said:?}");
}

/// `qp_access_flags` deny the peer what the memory would grant. A window takes the remote ones of a region's flags.
#[test]
fn netns_compat_flags_of_a_queue_pair_deny_access() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let said = both(&lab, "rights");
    assert!(said.iter().all(|said| said.contains("done")), "{said:?}");
}
