//! Placement beyond gaps, checked against an independent reader of markers: every complete FPDU that it finds in the
//! arrived frames must be in memory, however many bytes before it are missing.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_rnic::{
    Access, Memory, Operation, Pages, Payload, QpId, RecvRequest, Remote, STag, SendFlags, Sge, WorkRequest,
    engine::{ConnectParams, EngineConfig},
    rnic::{QpAttributes, QueuePairOptions, Registration},
    sim::{Station, ipv4, path},
};
use xwarp_tcp::{
    framing::FramingCounters,
    mpa::{Markers, MpaConfig},
    secret::Secret,
    sim::{Faults, Node, Outcome, Recut, Wire, WireConfig, run},
    tcp::TcpConfig,
    time::Instant,
};

const PORT: u16 = 7;
/// Bytes of each receive, and the most of a message.
const SLOT: usize = 8192;

/// The bytes of one direction of a connection that have arrived, and what lies in them by RFC 5044.
#[derive(Debug, Default)]
struct Arrived {
    iss: Option<u32>,
    bytes: Vec<Option<u8>>,
    /// From each header that was located to the next.
    next: HashMap<usize, usize>,
}

impl Arrived {
    /// A frame with an IPv4 packet without options, which came from port 40000.
    fn take(&mut self, frame: &[u8]) {
        let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        if frame.len() < 54 || word(12) != 0x0800 || frame[23] != 6 || word(34) != 40_000 {
            return;
        }
        let seq = u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]);
        if frame[47] & 2 != 0 {
            self.iss = Some(seq);
        }
        let Some(iss) = self.iss else { return };
        let payload = &frame[34 + usize::from(frame[46] >> 4) * 4..14 + usize::from(word(16))];
        let start = seq.wrapping_sub(iss).wrapping_sub(1) as usize;
        if !payload.is_empty() {
            self.bytes.resize(self.bytes.len().max(start + payload.len()), None);
        }
        for (at, byte) in payload.iter().enumerate() {
            self.bytes[start + at] = Some(*byte);
        }
    }

    /// The two bytes at `at` as a number.
    fn number(&self, at: usize) -> Option<usize> {
        let byte = |at: usize| self.bytes.get(at).copied().flatten();
        Some(usize::from(byte(at)?) << 8 | usize::from(byte(at + 1)?))
    }

    /// Where FPDUs begin: behind the MPA Request (RFC 5044 section 7.1.1).
    fn origin(&self) -> Option<usize> {
        Some(20 + self.number(18)?)
    }

    /// Number of bytes that have arrived without a gap.
    fn contiguous(&self) -> usize {
        self.bytes.iter().position(Option::is_none).unwrap_or(self.bytes.len())
    }

    /// The FPDU whose ULPDU Length field lies at `header`, if all of it has arrived: its ULPDU and where it ends.
    /// Section 4.3: four bytes every 512 from `origin` on belong to markers.
    fn fpdu(&self, origin: usize, header: usize) -> Option<(Vec<u8>, usize)> {
        let len = self.number(header)?;
        let (mut at, mut body) = (header, Vec::new());
        let whole = (2 + len).next_multiple_of(4) + 4;
        while body.len() < whole {
            let in_marker = (at - origin) % 512 < 4;
            let byte = self.bytes.get(at).copied().flatten()?;
            if !in_marker {
                body.push(byte);
            }
            at += 1;
        }
        body.truncate(2 + len);
        Some((body.split_off(2), at))
    }

    /// Headers and ULPDUs of the FPDUs that have become whole since the last call and whose start is known: the first,
    /// those to which a marker points, and those that follow one of these.
    fn located(&mut self) -> Vec<(usize, Vec<u8>)> {
        let Some(origin) = self.origin() else { return Vec::new() };
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        for marker in (origin..self.bytes.len()).step_by(512) {
            let Some(pointer) = self.number(marker + 2) else { continue };
            let mut header = if pointer == 0 { marker + 4 } else { marker - pointer };
            while seen.insert(header) {
                if let Some(next) = self.next.get(&header) {
                    header = *next;
                } else if let Some((ulpdu, end)) = self.fpdu(origin, header) {
                    let next = if (end - origin) % 512 == 0 { end + 4 } else { end };
                    self.next.insert(header, next);
                    found.push((header, ulpdu));
                    header = next;
                }
            }
        }
        found
    }
}

/// The end that is written to.
struct Watched {
    station: Station,
    memory: Memory,
    key: STag,
    arrived: Arrived,
    /// The peer sends markers.
    markers: bool,
    early: usize,
    tagged: usize,
}

