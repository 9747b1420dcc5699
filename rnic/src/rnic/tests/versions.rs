//! Version 0 of DDP and RDMAP, on connections with RNICs of the RDMA Consortium, and versions that do not match the
//! connection (RFC 5044 appendix C.1).

use xwarp_tcp::{
    framing,
    mpa::Revision,
    rdma_tcp::{self, ConnectionId, MessageNumber, SegmentError, SegmentHeader, SegmentKind, SendControl},
};

use super::*;
use crate::ddp::Versions;

fn connected(revision: Revision) -> Pair {
    let mut pair = Pair { a: End::new(|_, a| a), b: End::new(|_, a| a) };
    for end in [&mut pair.a, &mut pair.b] {
        end.establish_with(revision, 4, 4, None);
    }
    pair
}

fn rdmac() -> Pair {
    let pair = connected(Revision::Zero);
    assert_eq!(pair.a.rnic.query_qp(pair.a.qp).unwrap().versions, Versions::Rdmac);
    pair
}

/// Transfers everything in both directions and returns the first two bytes of every ULPDU.
fn run(pair: &mut Pair) -> Vec<[u8; 2]> {
    let mut heads = Vec::new();
    loop {
        pair.a.pull_all();
        pair.b.pull_all();
        let ulpdus = pair.a.wire.iter().chain(&pair.b.wire);
        let before = heads.len();
        heads.extend(ulpdus.map(|(ulpdu, _)| [ulpdu[0], ulpdu[1]]));
        if heads.len() == before {
            return heads;
        }
        deliver(&mut pair.a, &mut pair.b);
        deliver(&mut pair.b, &mut pair.a);
    }
}

fn deliver(from: &mut End, to: &mut End) {
    while let Some((ulpdu, end)) = from.wire.pop_front() {
        to.take(&ulpdu).unwrap();
        from.rnic.acked(CONN, end);
    }
}

#[test]
fn rfc5044_c1_with_an_rdmac_rnic_every_header_has_version_0() {
    let mut pair = rdmac();
    let (local, _) = pair.a.region(3000, 0, ALL);
    let (remote, memory) = pair.b.region(3000, 9, ALL);
    pair.b.receive(9, &[]);
    pair.a.post(1, write_to(remote, 0), &[whole(local, 3000)]);
    pair.a.post(2, read_from(remote, 0), &[whole(local, 3000)]);
    pair.a.post(3, SEND, &[]);
    let heads = run(&mut pair);
    assert_eq!(pair.a.outcomes(), [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)]);
    assert_eq!(pair.b.outcomes(), [(9, WcStatus::Success)]);
    assert_eq!(bytes(&memory)[255], 255);
    for opcode in [0, 1, 2, 3] {
        assert!(heads.iter().any(|head| head[1] == opcode), "opcode {opcode}: {heads:02x?}");
    }
    assert!(heads.iter().all(|head| (head[0] & 3, head[1] >> 6) == (0, 0)), "{heads:02x?}");
}

/// RFC 7306 extends version 1.
#[test]
fn rfc5044_c_no_atomics_and_no_immediate_data_are_sent_to_an_rdmac_rnic() {
    let mut pair = rdmac();
    let (local, _) = pair.a.region(8, 0, ALL);
    let remote = Remote { key: STag::new(1), offset: 0 };
    let piece = [whole(local, 8)];
    let extensions = [
        (Operation::Immediate { data: [0; 8] }, &[][..]),
        (Operation::WriteImmediate { remote, data: [0; 8] }, &piece),
        (Operation::FetchAdd { remote, add: 1, mask: 0 }, &piece),
        (Operation::CompareSwap { remote, compare: 0, compare_mask: 0, swap: 0, swap_mask: 0 }, &piece),
    ];
    for (operation, pieces) in extensions {
        let payload = Payload::Gather(pieces);
        let request = WorkRequest { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED };
        assert_eq!(pair.a.rnic.post_send(pair.a.qp, &request), Err(PostError::NoExtensions));
    }
    assert_eq!(run(&mut pair), [[0; 2]; 0]);
}

