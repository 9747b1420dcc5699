//! Without a posted receive, data waits for a limited time and is delivered when the upper layer resumes.

use std::time::Duration;

use proptest::prelude::*;
use xwarp_tcp::{
    mpa::{MpaConfig, MpaError},
    time::Instant,
    ulp::Event,
};

use crate::{
    receive::{lengths, receiver},
    support::{CONN, End, Reference, connect, ulpdus},
};

proptest! {
    #[test]
    fn prop_withhold_and_resume(
        lengths in lengths(20), grants in proptest::collection::vec(1usize..4, 1..10), markers: bool,
        at_delivery: bool, step in 100usize..3000,
    ) {
        let (mut end, start, stream, data) = receiver(&lengths, markers, true);
        let budget = if at_delivery { &mut end.ulp.deliveries } else { &mut end.ulp.receives };
        *budget = Some(0);
        let mut grants = grants.iter().cycle();
        let mut granted = 0;
        for at in (0..stream.bytes.len()).step_by(step) {
            let to = (at + step).min(stream.bytes.len());
            prop_assert!(end.receive(start + at, &stream.bytes[at..to]));
            let complete = stream.ranges.iter().filter(|(_, end)| *end <= to).count();
            prop_assert_eq!(end.session.holds_undelivered(), complete > granted);
            prop_assert_eq!(end.ulp.delivered.len(), complete.min(granted));
            if at % (2 * step) == 0 {
                let more = grants.next().unwrap();
                let budget = if at_delivery { &mut end.ulp.deliveries } else { &mut end.ulp.receives };
                *budget.as_mut().unwrap() += more;
                granted += more;
                end.resume();
                prop_assert_eq!(end.ulp.delivered.len(), complete.min(granted));
            }
        }
        end.ulp.deliveries = None;
        end.ulp.receives = None;
        end.resume();
        prop_assert!(!end.session.holds_undelivered());
        prop_assert_eq!(&end.ulp.delivered, &data);
        prop_assert_eq!(end.ulp.placed.len(), data.len());
        end.peer_closed();
        prop_assert_eq!(end.ulp.events.last(), Some(&Event::PeerClosed));
        prop_assert_eq!(end.link.lent(), 0);
    }
}

#[test]
fn rfc5041_s7_withheld_has_a_time_limit() {
    let (mut end, start, stream, _) = receiver(&[100, 100], true, true);
    end.ulp.receives = Some(1);
    end.now = Instant::from_nanos(9);
    end.receive(start, &stream.bytes);
    let limit = end.now + MpaConfig::default().withhold_timeout;
    assert_eq!(end.session.deadline(), Some(limit));
    assert!(end.session.holds_undelivered());
    // A resume without success does not restart the time limit.
    end.now = limit - Duration::from_nanos(1);
    end.resume();
    end.on_timer();
    assert_eq!((end.session.deadline(), end.ulp.stream_errors()), (Some(limit), vec![]));
    end.now = limit;
    end.on_timer();
    assert_eq!(end.ulp.stream_errors(), [MpaError::Withheld]);
    assert_eq!((end.session.deadline(), end.session.holds_undelivered()), (None, false));
    let code = MpaError::Withheld.terminate_code();
    assert_eq!((code.layer, code.error_type, code.code), (1, 2, 2));
    assert_eq!(end.session.counters().withheld, 1);
    assert_eq!((end.link.lent(), end.session.held_bytes()), (0, 0), "held frames are recycled at once");
}

#[test]
fn rfc5041_s7_strict_behaviour_terminates_at_once() {
    let config = MpaConfig { withhold_timeout: Duration::ZERO, ..MpaConfig::default() };
    let (_, mut end) = connect(End::initiator(config.clone()), End::responder(config));
    end.ulp.receives = Some(0);
    let start = end.contiguous;
    end.receive(start, &Reference::new(&ulpdus(&[100]), true, true).bytes);
    assert_eq!(end.ulp.stream_errors(), [MpaError::Withheld]);
}

/// The FPDU after a withheld one is located by the length of the withheld one, whose CRC is correct, and placed while
/// that one waits.
#[test]
fn rfc5044_s6_fpdus_after_a_withheld_one_are_placed_early() {
    let (mut end, start, stream, data) = receiver(&[100, 200, 300], false, true);
    end.ulp.receives = Some(0);
    end.ulp.early_needs_no_receive = true;
    end.receive(start, &stream.bytes);
    let placed: Vec<_> = end.ulp.placed.iter().map(|p| (p.bytes.len(), p.early)).collect();
    assert_eq!(placed, [(200, true), (300, true)]);
    assert_eq!(end.session.held_bytes(), stream.ranges[0].1);
    end.ulp.receives = None;
    end.resume();
    assert_eq!(end.ulp.delivered, data);
}

