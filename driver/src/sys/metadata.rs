//! [`TransmitMetadata`]: what the kernel shall do with a frame.

use rustix::net::xdp::XdpUmemRegFlags;

/// Lies directly in front of a frame: the first part of `struct xsk_tx_metadata` of `linux/if_xdp.h`.
#[repr(C)]
pub(super) struct TransmitMetadata {
    flags: u64,
    checksum_start: u16,
    checksum_offset: u16,
    unused: u32,
}

/// Flag: complete a checksum (`XDP_TXMD_FLAGS_CHECKSUM`).
const CHECKSUM: u64 = 1 << 1;

/// Where the checksum is in a TCP header.
const TCP_CHECKSUM: u16 = 16;

impl TransmitMetadata {
    pub(super) const BYTES: usize = size_of::<Self>();

    /// Flag of a registration: frames may have metadata (`XDP_UMEM_TX_METADATA_LEN`).
    pub(super) const REGISTERED: XdpUmemRegFlags = XdpUmemRegFlags::from_bits_retain(1 << 2);

    /// Option of a frame's first descriptor: the frame has metadata (`XDP_TX_METADATA`).
    pub(super) const PRESENT: u32 = 1 << 1;

    /// Completes the checksum of the TCP header that begins at byte `header` of the frame, whose field has the sum of the
    /// pseudo-header.
    pub(super) const fn complete_tcp_checksum(header: u16) -> Self {
        Self { flags: CHECKSUM, checksum_start: header, checksum_offset: TCP_CHECKSUM, unused: 0 }
    }
}
