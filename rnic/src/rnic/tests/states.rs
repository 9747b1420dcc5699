//! What a queue pair does with each event in each state: a table of every pair, recorded in `states/pairs.txt`.
//!
//! The states are those of [`QpState`] with the stages of the connection, some of them several times: with outstanding
//! work, with a message that waits for a receive, with a Terminate that is due. The events are the verbs, the ULPDUs of
//! the peer and the events of the connection. A line shows what the queue pair returns, completes and reports, and what
//! it then sends.
//!
//! A test that fails prints the lines that changed. Record a change of behaviour that is intended, and review it, by
//! running the test with `XWARP_RECORD=1`.

use std::{collections::BTreeSet, fmt::Write as _, path::Path as FilePath};

use xwarp_tcp::{
    framing::FramingError,
    mpa::{MpaError, Offer, Revision},
    sim::compare_with_record,
    tcp::SoftError,
    ulp::{CloseReason, ListenerId},
};

use super::*;

/// A queue pair in a state, `a`, and its peer.
struct Situation {
    name: &'static str,
    build: fn() -> Case,
}

struct Case {
    pair: Pair,
    /// Keys of a region at each end.
    near: STag,
    far: STag,
}

struct Trigger {
    name: &'static str,
    /// Causes the event and returns what the queue pair returned.
    happen: fn(&mut Case) -> String,
}

const SITUATIONS: &[Situation] = &[
    Situation { name: "Idle", build: idle },
    Situation { name: "Idle, connecting", build: || unestablished(|_| ()) },
    Situation { name: "Idle, accepting", build: accepting },
    Situation {
        name: "Terminate, connecting",
        build: || unestablished(|end| framing_error(end, MpaError::Crc)),
    },
    Situation { name: "Rts", build: || established(|_| ()) },
    Situation { name: "Rts, work outstanding", build: || established(work) },
    Situation { name: "Rts, a message waits for a receive", build: || established(waiting) },
    Situation { name: "Rts, a Read to answer", build: || established(asked) },
    Situation { name: "Closing, by this end", build: || established(disconnect) },
    Situation {
        name: "Closing, by this end, work outstanding",
        build: || {
            established(|case| {
                work(case);
                disconnect(case);
            })
        },
    },
    Situation { name: "Closing, by the peer", build: || established(peer_closed) },
    Situation {
        name: "Closing, by both ends",
        build: || {
            established(|case| {
                disconnect(case);
                peer_closed(case);
            })
        },
    },
    Situation {
        name: "Terminate",
        build: || {
            established(|case| {
                work(case);
                framing_error(&mut case.pair.a, MpaError::Crc);
            })
        },
    },
    Situation {
        name: "Terminate, sent",
        build: || {
            established(|case| {
                framing_error(&mut case.pair.a, MpaError::Crc);
                case.pair.a.pull_all();
            })
        },
    },
    Situation { name: "Error, after the peer's Terminate", build: || established(terminated) },
    Situation {
        name: "Error, connection closed",
        build: || established(|case| case.pair.a.rnic.event(CONN, Event::Closed(CloseReason::Reset))),
    },
    Situation {
        name: "Error, by the application",
        build: || established(|case| case.pair.a.rnic.fail_qp(case.pair.a.qp).unwrap()),
    },
];

macro_rules! triggers {
    ($($name:literal => $happen:expr),+ $(,)?) => {
        &[$(Trigger { name: $name, happen: $happen }),+]
    };
}

