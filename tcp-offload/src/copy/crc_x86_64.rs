//! x86-64: long runs of bytes are folded by carry-less multiplication of vectors, short ones summed by the `crc32`
//! instruction of SSE 4.2.
//!
//! A polynomial of 128 bits is *folded* over a distance: it is multiplied by a power of `x` modulo CRC32c's polynomial, and
//! the bytes at that distance are added. Four vectors are folded side by side, because a multiplication takes longer than
//! the start of the next one. With AVX-512 a vector has 64 bytes, with AVX2 it has 32 (VPCLMULQDQ in both cases).
//!
//! Bytes of shared memory can be folded while they are copied. One pass takes less time than a copy and a fold: the processor
//! folds one vector while it waits for the memory of the next ones.
//!
//! Without VPCLMULQDQ, three thirds of the bytes are summed by `crc32` at the same time, since that instruction has a latency
//! of three cycles and one can start in each, and joined by two carry-less multiplications.

use std::{
    arch::{
        asm,
        x86_64::{
            __m128i, __m256i, __m512i, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u32, _mm_crc32_u64,
            _mm_cvtsi32_si128, _mm_cvtsi128_si64, _mm_extract_epi64, _mm_set_epi64x, _mm_xor_si128,
            _mm256_blend_epi32, _mm256_broadcastsi128_si256, _mm256_castsi256_si128,
            _mm256_clmulepi64_epi128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set_epi32,
            _mm256_set1_epi32, _mm256_setzero_si256, _mm256_storeu_si256, _mm256_xor_si256,
            _mm256_zextsi128_si256, _mm512_broadcast_i32x4, _mm512_castsi512_si128, _mm512_clmulepi64_epi128,
            _mm512_extracti32x4_epi32, _mm512_loadu_si512, _mm512_maskz_set1_epi32, _mm512_setzero_si512,
            _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
        },
    },
    mem,
    sync::atomic::{AtomicU8, Ordering},
};

use crate::copy::{Fault, NumberedGaps, access::fixed_up, read};

/// The polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The sum times `x`, modulo the polynomial. Sums are reflected: the top bit is `x^0`.
const fn times_x(sum: u32) -> u32 {
    (sum >> 1) ^ (if sum & 1 == 1 { POLYNOMIAL } else { 0 })
}

/// The instructions of the processor, of which [`sum`] uses the best.
static LEVEL: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
/// Not even [`STREAMS`].
const NONE: u8 = 1;
/// SSE 4.2 and PCLMULQDQ.
const STREAMS: u8 = 2;
/// Also AVX2 and VPCLMULQDQ.
const FOLD_256: u8 = 3;
/// Also AVX-512.
const FOLD_512: u8 = 4;

/// Whether the processor is already known to have the instructions of [`sum`].
#[inline]
pub(super) fn known() -> bool {
    LEVEL.load(Ordering::Relaxed) >= STREAMS
}

/// Whether the processor has the instructions of [`sum`].
#[inline]
pub(super) fn present() -> bool {
    level() >= STREAMS
}

#[inline]
fn level() -> u8 {
    match LEVEL.load(Ordering::Relaxed) {
        UNKNOWN => detect(),
        known => known,
    }
}

#[cold]
fn detect() -> u8 {
    let streams = is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq");
    let fold_256 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("vpclmulqdq");
    let level = match (streams, fold_256, is_x86_feature_detected!("avx512f")) {
        (true, true, true) => FOLD_512,
        (true, true, false) => FOLD_256,
        (true, false, _) => STREAMS,
        (false, ..) => NONE,
    };
    LEVEL.store(level, Ordering::Relaxed);
    level
}

/// Whether the processor has the instructions of [`avx512`].
#[cfg(test)]
pub(in crate::copy) fn has_512() -> bool {
    level() >= FOLD_512
}

/// Whether the processor has the instructions of [`avx2`].
#[cfg(test)]
pub(in crate::copy) fn has_256() -> bool {
    level() >= FOLD_256
}

/// Fewer bytes than this are summed in one stream, whatever the processor has.
const SHORT: usize = 4 * VECTOR_256;