/// A peer that ignores the window cannot make us hold more than the limit while the application sleeps.
#[test]
fn rfc5041_s7_withheld_data_is_bounded() {
    let config = MpaConfig { hold_bytes: 4000, ..MpaConfig::default() };
    let (_, mut end) = connect(End::initiator(config.clone()), End::responder(config));
    end.ulp.receives = Some(0);
    end.ulp.refuses_odd_early = true;
    let start = end.contiguous;
    let data: Vec<Vec<u8>> = (0..20).map(|_| vec![1; 1000]).collect();
    let stream = Reference::new(&data, true, true);
    let mut refused = 0;
    for (from, to) in &stream.ranges {
        refused += usize::from(!end.receive(start + from, &stream.bytes[*from..*to]));
        assert!(end.session.held_bytes() <= 4000);
    }
    assert_eq!(refused, 17);
    assert_eq!(end.session.counters().refused_segments, 17);
    end.ulp.receives = None;
    end.resume();
    assert_eq!(end.ulp.delivered.len(), 3);
    for (from, to) in &stream.ranges {
        assert!(end.receive(start + from, &stream.bytes[*from..*to]));
    }
    assert_eq!(end.ulp.delivered, data);
    assert_eq!(end.link.lent(), 0);
}

/// An FPDU longer than the receive window must not close it: only its remaining bytes can release its held part.
#[test]
fn the_unfinished_fpdu_at_the_cursor_does_not_reduce_the_window() {
    let (mut end, start, stream, _) = receiver(&[9000, 9000], true, true);
    let segment = |n: usize| 1400 * n..1400 * (n + 1);
    for n in 0..5 {
        end.receive(start + 1400 * n, &stream.bytes[segment(n)]);
        assert_eq!((end.session.held_bytes(), end.session.window_bytes()), (1400 * (n + 1), 0));
    }
    end.receive(start + 1400 * 8, &stream.bytes[segment(8)]);
    assert_eq!((end.session.held_bytes(), end.session.window_bytes()), (1400 * 6, 1400), "beyond a gap");
    // A whole FPDU that waits for a receive counts.
    end.ulp.receives = Some(0);
    end.receive(start + 1400 * 5, &stream.bytes[1400 * 5..1400 * 8]);
    assert_eq!(end.session.window_bytes(), 1400 * 9);
}

/// The age of held bytes counts until the cursor has passed the bytes that were held at its start; a trickle into the
/// gap does not reset it.
#[test]
fn held_bytes_are_as_old_as_the_oldest_of_them() {
    let (mut end, start, stream, data) = receiver(&[1000; 4], false, true);
    let at = |n: usize| stream.ranges[n].0;
    assert_eq!(end.session.stalled_since(), None);
    end.now = Instant::from_nanos(1);
    end.receive(start + at(2), &stream.bytes[at(2)..at(3)]);
    let first = Some(end.now);
    assert_eq!(end.session.stalled_since(), first);
    end.now = Instant::from_nanos(2);
    end.receive(start + at(3), &stream.bytes[at(3)..at(3) + 10]);
    end.receive(start, &stream.bytes[..at(1)]);
    assert_eq!((end.ulp.delivered.len(), end.session.stalled_since()), (1, first));
    end.receive(start + at(1), &stream.bytes[at(1)..at(2)]);
    assert_eq!((end.ulp.delivered.len(), end.session.stalled_since()), (3, Some(end.now)));
    end.receive(start + at(3) + 10, &stream.bytes[at(3) + 10..]);
    assert_eq!((&end.ulp.delivered, end.session.stalled_since()), (&data, None));
}

/// Bytes shed beyond a gap are retransmitted. The first part of an FPDU in order was acknowledged, so shedding it ends
/// the stream.
#[test]
fn bytes_shed_beyond_a_gap_are_retransmitted_and_shedding_acknowledged_bytes_ends_the_stream() {
    let (mut end, start, stream, data) = receiver(&[1000; 4], false, true);
    let at = |n: usize| stream.ranges[n].0;
    end.receive(start + at(2), &stream.bytes[at(2)..]);
    end.receive(start, &stream.bytes[..10]);
    let shed = |end: &mut End| end.session.shed(&mut end.ulp, CONN, &mut end.link);
    assert!(shed(&mut end));
    assert_eq!((end.session.held_bytes(), end.session.stalled_since()), (10, None));
    end.receive(start + 10, &stream.bytes[10..at(2)]);
    end.taken.truncate(end.contiguous);
    end.contiguous = start + at(2);
    end.receive(start + at(2), &stream.bytes[at(2)..]);
    assert_eq!(end.ulp.delivered, data);

    let (mut end, start, stream, _) = receiver(&[1000; 4], false, true);
    end.receive(start, &stream.bytes[..10]);
    assert!(!shed(&mut end));
    assert_eq!(end.ulp.stream_errors(), [MpaError::Stalled]);
    assert_eq!((end.link.lent(), end.session.held_bytes()), (0, 0));
}
