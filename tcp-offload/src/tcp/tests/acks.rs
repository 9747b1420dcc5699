//! When ACKs are sent, and what they report: RFC 9293 section 3.8.6.3, RFC 5681 section 4.2, RFC 2018, RFC 2883.

use std::time::Duration;

use super::{idle, irs, iss, plain};
use crate::{
    tcp::{
        TcpConfig, Tuning,
        ack::AckPolicy,
        testing::{Script, Stream, ms},
    },
    wire::{Fields, Options, Segment},
};

fn blocks(segment: &Segment) -> Vec<(i32, i32)> {
    segment.options.sack_blocks().iter().map(|b| (b.left.since(irs(0)), b.right.since(irs(0)))).collect()
}

/// The numbers of the segments, from 1, after which an ACK was sent at once.
fn acknowledged(script: &mut Script, segments: u32) -> Vec<u32> {
    let from = script.conn.contiguous() as u32;
    (1..=segments).filter(|i| !script.data(from + (i - 1) * 1000, 1000).is_empty()).collect()
}

#[test]
fn every_sixteenth_full_segment_is_acknowledged_at_once() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    assert_eq!(acknowledged(&mut script, 40), [16, 32]);
}

#[test]
fn rfc5681_s4_2_a_new_connection_acknowledges_every_second_full_segment() {
    let mut script = idle();
    script.run();
    // 16 ACKs with that of the SYN-ACK.
    let quick: Vec<u32> = (1..=15).map(|i| 2 * i).collect();
    assert_eq!(acknowledged(&mut script, 40), quick);
}

#[test]
fn rfc5681_s4_2_after_a_gap_every_second_full_segment_is_acknowledged() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    script.data(1000, 1000);
    script.data(0, 1000);
    // 16 ACKs with that of the segment that filled the gap.
    let quick: Vec<u32> = (1..=15).map(|i| 2 * i).collect();
    assert_eq!(acknowledged(&mut script, 40), quick);
}

#[test]
fn an_ack_waits_for_a_peer_that_has_more_to_send() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    let begin = script.now;
    script.data(0, 1000);
    assert!(script.conn.owes_ack() && script.conn.holds_ack());
    assert_eq!(script.conn.deadline(), Some(begin + TcpConfig::default().ack_hold));
    script.template.flags.psh = true;
    script.data(1000, 1000);
    assert!(script.conn.owes_ack() && !script.conn.holds_ack(), "the last segment of a message");
}

/// Segments of 64 KiB may take longer than an ACK is held.
#[test]
fn the_ack_of_a_slow_stream_is_held_again() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    let mut acks = 0;
    for i in 0..100 {
        acks += script.data(i * 1000, 1000).len();
        assert!(script.conn.holds_ack());
        acks += script.wait(Duration::from_micros(15)).len();
    }
    assert_eq!(acks, 25, "one for each time that an ACK may be held");
}

/// A peer whose window ends after each segment gets nearly all its ACKs without delay.
#[test]
fn a_peer_that_waits_for_a_held_ack_is_not_kept_waiting_again() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    let mut held = 0;
    for i in 0..100 {
        script.data(i * 1000, 1000);
        held += u32::from(script.conn.holds_ack());
        if script.conn.holds_ack() {
            assert_eq!(script.wait(ms(1)).len(), 1);
        } else {
            script.conn.flush_ack();
            script.run();
        }
    }
    assert_eq!(held, 7, "after 0, 1, 2, 4 ... ACKs without delay");
}

#[test]
fn rfc9293_s3_8_6_3_an_ack_is_delayed_by_one_millisecond() {
    let mut script = idle();
    script.run();
    assert!(script.data(0, 1000).is_empty());
    let sent = script.wait(ms(5));
    assert_eq!(sent.len(), 1);
    assert_eq!((sent[0].0, sent[0].1.ack), (1000, irs(1000)));
}

#[test]
fn data_carries_the_ack_and_an_idle_poll_sends_it() {
    let mut script = idle();
    script.run();
    script.data(0, 1000);
    script.source = Stream::new(10, 0, false);
    let [data] = script.run()[..] else { panic!("one segment") };
    assert_eq!((data.payload_len, data.ack), (10, irs(1000)));
    assert!(!script.conn.flush_ack(), "no ACK is owed any more");
    assert!(script.wait(ms(1)).is_empty());
    script.data(1000, 1000);
    assert!(script.conn.flush_ack());
    assert_eq!(script.run().len(), 1);
}

#[test]
fn the_ack_of_a_request_waits_for_the_answer() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    let tuning = Tuning { answer_delay: Some(ms(40)), ..TcpConfig::default().tuning() };
    script.conn.tune(script.now, &tuning);
    script.template.flags.psh = true;
    // The peer has sent nothing longer.
    script.data(0, 100);
    assert!(script.conn.owes_ack() && script.conn.awaits_answer());
    assert!(!script.conn.flush_ack() && script.wait(ms(39)).is_empty());
    script.source = Stream::new(10, 0, false);
    let [answer] = script.run()[..] else { panic!("one segment") };
    assert_eq!((answer.payload_len, answer.ack), (10, irs(100)));
    script.data(100, 100);
    assert_eq!(script.wait(ms(40)).len(), 1, "no answer");
    script.data(200, 100);
    script.data(300, 100);
    assert!(!script.conn.awaits_answer());
    assert_eq!(script.wait(ms(1)).len(), 1, "a second request before the answer");
}

