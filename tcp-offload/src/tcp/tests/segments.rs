//! Received segments in synchronized states: RFC 9293 section 3.10.7.4, RFC 5961, RFC 7323 section 5.

use super::{bulk, idle, irs, iss, plain};
use crate::{
    tcp::{
        State, TcpConfig,
        ack::AckPolicy,
        testing::{Script, Stream, ms},
    },
    ulp::CloseReason,
    wire::{Fields, Flags, Options, Timestamps},
};

fn with(fields: Fields, flags: Flags) -> Fields {
    Fields { flags, ..fields }
}

const RST: Flags =
    Flags { rst: true, fin: false, syn: false, psh: false, ack: false, ece: false, cwr: false };
const SYN: Flags =
    Flags { syn: true, fin: false, rst: false, psh: false, ack: false, ece: false, cwr: false };

#[test]
fn rfc9293_s3_10_7_4_segments_outside_the_window_are_answered_and_dropped() {
    let mut script = idle();
    script.run();
    let window = script.conn.info().rcv_wnd as u32;
    for seq in [irs(window), irs(window + 1), irs(0).sub(10)] {
        let [ack] = script.exchange(Fields { seq, ..plain(&script) }, 5)[..] else { panic!("one ACK") };
        assert_eq!((ack.seq, ack.ack, ack.payload_len), (iss(0), irs(0), 0));
        assert_eq!(script.conn.contiguous(), 0);
    }
    assert_eq!(script.conn.counters().out_of_window, 3);
}

#[test]
fn rfc9293_s3_10_7_4_payload_across_the_window_edges_is_trimmed() {
    let mut script = idle();
    script.run();
    script.data(0, 100);
    script.data(50, 100);
    assert_eq!(script.conn.contiguous(), 150);
    let window = script.conn.info().rcv_wnd as u32;
    let beyond = Fields { seq: irs(150 + window - 10), ..plain(&script) };
    let arrival = script.inject(beyond, 30).arrival.expect("payload");
    assert_eq!((arrival.offset, arrival.len), (u64::from(140 + window), 10));
}

#[test]
fn rfc5961_s3_2_only_a_reset_with_the_exact_sequence_number_is_accepted() {
    let mut script = idle();
    script.run();
    assert!(script.exchange(with(Fields { seq: irs(0).sub(1), ..plain(&script) }, RST), 0).is_empty());
    let in_window = with(Fields { seq: irs(1), ..plain(&script) }, RST);
    let [challenge] = script.exchange(in_window, 0)[..] else { panic!("a challenge ACK") };
    assert_eq!((challenge.seq, challenge.ack), (iss(0), irs(0)));
    assert_eq!(script.conn.state(), State::Established);
    assert_eq!(script.inject(with(plain(&script), RST), 0).closed, Some(CloseReason::Reset));
}

#[test]
fn rfc5961_s4_2_a_syn_is_challenged_whatever_its_sequence_number() {
    let mut script = idle();
    script.run();
    for seq in [irs(0), irs(900), irs(0).sub(1), irs(0).add(1 << 30)] {
        let [challenge] = script.exchange(with(Fields { seq, ..plain(&script) }, SYN), 0)[..] else {
            panic!("a challenge ACK for {seq:?}")
        };
        assert_eq!((challenge.flags.rst, challenge.ack), (false, irs(0)));
    }
    assert_eq!(script.conn.state(), State::Established);
    // A peer that has lost the connection answers the challenge by a RST: its SYN was genuine.
    let answer = with(Fields { seq: irs(0), ..plain(&script) }, RST);
    assert_eq!(script.inject(answer, 0).closed, Some(CloseReason::Reset));
}

