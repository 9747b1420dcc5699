//! Errors of the start-up in both roles: the TCP connection is closed immediately (RFC 5044 section 8, code
//! 4), and a Terminate precedes that only where both ends agreed on full operation (RFC 6581 section 8).

use std::{
    net::{SocketAddr, TcpListener},
    sync::mpsc::{Receiver, channel},
    thread,
};

use anyhow::Result;
use xwarp_checks::{
    hostile::{CRC, ENHANCED, End, REPLY, REQUEST, SocketPeer, Terminate, start_up, tagged},
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};
use xwarp_verbs::{
    Device, Markers, MpaConfig, QpState, QueuePairOptions, RequestRevision, Rtr,
    cm::{ConnectOptions, ConnectionError},
};

use super::{Keys, LIMIT, PORT, SHORT, Server, document, testify};

/// A failing start-up: its description, the section, and the function that sends it.
type Failure = (&'static str, &'static str, fn(&mut SocketPeer) -> Result<()>);

fn say(peer: &mut SocketPeer, bytes: &[u8]) -> Result<()> {
    Ok(peer.say(bytes)?)
}

/// Start-ups that a responder rejects.
const REQUESTS: &[Failure] = &[
    ("HTTP", "5044 7.1.1", |peer| say(peer, b"GET / HTTP/1.0\r\n\r\n")),
    ("a Reply instead of a Request", "5044 7.1.2, rule 8", |peer| say(peer, &start_up(REPLY, CRC, 1, b""))),
    ("revision 0", "5044 7.1.1", |peer| say(peer, &start_up(REQUEST, CRC, 0, b""))),
    ("revision 3", "5044 7.1.1", |peer| say(peer, &start_up(REQUEST, CRC, 3, b""))),
    ("513 bytes of private data", "5044 7.1.1", |peer| say(peer, &start_up(REQUEST, CRC, 1, &[0; 513]))),
    ("S without room for IRD and ORD", "6581 6", |peer| {
        say(peer, &start_up(REQUEST, CRC | ENHANCED, 2, &[0; 3]))
    }),
    ("an FPDU after the Request", "5044 7.1.2, rule 2", |peer| {
        let fpdu = peer.frame(&tagged(0x40, 0, 0, b""));
        say(peer, &[start_up(REQUEST, CRC, 1, b""), fpdu].concat())
    }),
    ("FIN in the middle of the Request", "5044 8, code 1", |peer| {
        say(peer, &start_up(REQUEST, CRC, 1, b"")[..10])?;
        Ok(peer.finish()?)
    }),
    ("nothing until the time limit", "5044 7.1.2, rule 6", |_| Ok(())),
    ("half a Request until the time limit", "5044 7.1.2, rule 6", |peer| {
        say(peer, &start_up(REQUEST, CRC, 1, b"private")[..22])
    }),
];

fn fail_requests(server: SocketAddr, keys: &Receiver<Keys>) -> Vec<String> {
    let mut witness = SocketPeer::started(server, false, LIMIT).unwrap();
    let keys = keys.recv().unwrap();
    let mut rows = Vec::new();
    for ((sent, rule, provoke), round) in REQUESTS.iter().zip(1..) {
        let mut peer = SocketPeer::connect(server, LIMIT).unwrap();
        provoke(&mut peer).unwrap();
        let (_, end) = peer.to_the_end().unwrap();
        assert_eq!(peer.heard(), b"", "{sent}: no reply");
        assert_ne!(end, End::Open, "{sent}: closed");
        testify(&mut witness, keys, round);
        rows.push(format!("| {sent} | {rule} | closed, without a reply | {} |", end.word()));
    }
    rows
}

#[test]
fn netns_every_bad_request_closes_the_connection() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::B, Family::V6), PORT);
    let ((ready, is_ready), (tell_keys, keys), (done, all_done)) = (channel(), channel(), channel());
    let rows = thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            let server = Server::open(address, &ready);
            tell_keys.send(server.keys).unwrap();
            // A peer that panics closes its socket; the test ends in both cases.
            let _: Result<(), _> = all_done.recv();
            server.over();
        });
        is_ready.recv().unwrap();
        let client = lab.enter(scope, Side::A, move || {
            let rows = fail_requests(address, &keys);
            drop(done);
            rows
        });
        let rows = client.unwrap().join().unwrap();
        server.unwrap().join().unwrap();
        rows
    });
    document::check("requests", &rows);
}

/// A start-up that an initiator rejects, with its settings and the expected Terminate.
struct Refusal {
    failure: Failure,
    mpa: fn() -> MpaConfig,
    terminate: Option<(u8, u8, u8)>,
}

fn plain() -> MpaConfig {
    // Every failure is final: no second attempt with revision 1.
    let revision = RequestRevision::RequireTwo;
    MpaConfig { markers: Markers::Off, revision, startup_timeout: SHORT, ..MpaConfig::default() }
}

fn with_markers() -> MpaConfig {
    MpaConfig { markers: Markers::Require, ..plain() }
}