impl Watched {
    fn check(&mut self) {
        if !self.markers {
            return;
        }
        let contiguous = self.arrived.contiguous();
        for (header, ulpdu) in self.arrived.located() {
            self.early += usize::from(header > contiguous);
            // RFC 5041 figures 4 and 5: tagged (STag, TO), untagged (queue, MSN, MO).
            let number =
                |at: usize| u32::from_be_bytes([ulpdu[at], ulpdu[at + 1], ulpdu[at + 2], ulpdu[at + 3]]);
            let (place, payload) = if ulpdu[0] & 0x80 != 0 {
                assert_eq!(number(2), self.key.value());
                self.tagged += 1;
                ((number(6) as usize) << 32 | number(10) as usize, &ulpdu[14..])
            } else {
                assert_eq!(number(6), 0, "queue 0");
                ((number(10) as usize - 1) * SLOT + number(14) as usize, &ulpdu[18..])
            };
            let mut placed = vec![0; payload.len()];
            self.memory.read(place, &mut placed).unwrap();
            assert!(
                placed == payload,
                "the FPDU at {header} is whole but not placed; contiguous: {contiguous}"
            );
        }
    }
}

impl Node for Watched {
    fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        while let Some(frame) = self.station.receive_one(now) {
            busy = true;
            self.arrived.take(&frame);
            self.check();
        }
        self.station.turn(now);
        busy
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.station.next_deadline()
    }
}

/// A writer, connected to the end that is watched.
struct Pair {
    wire: Wire,
    now: Instant,
    near: Station,
    qp: QpId,
    source: STag,
    far: Watched,
}

const MESSAGES: usize = 200;

fn config(markers: Markers) -> EngineConfig {
    // Without timestamps: PAWS drops what comes very late (RFC 7323 section 5.3), which the reader does not know.
    let tcp = TcpConfig {
        timestamps: false,
        initial_window: 1000,
        receive_window: 4 << 20,
        ..TcpConfig::default()
    };
    let mpa = MpaConfig { markers, hold_bytes: 4 << 20, ..MpaConfig::default() };
    EngineConfig { secret: Secret::from_number(5), tcp, framing: mpa.into(), ..EngineConfig::default() }
}

impl Pair {
    fn new(markers: Markers, seed: u64) -> Self {
        let config = || config(markers);
        let (tx_chunks, rx_chunks) = (4096, 4096);
        let (wire, near, far) =
            Wire::new(WireConfig { seed, tx_chunks, rx_chunks, ring: 4096, ..WireConfig::default() });
        let (mut near, mut far) = (Station::new(near, config()), Station::new(far, config()));
        // Memory for receives, then as much for Writes; the writer has a source of the same layout.
        let len = 2 * MESSAGES * SLOT;
        let [(qp, source, memory), (far_qp, key, sink)] = [&mut near, &mut far].map(|station| {
            let engine = &mut station.engine;
            let pd = engine.rnic().registry().alloc_pd().unwrap();
            let (cq, _) = engine.rnic().registry().create_cq(4096, None).unwrap();
            let options =
                QueuePairOptions { max_send_wr: 1000, max_recv_wr: 1000, ..QueuePairOptions::default() };
            let attributes = QpAttributes { options, ..QpAttributes::new(pd, cq, cq) };
            let qp = engine.rnic_mut().create_qp(attributes).unwrap();
            let memory = Memory::anonymous(len, Pages::Normal).unwrap();
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let registration = Registration { pd, memory: memory.clone(), access, base: 0, stream: None };
            (qp, engine.rnic().registry().register(registration).unwrap(), memory)
        });
        let bytes: Vec<u8> = (0..len).map(|at| (at as u64).wrapping_mul(0x9e37_79b9) as u8 | 1).collect();
        memory.write(0, &bytes).unwrap();
        for wr_id in 0..MESSAGES as u64 {
            let scatter = [Sge { key, offset: wr_id * SLOT as u64, len: SLOT as u32 }];
            far.engine.rnic_mut().post_recv(far_qp, &RecvRequest { wr_id, scatter: &scatter }).unwrap();
        }
        far.engine.listen(&mut far.link, None, PORT, 8, 1500, None).unwrap();
        far.expected.insert(ipv4(1), far_qp);
        let path = path([(1, 40_000), (2, PORT)], false, 1500);
        near.engine.connect(Instant::ZERO, &mut near.link, qp, path, ConnectParams::default()).unwrap();
        let arrived = Arrived::default();
        let asked = markers == Markers::Require;
        let far = Watched { station: far, memory: sink, key, arrived, markers: asked, early: 0, tagged: 0 };
        let mut pair = Self { wire, now: Instant::ZERO, near, qp, source, far };
        pair.pass(Duration::from_millis(100));
        pair
    }

    fn pass(&mut self, time: Duration) -> Outcome {
        let outcome = run(&self.wire, &mut [&mut self.near, &mut self.far], self.now, time, |_, _| false);
        self.now += time;
        outcome
    }

