//! The queue against a plain list of segments.

use super::*;
use proptest::prelude::*;

const LEN: u64 = 100;

fn entry(n: u64, sent: u64) -> SentSegment {
    SentSegment { end: (n + 1) * LEN, ..SentSegment::fin(n * LEN, Instant::from_nanos(sent)) }
}

/// The expected state of one segment: the oracle.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Model {
    acked: bool,
    sacked: bool,
    lost: bool,
}

#[derive(Debug, Clone)]
enum Op {
    Ack(u64),
    Sack(u64, u64),
    Lose(u64),
    ResendNext,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u64..40).prop_map(Op::Ack),
        (0u64..40, 1u64..10).prop_map(|(a, n)| Op::Sack(a, a + n)),
        (0u64..40).prop_map(Op::Lose),
        Just(Op::ResendNext),
    ]
}

fn apply(queue: &mut Queue, model: &mut [Model], op: &Op) {
    let first = model.iter().position(|m| !m.acked).unwrap_or(model.len());
    match *op {
        Op::Ack(n) => {
            while queue.pop_acked(n * LEN).is_some() {}
            model.iter_mut().take(n as usize).for_each(|m| m.acked = true);
        }
        Op::Sack(from, to) => {
            // A block may begin or end within a segment, which is marked only when wholly covered.
            queue.sack(&[(from * LEN + 1, to * LEN + 1)], |_| ());
            queue.sack(&[(from * LEN, to * LEN)], |_| ());
            for m in model.iter_mut().take(to as usize).skip(from as usize).filter(|m| !m.acked) {
                (m.sacked, m.lost) = (true, false);
            }
        }
        Op::Lose(n) => {
            let n = n as usize;
            if n >= first && n < model.len() {
                queue.mark_lost(n - first);
                model[n].lost |= !model[n].sacked;
            }
        }
        Op::ResendNext => {
            let expected = model.iter().position(|m| !m.acked && m.lost);
            let next = queue.next_lost();
            assert_eq!(next.map(|i| i + first), expected);
            if let Some(index) = next {
                queue.resent(index, Instant::from_nanos(1_000));
                model[index + first].lost = false;
            }
        }
    }
}

proptest! {
    #[test]
    fn prop_the_queue_agrees_with_a_list_of_segments(ops in proptest::collection::vec(op(), 0..60)) {
        let mut queue = Queue::default();
        let mut model = vec![Model { acked: false, sacked: false, lost: false }; 40];
        for n in 0..40 {
            queue.push(entry(n, n));
        }
        for op in &ops {
            apply(&mut queue, &mut model, op);
            let left: Vec<_> = model.iter().filter(|m| !m.acked).collect();
            prop_assert_eq!(queue.len(), left.len());
            prop_assert_eq!(queue.sacked(), left.iter().filter(|m| m.sacked).count());
            let in_flight = left.iter().filter(|m| !m.sacked && !m.lost).count() as u64 * LEN;
            prop_assert_eq!(queue.in_flight(), in_flight);
        }
    }
}

#[test]
fn only_segments_sent_earlier_are_checked_for_loss() {
    let mut queue = Queue::default();
    for n in 0..6 {
        queue.push(entry(n, n * 10));
    }
    let mut seen = Vec::new();
    assert!(queue.mark_lost_where(Instant::from_nanos(30), 4 * LEN, |e| {
        seen.push(e.start / LEN);
        e.start == 0
    }));
    assert_eq!(seen, [0, 1, 2]);
    queue.resent(0, Instant::from_nanos(99));
    queue.resent(4, Instant::from_nanos(5));
    seen.clear();
    queue.mark_lost_where(Instant::from_nanos(30), 4 * LEN, |e| {
        seen.push(e.start / LEN);
        false
    });
    assert_eq!(seen, [1, 2, 4], "a retransmitted segment further back is checked as well");
}

/// Steps of the most expensive ACK, with `count` segments in flight and SACK blocks that begin elsewhere in each ACK.
fn most_steps_of_an_ack(count: u64) -> usize {
    let mut queue = Queue::default();
    for n in 0..count {
        queue.push(entry(n, n));
    }
    // Every second segment is marked in runs of one, which the next block joins.
    for n in (2..count).step_by(2) {
        queue.sack(&[(n * LEN, (n + 1) * LEN)], |_| ());
    }
    queue.sack(&[(LEN, count * LEN)], |_| ());
    assert_eq!(queue.sacked() as u64, count - 1);
    let ack = |n: u64| {
        let (left, middle) = (1 + n % (count / 2), 1 + (n * 7919) % (count - 1));
        let blocks = [(left * LEN, count * LEN), (middle * LEN, (count - 1) * LEN), (LEN, count * LEN - n)];
        steps::of(|| {
            queue.sack(&blocks, |_| panic!("all is marked"));
            queue.mark_lost_where(Instant::from_nanos(count), count * LEN, |_| false);
        })
    };
    (0..4 * count).map(ack).skip(1).max().expect("some")
}

#[test]
fn the_cost_of_sack_blocks_over_marked_segments_does_not_grow_with_the_queue() {
    let (few, many) = (most_steps_of_an_ack(100), most_steps_of_an_ack(10_000));
    assert!(many <= few + 20 && many < 40, "{few} steps with 100 segments, {many} with 10000");
}

#[test]
fn reneging_clears_the_sack_marks() {
    let mut queue = Queue::default();
    for n in 0..4 {
        queue.push(entry(n, n));
    }
    queue.sack(&[(LEN, 4 * LEN)], |_| ());
    assert_eq!((queue.sacked(), queue.in_flight()), (3, LEN));
    queue.renege();
    assert_eq!((queue.sacked(), queue.in_flight()), (0, 4 * LEN));
    queue.sack(&[(LEN, 4 * LEN)], |_| ());
    assert_eq!(queue.sacked(), 3, "the runs are cleared too");
}

#[test]
fn pieces_replace_the_segment_that_they_were_cut_from() {
    let mut queue = Queue::default();
    for n in 0..3 {
        queue.push(entry(n, n));
    }
    queue.mark_lost(1);
    let status = queue.entry(1).expect("there").status();
    let piece = |from: u64, to: u64| {
        let mut piece = SentSegment { end: to, ..SentSegment::fin(from, status.sent) };
        piece.restore(&status);
        piece
    };
    queue.replace(1, vec![piece(100, 160), piece(160, 200)]);
    assert_eq!((queue.len(), queue.in_flight()), (4, 200));
    for _ in 0..2 {
        let index = queue.next_lost().expect("lost");
        queue.resent(index, Instant::from_nanos(50));
    }
    assert_eq!((queue.next_lost(), queue.in_flight()), (None, 300));
    while queue.pop_acked(300).is_some() {}
    assert!(queue.is_empty() && queue.in_flight() == 0);
}
