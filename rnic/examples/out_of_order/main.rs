//! The benefit of markers and RDMA/TCP: two engines on a virtual wire with loss, reordering or a hop that splits or
//! joins segments, with MPA with and without markers towards the receiver, and with RDMA/TCP; then the latency of a
//! Send behind a Write that was lost in part. Prints three tables in Markdown, of which the first is computed from the
//! formats.
//!
//!     cargo run --release -p xwarp-rnic --example out_of_order -- [MESSAGES]
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on panics")]

use std::{collections::VecDeque, sync::Arc, time::Duration};

use xwarp_rnic::{
    Access, Memory, Operation, Pages, Payload, QpId, QueuePairOptions, RecvRequest, Remote, STag, SendFlags,
    Sge, WcStatus, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{CompletionRing, QpAttributes, Registration},
    sim::{Station, ipv4, path},
};
use xwarp_tcp::{
    framing::{FramingConfig, FramingCounters},
    mpa::{Markers, MpaConfig},
    rdma_tcp::RdmaTcpConfig,
    secret::Secret,
    sim::{Faults, Node, Recut, Wire, WireConfig, run},
    tcp::TcpConfig,
    time::Instant,
};

const HELP: &str = "\
Measures out-of-order placement in virtual time: Writes with Immediate Data of 16 KiB, 32 outstanding, over a line of
10 Gbit/s with a round trip of 100 us; loss, reordering, and a hop that splits or joins segments; MPA with and without
markers, and RDMA/TCP. Then the latency of a Send of 64 bytes behind Writes of 1 MiB, of which a segment is lost, with
round trips of 100 us and 10 ms. Before them, the bytes that each framing needs. Prints Markdown.

usage: out_of_order [MESSAGES]     messages of each case, 20000 unless given";

const MESSAGE: usize = 16 << 10;
const OUTSTANDING: usize = 32;
const PORT: u16 = 7;

/// One end with all that it was given.
struct End {
    station: Station,
    qp: QpId,
    ring: Arc<CompletionRing>,
    key: STag,
}

impl End {
    fn new(link: xwarp_tcp::sim::SimLink, framing: FramingConfig) -> Self {
        Self::with(link, framing, OUTSTANDING * MESSAGE, TcpConfig::default().initial_window)
    }

    fn with(
        link: xwarp_tcp::sim::SimLink,
        framing: FramingConfig,
        bytes: usize,
        initial_window: u32,
    ) -> Self {
        let tcp = TcpConfig { receive_window: 4 << 20, initial_window, ..TcpConfig::default() };
        let secret = Secret::from_number(1);
        let config = EngineConfig { secret, tcp, framing, ..EngineConfig::default() };
        let mut station = Station::new(link, config);
        let engine = &mut station.engine;
        let pd = engine.rnic().registry().alloc_pd().unwrap();
        let (cq, ring) = engine.rnic().registry().create_cq(4096, None).unwrap();
        let options = QueuePairOptions { any_receive: true, ..QueuePairOptions::default() };
        let qp =
            engine.rnic_mut().create_qp(QpAttributes { options, ..QpAttributes::new(pd, cq, cq) }).unwrap();
        let memory = Memory::anonymous(bytes, Pages::Normal).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let key = engine
            .rnic()
            .registry()
            .register(Registration { pd, memory, access, base: 0, stream: None })
            .unwrap();
        Self { station, qp, ring, key }
    }
}

/// Posts as long as there is something to post.
struct Writer {
    end: End,
    peer: STag,
    left: usize,
    posted: usize,
    completed: usize,
    /// When each message was posted that the peer has not heard of.
    posted_at: VecDeque<Instant>,
}

impl Node for Writer {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = self.end.station.turn(now);
        let completions: Vec<_> = std::iter::from_fn(|| self.end.ring.pop()).collect();
        assert!(completions.iter().all(|c| c.status == WcStatus::Success), "{completions:?}");
        self.completed += completions.len();
        while self.left > 0 && self.posted - self.completed < OUTSTANDING {
            let slot = (self.posted % OUTSTANDING * MESSAGE) as u64;
            let pieces = [Sge { key: self.end.key, offset: slot, len: MESSAGE as u32 }];
            let remote = Remote { key: self.peer, offset: slot };
            let operation = Operation::WriteImmediate { remote, data: [0; 8] };
            let payload = Payload::Gather(&pieces);
            let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED };
            if self.end.station.engine.rnic_mut().post_send(self.end.qp, &request).is_err() {
                break;
            }
            self.posted_at.push_back(now);
            self.posted += 1;
            self.left -= 1;
            busy = true;
        }
        if busy {
            self.end.station.engine.transmit(now, &mut self.end.station.link);
        }
        busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.end.station.next_deadline()
    }
}

