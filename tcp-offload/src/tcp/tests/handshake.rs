//! Opening: RFC 9293 sections 3.5, 3.10.7.2 to 3.10.7.4; RFC 7323, 2018 and 6298 where they touch the SYN.

use std::{net::SocketAddr, sync::Arc};

use super::{idle, irs, iss, silent, without_sack};
use crate::{
    seq::SeqNum,
    sim,
    tcp::{
        Connection, SoftError, State, TcpConfig,
        testing::{IRS, ISS, Script, Stream, at_ms, ms, unhashed},
    },
    ulp::CloseReason,
    wire::{Fields, Flags, Options, Timestamps},
};

fn flags(fields: Flags) -> Flags {
    fields
}

#[test]
fn rfc9293_s3_5_active_open() {
    let mut script = Script::connecting(TcpConfig { ecn: false, ..TcpConfig::default() }, silent());
    let [syn] = script.run()[..] else { panic!("one SYN") };
    assert_eq!(syn.flags, flags(Flags { syn: true, ..Flags::default() }));
    assert_eq!((syn.seq, syn.window), (SeqNum::new(ISS), 65_535));
    assert_eq!(syn.options.mss, Some(1460), "the MTU less the fixed headers, options not subtracted");
    assert_eq!(syn.options.window_scale, Some(8), "8 MiB in 16 bits");
    assert!(syn.options.sack_permitted);
    assert_eq!(syn.options.timestamps.map(|t| t.echo), Some(0), "RFC 7323 section 3.2: without ACK");
    script.stamp(77, 0);
    let mut options = script.template.options;
    (options.mss, options.window_scale) = (Some(1400), Some(9));
    script.syn_ack(options);
    script.template.options = Options::default();
    assert_eq!(script.conn.state(), State::Established);
    let [ack] = script.run()[..] else { panic!("one ACK") };
    assert_eq!((ack.seq, ack.ack), (iss(0), irs(0)));
    assert_eq!(ack.flags, flags(Flags { ack: true, ..Flags::default() }));
    assert_eq!(ack.options.timestamps.map(|t| t.echo), Some(77));
    assert_eq!(script.conn.emss(), 1400 - 12, "RFC 9293 section 3.7.1: options count against the EMSS");
}

#[test]
fn rfc9293_s3_5_passive_open_answers_only_what_was_offered() {
    let mut script =
        Script::accepting(TcpConfig::default(), Options { mss: Some(900), ..Options::default() });
    let [answer] = script.run()[..] else { panic!("one SYN-ACK") };
    assert_eq!(answer.flags, Flags { syn: true, ack: true, ..Flags::default() });
    assert_eq!((answer.seq, answer.ack), (SeqNum::new(ISS), irs(0)));
    let Options { window_scale, sack_permitted, timestamps, .. } = answer.options;
    assert_eq!((window_scale, sack_permitted, timestamps), (None, false, None));
    let receipt = script.inject(script.template, 0);
    assert!(receipt.established);
    assert_eq!((script.conn.state(), script.conn.emss()), (State::Established, 900));

    let offered = Options {
        window_scale: Some(20),
        sack_permitted: true,
        timestamps: Some(Timestamps { value: 5, echo: 0 }),
        ..Options::default()
    };
    let mut script = Script::accepting(TcpConfig::default(), offered);
    let [answer] = script.run()[..] else { panic!("one SYN-ACK") };
    assert!(answer.options.sack_permitted);
    assert_eq!(answer.options.timestamps.map(|t| t.echo), Some(5));
    script.stamp(6, 0);
    script.template.window = 3;
    script.inject(script.template, 0);
    assert_eq!(script.conn.info().snd_wnd, 3 << 14, "RFC 7323 section 2.3: never more than 14");
    assert_eq!(script.conn.emss(), 536 - 12, "RFC 9293 section 3.7.1: 536 without an MSS option");
}

#[test]
fn rfc9293_s3_5_data_in_the_ack_of_the_handshake_is_taken() {
    let mut script = Script::accepting(TcpConfig::default(), Options::default());
    script.run();
    let receipt = script.inject(script.template, 100);
    assert!(receipt.established && receipt.arrival.is_some());
    assert_eq!(script.conn.contiguous(), 100);
}

