//! Golden bytes, every truncation, and fields out of range.

use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn emitted(base: Base, message: Message, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let header = message.emit(base, payload.len() as u32, &mut bytes);
    assert_eq!(bytes.len(), header);
    bytes.extend(payload);
    bytes
}

fn golden(text: &str, base: Base, message: Message, payload: &[u8]) {
    assert_eq!(emitted(base, message, payload), hex(text), "{message:?}");
    assert_eq!(Message::parse(&hex(text)), Ok((base, message, payload)));
}

fn base(bufs: u16, mseq: u32, ack: u32) -> Base {
    Base { flags: Flags::empty(), bufs, mseq: Seq(mseq), mseq_ack: Seq(ack) }
}

#[test]
fn sdp_s6_golden_bytes() {
    let hello = Hello { max_adverts: 32, desired_bytes: 32768, buffer_bytes: 32768, ird: 16, ord: 8 };
    golden(
        "00000010 00000020 00000000 00000000 11000020 00008000 00008000 00080010",
        base(16, 0, 0),
        Message::Hello(hello),
        b"",
    );
    let ack = HelloAck { max_adverts: 32, buffer_bytes: 32768, ird: 16, ord: 8 };
    golden(
        "01000010 0000001c 00000000 00000000 11000020 00008000 00080010",
        base(16, 0, 0),
        Message::HelloAck(ack),
        b"",
    );
    golden("ff00000f 00000013 00000001 00000000 616263", base(15, 1, 0), Message::Data, b"abc");
    let oob = Base { flags: Flags::OOB_PRES | Flags::OOB_PEND, ..base(15, 2, 1) };
    golden("ff03000f 00000011 00000002 00000001 21", oob, Message::Data, b"!");
    let advert = Advert { len: 65536, stag: 0x0102_0304, offset: 0x1122_3344_5566_7788 };
    golden(
        "fe00000f 00000021 00000003 00000001 00010000 01020304 11223344 55667788 61",
        base(15, 3, 1),
        Message::SrcAvail(advert),
        b"a",
    );
    golden(
        "fd00000f 00000024 00000004 00000001 00010000 01020304 11223344 55667788 00000007",
        base(15, 4, 1),
        Message::SinkAvail { advert, non_discards: 7 },
        b"",
    );
    let mode = |half, mode| Message::ModeChange { half, mode };
    golden(
        "0700000f 00000014 00000005 00000001 20000000",
        base(15, 5, 1),
        mode(Half::Receive, Mode::Pipelined),
        b"",
    );
    golden(
        "0700000f 00000014 00000006 00000001 90000000",
        base(15, 6, 1),
        mode(Half::Send, Mode::Combined),
        b"",
    );
    let pipe = Base { flags: Flags::REQ_PIPE, ..base(15, 5, 3) };
    golden("0604000f 00000014 00000005 00000003 0000ffff", pipe, Message::RdmaRdCompl { len: 65535 }, b"");
    golden(
        "0d00000f 00000018 00000007 00000001 00000000 0001a078",
        base(15, 7, 1),
        Message::SuspComm { port: 41080 },
        b"",
    );
}

#[test]
fn sdp_s6_messages_that_are_only_a_base_header() {
    let plain = [
        (2, Message::DisConn),
        (3, Message::AbortConn),
        (4, Message::SendSm),
        (8, Message::SrcAvailCancel),
        (9, Message::SinkAvailCancel),
        (10, Message::SinkCancelAck),
        (14, Message::SuspCommAck),
    ];
    for (mid, message) in plain {
        let mut bytes = hex("0000000f 00000010 00000001 00000000");
        bytes[0] = mid;
        assert_eq!(Message::parse(&bytes), Ok((base(15, 1, 0), message, &b""[..])));
        assert_eq!(emitted(base(15, 1, 0), message, b""), bytes);
        bytes.push(0);
        bytes[7] += 1;
        assert_eq!(Message::parse(&bytes), Err(WireError::Length), "{message:?} has no payload");
    }
}

#[test]
fn sdp_s6_1_1_reserved_and_experimental_identifiers_are_invalid() {
    for mid in (0x0f..=0xfc).chain([]) {
        let mut bytes = emitted(base(1, 1, 0), Message::Data, b"");
        bytes[0] = mid;
        assert_eq!(Message::parse(&bytes), Err(WireError::Identifier), "{mid:#x}");
    }
}

#[test]
fn sdp_s6_1_4_the_length_is_that_of_the_message() {
    let bytes = emitted(base(1, 1, 0), Message::Data, b"abc");
    for wrong in [0, 15, 18, 20, 255] {
        let mut bytes = bytes.clone();
        bytes[7] = wrong;
        assert_eq!(Message::parse(&bytes), Err(WireError::Length), "{wrong}");
    }
}

/// The message with 32-bit word `word` replaced.
fn with_word(message: Message, word: usize, value: u32) -> Result<(), WireError> {
    let mut bytes = emitted(base(1, 1, 0), message, b"");
    bytes[word * 4..word * 4 + 4].copy_from_slice(&value.to_be_bytes());
    Message::parse(&bytes).map(|_| ())
}

