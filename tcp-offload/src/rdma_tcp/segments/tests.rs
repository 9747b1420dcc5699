//! Placement and delivery of segments in any order, loss and re-cut, against an oracle. The segments are built byte by byte,
//! with a CRC of their own.
#![expect(clippy::indexing_slicing, reason = "a test that is wrong may panic")]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    framing::{
        Carried,
        receiver::{Receiver, Upper},
    },
    sim::{SimLink, Wire, WireConfig},
    tcp,
    time::Instant,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp},
};

const CONN: ConnId = ConnId { index: 0, generation: 0 };
const ID: [u8; 8] = [1, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];

/// A segment of the proposal, with `body` behind the Connection ID.
fn segment(body: &[u8]) -> Vec<u8> {
    let len = 12 + body.len();
    let mut bytes = vec![1, 0x0c, (len >> 8) as u8, len as u8];
    bytes.extend(ID);
    bytes.extend(body);
    bytes.resize(len.div_ceil(4) * 4, 0);
    let mut register = u32::MAX;
    for byte in &bytes {
        register ^= u32::from(*byte);
        for _ in 0..8 {
            register = register >> 1 ^ if register & 1 == 1 { 0x8260_8edb } else { 0 };
        }
    }
    bytes.extend((!register).to_le_bytes());
    bytes
}

/// The placed segments by arrival, and the delivered ones. A placed segment is identified by its number.
#[derive(Default)]
struct Log {
    placed: Vec<Vec<u8>>,
    delivered: Vec<usize>,
}

impl Ulp for Log {
    type Placed = usize;

    fn place(&mut self, _: ConnId, ulpdu: &Ulpdu<'_>, _: Arrival) -> Result<usize, Refusal> {
        let mut bytes = vec![0; ulpdu.len()];
        ulpdu.peek(&mut bytes);
        self.placed.push(bytes);
        Ok(self.placed.len() - 1)
    }

    fn deliver(&mut self, _: ConnId, placed: usize) -> Result<(), Refusal> {
        self.delivered.push(placed);
        Ok(())
    }

    fn has_data(&self, _: ConnId) -> bool {
        false
    }

    fn pull(&mut self, _: ConnId, _: &mut UlpduWriter<'_, '_>) -> Pulled {
        Pulled::Nothing
    }

    fn acked(&mut self, _: ConnId, _: StreamOffset) {}
    fn event(&mut self, _: ConnId, _: Event) {}
}

struct Lab {
    receiver: Receiver<usize, Segments>,
    log: Log,
    link: SimLink,
    peer: SimLink,
    /// Bytes that have arrived.
    seen: Vec<bool>,
}

impl Lab {
    fn new(len: usize) -> Self {
        let (_, link, peer) = Wire::new(WireConfig { rx_chunks: 1 << 12, ..WireConfig::default() });
        let mut receiver = Receiver::new();
        receiver.expect(Segments::of(ConnectionId(u64::from_be_bytes(ID))));
        Self { receiver, log: Log::default(), link, peer, seen: vec![false; len] }
    }

    fn take(&mut self, (from, to): (usize, usize), stream: &[u8]) {
        self.peer.inject(&stream[from..to]);
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 1);
        let frame = batch.pop().unwrap();
        self.seen[from..to].fill(true);
        let contiguous = self.seen.iter().position(|seen| !seen).unwrap_or(stream.len()) as u64;
        let payload =
            tcp::NewPayload { offset: from as u64, start: 0, len: to - from, contiguous, pushed: true };
        let carried = Carried { payload, frame, spare: 0, fast: false };
        let mut upper = Upper { ulp: &mut self.log, conn: CONN };
        let (taken, outcome) =
            self.receiver.receive(Instant::ZERO, &mut upper, &mut self.link, carried, usize::MAX, Ok(()));
        assert!(taken && outcome.is_ok(), "{outcome:?}");
    }
}

fn bodies() -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop::collection::vec(any::<u8>(), 12..300), 1..20)
}

proptest! {
    /// Pieces of any size in any order, some of them twice: each segment is placed once and delivered in order with its
    /// bytes, and a segment of which a piece has everything from its start on, or that follows such a one in the piece, is
    /// placed when that piece arrives.
    #[test]
    fn prop_segments_are_placed_under_any_order_and_recut(
        bodies in bodies(),
        recut in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        keep in 0u8..=100,
        keys in prop::collection::vec(any::<(u8, u32)>(), 64),
        repeated in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let segments: Vec<Vec<u8>> = bodies.iter().map(|body| segment(body)).collect();
        let stream = segments.concat();
        let mut starts = vec![0];
        starts.extend(segments.iter().scan(0, |at, segment| { *at += segment.len(); Some(*at) }));
        // The sender's segments, of which a hop has joined some and cut some.
        let mut cuts: BTreeSet<usize> =
            starts.iter().zip(&keys).filter(|(_, key)| key.0 % 101 <= keep).map(|(at, _)| *at).collect();
        cuts.extend(recut.iter().map(|at| at.index(stream.len())));
        cuts.extend([0, stream.len()]);
        let cuts: Vec<usize> = cuts.into_iter().collect();
        let mut pieces: Vec<(usize, usize)> = cuts.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let again: Vec<_> = repeated.iter().map(|at| pieces[at.index(pieces.len())]).collect();
        pieces.extend(again);
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|at| keys[at % keys.len()].1);

        let mut lab = Lab::new(stream.len());
        let mut must = BTreeSet::new();
        for at in order {
            let (from, to) = pieces[at];
            lab.take((from, to), &stream);
            if let Ok(first) = starts.binary_search(&from) {
                must.extend((first..segments.len()).take_while(|n| starts[n + 1] <= to));
            }
            for n in &must {
                let ulpdu = &segments[*n][..12 + bodies[*n].len()];
                prop_assert!(lab.log.placed.iter().any(|placed| placed == ulpdu), "segment {} waits", n);
            }
        }
        let delivered: Vec<&[u8]> = lab.log.delivered.iter().map(|at| &lab.log.placed[*at][..]).collect();
        let sent: Vec<&[u8]> =
            segments.iter().zip(&bodies).map(|(segment, body)| &segment[..12 + body.len()]).collect();
        prop_assert_eq!(delivered, sent);
        prop_assert_eq!(lab.log.placed.len(), segments.len(), "each is placed once");
        prop_assert!(lab.receiver.is_drained());
    }

    /// Segments that a hop leaves alone or joins are all placed on arrival: nothing is ever held.
    #[test]
    fn prop_whole_segments_beyond_gaps_are_never_held(
        bodies in bodies(),
        keys in prop::collection::vec(any::<(bool, u32)>(), 20),
    ) {
        let segments: Vec<Vec<u8>> = bodies.iter().map(|body| segment(body)).collect();
        let stream = segments.concat();
        let mut pieces: Vec<(usize, usize)> = Vec::new();
        let mut at = 0;
        for (segment, (joins, _)) in segments.iter().zip(&keys) {
            match pieces.last_mut().filter(|piece| *joins && piece.1 - piece.0 < 1000) {
                Some(piece) => piece.1 += segment.len(),
                None => pieces.push((at, at + segment.len())),
            }
            at += segment.len();
        }
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|at| keys[*at].1);
        let mut lab = Lab::new(stream.len());
        for at in order {
            lab.take(pieces[at], &stream);
            prop_assert_eq!(lab.receiver.held_bytes(), 0);
        }
        prop_assert_eq!(lab.log.delivered.len(), segments.len());
    }
}
