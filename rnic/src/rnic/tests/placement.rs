//! Early and in-order placement, bounds, and withheld messages.

use proptest::prelude::*;

use super::*;
use crate::ddp::{Header, Msn, Tagged, Untagged, Versions};

/// A segment of a Send.
pub(super) fn send_segment(msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    let header = Untagged { last, control: 0x43, word: 0, queue: 0, msn: Msn::new(msn), mo };
    [&header.to_bytes(Versions::Ietf)[..], payload].concat()
}

fn write_segment(stag: STag, to: u64, last: bool, payload: &[u8]) -> Vec<u8> {
    [&Tagged { last, control: 0x40, stag, to }.to_bytes(Versions::Ietf)[..], payload].concat()
}

/// Receives `ulpdus` with the first `missing` delayed: the others are placed early, then all are delivered in order,
/// without placing the early ones again.
fn take_with_gap(end: &mut End, ulpdus: &[Vec<u8>], missing: usize) -> usize {
    let early: Vec<_> = ulpdus[missing..].iter().map(|u| end.place(u, Arrival::Early).ok()).collect();
    for ulpdu in &ulpdus[..missing] {
        end.take(ulpdu).unwrap();
    }
    for (ulpdu, placed) in ulpdus[missing..].iter().zip(&early) {
        match placed {
            Some(placed) => end.rnic.deliver(CONN, *placed).unwrap(),
            None => end.take(ulpdu).unwrap(),
        }
    }
    early.iter().flatten().count()
}

#[test]
fn rfc5041_s5_3_an_early_send_is_placed_in_the_receive_of_its_msn() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(30, 0, ALL);
    for i in 0..3u32 {
        pair.b.receive(u64::from(i), &[Sge { key: sink, offset: u64::from(i) * 10, len: 10 }]);
    }
    let ulpdus: Vec<_> = (1..=3).map(|msn| send_segment(msn, 0, true, &[msn as u8 * 11; 10])).collect();
    let third = pair.b.place(&ulpdus[2], Arrival::Early).unwrap();
    assert_eq!(bytes(&to)[20..], [33; 10], "placed before it is delivered");
    assert_eq!(pair.b.poll(), [], "and not completed before earlier messages");
    pair.b.take(&ulpdus[0]).unwrap();
    pair.b.take(&ulpdus[1]).unwrap();
    pair.b.rnic.deliver(CONN, third).unwrap();
    assert_eq!(bytes(&to), [[11; 10], [22; 10], [33; 10]].concat());
    let order: Vec<u64> = pair.b.poll().iter().map(|c| c.wr_id).collect();
    assert_eq!(order, [0, 1, 2]);
}

#[test]
fn early_segments_of_one_message_are_placed_around_the_missing_one() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(30, 0, ALL);
    pair.b.receive(1, &[whole(sink, 30)]);
    let ulpdus: Vec<_> = (0..3u32).map(|i| send_segment(1, i * 10, i == 2, &[i as u8 + 1; 10])).collect();
    assert_eq!(take_with_gap(&mut pair.b, &ulpdus, 1), 2);
    assert_eq!(bytes(&to), [[1; 10], [2; 10], [3; 10]].concat());
    assert_eq!(pair.b.poll()[0].byte_len, 30);
}

#[test]
fn a_shared_receive_is_bound_to_a_message_when_its_first_bytes_arrive() {
    let mut pair = Pair::with(|rnic, a| {
        let srq = rnic
            .registry()
            .create_srq(&SrqAttributes { pd: a.pd, max_wr: 8, max_sge: 1, limit: 0 })
            .unwrap()
            .id();
        QpAttributes { srq: Some(srq), ..a }
    });
    let srq = pair.b.rnic.query_qp(pair.b.qp).unwrap().attributes.srq.unwrap();
    let (sink, to) = pair.b.region(30, 0, ALL);
    for i in 0..3u32 {
        let scatter = [Sge { key: sink, offset: u64::from(i) * 10, len: 10 }];
        pair.b.rnic.post_srq_recv(srq, &RecvRequest { wr_id: u64::from(i), scatter: &scatter }).unwrap();
    }
    // Message 2 arrives first, in two segments: both use the oldest receive.
    let early = [send_segment(2, 5, true, &[2; 5]), send_segment(2, 0, false, &[1; 5])];
    let late = pair.b.place(&early[0], Arrival::Early).unwrap();
    let first = pair.b.place(&early[1], Arrival::Early).unwrap();
    assert_eq!(bytes(&to)[..10], [1, 1, 1, 1, 1, 2, 2, 2, 2, 2]);
    pair.b.take(&send_segment(1, 0, true, &[9; 10])).unwrap();
    pair.b.rnic.deliver(CONN, first).unwrap();
    pair.b.rnic.deliver(CONN, late).unwrap();
    assert_eq!(bytes(&to)[10..20], [9; 10]);
    let order: Vec<_> = pair.b.poll().iter().map(|c| (c.wr_id, c.byte_len)).collect();
    assert_eq!(order, [(1, 10), (0, 10)], "in the order of the messages");
    assert_eq!(pair.b.rnic.registry().srq(srq).unwrap().len(), 1);
}

