//! Ways to begin and to end a connection.

use xwarp_tcp::{
    framing::FramingConfig,
    mpa::{Markers, MpaError, Offer, RequestRevision, Revision},
    ulp::{CloseReason, ListenerId},
};

use super::*;

const FLUSHED: WcStatus = WcStatus::Flushed;
const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn an_established_queue_pair_reports_depths_and_addresses() {
    let mut end = End::new(|_, a| a);
    let request =
        WorkRequest { wr_id: 1, operation: SEND, payload: Payload::EMPTY, flags: SendFlags::SIGNALED };
    assert_eq!(end.rnic.post_send(end.qp, &request), Err(PostError::NotConnected));
    end.establish(3, 0, None);
    let [CmEvent::Established { ird: 3, ord: 0, .. }] = end.cm_events()[..] else {
        panic!("not established")
    };
    let info = end.rnic.query_qp(end.qp).unwrap();
    assert_eq!((info.state, info.ird, info.ord, info.addresses.is_some()), (QpState::Rts, 3, 0, true));
    let read = WorkRequest { operation: read_from(STag::new(1), 0), ..request };
    assert_eq!(end.rnic.post_send(end.qp, &read), Err(PostError::NoReads));
}

#[test]
fn rfc6581_s9_2_each_ready_to_receive_message_is_sent_first_and_completes_nothing() {
    let messages =
        [(Rtr::EmptyFpdu, None), (Rtr::Send, Some(3)), (Rtr::Write, Some(0)), (Rtr::Read, Some(1))];
    for (rtr, opcode) in messages {
        let mut pair = Pair { a: End::new(|_, a| a), b: End::new(|_, a| a) };
        pair.a.establish(1, 1, Some(rtr));
        pair.b.rnic.qps.get_mut(pair.b.qp).unwrap().phase = Phase::Accepting;
        pair.b.establish(1, 1, Some(rtr));
        pair.b.rnic.qps.get_mut(pair.b.qp).unwrap().tx.current = None;
        pair.b.receive(9, &[]);
        pair.a.post(1, SEND, &[]);
        let first = pair.a.pull().unwrap();
        assert_eq!(first.get(1).map(|control| control & 0xf), opcode);
        pair.b.take(&first).unwrap();
        pair.run();
        assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
        assert_eq!(pair.b.outcomes(), [(9, SUCCESS)], "{rtr:?} consumes no receive");
    }
}

#[test]
fn rfc5041_s6_2_1_a_graceful_close_completes_posted_work_and_accepts_no_more() {
    let mut pair = Pair::new();
    let (local, _) = pair.a.region(5000, 0, ALL);
    let (remote, _) = pair.b.region(5000, 0, ALL);
    pair.b.post(7, read_from(local, 0), &[whole(remote, 5000)]);
    Pair::carry(&mut pair.b, &mut pair.a);
    pair.a.post(1, write_to(remote, 0), &[whole(local, 5000)]);
    pair.a.post(2, read_from(remote, 0), &[whole(local, 10)]);
    pair.a.rnic.disconnect(pair.a.qp).unwrap();
    assert_eq!(pair.a.state(), QpState::Closing);
    pair.a.post(3, SEND, &[]);
    assert_eq!(pair.a.outcomes(), [], "no more work is accepted, and earlier work keeps its order");
    pair.a.pull_all();
    assert!(!pair.a.finished, "the Read has no answer yet");
    pair.run();
    assert!(pair.a.finished);
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS), (3, FLUSHED)]);
    assert_eq!(pair.b.outcomes(), [(7, SUCCESS)]);
    // The other direction works until the peer closes it as well.
    pair.a.receive(4, &[]);
    pair.b.post(8, SEND, &[]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(4, SUCCESS)]);
    pair.a.rnic.event(CONN, Event::PeerClosed);
    pair.a.rnic.event(CONN, Event::Closed(CloseReason::Graceful));
    assert_eq!(pair.a.state(), QpState::Error);
    assert_eq!(pair.a.async_events(), []);
    let qp = pair.a.qp;
    let closed = CmEvent::Closed { qp, reason: CloseReason::Graceful };
    assert_eq!(pair.a.cm_events()[1..], [CmEvent::Disconnected { qp }, closed]);
}

