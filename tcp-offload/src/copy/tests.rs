//! The copies compared with plain slices, for all short lengths and alignments, and under concurrent use. For Miri:
//! `cargo +nightly miri test -p xwarp-tcp --lib copy::`.

use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proptest::prelude::*;

use super::*;

/// Step between tested lengths and alignments: all are tested natively, a few under Miri, which is slow.
const STEP: usize = if cfg!(miri) { 37 } else { 1 };
/// Repetitions of concurrent operations.
const REPEAT: u64 = if cfg!(miri) { 20 } else { 20_000 };

/// Bytes that several threads access, only through this module.
#[repr(align(64))]
struct Shared<const N: usize>(UnsafeCell<[u8; N]>);

// SAFETY: all accesses go through this module.
unsafe impl<const N: usize> Sync for Shared<N> {}

impl<const N: usize> Shared<N> {
    fn new() -> Self {
        Self(UnsafeCell::new([0; N]))
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= N);
        // SAFETY: within the array or one past its end.
        unsafe { self.0.get().cast::<u8>().add(offset) }
    }
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251 + salt) as u8).collect()
}

#[test]
fn copies_move_exactly_the_given_bytes_at_every_length_and_alignment() {
    const MARGIN: usize = 64;
    let shared = Shared::<1024>::new();
    for len in (0..=600).step_by(STEP) {
        for align in (0..64).step_by(if len < 300 { STEP } else { 7 * STEP }) {
            // SAFETY: everything lies within the 1024 bytes.
            unsafe { write(shared.at(0), &[0xee; 1024]) }.unwrap();
            let bytes = pattern(len + align, len);
            // SAFETY: as above.
            unsafe { write(shared.at(MARGIN + align), &bytes[align..]) }.unwrap();
            let mut all = [0; 1024];
            // SAFETY: as above.
            unsafe { read(shared.at(0), &mut all) }.unwrap();
            let end = MARGIN + align + len;
            assert_eq!(all[MARGIN + align..end], bytes[align..], "write of {len} bytes at {align}");
            assert!(
                all[..MARGIN + align].iter().chain(&all[end..]).all(|b| *b == 0xee),
                "write of {len} at {align}"
            );
            let mut out = vec![0x11; len + align + MARGIN];
            // SAFETY: as above.
            unsafe { read(shared.at(MARGIN + align), &mut out[align..align + len]) }.unwrap();
            assert_eq!(out[align..align + len], bytes[align..], "read of {len} bytes at {align}");
            assert!(
                out[..align].iter().chain(&out[align + len..]).all(|b| *b == 0x11),
                "read of {len} at {align}"
            );
        }
    }
}

#[test]
fn words_are_loaded_and_stored_in_host_byte_order() {
    let shared = Shared::<16>::new();
    // SAFETY: aligned words within the 16 bytes.
    unsafe {
        store_u64(shared.at(8).cast(), 0x0102_0304_0506_0708).unwrap();
        let mut bytes = [0; 8];
        read(shared.at(8), &mut bytes).unwrap();
        assert_eq!(bytes, 0x0102_0304_0506_0708_u64.to_ne_bytes());
        write(shared.at(0), &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        assert_eq!(load_u8(shared.at(3)), Ok(4));
        assert_eq!(load_u16(shared.at(2).cast()), Ok(u16::from_ne_bytes([3, 4])));
        assert_eq!(load_u32(shared.at(4).cast()), Ok(u32::from_ne_bytes([5, 6, 7, 8])));
        assert_eq!(load_u64(shared.at(0).cast()), Ok(u64::from_ne_bytes([1, 2, 3, 4, 5, 6, 7, 8])));
        store_u8(shared.at(0), 0xaa).unwrap();
        store_u16(shared.at(2).cast(), u16::from_ne_bytes([0xbb, 0xcc])).unwrap();
        store_u32(shared.at(4).cast(), u32::from_ne_bytes([9, 9, 9, 9])).unwrap();
        read(shared.at(0), &mut bytes).unwrap();
        assert_eq!(bytes, [0xaa, 2, 0xbb, 0xcc, 9, 9, 9, 9]);
    }
}

#[test]
fn compare_and_exchange_replaces_only_the_expected_word() {
    let shared = Shared::<8>::new();
    let at: *mut u64 = shared.at(0).cast();
    // SAFETY: an aligned word within the 8 bytes.
    unsafe {
        assert_eq!(compare_exchange_u64(at, 0, u64::MAX), Ok(0));
        assert_eq!(compare_exchange_u64(at, 0, 5), Ok(u64::MAX));
        assert_eq!(load_u64(at), Ok(u64::MAX));
        assert_eq!(compare_exchange_u64(at, u64::MAX, 5), Ok(u64::MAX));
        assert_eq!(load_u64(at), Ok(5));
    }
}

#[test]
fn concurrent_increments_lose_nothing() {
    let shared = Shared::<8>::new();
    thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let at: *mut u64 = shared.at(0).cast();
                for _ in 0..REPEAT {
                    // SAFETY: an aligned word within the 8 bytes.
                    unsafe {
                        let mut seen = load_u64(at).unwrap();
                        loop {
                            let before = compare_exchange_u64(at, seen, seen + 1).unwrap();
                            if before == seen {
                                break;
                            }
                            seen = before;
                        }
                    }
                }
            });
        }
    });
    // SAFETY: as above.
    assert_eq!(unsafe { load_u64(shared.at(0).cast()) }.unwrap(), 2 * REPEAT);
}

