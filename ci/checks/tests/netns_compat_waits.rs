//! How programs wait for the events of the drop-in libraries: descriptors, signals, cancellation.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    unmodified::{LIMIT, compiled, run, start},
};

/// An address of the lab's network that no host has.
const ABSENT: &str = "10.77.0.99";

/// Runs `program` with `server` as its arguments on side B, and with `client` and B's address on side A. Returns what both say.
fn both(lab: &Lab, program: &str, server: &str, client: &str) -> [String; 2] {
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(lab, Side::B, &format!("{program} {server}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start(lab, Side::A, &format!("{program} {client} {address}")).unwrap();
    let said = [client.finish(LIMIT), server.finish(LIMIT)];
    let done = said.iter().all(|said| said.as_ref().is_ok_and(|said| said.contains("done")));
    assert!(done, "client and server: {said:?}");
    said.map(Result::unwrap)
}

fn readable(lab: &Lab) -> String {
    compiled(lab, "readable", &["-libverbs", "-lrdmacm", "-pthread"]).unwrap()
}

/// Programs that poll the descriptor and then call `rdma_get_cm_event` wait for ever otherwise: rping since rdma-core 61, tgtd.
#[test]
fn netns_compat_readable_channels_have_an_event() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    both(&lab, &readable(&lab), "serve", "talk");
}

/// Random connects, disconnects, destructions and acknowledgements at both ends, by two threads each: whenever one of the three kinds of
/// descriptors is readable, its call returns at once.
#[test]
fn netns_compat_readable_channels_have_an_event_in_random_histories() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = readable(&lab);
    for seed in [1, 20, 300] {
        let [client, server] =
            both(&lab, &program, &format!("random {seed} 4000"), &format!("random {} 4000", seed + 1));
        for said in [client, server] {
            assert!(said.matches("events: ").count() == 2 && !said.contains(" 0 of connections"), "{said}");
        }
    }
}

/// As in a `read` of a kernel's file: a handler without `SA_RESTART` ends the call with EINTR, one with it does not, and the call is a
/// cancellation point.
#[test]
fn netns_compat_waits_end_by_signals_and_cancellation() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "signals", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    assert!(run(&lab, Side::A, &format!("{program} {address} {ABSENT}")).unwrap().contains("done"));
}

/// A process that exits closes its connections, which is no event for its own threads: they may have freed what belongs to the
/// connections, and a kernel would have ended them before.
#[test]
fn netns_compat_waits_return_nothing_while_the_process_exits() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "leave", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
    for _ in 0..3 {
        let [client, _] = both(&lab, &program, "", "");
        assert!(!client.contains("woken"), "{client}");
    }
}

/// A program whose event thread frees a connection at DISCONNECTED has polled the connection's completions by then, unless its thread of
/// completions is much slower than usual (`docs/decisions/0025-disconnected-waits-for-completions.md`).
#[test]
fn netns_compat_waits_for_completions_before_disconnected() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let program = compiled(&lab, "order", &["-libverbs", "-lrdmacm", "-lpthread"]).unwrap();
    both(&lab, &program, "", "");
}