#[test]
fn rfc5041_s6_2_1_when_the_peer_closes_receives_are_flushed_and_sends_continue() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(8, 0, ALL);
    pair.a.receive(1, &[]);
    pair.a.rnic.event(CONN, Event::PeerClosed);
    assert_eq!((pair.a.outcomes(), pair.a.state()), (vec![(1, FLUSHED)], QpState::Closing));
    pair.a.receive(2, &[]);
    assert_eq!(pair.a.outcomes(), [(2, FLUSHED)]);
    pair.a.post_with(3, write_to(remote, 0), Payload::Inline(b"still"), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(3, SUCCESS)]);
    assert!(!pair.a.finished, "our direction ends when the application closes it");
    pair.a.rnic.disconnect(pair.a.qp).unwrap();
    pair.run();
    assert!(pair.a.finished);
}

#[test]
fn a_reset_after_the_peers_close_is_no_fault_of_the_queue_pair() {
    let mut pair = Pair::new();
    pair.a.post(1, SEND, &[]);
    pair.a.rnic.event(CONN, Event::PeerClosed);
    pair.a.rnic.event(CONN, Event::Closed(CloseReason::Reset));
    assert_eq!(pair.a.outcomes(), [(1, FLUSHED)]);
    assert_eq!(pair.a.async_events(), []);
}

#[test]
fn a_peer_that_closes_before_its_read_response_fails_the_read() {
    let mut pair = Pair::new();
    let (local, _) = pair.a.region(8, 0, ALL);
    pair.a.post(1, read_from(STag::new(5), 0), &[whole(local, 8)]);
    pair.a.pull_all();
    pair.a.rnic.event(CONN, Event::PeerClosed);
    assert_eq!(pair.a.outcomes(), [(1, FLUSHED)]);
    assert_eq!(pair.a.state(), QpState::Error);
}

#[test]
fn a_lost_connection_is_reported_once_as_an_error() {
    let mut pair = Pair::new();
    pair.a.receive(1, &[]);
    pair.a.post(2, SEND, &[]);
    pair.a.rnic.event(CONN, Event::Closed(CloseReason::Reset));
    assert_eq!(pair.a.outcomes(), [(2, FLUSHED), (1, FLUSHED)]);
    let qp = pair.a.qp;
    let fault = QpFault::Connection(CloseReason::Reset);
    assert_eq!(pair.a.async_events(), [AsyncEvent::QpFatal { qp, fault }]);
    let closed = CmEvent::Closed { qp, reason: CloseReason::Reset };
    assert_eq!(pair.a.cm_events()[1..], [CmEvent::Disconnected { qp }, closed]);
    pair.a.rnic.reset_qp(qp).unwrap();
    assert_eq!(pair.a.state(), QpState::Idle);
}

#[test]
fn a_failed_start_up_leaves_the_queue_pair_idle_with_its_receives() {
    for reason in [CloseReason::Refused, CloseReason::TimedOut, CloseReason::Unreachable] {
        let mut end = End::new(|_, a| a);
        end.receive(1, &[]);
        end.rnic.event(CONN, Event::Closed(reason));
        assert_eq!(end.cm_events(), [CmEvent::ConnectError { qp: end.qp, reason }]);
        assert_eq!((end.state(), end.outcomes()), (QpState::Idle, vec![]));
        assert_eq!(end.rnic.query_qp(end.qp).unwrap().recv_outstanding, 1);
    }
    let mut end = End::new(|_, a| a);
    let ord = xwarp_tcp::framing::UNNEGOTIATED;
    end.rnic.event(CONN, Event::Rejected { private_data: b"no".to_vec(), ird: 2, ord });
    let peer = PeerDepths { ird: Some(2), ord: None };
    assert_eq!(end.cm_events(), [CmEvent::Rejected { qp: end.qp, private_data: b"no".to_vec(), peer }]);
    end.rnic.event(CONN, Event::Closed(CloseReason::Graceful));
    assert_eq!((end.cm_events(), end.state()), (vec![], QpState::Idle));
}

