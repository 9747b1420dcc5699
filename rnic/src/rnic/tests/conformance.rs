//! Errors and their Terminates: RFC 5040 sections 4.8, 5.4 and 7, RFC 5041 section 7, RFC 5042 section 6, RFC 7306
//! section 8; and captured bytes of another implementation.

use super::*;
use crate::{
    ddp::{DdpError, Header, Msn, Tagged, Untagged, Versions},
    rdmap::{AtomicOperation, AtomicRequest, LAYER_LLP, RdmapError, ReadRequest, StreamError},
};

fn untagged(control: u8, queue: u32, msn: u32, mo: u32, last: bool) -> Untagged {
    Untagged { last, control, word: 0, queue, msn: Msn::new(msn), mo }
}

fn segment(header: Untagged, payload: &[u8]) -> Vec<u8> {
    [&header.to_bytes(Versions::Ietf)[..], payload].concat()
}

fn tagged(control: u8, stag: STag, to: u64, payload: &[u8]) -> Vec<u8> {
    [&Tagged { last: true, control, stag, to }.to_bytes(Versions::Ietf)[..], payload].concat()
}

fn read_request(msn: u32, request: &ReadRequest) -> Vec<u8> {
    segment(untagged(0x41, 1, msn, 0, true), &request.to_bytes())
}

/// Delivers an invalid ULPDU to `b`, and checks every field of its Terminate.
fn expect(pair: &mut Pair, ulpdu: &[u8], error: StreamError, request: Option<ReadRequest>) {
    assert_eq!(pair.b.take(ulpdu), Err(Refusal::Stop));
    assert_eq!(pair.b.state(), QpState::Terminate);
    let terminate = pair.b.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), error.numbers(), "{error}");
    assert_eq!(terminate.segment_length, Some(ulpdu.len() as u16));
    let quoted = terminate.ddp_header.expect("the DDP header is quoted");
    assert_eq!(quoted.as_bytes(), &ulpdu[..quoted.as_bytes().len()]);
    assert_eq!(terminate.rdma_header, request);
    let fault = AsyncEvent::QpFatal { qp: pair.b.qp, fault: QpFault::Local(error) };
    assert_eq!(pair.b.async_events(), [fault]);
    assert_eq!(pair.b.cm_events().pop(), Some(CmEvent::Disconnected { qp: pair.b.qp }));
}

#[test]
fn rfc5041_s7_2_tagged_errors() {
    type Make = fn(STag, STag, STag) -> Vec<u8>;
    let cases: [(Make, DdpError); 7] = [
        (|_, _, _| tagged(0x40, STag::new(0x0bad_0bad), 0, &[1]), DdpError::InvalidStag),
        (|open, _, _| tagged(0x40, STag::new(open.value() ^ 3), 0, &[1]), DdpError::InvalidStag),
        (|_, shut, _| tagged(0x40, shut, 0, &[1]), DdpError::InvalidStag),
        (|_, _, foreign| tagged(0x40, foreign, 0, &[1]), DdpError::StagNotAssociated),
        (|open, _, _| tagged(0x40, open, 10, &[1; 7]), DdpError::TaggedBounds),
        (|open, _, _| tagged(0x40, open, u64::MAX, &[1; 2]), DdpError::ToWrap),
        (
            |open, _, _| {
                let mut bytes = tagged(0x40, open, 0, &[1]);
                bytes[0] ^= 2;
                bytes
            },
            DdpError::TaggedVersion,
        ),
    ];
    for (make, error) in cases {
        let mut pair = Pair::new();
        let (open, memory) = pair.b.region(16, 0, ALL);
        let (shut, _) = pair.b.region(16, 0, Access::LOCAL_WRITE | Access::REMOTE_READ);
        let own = std::mem::replace(&mut pair.b.pd, pair.b.rnic.registry().alloc_pd().unwrap());
        let (foreign, _) = pair.b.region(16, 0, ALL);
        pair.b.pd = own;
        let before = bytes(&memory);
        expect(&mut pair, &make(open, shut, foreign), error.into(), None);
        assert_eq!(bytes(&memory), before, "{error}: nothing is placed");
    }
}

