//! Every detectable error of a peer, sent by a raw sender over the kernel's TCP, and our response: layer,
//! type and code, and the quoted part of the message. `docs/measurements/terminate.md` has the table; the
//! tests compare it, or with `XWARP_WRITE_TABLES=1` write it.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "terminate/cases.rs"]
mod cases;
#[path = "terminate/document.rs"]
mod document;
#[path = "terminate/start_up.rs"]
mod start_up;

use std::{
    net::SocketAddr,
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use xwarp_checks::{
    hostile::{End, SocketPeer, Terminate, read_request, tagged},
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
};
use xwarp_verbs::{
    Access, AsyncEvent, CompletionQueue, Device, Memory, MemoryRegion, MpaConfig, NoReceive, Pages,
    ProtectionDomain, QpFault, QpState, QueuePair, QueuePairOptions, RecvRequest, RegionOptions, Remote,
    STag, WcStatus, WorkRequest,
    cm::{AcceptOptions, Connection, ListenOptions},
};

use cases::{CASES, Case, Quote};

const LIMIT: Duration = Duration::from_secs(10);
/// Time limits of the server.
const SHORT: Duration = Duration::from_millis(300);
const PORT: u16 = 4791;
/// Size of each region and of each receive, in bytes.
const REGION: usize = 32;
const RECEIVE: usize = 16;

/// Keys of the server's regions, by the rights of the peer.
#[derive(Debug, Clone, Copy)]
struct Keys {
    open: u32,
    no_read: u32,
    no_write: u32,
    no_atomic: u32,
    other_domain: u32,
    other_stream: u32,
    gone: u32,
    /// For the witness connection only.
    witness: u32,
}

/// The server of all cases: one device, and a witness connection that must not be affected.
struct Server {
    device: Device,
    pd: ProtectionDomain,
    _other_pd: ProtectionDomain,
    _regions: Vec<MemoryRegion>,
    inbox: MemoryRegion,
    keys: Keys,
    witness: (QueuePair, CompletionQueue, Connection),
    listener: xwarp_verbs::cm::Listener,
}

/// The state of the server's queue pair after a case.
#[derive(Debug)]
struct Outcome {
    state: QpState,
    fault: Option<QpFault>,
    statuses: Vec<WcStatus>,
}

impl Server {
    /// Opens the device, signals that the listener is ready, and accepts the witness.
    fn open(address: SocketAddr, ready: &Sender<()>) -> Self {
        let device = Device::open(INTERFACE).unwrap();
        let pd = device.create_pd().unwrap();
        let other_pd = device.create_pd().unwrap();
        let mpa = MpaConfig { withhold_timeout: SHORT, startup_timeout: SHORT, ..MpaConfig::default() };
        let listener = device
            .listen(address, ListenOptions { framing: Some(mpa.into()), ..ListenOptions::default() })
            .unwrap();
        ready.send(()).unwrap();
        let mut request = listener.accept(LIMIT).unwrap();
        let cq = device.create_cq(16).unwrap();
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
        let connection = request.accept(&qp, AcceptOptions::default(), LIMIT).unwrap();
        let all = Access::all();
        let bound = RegionOptions { only_for: Some(qp.id()), ..RegionOptions::default() };
        let memory = || Memory::anonymous(REGION, Pages::Normal).unwrap();
        let regions = vec![
            pd.allocate(REGION, all).unwrap(),
            pd.allocate(REGION, all.difference(Access::REMOTE_READ)).unwrap(),
            pd.allocate(REGION, all.difference(Access::REMOTE_WRITE)).unwrap(),
            pd.allocate(REGION, all.difference(Access::REMOTE_ATOMIC)).unwrap(),
            other_pd.allocate(REGION, all).unwrap(),
            pd.register_with(memory(), all, bound).unwrap(),
            pd.register_with(memory(), all, bound).unwrap(),
        ];
        let [open, no_read, no_write, no_atomic, other_domain, other_stream, witness] =
            [0, 1, 2, 3, 4, 5, 6].map(|n: usize| regions[n].key().value());
        let gone = pd.allocate(REGION, all).unwrap().key().value();
        let keys = Keys { open, no_read, no_write, no_atomic, other_domain, other_stream, gone, witness };
        let inbox = pd.allocate(REGION, Access::LOCAL_WRITE).unwrap();
        Self {
            device,
            pd,
            _other_pd: other_pd,
            _regions: regions,
            inbox,
            keys,
            witness: (qp, cq, connection),
            listener,
        }
    }

    /// Accepts the connection of one case and returns its outcome.
    fn serve(&self, case: &Case) -> Outcome {
        let cq = self.device.create_cq(16).unwrap();
        let no_receive = if case.strict { NoReceive::Terminate } else { NoReceive::Withhold };
        let options = QueuePairOptions { no_receive, ..QueuePairOptions::default() };
        let qp = self.pd.create_qp(&cq, &cq, options).unwrap();
        let stale = self.pd.allocate(REGION, Access::LOCAL_WRITE).unwrap();
        for id in 0..case.receives {
            let region = if case.stale { &stale } else { &self.inbox };
            qp.post_recv(&RecvRequest::new(id, &[region.sge(0, RECEIVE)])).unwrap();
        }
        drop(stale);
        let mut request = self.listener.accept(LIMIT).unwrap();
        let depths = AcceptOptions { ird: 2, ord: 2, ..AcceptOptions::default() };
        let connection = request.accept(&qp, depths, LIMIT).unwrap();
        let mut posted = case.receives;
        if case.reads {
            let piece = self.inbox.sge(0, RECEIVE);
            let remote = Remote { key: STag::new(9), offset: 0 };
            qp.post_send(&WorkRequest::read(100, piece, remote).signaled()).unwrap();
            posted += 1;
        }
        let begin = Instant::now();
        while qp.state() != QpState::Error && begin.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(connection.wait_disconnected(LIMIT).unwrap());
        let statuses = std::iter::from_fn(|| cq.poll_one()).map(|completion| completion.status).collect();
        let events = self.device.async_events();
        let fault = std::iter::from_fn(|| events.poll()).find_map(|event| match event {
            AsyncEvent::QpFatal { qp: of, fault } if of == qp.id() => Some(fault),
            _ => None,
        });
        let outcome = Outcome { state: qp.state(), fault, statuses };
        assert_eq!(outcome.statuses.len() as u64, posted, "{}: {outcome:?}", case.sent);
        outcome
    }

    /// Asserts that all frames are back after the last connection.
    fn over(self) {
        let Self { device, witness: (qp, cq, connection), listener, .. } = self;
        drop((listener, connection, qp, cq));
        let begin = Instant::now();
        let out = || ["link.chunks_held", "link.chunks_retained"].map(|name| device.counters().value(name));
        while out() != [Some(0); 2] && begin.elapsed() < LIMIT {
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(out(), [Some(0); 2], "frames leaked");
    }
}

/// The witness writes a word and reads it back, to show that the device's other connections still work.
fn testify(witness: &mut SocketPeer, keys: Keys, round: u32) {
    let word = round.to_be_bytes();
    witness.send(&tagged(0x40, keys.witness, 8, &word)).unwrap();
    witness.send(&read_request(round, keys.witness, 8, 4)).unwrap();
    let answers = witness.expect(round as usize);
    let answers = answers.unwrap_or_else(|error| panic!("the other connection, round {round}: {error:#}"));
    assert_eq!(answers[round as usize - 1][14..], word, "the other connection goes on");
}

/// Runs all cases on the peer's side and returns the rows of the table.
fn provoke(server: SocketAddr, keys: &Receiver<Keys>, outcomes: &Receiver<Outcome>) -> Vec<String> {
    let mut witness = SocketPeer::started(server, false, LIMIT).unwrap();
    let keys = keys.recv().unwrap();
    let mut rows = Vec::new();
    for (case, round) in CASES.iter().zip(1..) {
        let started = SocketPeer::started(server, case.markers, LIMIT);
        let mut peer = started.unwrap_or_else(|error| panic!("{}: {error:#}", case.sent));
        let provoked = (case.provoke)(keys, &mut peer);
        let sent = provoked.unwrap_or_else(|error| panic!("{}: {error:#}", case.sent));
        let (heard, end) = peer.to_the_end().unwrap();
        let what = case.sent;
        let last = heard.last().unwrap_or_else(|| panic!("{what}: no Terminate before {end:?}"));
        let terminate = Terminate::read(last).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(terminate.numbers, case.numbers, "{what}: {terminate:02x?}");
        let quoted = match case.quote {
            Quote::Nothing => (None, None, None),
            Quote::Header | Quote::Request => {
                let header = if sent[0] & 0x80 == 0 { 18 } else { 14 };
                let request = (case.quote == Quote::Request).then(|| sent[18..46].to_vec());
                (Some(sent.len() as u16), Some(sent[..header].to_vec()), request)
            }
        };
        let Terminate { length, ddp, rdma, .. } = &terminate;
        assert_eq!((*length, ddp.clone(), rdma.clone()), quoted, "{what}: what is quoted");
        assert_eq!(end, End::Closed, "{what}: closed in order behind the Terminate");
        drop(peer);
        let outcome = outcomes.recv().unwrap();
        assert_eq!(outcome.state, QpState::Error, "{what}");
        assert!(matches!(outcome.fault, Some(QpFault::Local(_))), "{what}: {outcome:?}");
        assert!(!outcome.statuses.contains(&WcStatus::Success), "{what}: {outcome:?}");
        assert_eq!(outcome.statuses.first().copied().filter(|_| case.fails.is_some()), case.fails, "{what}");
        testify(&mut witness, keys, round);
        rows.push(document::row(case, &terminate));
    }
    rows
}

#[test]
fn netns_every_error_of_a_peer_is_answered_by_its_terminate() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let address = SocketAddr::new(lab.address(Side::B, Family::V4), PORT);
    let ((ready, is_ready), (tell_keys, keys), (tell, outcomes)) = (channel(), channel(), channel());
    let (done, all_done) = channel::<()>();
    let rows = thread::scope(|scope| {
        let server = lab.enter(scope, Side::B, move || {
            let server = Server::open(address, &ready);
            tell_keys.send(server.keys).unwrap();
            for case in CASES {
                tell.send(server.serve(case)).unwrap();
            }
            // The witness connection still works.
            let _: Result<(), _> = all_done.recv();
            server.over();
        });
        is_ready.recv().unwrap();
        let client = lab.enter(scope, Side::A, move || provoke(address, &keys, &outcomes)).unwrap();
        let rows = client.join();
        drop(done);
        server.unwrap().join().unwrap();
        rows.unwrap()
    });
    document::check("established", &rows);
}
