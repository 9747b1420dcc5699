//! x86-64: the `crc32` instruction of SSE 4.2, which processes eight bytes, in three streams.
//!
//! The instruction has a latency of three cycles, and one can start in each cycle. Therefore the bytes are cut into
//! three parts that are summed at the same time, while each word moves from its load to its store through a register.
//! The three sums are joined by carry-less multiplication: the sum of bytes followed by `n` zero bytes is the sum of
//! the bytes times `x^8n`, modulo the polynomial.

use std::{
    arch::{
        asm,
        x86_64::{
            _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64, _mm_cvtsi32_si128,
            _mm_cvtsi128_si64, _mm_xor_si128,
        },
    },
    sync::atomic::{AtomicU8, Ordering},
};

/// The polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// Most words of a stream: more would need a larger table.
const MOST_WORDS: usize = 128;
/// Least words of a stream: joining the streams takes as long as summing some words.
const LEAST_WORDS: usize = 6;
/// Bytes of one word of each stream.
const ROW: usize = 24;

/// For `n` words that follow: `x^(64n - 33)` modulo the polynomial, reflected (the top bit is `x^0`). A `crc32` instruction reduces
/// the product with a sum and multiplies it by `x^32`; the reflection of a product is one more `x`.
const SHIFT: [u32; 2 * MOST_WORDS + 1] = {
    let mut table = [0; 2 * MOST_WORDS + 1];
    // x^31.
    let mut power: u32 = 1;
    let mut words = 1;
    while words < table.len() {
        table[words] = power;
        let mut bit = 0;
        while bit < 64 {
            power = (power >> 1) ^ (if power & 1 == 1 { POLYNOMIAL } else { 0 });
            bit += 1;
        }
        words += 1;
    }
    table
};

/// Whether the processor has the instructions: one load answers for both of them, once for each piece of a copy.
static PRESENT: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const ABSENT: u8 = 1;
const FOUND: u8 = 2;

/// Whether the processor has the instructions.
#[inline]
pub(super) fn present() -> bool {
    match PRESENT.load(Ordering::Relaxed) {
        UNKNOWN => detect(),
        known => known == FOUND,
    }
}

#[cold]
fn detect() -> bool {
    let found = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq");
    PRESENT.store(if found { FOUND } else { ABSENT }, Ordering::Relaxed);
    found
}

/// The CRC of bytes whose CRC is `crc`, followed by the `len` bytes at `from`. With `COPY`, the bytes are also stored
/// at `to`; each byte is loaded once.
///
/// # Safety
/// [`present`]. `from` must be readable for `len` bytes as far as the machine is concerned; with `COPY`, `to` must be valid
/// for plain writes of as many, which do not overlap.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub(super) unsafe fn sum<const COPY: bool>(
    crc: u32,
    mut from: *const u8,
    mut to: *mut u8,
    mut len: usize,
) -> u32 {
    let mut sum = u64::from(!crc);
    // SAFETY: every step takes bytes that lie within the `len` bytes which are left.
    unsafe {
        while len >= ROW * LEAST_WORDS {
            let words = (len / ROW).min(MOST_WORDS);
            sum = three_streams::<COPY>(sum, from, to, words);
            from = from.add(ROW * words);
            to = to.wrapping_add(ROW * words);
            len -= ROW * words;
        }
        while len >= 8 {
            let word: u64;
            asm!("mov {w}, qword ptr [{f}]", w = out(reg) word, f = in(reg) from, options(nostack, preserves_flags));
            sum = _mm_crc32_u64(sum, word);
            store::<COPY>(to, word);
            from = from.add(8);
            to = to.wrapping_add(8);
            len -= 8;
        }
        if len >= 4 {
            let word: u32;
            asm!("mov {w:e}, dword ptr [{f}]", w = out(reg) word, f = in(reg) from, options(nostack, preserves_flags));
            sum = u64::from(_mm_crc32_u32(sum as u32, word));
            if COPY {
                to.cast::<[u8; 4]>().write(word.to_ne_bytes());
            }
            from = from.add(4);
            to = to.wrapping_add(4);
            len -= 4;
        }
        for at in 0..len {
            let byte = super::super::load_u8(from.add(at));
            sum = u64::from(_mm_crc32_u8(sum as u32, byte));
            if COPY {
                to.add(at).write(byte);
            }
        }
    }
    !(sum as u32)
}

