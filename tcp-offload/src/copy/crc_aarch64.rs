//! ARMv8 (64 bits): the CRC32C instructions, eight bytes at a time.

use std::arch::aarch64::{__crc32cb, __crc32cd};

use crate::copy::{Fault, NumberedGaps};

/// Whether the processor has the instructions of [`sum`].
#[inline]
pub(super) fn present() -> bool {
    std::arch::is_aarch64_feature_detected!("crc")
}

/// Whether the processor is already known to have the instructions of [`sum`].
#[inline]
pub(super) fn known() -> bool {
    present()
}

/// The CRC of bytes whose CRC is `crc`, followed by `bytes`.
#[target_feature(enable = "crc")]
pub(super) fn sum(crc: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut sum = !crc;
    for word in words {
        // The instruction expects the byte of the lowest address in the lowest bits.
        sum = __crc32cd(sum, u64::from_le_bytes(*word));
    }
    for byte in rest {
        sum = __crc32cb(sum, *byte);
    }
    !sum
}

/// See [`super::copy`]. There is no code for one pass.
pub(super) unsafe fn copy(_: u32, _: *const u8, _: &mut [u8], _: NumberedGaps) -> Result<Option<u32>, Fault> {
    Ok(None)
}
