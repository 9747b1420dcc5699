//! Whole engines over the virtual wire, where the public interface shows too little.

use std::{collections::VecDeque, time::Duration};

use xwarp_tcp::{
    link::Link,
    mpa::{AcceptParams, Markers},
    sim::{self, Node, Outcome, SimLink, Wire, WireConfig, run},
    wire::Path,
};

use super::*;

const PORT: u16 = 7;

/// An engine on one end of the wire, and the connection events that it raised.
struct Station {
    engine: Engine,
    link: SimLink,
    events: Vec<CmEvent>,
    /// What becomes of the requests that come in: `None` is rejected, the others accepted.
    answers: VecDeque<Option<QpId>>,
}

impl Station {
    fn new(link: SimLink) -> (Self, QpId) {
        let mut engine = Engine::new(EngineConfig::default());
        let pd = engine.alloc_pd().unwrap();
        let (cq, _) = engine.create_cq(16, None).unwrap();
        let qp = engine.create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
        (Self { engine, link, events: Vec::new(), answers: VecDeque::new() }, qp)
    }
}

impl Node for Station {
    fn turn(&mut self, now: Instant) -> bool {
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 64);
        let received = !batch.is_empty();
        for frame in batch {
            self.engine.receive(now, &mut self.link, frame);
        }
        if self.engine.next_deadline().is_some_and(|at| at <= now) {
            self.engine.on_timer(now, &mut self.link);
        }
        while let Some(event) = self.engine.next_cm_event() {
            if let CmEvent::ConnectRequest { request, .. } = event {
                match self.answers.pop_front().expect("no request beyond those foreseen") {
                    Some(qp) => self.engine.accept(now, request, qp, AcceptParams::default()).unwrap(),
                    None => self.engine.reject(now, request, &[]).unwrap(),
                }
            }
            self.events.push(event);
        }
        if !received {
            self.engine.idle(now, &mut self.link);
        }
        self.engine.transmit(now, &mut self.link);
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.engine.stack().next_deadline()
    }
}

fn path(port: u16) -> Path {
    sim::path(([192, 0, 2, 1], port), ([192, 0, 2, 2], PORT))
}

#[test]
fn design_s5_a_peer_that_refuses_markers_is_asked_once_more_and_remembered() {
    let (wire, near, far) = Wire::new(WireConfig::default());
    let (mut near, qp) = Station::new(near);
    let (mut far, peer) = Station::new(far);
    let mpa = MpaConfig { markers: Markers::Off, ..MpaConfig::default() };
    far.engine.listen(&mut far.link, None, PORT, 8, 1500, Some(mpa)).unwrap();
    // A card without markers can refuse them only by rejecting the request.
    far.answers = [None, Some(peer)].into();
    let start = Instant::ZERO;
    let params = ConnectParams { fallback: Some(path(40_500)), ..ConnectParams::default() };
    near.engine.connect(start, &mut near.link, qp, path(40_000), params).unwrap();
    let outcome = run(&wire, &mut [&mut near, &mut far], start, Duration::from_secs(5), |_, _| false);
    assert_ne!(outcome, Outcome::TimeLimit);
    // From another port: the first connection may still be in TIME-WAIT at the peer.
    assert!(
        matches!(near.events[..], [CmEvent::Established { local, .. }] if local.port() == 40_500),
        "{:?}",
        near.events
    );
    assert!(far.answers.is_empty());

    // The next connection to that peer does without from the start.
    let other = near.engine.query_qp(qp).unwrap().attributes;
    let other = near.engine.create_qp(other).unwrap();
    far.answers = [None].into();
    near.events.clear();
    let start = start + Duration::from_secs(5);
    near.engine.connect(start, &mut near.link, other, path(40_001), ConnectParams::default()).unwrap();
    run(&wire, &mut [&mut near, &mut far], start, Duration::from_secs(5), |_, _| false);
    assert!(matches!(near.events[..], [CmEvent::Rejected { .. }]), "{:?}", near.events);
}

#[test]
fn what_is_rejected_without_markers_in_play_is_a_rejection() {
    let (wire, near, far) = Wire::new(WireConfig::default());
    let (mut near, qp) = Station::new(near);
    let (mut far, _) = Station::new(far);
    far.engine.listen(&mut far.link, None, PORT, 8, 1500, None).unwrap();
    far.answers = [None].into();
    let start = Instant::ZERO;
    near.engine.connect(start, &mut near.link, qp, path(40_000), ConnectParams::default()).unwrap();
    run(&wire, &mut [&mut near, &mut far], start, Duration::from_secs(5), |_, _| false);
    assert!(matches!(near.events[..], [CmEvent::Rejected { .. }]), "{:?}", near.events);
}