#[test]
fn rfc9293_s3_5_simultaneous_open() {
    let mut script = Script::connecting(without_sack(), silent());
    script.run();
    script.now += ms(1);
    let syn =
        Fields { seq: SeqNum::new(IRS), flags: Flags { syn: true, ..Flags::default() }, ..script.template };
    let [answer] = script.exchange(syn, 0)[..] else { panic!("one SYN-ACK") };
    assert_eq!(script.conn.state(), State::SynReceived);
    assert_eq!((answer.seq, answer.ack, answer.flags.syn), (SeqNum::new(ISS), irs(0), true));
    let syn_ack = Fields {
        seq: SeqNum::new(IRS),
        flags: Flags { syn: true, ack: true, ..Flags::default() },
        ..script.template
    };
    assert!(script.inject(syn_ack, 0).established);
    assert_eq!(script.conn.state(), State::Established);
}

/// The reset is reported to the end that opened actively; a passive open had reported nothing yet.
#[test]
fn rfc9293_s3_10_7_4_a_reset_refuses_an_active_open_even_in_syn_received() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    let flags = Flags { syn: true, ..Flags::default() };
    script.exchange(Fields { seq: SeqNum::new(IRS), flags, ..script.template }, 0);
    assert_eq!(script.conn.state(), State::SynReceived);
    let reset = Fields { flags: Flags { rst: true, ..Flags::default() }, ..script.template };
    assert_eq!(script.inject(reset, 0).closed, Some(CloseReason::Refused));
}

#[test]
fn rfc9293_s3_7_1_the_default_mss_is_536_or_1220() {
    let emss = |local: &str, remote: &str| {
        let path = sim::path(local.parse::<SocketAddr>().unwrap(), remote.parse::<SocketAddr>().unwrap());
        let config = TcpConfig { timestamps: false, ..TcpConfig::default() };
        Connection::connect(at_ms(1), &Arc::new(config), path, unhashed(ISS)).emss()
    };
    assert_eq!(emss("10.0.0.1:1", "10.0.0.2:2"), 536);
    assert_eq!(emss("[fd00::1]:1", "[fd00::2]:2"), 1220);
}

#[test]
fn rfc9293_s3_10_7_3_bad_acks_in_syn_sent_are_reset() {
    for ack in [ISS, ISS + 2, ISS.wrapping_sub(70_000)] {
        let mut script = Script::connecting(TcpConfig::default(), silent());
        script.run();
        let bad = Fields { ack: SeqNum::new(ack), ..script.template };
        let [reset, syn] = script.exchange(bad, 0)[..] else { panic!("a RST and our SYN") };
        assert_eq!(reset.flags, Flags { rst: true, ..Flags::default() });
        assert_eq!((reset.seq, script.conn.state()), (SeqNum::new(ack), State::SynSent));
        assert_eq!((syn.flags.syn, syn.flags.ack, syn.seq), (true, false, SeqNum::new(ISS)));
        let [reset] = script.exchange(bad, 0)[..] else { panic!("the SYN is repeated once only") };
        assert_eq!(reset.seq, SeqNum::new(ack));
        let bad_reset = Fields { flags: Flags { ack: true, rst: true, ..Flags::default() }, ..bad };
        assert!(script.exchange(bad_reset, 0).is_empty());
        assert_eq!(script.conn.state(), State::SynSent);
    }
}

#[test]
fn rfc9293_s3_10_7_3_an_acceptable_reset_refuses() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    let blind = Fields { flags: Flags { rst: true, ..Flags::default() }, ..script.template };
    script.inject(blind, 0);
    assert_eq!(script.conn.state(), State::SynSent, "no ACK: ignored");
    let reset = Fields { flags: Flags { rst: true, ack: true, ..Flags::default() }, ..script.template };
    assert_eq!(script.inject(reset, 0).closed, Some(CloseReason::Refused));
    assert!(script.conn.is_closed());
}

#[test]
fn rfc9293_s3_10_7_4_a_reset_ends_a_half_open_connection() {
    let mut script = Script::accepting(TcpConfig::default(), Options::default());
    script.run();
    let reset = Fields { flags: Flags { rst: true, ..Flags::default() }, ..script.template };
    assert_eq!(script.inject(reset, 0).closed, Some(CloseReason::Reset));
}

#[test]
fn rfc9293_s3_10_7_4_a_bad_ack_in_syn_received_is_reset() {
    let mut script = Script::accepting(TcpConfig::default(), Options::default());
    script.run();
    let bad = Fields { ack: iss(7), ..script.template };
    let [reset] = script.exchange(bad, 0)[..] else { panic!("one RST") };
    assert_eq!((reset.flags.rst, reset.seq), (true, iss(7)));
    assert_eq!(script.conn.state(), State::SynReceived);
}

