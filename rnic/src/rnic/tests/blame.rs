//! The request that a peer's Terminate blames (RFC 5040 section 7.1).

use super::*;
use crate::{ddp::DdpError, rdmap::RdmapError};

const FLUSHED: WcStatus = WcStatus::Flushed;

/// `pair.b` receives what `pair.a` posted and sends a Terminate, which `pair.a` receives.
fn exchange(pair: &mut Pair) -> Vec<(u64, WcStatus)> {
    pair.a.pull_all();
    while let Some((ulpdu, _)) = pair.a.wire.pop_front() {
        let _ = pair.b.take(&ulpdu);
    }
    Pair::carry(&mut pair.b, &mut pair.a);
    assert_eq!(pair.a.state(), QpState::Error);
    pair.a.outcomes()
}

#[test]
fn rfc5040_s7_1_a_terminate_fails_only_the_send_that_it_quotes() {
    for too_long in [0, 2] {
        let mut pair = Pair::new();
        let (source, _) = pair.a.region(5000, 0, ALL);
        let (sink, _) = pair.b.region(5000, 0, ALL);
        for wr_id in 0..3 {
            pair.b.receive(wr_id, &[whole(sink, if wr_id == too_long { 10 } else { 5000 })]);
        }
        let write = Operation::WriteImmediate { remote: Remote { key: sink, offset: 0 }, data: [1; 8] };
        pair.a.post(10, write_to(sink, 0), &[whole(source, 10)]);
        pair.a.post(0, SEND, &[whole(source, 100)]);
        pair.a.post(1, write, &[whole(source, 20)]);
        pair.a.post(2, SEND, &[whole(source, 3000)]);
        pair.a.post(3, SEND, &[whole(source, 3000)]);
        let status = |wr_id| (wr_id, if wr_id == too_long { WcStatus::RemoteOperation } else { FLUSHED });
        assert_eq!(exchange(&mut pair), [(10, FLUSHED), status(0), status(1), status(2), status(3)]);
    }
}

#[test]
fn rfc5040_s7_1_a_partly_sent_send_and_a_refused_invalidation_are_identified() {
    let mut pair = Pair::new();
    let (source, _) = pair.a.region(5000, 0, ALL);
    pair.b.rnic.qps.get_mut(pair.b.qp).unwrap().attributes.options.no_receive = NoReceive::Terminate;
    pair.a.post(1, SEND, &[whole(source, 5000)]);
    let first = pair.a.pull().unwrap();
    assert_eq!(pair.b.take(&first), Err(Refusal::Stop));
    Pair::carry(&mut pair.b, &mut pair.a);
    assert_eq!(pair.a.outcomes(), [(1, WcStatus::RemoteOperation)]);

    let mut pair = Pair::new();
    pair.b.receive(1, &[]);
    pair.b.receive(2, &[]);
    pair.a.post(1, SEND, &[]);
    pair.a.post(2, Operation::Send { invalidate: Some(STag::new(99)) }, &[]);
    assert_eq!(exchange(&mut pair), [(1, FLUSHED), (2, WcStatus::RemoteAccess)]);
}

#[test]
fn rfc5040_s7_1_a_terminate_fails_only_the_write_that_it_quotes() {
    let mut pair = Pair::new();
    let (source, _) = pair.a.region(5000, 0, ALL);
    let (sink, _) = pair.b.region(4000, 0, ALL);
    pair.a.post(1, write_to(sink, 0), &[whole(source, 100)]);
    pair.a.post(2, write_to(sink, 1000), &[whole(source, 4000)]);
    pair.a.post(3, write_to(sink, 0), &[whole(source, 10)]);
    assert_eq!(exchange(&mut pair), [(1, FLUSHED), (2, WcStatus::RemoteAccess), (3, FLUSHED)]);
}

#[test]
fn rfc7306_s8_2_a_terminate_fails_only_the_atomic_that_it_quotes() {
    let mut pair = Pair::new();
    let (local, _) = pair.a.region(64, 0, ALL);
    let (words, _) = pair.b.region(64, 0, ALL);
    let add = |offset| Operation::FetchAdd { remote: Remote { key: words, offset }, add: 1, mask: 0 };
    pair.a.post(1, read_from(words, 0), &[whole(local, 8)]);
    pair.a.post(2, add(8), &[whole(local, 8)]);
    pair.a.post(3, add(64), &[whole(local, 8)]);
    pair.a.post(4, SEND, &[]);
    let outcomes = exchange(&mut pair);
    assert_eq!(outcomes, [(1, FLUSHED), (2, FLUSHED), (3, WcStatus::RemoteAccess), (4, FLUSHED)]);
}

#[test]
fn a_terminate_that_quotes_an_unsent_segment_fails_no_request() {
    use crate::ddp::{Header, Msn, RawHeader, Tagged, Untagged};
    let untagged = |queue, msn| {
        Header::Untagged(Untagged { last: true, control: 0x43, word: 0, queue, msn: Msn::new(msn), mo: 0 })
    };
    let tagged =
        |control, stag, to| Header::Tagged(Tagged { last: true, control, stag: STag::new(stag), to });
    let quotes = [
        untagged(0, 0),
        untagged(0, 2),
        untagged(0, u32::MAX),
        untagged(0, 1 << 31),
        untagged(1, 1),
        untagged(1, 2),
        untagged(1, 0),
        untagged(2, 1),
        untagged(3, 1),
        untagged(9, 1),
        tagged(0x40, 5, 4),
        tagged(0x40, 5, u64::MAX),
        tagged(0x42, 5, 0),
        tagged(0x4e, 5, 0),
    ];
    for header in quotes {
        let mut pair = Pair::new();
        pair.a.post_with(1, write_to(STag::new(5), 0), Payload::Inline(b"four"), SendFlags::SIGNALED);
        pair.a.post(2, SEND, &[]);
        pair.a.pull_all();
        let terminate = TerminateHeader {
            layer: 1,
            error_type: 2,
            code: 3,
            segment_length: Some(18),
            ddp_header: Some(RawHeader::of(&header, header.flags())),
            rdma_header: None,
        };
        let (qp, shared) = pair.a.rnic.qp_of(CONN).unwrap();
        qp.terminated(terminate, shared);
        assert_eq!(pair.a.outcomes(), [(1, FLUSHED), (2, FLUSHED)], "{header:?}");
    }
}

#[test]
fn events_and_terminates_have_readable_messages() {
    let header = TerminateHeader {
        layer: 0,
        error_type: 1,
        code: 1,
        segment_length: None,
        ddp_header: None,
        rdma_header: None,
    };
    let qp = <QpId as table::Id>::from_raw(7);
    let remote = AsyncEvent::QpFatal { qp, fault: QpFault::Remote(header) };
    assert_eq!(
        remote.to_string(),
        "queue pair 7 failed: terminated by the peer, layer 0 type 1 code 0x01: RDMAP: base or bounds violation \
         (if the peer is Linux's siw: layer 1 type 0)"
    );
    let local = AsyncEvent::QpFatal { qp, fault: QpFault::Local(DdpError::InvalidMo.into()) };
    assert_eq!(local.to_string(), "queue pair 7 failed: stream error, DDP: untagged buffer: invalid MO");
    for error in RdmapError::ALL {
        let error = crate::rdmap::StreamError::from(error);
        let (layer, error_type, code) = error.numbers();
        assert_eq!(crate::rdmap::StreamError::from_numbers(layer, error_type, code), Some(error));
    }
}
