//! The structures and numbers of `infiniband/verbs.h` and `rdma/rdma_cma.h`. The test beside this module compares every
//! size and offset with those that a C compiler reports for the installed headers.
//!
//! Enumerations are plain integers here: a C program may pass any value.
#![allow(missing_docs, reason = "the manual pages of libibverbs and librdmacm describe them")]
#![allow(non_camel_case_types, reason = "the names of the C headers")]

pub mod cm;
pub mod device;
#[cfg(test)]
mod layout_tests;
pub mod queue;

/// `pthread_mutex_t` in words of eight bytes. All zero is an unlocked mutex.
pub const MUTEX_WORDS: usize = 5;
/// `pthread_cond_t` in words of eight bytes. All zero is a condition variable without waiters.
pub const COND_WORDS: usize = 6;