#[test]
fn sdp_s6_2_fields_of_the_greeting_out_of_range() {
    let hello = Message::Hello(Hello {
        max_adverts: 1,
        desired_bytes: 0,
        buffer_bytes: LEAST_BUFFER_BYTES,
        ird: 1,
        ord: 1,
    });
    assert_eq!(with_word(hello, 4, 0x11ff_0001), Ok(()), "the reserved byte is not checked");
    assert_eq!(with_word(hello, 4, 0x1700_0001), Ok(()), "nor is the minor version");
    assert_eq!(with_word(hello, 4, 0x2100_0001), Err(WireError::Version));
    assert_eq!(with_word(hello, 4, 0x1100_0000), Err(WireError::Field), "MaxAdverts");
    assert_eq!(with_word(hello, 6, LEAST_BUFFER_BYTES - 1), Err(WireError::Field));
    assert_eq!(with_word(hello, 6, MAX_BYTES + 1), Err(WireError::Field));
    assert_eq!(with_word(hello, 7, 0x0000_0001), Err(WireError::Field), "LocORD");
    assert_eq!(with_word(hello, 7, 0x0001_0000), Err(WireError::Field), "LocIRD");
}

#[test]
fn sdp_s6_3_fields_of_messages_out_of_range() {
    let advert = Advert { len: 8, stag: 1, offset: 2 };
    for message in [Message::SrcAvail(advert), Message::SinkAvail { advert, non_discards: 0 }] {
        assert_eq!(with_word(message, 4, 0), Err(WireError::Field));
        assert_eq!(with_word(message, 4, MAX_BYTES), Ok(()));
        assert_eq!(with_word(message, 4, MAX_BYTES + 1), Err(WireError::Field));
    }
    let change = Message::ModeChange { half: Half::Send, mode: Mode::Buffered };
    assert_eq!(with_word(change, 4, 0x3000_0000), Err(WireError::Field));
    assert_eq!(with_word(change, 4, 0xf000_0000), Err(WireError::Field));
    assert_eq!(with_word(change, 4, 0x2fff_ffff), Ok(()), "reserved bits are not checked");
    assert_eq!(with_word(Message::ChRcvBuf { bytes: 64 }, 4, 36), Err(WireError::Field));
    let suspend = Message::SuspComm { port: 9 };
    assert_eq!(with_word(suspend, 4, 1), Err(WireError::Field));
    assert_eq!(with_word(suspend, 5, 9), Err(WireError::Field));
    let all = emitted(base(1, 1, 0), Message::SrcAvail(advert), b"12345678");
    assert_eq!(Message::parse(&all), Err(WireError::Length), "one byte is left to read");
}

#[test]
fn sdp_s6_1_2_flags() {
    let flags = |message, flags, payload: &[u8]| {
        let mut bytes = emitted(base(1, 1, 0), message, payload);
        bytes[1] = flags;
        Message::parse(&bytes).map(|(base, _, _)| base.flags)
    };
    assert_eq!(flags(Message::Data, 0xf9, b"x"), Ok(Flags::OOB_PRES), "reserved bits are not checked");
    assert_eq!(flags(Message::Data, 1, b""), Err(WireError::OutOfBand));
    assert_eq!(flags(Message::SendSm, 1, b""), Err(WireError::OutOfBand));
    assert_eq!(flags(Message::SendSm, 2, b""), Ok(Flags::OOB_PEND), "any message may say that it is pending");
}

#[test]
fn sequence_numbers_wrap() {
    assert_eq!(Seq(u32::MAX).next(), Seq(0));
    assert_eq!(Seq(1).since(Seq(u32::MAX)), 2);
    assert_eq!(Seq(u32::MAX).since(Seq(1)), -2);
}

proptest! {
    #[test]
    fn prop_no_bytes_panic_and_every_truncation_is_refused(mid in any::<u8>(), rest in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut bytes = vec![mid, 0, 0, 1];
        bytes.extend((rest.len() as u32 + 8).to_be_bytes());
        bytes.extend(rest);
        if let Ok((base, message, payload)) = Message::parse(&bytes) {
            let again = emitted(base, message, payload);
            prop_assert_eq!(Message::parse(&again), Ok((base, message, payload)));
            for len in 0..bytes.len() {
                prop_assert!(Message::parse(&bytes[..len]).is_err());
            }
        }
    }
}

#[test]
fn sdp_s14_2_solicited_events_are_those_of_the_drafts_list() {
    let advert = Advert { len: 1, stag: 0, offset: 0 };
    let hello = Hello { max_adverts: 1, desired_bytes: 37, buffer_bytes: 37, ird: 1, ord: 1 };
    let change = Message::ModeChange { half: Half::Receive, mode: Mode::Pipelined };
    let hello_ack = HelloAck { max_adverts: 1, buffer_bytes: 37, ird: 1, ord: 1 };
    let solicited = [
        Message::AbortConn,
        Message::SuspComm { port: 1 },
        Message::SuspCommAck,
        Message::SendSm,
        Message::SrcAvailCancel,
        Message::SinkAvailCancel,
        Message::HelloAck(hello_ack),
        Message::RdmaWrCompl { len: 1 },
        Message::RdmaRdCompl { len: 1 },
        Message::SinkCancelAck,
    ];
    let others = [
        Message::Hello(hello),
        Message::DisConn,
        change,
        Message::ChRcvBuf { bytes: 37 },
        Message::ChRcvBufAck { bytes: 37 },
        Message::SinkAvail { advert, non_discards: 0 },
        Message::SrcAvail(advert),
        Message::Data,
    ];
    assert!(solicited.iter().all(|message| message.is_solicited(Flags::empty())));
    assert!(others.iter().all(|message| !message.is_solicited(Flags::empty())));
    assert!(Message::Data.is_solicited(Flags::OOB_PRES) && Message::Data.is_solicited(Flags::OOB_PEND));
}
