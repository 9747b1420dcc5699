//! Tests of MPA through its public interface: conformance, properties against simple oracles, and captures of the
//! kernel's Soft-iWARP.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod captures;
mod hot_path;
mod islands;
mod rdmac;
mod receive;
mod startup;
mod streaming;
mod support;
mod transmit;
mod withhold;