#[test]
fn rfc5041_s7_2_untagged_errors() {
    let long = [0u8; 20];
    let mut version = segment(untagged(0x43, 0, 1, 0, true), &[]);
    version[0] ^= 2;
    let cases = [
        (segment(untagged(0x43, 4, 1, 0, true), &[]), DdpError::InvalidQueue),
        (segment(untagged(0x43, 0, 2, 0, true), &[]), DdpError::MsnRange),
        (segment(untagged(0x43, 0, 0, 0, true), &[]), DdpError::MsnRange),
        (segment(untagged(0x43, 0, 1, 17, true), &[0]), DdpError::InvalidMo),
        (segment(untagged(0x43, 0, 1, 4, true), &[0]), DdpError::InvalidMo),
        (segment(untagged(0x43, 0, 1, 0, false), &long), DdpError::TooLong),
        (segment(untagged(0x43, 0, 1, 16, true), &[0]), DdpError::TooLong),
        (version, DdpError::UntaggedVersion),
        (segment(untagged(0x41, 1, 2, 0, true), &[0; 28]), DdpError::MsnRange),
        (segment(untagged(0x41, 1, 1, 1, true), &[0; 28]), DdpError::InvalidMo),
        (segment(untagged(0x41, 1, 1, 0, true), &[0; 29]), DdpError::TooLong),
    ];
    for (ulpdu, error) in cases {
        let mut pair = Pair::new();
        let (key, _) = pair.b.region(16, 0, ALL);
        pair.b.receive(1, &[whole(key, 16)]);
        expect(&mut pair, &ulpdu, error.into(), None);
        assert_eq!(pair.b.poll().len(), 1, "{error}: the receive completes once");
    }
}

#[test]
fn rfc5041_s7_1_without_a_receive_the_strict_setting_terminates() {
    let options = QueuePairOptions { no_receive: NoReceive::Terminate, ..QueuePairOptions::default() };
    let mut pair = Pair::with(|_, a| QpAttributes { options, ..a });
    expect(&mut pair, &segment(untagged(0x43, 0, 1, 0, true), &[1]), DdpError::NoBuffer.into(), None);
}

#[test]
fn rfc5040_s7_2_opcodes_and_versions() {
    let cases = [
        (segment(untagged(0x4c, 0, 1, 0, true), &[]), RdmapError::UnexpectedOpcode),
        (segment(untagged(0x83, 0, 1, 0, true), &[]), RdmapError::Version),
        // Opcodes on a wrong queue or with a wrong buffer model (figure 4).
        (segment(untagged(0x40, 0, 1, 0, true), &[]), RdmapError::UnexpectedOpcode),
        (segment(untagged(0x43, 1, 1, 0, true), &[]), RdmapError::UnexpectedOpcode),
        (segment(untagged(0x41, 0, 1, 0, true), &[0; 28]), RdmapError::UnexpectedOpcode),
        (tagged(0x43, STag::new(1), 0, &[]), RdmapError::UnexpectedOpcode),
        (tagged(0xc0, STag::new(1), 0, &[]), RdmapError::Version),
        // A response without a request.
        (tagged(0x42, STag::new(1), 0, &[1]), RdmapError::UnexpectedOpcode),
        (segment(untagged(0x4b, 3, 1, 0, true), &[0; 12]), RdmapError::UnexpectedOpcode),
        // Too short for their type.
        (segment(untagged(0x41, 1, 1, 0, true), &[0; 27]), RdmapError::StreamCatastrophic),
        (segment(untagged(0x48, 0, 1, 0, true), &[0; 7]), RdmapError::StreamCatastrophic),
    ];
    for (ulpdu, error) in cases {
        let mut pair = Pair::new();
        pair.b.receive(1, &[]);
        expect(&mut pair, &ulpdu, error.into(), None);
    }
}

#[test]
fn rfc5040_s7_2_read_request_errors_quote_the_request() {
    for (what, error) in [
        (0, RdmapError::InvalidStag),
        (1, RdmapError::StagNotAssociated),
        (2, RdmapError::AccessRights),
        (3, RdmapError::Bounds),
        (4, RdmapError::ToWrap),
    ] {
        let mut pair = Pair::new();
        let (open, _) = pair.b.region(16, 0, Access::REMOTE_READ);
        let (shut, _) = pair.b.region(16, 0, Access::REMOTE_WRITE | Access::LOCAL_WRITE);
        let other = pair.b.rnic.create_qp(QpAttributes::new(pair.b.pd, pair.b.cq, pair.b.cq)).unwrap();
        let memory = Memory::anonymous(16, Pages::Normal).unwrap();
        let bound = Registration { pd: pair.b.pd, memory, access: ALL, base: 0, stream: Some(other) };
        let bound = pair.b.rnic.registry().register(bound).unwrap();
        let (source_stag, source_to) =
            [(STag::new(77), 0), (bound, 0), (shut, 0), (open, 7), (open, u64::MAX - 3)][what];
        let request = ReadRequest { sink_stag: STag::new(5), sink_to: 6, len: 10, source_stag, source_to };
        expect(&mut pair, &read_request(1, &request), error.into(), Some(request));
    }
}