    fn post(&mut self, operation: Operation, from: usize, len: usize) {
        let pieces = [Sge { key: self.source, offset: from as u64, len: len as u32 }];
        let payload = Payload::Gather(&pieces);
        let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::SIGNALED };
        self.near.engine.rnic_mut().post_send(self.qp, &request).unwrap();
    }

    /// Writes from an offset of our memory to the same offset of the peer's.
    fn write(&mut self, at: usize, len: usize) {
        let remote = Remote { key: self.far.key, offset: at as u64 };
        self.post(Operation::Write { remote }, at, len);
    }

    fn counters(&self) -> FramingCounters {
        self.far.station.engine.stack().framing_counters()
    }
}

/// Random messages over a path with loss, reordering and a middlebox. Returns the FPDUs found beyond gaps, of them all,
/// and what our own counted.
fn placed_as_found(seed: u64) -> [usize; 3] {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut pair = Pair::new(Markers::Require, seed);
    let recut = Recut {
        split: rng.random_range(0.0..0.4),
        join: 0.3,
        wait: Duration::from_micros(30),
        most_bytes: 1500,
    };
    let faults = Faults {
        loss: rng.random_range(0.0..0.1),
        reorder: rng.random_range(0.0..0.5),
        reorder_by: Duration::from_micros(rng.random_range(1..3000)),
        reorder_depth: rng.random_range(1..200),
        duplicate: rng.random_range(0.0..0.1),
        recut: rng.random_bool(0.5).then_some(recut),
        delay: Duration::from_micros(50),
        rate_bytes: Some(125_000_000),
        ..Faults::default()
    };
    pair.wire.set_faults(1, faults);
    for message in 0..MESSAGES {
        let most = if rng.random_bool(0.5) { 200 } else { SLOT };
        let (at, len) = (message * SLOT, rng.random_range(1..=most));
        if rng.random_bool(0.5) {
            pair.write(MESSAGES * SLOT + at, len);
        } else {
            pair.post(Operation::Send { invalidate: None }, at, len);
        }
    }
    pair.pass(Duration::from_secs(60));
    let far = &pair.far;
    let counters = pair.counters();
    assert_eq!(far.arrived.contiguous(), far.arrived.bytes.len(), "seed {seed}: all has arrived");
    assert_eq!(counters.delivered as usize, far.arrived.next.len(), "seed {seed}: all was found");
    assert!(far.tagged > 50 && far.arrived.next.len() - far.tagged > 50, "seed {seed}: both kinds");
    [far.early, far.arrived.next.len(), counters.placed_early as usize]
}

/// RFC 5044 section 6: whole FPDUs that can be found are placed before the gap closes, tagged and untagged.
#[test]
fn sim_rfc5044_s6_every_whole_fpdu_that_markers_lead_to_is_placed_before_the_gap_closes() {
    let mut sum = [0; 3];
    for seed in 1..=20 {
        let found = placed_as_found(seed);
        sum = std::array::from_fn(|i| sum[i] + found[i]);
    }
    let [early, all, counted] = sum;
    assert!(early * 5 > all, "{early} of {all} were found beyond a gap");
    // FPDUs that arrive with the segment that closes the gap before them count differently.
    assert!(counted >= early, "{counted} placed early, {early} found");
}

/// One segment is lost, a MiB behind it arrives. Returns the most bytes that were held.
fn held_behind_a_gap(markers: Markers) -> u64 {
    const MIB: usize = 1 << 20;
    let mut pair = Pair::new(markers, 1);
    // A first Write, so that there is nothing of the start-up in the way.
    pair.write(MESSAGES * SLOT, 100);
    pair.pass(Duration::from_millis(10));
    let far_away = Faults { delay: Duration::from_millis(20), ..Faults::default() };
    pair.wire.with_faults([Faults { loss: 1.0, ..far_away }, far_away]);
    pair.write(MESSAGES * SLOT, 1000);
    pair.pass(Duration::from_micros(1));
    pair.wire.with_faults([far_away; 2]);
    pair.write(MESSAGES * SLOT + 1000, MIB);
    pair.pass(Duration::from_millis(30));
    let behind = pair.far.arrived.bytes.len() - pair.far.arrived.contiguous();
    assert!(behind > MIB, "{behind} bytes behind the gap");
    pair.pass(Duration::from_secs(2));
    assert_eq!(pair.far.arrived.contiguous(), pair.far.arrived.bytes.len());
    pair.counters().held_bytes_peak
}

#[test]
fn sim_a_gap_of_a_mib_holds_next_to_nothing_with_markers_and_all_without() {
    let (with, without) = (held_behind_a_gap(Markers::Require), held_behind_a_gap(Markers::Off));
    assert!(with < 4096, "{with} bytes held with markers");
    assert!(without > 1 << 20, "{without} bytes held without");
}
