//! The bytes of MPA Request and Reply frames (RFC 5044 section 7.1.1, RFC 6581 sections 6 and 9).

use super::{MpaError, RtrOptions};

const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";

/// Bytes before the private data: key, flags, revision, private data length.
const FIXED_BYTES: usize = 20;

/// Largest private data in a frame, in bytes, including IRD and ORD (RFC 5044 section 7.1.1).
pub(super) const MAX_PRIVATE_DATA: usize = 512;

/// Bytes of private data that the enhanced connection establishment data takes (RFC 6581 section 9).
pub(super) const ENHANCED_BYTES: usize = 4;

const FLAG_MARKERS: u8 = 0x80;
const FLAG_CRC: u8 = 0x40;
const FLAG_REJECTED: u8 = 0x20;
const FLAG_ENHANCED: u8 = 0x10;

/// The reserved bits of the flags (Res). RFC 5044 section 7.1.1: peers do not check them.
const RESERVED: u8 = 0x0f;
/// Request: the reserved bits of an initiator that has Sends with immediate data, an extension of this project. Not 0x08, by which
/// Linux's siw offers and takes FPDUs of several segments.
const SEND_IMMEDIATE_OFFERED: u8 = 0x01;
/// Reply: the reserved bits of a responder that agrees to them. They differ from the offer, because Linux's siw answers with the
/// flags of the request.
const SEND_IMMEDIATE_AGREED: u8 = 0x02;

/// Control flags A and B are the two bits above the IRD, C and D those above the ORD (RFC 6581 section 9).
const CONTROL_HIGH: u16 = 0x8000;
const CONTROL_LOW: u16 = 0x4000;
const DEPTH: u16 = 0x3fff;

/// The enhanced RDMA connection establishment data (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enhanced {
    /// Inbound RDMA Read Queue depth, 14 bits.
    pub ird: u16,
    /// Outbound RDMA Read Queue depth, 14 bits.
    pub ord: u16,
    /// Control flags B, C and D; `None` without flag A, which gives them meaning.
    pub peer_to_peer: Option<RtrOptions>,
}

/// An MPA Request frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MpaRequest {
    /// 0, 1 or 2.
    pub revision: u8,
    /// M: the initiator requires markers from the responder.
    pub markers: bool,
    /// C: the initiator prefers CRC.
    pub crc: bool,
    /// S, and the data that it announces; only in revision 2.
    pub enhanced: Option<Enhanced>,
    /// The initiator offers Sends with immediate data, an extension of this project; only in revision 2.
    pub send_immediate: bool,
    /// The ULP's private data.
    pub private_data: Vec<u8>,
}

/// An MPA Reply frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MpaReply {
    /// 0, 1 or 2.
    pub revision: u8,
    /// M: the responder requires markers from the initiator.
    pub markers: bool,
    /// C: the responder prefers CRC.
    pub crc: bool,
    /// R: the responder's ULP rejects the connection.
    pub rejected: bool,
    /// S, and the data that it announces; only in revision 2.
    pub enhanced: Option<Enhanced>,
    /// The responder agrees to Sends with immediate data; only in revision 2.
    pub send_immediate: bool,
    /// The ULP's private data.
    pub private_data: Vec<u8>,
}

impl MpaRequest {
    /// Parses a request from the first bytes of a stream. Returns the frame and its length, or `None` when more bytes
    /// are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, MpaError> {
        let Some(frame) = Frame::parse(bytes, REQUEST_KEY, REPLY_KEY)? else { return Ok(None) };
        let (enhanced, private_data) = frame.split_private_data()?;
        let request = Self {
            revision: frame.revision,
            markers: frame.flags & FLAG_MARKERS != 0,
            crc: frame.flags & FLAG_CRC != 0,
            enhanced,
            send_immediate: frame.extends(SEND_IMMEDIATE_OFFERED),
            private_data: private_data.to_vec(),
        };
        Ok(Some((request, frame.len())))
    }

    /// The frame's bytes. The other reserved bits are zero.
    pub fn emit(&self) -> Vec<u8> {
        let flags = flag(self.markers, FLAG_MARKERS)
            | flag(self.crc, FLAG_CRC)
            | flag(self.send_immediate, SEND_IMMEDIATE_OFFERED);
        emit(REQUEST_KEY, flags, self.revision, self.enhanced, &self.private_data)
    }
}