/// The CRC of bytes whose CRC is `crc`, followed by `bytes`.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub(super) fn sum(crc: u32, bytes: &[u8]) -> u32 {
    if bytes.len() < SHORT { !one_stream(!crc, bytes) } else { sum_long(crc, bytes) }
}

/// [`sum`] of at least [`SHORT`] bytes.
#[inline(never)]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn sum_long(crc: u32, bytes: &[u8]) -> u32 {
    let (mut sum, mut rest) = (!crc, bytes);
    match level() {
        // SAFETY: the processor has the instructions.
        FOLD_512 if bytes.len() >= 4 * VECTOR_512 => (sum, rest) = unsafe { avx512::folded(sum, bytes) },
        FOLD_512 | FOLD_256 => {
            // SAFETY: as above.
            (sum, rest) = unsafe { avx2::folded(sum, bytes) }
        }
        _ => {
            while rest.len() >= ROW * LEAST_ROWS {
                (sum, rest) = three_streams(sum, rest);
            }
        }
    }
    !one_stream(sum, rest)
}

/// Appends `bytes` to `sum`, which is not inverted, word by word. The last word is often a half one: the bytes that MPA's CRC
/// covers are a multiple of four.
#[inline]
#[target_feature(enable = "sse4.2")]
fn one_stream(sum: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut sum = u64::from(sum);
    for word in words {
        sum = _mm_crc32_u64(sum, u64::from_le_bytes(*word));
    }
    let (halves, rest) = rest.as_chunks::<4>();
    let mut sum = sum as u32;
    for half in halves {
        sum = _mm_crc32_u32(sum, u32::from_le_bytes(*half));
    }
    for byte in rest {
        sum = _mm_crc32_u8(sum, *byte);
    }
    sum
}

// ----- three streams -----

/// Bytes of one word of each stream.
const ROW: usize = 24;
/// Fewest rows of three streams: joining them takes as long as summing some words.
const LEAST_ROWS: usize = 6;
/// Most rows of three streams: more would need a larger table.
const MAX_ROWS: usize = 128;

/// For `n` words that follow: `x^(64n - 33)` modulo the polynomial. A `crc32` instruction reduces the product with a sum
/// and multiplies it by `x^32`; the reflection of a product is one more `x`.
const SHIFT: [u32; 2 * MAX_ROWS + 1] = {
    let mut table = [0; 2 * MAX_ROWS + 1];
    // x^31.
    let mut power: u32 = 1;
    let mut words = 1;
    while words < table.len() {
        table[words] = power;
        let mut bit = 0;
        while bit < 64 {
            power = times_x(power);
            bit += 1;
        }
        words += 1;
    }
    table
};

/// Appends the first of `bytes`, which are at least [`ROW`], to `sum`, which is not inverted; returns the bytes that are left.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn three_streams(sum: u32, bytes: &[u8]) -> (u32, &[u8]) {
    let rows = (bytes.len() / ROW).min(MAX_ROWS);
    let (bytes, rest) = bytes.split_at(ROW * rows);
    let (first, others) = bytes.as_chunks::<8>().0.split_at(rows);
    let (second, third) = others.split_at(rows);
    let (mut a, mut b, mut c) = (u64::from(sum), 0, 0);
    for ((x, y), z) in first.iter().zip(second).zip(third) {
        a = _mm_crc32_u64(a, u64::from_le_bytes(*x));
        b = _mm_crc32_u64(b, u64::from_le_bytes(*y));
        c = _mm_crc32_u64(c, u64::from_le_bytes(*z));
    }
    let shifted = |sum: u64, words: usize| {
        let (sum, power) = (_mm_cvtsi32_si128(sum as i32), _mm_cvtsi32_si128(SHIFT[words] as i32));
        _mm_clmulepi64_si128::<0>(sum, power)
    };
    let joined = _mm_xor_si128(shifted(a, 2 * rows), shifted(b, rows));
    ((c ^ _mm_crc32_u64(0, _mm_cvtsi128_si64(joined) as u64)) as u32, rest)
}

