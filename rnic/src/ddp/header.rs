//! The DDP header, tagged (14 bytes) and untagged (18 bytes): RFC 5041 section 4.
#![deny(clippy::indexing_slicing)]

use super::{DdpError, MessageOffset, Msn, STag, TaggedOffset, Versions};

/// Bytes of a tagged header (RFC 5041 section 4.2).
pub const TAGGED_BYTES: usize = 14;
/// Bytes of an untagged header (RFC 5041 section 4.3).
pub const UNTAGGED_BYTES: usize = 18;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
/// DV (RFC 5041 section 4.1).
const VERSION_MASK: u8 = 0x03;

/// Header of a segment for a tagged buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tagged {
    /// Whether this is the message's last segment (L).
    pub last: bool,
    /// The upper layer's byte (`RsvdULP`): the RDMAP control field.
    pub control: u8,
    /// The region's Steering Tag.
    pub stag: STag,
    /// Tagged offset of the payload's first byte.
    pub to: TaggedOffset,
}

/// Header of a segment for an untagged buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Untagged {
    /// Whether this is the message's last segment (L).
    pub last: bool,
    /// The upper layer's first byte (`RsvdULP[0:7]`): the RDMAP control field.
    pub control: u8,
    /// The upper layer's word (`RsvdULP[8:39]`): RDMAP's Invalidate `STag`.
    pub word: u32,
    /// Queue number; not every value is a valid queue.
    pub queue: u32,
    /// The message's sequence number.
    pub msn: Msn,
    /// Offset of the payload's first byte in the message.
    pub mo: MessageOffset,
}

/// A DDP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Header {
    /// T = 1.
    Tagged(Tagged),
    /// T = 0.
    Untagged(Untagged),
}

/// Why bytes are not a DDP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// Too few bytes for a header.
    Truncated,
    /// DV is not that of the connection. The header is the bytes' meaning under the right version.
    Version(DdpError, Header),
}

impl Header {
    /// Parses the header at the start of `bytes`, on a connection with these versions. Reserved bits are ignored
    /// (section 4.1).
    pub fn parse(bytes: &[u8], versions: Versions) -> Result<Self, Malformed> {
        let &flags = bytes.first().ok_or(Malformed::Truncated)?;
        let last = flags & LAST != 0;
        let checked = |error, header| {
            let valid = flags & VERSION_MASK == versions.number();
            if valid { Ok(header) } else { Err(Malformed::Version(error, header)) }
        };
        if flags & TAGGED != 0 {
            let &[_, control, s0, s1, s2, s3, ref to @ ..] =
                bytes.first_chunk::<TAGGED_BYTES>().ok_or(Malformed::Truncated)?;
            let stag = STag::new(u32::from_be_bytes([s0, s1, s2, s3]));
            let header = Tagged { last, control, stag, to: u64::from_be_bytes(*to) };
            checked(DdpError::TaggedVersion, Self::Tagged(header))
        } else {
            let &[_, control, ref words @ ..] =
                bytes.first_chunk::<UNTAGGED_BYTES>().ok_or(Malformed::Truncated)?;
            let &[w0, w1, w2, w3, q0, q1, q2, q3, m0, m1, m2, m3, o0, o1, o2, o3] = words;
            let header = Untagged {
                last,
                control,
                word: u32::from_be_bytes([w0, w1, w2, w3]),
                queue: u32::from_be_bytes([q0, q1, q2, q3]),
                msn: Msn::new(u32::from_be_bytes([m0, m1, m2, m3])),
                mo: u32::from_be_bytes([o0, o1, o2, o3]),
            };
            checked(DdpError::UntaggedVersion, Self::Untagged(header))
        }
    }

    /// Bytes of the header.
    pub const fn bytes(&self) -> usize {
        match self {
            Self::Tagged(_) => TAGGED_BYTES,
            Self::Untagged(_) => UNTAGGED_BYTES,
        }
    }

    /// The first byte: the DDP Control Field as we send it with version 1.
    #[cfg(test)]
    pub(crate) fn flags(&self) -> u8 {
        match self {
            Self::Tagged(t) => flags(TAGGED, t.last, Versions::Ietf),
            Self::Untagged(u) => flags(0, u.last, Versions::Ietf),
        }
    }

    /// Whether this is the message's last segment.
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(t) => t.last,
            Self::Untagged(u) => u.last,
        }
    }

    /// The upper layer's first byte.
    pub const fn control(&self) -> u8 {
        match self {
            Self::Tagged(t) => t.control,
            Self::Untagged(u) => u.control,
        }
    }

    /// Writes the header to the start of `out`; returns its length, or 0 when `out` is too short.
    pub fn emit(&self, versions: Versions, out: &mut [u8]) -> usize {
        match self {
            Self::Tagged(t) => put(out, &t.to_bytes(versions)),
            Self::Untagged(u) => put(out, &u.to_bytes(versions)),
        }
    }
}

/// A header as received, including reserved bits and a wrong version, to be quoted in a Terminate (RFC 5040 section
/// 4.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawHeader([u8; UNTAGGED_BYTES]);

