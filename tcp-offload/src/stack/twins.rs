//! Twins: two ends that get the same frames from one peer, and differ in one thing that must not change the outcome.

use std::time::Duration;

use proptest::prelude::*;

use super::{ConnectParams, StackConfig, turns::Work};
use crate::{
    link::Link,
    mpa::{Markers, MpaConfig},
    sim::{Checksums, End, Node, SimLink, Wire, WireConfig, path},
    tcp::testing::with_fast_paths,
    time::Instant,
};

const PORT: u16 = 7;

/// What happens before a turn of the ends.
#[derive(Debug, Clone)]
pub(super) struct Step {
    /// ULPDUs that the peer and the twins begin to send.
    to_send: [u32; 2],
    /// What happens to the frames of the peer: the number of a frame, modulo their number, and the fault.
    fault: Option<(usize, Fault)>,
    /// Time since the last turn, in microseconds.
    time: u64,
    pub polled: bool,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Drop,
    Twice,
    Swap,
    /// A byte is changed.
    Damage(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let number = || prop_oneof![3 => Just(0u32), 3 => 1u32..4, 1 => 4u32..60];
    let fault = prop_oneof![
        Just(Fault::Drop),
        Just(Fault::Twice),
        Just(Fault::Swap),
        (0usize..1500).prop_map(Fault::Damage)
    ];
    let time = prop_oneof![6 => 1u64..40, 2 => 40u64..3000, 1 => 3000u64..400_000];
    ([number(), number()], prop::option::weighted(0.15, (any::<usize>(), fault)), time, any::<bool>())
        .prop_map(|(to_send, fault, time, polled)| Step { to_send, fault, time, polled })
}

/// An end, and the other end of its cable.
pub(super) struct Cabled {
    pub end: End<SimLink>,
    far: SimLink,
    predict: bool,
}

impl Cabled {
    pub fn new(predict: bool, chunk_bytes: usize, checksums: Checksums) -> Self {
        let (tx_chunks, rx_chunks, ring) = (8192, 8192, 8192);
        let config =
            WireConfig { chunk_bytes, tx_chunks, rx_chunks, ring, checksums, ..WireConfig::default() };
        let (_, link, far) = Wire::new(config);
        Self { end: End::new(link, StackConfig::default()), far, predict }
    }

    pub fn listen(&mut self, mpa: MpaConfig) {
        let End { stack, link, .. } = &mut self.end;
        stack.listen(link, None, PORT, 8, 1500, mpa).unwrap();
    }

    /// Begins to connect to an end that listens.
    pub fn connect(&mut self, mpa: MpaConfig) {
        let route = path(([10, 0, 0, 1], 40_000), ([10, 0, 0, 2], PORT));
        let params = ConnectParams { ird: 4, ord: 4, private_data: Vec::new() };
        let End { stack, link, conn, .. } = &mut self.end;
        *conn = Some(stack.connect(Instant::ZERO, link, route, mpa, params).unwrap());
    }

    /// Runs a turn with `frames`. Returns the frames that the end has sent.
    pub fn turn(&mut self, now: Instant, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        for frame in frames {
            self.far.inject(frame);
        }
        with_fast_paths(self.predict, || self.end.turn(now));
        let mut sent = Vec::new();
        self.far.receive(&mut sent, usize::MAX);
        let bytes = |frame| {
            let bytes = self.far.rx_chunks(&frame).concat();
            self.far.recycle(frame);
            bytes
        };
        sent.into_iter().map(bytes).collect()
    }

    /// The next work of each connection.
    pub fn works(&self) -> Vec<Work> {
        let stack = &self.end.stack;
        stack.slots.iter().map(|(index, _)| stack.turns.work(index as u32)).collect()
    }

    /// All of the state that a segment can change.
    pub fn state(&self) -> String {
        let stack = &self.end.stack;
        let tables = (self.works(), stack.held, stack.spilled, stack.next_deadline(), stack.counters);
        format!("{:?} {tables:?} {:?}", stack.slots, self.end.ulp)
    }
}

fn apply(fault: Option<(usize, Fault)>, frames: &mut Vec<Vec<u8>>) {
    let Some((number, fault)) = fault.filter(|_| !frames.is_empty()) else { return };
    let at = number % frames.len();
    match fault {
        Fault::Drop => drop(frames.remove(at)),
        Fault::Twice => frames.insert(at, frames[at].clone()),
        Fault::Swap => {
            let last = frames.len() - 1;
            frames.swap(at, last);
        }
        Fault::Damage(byte) => {
            let byte = byte % frames[at].len();
            frames[at][byte] ^= 0x10;
        }
    }
}

/// A connection of a peer with each of two twins.
#[derive(Debug, Clone)]
pub(super) struct Scene {
    steps: Vec<Step>,
    markers: bool,
    chunk_bytes: usize,
    partial: bool,
}

pub(super) fn scene() -> impl Strategy<Value = Scene> {
    let steps = prop::collection::vec(step(), 1..60);
    let chunk_bytes = prop_oneof![3 => Just(4096usize), 1 => 300usize..1000];
    (steps, any::<bool>(), chunk_bytes, any::<bool>())
        .prop_map(|(steps, markers, chunk_bytes, partial)| Scene { steps, markers, chunk_bytes, partial })
}

impl Scene {
    /// Plays the scene with twins that `predict` or not. In each step, `turn` runs both with the frames of the peer, and returns
    /// those of the first one.
    pub fn play(
        &self,
        predict: [bool; 2],
        mut turn: impl FnMut(Instant, &mut [Cabled; 2], &Step, &[Vec<u8>]) -> Result<Vec<Vec<u8>>, TestCaseError>,
    ) -> Result<(), TestCaseError> {
        let markers = if self.markers { Markers::Require } else { Markers::Off };
        let mpa = MpaConfig { markers, ..MpaConfig::default() };
        let checksums = if self.partial { Checksums::Partial } else { Checksums::Computed };
        let mut peer = Cabled::new(true, 4096, checksums);
        let mut twins = predict.map(|predict| Cabled::new(predict, self.chunk_bytes, checksums));
        for twin in &mut twins {
            twin.listen(mpa.clone());
        }
        let mut now = Instant::ZERO;
        peer.connect(mpa);
        let mut back = Vec::new();
        let connect = Step { to_send: [0, 0], fault: None, time: 20, polled: true };
        for step in std::iter::repeat_n(&connect, 6).chain(&self.steps) {
            now += Duration::from_micros(step.time);
            peer.end.ulp.to_send += step.to_send[0];
            let mut frames = peer.turn(now, &back);
            apply(step.fault, &mut frames);
            for twin in &mut twins {
                twin.end.ulp.to_send += step.to_send[1];
            }
            back = turn(now, &mut twins, step, &frames)?;
        }
        prop_assert!(peer.end.ulp.established.is_some());
        Ok(())
    }
}