#[test]
fn rfc6581_s9_1_a_failed_negotiation_is_terminated_and_reported_as_a_connect_error() {
    let mut end = End::new(|_, a| a);
    end.rnic.event(CONN, Event::StreamError(MpaError::InsufficientIrd.into()));
    let terminate = end.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (2, 0, 6));
    end.rnic.event(CONN, Event::Closed(CloseReason::Graceful));
    let reason = CloseReason::Startup(MpaError::InsufficientIrd.into());
    assert_eq!(end.cm_events(), [CmEvent::ConnectError { qp: end.qp, reason }]);
}

/// Each refusal, in either order, is followed by an attempt without the refused part, and there are three attempts.
#[test]
fn rfc6581_s10_refused_parts_of_mpa_are_left_out_one_after_the_other() {
    let markers = CloseReason::Startup(MpaError::MarkersRefused.into());
    let revisions = [
        CloseReason::Reset,
        CloseReason::Startup(MpaError::Truncated.into()),
        CloseReason::Startup(MpaError::NotEnhanced.into()),
    ];
    for revision in revisions {
        for refusals in [[markers, revision], [revision, markers]] {
            let mut end = End::new(|_, a| a);
            end.rnic.connecting(end.qp, CONN, attempt(MpaConfig::default()));
            end.receive(1, &[]);
            let mut conn = CONN;
            for (round, refusal) in (1..).zip(refusals) {
                end.rnic.event(conn, Event::Closed(refusal));
                assert_eq!(end.cm_events(), [], "the application does not see a repeated attempt");
                let Some(&Deferred::Retry(qp)) = end.rnic.deferred().last() else { panic!("no retry") };
                let next = end.rnic.take_retry(qp).unwrap();
                let FramingConfig::Mpa(mpa) = &next.framing else { panic!("another framing") };
                assert_eq!(mpa.markers == Markers::Off, next.lacks.markers);
                assert_eq!(mpa.revision == RequestRevision::One, next.lacks.revision_two);
                assert_eq!(next.lacks.markers, refusal == markers || round == 2);
                conn = ConnId { index: 3, generation: round };
                end.rnic.connecting(qp, conn, next);
            }
            end.rnic.event(conn, Event::Closed(markers));
            assert_eq!(end.rnic.deferred(), []);
            let [CmEvent::ConnectError { reason, .. }] = end.cm_events()[..] else { panic!("not told") };
            assert_eq!(reason, markers);
            assert_eq!(end.outcomes(), [], "the receive stays");
        }
    }
}

#[test]
fn rfc6581_s10_other_close_reasons_and_settings_allow_no_further_attempt() {
    let require = |revision, markers| MpaConfig { revision, markers, ..MpaConfig::default() };
    let strict = require(RequestRevision::RequireTwo, Markers::Require);
    let one = require(RequestRevision::One, Markers::Off);
    let peer_to_peer =
        MpaConfig { peer_to_peer: vec![Rtr::Write], ..require(RequestRevision::RequireTwo, Markers::Off) };
    let startup = CloseReason::Startup;
    let refusals = [
        CloseReason::Reset,
        startup(MpaError::Truncated.into()),
        startup(MpaError::NotEnhanced.into()),
        startup(MpaError::MarkersRefused.into()),
    ];
    let others = [
        CloseReason::Refused,
        CloseReason::TimedOut,
        CloseReason::Aborted,
        startup(MpaError::InvalidKey.into()),
        startup(MpaError::StartupTimeout.into()),
        startup(MpaError::UnsupportedRevision(3).into()),
    ];
    let strict_ones = [strict, one, peer_to_peer].map(|mpa| (mpa, &refusals[..]));
    for (mpa, reasons) in strict_ones.into_iter().chain([(MpaConfig::default(), &others[..])]) {
        for reason in reasons.iter().copied() {
            let mut end = End::new(|_, a| a);
            end.rnic.connecting(end.qp, CONN, attempt(mpa.clone()));
            end.rnic.event(CONN, Event::Closed(reason));
            assert_eq!(end.rnic.deferred(), [], "{mpa:?} {reason}");
            assert_eq!(end.cm_events(), [CmEvent::ConnectError { qp: end.qp, reason }]);
        }
    }
}

