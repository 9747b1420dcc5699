//! Conformance to RFCs 5041, 5040, 7306 and 5042: a whole engine on one side of the virtual wire, and on the other a
//! peer that sends exactly the DDP segments that a test gives byte by byte.
//!
//! `docs/conformance.md` names these tests. Headers are built by hand, so that the codecs under test do not check
//! themselves.

#![allow(clippy::unwrap_used, reason = "what cannot be set up fails its test")]

mod peer;
mod rfc5040;
mod rfc5041;
mod rfc5042;
mod rfc6581;
mod rfc7306;
mod send_immediate;