fn peer_to_peer() -> MpaConfig {
    MpaConfig { peer_to_peer: vec![Rtr::Write], ..plain() }
}

const fn refusal(
    sent: &'static str,
    rule: &'static str,
    provoke: fn(&mut SocketPeer) -> Result<()>,
) -> Refusal {
    Refusal { failure: (sent, rule, provoke), mpa: plain, terminate: None }
}

const REPLIES: &[Refusal] = &[
    refusal("HTTP", "5044 7.1.1", |peer| say(peer, b"HTTP/1.0 400 Bad Request\r\n\r\n")),
    refusal("a Request instead of a Reply", "5044 7.1.2, rule 8", |peer| {
        say(peer, &start_up(REQUEST, CRC | ENHANCED, 2, &[0; 4]))
    }),
    refusal("revision 3", "5044 7.1.1", |peer| say(peer, &start_up(REPLY, CRC, 3, b""))),
    refusal("513 bytes of private data", "5044 7.1.1", |peer| {
        say(peer, &start_up(REPLY, CRC | ENHANCED, 2, &[0; 513]))
    }),
    refusal("revision 2 without S", "6581 6", |peer| say(peer, &start_up(REPLY, CRC, 2, b""))),
    refusal("S without room for IRD and ORD", "6581 6", |peer| {
        say(peer, &start_up(REPLY, CRC | ENHANCED, 2, &[0; 3]))
    }),
    refusal("FIN in the middle of the Reply", "5044 8, code 1", |peer| {
        say(peer, &start_up(REPLY, CRC, 2, b"")[..10])?;
        Ok(peer.finish()?)
    }),
    refusal("nothing until the time limit", "5044 7.1.2, rule 6", |_| Ok(())),
    Refusal {
        mpa: with_markers,
        ..refusal("rejection without private data when markers are required", "5044 7.1.2", |peer| {
            say(peer, &start_up(REPLY, CRC | ENHANCED | 0x20, 2, &[0; 4]))
        })
    },
    Refusal {
        terminate: Some((2, 0, 6)),
        ..refusal("an ORD above our maximum IRD", "6581 9.1", |peer| {
            say(peer, &start_up(REPLY, CRC | ENHANCED, 2, &[0, 4, 0x0f, 0xff]))
        })
    },
    Refusal {
        mpa: peer_to_peer,
        terminate: Some((2, 0, 7)),
        ..refusal("an RTR that was not offered", "6581 9.2", |peer| {
            say(peer, &start_up(REPLY, CRC | ENHANCED, 2, &[0x80, 4, 0x40, 4]))
        })
    },
];

/// The raw responder: sends the start-up of each case and returns the response.
fn answer(listener: &TcpListener) -> Vec<(Option<Terminate>, End)> {
    let mut seen = Vec::new();
    for Refusal { failure: (sent, _, provoke), terminate, .. } in REPLIES {
        let mut peer = SocketPeer::accept(listener, LIMIT).unwrap();
        provoke(&mut peer).unwrap();
        let (heard, end) = peer.to_the_end().unwrap();
        assert_eq!(heard.len(), usize::from(terminate.is_some()), "{sent}: {heard:02x?}");
        let came = heard.first().map(|ulpdu| Terminate::read(ulpdu).unwrap());
        assert_eq!(came.as_ref().map(|came| came.numbers), *terminate, "{sent}");
        assert_ne!(end, End::Open, "{sent}: closed");
        seen.push((came, end));
    }
    seen
}

/// The initiator: returns the verb's error in each case.
fn connect_to_all(peer: SocketAddr) -> Vec<String> {
    let device = Device::open(INTERFACE).unwrap();
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(16).unwrap();
    let said = REPLIES.iter().map(|Refusal { failure: (sent, ..), mpa, .. }| {
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        let options = ConnectOptions { framing: Some(mpa().into()), ..ConnectOptions::default() };
        let error = device.connect(&qp, peer, options, LIMIT).unwrap_err();
        assert!(matches!(error, ConnectionError::Failed(_)), "{sent}: {error:?}");
        assert_ne!(qp.state(), QpState::Rts, "{sent}");
        error.to_string()
    });
    said.collect()
}

#[test]
fn netns_every_bad_reply_fails_the_connection() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    let listener = lab.within(Side::A, || TcpListener::bind(address).unwrap()).unwrap();
    let (seen, said) = thread::scope(|scope| {
        let peer = scope.spawn(|| answer(&listener));
        let initiator = lab.enter(scope, Side::B, || connect_to_all(address)).unwrap();
        let said = initiator.join().unwrap();
        (peer.join().unwrap(), said)
    });
    let rows = REPLIES.iter().zip(&seen).zip(&said).map(|((refusal, (came, end)), said)| {
        let (sent, rule, _) = refusal.failure;
        let expected = refusal.terminate.map_or("closed".to_owned(), document::expected);
        let came = came.as_ref().map_or(String::new(), |came| format!("{}, ", document::numbers(came)));
        format!("| {sent} | {rule} | {expected} | {came}{}: {said} |", end.word())
    });
    document::check("replies", &rows.collect::<Vec<_>>());
}