/// Takes messages, and records the held bytes.
struct Reader {
    end: End,
    arrivals: Vec<Instant>,
    /// Integral of the bytes held over time, in byte nanoseconds, up to `looked`.
    held: u128,
    held_now: usize,
    looked: Instant,
}

impl Reader {
    fn receive(&mut self) {
        self.end
            .station
            .engine
            .rnic_mut()
            .post_recv(self.end.qp, &RecvRequest { wr_id: 0, scatter: &[] })
            .unwrap();
    }
}

impl Node for Reader {
    fn turn(&mut self, now: Instant) -> bool {
        self.held += self.held_now as u128 * now.since(self.looked).as_nanos();
        self.looked = now;
        let mut busy = self.end.station.turn(now);
        while self.end.ring.pop().is_some() {
            self.arrivals.push(now);
            self.receive();
            busy = true;
        }
        self.held_now = self.end.station.engine.stack().held_bytes();
        busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.end.station.next_deadline()
    }
}

/// The result of one case.
struct Row {
    goodput_gbps: f64,
    held_mean: f64,
    counters: FramingCounters,
    copies: f64,
    /// From posting to the peer's completion.
    latency: [Duration; 3],
}

fn measure(faults: &Faults, framing: &FramingConfig, messages: usize) -> Row {
    let config = WireConfig {
        tx_chunks: 4096,
        rx_chunks: 4096,
        ring: 4096,
        faults: [*faults, Faults { delay: faults.delay, ..Faults::default() }],
        seed: 7,
        ..WireConfig::default()
    };
    let (wire, near, far) = Wire::new(config);
    let (mut near, mut far) = (End::new(near, framing.clone()), End::new(far, framing.clone()));
    far.station.engine.listen(&mut far.station.link, None, PORT, 8, 1500, None).unwrap();
    far.station.expected.insert(ipv4(1), far.qp);
    let path = path([(1, 40_000), (2, PORT)], false, 1500);
    let params = ConnectParams::default();
    near.station.engine.connect(Instant::ZERO, &mut near.station.link, near.qp, path, params).unwrap();
    let peer = far.key;
    let mut writer =
        Writer { end: near, peer, left: messages, posted: 0, completed: 0, posted_at: VecDeque::new() };
    let mut reader = Reader { end: far, arrivals: Vec::new(), held: 0, held_now: 0, looked: Instant::ZERO };
    for _ in 0..2 * OUTSTANDING {
        reader.receive();
    }
    let limit = Duration::from_secs(3600);
    let mut done = Instant::ZERO;
    while writer.completed < messages {
        let step = Duration::from_millis(1);
        run(&wire, &mut [&mut writer, &mut reader], done, step, |_, _| false);
        done += step;
        assert!(done < Instant::ZERO + limit, "{} of {messages}", writer.completed);
    }
    let mut latency: Vec<Duration> = reader
        .arrivals
        .iter()
        .zip(&writer.posted_at)
        .map(|(arrived, posted)| arrived.since(*posted))
        .collect();
    latency.sort_unstable();
    let of_thousand = |n: usize| latency[(latency.len() * n / 1000).min(latency.len() - 1)];
    let (first, last) = (writer.posted_at[0], *reader.arrivals.last().unwrap());
    let bytes = (messages * MESSAGE) as f64;
    let counters = reader.end.station.engine.stack().framing_counters();
    Row {
        goodput_gbps: bytes * 8.0 / last.since(first).as_nanos() as f64,
        held_mean: reader.held as f64 / last.since(first).as_nanos() as f64,
        copies: 1.0 + counters.copied_bytes as f64 / bytes,
        counters,
        latency: [of_thousand(500), of_thousand(990), of_thousand(999)],
    }
}