#[test]
fn rfc5040_s4_8_a_read_that_fails_halfway_is_quoted_with_its_remaining_bytes() {
    let mut pair = Pair::new();
    let (source, _) = pair.b.region(5000, 0, Access::REMOTE_READ);
    let request =
        ReadRequest { sink_stag: STag::new(5), sink_to: 100, len: 5000, source_stag: source, source_to: 0 };
    pair.b.take(&read_request(1, &request)).unwrap();
    let sent = (pair.b.pull().unwrap().len() - 14) as u32;
    pair.b.rnic.registry().deregister(source).unwrap();
    let terminate = pair.b.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (0, 1, 0));
    assert_eq!(terminate.rdma_header, Some(request.advanced(sent)));
    assert_eq!(terminate.rdma_header.unwrap().sink_to, 100 + u64::from(sent));
}

#[test]
fn rfc5040_s7_1_a_local_error_quotes_nothing_and_replaces_the_request() {
    let mut pair = Pair::new();
    pair.a.post(1, SEND, &[whole(STag::new(9), 1)]);
    let terminate = pair.a.terminate();
    assert_eq!((terminate.layer, terminate.error_type), (0, 0));
    assert_eq!((terminate.segment_length, terminate.ddp_header, terminate.rdma_header), (None, None, None));
}

#[test]
fn rfc5040_s7_1_only_the_first_error_is_reported() {
    let mut pair = Pair::new();
    assert_eq!(pair.b.take(&tagged(0x40, STag::new(1), 0, &[1])), Err(Refusal::Stop));
    assert_eq!(pair.b.take(&tagged(0x4f, STag::new(1), 0, &[1])), Err(Refusal::Stop));
    pair.b.rnic.event(CONN, Event::StreamError(xwarp_tcp::mpa::MpaError::Crc.into()));
    assert_eq!(pair.b.terminate().layer, 1);
    assert_eq!(pair.b.async_events().len(), 1);
}

#[test]
fn rfc5040_s4_8_errors_of_mpa_have_its_layer_and_no_header() {
    let mut pair = Pair::new();
    pair.b.rnic.event(CONN, Event::StreamError(xwarp_tcp::mpa::MpaError::Crc.into()));
    let terminate = pair.b.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (LAYER_LLP, 0, 2));
    assert_eq!((terminate.segment_length, terminate.ddp_header), (None, None));
}

