//! Connections: second attempts without markers, TCP settings of one connection, and soft errors (RFC 9293 sections
//! 3.8.3, 3.8.4 and 3.9.1.8).

use std::{sync::Arc, time::Duration};

use xwarp_rnic::{
    AsyncEvent, Operation, Payload, QpFault, QpId, RecvRequest, SendFlags, WcStatus, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{CmEvent, CompletionRing, QpAttributes},
    sim::{Station, ipv4, path},
};
use xwarp_tcp::{
    mpa::{Markers, MpaConfig},
    sim::{Faults, Node, Wire, WireConfig, run},
    stack::Polling,
    tcp::{Keepalive, SoftError, Tuning},
    time::Instant,
    ulp::CloseReason,
};

const PORT: u16 = 7;

/// Makes the wire lose every frame (`dark`), or none.
fn darken(wire: &Wire, dark: bool) {
    let faults = Faults { loss: if dark { 1.0 } else { 0.0 }, ..Faults::default() };
    wire.with_faults([faults, faults]);
}

fn without_markers() -> MpaConfig {
    MpaConfig { markers: Markers::Off, ..MpaConfig::default() }
}

struct Pair {
    wire: Wire,
    now: Instant,
    ends: [Station; 2],
    qps: [QpId; 2],
    rings: [Arc<CompletionRing>; 2],
}

impl Pair {
    /// A connection that the first end has requested, and the second will accept.
    fn connecting(mpa: MpaConfig) -> Self {
        let (wire, near, far) = Wire::new(WireConfig::default());
        let mut ends = [near, far].map(|link| Station::new(link, EngineConfig::default()));
        let [(near_qp, near_ring), (far_qp, far_ring)] = [0, 1].map(|end: usize| {
            let engine = &mut ends[end].engine;
            let pd = engine.rnic().registry().alloc_pd().unwrap();
            let (cq, ring) = engine.rnic().registry().create_cq(16, None).unwrap();
            (engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap(), ring)
        });
        let (qps, rings) = ([near_qp, far_qp], [near_ring, far_ring]);
        let [near, far] = &mut ends;
        far.engine.listen(&mut far.link, None, PORT, 8, 1500, Some(mpa.into())).unwrap();
        far.expected.insert(ipv4(1), qps[1]);
        let path = |port| path([(1, port), (2, PORT)], false, 1500);
        let fallbacks = [path(40_001), path(40_002)].into();
        let params = ConnectParams { fallbacks, ..ConnectParams::default() };
        near.engine.connect(Instant::ZERO, &mut near.link, qps[0], path(40_000), params).unwrap();
        Self { wire, now: Instant::ZERO, ends, qps, rings }
    }

    fn connected() -> Self {
        let mut pair = Self::connecting(MpaConfig::default());
        pair.pass(Duration::from_millis(100));
        pair
    }

    fn pass(&mut self, time: Duration) {
        let [a, b] = &mut self.ends;
        run(&self.wire, &mut [a as &mut dyn Node, b], self.now, time, |_, _| false);
        self.now += time;
    }

    /// Refuses markers once: an engine without markers can refuse them only by rejecting the request. It accepts the
    /// second request.
    fn refuse_once(&mut self) {
        let qp = self.ends[1].expected.remove(&ipv4(1)).unwrap();
        // Time to answer otherwise than before.
        let slow = Faults { delay: Duration::from_micros(50), ..Faults::default() };
        self.wire.with_faults([slow, slow]);
        while self.ends[1].events.is_empty() {
            self.pass(Duration::from_micros(10));
            assert!(self.now < Instant::from_nanos(1_000_000_000), "no request came");
        }
        self.ends[1].expected.insert(ipv4(1), qp);
        self.pass(Duration::from_secs(1));
        // From another port: the first connection may still be in TIME-WAIT at the peer.
        let events = &self.ends[0].events;
        assert!(
            matches!(events[..], [CmEvent::Established { local, .. }] if local.port() == 40_001),
            "{events:?}"
        );
    }

    fn told(&mut self, end: usize) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.ends[end].engine.next_async_event()).collect()
    }

    fn send(&mut self) {
        self.send_from(0);
    }

    fn send_from(&mut self, end: usize) {
        let receive = RecvRequest { wr_id: 0, scatter: &[] };
        self.ends[1 - end].engine.rnic_mut().post_recv(self.qps[1 - end], &receive).unwrap();
        let operation = Operation::Send { invalidate: None };
        let request =
            WorkRequest { wr_id: 0, operation, payload: Payload::EMPTY, flags: SendFlags::SIGNALED };
        self.ends[end].engine.rnic_mut().post_send(self.qps[end], &request).unwrap();
    }

    /// A turn of one end, whose application has the time to poll once.
    fn turn(&mut self, end: usize) {
        self.wire.advance(self.now);
        self.ends[end].turn(self.now);
    }
}

