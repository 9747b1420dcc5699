//! The study's vectors, and an independent codec: it shares nothing with the code but the types of the result.

use proptest::prelude::*;

use super::*;
use crate::rdma_tcp::crc::crc32;

const ID: ConnectionId = ConnectionId(0x0123_4567_89ab_cdef);

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn send(number: u32, offset: u32, control: SendControl) -> SegmentHeader {
    SegmentHeader {
        first: true,
        last: true,
        solicited: false,
        number: MessageNumber(number),
        order: Order::STRICT,
        kind: SegmentKind::Send { offset, control },
    }
}

/// The study's segments: bytes on the wire, header, payload.
fn vectors() -> Vec<(Vec<u8>, SegmentHeader, &'static [u8])> {
    let place = BufferPlace { id: 0xa5, offset: 0x1000 };
    let high = BufferPlace { id: 0xa5, offset: 0x7f00_0000_1000 };
    let write = |number, first, last, to, total| SegmentHeader {
        first,
        last,
        order: Order::AT_ONCE,
        kind: SegmentKind::Write { to, total },
        ..send(number, 0, SendControl::None)
    };
    vec![
        (
            hex("010c001d 01234567 89abcdef 00000010 00000000 00000000 68656c6c 6f000000 8c11264d"),
            send(0x10, 0, SendControl::None),
            b"hello",
        ),
        (
            hex("01090024 01234567 89abcdef 00000011 ffff0000 000000a5 00001000 00000008 deadbeef 10aefe53"),
            write(0x11, true, false, place, 8),
            &[0xde, 0xad, 0xbe, 0xef],
        ),
        (
            hex("010e0020 01234567 89abcdef 00000012 00000000 000000a5 00001000 00001000 ab416d43"),
            SegmentHeader {
                kind: SegmentKind::ReadRequest { from: place, total: 4096, atomic: None },
                ..send(0x12, 0, SendControl::None)
            },
            b"",
        ),
        (
            hex("010f001c 01234567 89abcdef 00000012 ffff0000 00000000 00010203 19ec61e4"),
            SegmentHeader {
                order: Order::AT_ONCE,
                kind: SegmentKind::ReadResponse { offset: 0 },
                ..send(0x12, 0, SendControl::None)
            },
            &[0, 1, 2, 3],
        ),
        (
            hex("010c0020 01234567 89abcdef 00000013 00000002 00000000 05000000 000000a5 4d6dfb13"),
            send(0x13, 0, SendControl::Invalidate { stag: 0xa5 }),
            b"",
        ),
        (
            hex("0108001c 01234567 89abcdef 00000014 00000000 00000000 61626364 69095996"),
            SegmentHeader { last: false, ..send(0x14, 0, SendControl::None) },
            b"abcd",
        ),
        (
            hex("0104001b 01234567 89abcdef 00000014 00000000 00000004 65666700 e4e28a96"),
            SegmentHeader { first: false, ..send(0x14, 4, SendControl::None) },
            b"efg",
        ),
        (
            hex(
                "010d0028 01234567 89abcdef 00000015 ffff0001 000000a5 00001000 00000004 00007f00 deadbeef 8c85b084",
            ),
            write(0x15, true, true, high, 4),
            &[0xde, 0xad, 0xbe, 0xef],
        ),
        (
            hex("010c0020 01234567 89abcdef 0000000f 00000002 00000000 01000000 00100008 2a3d359c"),
            send(0x0f, 0, SendControl::Connect { ird: 16, ord: 8 }),
            b"",
        ),
    ]
}

/// Header, control data, payload, pad and CRC.
fn segment(header: &SegmentHeader, payload: &[u8]) -> Vec<u8> {
    let mut head = [0; HEADER_MAX_BYTES];
    let len = header.emit(ID, payload.len(), &mut head);
    let mut bytes = [&head[..len], payload].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(crc32([&bytes[..]]).to_le_bytes());
    bytes
}

