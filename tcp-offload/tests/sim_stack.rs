//! Two stacks over the virtual wire, with an upper layer that numbers its ULPDUs and checks that each is
//! placed once with the right bytes and delivered once, in order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use xwarp_tcp::{
    link::{Link, QueueId, RxFrame},
    mpa::{AcceptParams, Markers, MpaConfig},
    secret::Secret,
    seq::StreamOffset,
    sim::{Faults, Gilbert, Node, Outcome, SimLink, Wire, WireConfig, run},
    stack::{ConnectParams, Stack, StackConfig},
    tcp::IsnKey,
    time::Instant,
    ulp::{Arrival, CloseReason, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
    wire::{Flow, Mac, Path, VlanTags},
};

const HEADER: usize = 12;

/// Sends `total` numbered ULPDUs of pseudo-random sizes and checks the ones that come.
#[derive(Debug, Default)]
struct Counting {
    /// Passive side: the request to accept, its answer is given after the receive call.
    requested: Option<ConnId>,
    established: Option<ConnId>,
    to_send: u32,
    sent: u32,
    sent_ends: Vec<StreamOffset>,
    acked: StreamOffset,
    placed: HashMap<u32, usize>,
    early: usize,
    delivered: u32,
    finish: bool,
    peer_closed: bool,
    closed: Option<CloseReason>,
    errors: Vec<String>,
}

fn size_of(number: u32) -> usize {
    HEADER + (number.wrapping_mul(2_654_435_761) >> 20) as usize % 3000
}

fn byte_of(number: u32, at: usize) -> u8 {
    (number as usize * 31 + at * 7) as u8
}

impl Ulp for Counting {
    type Placed = u32;

    fn place(&mut self, _conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<u32, Refusal> {
        let mut header = [0; HEADER];
        assert_eq!(ulpdu.peek(&mut header), HEADER);
        let number = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        ulpdu.for_each(HEADER, |offset, bytes| {
            for (i, byte) in bytes.iter().enumerate() {
                assert_eq!(*byte, byte_of(number, offset + i), "ULPDU {number} at {}", offset + i);
            }
        });
        *self.placed.entry(number).or_default() += 1;
        self.early += usize::from(arrival == Arrival::Early);
        Ok(number)
    }

    fn deliver(&mut self, _conn: ConnId, number: u32) -> Result<(), Refusal> {
        assert_eq!(number, self.delivered, "delivered in order");
        self.delivered += 1;
        Ok(())
    }

    fn pull(&mut self, _conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        if self.sent == self.to_send {
            return if self.finish { Pulled::Finish } else { Pulled::Nothing };
        }
        let number = self.sent;
        let size = size_of(number).min(out.mulpdu());
        if out.room() < size {
            return Pulled::Nothing;
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&number.to_be_bytes());
        out.put(&header);
        out.fill(size - HEADER, |offset, bytes| {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = byte_of(number, offset + i);
            }
        });
        self.sent += 1;
        self.sent_ends.push(out.end());
        Pulled::Ulpdu
    }

    fn acked(&mut self, _conn: ConnId, offset: StreamOffset) {
        assert!(offset >= self.acked, "acknowledgements never go back");
        self.acked = offset;
    }

    fn event(&mut self, conn: ConnId, event: Event) {
        match event {
            Event::Requested { offer, .. } => {
                assert_eq!(offer.private_data, b"hello");
                self.requested = Some(conn);
            }
            Event::Established { .. } => self.established = Some(conn),
            Event::PeerClosed => {
                self.peer_closed = true;
                self.finish = true;
            }
            Event::Closed(reason) => self.closed = Some(reason),
            other => self.errors.push(format!("{other:?}")),
        }
    }
}

struct End {
    stack: Stack<Counting>,
    ulp: Counting,
    link: SimLink,
    batch: Vec<RxFrame>,
}

impl Node for End {
    fn turn(&mut self, now: Instant) -> bool {
        let received = self.link.receive(&mut self.batch, 64);
        for frame in self.batch.drain(..) {
            self.stack.receive(now, &mut self.link, frame, &mut self.ulp);
        }
        if let Some(conn) = self.ulp.requested.take() {
            let params = AcceptParams { ird: 4, ord: 4, private_data: b"welcome".to_vec() };
            self.stack.accept(now, conn, params, &mut self.ulp).unwrap();
        }
        if self.stack.next_deadline().is_some_and(|d| d <= now) {
            self.stack.on_timer(now, &mut self.link, &mut self.ulp);
        }
        if received == 0 {
            self.stack.idle();
        }
        if let Some(conn) = self.ulp.established {
            self.stack.wake(conn);
        }
        self.stack.transmit(now, &mut self.link, &mut self.ulp);
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }
}

fn end(link: SimLink, seed: u64) -> End {
    let stack = Stack::new(StackConfig { secret: Secret::from_number(seed), ..Default::default() });
    End { stack, ulp: Counting::default(), link, batch: Vec::new() }
}

fn path(from: &str, to: &str) -> Path {
    let flow = Flow { local: from.parse().unwrap(), remote: to.parse().unwrap() };
    Path {
        flow,
        source_mac: Mac([2, 0, 0, 0, 0, 1]),
        next_hop_mac: Mac([2, 0, 0, 0, 0, 2]),
        vlan: VlanTags::default(),
        mtu: 1500,
        queue: QueueId(0),
    }
}

struct Scenario {
    name: &'static str,
    faults: Faults,
    markers: Markers,
    crc: bool,
    ulpdus: u32,
    v6: bool,
}