/// Stores `word` at `to` if `COPY`.
///
/// # Safety
/// With `COPY`, `to` must be valid for a write of eight bytes.
#[inline]
unsafe fn store<const COPY: bool>(to: *mut u8, word: u64) {
    if COPY {
        // SAFETY: the caller's contract.
        unsafe { to.cast::<[u8; 8]>().write(word.to_ne_bytes()) };
    }
}

/// Like [`sum`], for three times `words` words; `words` is between 1 and [`MOST_WORDS`]. The argument `sum` is not
/// inverted.
///
/// # Safety
/// As [`sum`].
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
unsafe fn three_streams<const COPY: bool>(sum: u64, from: *const u8, to: *mut u8, words: usize) -> u64 {
    let stride = 8 * words;
    let (mut a, mut b, mut c) = (sum, 0, 0);
    let mut at = 0;
    // SAFETY: each pass takes the word at `at`, or that and the next, of the three streams, which lie `stride` bytes apart.
    unsafe {
        if !words.is_multiple_of(2) {
            let (a0, b0, c0): (u64, u64, u64);
            asm!(
                "mov {a}, qword ptr [{f}]",
                "mov {b}, qword ptr [{f} + {s}]",
                "mov {c}, qword ptr [{f} + 2 * {s}]",
                a = out(reg) a0,
                b = out(reg) b0,
                c = out(reg) c0,
                f = in(reg) from,
                s = in(reg) stride,
                options(nostack, preserves_flags),
            );
            a = _mm_crc32_u64(a, a0);
            b = _mm_crc32_u64(b, b0);
            c = _mm_crc32_u64(c, c0);
            store::<COPY>(to, a0);
            store::<COPY>(to.wrapping_add(stride), b0);
            store::<COPY>(to.wrapping_add(2 * stride), c0);
            at = 8;
        }
        while at < stride {
            let (a0, b0, c0, a1, b1, c1): (u64, u64, u64, u64, u64, u64);
            asm!(
                "mov {a0}, qword ptr [{f}]",
                "mov {b0}, qword ptr [{f} + {s}]",
                "mov {c0}, qword ptr [{f} + 2 * {s}]",
                "mov {a1}, qword ptr [{f} + 8]",
                "mov {b1}, qword ptr [{f} + {s} + 8]",
                "mov {c1}, qword ptr [{f} + 2 * {s} + 8]",
                a0 = out(reg) a0,
                b0 = out(reg) b0,
                c0 = out(reg) c0,
                a1 = out(reg) a1,
                b1 = out(reg) b1,
                c1 = out(reg) c1,
                f = in(reg) from.add(at),
                s = in(reg) stride,
                options(nostack, preserves_flags),
            );
            let to = to.wrapping_add(at);
            a = _mm_crc32_u64(a, a0);
            b = _mm_crc32_u64(b, b0);
            c = _mm_crc32_u64(c, c0);
            store::<COPY>(to, a0);
            store::<COPY>(to.wrapping_add(stride), b0);
            store::<COPY>(to.wrapping_add(2 * stride), c0);
            a = _mm_crc32_u64(a, a1);
            b = _mm_crc32_u64(b, b1);
            c = _mm_crc32_u64(c, c1);
            store::<COPY>(to.wrapping_add(8), a1);
            store::<COPY>(to.wrapping_add(stride + 8), b1);
            store::<COPY>(to.wrapping_add(2 * stride + 8), c1);
            at += 16;
        }
    }
    let times = |sum: u64, words: usize| {
        let (sum, power) = (_mm_cvtsi32_si128(sum as i32), _mm_cvtsi32_si128(SHIFT[words] as i32));
        _mm_clmulepi64_si128::<0>(sum, power)
    };
    let joined = _mm_xor_si128(times(a, 2 * words), times(b, words));
    c ^ _mm_crc32_u64(0, _mm_cvtsi128_si64(joined) as u64)
}