/// The peer's refusal can arrive between the application's call and the reset.
#[test]
fn an_abandoned_attempt_is_not_repeated() {
    let mut end = End::new(|_, a| a);
    end.rnic.connecting(end.qp, CONN, attempt(MpaConfig::default()));
    end.rnic.disconnect(end.qp).unwrap();
    end.rnic.event(CONN, Event::Closed(CloseReason::Reset));
    assert_eq!(end.rnic.deferred(), [Deferred::Abort(CONN)]);
}

#[test]
fn a_missing_part_is_cached_once_the_peer_has_answered_without_it() {
    let lacks = Lacks { markers: false, revision_two: true };
    let rejected = Event::Rejected { private_data: Vec::new(), ird: 0, ord: 0 };
    for answer in [None, Some(rejected)] {
        let mut end = End::new(|_, a| a);
        end.rnic.connecting(end.qp, CONN, Attempt { lacks, ..attempt(MpaConfig::default()) });
        match answer {
            None => end.establish(0, 0, None),
            Some(event) => end.rnic.event(CONN, event),
        }
        let learned = Deferred::Learned(path().flow.remote, lacks);
        assert_eq!(end.rnic.deferred().iter().filter(|work| **work == learned).count(), 1);
    }
    let mut end = End::new(|_, a| a);
    end.rnic.connecting(end.qp, CONN, attempt(MpaConfig::default()));
    end.establish(0, 0, None);
    assert!(!end.rnic.deferred().iter().any(|work| matches!(work, Deferred::Learned(..))));
}

#[test]
fn rfc6581_s9_3_a_local_failure_before_full_operation_is_terminated_with_code_5() {
    let mut end = End::new(|_, a| a);
    let qp = end.qp;
    // The completion queue overflows by the work of other queue pairs during connection establishment.
    end.rnic.shared.overflowed.push(end.cq);
    end.rnic.end_overflowed();
    assert_eq!(end.state(), QpState::Terminate);
    end.establish(4, 4, None);
    assert_eq!(end.state(), QpState::Terminate, "a late establishment does not revive it");
    let terminate = end.terminate();
    assert_eq!((terminate.layer, terminate.error_type, terminate.code), (2, 0, 5));
    end.rnic.event(CONN, Event::Closed(CloseReason::Graceful));
    let reason = CloseReason::Startup(MpaError::LocalCatastrophic.into());
    assert_eq!(end.cm_events(), [CmEvent::ConnectError { qp, reason }]);
    assert_eq!(end.async_events(), [AsyncEvent::QpFatal { qp, fault: QpFault::CqOverflow }]);
}

