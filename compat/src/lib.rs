//! A drop-in libibverbs and librdmacm: C programs that call them run unmodified over xwarp.
//!
//! | module | owns |
//! |---|---|
//! | [`table`] | every symbol of the ABI with its version |
//! | [`abi`] | the structures of the C headers |
//! | [`boundary`] | pointers of C programs: nearly all unsafe code |
//! | [`faults`] | registered memory that is gone: the signal handler |
//! | [`sleep`] | calls that wait for an event: signals and cancellation; unsafe system calls |
//! | [`config`] | environment variables |
//! | [`verbs`] | libibverbs: devices, memory, queues, posting, polling |
//! | [`cm`] | librdmacm |
//!
//! One file is libibverbs.so.1 and librdmacm.so.1: the dynamic linker finds both names as links to it, and a program that needs
//! both loads it once. `docs/compat.md` says how programs are started, `docs/decisions` why it is built like this.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the manual pages of libibverbs and librdmacm describe the functions")]
#![allow(clippy::struct_field_names, reason = "an object of C around the one of xwarp with the same name")]

/// Prints a line on standard error, in one write that no other process's line can interrupt. The program may have closed it, or its
/// reader may have ended, so errors are ignored: a panic would be one of the program.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let line = format!("xwarp: {}\n", format_args!($($text)*));
        let _ = std::io::stderr().write_all(line.as_bytes());
    }};
}

pub mod abi;
mod boundary;
mod cm;
mod config;
mod failure;
mod faults;
mod library;
mod sleep;
mod table;
mod users;
mod verbs;
mod wait;
