//! Windows: RFC 9293 section 3.8.6, RFC 7323 section 2, and the rule that units of the framing layer are never cut.

use super::{bulk, idle, iss, plain, silent};
use crate::{
    sim::Faults,
    tcp::{
        TcpConfig,
        testing::{Pair, Script, Stream, at_ms, ms, offset, us},
    },
    ulp::CloseReason,
    wire::{Fields, Flags, Options},
};

/// Settings with a receive window that does not grow.
fn fixed(window: u32) -> TcpConfig {
    TcpConfig { receive_window: window, receive_window_max: window, ..TcpConfig::default() }
}

fn acked(script: &Script, offset: u32, window: u16) -> Fields {
    Fields { ack: iss(offset), window, ..plain(script) }
}

/// An established connection whose peer shrinks its window to `window` before there is anything to send.
fn closed_to(window: u16, source: Stream) -> Script {
    let mut script = idle();
    script.run();
    script.inject(acked(&script, 0, window), 0);
    script.source = source;
    script
}

/// An established connection that withholds 4000 bytes, its whole receive window.
fn with_our_window_closed(source: Stream) -> Script {
    let mut script = Script::established(fixed(4_000), source);
    script.run();
    for i in 0..4 {
        script.conn.withheld((i as usize + 1) * 1000);
        script.data(i * 1000, 1000);
    }
    script.conn.flush_ack();
    script.run();
    script
}

#[test]
fn the_peers_window_is_never_overrun_and_segments_stay_whole() {
    let mut script = Script::established(TcpConfig::default(), bulk(20));
    script.template.window = 2500;
    script.inject(script.template, 0);
    let sent = script.run();
    assert_eq!(sent.iter().map(|s| s.payload_len).collect::<Vec<_>>(), [1000, 1000]);
    let sent = script.exchange(acked(&script, 2000, 1500), 0);
    assert_eq!(sent.iter().map(offset).collect::<Vec<_>>(), [2000]);
}

/// RFC 9293 section 3.8.6.1, with our form of probe: no payload, one below SND.UNA.
#[test]
fn rfc9293_s3_8_6_1_a_closed_window_is_probed_with_back_off_and_without_data() {
    let mut script = closed_to(0, Stream::new(9000, 600, false));
    assert!(script.run().is_empty());
    let probes = script.wait(ms(3_020));
    let times: Vec<u64> = probes.iter().map(|(t, _)| t / 1000).collect();
    assert_eq!(times, [201, 603, 1407, 3015]);
    assert!(probes.iter().all(|(_, s)| s.payload_len == 0 && s.seq == iss(0).sub(1)));
    // The answer opens the window.
    let sent = script.exchange(acked(&script, 0, 60_000), 0);
    assert!(sent.len() >= 10 && sent.iter().all(|s| s.payload_len == 600));
    assert_eq!(script.conn.counters().window_probes, 4);
}

/// A fence, for instance, may hold back what the upper layer has announced.
#[test]
fn a_window_is_not_probed_for_data_that_may_not_be_sent_yet() {
    for window in [0, 300] {
        let source = Stream { announced: true, ..Stream::new(0, 0, false) };
        let mut script = closed_to(window, source);
        assert!(script.run().is_empty());
        assert!(script.wait(ms(3_020)).is_empty(), "a window of {window} bytes");
    }
}

#[test]
fn rfc9293_s3_8_6_1_answered_probes_keep_the_connection() {
    let config = TcpConfig { user_timeout: ms(5_000), ..TcpConfig::default() };
    let mut script = Script::established(config, bulk(1));
    script.inject(acked(&script, 0, 0), 0);
    script.run();
    for _ in 0..20 {
        script.wait(ms(3_000));
        script.inject(acked(&script, 0, 0), 0);
    }
    assert_eq!(script.closed, None);
    script.wait(ms(130_000));
    assert_eq!(script.closed, Some(CloseReason::TimedOut), "silence ends it");
}

/// The window closes before the data is sent, so only `close_when_sent` announces that the user wants to close.
#[test]
fn a_closed_window_does_not_hold_up_an_orderly_close_for_longer_than_the_user_timeout() {
    let closes_after = |announced: bool| {
        let mut script = closed_to(0, bulk(5));
        if announced {
            script.conn.close_when_sent();
        }
        script.run();
        let begin = script.now;
        answered_with(&mut script, 0, 0, 120_000);
        (script.closed, script.now.since(begin))
    };
    assert_eq!(closes_after(false).0, None);
    let (closed, after) = closes_after(true);
    assert_eq!(closed, Some(CloseReason::TimedOut), "{after:?}");
    // Progress keeps the connection open: the peer accepts the data in time.
    let mut script = closed_to(0, bulk(5));
    script.conn.close_when_sent();
    script.run();
    answered_with(&mut script, 0, 0, 25_000);
    script.inject(acked(&script, 0, 5000), 0);
    assert_eq!(script.run().len(), 5);
    script.now += ms(1);
    script.ack(5000, &[]);
    script.wait(ms(10_000));
    assert_eq!(script.closed, None);
}

