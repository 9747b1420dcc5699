//! Whole stacks over the virtual wire: resources that connections share, and the cost of many connections.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod acks;
mod busy;
mod checksums;
mod closing;
mod crowd;
mod flood;
mod frames;
mod holding;
mod listening;
mod many;
mod opening;
mod paths;
mod raw;
mod steering;
mod support;