#[test]
fn early_errors_change_nothing_and_are_final_only_in_order() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(16, 0, ALL);
    let before = bytes(&to);
    let wrong = [
        write_segment(sink, 10, true, &[1; 10]),
        write_segment(STag::new(7), 0, true, &[1; 10]),
        send_segment(0, 0, true, &[1; 4]),
        send_segment(5, 0, true, &[1; 4]),
        vec![0x41],
        vec![0x40; 30],
    ];
    for ulpdu in &wrong {
        assert!(pair.b.place(ulpdu, Arrival::Early).is_err());
    }
    assert_eq!((pair.b.state(), bytes(&to)), (QpState::Rts, before));
    assert_eq!(pair.b.pull(), None);
    assert_eq!(pair.b.take(&wrong[0]), Err(Refusal::Stop));
    assert_eq!(pair.b.state(), QpState::Terminate);
}

#[test]
fn read_responses_are_placed_early_only_in_the_requested_range() {
    let mut pair = Pair::new();
    let (local, to) = pair.a.region(100, 0, ALL);
    let (remote, _) = pair.b.region(100, 50, ALL);
    pair.a.post(1, read_from(remote, 0), &[Sge { key: local, offset: 10, len: 20 }]);
    pair.a.post(2, read_from(remote, 20), &[Sge { key: local, offset: 60, len: 30 }]);
    Pair::carry(&mut pair.a, &mut pair.b);
    pair.b.pull_all();
    let responses: Vec<_> = pair.b.wire.drain(..).map(|(ulpdu, _)| ulpdu).collect();
    // The region grants all rights, but a response outside of the requested range is rejected.
    let mut beside = responses[1].clone();
    beside[13] += 1;
    assert!(pair.a.place(&beside, Arrival::Early).is_err());
    let second = pair.a.place(&responses[1], Arrival::Early).unwrap();
    assert_eq!(bytes(&to)[60..90], bytes_from(70, 30));
    assert_eq!(pair.a.outcomes(), []);
    pair.a.take(&responses[0]).unwrap();
    pair.a.rnic.deliver(CONN, second).unwrap();
    assert_eq!(pair.a.outcomes(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

fn bytes_from(first: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| first.wrapping_add(i as u8)).collect()
}

#[test]
fn a_message_without_a_receive_waits_until_one_is_posted() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(10, 0, ALL);
    let ulpdu = send_segment(1, 0, true, &[5; 10]);
    assert_eq!(pair.b.take(&ulpdu), Err(Refusal::Withhold));
    assert_eq!(pair.b.rnic.next_resume(), None);
    pair.b.receive(1, &[whole(sink, 10)]);
    assert_eq!(pair.b.rnic.next_resume(), Some(CONN));
    pair.b.take(&ulpdu).unwrap();
    assert_eq!(bytes(&to), [5; 10]);
    pair.b.receive(2, &[]);
    assert_eq!(pair.b.rnic.next_resume(), None, "only a waiting stream is resumed");
}

#[test]
fn a_shared_queue_resumes_one_waiting_stream_for_each_receive() {
    let mut pair = Pair::with(|rnic, a| {
        let srq = rnic
            .registry()
            .create_srq(&SrqAttributes { pd: a.pd, max_wr: 8, max_sge: 1, limit: 0 })
            .unwrap()
            .id();
        QpAttributes { srq: Some(srq), ..a }
    });
    let srq = pair.b.rnic.query_qp(pair.b.qp).unwrap().attributes.srq.unwrap();
    let ulpdu = send_segment(1, 0, true, &[]);
    assert_eq!(pair.b.take(&ulpdu), Err(Refusal::Withhold));
    assert_eq!(pair.b.take(&ulpdu), Err(Refusal::Withhold));
    pair.b.rnic.post_srq_recv(srq, &RecvRequest { wr_id: 1, scatter: &[] }).unwrap();
    assert_eq!((pair.b.rnic.next_resume(), pair.b.rnic.next_resume()), (Some(CONN), None));
    pair.b.take(&ulpdu).unwrap();
    assert_eq!(pair.b.outcomes(), [(1, WcStatus::Success)]);
}

#[test]
fn one_peer_cannot_occupy_every_shared_receive_by_leaving_gaps() {
    for (posted, users, least_left) in [(4000, 1, 2900), (100, 1, 50), (100, 5, 90), (3, 2, 3), (1, 1, 1)] {
        let mut pair = Pair::with(|rnic, a| {
            let srq = rnic
                .registry()
                .create_srq(&SrqAttributes { pd: a.pd, max_wr: 4096, max_sge: 1, limit: 0 })
                .unwrap()
                .id();
            for _ in 1..users {
                rnic.create_qp(QpAttributes { srq: Some(srq), ..a }).unwrap();
            }
            QpAttributes { srq: Some(srq), ..a }
        });
        let srq = pair.b.rnic.query_qp(pair.b.qp).unwrap().attributes.srq.unwrap();
        for wr_id in 0..posted {
            pair.b.rnic.post_srq_recv(srq, &RecvRequest { wr_id, scatter: &[] }).unwrap();
        }
        for msn in (2..5000).chain([1 << 30, 0x7fff_ffff]) {
            let _ = pair.b.place(&send_segment(msn, 0, true, &[]), Arrival::Early);
        }
        let left = pair.b.rnic.registry().srq(srq).unwrap().len();
        assert!(left >= least_left, "{left} of {posted} are left with {users} users");
        // The message that is due gets a receive whatever the share, and so do later messages when they become due.
        for msn in 1..=posted as u32 {
            pair.b.take(&send_segment(msn, 0, true, &[])).unwrap();
        }
        assert_eq!(pair.b.outcomes().len() as u64, posted);
    }
}

#[test]
fn rfc5041_s5_4_overlapping_segments_do_not_hide_a_hole() {
    // As many bytes as the message is long, but not those from 10 to 20.
    let overlaps: [&[(u32, usize)]; 3] =
        [&[(0, 10), (0, 10), (20, 10)], &[(0, 10), (20, 10), (20, 10)], &[(10, 20)]];
    for segments in overlaps {
        for missing in 0..segments.len() {
            let mut pair = Pair::new();
            let (sink, _) = pair.b.region(30, 0, ALL);
            pair.b.receive(1, &[whole(sink, 30)]);
            let last = segments.len() - 1;
            let ulpdus: Vec<_> = (segments.iter().enumerate())
                .map(|(i, (mo, len))| send_segment(1, *mo, i == last, &vec![7; *len]))
                .collect();
            let early: Vec<_> =
                ulpdus[missing..].iter().map(|u| pair.b.place(u, Arrival::Early).ok()).collect();
            let mut delivered = Ok(());
            for (at, ulpdu) in ulpdus.iter().enumerate() {
                let placed = at.checked_sub(missing).and_then(|at| early[at]);
                delivered = match placed {
                    Some(placed) => pair.b.rnic.deliver(CONN, placed),
                    None => pair.b.take(ulpdu),
                };
                if delivered.is_err() {
                    break;
                }
            }
            assert_eq!(delivered, Err(Refusal::Stop), "{segments:?}, the first {missing} late");
            assert_eq!(pair.b.outcomes(), [(1, WcStatus::LocalLength)]);
            assert_eq!(pair.b.terminate().numbers(), (1, 2, 4), "invalid MO");
        }
    }
}

#[test]
fn rfc5041_s5_3_a_message_is_whole_for_any_order_and_overlap_of_its_segments() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(30, 0, ALL);
    pair.b.receive(1, &[whole(sink, 30)]);
    for (mo, len, last) in [(15, 10, false), (0, 10, false), (5, 12, false), (25, 5, true)] {
        pair.b.take(&send_segment(1, mo, last, &bytes_from(mo as u8, len))).unwrap();
    }
    assert_eq!(bytes(&to), bytes_from(0, 30));
    assert_eq!(pair.b.poll()[0].byte_len, 30);
}

