//! No receive posted: the data waits, bounded in time, and comes through when the upper layer resumes.

use std::time::Duration;

use proptest::prelude::*;
use xwarp_tcp::{
    mpa::{MpaConfig, MpaError},
    time::Instant,
    ulp::Event,
};

use crate::{
    receive::{lengths, receiver},
    support::{End, Reference, connect, ulpdus},
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
    // Looking again without success does not start the time anew.
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
    end.session.release(&mut end.link);
    assert_eq!(end.link.lent(), 0);
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

/// What follows a withheld FPDU is found by its length, whose CRC was good, and placed while it waits.
#[test]
fn rfc5044_s6_fpdus_behind_a_withheld_one_are_placed_early() {
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