const TRIGGERS: &[Trigger] = triggers! {
    "nothing" => |_| String::new(),
    "post a Send" => |case| post(case, SEND, &[]),
    "post a Write" => |case| post(case, write_to(case.far, 0), &[whole(case.near, 100)]),
    "post a Read" => |case| post(case, read_from(case.far, 0), &[whole(case.near, 100)]),
    "post a receive" => |case| {
        let a = &mut case.pair.a;
        shown(&a.rnic.post_recv(a.qp, &RecvRequest { wr_id: 31, scatter: &[] }))
    },
    "check for a connection" => |case| shown(&case.pair.a.rnic.check_connect(case.pair.a.qp, 1, 1)),
    "tune" => |case| {
        let tuning = xwarp_tcp::tcp::TcpConfig::default().tuning();
        shown(&case.pair.a.rnic.tuned(case.pair.a.qp, &tuning).map(|_| ()))
    },
    "disconnect" => |case| shown(&case.pair.a.rnic.disconnect(case.pair.a.qp)),
    "fail" => |case| shown(&case.pair.a.rnic.fail_qp(case.pair.a.qp)),
    "reset" => |case| shown(&case.pair.a.rnic.reset_qp(case.pair.a.qp)),
    "destroy" => |case| shown(&case.pair.a.rnic.destroy_qp(case.pair.a.qp)),
    "fail the device" => |case| {
        case.pair.a.rnic.fail_all();
        String::new()
    },
    "completion queue overflows" => |case| {
        let cq = case.pair.a.cq;
        case.pair.a.rnic.shared.overflowed.push(cq);
        case.pair.a.rnic.end_overflowed();
        String::new()
    },
    "all acknowledged" => |case| {
        case.pair.a.pull_all();
        let sent = case.pair.a.offset;
        case.pair.a.rnic.acked(CONN, sent);
        String::new()
    },
    "the peer answers" => |case| {
        Pair::carry(&mut case.pair.a, &mut case.pair.b);
        take_from_peer(case)
    },
    "Send" => |case| {
        case.pair.b.post(1, SEND, &[]);
        take_from_peer(case)
    },
    "Write" => |case| {
        case.pair.b.post(1, write_to(case.near, 0), &[whole(case.far, 100)]);
        take_from_peer(case)
    },
    "Write to a wrong key" => |case| {
        case.pair.b.post(1, write_to(STag::new(0x1234_5678), 0), &[whole(case.far, 100)]);
        take_from_peer(case)
    },
    "Read Request" => |case| {
        case.pair.b.post(1, read_from(case.near, 0), &[whole(case.far, 100)]);
        take_from_peer(case)
    },
    "Terminate" => |case| {
        framing_error(&mut case.pair.b, MpaError::Crc);
        take_from_peer(case)
    },
    "unknown opcode" => |case| shown(&case.pair.a.take(&[0x41, 0x4e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0])),
    "truncated" => |case| shown(&case.pair.a.take(&[0x41, 0x43, 0, 0])),
    "truncated, beyond a gap" => |case| shown(&case.pair.a.place(&[0x41, 0x43, 0, 0], Arrival::Early).map(|_| ())),
    "event: streaming data" => |case| event(case, Event::Streaming { listener: None, path: path() }),
    "event: streaming data readable" => |case| event(case, Event::StreamReadable),
    "event: established" => |case| {
        case.pair.a.establish(2, 3, None);
        String::new()
    },
    "event: rejected" => |case| {
        event(case, Event::Rejected { private_data: Vec::new(), ird: 1, ord: 2 })
    },
    "event: CRC error" => |case| {
        framing_error(&mut case.pair.a, MpaError::Crc);
        String::new()
    },
    "event: withheld too long" => |case| {
        framing_error(&mut case.pair.a, MpaError::Withheld);
        String::new()
    },
    "event: peer closed" => |case| {
        peer_closed(case);
        String::new()
    },
    "event: soft error" => |case| event(case, Event::SoftError(SoftError::NoAnswer)),
    "event: closed in order" => |case| event(case, Event::Closed(CloseReason::Graceful)),
    "event: reset" => |case| event(case, Event::Closed(CloseReason::Reset)),
    "event: timed out" => |case| event(case, Event::Closed(CloseReason::TimedOut)),
    "event: markers refused" => |case| {
        let error = FramingError::Mpa(MpaError::MarkersRefused);
        event(case, Event::Closed(CloseReason::Startup(error)))
    },
};

#[test]
fn each_event_in_each_state_has_its_recorded_outcome() {
    let path = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("src/rnic/tests/states/pairs.txt");
    compare_with_record(&path, &table());
}