/// No thread may sleep before it has caught up. The application that is woken has armed its queue before it began to poll.
#[test]
fn an_engine_with_postponed_work_has_a_deadline_in_the_past() {
    for armed in [false, true] {
        let mut pair = Pair::connected();
        pair.ends[0].engine.set_polling(Polling::Busy);
        if armed {
            pair.rings[0].arm(false);
        }
        for end in [0, 1] {
            pair.send_from(end);
            pair.turn(end);
            pair.turn(1 - end);
        }
        let due = |pair: &Pair| pair.ends[0].engine.next_deadline().is_some_and(|at| at <= pair.now);
        assert!(due(&pair));
        let outstanding = pair.ends[0].engine.rnic().query_qp(pair.qps[0]).unwrap().send_outstanding;
        assert_eq!(outstanding, 0, "the request is complete");
        pair.turn(0);
        assert!(!due(&pair));
    }
}

/// `docs/decisions/0002`: an ACK waits for the reply of an application that was just woken, until its next poll or
/// for a millisecond, whichever comes first.
#[test]
fn sim_a_woken_application_may_reply_before_an_ack_is_sent() {
    let mut pair = Pair::connected();
    let outstanding =
        |pair: &Pair| pair.ends[0].engine.rnic().query_qp(pair.qps[0]).unwrap().send_outstanding;
    let moment = Duration::from_micros(100);
    pair.send();
    pair.pass(moment);
    assert_eq!(outstanding(&pair), 0, "nobody slept");
    pair.rings[1].arm(false);
    pair.send();
    pair.pass(moment);
    assert_eq!(outstanding(&pair), 1);
    pair.pass(moment);
    assert_eq!(outstanding(&pair), 0, "it has polled again");
    pair.rings[1].arm(false);
    pair.send();
    pair.pass(Duration::from_micros(1200));
    assert_eq!(outstanding(&pair), 0, "it has not, for a millisecond");
}

#[test]
fn rfc9293_s3_9_1_8_a_soft_error_is_reported_once_until_data_is_delivered() {
    let mut pair = Pair::connected();
    let qp = pair.qps[0];
    for _ in 0..2 {
        darken(&pair.wire, true);
        pair.send();
        pair.pass(Duration::from_secs(5));
        assert_eq!(pair.told(0), [AsyncEvent::SoftError { qp, error: SoftError::NoAnswer }]);
        darken(&pair.wire, false);
        pair.pass(Duration::from_secs(20));
        assert_eq!(pair.ends[0].engine.rnic().query_qp(qp).unwrap().send_outstanding, 0, "it went through");
    }
    assert_eq!(pair.told(0), []);
    assert_eq!(pair.told(1), [], "who has nothing to send does not know");
}

#[test]
fn rfc9293_s3_8_3_a_connection_has_a_user_timeout_of_its_own() {
    let mut pair = Pair::connected();
    let tuning = pair.ends[0].engine.tuning_defaults();
    assert_eq!(tuning.user_timeout, Duration::from_secs(30));
    darken(&pair.wire, true);
    pair.send();
    pair.pass(Duration::from_secs(2));
    let [AsyncEvent::SoftError { .. }] = pair.told(0)[..] else { panic!("a soft error") };
    // From now on, also for waiting data.
    let (now, [near, _]) = (pair.now, &mut pair.ends);
    let tuning = Tuning { user_timeout: Duration::from_millis(2500), ..tuning };
    near.engine.tune(now, pair.qps[0], &tuning).unwrap();
    pair.pass(Duration::from_millis(700));
    let fault = QpFault::Connection(CloseReason::TimedOut);
    assert_eq!(pair.told(0), [AsyncEvent::QpFatal { qp: pair.qps[0], fault }]);
}

/// Both ends only wait for receives. `docs/decisions/0013`.
#[test]
fn a_vanished_peer_is_detected_by_default_without_traffic() {
    let mut pair = Pair::connected();
    for end in 0..2 {
        let receive = RecvRequest { wr_id: 7, scatter: &[] };
        pair.ends[end].engine.rnic_mut().post_recv(pair.qps[end], &receive).unwrap();
    }
    pair.pass(Duration::from_hours(1));
    assert_eq!((pair.told(0), pair.told(1)), (vec![], vec![]), "who answers lives");
    let [near, far] = [0, 1].map(|end: usize| pair.ends[end].engine.stack().tcp_counters());
    assert_eq!(near.keepalives, 240, "each 15 s from the end that opened the connection");
    assert_eq!(far.keepalives, 0);

    darken(&pair.wire, true);
    pair.pass(Duration::from_secs(35));
    for end in 0..2 {
        let fault = QpFault::Connection(CloseReason::TimedOut);
        assert_eq!(pair.told(end), [AsyncEvent::QpFatal { qp: pair.qps[end], fault }]);
        let mut completions = Vec::new();
        assert_eq!(pair.rings[end].poll(&mut completions, 2), 1);
        assert_eq!((completions[0].wr_id, completions[0].status), (7, WcStatus::Flushed));
    }
}

