//! The lock and the atomics of a completion queue, by these names because `verbs/tests/interleavings.rs` compiles that file with
//! those of a model checker.

pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub(super) use parking_lot::Mutex;
