//! Replays the inputs of `corpus/`. An input that failed once stays there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{collections::BTreeSet, fs, path::Path};

use xwarp_control::{Event, Reply, Request, Tagged};
use xwarp_fuzz::TARGETS;

/// Runs all inputs of a target, and returns them.
fn replay(name: &str) -> Vec<Vec<u8>> {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut inputs: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{name} has an empty corpus");
    let run = |input: &std::path::PathBuf| {
        // Printed before the run, so that the last printed input is the one that failed.
        println!("{}", input.display());
        let bytes = fs::read(input).unwrap();
        target(&bytes);
        bytes
    };
    inputs.iter().map(run).collect()
}

#[test]
fn corpus_wire() {
    replay("wire");
}

#[test]
fn corpus_startup() {
    replay("startup");
}

#[test]
fn corpus_headers() {
    replay("headers");
}

#[test]
fn corpus_deframe() {
    replay("deframe");
}

fn kind_of_request(request: &Request) -> usize {
    match request {
        Request::Hello { .. } => 0,
        Request::Open { .. } => 1,
        Request::Register => 2,
        Request::Reserve { .. } => 3,
        Request::Release { .. } => 4,
        Request::Resolve { .. } => 5,
        Request::NextHop { .. } => 6,
        Request::Describe { .. } => 7,
        Request::Host { .. } => 8,
        Request::Faults { .. } => 9,
    }
}

fn kind_of_reply(reply: &Reply) -> usize {
    match reply {
        Reply::Hello { .. } => 0,
        Reply::Opened(_) => 1,
        Reply::Registered => 2,
        Reply::Reserved { .. } => 3,
        Reply::Resolved { .. } => 4,
        Reply::NextHop { .. } => 5,
        Reply::Described(_) => 6,
        Reply::Host(_) => 7,
        Reply::Done => 8,
        Reply::Refused(_) => 9,
        Reply::Restarted => 10,
    }
}

fn kind_of_event(event: &Event) -> usize {
    match event {
        Event::AddressAdded(_) => 0,
        Event::AddressRemoved(_) => 1,
        Event::LinkState { .. } => 2,
        Event::Mtu(_) => 3,
        Event::Mac(_) => 4,
        Event::LinkRemoved => 5,
        Event::Neighbour { .. } => 6,
        Event::Routes => 7,
        Event::Restarted => 8,
        Event::Revoked { .. } => 9,
    }
}

/// A run of the fuzzer starts with a message of every kind. A new kind needs an input here.
#[test]
fn corpus_control() {
    let [mut requests, mut replies, mut events] = [const { BTreeSet::new() }; 3];
    for input in replay("control") {
        let (side, bytes) = input.split_first().unwrap();
        match side {
            0 => requests.extend(Tagged::<Request>::decode(bytes).map(|one| kind_of_request(&one.body))),
            1 => replies.extend(Tagged::<Reply>::decode(bytes).map(|one| kind_of_reply(&one.body))),
            _ => events.extend(Event::decode(bytes).map(|one| kind_of_event(&one))),
        }
    }
    let all = |kinds| (0..kinds).collect();
    assert_eq!((requests, replies, events), (all(10), all(11), all(10)));
}

#[test]
fn corpus_leg() {
    replay("leg");
}

#[test]
fn corpus_explain() {
    replay("explain");
}

#[test]
fn corpus_engine() {
    replay("engine");
}

#[test]
fn corpus_sdp() {
    replay("sdp");
}

#[test]
fn corpus_segments() {
    replay("segments");
}

#[test]
fn corpus_pair() {
    replay("pair");
}