#[test]
fn rfc5040_s5_4_after_a_terminate_nothing_more_is_sent_and_all_work_is_flushed() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(8, 0, ALL);
    pair.a.receive(5, &[]);
    pair.a.post_with(1, write_to(remote, 0), Payload::Inline(b"sent"), SendFlags::SIGNALED);
    pair.a.pull_all();
    pair.a.post_with(2, write_to(remote, 0), Payload::Inline(b"kept"), SendFlags::SIGNALED);
    let terminate = segment(untagged(0x47, 2, 1, 0, true), &[0x10, 0x02, 0, 0]);
    pair.a.take(&terminate).unwrap();
    assert_eq!(pair.a.outcomes(), [(1, WcStatus::Flushed), (2, WcStatus::Flushed), (5, WcStatus::Flushed)]);
    assert_eq!(pair.a.pull(), None);
    assert!(pair.a.finished);
    assert_eq!(pair.a.state(), QpState::Error);
    let events = pair.a.async_events();
    let [AsyncEvent::QpFatal { fault: QpFault::Remote(header), .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!((header.layer, header.error_type, header.code), (1, 0, 2));
}

#[test]
fn rfc5040_s7_a_read_quoted_by_a_terminate_fails_with_a_remote_error() {
    let mut pair = Pair::new();
    let (local, _) = pair.a.region(100, 0, ALL);
    let (shut, _) = pair.b.region(100, 0, Access::LOCAL_WRITE);
    let (open, _) = pair.b.region(100, 0, ALL);
    pair.a.post(1, read_from(open, 0), &[whole(local, 100)]);
    pair.a.post(2, read_from(shut, 0), &[Sge { key: local, offset: 50, len: 10 }]);
    pair.a.post(3, write_to(open, 0), &[whole(local, 10)]);
    pair.a.pull_all();
    let requests: Vec<_> = pair.a.wire.drain(..).map(|(ulpdu, _)| ulpdu).collect();
    for request in &requests[..1] {
        pair.b.take(request).unwrap();
    }
    // The first response is lost with the stream.
    assert_eq!(pair.b.take(&requests[1]), Err(Refusal::Stop));
    Pair::carry(&mut pair.b, &mut pair.a);
    let want = [(1, WcStatus::Flushed), (2, WcStatus::RemoteAccess), (3, WcStatus::Flushed)];
    assert_eq!(pair.a.outcomes(), want);
}

#[test]
fn rfc5040_s6_1_more_requests_than_ird_find_no_buffer() {
    let mut pair = Pair::new();
    let (source, _) = pair.b.region(16, 0, ALL);
    let request =
        ReadRequest { sink_stag: STag::new(5), sink_to: 0, len: 8, source_stag: source, source_to: 0 };
    for msn in 1..=4 {
        pair.b.take(&read_request(msn, &request)).unwrap();
    }
    assert_eq!(pair.b.take(&read_request(5, &request)), Err(Refusal::Stop));
    assert_eq!(pair.b.rnic.limits().max_ird, 128);
    let terminate = pair.b.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (1, 2, 2));
}

/// Rules 12 and 17; RFC 7306 section 5.4 for atomics.
#[test]
fn rfc5040_s5_5_r12_an_early_request_is_not_executed_before_it_is_in_order() {
    let mut pair = Pair::new();
    let (region, memory) = pair.b.region(16, 0, ALL);
    memory.store_u64(8, 0).unwrap();
    let request =
        ReadRequest { sink_stag: STag::new(5), sink_to: 0, len: 8, source_stag: region, source_to: 0 };
    let add = |msn, id, add| {
        let operation = AtomicOperation::FetchAdd { add, mask: 0 };
        let request = AtomicRequest { operation, id, stag: region, to: 8 };
        segment(untagged(0x4a, 1, msn, 0, true), &request.to_bytes())
    };
    let ulpdus = [read_request(2, &request), add(3, 7, 1)];
    let early = ulpdus.map(|ulpdu| pair.b.place(&ulpdu, Arrival::Early).unwrap());
    assert_eq!(pair.b.pull(), None, "no response is sent");
    assert_eq!(memory.load_u64(8), Ok(0), "nothing is executed");
    // Atomics see changes that come before their execution.
    pair.b.take(&add(1, 6, 41)).unwrap();
    memory.write(0, b"at last!").unwrap();
    for placed in early {
        pair.b.rnic.deliver(CONN, placed).unwrap();
    }
    pair.b.pull_all();
    let sent: Vec<_> = pair.b.wire.drain(..).map(|(ulpdu, _)| ulpdu).collect();
    let opcodes: Vec<u8> = sent.iter().map(|ulpdu| ulpdu[1] & 15).collect();
    assert_eq!(opcodes, [11, 2, 11], "Atomic Response, Read Response, Atomic Response");
    assert_eq!(sent[1][14..], *b"at last!");
    assert_eq!(sent[2][22..], 41u64.to_be_bytes());
    assert_eq!(memory.load_u64(8), Ok(42));
}