#[test]
fn rfc6298_s2_1_syns_are_retransmitted_after_1_2_4_seconds_until_the_limit() {
    let config = TcpConfig { connect_timeout: ms(10_000), ..TcpConfig::default() };
    let mut script = Script::connecting(config, silent());
    script.run();
    let times: Vec<u64> = script.wait(ms(20_000)).iter().map(|(t, _)| t / 1000).collect();
    assert_eq!(times, [1000, 3000, 7000]);
    assert_eq!(script.closed, Some(CloseReason::TimedOut));
}

#[test]
fn rfc6298_s5_7_after_lost_syns_data_starts_with_3s_and_after_two_with_one_segment() {
    for (sack, lost, segments) in [(false, 1, 9), (true, 1, 9), (true, 2, 1)] {
        let config = TcpConfig { sack, timestamps: false, ..TcpConfig::default() };
        let mut script = Script::connecting(config, Stream::new(9000, 0, false));
        script.run();
        assert_eq!(script.wait(ms(lost * 1500)).len(), lost as usize);
        script.syn_ack(Options { mss: Some(1000), sack_permitted: sack, ..Options::default() });
        assert_eq!(script.run().len(), segments, "SACK {sack}, {lost} lost");
        let again = script.wait(ms(4000));
        assert_eq!(again.len(), 1, "SACK {sack}, {lost} lost");
        assert_eq!(again[0].0, 3_000_000, "SACK {sack}, {lost} lost");
    }
}

/// The echo tells which of two SYNs the SYN-ACK answers. Without it, the next loss cost 3 s.
#[test]
fn rfc7323_s4_after_a_lost_syn_the_echo_measures_the_round_trip() {
    for (answered, srtt) in [(1, 20), (0, 1020)] {
        let mut script = Script::connecting(TcpConfig::default(), Stream::new(9000, 0, false));
        let mut syns = script.run();
        syns.extend(script.wait(ms(1000)).into_iter().map(|(_, syn)| syn));
        assert_eq!(syns.len(), 2);
        script.stamp(77, syns[answered].options.timestamps.unwrap().value);
        let options = Options { mss: Some(1000), sack_permitted: true, ..script.template.options };
        script.syn_ack_after(ms(20), options);
        let info = script.conn.info();
        assert_eq!(info.srtt, Some(ms(srtt)), "SYN {answered}");
        assert!(info.rto < ms(4 * srtt + 200), "{info:?}");
    }
    // An echo of another time measures nothing.
    let mut script = Script::connecting(TcpConfig::default(), Stream::new(9000, 0, false));
    let syn = script.run()[0];
    script.wait(ms(1000));
    script.stamp(77, syn.options.timestamps.unwrap().value.wrapping_sub(70_000));
    let options = Options { mss: Some(1000), sack_permitted: true, ..script.template.options };
    script.syn_ack_after(ms(20), options);
    assert_eq!(script.conn.info().srtt, None);
}

/// Such a connection was established, and nothing ever arrived.
#[test]
fn rfc9293_s3_7_1_a_peer_whose_segments_are_too_small_is_refused() {
    for (mss, refused) in [(255, true), (256, false)] {
        let mut script =
            Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, silent());
        script.run();
        script.syn_ack(Options { mss: Some(mss), ..Options::default() });
        script.run();
        assert_eq!(script.closed, refused.then_some(CloseReason::SegmentsTooSmall), "MSS {mss}");
    }
}

/// The window of every SYN is unscaled, also that of the SYN-ACK which completes a simultaneous open.
#[test]
fn rfc7323_s2_2_the_window_of_a_simultaneous_opens_syn_ack_is_not_scaled() {
    let mut script = Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, silent());
    script.run();
    script.now += ms(1);
    let options = Options { mss: Some(1000), window_scale: Some(10), ..Options::default() };
    let seq = SeqNum::new(IRS);
    let syn = Flags { syn: true, ..Flags::default() };
    script.exchange(Fields { seq, flags: syn, options, window: 4000, ..Fields::default() }, 0);
    assert_eq!(script.conn.state(), State::SynReceived);
    let flags = Flags { ack: true, ..syn };
    script.exchange(Fields { seq, flags, options, window: 4000, ..script.template }, 0);
    assert_eq!((script.conn.state(), script.conn.info().snd_wnd), (State::Established, 4000));
    script.exchange(Fields { window: 4, ..script.template }, 0);
    assert_eq!(script.conn.info().snd_wnd, 4 << 10);
}

#[test]
fn a_retransmitted_syn_is_answered_by_another_syn_ack() {
    let mut script = Script::accepting(TcpConfig::default(), Options::default());
    script.run();
    let syn =
        Fields { seq: SeqNum::new(IRS), flags: Flags { syn: true, ..Flags::default() }, ..script.template };
    let [answer] = script.exchange(syn, 0)[..] else { panic!("one SYN-ACK") };
    assert!(answer.flags.syn && answer.flags.ack);
}

