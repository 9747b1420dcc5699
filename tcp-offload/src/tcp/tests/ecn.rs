//! Explicit congestion notification: RFC 3168 section 6.1.

use super::{bulk, iss, plain, silent};
use crate::{
    seq::SeqNum,
    tcp::{
        TcpConfig,
        testing::{IRS, Script, Stream, ms},
    },
    wire::{Ecn, Fields, Flags, Options},
};

fn negotiated(source: Stream) -> Script {
    let mut script = Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, source);
    let syn = script.run()[0];
    assert!(syn.flags.ece && syn.flags.cwr, "section 6.1.1: an ECN-setup SYN");
    assert_eq!(syn.ecn, Ecn::NotEct);
    script.now += ms(1);
    let flags = Flags { syn: true, ack: true, ece: true, ..Flags::default() };
    let options = Options { mss: Some(1000), sack_permitted: true, ..Options::default() };
    script.inject(Fields { seq: SeqNum::new(IRS), flags, options, ..script.template }, 0);
    script
}

#[test]
fn rfc3168_s6_1_only_new_data_is_ecn_capable() {
    let mut script = negotiated(bulk(3));
    let sent = script.run();
    assert!(sent.iter().all(|s| s.ecn == Ecn::Ect0));
    let again = script.wait(ms(300));
    assert!(!again.is_empty() && again.iter().all(|(_, s)| s.ecn == Ecn::NotEct));
    let acks = script.data(100, 10);
    assert!(acks.iter().all(|s| s.ecn == Ecn::NotEct));
}

#[test]
fn rfc3168_s6_1_2_an_echo_halves_once_a_window_and_is_answered_with_cwr() {
    let mut script = negotiated(bulk(40));
    script.run();
    script.now += ms(1);
    let before = script.conn.info().cwnd;
    let echo = |script: &Script, offset| {
        let flags = Flags { ack: true, ece: true, ..Flags::default() };
        Fields { ack: iss(offset), flags, ..plain(script) }
    };
    let first = script.exchange(echo(&script, 6000), 0);
    let reduced = script.conn.info().cwnd;
    assert!(reduced < before);
    let second = script.exchange(echo(&script, 8000), 0);
    assert_eq!(script.conn.info().cwnd, reduced, "once a window, and an echo never grows it");
    let cwr: Vec<bool> = first.iter().chain(&second).map(|s| s.flags.cwr).collect();
    assert_eq!(cwr.iter().filter(|c| **c).count(), 1);
    assert!(cwr[0], "on the first new segment");
}

#[test]
fn rfc3168_s6_1_3_a_mark_is_echoed_until_cwr() {
    let mut script = negotiated(silent());
    script.run();
    script.exchange(Fields { ecn: Ecn::Ce, ..plain(&script) }, 1000);
    script.conn.flush_ack();
    assert!(script.run()[0].flags.ece);
    script.data(1000, 1000);
    script.conn.flush_ack();
    assert!(script.run()[0].flags.ece, "until the sender answers");
    let cwr = Fields {
        seq: super::irs(2000),
        flags: Flags { ack: true, cwr: true, ..Flags::default() },
        ..plain(&script)
    };
    script.exchange(cwr, 1000);
    script.conn.flush_ack();
    assert!(!script.run()[0].flags.ece);
}

#[test]
fn rfc3168_s6_1_1_without_the_peers_consent_nothing_is_marked() {
    let mut script = Script::established(TcpConfig::default(), bulk(2));
    assert!(script.run().iter().all(|s| s.ecn == Ecn::NotEct && !s.flags.ece));
}

#[test]
fn rfc3168_s6_1_1_1_a_repeated_syn_does_not_ask() {
    let mut script = Script::connecting(TcpConfig::default(), silent());
    script.run();
    let again = script.wait(ms(1100));
    assert!(!again[0].1.flags.ece && !again[0].1.flags.cwr);
}