#[test]
fn rfc5040_s5_3_a_peer_can_invalidate_only_its_own_tags() {
    // An unused tag, and the tags of a region that two streams share, of one that is already invalidated, of one that
    // was never open to peers, and of another domain.
    for (case, error) in [
        (0, RdmapError::InvalidStag),
        (1, RdmapError::CannotInvalidate),
        (2, RdmapError::InvalidStag),
        (3, RdmapError::CannotInvalidate),
        (4, RdmapError::CannotInvalidate),
    ] {
        let mut pair = Pair::new();
        let (key, _) = pair.b.region(8, 0, if case == 3 { Access::LOCAL_WRITE } else { ALL });
        let mut stag = key;
        match case {
            0 => stag = STag::new(1),
            1 => drop(pair.b.rnic.create_qp(QpAttributes::new(pair.b.pd, pair.b.cq, pair.b.cq)).unwrap()),
            2 => pair.b.rnic.shared.keys.invalidate_locally(pair.b.user(), key).unwrap(),
            3 => {}
            _ => {
                let own = std::mem::replace(&mut pair.b.pd, pair.b.rnic.registry().alloc_pd().unwrap());
                stag = pair.b.region(8, 0, ALL).0;
                pair.b.pd = own;
            }
        }
        pair.b.receive(1, &[]);
        let header = Untagged { word: stag.value(), ..untagged(0x44, 0, 1, 0, true) };
        expect(&mut pair, &segment(header, &[]), error.into(), None);
        assert_eq!(pair.b.outcomes(), [(1, WcStatus::Flushed)]);
    }
}

#[test]
fn rfc5042_s6_2_2_deregistering_a_region_ends_access_at_once() {
    let mut pair = Pair::new();
    let (key, memory) = pair.b.region(3000, 0, ALL);
    let (source, _) = pair.a.region(3000, 9, ALL);
    pair.a.post(1, write_to(key, 0), &[whole(source, 3000)]);
    pair.a.pull_all();
    let ulpdus: Vec<_> = pair.a.wire.drain(..).map(|(ulpdu, _)| ulpdu).collect();
    pair.b.take(&ulpdus[0]).unwrap();
    pair.b.rnic.registry().deregister(key).unwrap();
    let before = bytes(&memory);
    assert_eq!(pair.b.take(&ulpdus[1]), Err(Refusal::Stop));
    assert_eq!(bytes(&memory), before);
    assert_eq!(pair.b.rnic.registry().deregister(key), Err(ResourceError::UnknownKey(key)));
}

#[test]
fn rfc5042_s6_1_1_keys_are_sparse_hard_to_guess_and_reused_late() {
    let mut end = End::new(|_, a| a);
    let keys: Vec<STag> = (0..1000).map(|_| end.region(1, 0, ALL).0).collect();
    let mut indices: Vec<u32> = keys.iter().map(|k| k.index()).collect();
    let steps: std::collections::BTreeSet<i64> =
        indices.windows(2).map(|w| i64::from(w[1]) - i64::from(w[0])).collect();
    assert!(steps.len() > 990, "no step from one key to the next repeats");
    indices.sort_unstable();
    indices.dedup();
    assert_eq!(indices.len(), 1000);
    assert!(indices[500].abs_diff(1 << 23) < 1 << 21, "spread over all of 24 bits");
    let mut gone = std::collections::BTreeSet::new();
    for _ in 0..3000 {
        let (key, _) = end.region(1, 0, ALL);
        end.rnic.registry().deregister(key).unwrap();
        assert!(gone.insert(key.index()), "a freed index is not reused at once");
    }
    // When the index is reused, its key has changed.
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..9000 {
        let (key, _) = end.region(1, 0, ALL);
        if let Some(before) = seen.insert(key.index(), key.key()) {
            assert_eq!(key.key(), u8::wrapping_add(before, 1));
        }
        end.rnic.registry().deregister(key).unwrap();
    }
}

