//! Closing: RFC 9293 sections 3.6 and 3.10.7.4, TIME-WAIT with RFC 6191.

use std::time::Duration;

use super::{idle, irs, iss, plain, silent, unprobed};
use crate::{
    seq::SeqNum,
    tcp::{
        State, TcpConfig,
        testing::{IRS, Script, Stream, ms},
    },
    ulp::CloseReason,
    wire::{Fields, Flags, Options, Segment},
};

const FIN: Flags = Flags { fin: true, ack: true, syn: false, rst: false, psh: false, ece: false, cwr: false };

fn fin(script: &Script, offset: u32, acked: u32) -> Fields {
    Fields { seq: irs(offset), ack: iss(acked), flags: FIN, ..plain(script) }
}

fn closing(data: u64) -> Script {
    let mut script = Script::established(unprobed(), Stream::new(data, 0, true));
    let sent = script.run();
    let last = sent.last().expect("a FIN");
    assert!(last.flags.fin && last.flags.ack);
    assert_eq!(last.seq, iss(data as u32));
    assert_eq!(script.conn.state(), State::FinWait1);
    script
}

#[test]
fn rfc9293_s3_6_we_close_first() {
    let mut script = closing(500);
    script.ack(501, &[]);
    assert_eq!(script.conn.state(), State::FinWait2);
    script.data(0, 10);
    assert_eq!(script.conn.contiguous(), 10, "the other direction stays open");
    let receipt = script.inject(fin(&script, 10, 501), 0);
    assert_eq!(receipt.closed, Some(CloseReason::Graceful), "reported when TIME-WAIT begins");
    assert_eq!(script.conn.state(), State::TimeWait);
    assert!(script.conn.peer_closed() && !script.conn.is_closed());
    let [ack] = script.run()[..] else { panic!("one ACK") };
    assert_eq!((ack.seq, ack.ack), (iss(501), irs(11)));
    // The peer retransmits its FIN: it is acknowledged again, and TIME-WAIT restarts.
    script.wait(ms(600));
    assert_eq!(script.exchange(fin(&script, 10, 501), 0).len(), 1);
    script.wait(ms(2_402));
    assert_eq!(script.conn.state(), State::TimeWait);
    script.wait(ms(1));
    assert!(script.conn.is_closed(), "after three times 201 + 600 ms");
}

/// A connection in TIME-WAIT: in FIN-WAIT-2 the peer was silent for `silence`, then sent its FIN.
fn time_wait_after(silence: Duration) -> Script {
    let mut script = closing(0);
    script.ack(1, &[]);
    script.wait(silence);
    let [ack] = script.exchange(fin(&script, 0, 1), 0)[..] else { panic!("one ACK") };
    assert_eq!((ack.ack, script.conn.state()), (irs(1), State::TimeWait));
    script
}

/// Retransmits the peer's FIN, because our ACK of it was lost, once after each of `gaps` milliseconds. Returns how many
/// are answered before the first that is not.
fn answered(script: &mut Script, gaps: &[u64]) -> usize {
    let answered = |gap: &&u64| {
        script.wait(ms(**gap));
        script.exchange(fin(script, 0, 1), 0).first().is_some_and(|ack| ack.ack == irs(1))
    };
    gaps.iter().take_while(answered).count()
}

/// A peer whose FIN was lost three times has a time-out of 1.6 s: more than TIME-WAIT would be.
#[test]
fn rfc9293_s3_10_7_4_time_wait_outlasts_a_peer_that_has_backed_off() {
    let mut script = time_wait_after(ms(200 + 400 + 800));
    assert_eq!(answered(&mut script, &[1_600, 3_200, 6_400, 12_800, 25_600]), 5);
    script.wait(ms(61_000));
    assert!(script.conn.is_closed());
}

#[test]
fn rfc9293_s3_10_7_4_time_wait_follows_retransmissions_that_back_off() {
    assert_eq!(answered(&mut time_wait_after(ms(0)), &[200, 400, 800, 1_600, 3_200, 6_400, 12_800]), 7);
}