#[test]
fn rfc9293_s3_8_4_keepalive_can_be_switched_for_each_connection() {
    let mut pair = Pair::connected();
    let (now, qps) = (pair.now, pair.qps);
    let mut tuning = pair.ends[1].engine.tuning_defaults();
    assert_eq!(tuning.keepalive, Some(Keepalive::default()), "on by default, against MUST-25");
    tuning.keepalive = None;
    pair.ends[0].engine.tune(now, qps[0], &tuning).unwrap();
    let second = Duration::from_secs(1);
    tuning.keepalive = Some(Keepalive { idle: second, interval: second, probes: 3 });
    pair.ends[1].engine.tune(now, qps[1], &tuning).unwrap();
    pair.pass(Duration::from_secs(10));
    assert_eq!((pair.told(0), pair.told(1)), (vec![], vec![]), "who answers lives");
    darken(&pair.wire, true);
    pair.pass(Duration::from_mins(10));
    let fault = QpFault::Connection(CloseReason::TimedOut);
    assert_eq!(pair.told(1), [AsyncEvent::QpFatal { qp: qps[1], fault }]);
    assert_eq!(pair.told(0), [], "without keepalive nothing is noticed");
}

#[test]
fn a_second_attempt_without_markers_is_tuned_like_the_first() {
    let mut pair = Pair::connecting(without_markers());
    let (now, qp) = (pair.now, pair.qps[0]);
    let second = Duration::from_secs(1);
    let mut tuning = pair.ends[0].engine.tuning_defaults();
    tuning.keepalive = Some(Keepalive { idle: second, interval: second, probes: 3 });
    pair.ends[0].engine.tune(now, qp, &tuning).unwrap();
    pair.refuse_once();
    darken(&pair.wire, true);
    pair.pass(Duration::from_secs(10));
    let fault = QpFault::Connection(CloseReason::TimedOut);
    assert_eq!(pair.told(0), [AsyncEvent::QpFatal { qp, fault }]);
}

#[test]
fn design_s5_a_peer_that_refuses_markers_is_connected_again_without_them_and_remembered() {
    let mut pair = Pair::connecting(without_markers());
    pair.refuse_once();

    // The next connection to that peer uses no markers from the start, so a rejection is final.
    let [near, _] = &mut pair.ends;
    let attributes = near.engine.rnic().query_qp(pair.qps[0]).unwrap().attributes;
    let other = near.engine.rnic_mut().create_qp(attributes).unwrap();
    near.events.clear();
    let path = path([(1, 40_002), (2, PORT)], false, 1500);
    near.engine.connect(pair.now, &mut near.link, other, path, ConnectParams::default()).unwrap();
    pair.pass(Duration::from_secs(1));
    let events = &pair.ends[0].events;
    assert!(matches!(events[..], [CmEvent::Rejected { .. }]), "{events:?}");
}

#[test]
fn a_rejection_by_the_application_is_final() {
    let mut pair = Pair::connecting(MpaConfig::default());
    pair.ends[1].expected.clear();
    pair.pass(Duration::from_secs(1));
    let events = &pair.ends[0].events;
    assert!(matches!(events[..], [CmEvent::Rejected { .. }]), "{events:?}");
}

#[test]
fn a_queue_pair_reports_the_statistics_of_its_connection() {
    let mut pair = Pair::connected();
    pair.ends[1].engine.rnic_mut().post_recv(pair.qps[1], &RecvRequest { wr_id: 1, scatter: &[] }).unwrap();
    let send = WorkRequest {
        wr_id: 2,
        operation: Operation::Send { invalidate: None },
        payload: Payload::Inline(b""),
        flags: SendFlags::SIGNALED,
    };
    pair.ends[0].engine.rnic_mut().post_send(pair.qps[0], &send).unwrap();
    pair.pass(Duration::from_millis(500));
    let [near, far] = [0, 1].map(|end| pair.ends[end].engine.qp_statistics(pair.qps[end]).unwrap());
    assert_eq!((near.rdmap.sends, near.rdmap.sends_in), (1, 0));
    assert_eq!((far.rdmap.sends, far.rdmap.sends_in), (0, 1));
    let tcp = near.tcp.expect("a connection has numbers of TCP");
    assert!(tcp.srtt.is_some() && tcp.cwnd > 0 && tcp.counters.segments_out > 0);
    assert!(near.framing.is_some());
    // The counters of the device include those of destroyed queue pairs.
    pair.ends[0].engine.rnic_mut().destroy_qp(pair.qps[0]).unwrap();
    assert_eq!(pair.ends[0].engine.rnic().counters().rdmap.sends, 1);
    assert!(pair.ends[0].engine.qp_statistics(pair.qps[0]).is_err());
}