#[test]
fn rfc6928_s2_the_initial_window_is_ten_segments() {
    let mut script = Script::established(TcpConfig::default(), Stream::new(50_000, 0, false));
    assert_eq!(script.conn.info().ssthresh, u64::MAX, "RFC 5681 section 3.1: arbitrarily high");
    let sent = script.run();
    assert_eq!(sent.len(), 10);
    assert!(sent.iter().all(|s| s.payload_len == 1000 && s.flags.ack && !s.flags.psh));
}

#[test]
fn rfc9293_s3_9_1_2_the_last_segment_of_the_data_at_hand_is_pushed() {
    let mut script = Script::established(TcpConfig::default(), Stream::new(2500, 0, false));
    let pushed: Vec<_> = script.run().iter().map(|s| (s.payload_len, s.flags.psh)).collect();
    assert_eq!(pushed, [(1000, false), (1000, false), (500, true)]);
}

#[test]
fn rfc9293_s3_10_4_close_in_syn_sent_just_ends() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    script.conn.close();
    assert!(script.run().is_empty());
    assert_eq!(script.closed, Some(CloseReason::Graceful));
}

#[test]
fn rfc9293_s3_10_5_abort_sends_a_reset_in_synchronized_states_only() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    script.conn.abort();
    assert!(script.run().is_empty());
    assert_eq!(script.closed, Some(CloseReason::Aborted));

    let mut script = Script::established(TcpConfig::default(), Stream::new(300, 0, false));
    script.run();
    script.conn.abort();
    let [reset] = script.run()[..] else { panic!("one RST") };
    assert_eq!((reset.flags.rst, reset.seq), (true, iss(300)));
    assert_eq!(script.closed, Some(CloseReason::Aborted));
    assert!(script.conn.is_closed());
    let Script { conn, .. } = &mut script;
    let _ = conn;
}

#[test]
fn the_default_connection_of_the_tests_is_established() {
    let script = idle();
    assert_eq!((script.conn.state(), script.conn.emss()), (State::Established, 1000));
}

#[test]
fn rfc7323_s5_2_a_refusal_echoes_the_timestamp_that_it_answers() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    script.stamp(4711, 0);
    let bad = Fields { ack: SeqNum::new(ISS + 2), ..script.template };
    let [reset, _syn] = script.exchange(bad, 0)[..] else { panic!("a RST and our SYN") };
    assert_eq!(reset.options.timestamps, Some(Timestamps { value: 0, echo: 4711 }));
    assert_eq!(reset.flags, Flags { rst: true, ..Flags::default() });
}

/// RFC 9293 section 3.5, figure 7: the SYN-ACK has the sequence number of the SYN before it. A SYN-ACK with another
/// number belongs to another incarnation or is forged.
#[test]
fn rfc9293_s3_5_a_syn_ack_with_another_number_completes_no_simultaneous_open() {
    let mut script = Script::connecting(without_sack(), silent());
    script.run();
    let syn = Flags { syn: true, ..Flags::default() };
    script.exchange(Fields { seq: SeqNum::new(IRS), flags: syn, ..script.template }, 0);
    assert_eq!(script.conn.state(), State::SynReceived);
    for seq in [IRS + 1, IRS + 77, IRS - 1, IRS ^ 0x8000_0000] {
        let flags = Flags { ack: true, ..syn };
        let other = Fields { seq: SeqNum::new(seq), flags, ..script.template };
        let [challenge] = script.exchange(other, 0)[..] else { panic!("a challenge ACK for {seq}") };
        assert_eq!((challenge.flags.syn, challenge.flags.rst, challenge.ack), (false, false, irs(0)));
        assert_eq!(script.conn.state(), State::SynReceived);
    }
}

/// MUST-22: excessive retransmissions of a SYN are reported like those of data. MUST-20: the next hop is resolved
/// again.
#[test]
fn rfc9293_s3_8_3_syns_without_an_answer_are_reported() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    script.wait(ms(6_900));
    assert_eq!((script.conn.take_soft_error(), script.conn.take_next_hop_doubt()), (None, false));
    script.wait(ms(200));
    assert_eq!(script.conn.take_soft_error(), Some(SoftError::NoAnswer), "three SYNs without an answer");
    assert!(script.conn.take_next_hop_doubt() && !script.conn.take_next_hop_doubt());
    script.wait(ms(8_000));
    assert_eq!(script.conn.take_soft_error(), None, "reported once");
    assert!(script.conn.take_next_hop_doubt(), "but the next hop is to be resolved again");
}
