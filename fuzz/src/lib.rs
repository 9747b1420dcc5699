//! What is fuzzed: each target is a function of bytes that panics when something is wrong. `ci/fuzz` runs them
//! under libFuzzer; `tests/corpus.rs` replays the inputs kept in `corpus/` as plain tests.
//!
//! Inputs are decoded by [`input::Input`], which makes sense of any bytes, so that a mutation of an input is again
//! an input. Where a checksum or a CRC would stop nearly every mutation, the target makes it good first.
//!
//! | target | what gets the bytes | what must hold |
//! |---|---|---|
//! | [`wire`](wire::target) | headers of a frame: Ethernet, IP, TCP with options, ICMP | chunks make no difference, etherparse agrees, options survive a round trip |
//! | [`startup`](startup::target) | MPA Request and Reply, the session's start-up in pieces | round trip, every truncation, one outcome whatever the cuts |
//! | [`headers`](headers::target) | DDP and RDMAP headers, Terminate | round trips, every truncation |
//! | [`deframe`](deframe::target) | the receiving MPA session: any stream, cut and reordered | what is delivered is what a reader in order finds; placed once |
//! | [`engine`](engine::target) | a whole engine, hostile peers on the wire | canaries, frames, memory, keys that are shut, the validity of what it sends, its end |
//! | [`pair`](pair::target) | two engines and the network between them | completions in order and once, contents, canaries, frames |
#![deny(unsafe_code)]

pub mod canary;
pub mod deframe;
pub mod engine;
pub mod headers;
pub mod input;
pub mod link;
pub mod pair;
pub mod seeds;
pub mod session;
pub mod startup;
pub mod wire;

/// A target.
pub type Target = fn(&[u8]);

/// All targets, by name.
pub const TARGETS: [(&str, Target); 6] = [
    ("wire", wire::target),
    ("startup", startup::target),
    ("headers", headers::target),
    ("deframe", deframe::target),
    ("engine", engine::target),
    ("pair", pair::target),
];
