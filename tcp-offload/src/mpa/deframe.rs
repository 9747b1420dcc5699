//! Checks one complete received FPDU and extracts its ULPDU, without length field, pad, CRC and markers (RFC 5044
//! sections 4.1 to 4.4).

use super::{
    MpaError,
    frames::Fpdus,
    layout::{CRC_BYTES, LENGTH_BYTES, Layout, MARKER_BYTES, MARKER_SPACING, with_markers},
};
use crate::{copy, framing::Whole, link::read_at, seq::StreamOffset, ulp::Ulpdu};

/// Bytes from the start of one marker to the start of the next.
const SPACING: usize = MARKER_SPACING as usize;

/// Verifies the CRC (RFC 5044 section 4.4) of the FPDU whose range consists of `raw`. The CRC covers all bytes of the
/// range except the CRC field itself, including the markers and the one right before the length field.
pub(crate) fn verify_crc(raw: &[&[u8]]) -> Result<(), MpaError> {
    if let [piece] = raw
        && let Some((covered, field)) = piece.split_last_chunk::<CRC_BYTES>()
    {
        return compare_crc(copy::crc32c(0, covered), *field);
    }
    let mut covered = raw.iter().map(|p| p.len()).sum::<usize>().saturating_sub(CRC_BYTES);
    let mut field = [0; CRC_BYTES];
    read_at(raw, covered, &mut field);
    let mut sum = 0;
    for piece in raw {
        let data = piece.get(..covered).unwrap_or(piece);
        covered -= data.len();
        sum = copy::crc32c(sum, data);
    }
    compare_crc(sum, field)
}

fn compare_crc(sum: u32, field: [u8; CRC_BYTES]) -> Result<(), MpaError> {
    if sum == u32::from_le_bytes(field) { Ok(()) } else { Err(MpaError::Crc) }
}

/// Extracts the ULPDU of `ulpdu` bytes from the FPDU whose range begins at `start` and consists of `raw`. Fails when
/// one of its markers does not point to its length field (RFC 5044 section 4.3).
pub(crate) fn cut<'a>(
    layout: &Layout,
    raw: &'a [&'a [u8]],
    start: StreamOffset,
    ulpdu: usize,
) -> Result<Ulpdu<'a>, MpaError> {
    let header = layout.header(start);
    let data = header + LENGTH_BYTES as u64;
    let skip = (data - start) as usize;
    let to_marker = layout.to_marker(data);
    let (first, header) = (layout.to_marker(start), (header - start) as usize);
    if layout.markers && !all_point_to_header(raw, first, header) {
        return Err(MpaError::MarkerMismatch);
    }
    Ok(Ulpdu::between_markers(raw, skip, ulpdu, to_marker))
}

/// The FPDU whose range begins at `start` with `bytes`, if they contain all of it, and its CRC and its markers are
/// right: the fast path through [`Layout`], [`verify_crc`] and [`cut`]. `None` otherwise.
#[expect(
    clippy::inline_always,
    reason = "called once for each received FPDU, with a result that is then never built in memory"
)]
#[inline(always)]
pub(crate) fn whole(frames: &Fpdus, bytes: &[u8], start: StreamOffset) -> Option<Whole> {
    let to_marker = frames.layout.to_marker(start);
    let header = if to_marker == 0 { MARKER_BYTES } else { 0 };
    let ulpdu = usize::from(u16::from_be_bytes(*bytes.get(header..)?.first_chunk()?));
    let len = with_markers(Layout::body(ulpdu), to_marker);
    let fpdu = bytes.get(..len)?;
    if frames.crc {
        let (covered, field) = fpdu.split_last_chunk()?;
        compare_crc(copy::crc32c(0, covered), *field).ok()?;
    }
    if to_marker < len && !point_to_header(fpdu.get(to_marker..)?, to_marker, header) {
        return None;
    }
    let ulpdu_at = header + LENGTH_BYTES;
    // A marker never lies within the length field, only right before it.
    let next_marker = if to_marker == 0 { SPACING } else { to_marker };
    let to_marker = next_marker.saturating_sub(ulpdu_at);
    Some(Whole { len, ulpdu_at, ulpdu, to_marker })
}

