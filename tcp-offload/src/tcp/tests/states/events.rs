//! The events that happen in each state.

use super::{receipt_shown, shown, situations::At};
use crate::{
    seq::SeqNum,
    tcp::{
        TcpConfig, Tuning,
        testing::{IRS, path},
    },
    ulp::CloseReason,
    wire::{Ecn, Fields, Flags, IcmpError, IcmpKind, Options, Timestamps},
};

/// Something that happens to a connection.
pub(super) struct Event {
    pub name: &'static str,
    /// Causes the event and returns what the connection returned.
    pub happen: fn(&mut At) -> Vec<String>,
}

impl Event {
    pub(super) const NONE: Self = Self { name: "nothing", happen: |_| Vec::new() };
}

macro_rules! events {
    ($($name:literal => $happen:expr),+ $(,)?) => {
        &[$(Event { name: $name, happen: $happen }),+]
    };
}

pub(super) const EVENTS: &[Event] = events! {
    "ACK of nothing new" => |at| segment(at, |f, at| f.ack = at.una, 0),
    "ACK of all" => |at| segment(at, |_, _| (), 0),
    "ACK of half" => |at| segment(at, |f, at| f.ack = at.una.add(at.nxt.since(at.una) as u32 / 2), 0),
    "ACK older than SND.UNA" => |at| segment(at, |f, at| f.ack = at.una.sub(1), 0),
    "ACK far below SND.UNA" => |at| segment(at, |f, at| f.ack = at.una.sub(1 << 20), 0),
    "ACK of what was not sent" => |at| segment(at, |f, at| f.ack = at.nxt.add(1), 0),
    "ACK, window closed" => |at| segment(at, |f, _| f.window = 0, 0),
    "ACK, window of 100" => |at| segment(at, |f, _| f.window = 100, 0),
    "ACK, window open" => |at| segment(at, |f, at| (f.ack, f.window) = (at.una, 60_000), 0),
    "ACK beyond the window" => |at| segment(at, |f, _| f.seq = f.seq.add(3 << 20), 0),
    "ACK below the window" => |at| segment(at, |f, _| f.seq = f.seq.sub(500), 0),
    "ACK within the window, not next" => |at| segment(at, |f, _| f.seq = f.seq.add(50), 0),
    "ACK with ECN-Echo" => |at| segment(at, |f, _| f.flags.ece = true, 0),
    "ACK with SACK of the second half" => |at| segment(at, |f, at| {
        let middle = at.una.add(at.nxt.since(at.una) as u32 / 2);
        f.ack = at.una;
        f.options.sack[0].left = middle;
        f.options.sack[0].right = at.nxt;
        f.options.sack_count = 1;
    }, 0),
    "ACK with an older timestamp" => |at| segment(at, |f, _| {
        f.options.timestamps = Some(Timestamps { value: 1, echo: 0 });
    }, 0),
    "ACK without a timestamp" => |at| segment(at, |f, _| f.options.timestamps = None, 0),
    "keepalive probe" => |at| segment(at, |f, _| f.seq = f.seq.sub(1), 0),
    "keepalive probe with a byte" => |at| segment(at, |f, _| f.seq = f.seq.sub(1), 1),
    "no flags" => |at| segment(at, |f, _| f.flags = Flags::default(), 0),
    "data" => |at| segment(at, |_, _| (), 100),
    "data, ACK of nothing new" => |at| segment(at, |f, at| f.ack = at.una, 100),
    "data without ACK" => |at| segment(at, |f, _| f.flags = Flags::default(), 100),
    "data with a mark" => |at| segment(at, |f, _| f.ecn = Ecn::Ce, 100),
    "data with CWR" => |at| segment(at, |f, _| f.flags.cwr = true, 100),
    "data, the rest of a gap and more" => |at| segment(at, |_, _| (), 1050),
    "data beyond a gap" => |at| segment(at, |f, _| f.seq = f.seq.add(1000), 100),
    "data received before" => |at| segment(at, |f, _| f.seq = f.seq.sub(100), 100),
    "data received before and more" => |at| segment(at, |f, _| f.seq = f.seq.sub(100), 150),
    "data beyond the window" => |at| segment(at, |f, _| f.seq = f.seq.add(3 << 20), 100),
    "data that is not taken" => |at| {
        at.script.take = false;
        segment(at, |_, _| (), 100)
    },
    "FIN" => |at| segment(at, |f, _| f.flags.fin = true, 0),
    "FIN, ACK of nothing new" => |at| segment(at, |f, at| (f.flags.fin, f.ack) = (true, at.una), 0),
    "FIN with data" => |at| segment(at, |f, _| f.flags.fin = true, 100),
    "FIN without ACK" => |at| segment(at, |f, _| f.flags = Flags { fin: true, ..Flags::default() }, 0),
    "FIN beyond a gap" => |at| segment(at, |f, _| (f.flags.fin, f.seq) = (true, f.seq.add(500)), 0),
    "FIN retransmitted" => |at| segment(at, |f, _| (f.flags.fin, f.seq) = (true, f.seq.sub(1)), 0),
    "FIN beyond the window" => |at| segment(at, |f, _| (f.flags.fin, f.seq) = (true, f.seq.add(3 << 20)), 0),
    "RST" => |at| segment(at, |f, _| f.flags = RST, 0),
    "RST with ACK" => |at| segment(at, |f, _| f.flags.rst = true, 0),
    "RST within the window, not next" => |at| segment(at, |f, _| (f.flags, f.seq) = (RST, f.seq.add(50)), 0),
    "RST beyond the window" => |at| segment(at, |f, _| (f.flags, f.seq) = (RST, f.seq.add(3 << 20)), 0),
    "RST, ACK of what was not sent" => |at| segment(at, |f, at| (f.flags.rst, f.ack) = (true, at.nxt.add(9)), 0),
    "SYN, retransmitted" => |at| segment(at, |f, _| (f.flags, f.seq, f.options) = (SYN, IRS_SEQ, MSS), 0),
    "SYN, a new one" => |at| segment(at, |f, _| (f.flags, f.seq, f.options) = (SYN, f.seq.add(3 << 20), MSS), 0),
    "SYN within the window" => |at| segment(at, |f, _| (f.flags, f.seq, f.options) = (SYN, f.seq.add(50), MSS), 0),
    "SYN-ACK" => |at| segment(at, |f, _| (f.flags, f.seq, f.options) = (SYN_ACK, IRS_SEQ, MSS), 0),
    "SYN-ACK with ECN-Echo" => |at| segment(at, |f, _| {
        (f.flags, f.seq, f.options) = (Flags { ece: true, ..SYN_ACK }, IRS_SEQ, MSS);
    }, 0),
    "SYN-ACK of what was not sent" => |at| segment(at, |f, at| {
        (f.flags, f.seq, f.ack) = (SYN_ACK, IRS_SEQ, at.nxt.add(9));
    }, 0),
    "SYN-RST" => |at| segment(at, |f, _| (f.flags, f.seq) = (Flags { syn: true, ..RST }, IRS_SEQ), 0),
    "first deadline" => |at| deadlines(at, 1),
    "second deadline" => |at| deadlines(at, 2),
    "fourth deadline" => |at| deadlines(at, 4),
    "data to send" => |at| {
        (at.script.source.total, at.script.source.finish) = (at.script.source.at + 1000, false);
        Vec::new()
    },
    "the source finishes" => |at| {
        at.script.source.finish = true;
        Vec::new()
    },
    "close" => |at| {
        at.script.conn.close();
        Vec::new()
    },
    "close when sent" => |at| {
        at.script.conn.close_when_sent();
        Vec::new()
    },
    "abort" => |at| {
        at.script.conn.abort();
        Vec::new()
    },
    "abort with another reason" => |at| {
        at.script.conn.abort_with(CloseReason::AddressRemoved);
        Vec::new()
    },
    "interface removed" => |at| {
        at.script.conn.interface_removed();
        Vec::new()
    },
    "stop reading" => |at| {
        at.script.conn.stop_reading(at.script.now);
        Vec::new()
    },
    "stop reading, then data" => |at| {
        at.script.conn.stop_reading(at.script.now);
        segment(at, |_, _| (), 100)
    },
    "release" => |at| {
        at.script.tear_down();
        Vec::new()
    },
    "bytes withheld and freed" => |at| {
        at.script.conn.withheld(50_000);
        let sent = shown("sends", &at.script.run());
        at.script.conn.withheld(0);
        sent.into_iter().collect()
    },
    "renege" => |at| {
        at.script.conn.renege();
        Vec::new()
    },
    "keepalive off" => |at| {
        let tuning = Tuning { keepalive: None, ..TcpConfig::default().tuning() };
        at.script.conn.tune(at.script.now, &tuning);
        Vec::new()
    },
    "user timeout of 5 s" => |at| {
        let tuning = Tuning { user_timeout: std::time::Duration::from_secs(5), ..TcpConfig::default().tuning() };
        at.script.conn.tune(at.script.now, &tuning);
        Vec::new()
    },
    "a new SYN in TIME-WAIT" => |at| {
        let syn = Fields { seq: at.rcv_nxt.add(3 << 20), flags: SYN, ..at.script.template };
        replaceable(at, syn)
    },
    "an old SYN in TIME-WAIT" => |at| {
        let syn = Fields { seq: at.rcv_nxt.sub(3 << 20), flags: SYN, ..at.script.template };
        replaceable(at, syn)
    },
    "frames move to the heap" => |at| {
        let moved = at.script.spill();
        (moved > 0).then(|| format!("moves {moved} bytes")).into_iter().collect()
    },
    "the MTU of the link is 700" => |at| {
        at.script.conn.link_mtu(at.script.now, 700);
        mtu_news(at)
    },
    "ICMP: too big, 700" => |at| icmp(at, IcmpKind::TooBig { mtu: 700 }),
    "ICMP: host unreachable" => |at| icmp(at, IcmpKind::Unreachable { hard: false }),
    "ICMP: port unreachable" => |at| icmp(at, IcmpKind::Unreachable { hard: true }),
};

