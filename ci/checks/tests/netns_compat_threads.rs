//! The drop-in libraries in programs of several threads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, start},
};

/// Runs a case of `tests/compat/threads.c` at both ends.
fn case(name: &str) {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "threads", &["-libverbs", "-lrdmacm", "-pthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(&lab, Side::B, &format!("{program} {name}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start(&lab, Side::A, &format!("{program} {name} {address}")).unwrap();
    let [client, server] = [client.finish(LIMIT), server.finish(LIMIT)];
    let done = |said: &anyhow::Result<String>| said.as_ref().is_ok_and(|said| said.contains("done"));
    assert!(done(&client) && done(&server), "client: {client:?}\nserver: {server:?}");
}

#[test]
fn netns_compat_threads_build_batches_on_one_queue_pair() {
    case("batches");
}

#[test]
fn netns_compat_threads_poll_one_extended_completion_queue() {
    case("polls");
}

#[test]
fn netns_compat_threads_have_domains() {
    case("domains");
}

#[test]
fn netns_compat_threads_wait_at_the_channel_of_a_queue_that_is_destroyed() {
    case("channel");
}

#[test]
fn netns_compat_threads_destroy_a_queue_pair_whose_post_was_answered() {
    case("answered");
}