impl RawHeader {
    /// Copies the header at the start of `bytes`, tagged or untagged; `None` when it is incomplete.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let mut raw = [0; UNTAGGED_BYTES];
        let len = if bytes.first()? & TAGGED != 0 { TAGGED_BYTES } else { UNTAGGED_BYTES };
        raw.get_mut(..len)?.copy_from_slice(bytes.get(..len)?);
        Some(Self(raw))
    }

    /// Restores the bytes of `header`, whose first byte was `first`.
    pub(crate) fn of(header: &Header, first: u8) -> Self {
        let mut raw = [0; UNTAGGED_BYTES];
        header.emit(Versions::Ietf, &mut raw);
        let [flags, ..] = &mut raw;
        *flags = first;
        Self(raw)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        let Self(raw) = self;
        let [first, ..] = raw;
        if first & TAGGED != 0 { raw.get(..TAGGED_BYTES).unwrap_or(raw) } else { raw }
    }

    /// Parses the bytes, whatever their version.
    pub fn header(&self) -> Option<Header> {
        match Header::parse(self.as_bytes(), Versions::default()) {
            Ok(header) | Err(Malformed::Version(_, header)) => Some(header),
            Err(Malformed::Truncated) => None,
        }
    }
}

impl Tagged {
    /// The header's bytes.
    pub fn to_bytes(&self, versions: Versions) -> [u8; TAGGED_BYTES] {
        let [s0, s1, s2, s3] = self.stag.value().to_be_bytes();
        let [t0, t1, t2, t3, t4, t5, t6, t7] = self.to.to_be_bytes();
        [flags(TAGGED, self.last, versions), self.control, s0, s1, s2, s3, t0, t1, t2, t3, t4, t5, t6, t7]
    }
}

impl Untagged {
    /// The header's bytes.
    pub fn to_bytes(&self, versions: Versions) -> [u8; UNTAGGED_BYTES] {
        let [w0, w1, w2, w3] = self.word.to_be_bytes();
        let [q0, q1, q2, q3] = self.queue.to_be_bytes();
        let [m0, m1, m2, m3] = self.msn.value().to_be_bytes();
        let [o0, o1, o2, o3] = self.mo.to_be_bytes();
        let first = flags(0, self.last, versions);
        [first, self.control, w0, w1, w2, w3, q0, q1, q2, q3, m0, m1, m2, m3, o0, o1, o2, o3]
    }
}

fn flags(tagged: u8, last: bool, versions: Versions) -> u8 {
    tagged | if last { LAST } else { 0 } | versions.number()
}

fn put(out: &mut [u8], bytes: &[u8]) -> usize {
    let Some(to) = out.get_mut(..bytes.len()) else { return 0 };
    to.copy_from_slice(bytes);
    bytes.len()
}

#[cfg(test)]
#[expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> impl Strategy<Value = Header> {
        prop_oneof![
            any::<(bool, u8, u32, u64)>().prop_map(|(last, control, stag, to)| Header::Tagged(Tagged {
                last,
                control,
                stag: STag::new(stag),
                to
            })),
            any::<(bool, u8, u32, u32, u32, u32)>().prop_map(|(last, control, word, queue, msn, mo)| {
                Header::Untagged(Untagged { last, control, word, queue, msn: Msn::new(msn), mo })
            }),
        ]
    }

    proptest! {
        #[test]
        fn prop_headers_survive_a_round_trip_and_every_truncation_is_noticed(
            header in header(), rdmac: bool
        ) {
            let versions = if rdmac { Versions::Rdmac } else { Versions::Ietf };
            let mut bytes = [0xEE; 20];
            let len = header.emit(versions, &mut bytes);
            prop_assert_eq!(len, header.bytes());
            prop_assert_eq!(&bytes[len..], &[0xEE; 20][len..]);
            prop_assert_eq!(Header::parse(&bytes, versions), Ok(header));
            let raw = RawHeader::of(&header, bytes[0] ^ 0x3e);
            bytes[0] ^= 0x3e;
            prop_assert_eq!(raw.as_bytes(), &bytes[..len]);
            prop_assert_eq!(RawHeader::read(&bytes), Some(raw));
            prop_assert_eq!(raw.header(), Some(header));
            bytes[0] ^= 0x3e;
            for short in 0..len {
                prop_assert_eq!(RawHeader::read(&bytes[..short]), None);
                prop_assert_eq!(Header::parse(&bytes[..short], versions), Err(Malformed::Truncated));
                prop_assert_eq!(header.emit(versions, &mut [0; 20][..short]), 0);
            }
        }

        #[test]
        fn prop_any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..24)) {
            if let Ok(header) = Header::parse(&bytes, Versions::Ietf) {
                let mut out = [0; 20];
                prop_assert!(header.emit(Versions::Ietf, &mut out) <= bytes.len());
            }
        }
    }

    #[test]
    fn rfc5041_s4_1_reserved_bits_are_sent_zero_and_ignored() {
        let header = Header::Tagged(Tagged { last: true, control: 0x40, stag: STag::new(1), to: 0 });
        let mut bytes = [0; TAGGED_BYTES];
        header.emit(Versions::Ietf, &mut bytes);
        assert_eq!(bytes[0] & 0x3c, 0);
        bytes[0] |= 0x3c;
        assert_eq!(Header::parse(&bytes, Versions::Ietf), Ok(header));
    }

    #[test]
    fn rfc5041_s4_1_only_the_version_of_the_connection_is_valid() {
        for (tagged, error) in [(0x80, DdpError::TaggedVersion), (0, DdpError::UntaggedVersion)] {
            for (versions, valid) in [(Versions::Ietf, 1), (Versions::Rdmac, 0)] {
                for version in 0..4 {
                    let bytes = [tagged | version; 18];
                    match Header::parse(&bytes, versions) {
                        Ok(_) => assert_eq!(version, valid),
                        Err(malformed) => {
                            assert!(matches!(malformed, Malformed::Version(e, _) if e == error));
                            assert_ne!(version, valid);
                        }
                    }
                }
            }
        }
    }
}