// ----- folding -----

/// Bytes of a vector of AVX-512.
const VECTOR_512: usize = 64;
/// Bytes of a vector of AVX2.
const VECTOR_256: usize = 32;

/// The factors that fold 128 bits over `bytes`: of the low half, which has the higher powers of `x`, and of the high half.
/// With a distance of `d` bits these are `x^(d + 63)` and `x^(d - 1)`, because the reflection of a product is one more `x`.
const fn distance(bytes: usize) -> [u64; 2] {
    [power(8 * bytes + 63), power(8 * bytes - 1)]
}

/// `x^n` modulo the polynomial, in the upper half of a reflected word of 64 bits.
const fn power(n: usize) -> u64 {
    let mut power: u32 = 1 << 31;
    let mut k = 0;
    while k < n {
        power = times_x(power);
        k += 1;
    }
    (power as u64) << 32
}

/// `x` folded over the distance of `factors`.
#[inline]
#[target_feature(enable = "pclmulqdq")]
fn fold_128(x: __m128i, factors: [u64; 2]) -> __m128i {
    let factors = _mm_set_epi64x(factors[1].cast_signed(), factors[0].cast_signed());
    _mm_xor_si128(_mm_clmulepi64_si128::<0x00>(x, factors), _mm_clmulepi64_si128::<0x11>(x, factors))
}

/// The sum of the 16 bytes to which everything was folded.
#[inline]
#[target_feature(enable = "sse4.2")]
fn reduce(x: __m128i) -> u32 {
    let low = _mm_crc32_u64(0, _mm_cvtsi128_si64(x).cast_unsigned());
    _mm_crc32_u64(low, _mm_extract_epi64::<1>(x).cast_unsigned()) as u32
}

/// Fewest bytes that are worth copying and summing in one pass.
pub(in crate::copy) const LEAST_COPIED: usize = 1024;
/// Bytes from the start of one gap to the start of the next when a copy fills the gaps.
const SPAN: usize = 512;

/// See [`super::copy`].
#[inline]
pub(super) unsafe fn copy(
    crc: u32,
    from: *const u8,
    to: &mut [u8],
    gaps: NumberedGaps,
) -> Result<Option<u32>, Fault> {
    if to.len() < LEAST_COPIED || !gaps.are(size_of::<u32>(), SPAN) {
        return Ok(None);
    }
    let sum = match level() {
        // SAFETY: the processor has the instructions; the caller's contract.
        FOLD_512 => unsafe { avx512::copied(!crc, from, to, gaps) }?,
        // SAFETY: as above.
        FOLD_256 => unsafe { avx2::copied(!crc, from, to, gaps) }?,
        _ => return Ok(None),
    };
    Ok(Some(!sum))
}