#[test]
fn rdma_tcp_s3_segment_vectors() {
    for (bytes, header, payload) in vectors() {
        assert_eq!(segment(&header, payload), bytes, "{header:?}");
        let prefix = Prefix::parse(*bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(prefix.connection, ID);
        assert_eq!(prefix.len.next_multiple_of(4) + 4, bytes.len());
        assert_eq!(prefix.len - header.bytes(), payload.len());
        assert_eq!(SegmentHeader::parse(&bytes, prefix.len), Ok(header));
        assert_eq!(independent::parse(&bytes), Some((ID.0, header, payload.to_vec())));
    }
}

#[test]
fn rdma_tcp_s3_4_rejected_forms_of_the_crc() {
    let (bytes, ..) = vectors().swap_remove(0);
    let (covered, crc) = bytes.split_at(bytes.len() - 4);
    let sum = crc32([covered]).to_le_bytes();
    assert_eq!(sum, crc);
    for wrong in ["4d26118c", "376a96db", "fcff6c7f"] {
        let wrong = hex(wrong);
        assert_ne!(sum[..], wrong);
        assert!(independent::parse(&[covered, &wrong[..]].concat()).is_none(), "{wrong:02x?}");
    }
}

#[test]
fn rdma_tcp_a9_only_the_solicited_bit_may_be_set() {
    let (bytes, header, _) = vectors().swap_remove(0);
    for bit in 0..8 {
        let mut changed = bytes.clone();
        changed[1] ^= 1 << bit;
        let parsed = SegmentHeader::parse(&changed, 29);
        match bit {
            4 => assert_eq!(parsed, Ok(SegmentHeader { solicited: true, ..header })),
            5..=7 => assert_eq!(parsed, Err(SegmentError::Reserved)),
            _ => assert_ne!(parsed, Ok(header)),
        }
        changed = bytes.clone();
        changed[18] ^= 1 << bit;
        assert_eq!(SegmentHeader::parse(&changed, 29), Err(SegmentError::Reserved));
    }
}

#[test]
fn rdma_tcp_a8_control_data_has_one_form() {
    for (at, control) in [
        SendControl::None,
        SendControl::Connect { ird: 1, ord: 2 },
        SendControl::Accept { ird: 1, ord: 2 },
        SendControl::Reject,
        SendControl::Terminate { code: 0x1203 },
        SendControl::Invalidate { stag: 7 },
        SendControl::Immediate { data: *b"immediat" },
    ]
    .into_iter()
    .enumerate()
    {
        let bytes = segment(&send(1, 0, control), b"");
        let len = bytes.len() - 4;
        assert_eq!(SegmentHeader::parse(&bytes, len).unwrap().kind, SegmentKind::Send { offset: 0, control });
        // Another number of words, another code, and a middle segment with control data.
        for words in (0..=255).filter(|words| *words != at) {
            let mut changed = bytes.clone();
            changed[19] = words as u8;
            let parsed = SegmentHeader::parse(&changed, len);
            assert!(parsed.is_err() || changed[19] == bytes[19] || words == 0, "{control:?} {words}");
        }
        if at > 0 {
            for code in (0..=255).filter(|code| usize::from(*code) != at) {
                let mut changed = bytes.clone();
                changed[24] = code;
                let parsed = SegmentHeader::parse(&changed, len).map(|h| h.kind);
                assert_ne!(parsed, Ok(SegmentKind::Send { offset: 0, control }));
            }
            let mut middle = bytes.clone();
            middle[1] &= !FIRST;
            assert_eq!(SegmentHeader::parse(&middle, len), Err(SegmentError::Control));
        }
    }
}

#[test]
fn rdma_tcp_a6_a_response_carries_no_control_data() {
    let mut bytes = vectors().swap_remove(3).0;
    bytes[19] = 1;
    assert_eq!(SegmentHeader::parse(&bytes, 28), Err(SegmentError::Control));
}

fn place() -> impl Strategy<Value = BufferPlace> {
    let offset = prop_oneof![any::<u32>().prop_map(u64::from), 0..u64::MAX - 100_000];
    (any::<u32>(), offset).prop_map(|(id, offset)| BufferPlace { id, offset })
}

fn control() -> impl Strategy<Value = SendControl> {
    prop_oneof![
        Just(SendControl::None),
        any::<(u16, u16)>().prop_map(|(ird, ord)| SendControl::Connect { ird, ord }),
        any::<(u16, u16)>().prop_map(|(ird, ord)| SendControl::Accept { ird, ord }),
        Just(SendControl::Reject),
        any::<u16>().prop_map(|code| SendControl::Terminate { code }),
        any::<u32>().prop_map(|stag| SendControl::Invalidate { stag }),
        any::<[u8; 8]>().prop_map(|data| SendControl::Immediate { data }),
    ]
}

/// Any valid header, and a length of payload that it allows.
fn header() -> impl Strategy<Value = (SegmentHeader, usize)> {
    let kind = prop_oneof![
        (any::<u32>(), control())
            .prop_map(|(offset, control)| SegmentKind::Send { offset: offset / 2, control }),
        (place(), any::<u32>()).prop_map(|(to, total)| SegmentKind::Write { to, total }),
        (place(), any::<u32>()).prop_map(|(from, total)| SegmentKind::ReadRequest {
            from,
            total,
            atomic: None
        }),
        (place(), any::<(u32, [u64; 4])>()).prop_map(|(from, (code, operands))| {
            SegmentKind::ReadRequest { from, total: 8, atomic: Some(AtomicWords { code, operands }) }
        }),
        any::<u32>().prop_map(|offset| SegmentKind::ReadResponse { offset: offset / 2 }),
    ];
    (any::<(bool, bool, bool, u32, u16)>(), kind, 0usize..2000).prop_map(
        |((first, last, solicited, number, order), kind, mut payload)| {
            let (mut first, mut last, mut kind) = (first, last, kind);
            match &mut kind {
                SegmentKind::Send { offset, control } => {
                    match control {
                        SendControl::None => {}
                        SendControl::Invalidate { .. } => first = true,
                        SendControl::Terminate { .. } | SendControl::Immediate { .. } => {
                            (first, last, payload) = (true, true, 0);
                        }
                        _ => (first, last) = (true, true),
                    }
                    *offset = if first { 0 } else { *offset };
                }
                SegmentKind::Write { total, .. } => {
                    *total = (*total).max(payload as u32 + 1);
                    if first && last {
                        *total = payload as u32;
                    }
                }
                SegmentKind::ReadRequest { .. } => (first, last, payload) = (true, true, 0),
                SegmentKind::ReadResponse { offset } => *offset = if first { 0 } else { *offset },
            }
            let (number, order) = (MessageNumber(number), Order(order));
            (SegmentHeader { first, last, solicited, number, order, kind }, payload)
        },
    )
}

proptest! {
    #[test]
    fn prop_headers_survive_a_round_trip_and_every_truncation_is_an_error((header, payload) in header()) {
        let payload = vec![0x5a; payload];
        let bytes = segment(&header, &payload);
        let len = header.bytes() + payload.len();
        prop_assert_eq!(SegmentHeader::parse(&bytes[..len], len), Ok(header));
        prop_assert_eq!(independent::parse(&bytes), Some((ID.0, header, payload)));
        for short in 0..header.bytes() {
            prop_assert!(SegmentHeader::parse(&bytes[..short], len).is_err());
            prop_assert!(SegmentHeader::parse(&bytes, short).is_err(), "the length field ends in the header");
        }
    }

    /// The two codecs agree on whether any bytes are a header.
    #[test]
    fn prop_both_codecs_accept_the_same_bytes((header, payload) in header(), changes in prop::collection::vec((0usize..80, any::<u8>()), 0..4)) {
        let mut bytes = segment(&header, &vec![0x5a; payload]);
        bytes.truncate(bytes.len() - 4);
        for (at, value) in changes {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        bytes.extend(crc32([&bytes[..]]).to_le_bytes());
        let prefix = Prefix::parse(*bytes.first_chunk().unwrap()).ok();
        let ours = prefix
            .filter(|prefix| prefix.len.next_multiple_of(4) + 4 == bytes.len())
            .and_then(|prefix| Some((prefix.connection.0, SegmentHeader::parse(&bytes[..prefix.len], prefix.len).ok()?)));
        let theirs = independent::parse(&bytes).map(|(id, header, _)| (id, header));
        prop_assert_eq!(ours, theirs);
    }
}

/// A codec written from the tables of the study: it reads a segment as a list of 32-bit words.
mod independent {
    use super::*;

    /// The CRC with one shift per bit, least significant bit first.
    fn crc(bytes: &[u8]) -> u32 {
        let mut register = !0u32;
        for byte in bytes {
            register ^= u32::from(*byte);
            for _ in 0..8 {
                let odd = register & 1 == 1;
                register /= 2;
                if odd {
                    register ^= 0x8260_8edb;
                }
            }
        }
        !register
    }

    /// A segment without its CRC, and its parts that depend on no type.
    struct Parts<'a> {
        words: &'a [u32],
        flags: u32,
        control: &'a [u32],
        payload: &'a [u8],
    }

    /// Connection ID, header and payload of a whole segment; `None` when any rule for a segment alone is broken.
    pub fn parse(bytes: &[u8]) -> Option<(u64, SegmentHeader, Vec<u8>)> {
        if !bytes.len().is_multiple_of(4) || bytes.len() < 28 {
            return None;
        }
        let words: Vec<u32> =
            bytes.chunks(4).map(|w| w.iter().fold(0, |sum, byte| sum * 256 + u32::from(*byte))).collect();
        let (last_word, covered) = words.split_last()?;
        if last_word.swap_bytes() != crc(&bytes[..4 * covered.len()]) {
            return None;
        }
        let len = (covered[0] % 0x1_0000) as usize;
        if covered[0] >> 24 != 1 || len.div_ceil(4) != covered.len() {
            return None;
        }
        let flags = covered[0] >> 16 & 0xff;
        let clen = (covered[4] & 0xff) as usize;
        if flags >= 0x20 || covered[4] & 0xff00 != 0 {
            return None;
        }
        let head = if matches!(flags % 4, 1 | 2) { 8 } else { 6 };
        let payload = bytes.get(4 * (head + clen)..len)?;
        let parts = Parts { words: covered, flags, control: &covered[head..head + clen], payload };
        let kind = match flags % 4 {
            0 => parts.send()?,
            1 => parts.write()?,
            2 => parts.read_request()?,
            _ => parts.read_response()?,
        };
        let id = u64::from(covered[1]) << 32 | u64::from(covered[2]);
        let header = SegmentHeader {
            first: flags & 8 != 0,
            last: flags & 4 != 0,
            solicited: flags & 16 != 0,
            number: MessageNumber(covered[3]),
            order: Order((covered[4] >> 16) as u16),
            kind,
        };
        Some((id, header, payload.to_vec()))
    }

    impl Parts<'_> {
        fn begins(&self) -> bool {
            self.flags & 8 != 0
        }

        fn ends(&self) -> bool {
            self.flags & 4 != 0
        }

        /// A message of one segment.
        fn alone(&self) -> bool {
            self.begins() && self.ends()
        }

        fn offset(&self) -> u64 {
            u64::from(self.control.first().copied().unwrap_or(0)) << 32 | u64::from(self.words[6])
        }

        fn buffer(&self) -> BufferPlace {
            BufferPlace { id: self.words[5], offset: self.offset() }
        }

        fn long(&self, at: usize) -> u64 {
            u64::from(self.control[at]) << 32 | u64::from(self.control[at + 1])
        }

        /// The Data Offset, if payload and offset stay within the longest message.
        fn data_offset(&self) -> Option<u32> {
            let fits = u64::from(self.words[5]) + (self.payload.len() as u64) < 1 << 32;
            (fits && (!self.begins() || self.words[5] == 0)).then_some(self.words[5])
        }

        fn send(&self) -> Option<SegmentKind> {
            let offset = self.data_offset()?;
            if !self.control.is_empty() && !self.begins() {
                return None;
            }
            let (alone, bare) = (self.alone(), self.alone() && self.payload.is_empty());
            let control = match *self.control {
                [] => SendControl::None,
                [0x0100_0000, depths] if alone => {
                    SendControl::Connect { ird: (depths >> 16) as u16, ord: depths as u16 }
                }
                [0x0200_0000, depths] if alone => {
                    SendControl::Accept { ird: (depths >> 16) as u16, ord: depths as u16 }
                }
                [0x0300_0000] if alone => SendControl::Reject,
                [0x0400_0000, code] if bare && code % 0x1_0000 == 0 => {
                    SendControl::Terminate { code: (code >> 16) as u16 }
                }
                [0x0500_0000, stag] => SendControl::Invalidate { stag },
                [0x0600_0000, _, _] if bare => SendControl::Immediate { data: self.long(1).to_be_bytes() },
                _ => return None,
            };
            Some(SegmentKind::Send { offset, control })
        }

        fn write(&self) -> Option<SegmentKind> {
            let (n, total) = (self.payload.len() as u64, self.words[7]);
            let one_form = matches!(self.control, [] | [1..=u32::MAX]);
            let fits = n <= total.into() && self.offset().checked_add(n).is_some();
            if !one_form || !fits || self.begins() && self.ends() != (n == total.into()) {
                return None;
            }
            Some(SegmentKind::Write { to: self.buffer(), total })
        }

        fn read_request(&self) -> Option<SegmentKind> {
            if !self.alone() || !self.payload.is_empty() {
                return None;
            }
            let (from, total) = (self.buffer(), self.words[7]);
            let atomic = match self.control {
                [] | [1..=u32::MAX] => None,
                [_, code, ..] if self.control.len() == 10 && total == 8 => {
                    Some(AtomicWords { code: *code, operands: [2, 4, 6, 8].map(|at| self.long(at)) })
                }
                _ => return None,
            };
            Some(SegmentKind::ReadRequest { from, total, atomic })
        }

        fn read_response(&self) -> Option<SegmentKind> {
            let offset = self.data_offset()?;
            self.control.is_empty().then_some(SegmentKind::ReadResponse { offset })
        }
    }
}
