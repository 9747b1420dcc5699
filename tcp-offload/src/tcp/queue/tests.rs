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
            while queue.pop_acked(n * LEN, |_| ()).is_some() {}
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
fn losses_are_detected_in_the_order_of_transmission() {
    let mut queue = Queue::default();
    for n in 0..6 {
        queue.push(entry(n, n * 10));
    }
    let detect = |queue: &mut Queue, lost: &dyn Fn(u64) -> bool| {
        let mut seen = Vec::new();
        queue.mark_lost_while(Instant::from_nanos(30), 4 * LEN, |e| {
            seen.push(e.start / LEN);
            lost(e.start / LEN)
        });
        seen
    };
    assert_eq!(
        detect(&mut queue, &|n| n == 0),
        [0, 1],
        "no segment is checked after one that is not lost yet"
    );
    queue.resent(0, Instant::from_nanos(99));
    queue.resent(4, Instant::from_nanos(5));
    assert_eq!(detect(&mut queue, &|_| true), [4, 1, 2], "ordered by the last transmission");
    assert_eq!(detect(&mut queue, &|_| true), [0; 0], "lost segments are not checked again");
    queue.forget_losses();
    assert_eq!(detect(&mut queue, &|_| true), [4, 1, 2], "in flight again");
}

/// What happens to a queue between two detections of losses.
#[derive(Debug, Clone)]
enum Step {
    Push,
    Resend(u64),
    Sack(u64, u64),
    Ack(u64),
    Renege,
    Forget,
    Detect { sent: u64, end: u64, age: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Push),
        3 => (0u64..60).prop_map(Step::Resend),
        3 => (0u64..60, 1u64..6).prop_map(|(from, len)| Step::Sack(from, from + len)),
        1 => (0u64..30).prop_map(Step::Ack),
        1 => Just(Step::Renege),
        1 => Just(Step::Forget),
        3 => (0u64..80, 0u64..60, 0u64..30).prop_map(|(sent, end, age)| Step::Detect { sent, end, age }),
    ]
}

proptest! {
    /// The list of transmissions finds the losses that a walk over all segments finds.
    #[test]
    fn prop_losses_are_those_of_a_walk_over_all_segments(steps in proptest::collection::vec(step(), 0..200)) {
        let mut queue = Queue::default();
        let (mut next, mut now) = (0, 0);
        for (number, step) in steps.into_iter().enumerate() {
            // Several transmissions share an instant.
            now += u64::from(number % 3 == 0);
            match step {
                Step::Push => {
                    queue.push(entry(next, now));
                    next += 1;
                }
                Step::Resend(n) => {
                    let index = queue.index_from(n * LEN);
                    if queue.entry(index).is_some_and(|e| !e.sacked) {
                        queue.resent(index, Instant::from_nanos(now));
                    }
                }
                Step::Sack(from, to) => queue.sack(&[(from * LEN, to * LEN)], |_| ()),
                Step::Ack(to) => while queue.pop_acked(to * LEN, |_| ()).is_some() {},
                Step::Renege => queue.renege(),
                Step::Forget => queue.forget_losses(),
                Step::Detect { sent, end, age } => {
                    let (xmit, end) = (Instant::from_nanos(sent), end * LEN);
                    let lost = |e: &SentSegment| e.sent.as_nanos() + age <= now;
                    let detected = |e: &SentSegment| !e.sacked && sent_after(xmit, end, e.sent, e.end) && lost(e);
                    let expected: Vec<bool> = queue.entries.iter().map(|e| e.lost || detected(e)).collect();
                    queue.mark_lost_while(xmit, end, lost);
                    let found: Vec<bool> = queue.entries.iter().map(|e| e.lost).collect();
                    prop_assert_eq!(found, expected);
                }
            }
            let kept = queue.transmissions.as_ref().map_or(0, VecDeque::len);
            prop_assert!(kept <= 2 * queue.len() + SPARE_TRANSMISSIONS + 1);
        }
    }
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
            queue.mark_lost_while(Instant::from_nanos(count), count * LEN, |_| false);
        })
    };
    (0..4 * count).map(ack).skip(1).max().expect("some")
}

#[test]
fn the_cost_of_sack_blocks_over_marked_segments_does_not_grow_with_the_queue() {
    let (few, many) = (most_steps_of_an_ack(100), most_steps_of_an_ack(10_000));
    assert!(many <= few + 20 && many < 40, "{few} steps with 100 segments, {many} with 10000");
}

/// Steps of an ACK that marks nothing, with `count` lost segments that wait for the congestion window, and as many
/// pending ones, whose reordering window has not passed.
fn steps_with_lost_and_pending(count: u64) -> usize {
    let mut queue = Queue::default();
    for n in 0..=2 * count {
        queue.push(entry(n, n));
    }
    queue.sack(&[(2 * count * LEN, (2 * count + 1) * LEN)], |_| ());
    let detect = |queue: &mut Queue| {
        let lost = |e: &SentSegment| e.start < count * LEN;
        queue.mark_lost_while(Instant::from_nanos(2 * count), (2 * count + 1) * LEN, lost);
    };
    detect(&mut queue);
    steps::of(|| {
        detect(&mut queue);
        queue.last_sent_before(Instant::from_nanos(2 * count), (2 * count + 1) * LEN);
    })
}

#[test]
fn the_cost_of_an_ack_does_not_grow_with_lost_or_pending_segments() {
    assert_eq!(steps_with_lost_and_pending(10), 2);
    assert_eq!(steps_with_lost_and_pending(5_000), 2);
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
    while queue.pop_acked(300, |_| ()).is_some() {}
    assert!(queue.is_empty() && queue.in_flight() == 0);
}