#[test]
fn rfc5961_s5_2_segments_with_an_ack_out_of_range_are_rejected() {
    let mut script = Script::established(TcpConfig::default(), bulk(71));
    let mut acked = 0;
    while acked < 70_000 {
        script.run();
        script.now += ms(1);
        acked = (script.source.at as u32).min(70_000);
        script.ack(acked, &[]);
    }
    for ack in [iss(71_001), iss(70_000).sub(65_536)] {
        let [answer] = script.exchange(Fields { ack, ..plain(&script) }, 10)[..] else { panic!("an ACK") };
        assert_eq!((answer.ack, script.conn.contiguous()), (irs(0), 0));
    }
    script.exchange(Fields { ack: iss(70_000).sub(65_535), ..plain(&script) }, 10);
    assert_eq!(script.conn.contiguous(), 10, "an old but acceptable ACK brings data");
    assert_eq!(script.conn.info().chunks_retained, 1);
}

/// On a young connection the peer's largest window alone would admit these "ghost ACKs" of a blind sender.
#[test]
fn rfc5961_s5_2_data_that_acknowledges_bytes_never_sent_is_challenged() {
    let mut script = idle();
    script.run();
    for behind in [1, 5000] {
        let ghost = Fields { ack: iss(0).sub(behind), ..plain(&script) };
        let receipt = script.inject(ghost, 100);
        assert_eq!(receipt.arrival, None, "{behind} bytes before the first one");
        assert_eq!(script.run().len(), 1);
    }
    assert_eq!(script.conn.counters().challenge_acks, 2);
    // Bytes that were sent and acknowledged may be acknowledged again.
    script.source = bulk(2);
    script.run();
    script.ack(2000, &[]);
    script.inject(Fields { ack: iss(500), ..plain(&script) }, 100);
    assert_eq!(script.conn.contiguous(), 100);
}

#[test]
fn rfc5961_s7_challenges_are_limited() {
    let mut script = idle();
    script.run();
    let reset = with(Fields { seq: irs(9), ..plain(&script) }, RST);
    let sent = (0..100).filter(|_| !script.exchange(reset, 0).is_empty()).count();
    assert_eq!(sent, 10);
    assert_eq!(script.conn.counters().challenge_acks, 10);
    script.now += ms(5_000);
    assert!(!script.exchange(reset, 0).is_empty());

    let config = TcpConfig { challenges: 3, challenge_period: ms(1_000), ..TcpConfig::default() };
    let mut script = Script::established(config, bulk(0));
    script.run();
    let sent = (0..100).filter(|_| !script.exchange(reset, 0).is_empty()).count();
    assert_eq!(sent, 3);
    script.now += ms(1_000);
    assert!(!script.exchange(reset, 0).is_empty());
}

#[test]
fn rfc9293_s3_10_7_4_segments_without_ack_are_dropped() {
    let mut script = idle();
    script.run();
    assert!(script.exchange(with(plain(&script), Flags::default()), 100).is_empty());
    assert_eq!(script.conn.contiguous(), 0);
}

/// Established with timestamps; the peer's clock stands at 1000.
fn stamped(source: Stream) -> Script {
    let mut script = Script::connecting(TcpConfig::default(), source);
    let syn = script.run()[0];
    script.stamp(1000, syn.options.timestamps.expect("offered").value);
    let options = Options { mss: Some(1012), sack_permitted: true, ..script.template.options };
    script.syn_ack(options);
    script
}

#[test]
fn rfc7323_s5_3_older_timestamps_are_answered_and_dropped() {
    let mut script = stamped(Stream::new(0, 0, false));
    script.run();
    script.stamp(1005, 0);
    script.data(0, 10);
    script.stamp(1004, 0);
    let answer = script.data(10, 10);
    assert_eq!((answer.len(), script.conn.contiguous()), (1, 10));
    assert_eq!(script.conn.counters().paws_dropped, 1);
    // PAWS comes before the acceptability test.
    script.data(2_000_000, 10);
    let counters = script.conn.counters();
    assert_eq!((counters.paws_dropped, counters.out_of_window), (2, 0));
    let reset = with(Fields { seq: irs(10), ..plain(&script) }, RST);
    assert_eq!(script.inject(reset, 0).closed, Some(CloseReason::Reset), "RST is not subject to PAWS");
}