impl MpaReply {
    /// Parses a reply from the first bytes of a stream. Returns the frame and its length, or `None` when more bytes
    /// are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, MpaError> {
        let Some(frame) = Frame::parse(bytes, REPLY_KEY, REQUEST_KEY)? else { return Ok(None) };
        let rejected = frame.flags & FLAG_REJECTED != 0;
        let (enhanced, private_data) = match frame.split_private_data() {
            // A rejection is accepted without IRD and ORD.
            Err(_) if rejected => (None, frame.private_data),
            split => split?,
        };
        let reply = Self {
            revision: frame.revision,
            markers: frame.flags & FLAG_MARKERS != 0,
            crc: frame.flags & FLAG_CRC != 0,
            rejected,
            enhanced,
            send_immediate: frame.extends(SEND_IMMEDIATE_AGREED),
            private_data: private_data.to_vec(),
        };
        Ok(Some((reply, frame.len())))
    }

    /// The frame's bytes. The other reserved bits are zero.
    pub fn emit(&self) -> Vec<u8> {
        let flags = flag(self.markers, FLAG_MARKERS)
            | flag(self.crc, FLAG_CRC)
            | flag(self.rejected, FLAG_REJECTED)
            | flag(self.send_immediate, SEND_IMMEDIATE_AGREED);
        emit(REPLY_KEY, flags, self.revision, self.enhanced, &self.private_data)
    }
}

/// The fields that requests and replies have in common.
struct Frame<'a> {
    flags: u8,
    revision: u8,
    /// Private data, including IRD and ORD, if there are any.
    private_data: &'a [u8],
}

impl<'a> Frame<'a> {
    fn parse(bytes: &'a [u8], key: &[u8; 16], other_role: &[u8; 16]) -> Result<Option<Self>, MpaError> {
        // A wrong key is detected at its first wrong byte, without waiting for 20 bytes.
        let begins_like = |key: &[u8; 16]| bytes.iter().zip(key).all(|(a, b)| a == b);
        if !begins_like(key) {
            return match bytes.len() {
                16.. if begins_like(other_role) => Err(MpaError::SameRole),
                0..16 if begins_like(other_role) => Ok(None),
                _ => Err(MpaError::InvalidKey),
            };
        }
        let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED_BYTES>() else { return Ok(None) };
        let [.., flags, revision, high, low] = *fixed;
        if revision > 2 {
            return Err(MpaError::UnsupportedRevision(revision));
        }
        let len = u16::from_be_bytes([high, low]);
        if usize::from(len) > MAX_PRIVATE_DATA {
            return Err(MpaError::PrivateDataTooLong(len));
        }
        let private_data = rest.get(..usize::from(len));
        Ok(private_data.map(|private_data| Self { flags, revision, private_data }))
    }

    fn len(&self) -> usize {
        FIXED_BYTES + self.private_data.len()
    }

    /// Whether the reserved bits of a frame of revision 2 are `bits`: any others are ignored.
    fn extends(&self, bits: u8) -> bool {
        self.revision >= 2 && self.flags & RESERVED == bits
    }

    /// Splits IRD and ORD from the private data. The S bit is reserved below revision 2 and ignored there.
    fn split_private_data(&self) -> Result<(Option<Enhanced>, &'a [u8]), MpaError> {
        if self.revision < 2 || self.flags & FLAG_ENHANCED == 0 {
            return Ok((None, self.private_data));
        }
        let (&[i0, i1, o0, o1], rest) =
            self.private_data.split_first_chunk::<ENHANCED_BYTES>().ok_or(MpaError::EnhancedDataMissing)?;
        let (ird, ord) = (u16::from_be_bytes([i0, i1]), u16::from_be_bytes([o0, o1]));
        let peer_to_peer = (ird & CONTROL_HIGH != 0).then_some(RtrOptions {
            send: ird & CONTROL_LOW != 0,
            write: ord & CONTROL_HIGH != 0,
            read: ord & CONTROL_LOW != 0,
        });
        Ok((Some(Enhanced { ird: ird & DEPTH, ord: ord & DEPTH, peer_to_peer }), rest))
    }
}