/// The whole table, one section for each state.
fn table() -> String {
    let mut table = String::new();
    for situation in SITUATIONS {
        writeln!(table, "== {}", situation.name).unwrap();
        let mut usual = String::new();
        for trigger in TRIGGERS {
            let mut case = (situation.build)();
            drain(&mut case.pair.a);
            let returned = (trigger.happen)(&mut case);
            let outcome = format!("{returned}{}", drain(&mut case.pair.a));
            let then = sends(&mut case.pair.a);
            if usual.is_empty() {
                usual.clone_from(&then);
                writeln!(table, "{:32}{then}", "then").unwrap();
                continue;
            }
            let outcome = if outcome.is_empty() { " -" } else { &outcome };
            let then = if then == usual { String::new() } else { format!("; then{then}") };
            writeln!(table, "{:32}{outcome}{then}", trigger.name).unwrap();
        }
        table.push('\n');
    }
    table
}

/// What the queue pair has completed and reported, what it asks of the stack, and its state.
fn drain(end: &mut End) -> String {
    let mut all = String::new();
    for completion in end.poll() {
        let WorkCompletion { wr_id, status, opcode, .. } = completion;
        write!(all, " completes {wr_id} {opcode:?} {status:?},").unwrap();
    }
    for event in end.cm_events() {
        write!(all, " reports {},", brief(&event)).unwrap();
    }
    for event in end.async_events() {
        write!(all, " raises {},", brief(&event)).unwrap();
    }
    let rnic = &mut end.rnic;
    let names: BTreeSet<_> = rnic
        .deferred()
        .into_iter()
        .filter_map(|work| match work {
            Deferred::Abort(_) => Some("1 aborts"),
            Deferred::Close(_) => Some("2 closes"),
            Deferred::Resume(_) => Some("3 resumes"),
            Deferred::Refilled(srq) => rnic.next_starved(srq).map(|_| "3 resumes"),
            Deferred::Ended(_) => Some("4 ends"),
            Deferred::Retry(qp) => rnic.take_retry(qp).map(|_| "5 retries"),
            Deferred::Wake(_) => Some("6 wakes"),
            Deferred::Learned(..) => None,
        })
        .collect();
    for name in names {
        write!(all, " {},", &name[2..]).unwrap();
    }
    all
}

/// What the queue pair sends from now on, and its state afterwards.
fn sends(end: &mut End) -> String {
    let mut all = String::new();
    if end.rnic.has_data(CONN) {
        all.push_str(" has data,");
    }
    end.wire.clear();
    end.pull_all();
    for (ulpdu, _) in &end.wire {
        write!(all, " sends {},", opcode(ulpdu)).unwrap();
    }
    if end.finished {
        all.push_str(" finishes,");
    }
    let sent = end.offset;
    end.rnic.acked(CONN, sent);
    for completion in end.poll() {
        write!(all, " completes {} {:?},", completion.wr_id, completion.status).unwrap();
    }
    match end.rnic.query_qp(end.qp) {
        Ok(info) => {
            let (sends, receives) = (info.send_outstanding, info.recv_outstanding);
            let addresses = if info.addresses.is_some() { "" } else { " unconnected" };
            let QpInfo { state, ird, ord, .. } = info;
            write!(all, " {state:?}{addresses} {ird}/{ord} {sends}+{receives} outstanding").unwrap();
        }
        Err(error) => write!(all, " {error:?}").unwrap(),
    }
    all
}

fn opcode(ulpdu: &[u8]) -> &'static str {
    match ulpdu.get(1).map(|control| control & 0xf) {
        None => "an empty FPDU",
        Some(0) => "Write",
        Some(1) => "Read Request",
        Some(2) => "Read Response",
        Some(3) => "Send",
        Some(7) => "Terminate",
        Some(_) => "another message",
    }
}

/// The name of an event, and its reason if it is short.
fn brief(event: &dyn std::fmt::Debug) -> String {
    let text = format!("{event:?}");
    let name = text.split([' ', '(']).next().unwrap_or_default();
    let reason = ["reason: ", "fault: "].iter().find_map(|key| text.split_once(key)).map(|(_, rest)| rest);
    let reason = reason.map(|rest| rest.split([' ', ',']).next().unwrap_or_default().trim_end_matches('}'));
    reason.map_or_else(|| name.to_owned(), |reason| format!("{name} {reason}"))
}