/// Whether the markers in `bytes`, the rest of an FPDU from its first marker on, point to the length field. The first marker lies
/// at byte `first` of the FPDU, the length field at byte `header`. Not inlined, because its loop would have too few registers then.
#[inline(never)]
fn point_to_header(mut bytes: &[u8], first: usize, header: usize) -> bool {
    // The marker right before the length field is part of the FPDU, and points to it by 0.
    let (mut back, mut next) = (first.saturating_sub(header) as u16, (first + SPACING - header) as u16);
    while let Some(marker) = bytes.first_chunk() {
        if pointer(*marker) != back {
            return false;
        }
        let Some(rest) = bytes.get(SPACING..) else { break };
        (bytes, back, next) = (rest, next, next.wrapping_add(SPACING as u16));
    }
    true
}

/// As [`point_to_header`], for the whole FPDU in the pieces `raw`.
fn all_point_to_header(raw: &[&[u8]], first: usize, header: usize) -> bool {
    let (mut at, mut before) = (first, 0);
    for piece in raw {
        let end = before + piece.len();
        if let Some(bytes) = piece.get(at - before..).filter(|bytes| !bytes.is_empty()) {
            if !point_to_header(bytes, at, header) {
                return false;
            }
            at += bytes.len().next_multiple_of(SPACING);
            let last = at - SPACING;
            if last + MARKER_BYTES > end
                && pointer(marker_across(raw, last)) != last.saturating_sub(header) as u16
            {
                return false;
            }
        }
        before = end;
    }
    true
}

/// The marker at byte `at` of `raw`, which spans pieces.
#[cold]
fn marker_across(raw: &[&[u8]], at: usize) -> [u8; MARKER_BYTES] {
    let mut marker = [0; MARKER_BYTES];
    read_at(raw, at, &mut marker);
    marker
}

