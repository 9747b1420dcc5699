//! RFC 5040 section 5.5 and appendix B, and the additions of verbs: fences, flushing, turns.

use super::*;

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::Flushed;

#[test]
fn rfc5040_s5_5_r14_work_completes_when_its_last_byte_is_acknowledged_and_not_before() {
    let mut pair = Pair::new();
    let (sink, _) = pair.b.region(4000, 0, ALL);
    let (source, _) = pair.a.region(4000, 0, ALL);
    pair.a.post(1, write_to(sink, 0), &[whole(source, 4000)]);
    pair.a.pull_all();
    let ends: Vec<u64> = pair.a.wire.iter().map(|(_, end)| *end).collect();
    assert_eq!(ends.len(), 3);
    pair.a.rnic.acked(CONN, ends[1]);
    pair.a.rnic.acked(CONN, ends[2] - 1);
    assert_eq!(pair.a.outcomes(), []);
    pair.a.rnic.acked(CONN, ends[2]);
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    pair.a.rnic.acked(CONN, ends[2]);
    assert_eq!(pair.a.outcomes(), []);
}

#[test]
fn rfc5040_s5_5_r15_operations_complete_in_the_order_they_were_posted() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(100, 0, ALL);
    let (local, _) = pair.a.region(100, 0, ALL);
    pair.a.post(1, read_from(remote, 0), &[whole(local, 100)]);
    pair.a.post(2, write_to(remote, 0), &[whole(local, 100)]);
    pair.a.pull_all();
    let end = pair.a.offset;
    // The Write is acknowledged while the Read has no answer.
    pair.a.rnic.acked(CONN, end);
    assert_eq!(pair.a.outcomes(), []);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn rfc5040_s5_5_r12_a_fence_delays_work_until_earlier_reads_are_complete() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(100, 0, ALL);
    let (local, _) = pair.a.region(100, 0, ALL);
    pair.a.post(1, read_from(remote, 0), &[whole(local, 100)]);
    let flags = SendFlags::FENCE | SendFlags::SIGNALED;
    pair.a.post_with(2, write_to(remote, 0), Payload::Inline(b"later"), flags);
    pair.a.pull_all();
    assert_eq!(pair.a.wire.len(), 1, "the Read Request alone");
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn rfc5040_s5_5_r20_responses_are_sent_in_the_order_of_the_requests() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(4000, 0, ALL);
    let (local, _) = pair.a.region(4000, 0, ALL);
    for i in 0..3u32 {
        pair.a.post(
            u64::from(i),
            read_from(remote, 0),
            &[Sge { key: local, offset: u64::from(i), len: 2000 - i }],
        );
    }
    Pair::carry(&mut pair.a, &mut pair.b);
    pair.b.pull_all();
    let sinks: Vec<u8> = pair.b.wire.iter().map(|(ulpdu, _)| ulpdu[13]).collect();
    assert_eq!(sinks.len(), 6);
    assert_eq!((sinks[0], sinks[2], sinks[4]), (0, 1, 2));
    pair.run();
    assert_eq!(pair.a.outcomes(), [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]);
}

#[test]
fn rfc5041_s5_3_messages_are_not_interleaved_and_responses_alternate_with_requests() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(9000, 0, ALL);
    let (local, _) = pair.a.region(9000, 0, ALL);
    for i in 0..4 {
        pair.a.post(i, read_from(remote, 0), &[whole(local, 3000)]);
    }
    Pair::carry(&mut pair.a, &mut pair.b);
    for i in 0..4 {
        pair.b.post(i, write_to(local, 3000), &[whole(remote, 3000)]);
    }
    pair.b.pull_all();
    // Opcodes of whole messages, a new one after each Last flag.
    let mut messages = Vec::new();
    let mut last = true;
    for (ulpdu, _) in &pair.b.wire {
        let opcode = ulpdu[1] & 0xf;
        if last {
            messages.push(opcode);
        }
        assert_eq!(messages.last(), Some(&opcode));
        last = ulpdu[0] & 0x40 != 0;
    }
    assert_eq!(messages, [2, 0, 2, 0, 2, 0, 2, 0], "Read Responses and Writes in turn");
}