/// Bytes that are written before a Send, and of those the bytes of a segment that is lost.
const LOST_WRITE: usize = 1 << 20;
const LOST_BYTES: usize = 1000;
const SEND: usize = 64;
/// Times that the latency of the Send is measured, each with another segment lost.
const ROUNDS: usize = 50;

/// Latencies of a Send behind Writes of which a segment is lost, from posting to the peer's completion, shortest first.
fn behind_a_loss(line: &Faults, framing: &FramingConfig, flags: SendFlags) -> Vec<Duration> {
    let before = (0..ROUNDS).map(|round| LOST_WRITE * round / ROUNDS);
    let mut latencies: Vec<_> = before.map(|before| latency(line, framing, flags, before)).collect();
    latencies.sort_unstable();
    latencies
}

/// The latency when the lost segment comes after `before` bytes. The congestion window is as large as all Writes, so
/// that the Send is in flight when the loss is detected.
fn latency(line: &Faults, framing: &FramingConfig, flags: SendFlags, before: usize) -> Duration {
    let config = WireConfig { tx_chunks: 4096, rx_chunks: 4096, ring: 4096, ..WireConfig::default() };
    let (wire, near, far) = Wire::new(WireConfig { faults: [*line; 2], seed: 7, ..config });
    let [mut near, mut far] =
        [near, far].map(|link| End::with(link, framing.clone(), LOST_WRITE + SEND, 1000));
    far.station.engine.listen(&mut far.station.link, None, PORT, 8, 1500, None).unwrap();
    far.station.expected.insert(ipv4(1), far.qp);
    let path = path([(1, 40_000), (2, PORT)], false, 1500);
    let params = ConnectParams::default();
    near.station.engine.connect(Instant::ZERO, &mut near.station.link, near.qp, path, params).unwrap();
    let remote = Remote { key: far.key, offset: 0 };
    let sink = [Sge { key: far.key, offset: LOST_WRITE as u64, len: SEND as u32 }];
    far.station.engine.rnic_mut().post_recv(far.qp, &RecvRequest { wr_id: 0, scatter: &sink }).unwrap();
    let mut now = Instant::ZERO;
    let mut pass = |near: &mut End, far: &mut End, time| {
        run(&wire, &mut [&mut near.station as &mut dyn Node, &mut far.station], now, time, |_, _| false);
        now += time;
        now
    };
    let posted = pass(&mut near, &mut far, Duration::from_secs(1));
    let (write, send) = (Operation::Write { remote }, Operation::Send { invalidate: None });
    for (operation, len, flags, loss) in [
        (write, before, SendFlags::empty(), 0.0),
        (write, LOST_BYTES, SendFlags::empty(), 1.0),
        (write, LOST_WRITE - LOST_BYTES - before, SendFlags::empty(), 0.0),
        (send, SEND, flags, 0.0),
    ] {
        let piece = [Sge { key: near.key, offset: 0, len: len as u32 }];
        let request = WorkRequest { wr_id: 0, operation, payload: Payload::Gather(&piece), flags };
        near.station.engine.rnic_mut().post_send(near.qp, &request).unwrap();
        wire.with_faults([Faults { loss, ..*line }, *line]);
        pass(&mut near, &mut far, Duration::from_nanos(1));
    }
    loop {
        let latency = pass(&mut near, &mut far, Duration::from_micros(1)).since(posted);
        if far.ring.pop().is_some() {
            return latency;
        }
        assert!(latency < Duration::from_secs(10), "the Send is lost");
    }
}

fn print_latencies(line: &Faults, mpa: &FramingConfig, rdma_tcp: &FramingConfig) {
    println!("\n| round trip | framing | order of the Send | p10 | p50 | p90 | longest |");
    println!("|--:|---|---|--:|--:|--:|--:|");
    for one_way in [Duration::from_micros(50), Duration::from_millis(5)] {
        let line = Faults { delay: one_way, ..*line };
        for (name, framing, order, flags) in [
            ("MPA, markers", mpa, "in order", SendFlags::empty()),
            ("RDMA/TCP", rdma_tcp, "0", SendFlags::empty()),
            ("RDMA/TCP", rdma_tcp, "FFFF", SendFlags::OVERTAKE),
        ] {
            let latencies = behind_a_loss(&line, framing, flags);
            let us = |percent: usize| {
                latencies[(latencies.len() * percent / 100).min(latencies.len() - 1)].as_micros()
            };
            println!(
                "| {} us | {name} | {order} | {} us | {} us | {} us | {} us |",
                2 * one_way.as_micros(),
                us(10),
                us(50),
                us(90),
                us(100)
            );
        }
    }
}