const NO_FLAGS: Flags =
    Flags { fin: false, syn: false, rst: false, psh: false, ack: false, ece: false, cwr: false };
const RST: Flags = Flags { rst: true, ..NO_FLAGS };
const SYN: Flags = Flags { syn: true, ..NO_FLAGS };
const SYN_ACK: Flags = Flags { syn: true, ack: true, ..NO_FLAGS };
const IRS_SEQ: SeqNum = SeqNum::new(IRS);
const MSS: Options = Options {
    mss: Some(1000),
    window_scale: None,
    sack_permitted: true,
    timestamps: None,
    sack: [crate::wire::SackBlock { left: SeqNum::new(0), right: SeqNum::new(0) }; 4],
    sack_count: 0,
};

/// The peer sends a segment with `payload` bytes: next in order and acknowledging all, except for what `change` does.
fn segment(at: &mut At, change: fn(&mut Fields, &At), payload: usize) -> Vec<String> {
    let mut fields = Fields { seq: at.rcv_nxt, ack: at.nxt, ..at.script.template };
    change(&mut fields, at);
    receipt_shown(&at.script.inject(fields, payload))
}

/// Lets time pass until `count` deadlines have been served.
fn deadlines(at: &mut At, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..count {
        let Some(deadline) = at.script.conn.deadline() else { break };
        let sent = at.script.wait(deadline.since(at.script.now));
        let segments: Vec<_> = sent.into_iter().map(|(_, segment)| segment).collect();
        all.extend(shown("sends", &segments));
    }
    all
}

fn icmp(at: &mut At, kind: IcmpKind) -> Vec<String> {
    let error = IcmpError { flow: path(true).flow, seq: at.una, kind };
    let ended = at.script.conn.icmp(at.script.now, &error);
    let mut all = mtu_news(at);
    all.extend(ended.map(|reason| format!("ends: {reason:?}")));
    all
}

fn mtu_news(at: &mut At) -> Vec<String> {
    let news = at.script.conn.take_mtu_news().map(|mtu| format!("path MTU {}", mtu.bytes()));
    news.into_iter().chain([format!("EMSS {}", at.script.conn.emss())]).collect()
}

fn replaceable(at: &mut At, syn: Fields) -> Vec<String> {
    at.script.replaceable_by(syn).then(|| "replaced".to_owned()).into_iter().collect()
}