/// FPDUPTR of a marker; its low two bits count as zero (RFC 5044 section 4.2).
pub(crate) const fn pointer([_, _, high, low]: [u8; MARKER_BYTES]) -> u16 {
    u16::from_be_bytes([high, low & !3])
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::framing::Framing;

    fn crc_of(bytes: &[u8]) -> [u8; 4] {
        crc32c::crc32c(bytes).to_le_bytes()
    }

    /// RFC 3720 appendix B.4, which RFC 5044 section 4.4 refers to.
    #[test]
    fn rfc5044_s4_4_crc32c_vectors_of_rfc3720() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        let mut read_command = [0; 48];
        for (at, byte) in
            [(0, 1), (1, 0xc0), (16, 0x14), (22, 4), (27, 0x14), (31, 0x18), (32, 0x28), (40, 2)]
        {
            read_command[at] = byte;
        }
        for (bytes, crc) in [
            (&[0; 32][..], [0xaa, 0x36, 0x91, 0x8a]),
            (&[0xff; 32], [0x43, 0xab, 0xa8, 0x62]),
            (&ascending, [0x4e, 0x79, 0xdd, 0x46]),
            (&descending, [0x5c, 0xdb, 0x3f, 0x11]),
            (&read_command, [0x56, 0x3a, 0x96, 0xd9]),
        ] {
            assert_eq!(crc_of(bytes), crc);
            assert_eq!(verify_crc(&[bytes, &crc]), Ok(()));
            assert_eq!(verify_crc(&[bytes, &crc[..1], &crc[1..]]), Ok(()));
            assert_eq!(verify_crc(&[bytes, &crc[..3], &[!crc[3]]]), Err(MpaError::Crc));
        }
    }

    /// RFC 5044 figures 5 and 6.
    fn annotated() -> [(u64, Vec<u8>); 2] {
        let mut first = vec![0; 0x34];
        first[5..8].copy_from_slice(&[0x2a, 0x41, 0x43]);
        first[0x13] = 1;
        first[0x30..].copy_from_slice(&[0x52, 0x23, 0x99, 0x83]);
        let mut second = vec![0; 0x34];
        second[1..4].copy_from_slice(&[0x2a, 0x41, 0x43]);
        second[0x0f] = 2;
        second[0x17] = 0x14;
        second[0x30..].copy_from_slice(&[0x84, 0x92, 0x58, 0x98]);
        [(0, first), (0x1ec, second)]
    }

    #[test]
    fn rfc5044_s4_4_figures_5_and_6() {
        let layout = Layout { origin: 0, markers: true };
        for (start, fpdu) in annotated() {
            assert_eq!(layout.end(start, 42), start + fpdu.len() as u64);
            for cut_at in 0..=fpdu.len() {
                let raw = [&fpdu[..cut_at], &fpdu[cut_at..]];
                assert_eq!(verify_crc(&raw), Ok(()));
                let ulpdu = cut(&layout, &raw, start, 42).unwrap();
                let mut bytes = [0xee; 64];
                assert_eq!((ulpdu.len(), ulpdu.peek(&mut bytes)), (42, 42));
                assert_eq!(&bytes[..2], &[0x41, 0x43]);
                assert_eq!(bytes[13], if start == 0 { 1 } else { 2 });
                assert_eq!(&bytes[18..42], &[0; 24]);
            }
        }
    }

    #[test]
    fn rfc5044_s4_2_low_bits_of_fpduptr_count_as_zero() {
        let layout = Layout { origin: 0, markers: true };
        let [_, (start, mut fpdu)] = annotated();
        fpdu[0x17] |= 3;
        assert!(cut(&layout, &[&fpdu], start, 42).is_ok());
        fpdu[0x17] += 4;
        assert_eq!(cut(&layout, &[&fpdu], start, 42).unwrap_err(), MpaError::MarkerMismatch);
    }

    /// The general path for a frame in one piece.
    fn general(frames: &Fpdus, bytes: &[u8], start: StreamOffset) -> Option<Whole> {
        let header = (frames.head(start) - start) as usize;
        let ulpdu = frames.ulpdu_len(*bytes.get(header..)?.first_chunk()?).ok()?;
        let len = (frames.end(start, ulpdu) - start) as usize;
        let raw = [bytes.get(..len)?];
        frames.verify(&raw).ok()?;
        frames.cut(&raw, start, ulpdu).ok()?;
        let data = header + LENGTH_BYTES;
        let to_marker = frames.layout.to_marker(start + data as u64);
        Some(Whole { len, ulpdu_at: data, ulpdu, to_marker: to_marker.min(len) })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn prop_the_fast_path_through_a_frame_agrees_with_the_general_one(
            origin in 0u64..1000, words in 0u64..600, markers: bool, crc: bool,
            payload in prop_oneof![2 => vec(any::<u8>(), 0..40), 1 => vec(any::<u8>(), 0..2500)],
            change in prop_oneof![2 => Just(None), 1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(Some)],
            correct: bool, cut in prop_oneof![4 => Just(0usize), 1 => 0usize..30], more in 0usize..10,
        ) {
            let frames = Fpdus { layout: Layout { origin, markers }, crc };
            let start = origin + 4 * words;
            let mut bytes = crate::sim::fpdu(4 * words, markers, &payload);
            let whole = bytes.len();
            if let Some((at, byte)) = change {
                *at.get_mut(&mut bytes) = byte;
            }
            if correct {
                let sum = crc_of(&bytes[..whole - CRC_BYTES]);
                bytes[whole - CRC_BYTES..].copy_from_slice(&sum);
            }
            bytes.truncate(whole - cut.min(whole));
            bytes.resize(bytes.len() + more, 0);
            let ours = frames.whole(&bytes, start);
            // Beyond the end of the frame it does not matter where the next marker is.
            let ours = ours.map(|whole| Whole { to_marker: whole.to_marker.min(whole.len), ..whole });
            prop_assert_eq!(ours, general(&frames, &bytes, start));
            prop_assert!(ours.is_some() || change.is_some() || cut > 0);
        }
    }
}
