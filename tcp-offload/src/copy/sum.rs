//! Sums of 32-bit words for the Internet checksum of whole frames.

/// Bytes of a block.
pub(crate) const BLOCK: usize = 32;

/// The sum of the 32-bit words of `blocks` in the machine's byte order. No frame is long enough for an overflow.
#[inline]
pub(crate) fn of_words(blocks: &[[u8; BLOCK]]) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the instructions.
        return unsafe { of_words_avx2(blocks) };
    }
    plain(blocks)
}

/// Like [`of_words`], for every processor.
pub(super) fn plain(blocks: &[[u8; BLOCK]]) -> u64 {
    let words = blocks.iter().flat_map(|block| block.as_chunks::<4>().0);
    words.map(|word| u64::from(u32::from_ne_bytes(*word))).sum()
}

/// Like [`of_words`], with four words per addition.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "the loads need no alignment")]
fn of_words_avx2(blocks: &[[u8; BLOCK]]) -> u64 {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm256_add_epi64, _mm256_cvtepu32_epi64, _mm256_extract_epi64,
        _mm256_setzero_si256,
    };
    let (mut first, mut second) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    for block in blocks {
        let at = block.as_ptr().cast::<__m128i>();
        // SAFETY: the block has twice the bytes of a vector; the loads need no alignment.
        let (low, high) = unsafe { (_mm_loadu_si128(at), _mm_loadu_si128(at.add(1))) };
        first = _mm256_add_epi64(first, _mm256_cvtepu32_epi64(low));
        second = _mm256_add_epi64(second, _mm256_cvtepu32_epi64(high));
    }
    let sum = _mm256_add_epi64(first, second);
    [
        _mm256_extract_epi64::<0>(sum),
        _mm256_extract_epi64::<1>(sum),
        _mm256_extract_epi64::<2>(sum),
        _mm256_extract_epi64::<3>(sum),
    ]
    .map(i64::cast_unsigned)
    .iter()
    .sum()
}