/// Each combination of DV and RV in a tagged and an untagged header, on connections of both versions: only the
/// connection's own pass, and the Terminate has the connection's versions and quotes the header as received.
#[test]
fn rfc5044_c1_versions_are_never_mixed() {
    for (revision, valid) in [(Revision::Zero, 0), (Revision::One, 1), (Revision::Two, 1)] {
        for (tagged, dv, rv) in (0..32).map(|n: u8| (n >> 4 != 0, n >> 2 & 3, n & 3)) {
            let mut pair = connected(revision);
            pair.b.receive(1, &[]);
            let mut ulpdu = vec![0; if tagged { 14 } else { 18 }];
            ulpdu[0] = 0x40 | dv | if tagged { 0x80 } else { 0 };
            ulpdu[1] = rv << 6 | if tagged { 0 } else { 3 };
            if !tagged {
                ulpdu[13] = 1;
            }
            let taken = pair.b.take(&ulpdu);
            assert_eq!(taken.is_ok(), (dv, rv) == (valid, valid), "{revision:?} {ulpdu:02x?}");
            if taken.is_ok() {
                continue;
            }
            let terminate = pair.b.pull().expect("a Terminate is due");
            assert_eq!(terminate[..2], [0x40 | valid, valid << 6 | 7]);
            let header = TerminateHeader::parse(&terminate[18..]).unwrap();
            let expected = match (dv == valid, tagged) {
                (true, _) => (0, 2, 5),
                (false, true) => (1, 1, 4),
                (false, false) => (1, 2, 6),
            };
            assert_eq!(header.numbers(), expected, "{revision:?} {ulpdu:02x?}");
            assert_eq!(header.ddp_header.unwrap().as_bytes(), ulpdu);
            // The other end processes the Terminate.
            pair.a.take(&terminate).unwrap();
            assert_eq!(pair.a.state(), QpState::Error);
        }
    }
}

/// RDMAP version 0 has no opcodes above that of Terminate.
#[test]
fn rfc5044_c_an_rdmac_rnic_may_send_no_extension() {
    for opcode in 8..16 {
        let mut pair = rdmac();
        let mut ulpdu = vec![0; 26];
        (ulpdu[0], ulpdu[1], ulpdu[13]) = (0x40, opcode, 1);
        pair.b.receive(1, &[]);
        pair.b.take(&ulpdu).unwrap_err();
        let terminate = TerminateHeader::parse(&pair.b.pull().unwrap()[18..]).unwrap();
        assert_eq!(terminate.numbers(), (0, 2, 6), "opcode {opcode}");
    }
}

/// The request that a Terminate of version 0 quotes is identified.
#[test]
fn rfc5040_s7_1_a_terminate_of_an_rdmac_rnic_blames_the_request_that_it_quotes() {
    let mut pair = rdmac();
    let (local, _) = pair.a.region(8, 0, ALL);
    pair.a.post(1, SEND, &[]);
    pair.a.post(2, write_to(STag::new(0x0bad_0bad), 0), &[whole(local, 8)]);
    pair.b.receive(1, &[]);
    pair.run();
    let outcomes = pair.a.outcomes();
    assert_eq!(outcomes.last(), Some(&(2, WcStatus::RemoteAccess)), "{outcomes:?}");
}

/// A queue pair that fails while its connection is established sends a Terminate with the versions of the connection.
#[test]
fn rfc5044_c1_the_terminate_of_a_failed_start_up_has_the_versions_of_the_connection() {
    for (revision, version) in [(Revision::Zero, 0), (Revision::One, 1)] {
        let mut end = End::new(|_, a| a);
        end.rnic.shared.overflowed.push(end.cq);
        end.rnic.end_overflowed();
        end.establish_with(revision, 4, 4, None);
        let terminate = end.pull().expect("a Terminate is due");
        assert_eq!(terminate[..2], [0x40 | version, version << 6 | 7]);
    }
}

/// With RDMA/TCP it is a segment of the connection, also when the initiator cannot agree with the answer.
#[test]
fn rdma_tcp_a5_the_terminate_of_a_failed_start_up_is_a_segment_of_the_connection() {
    let connection = ConnectionId(0x0123_4567_89ab_cdef);
    let (next_sent, next_received) = (MessageNumber(7), MessageNumber(9));
    let (ird, ord, peer_ird, peer_ord) = (1, 1, 1, 1);
    let agreed = rdma_tcp::Agreed { ird, ord, peer_ird, peer_ord, connection, next_sent, next_received };
    let agreed = framing::Agreed::RdmaTcp(agreed);
    let mut disagrees = End::new(|_, a| a);
    disagrees.rnic.event(CONN, Event::Disagreed(agreed));
    disagrees.rnic.event(CONN, Event::StreamError(SegmentError::InsufficientIrd.into()));
    let mut overflowed = End::new(|_, a| a);
    overflowed.rnic.shared.overflowed.push(overflowed.cq);
    overflowed.rnic.end_overflowed();
    let established = Event::Established { path: path(), agreed, private_data: Vec::new() };
    overflowed.rnic.event(CONN, established);
    for (mut end, code) in [(disagrees, 0x2006), (overflowed, 0x2005)] {
        let segment = end.pull().expect("a Terminate is due");
        assert_eq!((segment[0], &segment[4..12]), (1, &connection.0.to_be_bytes()[..]));
        let header = SegmentHeader::parse(&segment, segment.len()).unwrap();
        let control = SendControl::Terminate { code };
        assert_eq!((header.number, header.kind), (next_sent, SegmentKind::Send { offset: 0, control }));
        assert_eq!(end.pull(), None);
        assert!(end.finished);
    }
}