#[test]
fn rfc7306_s8_2_atomic_requests_are_checked() {
    let operation = AtomicOperation::FetchAdd { add: 1, mask: 0 };
    for (case, error) in [
        (0, RdmapError::StreamCatastrophic),
        (1, RdmapError::Bounds),
        (2, RdmapError::AccessRights),
        (3, RdmapError::UnexpectedOpcode),
    ] {
        let mut pair = Pair::new();
        let (word, memory) = pair.b.region(16, 0, Access::REMOTE_ATOMIC);
        let (shut, _) = pair.b.region(16, 0, Access::REMOTE_WRITE);
        let (stag, to) = [(word, 4), (word, 16), (shut, 0), (word, 0)][case];
        let mut body = AtomicRequest { operation, id: 1, stag, to }.to_bytes();
        body[3] = if case == 3 { 5 } else { 0 };
        let before = bytes(&memory);
        let ulpdu = segment(untagged(0x4a, 1, 1, 0, true), &body);
        assert_eq!(pair.b.take(&ulpdu), Err(Refusal::Stop));
        let terminate = pair.b.terminate();
        assert_eq!(
            (terminate.layer, terminate.error_type, terminate.code),
            StreamError::from(error).numbers()
        );
        assert_eq!(bytes(&memory), before);
    }
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

// From captures of Linux Soft-iWARP 6.1: rping in peer-to-peer mode, and a perftest session.
const SIW_SEND: &str = "41430000000000000000000000010000000000005645bee3e6c0469e5d0000000063";
const SIW_READ_REQUEST: &str =
    "414100000000000000010000000100000000e8be7100000055606483001000000063469e5d0000005645bee3e6c0";
const SIW_EMPTY_RESPONSE: &str = "c142000000000000000000000000";
const SIW_WRITE: &str = "c1409aba8a00000055d903909e8402000000";
const SIW_RTR_WRITE: &str = "c140000000010000000000000000";
const SIW_RTR_READ: &str =
    "41410000000000000001000000010000000000000000000000000000000000000000000000010000000000000000";
const SIW_SEGMENT: &str = "01430000000000000000000000010000059000";

#[test]
fn messages_of_soft_iwarp_are_parsed_correctly() {
    let read = |text| Header::parse(&hex(text), Versions::Ietf).unwrap();
    assert_eq!(read(SIW_SEND), Header::Untagged(untagged(0x43, 0, 1, 0, true)));
    assert_eq!(read(SIW_READ_REQUEST), Header::Untagged(untagged(0x41, 1, 1, 0, true)));
    assert_eq!(read(SIW_SEGMENT), Header::Untagged(untagged(0x43, 0, 1, 1424, false)));
    let write = Tagged { last: true, control: 0x40, stag: STag::new(0x9aba_8a00), to: 0x55d9_0390_9e84 };
    assert_eq!(read(SIW_WRITE), Header::Tagged(write));
    let request = ReadRequest::parse(&hex(SIW_READ_REQUEST)[18..]).unwrap();
    assert_eq!((request.len, request.source_to), (0x63, 0x5645_bee3_e6c0));
    assert_eq!((request.sink_stag, request.source_stag), (STag::new(0xe8be_7100), STag::new(0x469e_5d00)));
}

#[test]
fn our_messages_equal_those_of_soft_iwarp_byte_for_byte() {
    let mut pair = Pair::new();
    let payload = &hex(SIW_SEND)[18..];
    pair.a.post_with(1, SEND, Payload::Inline(payload), SendFlags::empty());
    let remote = Remote { key: STag::new(0x9aba_8a00), offset: 0x55d9_0390_9e84 };
    pair.a.post_with(2, Operation::Write { remote }, Payload::Inline(&[2, 0, 0, 0]), SendFlags::empty());
    assert_eq!(pair.a.pull().unwrap(), hex(SIW_SEND));
    assert_eq!(pair.a.pull().unwrap(), hex(SIW_WRITE));
    let request = ReadRequest {
        sink_stag: STag::new(0xe8be_7100),
        sink_to: 0x5560_6483_0010,
        len: 0x63,
        source_stag: STag::new(0x469e_5d00),
        source_to: 0x5645_bee3_e6c0,
    };
    assert_eq!(read_request(1, &request), hex(SIW_READ_REQUEST));
}

#[test]
fn ready_to_receive_messages_interoperate_with_soft_iwarp() {
    let mut pair = Pair { a: End::new(|_, a| a), b: End::new(|_, a| a) };
    pair.b.establish(1, 0, None);
    pair.b.take(&hex(SIW_RTR_WRITE)).unwrap();
    pair.b.take(&hex(SIW_RTR_READ)).unwrap();
    assert_eq!(pair.b.pull().unwrap().len(), 14);
    pair.a.establish(0, 1, Some(Rtr::Read));
    let ours = pair.a.pull().unwrap();
    assert_eq!((ours[..18].to_vec(), ours.len()), (hex(SIW_RTR_READ)[..18].to_vec(), 46));
    pair.a.take(&hex(SIW_EMPTY_RESPONSE)).unwrap();
    assert_eq!((pair.a.state(), pair.a.poll()), (QpState::Rts, vec![]));
}

#[test]
fn a_terminate_of_soft_iwarp_ends_the_stream_whatever_its_control_bits() {
    let mut pair = Pair::new();
    pair.a.take(&segment(untagged(0x47, 2, 1, 0, true), &[0x02, 0x02, 0, 0])).unwrap();
    assert_eq!(pair.a.state(), QpState::Error);
}
