//! CRC32c (RFC 3720 section 12.1; RFC 5044 section 4.4 refers to it), alone or in the same pass as a copy.
//!
//! The implementation is chosen at run time: three streams at once with SSE 4.2 and PCLMULQDQ (`crc_x86_64`), one
//! stream with ARMv8's CRC instructions; otherwise the bytes are copied first, and the crate `crc32c` computes the CRC
//! of the private copy.

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[path = "crc_aarch64.rs"]
mod kernel;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod kernel {
    //! No CRC instructions of the processor are used.

    pub(super) fn present() -> bool {
        false
    }

    pub(super) unsafe fn sum<const COPY: bool>(_: u32, _: *const u8, _: *mut u8, _: usize) -> u32 {
        unreachable!("only called when present")
    }
}
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "crc_x86_64.rs"]
mod kernel;

/// See [`super::crc32c`].
#[inline]
pub(super) fn sum(crc: u32, bytes: &[u8]) -> u32 {
    if !kernel::present() {
        return ::crc32c::crc32c_append(crc, bytes);
    }
    // SAFETY: the instructions are present; `bytes` is readable, and nothing is written.
    unsafe { kernel::sum::<false>(crc, bytes.as_ptr(), std::ptr::null_mut(), bytes.len()) }
}

/// See [`super::read_crc32c`].
#[inline]
pub(super) unsafe fn read(crc: u32, from: *const u8, out: &mut [u8]) -> u32 {
    if !kernel::present() {
        // SAFETY: the caller's contract.
        return unsafe { read_in_two_passes(crc, from, out) };
    }
    // SAFETY: the instructions are present; the caller's contract for `from`; `out` is exclusive for its length.
    unsafe { kernel::sum::<true>(crc, from, out.as_mut_ptr(), out.len()) }
}

/// Like [`read`], without our own use of CRC instructions.
///
/// # Safety
/// As [`super::read_crc32c`].
pub(super) unsafe fn read_in_two_passes(crc: u32, from: *const u8, out: &mut [u8]) -> u32 {
    // SAFETY: the caller's contract.
    unsafe { super::read(from, out) };
    ::crc32c::crc32c_append(crc, out)
}
