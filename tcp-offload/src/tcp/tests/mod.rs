//! Scenario tests of whole connections, by RFC and section, through public interfaces only.

mod acks;
mod bottleneck;
mod close;
mod ecn;
mod handshake;
mod hostile;
mod liveness;
mod lossy;
mod paths;
mod prediction;
mod probing;
mod recovery;
mod ring;
mod segments;
mod spurious;
mod states;
mod transfer;
mod windows;

use super::{
    TcpConfig,
    testing::{IRS, ISS, Script, Stream},
};
use crate::{seq::SeqNum, wire::Fields};

/// Settings without SACK, and so without tail loss probes.
fn without_sack() -> TcpConfig {
    TcpConfig { sack: false, ..TcpConfig::default() }
}

/// A source with nothing to send.
fn silent() -> Stream {
    Stream::new(0, 0, false)
}

/// A source of `segments` full segments of 1000 bytes.
fn bulk(segments: u64) -> Stream {
    Stream::new(segments * 1000, 0, false)
}

/// Settings without keepalive: the silence of the peer alone has no effect.
fn unprobed() -> TcpConfig {
    TcpConfig { keepalive: None, ..TcpConfig::default() }
}

/// An established connection with nothing to send, without keepalive.
fn idle() -> Script {
    Script::established(unprobed(), silent())
}

fn iss(offset: u32) -> SeqNum {
    SeqNum::new(ISS + 1).add(offset)
}

fn irs(offset: u32) -> SeqNum {
    SeqNum::new(IRS + 1).add(offset)
}

/// The peer's current plain ACK.
fn plain(script: &Script) -> Fields {
    script.template
}
