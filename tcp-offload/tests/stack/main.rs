//! Whole stacks over the virtual wire: what connections share, and what many of them cost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod closing;
mod crowd;
mod flood;
mod listening;
mod many;
mod paths;
mod support;