/// A reader that races with a writer sees in each byte one of the written values.
#[test]
fn a_racing_copy_sees_only_written_bytes() {
    let shared = Shared::<512>::new();
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            for round in 0..REPEAT {
                // SAFETY: within the 512 bytes.
                unsafe { write(shared.at(3), &[if round % 2 == 0 { 0xff } else { 0 }; 400]) }.unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut out = [0; 400];
        while !done.load(Ordering::Relaxed) {
            // SAFETY: as above.
            unsafe { read(shared.at(3), &mut out) }.unwrap();
            assert!(out.iter().all(|b| *b == 0 || *b == 0xff));
        }
    });
}

/// A thread that loads a flag sees the data written before the flag was stored.
#[test]
fn a_stored_flag_is_seen_after_the_data_before_it() {
    let shared = Shared::<512>::new();
    thread::scope(|s| {
        s.spawn(|| {
            for round in 1..=REPEAT {
                // SAFETY: within the 512 bytes, the flag aligned.
                unsafe {
                    write(shared.at(64), &[round as u8; 300]).unwrap();
                    store_u64(shared.at(0).cast(), round).unwrap();
                    while load_u64(shared.at(8).cast()).unwrap() != round {
                        std::hint::spin_loop();
                    }
                }
            }
        });
        for round in 1..=REPEAT {
            // SAFETY: as above.
            unsafe {
                while load_u64(shared.at(0).cast()).unwrap() != round {
                    std::hint::spin_loop();
                }
                let mut out = [0; 300];
                read(shared.at(64), &mut out).unwrap();
                assert!(out.iter().all(|b| *b == round as u8), "round {round}");
                store_u64(shared.at(8).cast(), round).unwrap();
            }
        }
    });
}

/// Lengths that reach every branch: no word, few words, one and several rounds of three streams or of four vectors.
fn crc_lengths() -> impl Iterator<Item = usize> {
    (0..=300).chain([508, 1448, 1460, 3071, 3072, 3073, 3500, 9000, 20_000]).step_by(STEP)
}

#[test]
fn the_crc_equals_that_of_the_crate_at_every_length_and_alignment() {
    let bytes = pattern(20_100, 9);
    for len in crc_lengths() {
        for align in (0..16).step_by(if cfg!(miri) { 7 } else { 1 }) {
            let source = &bytes[align..align + len];
            let expected = ::crc32c::crc32c_append(0x1234_5678, source);
            assert_eq!(crc32c(0x1234_5678, source), expected, "{len} bytes at {align}");
        }
    }
}

/// RFC 3720 appendix B.4.
#[test]
fn rfc3720_b_4_crc32c_of_the_examples() {
    let ascending: Vec<u8> = (0..32).collect();
    let descending: Vec<u8> = (0..32).rev().collect();
    let examples: [(&[u8], u32); 4] = [
        (&[0; 32], 0x8a91_36aa),
        (&[0xff; 32], 0x62a8_ab43),
        (&ascending, 0x46dd_794e),
        (&descending, 0x113f_db5c),
    ];
    for (bytes, expected) in examples {
        assert_eq!(crc32c(0, bytes), expected);
    }
    assert_eq!(crc32c(0, b"123456789"), 0xe306_9283, "the check value of the polynomial");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 256 }, failure_persistence: None, ..Default::default() })]

    /// However a stream is split, and wherever its parts lie, the CRC is that of the whole.
    #[test]
    fn prop_the_crc_of_any_split_is_that_of_the_whole(
        bytes in prop::collection::vec(any::<u8>(), 0..4000),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut summed = 0;
        for part in cuts.windows(2) {
            summed = crc32c(summed, &bytes[part[0]..part[1]]);
        }
        prop_assert_eq!(summed, ::crc32c::crc32c(&bytes));
    }
}

