//! Sizes and limits of one end.

use super::LEAST_BUFFERS;
use crate::wire::LEAST_BUFFER_BYTES;

/// Sizes and limits of one end.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Config {
    /// Number of posted receives, at least 3.
    pub buffers: u16,
    /// Initial size of each, in bytes, at least 37.
    pub buffer_bytes: u32,
    /// Limit for growth on the peer's request, in bytes.
    pub most_buffer_bytes: u32,
    /// Size that the peer's receives should have, which is the longest message that is sent, in bytes.
    pub desired_bytes: u32,
    /// Largest number of bytes that wait to be sent (`SO_SNDBUF`).
    pub send_bytes: usize,
    /// Largest number of bytes that wait to be read (`SO_RCVBUF`).
    pub receive_bytes: usize,
    /// Advertisements of the peer at a time.
    pub max_adverts: u16,
    /// RDMA Reads of the peer that are served at a time.
    pub ird: u16,
    /// RDMA Reads that may be outstanding.
    pub ord: u16,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            buffers: 8,
            buffer_bytes: 16 << 10,
            most_buffer_bytes: 32 << 10,
            desired_bytes: 32 << 10,
            send_bytes: 256 << 10,
            receive_bytes: 256 << 10,
            max_adverts: 32,
            ird: 16,
            ord: 16,
        }
    }
}

impl Config {
    /// The same for a peer that wishes receives of this size (DesRemRcvSz): longer ones than its messages would waste memory. More is
    /// left to its ChRcvBuf, and a size that no receive can have is no wish.
    #[must_use]
    pub(super) fn for_peer(&self, desired_bytes: u32) -> Self {
        let buffer_bytes = if desired_bytes < LEAST_BUFFER_BYTES {
            self.buffer_bytes
        } else {
            self.buffer_bytes.min(desired_bytes)
        };
        Self { buffer_bytes, ..self.clone() }
    }

    /// The configuration with all values clamped to the protocol's limits.
    #[must_use]
    pub(super) fn bounded(&self) -> Self {
        let buffer_bytes = self.buffer_bytes.clamp(LEAST_BUFFER_BYTES, crate::wire::MAX_BYTES);
        Self {
            buffers: self.buffers.clamp(LEAST_BUFFERS, u16::MAX / 4),
            buffer_bytes,
            most_buffer_bytes: self.most_buffer_bytes.clamp(buffer_bytes, crate::wire::MAX_BYTES),
            desired_bytes: self.desired_bytes.clamp(LEAST_BUFFER_BYTES, crate::wire::MAX_BYTES),
            max_adverts: self.max_adverts.max(1),
            ird: self.ird.max(1),
            ord: self.ord.max(1),
            ..self.clone()
        }
    }
}