/// Defines the folding of long runs of bytes with vectors of `$bytes` bytes, by the operations of the module.
macro_rules! folding {
    ($bytes:ident, $vector:ident, $features:literal) => {
        /// Appends the whole vectors of `bytes`, at least four, to `sum`, which is not inverted. Returns the bytes that are left.
        #[target_feature(enable = $features)]
        pub(super) fn folded(sum: u32, bytes: &[u8]) -> (u32, &[u8]) {
            let (vectors, rest) = bytes.as_chunks::<$bytes>();
            let (fours, singles) = vectors.as_chunks::<4>();
            let Some((first, fours)) = fours.split_first() else { return (sum, bytes) };
            let mut x = [load(&first[0]), load(&first[1]), load(&first[2]), load(&first[3])];
            x[0] = add_sum(x[0], sum);
            let over_four = splat(const { distance(4 * $bytes) });
            for four in fours {
                for (x, next) in x.iter_mut().zip(four) {
                    *x = fold(*x, over_four, load(next));
                }
            }
            let over_one = splat(const { distance($bytes) });
            let mut x = together(x);
            for single in singles {
                x = fold(x, over_one, load(single));
            }
            (reduce(join(x)), rest)
        }

        /// Copies the shared memory at `from` to all of `to` except its gaps, which are [`SPAN`] apart, and fills
        /// the gaps. Appends `to`, which is at least [`LEAST_COPIED`](super::LEAST_COPIED), to `sum`, which is not inverted.
        ///
        /// # Safety
        /// As [`super::copy`].
        #[target_feature(enable = $features)]
        pub(in crate::copy) unsafe fn copied(
            sum: u32,
            mut from: *const u8,
            to: &mut [u8],
            mut gaps: NumberedGaps,
        ) -> Result<u32, Fault> {
            // So many bytes lie in front of the vectors that every later gap is the end of one.
            let first_end = gaps.first_end().filter(|end| *end <= to.len());
            let begin = first_end.map_or(0, |end| if end < $bytes { end } else { end % $bytes });
            let (front, rest) = to.split_at_mut(begin);
            let gap_len = if first_end == Some(begin) { gaps.len() } else { 0 };
            let (bytes, gap) = front.split_at_mut(begin - gap_len);
            // SAFETY: the caller's contract; no gap is in `bytes`.
            unsafe { read(from, bytes) }?;
            // SAFETY: the address lies in the memory, or one past its end.
            from = unsafe { from.add(bytes.len()) };
            if let Some(gap) = gap.first_chunk_mut() {
                *gap = gaps.next();
            }
            let mut folded = Folded { last: [zero(); 4], sum: one_stream(sum, front), faulted: 0 };

            // Vectors up to the end of the first gap, spans up to the end of each later one, and the vectors behind the last one.
            let (before, rest) = rest.split_at_mut(first_end.map_or(0, |end| end - begin));
            if !before.is_empty() {
                // SAFETY: the caller's contract; `before` ends with the first gap.
                unsafe { folded.put_span(before, &mut from, gaps.next()) };
            }
            let spans_len = first_end.map_or(0, |_| rest.len() - rest.len() % SPAN);
            let (spans, rest) = rest.split_at_mut(spans_len);
            for span in spans.as_chunks_mut::<SPAN>().0 {
                // SAFETY: the caller's contract; each span ends with a gap.
                unsafe { folded.put_span(span, &mut from, gaps.next()) };
            }
            let (vectors, tail) = rest.as_chunks_mut();
            for to in vectors {
                // SAFETY: the caller's contract; no gap is in the vector.
                let vector = unsafe { load_shared(&mut from, &mut folded.faulted) };
                folded.put(to, vector);
            }
            if folded.faulted != 0 {
                return Err(Fault);
            }
            let sum = reduce(join(together(folded.last)));
            // SAFETY: the caller's contract; `tail` is shorter than a vector, so no gap is in it.
            unsafe { read(from, tail) }?;
            Ok(one_stream(sum, tail))
        }

        /// Vectors that are folded one after the other.
        struct Folded {
            /// The last four vectors, each with the earlier ones at multiples of four vectors from it.
            last: [$vector; 4],
            /// The sum of what is in front of the first vector; 0 behind it.
            sum: u32,
            /// 1: the load of a vector has faulted, and the vectors since then are undefined.
            faulted: u32,
        }

        impl Folded {
            /// Stores the next vector in `to`, and folds it.
            #[inline]
            #[target_feature(enable = $features)]
            fn put(&mut self, to: &mut [u8; $bytes], vector: $vector) {
                store(to, vector);
                let [a, b, c, d] = self.last;
                let next = add_sum(vector, mem::take(&mut self.sum));
                self.last = [b, c, d, fold(a, splat(const { distance(4 * $bytes) }), next)];
            }

            /// Stores the next bytes of shared memory in the whole vectors of `to`, with `gap` at their end, and folds them.
            ///
            /// # Safety
            /// As [`super::copy`]; the only gap of `to` is at its end.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn put_span(&mut self, to: &mut [u8], from: &mut *const u8, gap: [u8; 4]) {
                let Some((last, others)) = to.as_chunks_mut().0.split_last_mut() else { return };
                for to in others {
                    // SAFETY: the caller's contract.
                    let vector = unsafe { load_shared(from, &mut self.faulted) };
                    self.put(to, vector);
                }
                // SAFETY: the caller's contract.
                let vector = unsafe { load_shared_before(from, gap, &mut self.faulted) };
                self.put(last, vector);
            }
        }

        /// Four successive vectors, folded into the last one.
        #[inline]
        #[target_feature(enable = $features)]
        fn together([a, b, c, d]: [$vector; 4]) -> $vector {
            let over_one = splat(const { distance($bytes) });
            let over_two = splat(const { distance(2 * $bytes) });
            let (a, b) = (fold(a, over_two, c), fold(b, over_two, d));
            fold(a, over_one, b)
        }
    };
}