#[test]
fn a_window_that_fits_only_smaller_segments_is_used_after_the_persist_timer() {
    // A byte stream may be cut to fit; units of 600 bytes may not.
    let mut script = closed_to(300, bulk(5));
    assert!(script.run().is_empty(), "RFC 9293 section 3.8.6.2.1: no silly segment");
    let sent = script.wait(ms(201));
    assert_eq!(sent.iter().map(|(_, s)| s.payload_len).collect::<Vec<_>>(), [300]);

    let mut script = closed_to(300, Stream::new(6000, 600, false));
    script.run();
    let sent = script.wait(ms(201));
    assert_eq!(sent.iter().map(|(_, s)| s.payload_len).collect::<Vec<_>>(), [0], "a probe, not a part");
}

/// A peer whose window stays at half a segment gets such a part with each override time-out. Each acknowledgment ends the
/// back-off; with it, the parts came each 7.5 s in the end.
#[test]
fn rfc9293_s3_8_6_2_1_a_window_that_stays_small_is_used_without_back_off() {
    let mut script = closed_to(500, bulk(40));
    assert!(script.run().is_empty());
    for part in 0..12 {
        let sent = script.wait(ms(1_000));
        assert_eq!(sent.iter().map(|(_, s)| s.payload_len).collect::<Vec<_>>()[..1], [500], "part {part}");
        assert!((100_000..=1_000_000).contains(&sent[0].0), "part {part} after {} us", sent[0].0);
        assert!(script.exchange(acked(&script, 500 * (part + 1), 500), 0).is_empty());
    }
}

/// Both ends have filled the other's window, and their applications read nothing for minutes. The window probe of one end once took
/// the place of the ACK that it owed, which the other end never got.
#[test]
fn sim_a_window_probe_does_not_replace_the_acknowledgment_that_is_owed() {
    const WINDOW: u32 = 20_000;
    let faults = Faults { delay: us(50), ..Faults::default() };
    let sources = [Stream::new(2_000_000, 0, false), Stream::new(2_000_000, 0, false)];
    let mut pair = Pair::new(&[fixed(WINDOW); 2], &[faults; 2], sources, 3);
    pair.open(0);
    pair.run_until(at_ms(60_000), |p| {
        for end in &mut p.ends {
            if let Some(conn) = &mut end.conn {
                conn.withheld((end.taken as usize).min(WINDOW as usize));
            }
        }
        p.ends.iter().all(|e| e.taken >= 19_000)
    });
    let end = pair.now + ms(180_000);
    pair.run_until(end + ms(60_000), |p| p.now >= end || p.ends.iter().any(|e| e.closed.is_some()));
    assert_eq!(pair.ends.each_ref().map(|e| e.closed), [None; 2]);
    for end in &mut pair.ends {
        end.conn.as_mut().unwrap().withheld(0);
    }
    pair.run_until(end + ms(200_000), |p| p.ends.iter().all(|e| e.acked == e.source.total));
    pair.tear_down();
}

#[test]
fn rfc9293_s3_8_6_1_a_shrunk_window_is_survived() {
    let mut script = Script::established(TcpConfig::default(), bulk(20));
    assert_eq!(script.run().len(), 10);
    let shrunk = acked(&script, 2000, 0);
    assert!(script.exchange(shrunk, 0).is_empty(), "no new data");
    assert_eq!(script.conn.info().snd_wnd, 0);
    // Data sent before is retransmitted until the window opens or the peer falls silent.
    let seen: Vec<i32> = script.wait(ms(1_000)).iter().map(|(_, s)| offset(s)).collect();
    assert!(seen.contains(&2000) && seen.iter().all(|at| (2000..10_000).contains(at)), "{seen:?}");
    let opened = acked(&script, 10_000, 5000);
    assert_eq!(script.exchange(opened, 0).first().map(offset), Some(10_000));
}

