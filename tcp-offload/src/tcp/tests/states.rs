//! What a connection does with each event in each state: a table of every pair, recorded in `states/pairs.txt`.
//!
//! The states are those of RFC 9293 section 3.3.2, some of them several times: with data in flight, with a gap, after
//! the local end has stopped reading. The events are segments of each kind within and outside the window, the timers,
//! and the calls of the stack. A line shows what the connection returns, sends and counts, and its next deadline. The
//! silence that follows an event is recorded too, if it goes on otherwise than without the event.
//!
//! A test that fails prints the lines that changed. Record a change of behaviour that is intended, and review it:
//!
//! ```text
//! XWARP_RECORD=1 cargo test -p xwarp-tcp --lib tcp::tests::states
//! ```

mod events;
mod situations;

use std::{fmt::Write as _, path::Path, time::Duration};

use self::{
    events::{EVENTS, Event},
    situations::{SITUATIONS, Situation},
};
use super::{IRS, ISS, Script};
use crate::{
    seq::SeqNum,
    sim::compare_with_record,
    tcp::{Receipt, TcpCounters, Wants},
    wire::Segment,
};

/// For how long the connection is observed after an event: longer than each of its timers.
const OBSERVED: Duration = Duration::from_secs(130);

#[test]
fn rfc9293_s3_10_each_event_in_each_state_has_its_recorded_outcome() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tcp/tests/states/pairs.txt");
    compare_with_record(&path, &table());
}

/// The whole table, one section for each state.
fn table() -> String {
    let mut table = String::new();
    for situation in SITUATIONS {
        writeln!(table, "== {}", situation.name).unwrap();
        let silence = observe(situation, &Event::NONE).1;
        writeln!(table, "{:34} {silence}", "then").unwrap();
        for event in EVENTS {
            let (outcome, then) = observe(situation, event);
            let then = if then == silence { String::new() } else { format!("; then {then}") };
            writeln!(table, "{:34} {outcome}{then}", event.name).unwrap();
        }
        table.push('\n');
    }
    table
}

/// The outcome of `event` and what follows in silence.
fn observe(situation: &Situation, event: &Event) -> (String, String) {
    let mut at = (situation.build)();
    let script = &mut at.script;
    let before = script.conn.counters();
    let (state, deadline) = (script.conn.state(), script.conn.deadline());
    script.closed = None;
    let mut all = Vec::new();
    all.extend((event.happen)(&mut at));
    let script = &mut at.script;
    all.extend(shown("sends", &script.run()));
    if script.conn.flush_ack() {
        all.extend(shown("when idle sends", &script.run()));
    }
    all.extend(script.closed.map(|reason| format!("ends: {reason:?}")));
    if script.conn.state() != state {
        all.push(format!("-> {:?}", script.conn.state()));
    }
    if script.conn.deadline() != deadline {
        all.push(match script.conn.deadline() {
            None => "no deadline".to_owned(),
            Some(at) => format!("deadline in {:?}", at.since(script.now)),
        });
    }
    all.extend(counted(&before, &script.conn.counters()));
    all.extend(script.conn.take_soft_error().map(|error| format!("reports {error:?}")));
    let outcome = if all.is_empty() { "-".to_owned() } else { all.join(", ") };
    (outcome, in_silence(script))
}

/// What the connection does in silence: the end, with its time in seconds, and the segments sent until then.
fn in_silence(script: &mut Script) -> String {
    script.closed = None;
    let (mut sent, mut ended) = (Vec::new(), None);
    for second in 1..=OBSERVED.as_secs() {
        let segments = script.wait(Duration::from_secs(1));
        sent.extend(segments.into_iter().map(|(_, segment)| segment));
        if script.closed.is_some() && ended.is_none() {
            ended = script.closed.map(|reason| format!("{reason:?} after {second} s"));
        }
    }
    let kinds: Vec<String> = sent.iter().map(kind).collect();
    let mut counts: Vec<(&String, usize)> = Vec::new();
    for kind in &kinds {
        match counts.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => counts.push((kind, 1)),
        }
    }
    let mut shown: Vec<String> = counts.iter().map(|(kind, count)| format!("{count} x {kind}")).collect();
    shown.extend(ended);
    shown.push(format!("{:?}", script.conn.state()));
    let conn = &script.conn;
    for (holds, name) in [
        (conn.peer_closed(), "peer closed"),
        (conn.has_unacknowledged(), "unacknowledged"),
        (conn.owes_ack(), "owes an ACK"),
        (conn.wants_to_transmit() == Wants::Yes, "wants to transmit"),
    ] {
        if holds {
            shown.push(name.to_owned());
        }
    }
    script.tear_down();
    shown.join(", ")
}

fn shown(verb: &str, segments: &[Segment]) -> Option<String> {
    let each: Vec<String> = segments.iter().map(segment_shown).collect();
    (!each.is_empty()).then(|| format!("{verb} {}", each.join(" ")))
}

/// A segment that we sent: flags, sequence number and length, acknowledgment number, window, options.
fn segment_shown(segment: &Segment) -> String {
    let mut shown = kind(segment);
    let relative = |number: SeqNum, first: u32| number.since(SeqNum::new(first + 1));
    write!(shown, "[{}+{}", relative(segment.seq, ISS), segment.payload_len).unwrap();
    if segment.flags.ack {
        write!(shown, " ack {} win {}", relative(segment.ack, IRS), segment.window).unwrap();
    }
    for block in segment.options.sack_blocks() {
        write!(shown, " sack {}..{}", relative(block.left, IRS), relative(block.right, IRS)).unwrap();
    }
    shown.push(']');
    shown
}

/// The flags of a segment.
fn kind(segment: &Segment) -> String {
    let flags = segment.flags;
    let names = [
        (flags.syn, "SYN"),
        (flags.fin, "FIN"),
        (flags.rst, "RST"),
        (flags.ece, "ECE"),
        (flags.cwr, "CWR"),
        (segment.payload_len > 0, "DATA"),
        (flags.ack, "ACK"),
    ];
    names.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect::<Vec<_>>().join("-")
}

/// Event counters that moved, except for those of segments and bytes.
fn counted(before: &TcpCounters, after: &TcpCounters) -> Option<String> {
    let moved: Vec<&str> = before
        .iter()
        .zip(after.iter())
        .filter(|((name, was), (_, is))| was != is && !name.contains("segments") && !name.contains("bytes"))
        .map(|((name, _), _)| name.trim_start_matches("tcp."))
        .collect();
    (!moved.is_empty()).then(|| format!("counts {}", moved.join(" ")))
}

/// What a segment was found to be.
fn receipt_shown(receipt: &Receipt) -> Vec<String> {
    let mut shown = Vec::new();
    if receipt.established {
        shown.push("established".to_owned());
    }
    shown.extend(receipt.acked.map(|offset| format!("acked to {offset}")));
    shown.extend(receipt.arrival.map(|new| format!("takes {}..{}", new.offset, new.offset + new.len as u64)));
    shown
}