pub(in crate::copy) mod avx512 {
    //! Vectors of 64 bytes.

    use super::{
        __m128i, __m512i, _mm_cvtsi32_si128, _mm_set_epi64x, _mm_xor_si128, _mm512_broadcast_i32x4,
        _mm512_castsi512_si128, _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_loadu_si512,
        _mm512_maskz_set1_epi32, _mm512_setzero_si512, _mm512_storeu_si512, _mm512_ternarylogic_epi64,
        _mm512_xor_si512, _mm512_zextsi128_si512, Fault, NumberedGaps, SPAN, VECTOR_512, asm, distance,
        fixed_up, fold_128, mem, one_stream, read, reduce,
    };

    folding!(VECTOR_512, __m512i, "avx512f,vpclmulqdq,sse4.2,pclmulqdq");

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn zero() -> __m512i {
        _mm512_setzero_si512()
    }

    /// The next 64 bytes of shared memory, behind which `from` then points.
    ///
    /// # Safety
    /// The bytes must be mapped and readable.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_shared(from: &mut *const u8, faulted: &mut u32) -> __m512i {
        let vector;
        // SAFETY: the caller's contract, also for the address behind the bytes.
        unsafe {
            asm!(
                "2:",
                "vmovdqu64 {v}, [{f}]",
                "3:",
                fixed_up!(),
                v = out(zmm_reg) vector,
                f = in(reg) *from,
                e = inout(reg) *faulted,
                options(nostack, preserves_flags),
            );
            *from = from.add(64);
        }
        vector
    }

    /// The next 60 bytes of shared memory, behind which `from` then points, and `gap`.
    ///
    /// # Safety
    /// The bytes must be mapped and readable.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_shared_before(from: &mut *const u8, gap: [u8; 4], faulted: &mut u32) -> __m512i {
        let mut vector = _mm512_maskz_set1_epi32(1 << 15, i32::from_le_bytes(gap));
        // SAFETY: the caller's contract, also for the address behind the bytes; masked words are not accessed.
        unsafe {
            asm!(
                "2:",
                "vmovdqu32 {v}{{{k}}}, [{f}]",
                "3:",
                fixed_up!(),
                v = inout(zmm_reg) vector,
                k = in(kreg) 0x7fff_u16,
                f = in(reg) *from,
                e = inout(reg) *faulted,
                options(nostack, preserves_flags),
            );
            *from = from.add(60);
        }
        vector
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(to: &mut [u8; 64], vector: __m512i) {
        // SAFETY: 64 bytes are writable; the store needs no alignment.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), vector) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(bytes: &[u8; 64]) -> __m512i {
        // SAFETY: 64 bytes are readable; the load needs no alignment.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn splat(factors: [u64; 2]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_set_epi64x(factors[1].cast_signed(), factors[0].cast_signed()))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add_sum(x: __m512i, sum: u32) -> __m512i {
        _mm512_xor_si512(x, _mm512_zextsi128_si512(_mm_cvtsi32_si128(sum.cast_signed())))
    }

    /// Each 128 bits of `x`, folded over the distance of `factors`, plus those of `next`.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold(x: __m512i, factors: __m512i, next: __m512i) -> __m512i {
        let low = _mm512_clmulepi64_epi128::<0x00>(x, factors);
        let high = _mm512_clmulepi64_epi128::<0x11>(x, factors);
        // The truth table of the exclusive or of three bits.
        _mm512_ternarylogic_epi64::<0x96>(low, high, next)
    }

    /// The parts of 128 bits, folded into the last one.
    #[inline]
    #[target_feature(enable = "avx512f,pclmulqdq")]
    fn join(x: __m512i) -> __m128i {
        let first = fold_128(_mm512_castsi512_si128(x), const { distance(48) });
        let second = fold_128(_mm512_extracti32x4_epi32::<1>(x), const { distance(32) });
        let third = fold_128(_mm512_extracti32x4_epi32::<2>(x), const { distance(16) });
        let last = _mm512_extracti32x4_epi32::<3>(x);
        _mm_xor_si128(_mm_xor_si128(first, second), _mm_xor_si128(third, last))
    }
}

