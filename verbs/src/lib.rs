//! RDMA verbs over a software RNIC.
#![deny(unsafe_code)]

pub mod interface;
pub mod memory;
#[cfg(feature = "sim")]
pub mod sim;
mod system;
pub mod tap;