#[test]
fn requests_are_answered_once_and_their_end_is_reported() {
    let mut end = End::new(|_, a| a);
    let qp = end.rnic.create_qp(QpAttributes::new(end.pd, end.cq, end.cq)).unwrap();
    let offer = xwarp_tcp::framing::Offer::Mpa(Offer {
        private_data: b"hello".to_vec(),
        ird: 4,
        ord: xwarp_tcp::framing::UNNEGOTIATED,
        revision: Revision::One,
        enhanced: false,
        peer_to_peer: None,
        markers: false,
        crc: true,
        send_immediate: false,
    });
    let conn = |index| ConnId { index, generation: 9 };
    for index in 1..4 {
        end.rnic.event(
            conn(index),
            Event::Requested { listener: ListenerId(1), path: path(), offer: offer.clone() },
        );
    }
    let requests: Vec<_> = end
        .cm_events()
        .into_iter()
        .map(|event| match event {
            CmEvent::ConnectRequest { request, peer: PeerDepths { ird: Some(4), ord: None }, .. } => request,
            other => panic!("{other:?}"),
        })
        .collect();
    end.rnic.accepting(qp, requests[0]).unwrap();
    assert!(matches!(end.rnic.accepting(qp, requests[0]), Err(CmError::UnknownRequest(_))));
    end.rnic.check_request(requests[1]).unwrap();
    end.rnic.rejected(requests[1]);
    assert!(end.rnic.check_request(requests[1]).is_err());
    end.rnic.event(conn(3), Event::Closed(CloseReason::Reset));
    assert_eq!(end.cm_events(), [CmEvent::RequestGone { request: requests[2] }]);
    end.rnic.event(conn(4), Event::Requested { listener: ListenerId(1), path: path(), offer });
    end.rnic.event(conn(4), Event::Closed(CloseReason::Reset));
    assert_eq!(end.cm_events(), [], "the event of a request that ended before it was read is removed");
    end.rnic.event(conn(1), Event::Closed(CloseReason::TimedOut));
    assert_eq!(end.cm_events(), [CmEvent::ConnectError { qp, reason: CloseReason::TimedOut }]);
}

#[test]
fn a_destroyed_queue_pair_resets_its_connection_unless_it_was_closed_in_order() {
    let mut pair = Pair::new();
    pair.a.rnic.destroy_qp(pair.a.qp).unwrap();
    assert!(pair.a.rnic.deferred().contains(&Deferred::Abort(CONN)));
    let mut writer = sim::pull(&mut pair.a.rnic, CONN, 0, 100, 100);
    assert_eq!(writer.pulled, Pulled::Finish);
    assert_eq!(pair.a.place(&[], Arrival::InOrder).err(), Some(Refusal::Stop));
    pair.b.rnic.disconnect(pair.b.qp).unwrap();
    pair.b.rnic.destroy_qp(pair.b.qp).unwrap();
    assert!(!pair.b.rnic.deferred().contains(&Deferred::Abort(CONN)));
    writer = sim::pull(&mut pair.b.rnic, CONN, 0, 100, 100);
    assert_eq!(writer.pulled, Pulled::Finish);
}

#[test]
fn rfc6581_s9_2_the_ready_to_receive_send_is_the_complete_first_message() {
    let segment = |msn, mo, last| placement::send_segment(msn, mo, last, &[]);
    for (ulpdu, code) in [
        (segment(2, 0, true), 3),
        (segment(0, 0, true), 3),
        (segment(1, 5, true), 4),
        (segment(1, 0, false), 5),
    ] {
        let mut end = End::new(|_, a| a);
        end.rnic.qps.get_mut(end.qp).unwrap().phase = Phase::Accepting;
        end.establish(1, 1, Some(Rtr::Send));
        end.rnic.qps.get_mut(end.qp).unwrap().tx.current = None;
        assert_eq!(end.take(&ulpdu), Err(Refusal::Stop));
        assert_eq!(end.terminate().numbers(), (1, 2, code));
    }
}

#[test]
fn rfc5041_s6_2_1_data_after_the_peers_close_ends_the_stream() {
    let mut pair = Pair::new();
    pair.a.rnic.event(CONN, Event::PeerClosed);
    pair.a.post(1, SEND, &[]);
    pair.b.post(2, SEND, &[]);
    let late = pair.b.pull().unwrap();
    assert_eq!(pair.a.take(&late), Err(Refusal::Stop));
    assert_eq!((pair.a.state(), pair.a.outcomes()), (QpState::Error, vec![(1, FLUSHED)]));
    assert!(pair.a.rnic.deferred().contains(&Deferred::Abort(CONN)));
}