/// Prints the largest payload of a full TCP segment with each framing, and the overhead in the TCP payload.
fn print_bytes() {
    println!(
        "| EMSS | MPA, markers, RDMA Write | MPA, no markers, RDMA Write | RDMA/TCP, Write | RDMA/TCP, Write, offset above 4 GiB | RDMA/TCP, Send or Read Response |"
    );
    println!("|---|---|---|---|---|---|");
    for emss in [1448_usize, 3448, 8948] {
        // MULPDU of RFC 5044 section 4.5, less a tagged header of DDP. RDMA/TCP: header, control word, pad and CRC.
        let markers = 4 * emss.div_ceil(512);
        let payloads =
            [6 + markers + 14, 6 + 14, 32 + 4, 32 + 4 + 4, 24 + 4].map(|head| emss - emss % 4 - head);
        let cells = payloads
            .map(|payload| format!("{payload}, {:.2} %", (emss - payload) as f64 * 100.0 / emss as f64));
        println!("| {emss} | {} |", cells.join(" | "));
    }
    println!();
}

fn main() {
    let messages = match std::env::args().nth(1) {
        None => 20_000,
        Some(number) => number.parse().unwrap_or_else(|_| {
            println!("{HELP}");
            std::process::exit(i32::from(number != "--help"))
        }),
    };
    let line = Faults {
        rate_bytes: Some(1_250_000_000),
        queue_frames: 1000,
        delay: Duration::from_micros(50),
        ..Faults::default()
    };
    let deep = Faults { reorder: 0.1, reorder_depth: 100, reorder_by: Duration::from_millis(1), ..line };
    let near = Faults { reorder: 0.1, reorder_depth: 3, reorder_by: Duration::from_millis(1), ..line };
    let middle = Faults { reorder_depth: 30, ..near };
    let lossy = Faults { loss: 0.001, ..line };
    let hop = |split, join| {
        let wait = Duration::from_micros(5);
        Faults { recut: Some(Recut { split, join, wait, most_bytes: 9000 }), ..lossy }
    };
    let cases = [
        ("no fault", line),
        ("0.1 % loss", lossy),
        ("1 % loss", Faults { loss: 0.01, ..line }),
        ("10 % reordered, up to 3 frames deep", near),
        ("10 % reordered, up to 30 frames deep", middle),
        ("10 % reordered, up to 100 frames deep", deep),
        ("0.1 % loss, 20 % split", hop(0.2, 0.0)),
        ("0.1 % loss, half joined", hop(0.0, 0.5)),
        ("0.1 % loss, shifted: joined, then cut anywhere", hop(0.5, 0.9)),
    ];
    print_bytes();
    println!(
        "| path | framing | placed early | held, peak | held, mean | copies a byte | goodput | p50 | p99 | p99.9 |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mpa = |markers| MpaConfig { markers, hold_bytes: 4 << 20, ..MpaConfig::default() }.into();
    let rdma_tcp: FramingConfig = RdmaTcpConfig { hold_bytes: 4 << 20, ..RdmaTcpConfig::default() }.into();
    let framings: [(&str, FramingConfig); 3] = [
        ("MPA, markers", mpa(Markers::Require)),
        ("MPA, no markers", mpa(Markers::Off)),
        ("RDMA/TCP", rdma_tcp.clone()),
    ];
    for (name, faults) in cases {
        for (setting, framing) in &framings {
            let row = measure(&faults, framing, messages);
            let us = row.latency.map(|l| l.as_micros());
            let early = row.counters.placed_early as f64 * 100.0 / row.counters.delivered.max(1) as f64;
            println!(
                "| {name} | {setting} | {early:.1} % | {:.1} KiB | {:.1} KiB | {:.4} | {:.2} Gbit/s | {} us | {} us | {} us |",
                row.counters.held_bytes_peak as f64 / 1024.0,
                row.held_mean / 1024.0,
                row.copies,
                row.goodput_gbps,
                us[0],
                us[1],
                us[2],
            );
        }
    }
    print_latencies(&line, &mpa(Markers::Require), &rdma_tcp);
}
