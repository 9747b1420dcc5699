//! The five supported TCP options (RFC 9293 section 3.2, RFC 7323, RFC 2018).

use super::{Options, SackBlock, Timestamps};
use crate::seq::SeqNum;

const END: u8 = 0;
pub(super) const NOP: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
pub(super) const TIMESTAMPS: u8 = 8;

/// Largest length of the options in a header, in bytes (RFC 9293 section 3.1: data offset 15).
pub const MAX_OPTION_BYTES: usize = 40;

/// Bytes of the timestamps option with its padding.
pub const TIMESTAMPS_BYTES: usize = 12;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl Options {
    /// Parses the options of a header. Unknown options, and known options with a wrong length, are skipped (RFC 9293
    /// section 3.2, MUST-6). A length below 2 or beyond the header ends the options (MUST-7): the checksum is right, so the
    /// sender or a middlebox has written it, and each retransmission would have it, too.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut options = Self::default();
        if let Some(timestamps) = only_timestamps(bytes) {
            options.timestamps = Some(timestamps);
            return options;
        }
        let mut rest = bytes;
        while let Some((&kind, after)) = rest.split_first() {
            match kind {
                END => break,
                NOP => rest = after,
                _ => {
                    let length = after.first().map_or(0, |length| usize::from(*length));
                    let Some(body) = rest.get(2..length) else { break };
                    options.read(kind, body);
                    rest = rest.get(length..).unwrap_or_default();
                }
            }
        }
        options
    }

    fn read(&mut self, kind: u8, body: &[u8]) {
        match (kind, body.len()) {
            (MSS, 2) => self.mss = u16_at(body, 0),
            (WINDOW_SCALE, 1) => self.window_scale = body.first().copied(),
            (SACK_PERMITTED, 0) => self.sack_permitted = true,
            (TIMESTAMPS, 8) => {
                self.timestamps =
                    u32_at(body, 0).zip(u32_at(body, 4)).map(|(value, echo)| Timestamps { value, echo });
            }
            (SACK, length) if length % 8 == 0 => {
                (self.sack, self.sack_count) = Default::default();
                for (block, bytes) in self.sack.iter_mut().zip(body.chunks_exact(8)) {
                    if let (Some(left), Some(right)) = (u32_at(bytes, 0), u32_at(bytes, 4)) {
                        *block = SackBlock { left: SeqNum::new(left), right: SeqNum::new(right) };
                        self.sack_count += 1;
                    }
                }
            }
            _ => {}
        }
    }

    /// Bytes that [`Options::emit`] writes: a multiple of 4.
    #[inline]
    pub const fn wire_len(&self) -> usize {
        let mut len = 0;
        if self.mss.is_some() {
            len += 4;
        }
        if self.window_scale.is_some() {
            len += 4;
        }
        if self.timestamps.is_some() {
            len += TIMESTAMPS_BYTES;
        } else if self.sack_permitted {
            len += 4;
        }
        if self.sack_count > 0 {
            len += 4 + 8 * self.sack_count as usize;
        }
        len
    }

    /// Writes the options to the front of `out`, each aligned to 4 bytes by no-operations before it; SACK-permitted
    /// takes the place of the timestamps' padding. Returns their length, or `None` when they do not fit `out`. More
    /// than [`MAX_OPTION_BYTES`] do not fit a header.
    pub fn emit(&self, out: &mut [u8]) -> Option<usize> {
        let mut words = out.as_chunks_mut::<4>().0.iter_mut();
        let mut put = |word: [u8; 4]| words.next().map(|w| *w = word);
        if let Some(mss) = self.mss {
            let [high, low] = mss.to_be_bytes();
            put([MSS, 4, high, low])?;
        }
        let permitted = if self.sack_permitted { [SACK_PERMITTED, 2] } else { [NOP, NOP] };
        if let Some(timestamps) = self.timestamps {
            put([permitted[0], permitted[1], TIMESTAMPS, 10])?;
            put(timestamps.value.to_be_bytes())?;
            put(timestamps.echo.to_be_bytes())?;
        } else if self.sack_permitted {
            put([permitted[0], permitted[1], NOP, NOP])?;
        }
        if let Some(shift) = self.window_scale {
            put([NOP, WINDOW_SCALE, 3, shift])?;
        }
        if self.sack_count > 0 {
            put([NOP, NOP, SACK, 2 + 8 * self.sack_count])?;
            for block in self.sack_blocks() {
                put(block.left.value().to_be_bytes())?;
                put(block.right.value().to_be_bytes())?;
            }
        }
        Some(self.wire_len())
    }

    /// The timestamps, if there is no other option.
    #[inline]
    pub(super) fn only_timestamps(&self) -> Option<Timestamps> {
        let alone =
            self.mss.is_none() && self.window_scale.is_none() && !self.sack_permitted && self.sack_count == 0;
        self.timestamps.filter(|_| alone)
    }
}