#[test]
fn time_wait_is_short_after_a_prompt_close_and_lasts_at_most_a_minute() {
    let lasts = |silence, time| {
        let mut script = time_wait_after(ms(silence));
        script.wait(ms(time));
        !script.conn.is_closed()
    };
    assert!(lasts(0, 999) && !lasts(0, 1_000));
    assert!(lasts(50_000, 59_999) && !lasts(50_000, 60_000));
}

/// An idle connection that we close: the peer's FIN arrives at once, however long the connection was idle.
#[test]
fn silence_before_our_fin_does_not_prolong_time_wait() {
    let mut script = idle();
    script.run();
    script.wait(ms(600_000));
    script.source = Stream::new(0, 0, true);
    script.run();
    script.inject(fin(&script, 0, 1), 0);
    assert_eq!(script.conn.state(), State::TimeWait);
    script.wait(ms(1_000));
    assert!(script.conn.is_closed());
}

#[test]
fn rfc9293_s3_10_7_4_retransmitted_data_restarts_time_wait() {
    let mut script = closing(0);
    script.ack(1, &[]);
    script.data(0, 10);
    script.inject(fin(&script, 10, 1), 0);
    for _ in 0..3 {
        script.wait(ms(900));
        let [ack] = script.data(0, 10)[..] else { panic!("one ACK") };
        assert_eq!((ack.ack, script.conn.state()), (irs(11), State::TimeWait));
    }
}

#[test]
fn time_wait_is_longer_than_the_time_out_of_a_long_path() {
    let mut script =
        Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, Stream::new(0, 0, true));
    script.run();
    script.now += ms(899);
    script.syn_ack(Options { mss: Some(1000), ..Options::default() });
    script.run();
    script.wait(ms(900));
    script.inject(fin(&script, 0, 1), 0);
    let rto = script.conn.info().rto;
    assert!(rto > ms(2_000), "{rto:?}");
    script.wait(rto * 3);
    assert_eq!(script.conn.state(), State::TimeWait);
    script.wait(ms(3 * 900));
    assert!(script.conn.is_closed());
}

#[test]
fn rfc9293_s3_6_the_peer_closes_first() {
    let mut script = idle();
    script.run();
    let receipt = script.inject(fin(&script, 0, 0), 100);
    assert!(receipt.arrival.is_some(), "data and FIN in one segment");
    assert!(script.conn.peer_closed());
    assert_eq!(script.conn.state(), State::CloseWait);
    let [ack] = script.run()[..] else { panic!("one ACK") };
    assert_eq!(ack.ack, irs(101));
    script.source = Stream::new(50, 0, true);
    let sent = script.run();
    assert_eq!(
        sent.iter().map(|s| (s.payload_len, s.flags.fin)).collect::<Vec<_>>(),
        [(50, false), (0, true)]
    );
    assert_eq!(script.conn.state(), State::LastAck);
    let last = Fields { seq: irs(101), ack: iss(51), ..plain(&script) };
    assert_eq!(script.inject(last, 0).closed, Some(CloseReason::Graceful));
    assert!(script.conn.is_closed());
}

#[test]
fn rfc9293_s3_6_both_close_at_once() {
    let mut script = closing(0);
    let receipt = script.inject(fin(&script, 0, 0), 0);
    assert_eq!((script.conn.state(), receipt.closed), (State::Closing, None));
    script.run();
    let ack = Fields { seq: irs(1), ack: iss(1), ..plain(&script) };
    assert_eq!(script.inject(ack, 0).closed, Some(CloseReason::Graceful));
    assert_eq!(script.conn.state(), State::TimeWait);
}

#[test]
fn rfc9293_s3_10_7_4_a_fin_that_also_acknowledges_ours_leads_to_time_wait() {
    let mut script = closing(0);
    script.inject(fin(&script, 0, 1), 0);
    assert_eq!(script.conn.state(), State::TimeWait);
}

