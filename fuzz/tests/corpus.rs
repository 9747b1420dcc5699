//! Replays the inputs of `corpus/`. An input that failed once stays there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{fs, path::Path};

use xwarp_fuzz::TARGETS;

fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut inputs: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{name} has an empty corpus");
    for input in inputs {
        // Printed before the run, so that the last printed input is the one that failed.
        println!("{}", input.display());
        target(&fs::read(&input).unwrap());
    }
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

#[test]
fn corpus_control() {
    replay("control");
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