impl Timestamps {
    /// The option alone, in the layout of RFC 7323 appendix A, as [`Options::emit`] writes it.
    #[inline]
    pub(super) fn to_bytes(self) -> [u8; TIMESTAMPS_BYTES] {
        let [v0, v1, v2, v3] = self.value.to_be_bytes();
        let [e0, e1, e2, e3] = self.echo.to_be_bytes();
        [NOP, NOP, TIMESTAMPS, 10, v0, v1, v2, v3, e0, e1, e2, e3]
    }
}

/// Parses the layout of RFC 7323 appendix A, which most stacks send in every data segment: two no-operations and the
/// timestamps, without other options.
fn only_timestamps(bytes: &[u8]) -> Option<Timestamps> {
    let bytes: &[u8; TIMESTAMPS_BYTES] = bytes.try_into().ok()?;
    let [NOP, NOP, TIMESTAMPS, 10, ..] = *bytes else { return None };
    Some(Timestamps { value: u32_at(bytes, 4)?, echo: u32_at(bytes, 8)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn emitted(options: &Options) -> Vec<u8> {
        let mut out = [0; 64];
        let len = options.emit(&mut out).expect("room");
        out[..len].to_vec()
    }

    fn block(left: u32, right: u32) -> SackBlock {
        SackBlock { left: SeqNum::new(left), right: SeqNum::new(right) }
    }

    #[test]
    fn the_options_of_a_linux_syn_are_read_and_written() {
        let wire = [2, 4, 0x05, 0xb4, 4, 2, 8, 10, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0, 1, 3, 3, 7];
        let options = Options {
            mss: Some(1460),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some(Timestamps { value: 0x1122_3344, echo: 0 }),
            ..Options::default()
        };
        assert_eq!(Options::parse(&wire), options);
        assert_eq!(emitted(&options), wire);
        assert_eq!(options.wire_len(), wire.len());
    }

    #[test]
    fn rfc2018_s3_blocks_keep_their_order() {
        let mut options = Options { sack_count: 3, ..Options::default() };
        options.timestamps = Some(Timestamps { value: 1, echo: 2 });
        options.sack[..3].copy_from_slice(&[block(7000, 7500), block(u32::MAX, 20), block(5500, 6000)]);
        let wire = emitted(&options);
        assert_eq!(wire.len(), 40);
        assert_eq!(wire[12..16], [1, 1, 5, 26]);
        assert_eq!(Options::parse(&wire), options);
    }

    #[test]
    fn rfc9293_s3_2_unknown_options_are_skipped_and_an_impossible_length_ends_them() {
        let known = Options { mss: Some(536), ..Options::default() };
        assert_eq!(Options::parse(&[30, 6, 1, 2, 3, 4, 2, 4, 2, 24, 0, 99]), known);
        assert_eq!(Options::parse(&[2, 3, 9, 2, 4, 2, 24, 0]), known, "a wrong length is skipped");
        assert_eq!(Options::parse(&[30, 1]), Options::default());
        assert_eq!(Options::parse(&[30, 0]), Options::default());
        assert_eq!(Options::parse(&[30]), Options::default());
        assert_eq!(Options::parse(&[1, 1, 8, 10, 0, 0, 0, 0]), Options::default());
        assert_eq!(Options::parse(&[2, 4, 2, 24, 30, 1, 3, 3, 7, 0]), known, "what stands before it counts");
    }

    #[test]
    fn options_that_do_not_fit_are_rejected() {
        let options = Options { mss: Some(1), window_scale: Some(1), ..Options::default() };
        assert_eq!(options.emit(&mut [0; 8]), Some(8));
        assert_eq!(options.emit(&mut [0; 7]), None);
    }

    #[test]
    fn a_fifth_block_and_partial_blocks_are_ignored() {
        let mut wire = vec![5, 42];
        wire.extend([0; 40]);
        assert_eq!(Options::parse(&wire).sack_count, 4);
        assert_eq!(Options::parse(&[5, 9, 0, 0, 0, 0, 0, 0, 0]).sack_count, 0);
    }

    proptest! {
        #[test]
        fn prop_any_bytes_parse_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..41)) {
            let options = Options::parse(&bytes);
            prop_assert!(usize::from(options.sack_count) <= options.sack.len());
        }

        #[test]
        fn prop_options_are_read_as_written(
            mss: Option<u16>, window_scale: Option<u8>, sack_permitted: bool,
            timestamps: Option<(u32, u32)>, blocks in proptest::collection::vec(any::<(u32, u32)>(), 0..4),
        ) {
            let mut options = Options { mss, window_scale, sack_permitted, ..Options::default() };
            options.timestamps = timestamps.map(|(value, echo)| Timestamps { value, echo });
            for (to, (left, right)) in options.sack.iter_mut().zip(&blocks) {
                *to = block(*left, *right);
            }
            options.sack_count = blocks.len() as u8;
            let wire = emitted(&options);
            prop_assert_eq!(wire.len(), options.wire_len());
            prop_assert_eq!(wire.len() % 4, 0);
            prop_assert_eq!(Options::parse(&wire), options);
        }
    }
}
