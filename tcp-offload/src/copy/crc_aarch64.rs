//! ARMv8 (64 bits): the CRC32C instructions, eight bytes at a time.

use std::arch::{
    aarch64::{__crc32cb, __crc32cd},
    asm,
};

/// Whether the processor has the instructions.
#[inline]
pub(super) fn present() -> bool {
    std::arch::is_aarch64_feature_detected!("crc")
}

/// The CRC of bytes whose CRC is `crc`, followed by the `len` bytes at `from`. With `COPY`, the bytes are also stored
/// at `to`; each byte is loaded once.
///
/// # Safety
/// [`present`]. `from` must be readable for `len` bytes as far as the machine is concerned; with `COPY`, `to` must be valid
/// for plain writes of as many, which do not overlap.
#[target_feature(enable = "crc")]
pub(super) unsafe fn sum<const COPY: bool>(
    crc: u32,
    mut from: *const u8,
    mut to: *mut u8,
    mut len: usize,
) -> u32 {
    let mut sum = !crc;
    // SAFETY: every step takes bytes that lie within the `len` bytes which are left.
    unsafe {
        while len >= 8 {
            let word: u64;
            asm!("ldr {w}, [{f}]", w = out(reg) word, f = in(reg) from, options(nostack, preserves_flags));
            // The instruction expects the byte of the lowest address in the lowest bits.
            sum = __crc32cd(sum, word.to_le());
            if COPY {
                to.cast::<[u8; 8]>().write(word.to_ne_bytes());
            }
            from = from.add(8);
            to = to.wrapping_add(8);
            len -= 8;
        }
        for at in 0..len {
            let byte = super::super::load_u8(from.add(at));
            sum = __crc32cb(sum, byte);
            if COPY {
                to.add(at).write(byte);
            }
        }
    }
    !sum
}