fn shown<E: std::fmt::Debug>(result: &Result<(), E>) -> String {
    match result {
        Ok(()) => String::new(),
        Err(error) => format!(" {error:?},"),
    }
}

fn post(case: &mut Case, operation: Operation, pieces: &[Sge]) -> String {
    let payload = Payload::Gather(pieces);
    let request = WorkRequest { wr_id: 21, operation, payload, flags: SendFlags::SIGNALED };
    shown(&case.pair.a.rnic.post_send(case.pair.a.qp, &request))
}

fn event(case: &mut Case, event: Event) -> String {
    case.pair.a.rnic.event(CONN, event);
    String::new()
}

fn framing_error(end: &mut End, error: MpaError) {
    end.rnic.event(CONN, Event::StreamError(FramingError::Mpa(error)));
}

/// The peer sends all that it has to send.
fn take_from_peer(case: &mut Case) -> String {
    case.pair.b.pull_all();
    let ulpdus = std::mem::take(&mut case.pair.b.wire);
    ulpdus.iter().map(|(ulpdu, _)| shown(&case.pair.a.take(ulpdu))).collect()
}

fn case(pair: Pair) -> Case {
    let mut case = Case { pair, near: STag::new(0), far: STag::new(0) };
    case.near = case.pair.a.region(200, 0, ALL).0;
    case.far = case.pair.b.region(200, 0, ALL).0;
    case
}

/// `a` has begun to connect; the peer is established.
fn unestablished(then: fn(&mut End)) -> Case {
    let mut pair = Pair { a: End::new(|_, a| a), b: End::new(|_, a| a) };
    pair.b.establish(4, 4, None);
    pair.a.receive(11, &[]);
    then(&mut pair.a);
    case(pair)
}

fn idle() -> Case {
    let mut case = unestablished(|_| ());
    case.pair.a.rnic.event(CONN, Event::Closed(CloseReason::TimedOut));
    assert_eq!(case.pair.a.state(), QpState::Idle);
    case
}

fn accepting() -> Case {
    let mut case = idle();
    let a = &mut case.pair.a;
    let offer = Offer {
        revision: Revision::Two,
        markers: false,
        crc: true,
        send_immediate: false,
        ird: 1,
        ord: 1,
        enhanced: true,
        peer_to_peer: None,
        private_data: Vec::new(),
    };
    let listener = ListenerId(1);
    a.rnic.event(
        CONN,
        Event::Requested { listener, path: path(), offer: xwarp_tcp::framing::Offer::Mpa(offer) },
    );
    a.rnic.accepting(a.qp, RequestId(CONN)).unwrap();
    case
}

fn established(then: fn(&mut Case)) -> Case {
    let mut case = case(Pair::new());
    case.pair.a.receive(11, &[]);
    case.pair.a.receive(12, &[]);
    then(&mut case);
    case
}

/// A Write was sent, a Read is outstanding, and a Send was not begun.
fn work(case: &mut Case) {
    let (near, far) = (case.near, case.far);
    case.pair.b.receive(41, &[]);
    case.pair.a.post(1, write_to(far, 0), &[whole(near, 100)]);
    case.pair.a.post(2, read_from(far, 0), &[whole(near, 100)]);
    case.pair.a.pull_all();
    case.pair.a.post(3, SEND, &[]);
}

fn waiting(case: &mut Case) {
    for _ in 0..3 {
        case.pair.b.post(1, SEND, &[]);
    }
    take_from_peer(case);
}

fn asked(case: &mut Case) {
    case.pair.b.post(1, read_from(case.near, 0), &[whole(case.far, 100)]);
    take_from_peer(case);
}

fn disconnect(case: &mut Case) {
    case.pair.a.rnic.disconnect(case.pair.a.qp).unwrap();
}

fn peer_closed(case: &mut Case) {
    case.pair.a.rnic.event(CONN, Event::PeerClosed);
}

fn terminated(case: &mut Case) {
    framing_error(&mut case.pair.b, MpaError::Crc);
    take_from_peer(case);
}