pub(in crate::copy) mod avx2 {
    //! Vectors of 32 bytes.

    use super::{
        __m128i, __m256i, _mm_cvtsi32_si128, _mm_set_epi64x, _mm_xor_si128, _mm256_blend_epi32,
        _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_set_epi32, _mm256_set1_epi32,
        _mm256_setzero_si256, _mm256_storeu_si256, _mm256_xor_si256, _mm256_zextsi128_si256, Fault,
        NumberedGaps, SPAN, VECTOR_256, asm, distance, fixed_up, fold_128, mem, one_stream, read, reduce,
    };

    folding!(VECTOR_256, __m256i, "avx2,vpclmulqdq,sse4.2,pclmulqdq");

    #[inline]
    #[target_feature(enable = "avx2")]
    fn zero() -> __m256i {
        _mm256_setzero_si256()
    }

    /// The next 32 bytes of shared memory, behind which `from` then points.
    ///
    /// # Safety
    /// The bytes must be mapped and readable.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_shared(from: &mut *const u8, faulted: &mut u32) -> __m256i {
        let vector;
        // SAFETY: the caller's contract, also for the address behind the bytes.
        unsafe {
            asm!(
                "2:",
                "vmovdqu {v}, [{f}]",
                "3:",
                fixed_up!(),
                v = out(ymm_reg) vector,
                f = in(reg) *from,
                e = inout(reg) *faulted,
                options(nostack, preserves_flags),
            );
            *from = from.add(32);
        }
        vector
    }

    /// The next 28 bytes of shared memory, behind which `from` then points, and `gap`.
    ///
    /// # Safety
    /// The bytes must be mapped and readable.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_shared_before(from: &mut *const u8, gap: [u8; 4], faulted: &mut u32) -> __m256i {
        let words = _mm256_set_epi32(0, -1, -1, -1, -1, -1, -1, -1);
        let vector: __m256i;
        // SAFETY: the caller's contract, also for the address behind the bytes; masked words are not accessed.
        unsafe {
            asm!(
                "2:",
                "vpmaskmovd {v}, {k}, [{f}]",
                "3:",
                fixed_up!(),
                v = out(ymm_reg) vector,
                k = in(ymm_reg) words,
                f = in(reg) *from,
                e = inout(reg) *faulted,
                options(nostack, preserves_flags),
            );
            *from = from.add(28);
        }
        _mm256_blend_epi32::<{ 1 << 7 }>(vector, _mm256_set1_epi32(i32::from_le_bytes(gap)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store(to: &mut [u8; 32], vector: __m256i) {
        // SAFETY: 32 bytes are writable; the store needs no alignment.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), vector) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8; 32]) -> __m256i {
        // SAFETY: 32 bytes are readable; the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn splat(factors: [u64; 2]) -> __m256i {
        _mm256_broadcastsi128_si256(_mm_set_epi64x(factors[1].cast_signed(), factors[0].cast_signed()))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn add_sum(x: __m256i, sum: u32) -> __m256i {
        _mm256_xor_si256(x, _mm256_zextsi128_si256(_mm_cvtsi32_si128(sum.cast_signed())))
    }

    /// Each 128 bits of `x`, folded over the distance of `factors`, plus those of `next`.
    #[inline]
    #[target_feature(enable = "avx2,vpclmulqdq")]
    fn fold(x: __m256i, factors: __m256i, next: __m256i) -> __m256i {
        let low = _mm256_clmulepi64_epi128::<0x00>(x, factors);
        let high = _mm256_clmulepi64_epi128::<0x11>(x, factors);
        _mm256_xor_si256(_mm256_xor_si256(low, high), next)
    }

    /// The parts of 128 bits, folded into the last one.
    #[inline]
    #[target_feature(enable = "avx2,pclmulqdq")]
    fn join(x: __m256i) -> __m128i {
        let first = fold_128(_mm256_castsi256_si128(x), const { distance(16) });
        _mm_xor_si128(first, _mm256_extracti128_si256::<1>(x))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::{GappedMut, Gaps, Sum};

    /// Each of the ways that the processor has, also the ones that [`sum`] does not choose.
    #[test]
    fn every_way_to_the_crc_agrees_with_the_crate() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in (256..=800).chain([1448, 1460, 3071, 3072, 3073, 4096, 8960, 20_000]) {
            for at in [0, 1, 13].into_iter().filter(|at| at + len <= bytes.len()) {
                let bytes = &bytes[at..at + len];
                let expected = ::crc32c::crc32c_append(0x1234_5678, bytes);
                let check = |way: &str, (sum, rest): (u32, &[u8])| {
                    // SAFETY: all ways need the instructions of `one_stream`.
                    assert_eq!(unsafe { !one_stream(sum, rest) }, expected, "{way}, {len} bytes at {at}");
                };
                if level() >= FOLD_512 {
                    // SAFETY: the processor has the instructions.
                    check("AVX-512", unsafe { avx512::folded(!0x1234_5678, bytes) });
                }
                if level() >= FOLD_256 {
                    // SAFETY: as above.
                    check("AVX2", unsafe { avx2::folded(!0x1234_5678, bytes) });
                }
                if present() {
                    // SAFETY: as above.
                    check("three streams", unsafe { three_streams(!0x1234_5678, bytes) });
                }
            }
        }
    }

    type Copied = unsafe fn(u32, *const u8, &mut [u8], NumberedGaps) -> Result<u32, Fault>;

    /// Each of the ways that the processor has, wherever the gaps lie.
    #[test]
    fn every_way_to_copy_and_sum_agrees_with_several_passes() {
        let bytes: Vec<u8> = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for len in (LEAST_COPIED..=LEAST_COPIED + 70).chain([1448, 3774, 3840]) {
            for first in (0..=SPAN).chain([usize::MAX]) {
                let gaps = Gaps { first, between: 508, len: 4 };
                // The space ends with a byte, not within a gap or behind one.
                let n = gaps.bytes_in(len);
                let len = gaps.space_of(n);
                let mut expected = vec![0; len];
                let mut space = GappedMut { bytes: &mut expected, len: n, gaps, sum: Sum::Apart };
                space.copy_from_slice(&bytes[..n]);
                for (number, at) in (first..len).step_by(512).enumerate() {
                    expected[at..at + 4].copy_from_slice(&(77 + 512 * number as u32).to_be_bytes());
                }
                let crc = ::crc32c::crc32c_append(0x1234_5678, &expected);
                let check = |way: &str, copied: Copied| {
                    let mut to = vec![0xee; len + 2];
                    let gaps = gaps.numbered(77);
                    // SAFETY: the processor has the instructions; `bytes` has the bytes of the space.
                    let sum =
                        unsafe { copied(!0x1234_5678, bytes.as_ptr(), &mut to[1..=len], gaps) }.unwrap();
                    assert_eq!(to[1..=len], expected, "{way}, {len} bytes, first gap at {first}");
                    assert_eq!((to[0], to[len + 1]), (0xee, 0xee), "{way}, around {len} bytes");
                    assert_eq!(!sum, crc, "{way}, {len} bytes, first gap at {first}");
                };
                if level() >= FOLD_512 {
                    check("AVX-512", avx512::copied);
                }
                if level() >= FOLD_256 {
                    check("AVX2", avx2::copied);
                }
            }
        }
    }
}
