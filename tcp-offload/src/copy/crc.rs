//! CRC32c (RFC 3720 section 12.1; RFC 5044 section 4.4 refers to it) of private bytes.
//!
//! The implementation is chosen at run time: carry-less multiplication or CRC instructions of x86-64 (`crc_x86_64`), the
//! CRC instructions of ARMv8, otherwise the crate `crc32c`.

use super::{Fault, NumberedGaps};

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[path = "crc_aarch64.rs"]
mod kernel;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod kernel {
    //! No CRC instructions of the processor are used.

    pub(super) fn known() -> bool {
        false
    }

    pub(super) fn present() -> bool {
        false
    }

    pub(super) unsafe fn sum(_: u32, _: &[u8]) -> u32 {
        unreachable!("only called when present")
    }

    pub(super) unsafe fn copy(
        _: u32,
        _: *const u8,
        _: &mut [u8],
        _: crate::copy::NumberedGaps,
    ) -> Result<Option<u32>, crate::copy::Fault> {
        Ok(None)
    }
}
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "crc_x86_64.rs"]
pub(super) mod kernel;

/// See [`super::crc32c`].
#[inline]
pub(super) fn sum(crc: u32, bytes: &[u8]) -> u32 {
    if kernel::known() {
        // SAFETY: the instructions are present.
        return unsafe { kernel::sum(crc, bytes) };
    }
    sum_otherwise(crc, bytes)
}

/// Copies the shared memory at `from` to all of `to` except its gaps, and fills the gaps. Returns the CRC of bytes whose CRC is
/// `crc`, followed by `to`. `None`, and nothing is written, when several passes take less time.
///
/// # Safety
/// As [`super::read()`], for the bytes of `to` that are outside of gaps.
#[inline]
pub(super) unsafe fn copy(
    crc: u32,
    from: *const u8,
    to: &mut [u8],
    gaps: NumberedGaps,
) -> Result<Option<u32>, Fault> {
    // SAFETY: the caller's contract.
    unsafe { kernel::copy(crc, from, to, gaps) }
}

/// [`sum`] when the instructions are not [known](kernel::known) to be present. Apart from it, so that it saves no registers.
#[inline(never)]
fn sum_otherwise(crc: u32, bytes: &[u8]) -> u32 {
    if !kernel::present() {
        return ::crc32c::crc32c_append(crc, bytes);
    }
    // SAFETY: the instructions are present.
    unsafe { kernel::sum(crc, bytes) }
}