#[test]
fn rfc9293_s3_4_a_reset_is_accepted_while_the_window_is_closed() {
    let mut script = with_our_window_closed(silent());
    assert_eq!(script.conn.info().rcv_wnd, 0);
    let flags = Flags { rst: true, ..Flags::default() };
    let reset = |seq| Fields { seq: super::irs(seq), flags, ..plain(&script) };
    let (beyond, exact) = (reset(4_001), reset(4_000));
    assert_eq!(script.inject(beyond, 0).closed, None);
    assert_eq!(script.inject(exact, 0).closed, Some(CloseReason::Reset));
}

#[test]
fn rfc9293_s3_10_7_4_old_segments_do_not_change_the_window() {
    let mut script = Script::established(TcpConfig::default(), bulk(3));
    script.run();
    script.data(0, 10);
    let new = Fields { window: 5000, ack: iss(2000), seq: super::irs(10), ..plain(&script) };
    script.inject(new, 0);
    let wnd = script.conn.info().snd_wnd;
    let old = Fields { window: 77, ack: iss(1000), seq: super::irs(0), ..plain(&script) };
    script.inject(old, 10);
    assert_eq!((wnd, script.conn.info().snd_wnd), (5000, 5000));
}

#[test]
fn withheld_bytes_shrink_the_window_without_moving_its_right_edge() {
    let mut script = Script::established(fixed(20_000), silent());
    script.run();
    let mut edge = 20_000;
    for i in 0..19 {
        script.data(i * 1000, 1000);
        script.conn.withheld((i as usize + 1) * 1000);
        script.conn.flush_ack();
        for ack in script.run() {
            let now = ack.ack.since(super::irs(0)) as u32 + u32::from(ack.window);
            assert!(now >= edge, "the right edge moved left: {now} after {edge}");
            edge = now;
        }
    }
    assert_eq!(edge, 20_000);
    // Space again: a window update is sent at once.
    script.conn.withheld(0);
    let [update] = script.run()[..] else { panic!("a window update") };
    assert_eq!(update.window, 20_000);
}

#[test]
fn rfc9293_s3_8_6_2_2_the_window_opens_in_steps_of_a_segment() {
    let mut script = Script::established(fixed(8_000), silent());
    script.run();
    for i in 0..8 {
        script.conn.withheld((i as usize + 1) * 1000);
        script.data(i * 1000, 1000);
    }
    script.conn.flush_ack();
    script.run();
    assert_eq!(script.conn.info().rcv_wnd, 0);
    script.conn.withheld(7_500);
    assert!(script.run().is_empty(), "half a segment is not worth a window update");
    script.conn.withheld(6_500);
    assert_eq!(script.run().len(), 1);
}

#[test]
fn with_a_closed_window_acks_are_processed_but_data_is_not() {
    let mut script = with_our_window_closed(bulk(2));
    let probe = Fields { seq: super::irs(4_000), ack: iss(2000), ..plain(&script) };
    let receipt = script.inject(probe, 1);
    assert_eq!((receipt.arrival, receipt.acked), (None, Some(2000)));
    let [answer] = script.run()[..] else { panic!("the probe is answered") };
    assert_eq!((answer.ack, answer.window), (super::irs(4_000), 0));
}

#[test]
fn rfc7323_s2_windows_are_scaled_both_ways_but_not_in_the_syn() {
    let config = TcpConfig { receive_window: 1 << 30, timestamps: false, ..TcpConfig::default() };
    let mut script = Script::connecting(config, silent());
    let syn = script.run()[0];
    assert_eq!((syn.window, syn.options.window_scale), (65_535, Some(14)));
    let syn = Script::connecting(fixed(10_000), silent()).run()[0];
    assert_eq!(
        (syn.window, syn.options.window_scale),
        (10_000, Some(0)),
        "offered, so that the peer may scale"
    );
    script.syn_ack(Options { window_scale: Some(3), ..Options::default() });
    let ack = script.run()[0];
    assert_eq!(ack.window, 65_535, "2^30 needs one bit more than 16 and 14 give");
    assert_eq!(script.conn.info().snd_wnd, 65_535, "not scaled in the SYN");
    script.inject(Fields { window: 100, ..plain(&script) }, 0);
    assert_eq!(script.conn.info().snd_wnd, 800);
}

#[test]
fn without_scaling_by_the_peer_our_window_is_at_most_65535() {
    let mut script = Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, silent());
    script.run();
    script.syn_ack(Options::default());
    assert_eq!(script.run()[0].window, 65_535);
    assert_eq!(script.conn.info().rcv_wnd, 65_535);
}

