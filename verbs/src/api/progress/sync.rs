//! Atomics, locks and the doorbell of `sleeper`, `calls` and `bell_queue`, by these names because `verbs/tests/interleavings.rs`
//! compiles these files with those of a model checker.

pub(super) use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

pub(super) use crate::system::{Doorbell, lock};
