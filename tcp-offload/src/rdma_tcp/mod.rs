//! RDMA/TCP, the format that Jim Williams proposed in 2000: the second framing beside MPA.
//!
//! A receiver finds segments beyond a gap by their random 64-bit Connection ID, if they begin where a TCP segment begins.
//! The proposal leaves much open; docs/decisions/0014 lists the decisions (A1 to A20).
//!
//! | file | owns |
//! |---|---|
//! | `crc` | the CRC-32 with the reversed generator |
//! | `header` | the bytes of a segment's header and control data |
//! | `error` | the violations of the format, and their Terminate codes |
//! | `order` | message numbers, the order field and the window of processed messages |
//! | `sequence` | the rules for segments in stream order |
//! | `segments` | the traits `Framing` and `Transmitter`: find, verify and complete segments |
//! | `setup` | the trait `StartUp`: Connect, Accept and Reject |
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod crc;
mod error;
mod header;
mod order;
mod segments;
mod sequence;
mod setup;

pub use error::SegmentError;
pub(crate) use header::VERSION;
pub use header::{
    AtomicWords, BufferPlace, ConnectionId, HEADER_MAX_BYTES, SegmentHeader, SegmentKind, SendControl,
};
pub use order::{MessageNumber, Order, OrderWindow, WINDOW};
pub use sequence::{SendTerms, Sequence};
pub(crate) use setup::Setup;
pub use setup::{Agreed, Connect, MAX_PRIVATE_DATA, RdmaTcpConfig};
