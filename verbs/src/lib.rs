//! RDMA verbs over a software RNIC.
#![deny(unsafe_code)]

pub mod memory;
