//! Fuzz targets: each is a function of bytes that panics when it detects an error. `ci/fuzz` runs them under
//! libFuzzer; `tests/corpus.rs` replays the inputs of `corpus/` as plain tests.
//!
//! [`input::Input`] decodes any bytes, so that every mutation of an input is again an input. Where a checksum
//! or CRC would reject nearly every mutation, the target recomputes it first.
//!
//! | target | input | checks |
//! |---|---|---|
//! | [`wire`](wire::target) | headers of a frame: Ethernet, IP, TCP with options, ICMP | the result is independent of chunks and equals etherparse's; options survive a round trip |
//! | [`startup`](startup::target) | MPA Request and Reply, a session's start-up in pieces | round trip, every truncation, the result is independent of the segmentation |
//! | [`headers`](headers::target) | DDP and RDMAP headers, Terminate, segments of RDMA/TCP | round trips, every truncation |
//! | [`deframe`](deframe::target) | the receiving MPA session: any stream, segmented and reordered | delivers what an in-order reader finds; places each ULPDU once |
//! | [`control`](control::target) | a message between a process and `xwarpd` | one encoding, every truncation |
//! | [`leg`](leg::target) | the other end of a leg in shared memory | chunks, frames as they were checked, writes only where the owner allows |
//! | [`explain`](explain::target) | a capture file, or frames from which one is built | `xwarp explain` neither panics nor needs more than bounded memory |
//! | [`engine`](engine::target) | a whole engine with hostile peers on the wire | canaries, frames, memory, closed keys, validity of sent frames, clean end |
//! | [`segments`](engine::segments_target) | as `engine`, with RDMA/TCP | as `engine` |
//! | [`sdp`](sdp::target) | a program and a peer of one SDP machine | messages are valid and numbered, RDMA stays in the program's memory, receives end, the machine rests |
//! | [`pair`](pair::target) | two engines and the network between them | each completion once and in order, contents, canaries, frames |
#![deny(unsafe_code)]

pub mod canary;
pub mod control;
pub mod deframe;
pub mod engine;
pub mod explain;
pub mod headers;
pub mod input;
pub mod leg;
pub mod link;
pub mod pair;
pub mod sdp;
pub mod seeds;
pub mod session;
pub mod startup;
pub mod wire;

/// The type of a target.
pub type Target = fn(&[u8]);

/// All targets, by name.
pub const TARGETS: [(&str, Target); 11] = [
    ("wire", wire::target),
    ("startup", startup::target),
    ("headers", headers::target),
    ("deframe", deframe::target),
    ("control", control::target),
    ("leg", leg::target),
    ("explain", explain::target),
    ("engine", engine::target),
    ("segments", engine::segments_target),
    ("pair", pair::target),
    ("sdp", sdp::target),
];
