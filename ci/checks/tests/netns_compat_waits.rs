//! The descriptors of the drop-in libraries' channels: readable exactly while the blocking call has an event to return.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, start},
};

/// Programs that poll the descriptor and then call `rdma_get_cm_event` wait for ever otherwise: rping since rdma-core 61, tgtd.
#[test]
fn netns_compat_readable_channels_have_an_event() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "readable", &["-libverbs", "-lrdmacm"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(&lab, Side::B, &format!("{program} serve")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start(&lab, Side::A, &format!("{program} talk {address}")).unwrap();
    let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
    let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
    assert!(done(&client) && done(&server), "client: {client:?}\nserver: {server:?}");
}
