//! Whole verbs engines over the virtual wire: every kind of work request in both directions, under mixed faults.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod connections;
mod hostile;
mod mixed;
mod placement;
mod rdma_tcp;
mod refusals;
mod scripted;
mod streaming;
mod talk;