#[test]
fn a_fin_beyond_a_gap_waits_for_the_gap() {
    let mut script = idle();
    script.run();
    let [dup] = script.exchange(fin(&script, 50, 0), 50)[..] else { panic!("an ACK at once") };
    assert_eq!(dup.ack, irs(0));
    assert_eq!(script.conn.state(), State::Established);
    script.data(0, 50);
    assert_eq!(script.conn.state(), State::CloseWait);
    assert!(script.conn.peer_closed());
}

#[test]
fn a_fin_whose_data_was_not_taken_does_not_count() {
    let mut script = idle();
    script.run();
    script.take = false;
    script.inject(fin(&script, 0, 0), 50);
    assert_eq!(script.conn.state(), State::Established);
    script.take = true;
    script.inject(fin(&script, 0, 0), 50);
    assert_eq!(script.conn.state(), State::CloseWait);
}

#[test]
fn a_lost_fin_is_retransmitted() {
    let mut script = closing(0);
    let again = script.wait(ms(1000));
    assert!(again.len() >= 2 && again.iter().all(|(_, s)| s.flags.fin && s.seq == iss(0)));
}

#[test]
fn data_after_our_fin_is_never_filled() {
    let mut script = closing(100);
    script.source.total = 900;
    assert!(script.run().is_empty());
    script.ack(101, &[]);
    assert!(script.run().is_empty());
}