#[test]
fn room_and_frames_bound_what_one_call_sends() {
    let mut script = Script::established(TcpConfig { max_chunks: 5, ..TcpConfig::default() }, bulk(20));
    assert_eq!(script.run_with_room(2).len(), 2);
    assert_eq!(script.run().len(), 3);
    assert_eq!(script.conn.info().chunks_retained, 5);
    assert_eq!(script.ack(1000, &[]).len(), 1);
}

#[test]
fn nothing_is_sent_that_the_source_does_not_have() {
    let mut script = idle();
    script.run();
    assert!(script.wait(ms(100_000)).is_empty());
    assert_eq!(script.conn.deadline(), None);
}

/// For `time` milliseconds the peer answers whatever the connection sends with `window` and acknowledges nothing beyond
/// `acked_to`. Returns the number of answers.
fn answered_with(script: &mut Script, acked_to: u32, window: u16, time: u64) -> usize {
    let end = script.now + ms(time);
    let mut answers = 0;
    while let Some(next) = script.conn.deadline().filter(|at| *at <= end) {
        if !script.wait(next.since(script.now)).is_empty() {
            script.wait(ms(20));
            while !script.exchange(acked(script, acked_to, window), 0).is_empty() {}
            answers += 1;
        }
    }
    script.now = end;
    answers
}

/// The peer's first window allows a segment, then it closes over the segment in flight.
#[test]
fn rfc9293_s3_8_6_1_a_window_closed_over_data_in_flight_spins_no_timer_and_ends_nothing() {
    for config in [TcpConfig::default(), super::without_sack()] {
        let mut script = Script::established(config, bulk(1));
        assert_eq!(script.run().len(), 1);
        script.inject(acked(&script, 0, 0), 0);
        let answers = answered_with(&mut script, 0, 0, 600_000);
        assert!((60..120).contains(&answers), "{answers} retransmissions in ten minutes");
        assert_eq!(script.closed, None);
        // The window opens: the user timeout begins with the next retransmission.
        script.inject(acked(&script, 0, 5000), 0);
        script.wait(ms(29_000));
        assert_eq!(script.closed, None);
        script.wait(ms(62_000));
        assert_eq!(script.closed, Some(CloseReason::TimedOut));
    }
}

#[test]
fn rfc9293_s3_8_6_1_silence_behind_a_closed_window_times_out() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    script.inject(acked(&script, 0, 0), 0);
    answered_with(&mut script, 0, 0, 100_000);
    script.wait(ms(92_000));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

/// SHLD-17: the peer need not accept data beyond the right edge that it has moved left.
#[test]
fn rfc9293_s3_8_6_data_beyond_a_shrunk_edge_does_not_time_out() {
    let mut script = Script::established(TcpConfig::default(), bulk(1));
    script.run();
    // Less than the smallest segment that a narrow path leads to.
    script.inject(acked(&script, 0, 200), 0);
    answered_with(&mut script, 0, 200, 300_000);
    assert_eq!(script.closed, None);
    // Data within the window does time out.
    script.inject(acked(&script, 0, 1000), 0);
    answered_with(&mut script, 0, 1000, 92_000);
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

/// The user timeout runs from the first probe without an answer, not from the last answer.
#[test]
fn rfc9293_s3_8_6_1_probes_far_apart_that_are_answered_keep_the_connection() {
    let mut script = closed_to(0, bulk(1));
    script.run();
    let answers = answered_with(&mut script, 0, 0, 3_600_000);
    assert!(answers > 60, "{answers}");
    assert_eq!(script.closed, None);
    let start = script.now;
    while script.closed.is_none() {
        script.wait(ms(1_000));
    }
    assert!(script.now.since(start) <= ms(39_000), "a pause, and the user timeout from the first probe");
}

/// As RFC 6429 explains: a peer that answers probes may keep a connection open, but not one that its user has closed.
#[test]
fn a_closed_window_does_not_keep_a_connection_that_we_have_closed() {
    let mut script = Script::established(TcpConfig::default(), Stream::new(1000, 0, true));
    assert_eq!(script.run().len(), 2, "data and FIN");
    script.inject(acked(&script, 0, 0), 0);
    answered_with(&mut script, 0, 0, 31_000);
    assert_eq!(script.closed, Some(CloseReason::TimedOut));

    let mut script = closed_to(0, bulk(1));
    script.run();
    answered_with(&mut script, 0, 0, 10_000);
    script.conn.close();
    answered_with(&mut script, 0, 0, 60_000);
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}
