//! The states in which the events happen.

use crate::{
    seq::SeqNum,
    tcp::{
        Algorithm, State, TcpConfig,
        testing::{IRS, ISS, Script, Stream, ms},
        tests::{bulk, silent},
    },
    wire::{Fields, Flags, Options},
};

/// A connection in a state, and the sequence numbers around which segments are made.
pub(super) struct At {
    pub script: Script,
    /// The next sequence number of the peer.
    pub rcv_nxt: SeqNum,
    /// `SND.UNA` and `SND.NXT`.
    pub una: SeqNum,
    pub nxt: SeqNum,
}

/// A state in which the events happen.
pub(super) struct Situation {
    pub name: &'static str,
    pub build: fn() -> At,
}

pub(super) const SITUATIONS: &[Situation] = &[
    Situation { name: "SYN-SENT", build: syn_sent },
    Situation { name: "SYN-RECEIVED, by a listener", build: syn_received },
    Situation { name: "SYN-RECEIVED, by a simultaneous open", build: simultaneous },
    Situation { name: "ESTABLISHED", build: || established(silent(), 0) },
    Situation { name: "ESTABLISHED, data in flight", build: || established(bulk(2), 2000) },
    Situation {
        name: "ESTABLISHED, SACK, timestamps, scaling and ECN",
        build: || with_options(Algorithm::Cubic),
    },
    Situation { name: "ESTABLISHED, DCTCP", build: || with_options(Algorithm::Dctcp) },
    Situation { name: "ESTABLISHED, data beyond a gap", build: gap },
    Situation { name: "ESTABLISHED, data and a FIN beyond a gap", build: gap_and_fin },
    Situation { name: "ESTABLISHED, data to send into a closed window", build: || closed_window(false) },
    Situation { name: "ESTABLISHED, the same, to be closed when sent", build: || closed_window(true) },
    Situation { name: "ESTABLISHED, not reading", build: || not_reading(established(silent(), 0)) },
    Situation { name: "FIN-WAIT-1", build: fin_wait_1 },
    Situation { name: "FIN-WAIT-1, data in flight", build: || established(Stream::new(2000, 0, true), 2001) },
    Situation { name: "FIN-WAIT-1, not reading", build: || not_reading(fin_wait_1()) },
    Situation { name: "FIN-WAIT-2", build: fin_wait_2 },
    Situation { name: "FIN-WAIT-2, not reading", build: || acked(not_reading(fin_wait_1())) },
    Situation { name: "CLOSE-WAIT", build: || peer_closed(established(silent(), 0)) },
    Situation { name: "CLOSE-WAIT, data in flight", build: || peer_closed(established(bulk(2), 2000)) },
    Situation { name: "CLOSING", build: || peer_closed(fin_wait_1()) },
    Situation { name: "LAST-ACK", build: last_ack },
    Situation { name: "TIME-WAIT", build: || peer_closed(fin_wait_2()) },
    Situation { name: "CLOSED", build: closed },
];

const FIN: Flags = Flags { fin: true, ack: true, syn: false, rst: false, psh: false, ece: false, cwr: false };

fn mss() -> Options {
    Options { mss: Some(1000), ..Options::default() }
}

fn at(script: Script, rcv_nxt: u32, una: u32, nxt: u32) -> At {
    let seq = |first: u32, offset| SeqNum::new(first).add(offset);
    At { script, rcv_nxt: seq(IRS + 1, rcv_nxt), una: seq(ISS + 1, una), nxt: seq(ISS + 1, nxt) }
}

fn syn_sent() -> At {
    let mut script = Script::connecting(TcpConfig { timestamps: false, ..TcpConfig::default() }, silent());
    script.run();
    At { una: SeqNum::new(ISS), ..at(script, 0, 0, 0) }
}

fn syn_received() -> At {
    let mut script = Script::accepting(TcpConfig::default(), mss());
    script.run();
    At { una: SeqNum::new(ISS), ..at(script, 0, 0, 0) }
}

fn simultaneous() -> At {
    let mut at = syn_sent();
    let flags = Flags { syn: true, ..Flags::default() };
    let syn = Fields { seq: SeqNum::new(IRS), flags, options: mss(), ..at.script.template };
    at.script.exchange(syn, 0);
    assert_eq!(at.script.conn.state(), State::SynReceived);
    at
}

/// `nxt` is the length of the `source` with its FIN.
fn established(source: Stream, nxt: u32) -> At {
    let mut script = Script::established(TcpConfig::default(), source);
    script.run();
    at(script, 0, 0, nxt)
}

fn with_options(algorithm: Algorithm) -> At {
    let mut script =
        Script::connecting(TcpConfig { algorithm, ..TcpConfig::default() }, Stream::new(988, 0, false));
    let echo = script.run()[0].options.timestamps.unwrap().value;
    script.now += ms(1);
    script.stamp(100, echo);
    let timestamps = script.template.options.timestamps;
    let options = Options { window_scale: Some(2), sack_permitted: true, timestamps, ..mss() };
    let flags = Flags { syn: true, ack: true, ece: true, ..Flags::default() };
    script.exchange(Fields { seq: SeqNum::new(IRS), flags, options, ..script.template }, 0);
    assert_eq!(script.conn.state(), State::Established);
    at(script, 0, 0, 988)
}

fn gap() -> At {
    let mut at = established(silent(), 0);
    at.script.data(1000, 100);
    at
}

fn gap_and_fin() -> At {
    let mut at = gap();
    let seq = at.rcv_nxt.add(1100);
    at.script.exchange(Fields { seq, flags: FIN, ..at.script.template }, 0);
    at
}

fn closed_window(closes: bool) -> At {
    let mut at = established(silent(), 0);
    at.script.template.window = 0;
    at.script.ack(0, &[]);
    at.script.source = bulk(1);
    at.script.run();
    if closes {
        at.script.conn.close_when_sent();
    }
    at
}

fn not_reading(mut at: At) -> At {
    at.script.conn.stop_reading(at.script.now);
    at
}

fn fin_wait_1() -> At {
    let at = established(Stream::new(0, 0, true), 1);
    assert_eq!(at.script.conn.state(), State::FinWait1);
    at
}

/// The peer acknowledges all that was sent.
fn acked(mut at: At) -> At {
    at.script.exchange(Fields { ack: at.nxt, ..at.script.template }, 0);
    At { una: at.nxt, ..at }
}

fn fin_wait_2() -> At {
    let at = acked(fin_wait_1());
    assert_eq!(at.script.conn.state(), State::FinWait2);
    at
}

/// The peer's FIN arrives; it acknowledges nothing new.
fn peer_closed(mut at: At) -> At {
    let fin = Fields { seq: at.rcv_nxt, ack: at.una, flags: FIN, ..at.script.template };
    at.script.exchange(fin, 0);
    At { rcv_nxt: at.rcv_nxt.add(1), ..at }
}

fn last_ack() -> At {
    let mut at = peer_closed(established(silent(), 0));
    at.script.source = Stream::new(0, 0, true);
    at.script.run();
    assert_eq!(at.script.conn.state(), State::LastAck);
    At { nxt: at.nxt.add(1), ..at }
}

fn closed() -> At {
    let mut at = established(silent(), 0);
    let flags = Flags { rst: true, ..Flags::default() };
    at.script.exchange(Fields { seq: at.rcv_nxt, flags, ..at.script.template }, 0);
    assert_eq!(at.script.conn.state(), State::Closed);
    at
}