#[test]
fn a_send_that_has_begun_does_not_end_as_immediate_data() {
    let mut pair = Pair::new();
    let (sink, _) = pair.b.region(30, 0, ALL);
    pair.b.receive(1, &[whole(sink, 30)]);
    pair.b.take(&send_segment(1, 0, false, &[1; 10])).unwrap();
    let header = Untagged { last: true, control: 0x48, word: 0, queue: 0, msn: Msn::new(1), mo: 0 };
    let immediate = [&header.to_bytes(Versions::Ietf)[..], &[5; 8]].concat();
    assert_eq!(pair.b.take(&immediate), Err(Refusal::Stop));
    assert_eq!(pair.b.outcomes(), [(1, WcStatus::Flushed)]);
}

proptest! {
    /// Any received segments, early or in order, change only bytes that their headers may access.
    #[test]
    fn prop_no_segment_changes_a_byte_outside_of_what_it_may_open(
        segments in prop::collection::vec((any::<bool>(), 0u64..140, 0u32..140, 1u32..5, 0usize..60, any::<bool>(), 0u8..4), 1..40)
    ) {
        let mut pair = Pair::new();
        let (shut, closed) = pair.b.region(128, 0, Access::LOCAL_WRITE);
        let (open, remote) = pair.b.region(128, 0, Access::REMOTE_WRITE);
        let (recv, received) = pair.b.region(128, 0, Access::LOCAL_WRITE);
        for i in 0..3u32 {
            pair.b.receive(u64::from(i), &[Sge { key: recv, offset: u64::from(i) * 40, len: 20 }, Sge { key: recv, offset: u64::from(i) * 40 + 22, len: 10 }]);
        }
        let untouched = bytes(&closed);
        for (early, to, mo, msn, len, last, kind) in segments {
            let payload = vec![0xAA; len];
            let ulpdu = match kind {
                0 => write_segment(open, to, last, &payload),
                1 => write_segment(shut, to, last, &payload),
                2 => write_segment(STag::new(open.value() ^ 1), to, last, &payload),
                _ => send_segment(msn, mo, last, &payload),
            };
            let before = bytes(&remote);
            if early {
                let _ = pair.b.place(&ulpdu, Arrival::Early);
            } else {
                let _ = pair.b.take(&ulpdu);
            }
            prop_assert_eq!(&bytes(&closed), &untouched);
            let after = bytes(&remote);
            for (at, (x, y)) in before.iter().zip(&after).enumerate() {
                let named = kind == 0 && (to as usize..to as usize + len).contains(&at);
                prop_assert!(x == y || named);
            }
            for gap in [20..22, 32..40, 60..62, 72..80, 100..102, 112..128] {
                for at in gap {
                    prop_assert_eq!(bytes(&received)[at], at as u8);
                }
            }
        }
    }

    /// Any bytes at all: no panic, and at most one Terminate.
    #[test]
    fn prop_garbage_ends_the_stream_with_one_terminate(ulpdus in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..20)) {
        let mut pair = Pair::new();
        pair.b.receive(1, &[]);
        for ulpdu in &ulpdus {
            let _ = pair.b.place(ulpdu, Arrival::Early);
            let _ = pair.b.take(ulpdu);
        }
        let mut terminates = 0;
        while let Some(ulpdu) = pair.b.pull() {
            terminates += usize::from(ulpdu[1] & 0xf == 7);
        }
        prop_assert!(terminates <= 1);
        let ended = pair.b.state() != QpState::Rts;
        prop_assert_eq!(ended, pair.b.outcomes().contains(&(1, WcStatus::Flushed)));
    }

    /// A message arrives unchanged however its segments are cut and delayed.
    #[test]
    fn prop_any_cut_and_any_gap_give_the_message(len in 0usize..3000, cuts in prop::collection::vec(1usize..900, 1..6), missing in 0usize..6) {
        let mut pair = Pair::new();
        let (sink, to) = pair.b.region(3000, 0, ALL);
        pair.b.receive(1, &[Sge { key: sink, offset: 0, len: 1000 }, Sge { key: sink, offset: 1000, len: 2000 }]);
        let (source, from) = pair.a.region(3000, 3, ALL);
        pair.a.post(1, SEND, &[whole(source, len as u32)]);
        let mut ulpdus = Vec::new();
        let mut sizes = cuts.iter().cycle();
        loop {
            pair.a.mulpdu = sizes.next().unwrap() + 18;
            match pair.a.pull() {
                Some(ulpdu) => ulpdus.push(ulpdu),
                None => break,
            }
        }
        let missing = missing.min(ulpdus.len());
        prop_assert_eq!(take_with_gap(&mut pair.b, &ulpdus, missing), ulpdus.len() - missing);
        prop_assert_eq!(&bytes(&to)[..len], &bytes(&from)[..len]);
        prop_assert_eq!(pair.b.poll()[0].byte_len as usize, len);
        // The header of the last segment alone has L set.
        let lasts = ulpdus.iter().filter(|u| matches!(Header::parse(u, Versions::Ietf), Ok(h) if h.last())).count();
        prop_assert_eq!(lasts, 1);
    }
}