#[test]
fn sums_of_words_agree_on_all_lengths() {
    let bytes: Vec<u8> = (0..4096u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let blocks = bytes.as_chunks::<{ sum::BLOCK }>().0;
    for len in 0..=blocks.len() {
        assert_eq!(sum::of_words(&blocks[..len]), sum::plain(&blocks[..len]));
    }
    let ones = vec![[0xff; sum::BLOCK]; 2048];
    assert_eq!(sum::of_words(&ones), 0xffff_ffff * 8 * 2048, "the longest frame");
}

proptest! {
    #[test]
    fn prop_a_copy_without_gaps_writes_the_bytes_between_them(
        first in 0usize..40, span in 1usize..300, gap in 1usize..8, pieces in 0usize..5, last in 0usize..300,
    ) {
        // The bytes before the first gap, whole spans, and a part of one.
        let lens = std::iter::once(first).chain(std::iter::repeat_n(span, pieces)).chain([last.min(span)]);
        let (mut bytes, mut between) = (Vec::new(), Vec::new());
        for (number, len) in lens.enumerate() {
            if number > 0 {
                bytes.extend(std::iter::repeat_n(0xee, gap));
            }
            bytes.extend(pattern(len, number));
            between.extend(pattern(len, number));
        }
        let shared = Shared::<2048>::new();
        let gaps = Gaps { first, between: span, len: gap };
        let source = Gapped { bytes: &bytes, len: between.len(), gaps };
        // SAFETY: `between` has fewer than 40 + 5 * 300 bytes, which lie within the 2048 bytes.
        unsafe { write_gapped(shared.at(1), &source) }.unwrap();
        let mut all = [0; 2048];
        // SAFETY: as above.
        unsafe { read(shared.at(0), &mut all) }.unwrap();
        prop_assert_eq!(&all[1..=between.len()], &between[..]);
        prop_assert!(all[0] == 0 && all[between.len() + 1..].iter().all(|byte| *byte == 0));

        let mut space = vec![0xee; bytes.len()];
        let mut target = GappedMut { bytes: &mut space, len: between.len(), gaps, sum: Sum::Apart };
        // SAFETY: as above.
        unsafe { read_gapped(shared.at(1).cast_const(), &mut target) }.unwrap();
        prop_assert_eq!(space, bytes);
    }

    /// A sum that is wanted is right if it was made, and nothing but the bytes is written if it was not.
    #[test]
    fn prop_a_copy_with_a_sum_has_the_bytes_of_several_passes(
        first in prop_oneof![0usize..1024, Just(usize::MAX)],
        (between, gap) in prop_oneof![4 => Just((508, 4)), 1 => Just((252, 4)), 1 => Just((60, 4)), 1 => (1usize..600, 1usize..8)],
        len in prop_oneof![0usize..4000, 1000usize..1100],
        (align, front, crc, number) in any::<(u8, u8, u32, u32)>(),
    ) {
        let (align, front, gaps) = (usize::from(align % 64), usize::from(front % 64), Gaps { first, between, len: gap });
        let bytes = pattern(len, 3);
        let shared = Shared::<4096>::new();
        // SAFETY: the bytes lie within the 4096.
        unsafe { write(shared.at(align), &bytes) }.unwrap();

        let used = gaps.space_of(len);
        let mut expected = vec![0xee; front + used + 8];
        let mut space = expected.clone();
        GappedMut { bytes: &mut expected[front..], len, gaps, sum: Sum::Apart }.copy_from_slice(&bytes);
        let mut target = GappedMut { bytes: &mut space[front..], len, gaps, sum: Sum::Wanted { crc, number } };
        // SAFETY: as above.
        unsafe { read_gapped(shared.at(align).cast_const(), &mut target) }.unwrap();
        match target.sum {
            Sum::Done(sum) => {
                for (index, at) in (first..used).step_by(between + gap).enumerate() {
                    let number = number.wrapping_add((index * (between + gap)) as u32);
                    expected[front + at..][..4].copy_from_slice(&number.to_be_bytes());
                }
                prop_assert_eq!(sum, ::crc32c::crc32c_append(crc, &expected[front..front + used]));
            }
            unchanged => prop_assert_eq!(unchanged, Sum::Wanted { crc, number }),
        }
        prop_assert_eq!(space, expected);
    }
}