#[test]
fn a_silent_peer_does_not_hold_fin_wait_2_for_ever() {
    let mut script = closing(0);
    script.ack(1, &[]);
    script.wait(ms(59_000));
    script.data(0, 10);
    script.wait(ms(59_000));
    assert_eq!(script.conn.state(), State::FinWait2);
    script.wait(ms(1_001));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

/// Both ends have closed, and `acked` bytes of our 50 are acknowledged. Returns the reason that is reported when the
/// peer then resets the connection.
fn reset_in_last_ack(acked: u32) -> CloseReason {
    let mut script = idle();
    script.run();
    script.inject(fin(&script, 0, 0), 0);
    script.source = Stream::new(50, 0, true);
    script.run();
    script.inject(Fields { seq: irs(1), ack: iss(acked), ..plain(&script) }, 0);
    assert_eq!(script.conn.state(), State::LastAck);
    let receipt = script.inject(reset(&script), 0);
    assert!(script.conn.is_closed());
    receipt.closed.unwrap()
}

/// A reset with the sequence number after the peer's FIN.
fn reset(script: &Script) -> Fields {
    Fields { seq: irs(1), flags: Flags { rst: true, ..Flags::default() }, ..plain(script) }
}

/// The peer's TIME-WAIT was over before our retransmitted FIN arrived, so no data is lost. Unacknowledged data may be
/// lost.
#[test]
fn rfc9293_s3_10_7_4_a_reset_in_last_ack_is_an_error_only_when_data_is_outstanding() {
    assert_eq!(reset_in_last_ack(50), CloseReason::Graceful);
    assert_eq!(reset_in_last_ack(0), CloseReason::Reset);
}

#[test]
fn rfc9293_s3_10_7_4_a_reset_in_closing_ends_quietly() {
    let mut script = closing(0);
    script.inject(fin(&script, 0, 0), 0);
    assert_eq!(script.conn.state(), State::Closing);
    assert_eq!(script.inject(reset(&script), 0).closed, Some(CloseReason::Graceful));
}

#[test]
fn rfc9293_s3_10_7_4_a_reset_in_time_wait_ends_quietly() {
    let mut script = closing(0);
    script.inject(fin(&script, 0, 1), 0);
    let reset = reset(&script);
    script.closed = None;
    assert_eq!(script.inject(reset, 0).closed, None, "it was reported at the beginning of TIME-WAIT");
    assert!(script.conn.is_closed());
}

fn syn(seq: SeqNum) -> Segment {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    let mut syn = script.run()[0];
    (syn.seq, syn.options) = (seq, Options::default());
    (syn.flags.ece, syn.flags.cwr) = (false, false);
    syn
}

#[test]
fn rfc6191_s2_a_later_syn_may_replace_time_wait() {
    let mut script = closing(0);
    assert!(!script.conn.replaceable_by(&syn(SeqNum::new(IRS + 1000))));
    script.inject(fin(&script, 0, 1), 0);
    assert!(script.conn.replaceable_by(&syn(irs(2))));
    assert!(!script.conn.replaceable_by(&syn(irs(1))));
    assert!(!script.conn.replaceable_by(&syn(SeqNum::new(IRS - 1000))));
}

/// An established connection whose framing layer has stopped reading in the middle of the peer's stream.
fn unread(source: Stream) -> Script {
    let mut script = Script::established(unprobed(), source);
    script.run();
    script.data(0, 10);
    script.conn.flush_ack();
    script.run();
    let now = script.now;
    script.conn.stop_reading(now);
    script
}

#[test]
fn payload_after_reading_has_stopped_is_not_acknowledged() {
    let mut script = unread(silent());
    assert!(script.data(10, 100).is_empty());
    assert!(script.wait(ms(100)).is_empty());
    assert_eq!((script.conn.contiguous(), script.conn.counters().unread), (10, 1));
    // No RST before our FIN is acknowledged: the RST could overtake data sent before it.
    script.source = Stream::new(0, 0, true);
    let [fin] = script.run()[..] else { panic!("our FIN") };
    assert_eq!((fin.flags.fin, fin.ack), (true, irs(10)));
    assert!(script.data(10, 100).is_empty());
    assert_eq!(script.closed, None);
}

#[test]
fn rfc9293_s3_6_1_unread_payload_after_our_fin_is_answered_by_a_reset() {
    let mut script = unread(Stream::new(0, 0, true));
    assert_eq!(script.conn.state(), State::FinWait1);
    let data = Fields { seq: irs(10), ack: iss(1), ..plain(&script) };
    let [reset] = script.exchange(data, 100)[..] else { panic!("one RST") };
    assert_eq!((reset.flags.rst, reset.seq, reset.ack), (true, iss(1), irs(10)));
    assert_eq!(script.closed, Some(CloseReason::Aborted));
}

#[test]
fn a_peer_that_answers_our_fin_closes_gracefully_after_reading_has_stopped() {
    let mut script = unread(Stream::new(0, 0, true));
    script.inject(Fields { seq: irs(10), ack: iss(1), flags: FIN, ..plain(&script) }, 0);
    assert_eq!((script.conn.state(), script.closed), (State::TimeWait, Some(CloseReason::Graceful)));
}

/// The peer sends `len` bytes at `offset` once a second. Returns the seconds until the connection ends, at most two
/// minutes.
fn trickled(script: &mut Script, offset: u32, acked: u32, len: usize) -> usize {
    let second = |_: &usize| {
        script.wait(ms(1_000));
        script.exchange(Fields { seq: irs(offset), ack: iss(acked), ..plain(script) }, len);
        !script.conn.is_closed()
    };
    (0..120).take_while(second).count()
}

#[test]
fn a_trickle_does_not_keep_an_unread_connection_open() {
    // The FIN is never acknowledged: the user timeout applies, as for data.
    assert!(trickled(&mut unread(Stream::new(0, 0, true)), 10, 0, 1) <= 31);
    // Nothing is outstanding: duplicates in FIN-WAIT-2.
    let mut script = unread(Stream::new(0, 0, true));
    script.inject(Fields { seq: irs(10), ack: iss(1), ..plain(&script) }, 0);
    assert_eq!(script.conn.state(), State::FinWait2);
    assert!((58..=61).contains(&trickled(&mut script, 0, 1, 1)));
    // The upper layer never closes: the connection ends with a RST, because the peer has seen no FIN.
    let mut script = unread(silent());
    assert!((58..=61).contains(&trickled(&mut script, 10, 0, 1)));
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}