#[test]
fn rfc5040_s5_5_r18_a_send_is_delivered_while_earlier_reads_wait_for_responses() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(100, 0, ALL);
    let (local, _) = pair.a.region(100, 0, ALL);
    pair.b.receive(5, &[]);
    pair.a.post(1, read_from(remote, 0), &[whole(local, 100)]);
    pair.a.post(2, SEND, &[]);
    Pair::carry(&mut pair.a, &mut pair.b);
    assert_eq!(pair.b.outcomes(), [(5, SUCCESS)]);
}

#[test]
fn an_error_flushes_both_queues_once_and_in_order() {
    let mut pair = Pair::new();
    let (remote, _) = pair.b.region(100, 0, ALL);
    let (local, _) = pair.a.region(100, 0, ALL);
    for wr_id in 10..13 {
        pair.a.receive(wr_id, &[]);
    }
    pair.a.post(1, write_to(remote, 0), &[whole(local, 100)]);
    pair.a.post(2, write_to(remote, 0), &[whole(STag::new(0x1234), 100)]);
    pair.a.post(3, write_to(remote, 0), &[whole(local, 100)]);
    pair.a.pull_all();
    let want = [
        (1, FLUSHED),
        (2, WcStatus::LocalProtection),
        (3, FLUSHED),
        (10, FLUSHED),
        (11, FLUSHED),
        (12, FLUSHED),
    ];
    assert_eq!(pair.a.outcomes(), want);
    assert_eq!(pair.a.state(), QpState::Terminate);
    // Work posted from now on is flushed at once.
    pair.a.post(4, SEND, &[]);
    pair.a.receive(13, &[]);
    assert_eq!(pair.a.outcomes(), [(4, FLUSHED), (13, FLUSHED)]);
    // A late acknowledgement has no effect.
    pair.a.rnic.acked(CONN, u64::MAX);
    assert_eq!(pair.a.outcomes(), []);
}

#[test]
fn unsignalled_work_that_fails_generates_a_completion() {
    let mut pair = Pair::new();
    pair.a.post_with(1, SEND, Payload::Gather(&[whole(STag::new(1), 1)]), SendFlags::empty());
    pair.a.post_with(2, SEND, Payload::EMPTY, SendFlags::empty());
    pair.a.pull_all();
    assert_eq!(pair.a.outcomes(), [(1, WcStatus::LocalProtection), (2, FLUSHED)]);
}

#[test]
fn a_message_begins_in_the_rest_of_a_segment_only_when_the_rest_is_large_enough() {
    let mut pair = Pair::new();
    let (sink, _) = pair.b.region(100_000, 0, ALL);
    let (source, _) = pair.a.region(65_536, 0, ALL);
    pair.a.post(1, write_to(sink, 0), &[whole(source, 65_536)]);
    pair.a.pull_all();
    let sizes: Vec<usize> = pair.a.wire.iter().map(|(ulpdu, _)| ulpdu.len()).collect();
    assert_eq!(sizes.len(), 46);
    assert!(sizes[..45].iter().all(|len| *len == MULPDU));
    // In the rest of a segment a message begins only when that is worth a header.
    pair.a.post(2, write_to(sink, 0), &[whole(source, 1000)]);
    let start = pair.a.offset;
    let crumb = sim::pull(&mut pair.a.rnic, CONN, start, 100, MULPDU);
    assert_eq!(crumb.pulled, Pulled::Nothing);
    let piece = sim::pull(&mut pair.a.rnic, CONN, start, 500, MULPDU);
    assert_eq!((piece.pulled, piece.ulpdu.len()), (Pulled::Ulpdu, 500));
    let rest = sim::pull(&mut pair.a.rnic, CONN, piece.end, MULPDU, MULPDU);
    assert_eq!(rest.ulpdu.len(), 1000 - 486 + 14);
}