fn emit(key: &[u8; 16], flags: u8, revision: u8, enhanced: Option<Enhanced>, private_data: &[u8]) -> Vec<u8> {
    let extra = if enhanced.is_some() { ENHANCED_BYTES } else { 0 };
    let mut out = Vec::with_capacity(FIXED_BYTES + extra + private_data.len());
    out.extend_from_slice(key);
    out.push(flags | flag(enhanced.is_some(), FLAG_ENHANCED));
    out.push(revision);
    out.extend_from_slice(&((extra + private_data.len()) as u16).to_be_bytes());
    if let Some(Enhanced { ird, ord, peer_to_peer }) = enhanced {
        let (mut ird, mut ord) = (ird & DEPTH, ord & DEPTH);
        if let Some(rtr) = peer_to_peer {
            ird |= CONTROL_HIGH | if rtr.send { CONTROL_LOW } else { 0 };
            ord |= if rtr.write { CONTROL_HIGH } else { 0 } | if rtr.read { CONTROL_LOW } else { 0 };
        }
        out.extend_from_slice(&ird.to_be_bytes());
        out.extend_from_slice(&ord.to_be_bytes());
    }
    out.extend_from_slice(private_data);
    out
}

const fn flag(set: bool, bit: u8) -> u8 {
    if set { bit } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn enhanced() -> impl Strategy<Value = Option<Enhanced>> {
        let rtr = any::<Option<(bool, bool, bool)>>()
            .prop_map(|o| o.map(|(send, write, read)| RtrOptions { send, write, read }));
        proptest::option::of((0u16..0x4000, 0u16..0x4000, rtr))
            .prop_map(|o| o.map(|(ird, ord, peer_to_peer)| Enhanced { ird, ord, peer_to_peer }))
    }

    fn reply() -> impl Strategy<Value = MpaReply> {
        let data = proptest::collection::vec(any::<u8>(), 0..508);
        (any::<[bool; 4]>(), enhanced(), data).prop_map(
            |([markers, crc, rejected, immediate], enhanced, private_data)| MpaReply {
                revision: if enhanced.is_some() { 2 } else { 1 },
                markers,
                crc,
                rejected,
                send_immediate: immediate && enhanced.is_some(),
                enhanced,
                private_data,
            },
        )
    }

    proptest! {
        #[test]
        fn prop_startup_round_trip_and_every_truncation(reply in reply(), behind: Vec<u8>) {
            let MpaReply { revision, markers, crc, enhanced, send_immediate, ref private_data, .. } = reply;
            let private_data = private_data.clone();
            let request = MpaRequest { revision, markers, crc, enhanced, send_immediate, private_data };
            let mut bytes = request.emit();
            for cut in 0..bytes.len() {
                prop_assert_eq!(MpaRequest::parse(&bytes[..cut]), Ok(None));
            }
            let len = bytes.len();
            bytes.extend_from_slice(&behind);
            prop_assert_eq!(MpaRequest::parse(&bytes), Ok(Some((request, len))));

            let mut bytes = reply.emit();
            for cut in 0..bytes.len() {
                prop_assert_eq!(MpaReply::parse(&bytes[..cut]), Ok(None));
            }
            let len = bytes.len();
            bytes.extend_from_slice(&behind);
            prop_assert_eq!(MpaReply::parse(&bytes), Ok(Some((reply, len))));
        }

        #[test]
        fn prop_startup_parse_never_panics(bytes: Vec<u8>, keyed: bool) {
            let mut frame = if keyed { REQUEST_KEY.to_vec() } else { Vec::new() };
            frame.extend_from_slice(&bytes);
            if let Ok(Some((_, len))) = MpaRequest::parse(&frame) {
                prop_assert!(len <= frame.len() && len <= FIXED_BYTES + MAX_PRIVATE_DATA);
            }
        }
    }

    /// RFC 5044 appendix C.2.4: revision 0, M and C; the S bit is reserved.
    #[test]
    fn rfc5044_c2_4_frames_of_rdmac_rnics() {
        let bytes = b"MPA ID Req Frame\xd0\x00\x00\x02hi";
        let (request, len) = MpaRequest::parse(bytes).unwrap().unwrap();
        assert_eq!((len, request.revision, request.enhanced), (22, 0, None));
        assert!(request.markers && request.crc && request.private_data == b"hi");
        assert_eq!(request.emit()[16..20], [FLAG_MARKERS | FLAG_CRC, 0, 0, 2]);
    }

    /// The bytes that Linux 6.1's siw sent (rping, revision 2; and revision 1).
    #[test]
    fn rfc6581_s6_golden_frames_of_siw() {
        let bytes = b"MPA ID Req Frame\x50\x02\x00\x04\x80\x01\xc0\x01";
        let (request, len) = MpaRequest::parse(bytes).unwrap().unwrap();
        let rtr = RtrOptions { send: false, write: true, read: true };
        assert_eq!(len, 24);
        assert_eq!(request.enhanced, Some(Enhanced { ird: 1, ord: 1, peer_to_peer: Some(rtr) }));
        assert!(request.crc && !request.markers && request.private_data.is_empty());
        assert_eq!(request.emit(), bytes);

        let bytes = b"MPA ID Rep Frame\x00\x01\x00\x00";
        let (reply, len) = MpaReply::parse(bytes).unwrap().unwrap();
        assert_eq!((len, reply.revision, reply.crc, reply.enhanced), (20, 1, false, None));
        assert_eq!(reply.emit(), bytes);
    }

    #[test]
    fn rfc5044_s7_1_1_reserved_bits_are_ignored_and_never_sent() {
        let bytes = b"MPA ID Req Frame\xff\x01\x00\x00";
        let (request, _) = MpaRequest::parse(bytes).unwrap().unwrap();
        assert_eq!(request.enhanced, None, "S is a reserved bit in revision 1");
        assert_eq!(request.emit()[16], FLAG_MARKERS | FLAG_CRC);
        let (request, _) = MpaRequest::parse(b"MPA ID Req Frame\x0f\x02\x00\x00").unwrap().unwrap();
        assert_eq!(request.emit()[16], 0);
    }

    #[test]
    fn an_offer_and_an_agreement_of_sends_with_immediate_data_are_different_reserved_bits() {
        for bits in 0..=RESERVED {
            for revision in 0..=2 {
                let mut bytes = *b"MPA ID Req Frame\x00\x00\x00\x00";
                bytes[16..18].copy_from_slice(&[bits, revision]);
                let (request, _) = MpaRequest::parse(&bytes).unwrap().unwrap();
                assert_eq!(request.send_immediate, (bits, revision) == (1, 2), "{bits:x} {revision}");
                bytes[..16].copy_from_slice(REPLY_KEY);
                let (reply, _) = MpaReply::parse(&bytes).unwrap().unwrap();
                assert_eq!(reply.send_immediate, (bits, revision) == (2, 2), "{bits:x} {revision}");
            }
        }
    }

    #[test]
    fn rfc5044_s7_1_2_invalid_frames() {
        let parse = |bytes: &[u8]| MpaRequest::parse(bytes).map(|_| ());
        assert_eq!(parse(b"G"), Err(MpaError::InvalidKey), "detected at the first wrong byte");
        assert_eq!(parse(b"MPA ID Rep Fram"), Ok(()), "may still become a reply");
        assert_eq!(parse(b"MPA ID Rep Frame"), Err(MpaError::SameRole));
        assert_eq!(parse(b"MPA ID Rep Frumm"), Err(MpaError::InvalidKey));
        assert_eq!(parse(b"MPA ID Req Frame\0\x03\0\0"), Err(MpaError::UnsupportedRevision(3)));
        assert_eq!(parse(b"MPA ID Req Frame\0\x01\x02\x01"), Err(MpaError::PrivateDataTooLong(513)));
        assert_eq!(parse(b"MPA ID Req Frame\x10\x02\0\x03abc"), Err(MpaError::EnhancedDataMissing));
        let (reply, _) = MpaReply::parse(b"MPA ID Rep Frame\x30\x02\0\x03abc").unwrap().unwrap();
        assert!(reply.rejected && reply.enhanced.is_none(), "a rejection needs no IRD and ORD");
    }

    #[test]
    fn rfc6581_s9_2_flags_b_c_d_are_ignored_without_a() {
        let bytes = b"MPA ID Req Frame\x10\x02\x00\x04\x40\x07\xc0\x09";
        let (request, _) = MpaRequest::parse(bytes).unwrap().unwrap();
        assert_eq!(request.enhanced, Some(Enhanced { ird: 7, ord: 9, peer_to_peer: None }));
        assert_eq!(request.emit()[20..], [0, 7, 0, 9], "they are not sent without flag A either");
    }
}