impl Default for Scenario {
    fn default() -> Self {
        let faults = Faults { delay: Duration::from_micros(10), ..Default::default() };
        Self { name: "clean", faults, markers: Markers::Prefer, crc: true, ulpdus: 400, v6: false }
    }
}

/// Both ends send `ulpdus`, then close. Returns the two ends as they were when all was over.
fn exchange(scenario: &Scenario, seed: u64) -> (End, End) {
    let config = WireConfig { faults: [scenario.faults; 2], seed, ..Default::default() };
    let (wire, link_a, link_b) = Wire::new(config);
    let (mut a, mut b) = (end(link_a, seed), end(link_b, seed + 1));
    let mpa = MpaConfig { markers: scenario.markers, crc: scenario.crc, ..Default::default() };
    let (from, to): (&str, &str) = if scenario.v6 {
        ("[fd00::1]:40000", "[fd00::2]:18515")
    } else {
        ("10.1.0.1:40000", "10.1.0.2:18515")
    };
    let port = to.parse::<SocketAddr>().unwrap().port();
    b.stack.listen(&mut b.link, None, port, 8, 1500, mpa.clone()).unwrap();
    let params = ConnectParams { ird: 4, ord: 4, private_data: b"hello".to_vec() };
    a.stack.connect(Instant::ZERO, &mut a.link, path(from, to), mpa, params).unwrap();
    for ulp in [&mut a.ulp, &mut b.ulp] {
        ulp.to_send = scenario.ulpdus;
    }
    let total = scenario.ulpdus;
    a.ulp.finish = true;
    let outcome = run(&wire, &mut [&mut a, &mut b], Instant::ZERO, Duration::from_secs(600), |_, _| false);
    let context = format!("{} seed {seed}: {outcome:?}", scenario.name);
    assert!(matches!(outcome, Outcome::Stalled(_)), "{context}: {:?} {:?}", a.ulp, b.ulp);
    for (end, other) in [(&a, &b), (&b, &a)] {
        assert_eq!(end.ulp.errors, Vec::<String>::new(), "{context}");
        assert_eq!(end.ulp.delivered, total, "{context}");
        assert!(end.ulp.placed.values().all(|n| *n == 1), "{context}: a ULPDU was placed twice");
        assert_eq!(end.ulp.acked, *end.ulp.sent_ends.last().unwrap(), "{context}: acknowledged");
        assert_eq!(end.ulp.closed, Some(CloseReason::Graceful), "{context}");
        let census = end.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "{context}: frames leaked");
        assert_eq!(end.stack.connections(), 0, "{context}: slots leaked");
        assert!(other.ulp.peer_closed || end.ulp.peer_closed, "{context}");
    }
    assert_eq!(a.link.census().rules, 0);
    (a, b)
}

#[test]
fn sim_clean_exchange_both_ways() {
    for (v6, markers, crc) in [
        (false, Markers::Prefer, true),
        (true, Markers::Prefer, true),
        (false, Markers::Off, true),
        (true, Markers::Off, false),
        (false, Markers::Require, false),
    ] {
        let (a, b) = exchange(&Scenario { markers, crc, v6, ..Default::default() }, 1);
        assert_eq!(a.stack.tcp_counters().retransmits + b.stack.tcp_counters().retransmits, 0);
    }
}

fn lossy() -> Faults {
    Faults {
        loss: 0.02,
        duplicate: 0.01,
        reorder: 0.05,
        reorder_by: Duration::from_micros(200),
        delay: Duration::from_micros(20),
        jitter: Duration::from_micros(5),
        ..Default::default()
    }
}

#[test]
fn sim_loss_duplication_reordering_with_markers() {
    for seed in 1..=16 {
        let scenario = Scenario { name: "lossy, markers", faults: lossy(), ..Default::default() };
        let (a, b) = exchange(&scenario, seed);
        assert!(a.ulp.early + b.ulp.early > 0, "seed {seed}: nothing was placed beyond a gap");
    }
}

#[test]
fn sim_loss_duplication_reordering_without_markers() {
    for seed in 1..=16 {
        let scenario = Scenario {
            name: "lossy, no markers",
            faults: lossy(),
            markers: Markers::Off,
            ..Default::default()
        };
        exchange(&scenario, seed);
    }
}

/// Markers count from the stream's own beginning, wherever its sequence numbers are.
#[test]
fn rfc5044_s4_3_markers_across_the_wrap_of_sequence_numbers() {
    let flow = path("10.1.0.1:40000", "10.1.0.2:18515").flow;
    let wraps = |seed: &u64| {
        IsnKey::new(&Secret::from_number(*seed)).isn(Instant::ZERO, &flow).value() > u32::MAX - 200_000
    };
    for seed in (1..).filter(wraps).take(2) {
        let scenario = Scenario { name: "wrap", faults: lossy(), ..Default::default() };
        let (a, b) = exchange(&scenario, seed);
        assert!(*a.ulp.sent_ends.last().unwrap() > 200_000, "seed {seed}: the numbers have wrapped");
        assert!(b.ulp.early > 0, "seed {seed}: nothing was placed beyond a gap");
    }
}

#[test]
fn sim_bursts_and_corruption() {
    let bursts = Some(Gilbert { enter: 0.005, leave: 0.2, loss: 0.8 });
    let faults = Faults { bursts, corrupt: 0.01, ..lossy() };
    for seed in 1..=16 {
        exchange(&Scenario { name: "bursts", faults, ..Default::default() }, seed);
    }
}
