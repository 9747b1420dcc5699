//! Taking a ULPDU in one step has the outcome of placing and delivering it in two: two ends get the same ULPDUs, and each takes
//! them in one of these ways.

use proptest::prelude::*;

use super::*;
use crate::ddp::{Msn, Tagged, Untagged, Versions};

/// Bytes of the region that the peer may write, and of each receive.
const REGION: usize = 4000;
const RECEIVE: u32 = 300;

/// Control bytes of RDMAP's version 1: of a Write, and of a Send, with Invalidate, with Solicited Event, and with both.
const WRITE: u8 = 0x40;
const SENDS: [u8; 4] = [0x43, 0x44, 0x45, 0x46];

#[derive(Debug, Clone)]
enum Step {
    /// The application posts a receive, in one piece or in two.
    Post { pieces: u32 },
    /// A segment of a Send, at the expected place but for these differences.
    Send { control: u8, msn: u32, mo: u32, last: bool, len: usize },
    /// A segment of a Write to one of [`Twin::keys`].
    Write { key: usize, to: u64, last: bool, len: usize },
    /// Any bytes.
    Bytes(Vec<u8>),
}

fn step() -> impl Strategy<Value = Step> {
    let len = || prop_oneof![4 => 1..200usize, 1 => Just(0), 1 => 200..400usize];
    let control = prop_oneof![6 => Just(SENDS[0]), 2 => prop::sample::select(&SENDS[..]), 1 => any::<u8>()];
    let skew = || prop_oneof![20 => Just(0u32), 1 => 0..3u32, 1 => any::<u32>()];
    let to = prop_oneof![12 => 0..REGION as u64 - 400, 1 => 0..2 * REGION as u64, 1 => any::<u64>()];
    prop_oneof![
        4 => (1..3u32).prop_map(|pieces| Step::Post { pieces }),
        8 => (control, skew(), skew(), any::<bool>(), len())
            .prop_map(|(control, msn, mo, last, len)| Step::Send { control, msn, mo, last, len }),
        8 => (prop_oneof![12 => Just(0), 1 => 0..3usize], to, any::<bool>(), len())
            .prop_map(|(key, to, last, len)| Step::Write { key, to, last, len }),
        1 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Step::Bytes),
    ]
}

struct Twin {
    end: End,
    /// A key that the peer may write to, one that it may not, and none.
    keys: [STag; 3],
    memory: [Memory; 2],
    posted: u64,
}

/// What a step has changed.
type Outcome =
    (Result<(), Refusal>, Vec<WorkCompletion>, [Vec<u8>; 2], String, Vec<AsyncEvent>, Vec<Vec<u8>>);

impl Twin {
    fn new() -> Self {
        let mut end = End::new(|_, attributes| attributes);
        end.establish(4, 4, None);
        let (writable, first) = end.region(REGION, 0, ALL);
        let (local, second) = end.region(REGION, 7, Access::LOCAL_WRITE);
        Self { end, keys: [writable, local, STag::new(0x0123_4567)], memory: [first, second], posted: 0 }
    }

    fn post(&mut self, pieces: u32) {
        let (key, len) = (self.keys[1], RECEIVE / pieces);
        let list: Vec<Sge> =
            (0..pieces).map(|piece| Sge { key, offset: u64::from(piece * 1000), len }).collect();
        self.end.receive(self.posted, &list);
        self.posted += 1;
    }

    /// Takes a ULPDU, at once or in two steps; its bytes lie in two pieces if `cut` lies within them.
    fn take(&mut self, ulpdu: &[u8], cut: usize, at_once: bool) -> Outcome {
        let (head, tail) = ulpdu.split_at(cut.min(ulpdu.len()));
        let pieces = if tail.is_empty() || head.is_empty() { vec![ulpdu] } else { vec![head, tail] };
        let ulpdu = Ulpdu::new(&pieces);
        let rnic = &mut self.end.rnic;
        let taken = if at_once {
            rnic.take(CONN, &ulpdu)
        } else {
            rnic.place(CONN, &ulpdu, Arrival::InOrder).and_then(|placed| rnic.deliver(CONN, placed))
        };
        let counters = format!("{:?} {:?}", self.end.rnic.stream_counters(self.end.qp), self.end.state());
        let memory = self.memory.each_ref().map(bytes);
        let events = self.end.async_events();
        let answer = std::iter::from_fn(|| self.end.pull()).collect();
        (taken, self.end.poll(), memory, counters, events, answer)
    }
}

proptest! {
    #[test]
    fn prop_a_ulpdu_taken_at_once_has_the_outcome_of_one_placed_and_delivered(
        steps in prop::collection::vec((step(), 0..200usize), 1..60),
    ) {
        let mut twins = [(); 2].map(|()| Twin::new());
        // The message number and offset of the next segment of a Send.
        let (mut next_msn, mut next_mo) = (1u32, 0u32);
        for (step, cut) in steps {
            let ulpdu = match step {
                Step::Post { pieces } => {
                    for twin in &mut twins {
                        twin.post(pieces);
                    }
                    continue;
                }
                Step::Send { control, msn, mo, last, len } => {
                    let (msn, mo) = (Msn::new(next_msn.wrapping_add(msn)), next_mo.wrapping_add(mo));
                    let header = Untagged { last, control, word: twins[0].keys[0].value(), queue: 0, msn, mo };
                    next_mo = if last { 0 } else { mo.wrapping_add(len as u32) };
                    [&header.to_bytes(Versions::Ietf)[..], &vec![0xa5; len]].concat()
                }
                Step::Write { key, to, last, len } => {
                    let header = Tagged { last, control: WRITE, stag: twins[0].keys[key], to };
                    [&header.to_bytes(Versions::Ietf)[..], &vec![0x5a; len]].concat()
                }
                Step::Bytes(bytes) => bytes,
            };
            let [at_once, in_steps] = &mut twins;
            let (ours, theirs) = (at_once.take(&ulpdu, cut, true), in_steps.take(&ulpdu, cut, false));
            next_msn += ours.1.iter().filter(|completion| completion.opcode == Opcode::Recv).count() as u32;
            let stopped = ours.0 == Err(Refusal::Stop);
            prop_assert_eq!(ours, theirs);
            if stopped {
                break;
            }
        }
    }
}
