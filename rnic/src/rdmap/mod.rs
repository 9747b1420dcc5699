//! The RDMA Protocol (RFC 5040) and its extensions (RFC 7306): opcodes, headers, Terminate, errors.

mod atomic;
mod control;
mod error;
mod read_request;
mod terminate;

pub use atomic::{
    ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, AtomicOperation, AtomicRequest, AtomicResponse,
};
pub(crate) use control::Carriage;
pub use control::{Control, InvalidControl, MessageType};
pub use error::{RdmapError, StreamError};
pub use read_request::{READ_REQUEST_BYTES, ReadRequest};
pub use terminate::{LAYER_DDP, LAYER_LLP, LAYER_RDMA, TERMINATE_MAX_BYTES, TerminateHeader};

/// Splits `bytes` after the first `N` bytes.
fn split<const N: usize>(bytes: &[u8]) -> Option<([u8; N], &[u8])> {
    bytes.split_first_chunk::<N>().map(|(head, rest)| (*head, rest))
}

/// Writes `fields` one after the other; `out` must have the sum of their lengths.
fn put_fields(out: &mut [u8], fields: &[&[u8]]) {
    for (to, from) in out.iter_mut().zip(fields.iter().copied().flatten()) {
        *to = *from;
    }
}