#[test]
fn rfc7323_s3_2_segments_without_the_negotiated_option_are_taken_and_probes_answered() {
    let mut script = stamped(Stream::new(0, 0, false));
    script.run();
    script.template.options = Options::default();
    script.data(0, 10);
    assert_eq!(script.conn.contiguous(), 10);
    let probe = Fields { seq: irs(9), ..plain(&script) };
    assert_eq!(script.exchange(probe, 0).len(), 1, "a keepalive probe");
}

#[test]
fn rfc7323_s4_3_the_echo_is_that_of_the_first_segment_not_yet_acknowledged() {
    let mut script = stamped(Stream::new(0, 0, false));
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    script.stamp(1010, 0);
    assert!(script.data(0, 10).is_empty());
    script.stamp(1020, 0);
    assert!(script.data(10, 10).is_empty());
    script.conn.flush_ack();
    let [ack] = script.run()[..] else { panic!("one ACK") };
    assert_eq!(ack.options.timestamps.map(|t| t.echo), Some(1010));
    // Beyond a gap: the echo stays that of the last segment in order.
    script.stamp(1030, 0);
    let [ack] = script.data(100, 10)[..] else { panic!("one ACK") };
    assert_eq!(ack.options.timestamps.map(|t| t.echo), Some(1010));
    script.stamp(1040, 0);
    let [ack] = script.data(20, 80)[..] else { panic!("one ACK") };
    assert_eq!(ack.options.timestamps.map(|t| t.echo), Some(1040));
}

#[test]
fn rfc7323_s3_1_every_segment_carries_the_option() {
    let mut script = stamped(Stream::new(2000, 0, false));
    let sent = script.run();
    assert_eq!(sent.len(), 2);
    assert!(sent.iter().all(|s| s.options.timestamps.is_some() && s.payload_len == 1000));
    for segment in sent {
        let rest = Options { timestamps: None, ..segment.options };
        assert_eq!(rest, Options::default(), "MSS, Window Scale and SACK-Permitted are the SYN's");
    }
    script.conn.abort();
    let [reset] = script.run()[..] else { panic!("one RST") };
    assert!(reset.flags.rst && reset.options.timestamps.is_some());
}

#[test]
fn rfc7323_s3_2_timestamps_that_were_not_negotiated_are_ignored() {
    let mut script = idle();
    script.run();
    script.conn.ack = AckPolicy::settled(script.now);
    for value in [1000, 7] {
        script.stamp(value, 0);
        script.data(script.conn.contiguous() as u32, 10);
    }
    assert_eq!((script.conn.contiguous(), script.conn.counters().paws_dropped), (20, 0));
    script.conn.flush_ack();
    assert_eq!(script.run()[0].options.timestamps, None);
}

#[test]
fn rfc7323_s2_2_syn_options_are_ignored_in_later_segments() {
    let mut script = idle();
    script.run();
    let mut fields = plain(&script);
    fields.window = 100;
    (fields.options.window_scale, fields.options.mss) = (Some(9), Some(300));
    script.inject(fields, 0);
    let info = script.conn.info();
    assert_eq!((info.snd_wnd, info.emss), (100, 1000));
}

#[test]
fn rfc9293_s3_5_3_a_reset_may_carry_data() {
    let mut script = idle();
    script.run();
    let receipt = script.inject(with(plain(&script), RST), 20);
    assert_eq!((receipt.closed, receipt.arrival), (Some(CloseReason::Reset), None));
}

/// RFC 5961 section 4.2 takes precedence over RFC 7323 section 3.2: a peer that has restarted may send no timestamps,
/// or older ones.
#[test]
fn rfc5961_s4_2_a_syn_without_timestamps_or_with_old_ones_is_challenged() {
    let mut script = stamped(Stream::new(0, 0, false));
    script.run();
    let old = Timestamps { value: 1, echo: 0 };
    for timestamps in [None, Some(old)] {
        let options = Options { timestamps, ..Options::default() };
        let syn = with(Fields { seq: irs(1 << 30), options, ..plain(&script) }, SYN);
        let [challenge] = script.exchange(syn, 0)[..] else { panic!("a challenge ACK") };
        assert_eq!((challenge.flags.rst, challenge.ack), (false, irs(0)));
    }
    assert_eq!(script.conn.state(), State::Established);
}