#[test]
fn rfc5681_s4_2_segments_beyond_or_filling_a_gap_are_acknowledged_at_once() {
    let mut script = idle();
    script.run();
    for offset in [1000, 2000, 4000] {
        assert_eq!(script.data(offset, 1000).len(), 1);
    }
    let [ack] = script.data(0, 1000)[..] else { panic!("filling a part of the gap: at once") };
    assert_eq!((ack.ack, blocks(&ack)), (irs(3000), vec![(4000, 5000)]));
    assert_eq!(script.data(3000, 1000).len(), 1);
    assert!(script.data(5000, 1000).is_empty(), "in order again");
    assert_eq!(script.conn.counters().out_of_order, 3);
}

/// RFC 2018 section 4, case 2: every other segment is lost.
#[test]
fn rfc2018_s4_the_latest_block_is_reported_first() {
    let mut script = idle();
    script.run();
    script.data(0, 500);
    let mut last = Vec::new();
    for segment in [2, 4, 6, 8] {
        last = blocks(&script.data(segment * 500, 500)[0]);
    }
    assert_eq!(last, [(4000, 4500), (3000, 3500), (2000, 2500), (1000, 1500)]);
    // The fourth joins the second and third blocks.
    let joined = blocks(&script.data(2500, 500)[0]);
    assert_eq!(joined, [(2000, 3500), (4000, 4500), (1000, 1500)]);
}

#[test]
fn rfc2018_s3_with_timestamps_three_blocks_fit() {
    let mut script = Script::connecting(TcpConfig::default(), Stream::new(0, 0, false));
    script.run();
    script.stamp(1, 0);
    let mut options = script.template.options;
    options.sack_permitted = true;
    script.syn_ack(options);
    script.run();
    for segment in [2, 4, 6, 8] {
        let ack = script.data(segment * 500, 500)[0];
        assert!(ack.options.sack_count <= 3 && ack.options.timestamps.is_some());
    }
}

#[test]
fn rfc2018_s3_without_sack_permitted_there_are_no_blocks() {
    // We offer it, the peer does not.
    let config = TcpConfig { timestamps: false, ..TcpConfig::default() };
    let mut script = Script::connecting(config, Stream::new(0, 0, false));
    assert!(script.run()[0].options.sack_permitted);
    script.syn_ack(Options { mss: Some(1000), ..Options::default() });
    script.run();
    let [ack] = script.data(1000, 1000)[..] else { panic!("a duplicate ACK") };
    assert_eq!((ack.ack, ack.options.sack_count), (irs(0), 0));
}

#[test]
fn rfc2883_s4_1_1_a_duplicate_below_the_ack_is_reported_once() {
    let mut script = idle();
    script.run();
    script.data(0, 1000);
    script.data(1000, 1000);
    let [ack] = script.data(0, 1000)[..] else { panic!("an ACK at once") };
    assert_eq!((ack.ack, blocks(&ack)), (irs(2000), vec![(0, 1000)]));
    let [ack] = script.data(3000, 1000)[..] else { panic!("an ACK at once") };
    assert_eq!(blocks(&ack), [(3000, 4000)], "the duplicate is not repeated");
}

#[test]
fn rfc2883_s4_a_duplicate_is_reported_by_the_first_ack_for_which_there_is_room() {
    let mut script = idle();
    script.run();
    script.data(0, 1000);
    script.data(1000, 1000);
    script.inject(Fields { seq: irs(0), ..script.template }, 1000);
    assert_eq!(script.run_with_room(0), []);
    let [ack] = script.run()[..] else { panic!("an ACK") };
    assert_eq!((ack.ack, blocks(&ack)), (irs(2000), vec![(0, 1000)]));
}

#[test]
fn rfc2883_s4_2_1_a_duplicate_beyond_the_gap_comes_before_its_block() {
    let mut script = idle();
    script.run();
    script.data(1000, 500);
    script.data(1500, 500);
    let [ack] = script.data(1500, 500)[..] else { panic!("an ACK at once") };
    assert_eq!(blocks(&ack), [(1500, 2000), (1000, 2000)]);
}

#[test]
fn rfc2883_s4_1_3_the_duplicate_part_of_a_segment_is_reported() {
    let mut script = idle();
    script.run();
    script.data(0, 1000);
    let acks = script.data(500, 1000);
    let reported: Vec<_> = acks.iter().flat_map(blocks).collect();
    let later: Vec<_> = script.wait(ms(2)).iter().flat_map(|(_, s)| blocks(s)).collect();
    assert_eq!([reported, later].concat(), [(500, 1000)]);
    assert_eq!(script.conn.contiguous(), 1500);
}

#[test]
fn a_data_segment_does_not_suppress_the_sack_blocks() {
    let mut script = idle();
    script.run();
    script.source = Stream::new(100, 0, false);
    let sent = script.data(1000, 1000);
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().any(|s| blocks(s) == [(1000, 2000)]));
}

#[test]
fn payload_that_was_not_taken_is_not_acknowledged() {
    let mut script = idle();
    script.run();
    script.take = false;
    assert!(script.data(0, 1000).is_empty());
    assert!(script.wait(ms(10)).is_empty());
    script.take = true;
    script.data(0, 1000);
    assert_eq!(script.conn.contiguous(), 1000);
}

#[test]
fn payload_that_fills_many_one_byte_gaps_is_taken() {
    let mut script = idle();
    script.run();
    for i in 0..2_000 {
        script.data(1 + 2 * i, 1);
    }
    script.data(0, 4_000);
    assert_eq!(script.conn.contiguous(), 4_000);
}

#[test]
fn rfc9293_s3_10_7_4_a_batch_is_acknowledged_once() {
    let mut script = idle();
    script.run();
    for i in 0..16 {
        script.inject(Fields { seq: irs(i * 1000), ack: iss(0), ..plain(&script) }, 1000);
    }
    let [ack] = script.run()[..] else { panic!("MUST-59: one ACK for all") };
    assert_eq!(ack.ack, irs(16_000));
}
