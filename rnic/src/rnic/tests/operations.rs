//! Every operation, end to end.

use super::*;

const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn a_send_of_many_segments_is_scattered_and_completes_at_both_ends() {
    let mut pair = Pair::new();
    let (source, from) = pair.a.region(10_001, 3, Access::empty());
    let (first, to_first) = pair.b.region(77, 0, Access::LOCAL_WRITE);
    let (second, to_second) = pair.b.region(20_000, 0, Access::LOCAL_WRITE);
    pair.b.receive(9, &[whole(first, 77), Sge { key: second, offset: 5, len: 19_000 }]);
    let gather = [Sge { key: source, offset: 0, len: 10 }, Sge { key: source, offset: 10, len: 9991 }];
    pair.a.post(1, SEND, &gather);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    let got = pair.b.poll();
    assert_eq!(
        (got[0].wr_id, got[0].status, got[0].byte_len, got[0].opcode),
        (9, SUCCESS, 10_001, Opcode::Recv)
    );
    let sent = bytes(&from);
    assert_eq!(bytes(&to_first), sent[..77]);
    assert_eq!(bytes(&to_second)[5..9929], sent[77..]);
}

#[test]
fn a_write_changes_only_its_target() {
    let mut pair = Pair::new();
    let (source, from) = pair.a.region(5000, 1, Access::empty());
    let (sink, to) = pair.b.region(9000, 0, Access::REMOTE_WRITE);
    let before = bytes(&to);
    pair.a.post(1, write_to(sink, 1234), &[whole(source, 5000)]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    assert_eq!(pair.b.poll(), [], "the peer gets no completion for a Write");
    let after = bytes(&to);
    assert_eq!(after[1234..6234], bytes(&from));
    assert_eq!((&after[..1234], &after[6234..]), (&before[..1234], &before[6234..]));
}

#[test]
fn reads_fetch_up_to_ord_at_a_time_and_complete_in_order() {
    let mut pair = Pair::new();
    let (source, from) = pair.b.region(8000, 5, Access::REMOTE_READ);
    let (sink, to) = pair.a.region(8000, 0, Access::LOCAL_WRITE);
    for i in 0..8u32 {
        let piece = Sge { key: sink, offset: u64::from(i) * 1000, len: 1000 };
        pair.a.post(u64::from(i), read_from(source, u64::from(i) * 1000), &[piece]);
    }
    pair.a.pull_all();
    assert_eq!(pair.a.wire.len(), 4, "ORD is 4");
    pair.run();
    assert_eq!(pair.a.outcomes(), (0..8).map(|i| (i, SUCCESS)).collect::<Vec<_>>());
    assert_eq!(bytes(&to), bytes(&from));
}

#[test]
fn empty_messages_work_for_every_operation() {
    let mut pair = Pair::new();
    pair.b.receive(7, &[]);
    // Invalid tags: without payload they must not be checked (RFC 5041 section 5.2).
    let nothing = STag::new(0xdead_beef);
    pair.a.post(1, write_to(nothing, u64::MAX), &[]);
    pair.a.post(2, read_from(nothing, 3), &[]);
    pair.a.post(3, SEND, &[]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS)]);
    assert_eq!(pair.b.outcomes(), [(7, SUCCESS)]);
}

#[test]
fn inline_data_is_copied_when_it_is_posted() {
    let options = QueuePairOptions { max_send_wr: 2, ..QueuePairOptions::default() };
    let mut pair = Pair::with(|_, a| QpAttributes { options, ..a });
    let (sink, to) = pair.b.region(300, 0, Access::all());
    for round in 0..5u8 {
        let mut data = [round; 100];
        pair.a.post_with(0, write_to(sink, 100), Payload::Inline(&data), SendFlags::SIGNALED);
        data.fill(0xff);
        pair.run();
        assert_eq!(bytes(&to)[100..200], [round; 100]);
    }
    assert_eq!(pair.a.poll().len(), 5);
}

#[test]
fn unsignalled_work_completes_silently_and_frees_its_queue_entry() {
    let options = QueuePairOptions { max_send_wr: 4, ..QueuePairOptions::default() };
    let mut pair = Pair::with(|_, a| QpAttributes { options, ..a });
    let (sink, _) = pair.b.region(8, 0, ALL);
    for round in 0..10u64 {
        for _ in 0..3 {
            pair.a.post_with(0, write_to(sink, 0), Payload::Inline(b"silence"), SendFlags::empty());
        }
        pair.a.post_with(round, write_to(sink, 0), Payload::Inline(b"word"), SendFlags::SIGNALED);
        pair.run();
        assert_eq!(pair.a.outcomes(), [(round, SUCCESS)]);
    }
}

#[test]
fn invalidation_and_solicited_event_are_reported_to_the_receiver() {
    let mut pair = Pair::new();
    let (window, _) = pair.b.region(64, 0, ALL);
    for wr_id in 0..4 {
        pair.b.receive(wr_id, &[]);
    }
    pair.a.post(0, SEND, &[]);
    pair.a.post_with(1, SEND, Payload::EMPTY, SendFlags::SOLICITED);
    pair.a.post_with(2, Operation::Send { invalidate: Some(window) }, Payload::EMPTY, SendFlags::SOLICITED);
    pair.run();
    let got: Vec<_> = pair.b.poll().iter().map(|c| (c.solicited, c.invalidated)).collect();
    assert_eq!(got, [(false, None), (true, None), (true, Some(window))]);
    // The tag is closed to the peer at once, and stays open to its owner.
    pair.b.post(5, SEND, &[whole(window, 64)]);
    pair.a.post(3, write_to(window, 0), &[]);
    pair.a.post_with(4, write_to(window, 0), Payload::Inline(b"x"), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.b.state(), QpState::Terminate);
}

#[test]
fn immediate_data_is_returned_in_the_completion_of_a_receive() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(16, 0, ALL);
    pair.b.receive(1, &[]);
    pair.a.post_with(1, write_to(sink, 0), Payload::Inline(&[9; 16]), SendFlags::empty());
    pair.a.post_with(
        2,
        Operation::Immediate { data: *b"immediat" },
        Payload::EMPTY,
        SendFlags::SOLICITED | SendFlags::SIGNALED,
    );
    pair.run();
    let got = pair.b.poll()[0];
    assert_eq!((got.opcode, got.immediate, got.solicited), (Opcode::RecvImmediate, Some(*b"immediat"), true));
    assert_eq!(bytes(&to), [9; 16]);
    assert_eq!(pair.a.outcomes(), [(2, SUCCESS)]);
}

#[test]
fn atomics_return_the_previous_word_and_change_it_once() {
    let mut pair = Pair::new();
    let (word, remote) = pair.b.region(16, 0, Access::REMOTE_ATOMIC);
    let (result, local) = pair.a.region(16, 0, Access::LOCAL_WRITE);
    remote.store_u64(8, 100).unwrap();
    let remote_word = Remote { key: word, offset: 8 };
    let at = |offset| [Sge { key: result, offset, len: 8 }];
    pair.a.post(1, Operation::FetchAdd { remote: remote_word, add: 5, mask: 0 }, &at(0));
    let swap = Operation::CompareSwap {
        remote: remote_word,
        compare: 105,
        compare_mask: u64::MAX,
        swap: 7,
        swap_mask: u64::MAX,
    };
    pair.a.post(2, swap, &at(8));
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!((local.load_u64(0), local.load_u64(8), remote.load_u64(8)), (Ok(100), Ok(105), Ok(7)));
}

#[test]
fn a_read_with_invalidation_closes_its_sink_to_the_peer() {
    let mut pair = Pair::new();
    let (source, _) = pair.b.region(8, 1, ALL);
    let (sink, to) = pair.a.region(8, 0, ALL);
    let operation = Operation::Read { remote: Remote { key: source, offset: 0 }, invalidate: true };
    pair.a.post(1, operation, &[whole(sink, 8)]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    pair.b.post_with(1, write_to(sink, 0), Payload::Inline(b"too late"), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(bytes(&to), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(pair.a.state(), QpState::Terminate);
}

#[test]
fn local_invalidation_is_executed_in_send_queue_order() {
    let mut pair = Pair::new();
    let (open, to) = pair.a.region(8, 0, ALL);
    pair.b.receive(9, &[]);
    pair.a.post(1, SEND, &[]);
    pair.a.post_with(2, Operation::LocalInvalidate { key: open }, Payload::EMPTY, SendFlags::SIGNALED);
    pair.b.post_with(1, write_to(open, 0), Payload::Inline(b"in time!"), SendFlags::SIGNALED);
    Pair::carry(&mut pair.b, &mut pair.a);
    assert_eq!(bytes(&to), *b"in time!", "the Send before it has not begun");
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
    pair.b.post_with(2, write_to(open, 0), Payload::Inline(b"refused!"), SendFlags::SIGNALED);
    pair.run();
    assert_ne!(bytes(&to), *b"refused!");
    assert_eq!(pair.a.state(), QpState::Terminate);
}

#[test]
fn a_region_may_begin_at_any_tagged_offset() {
    let mut pair = Pair::new();
    let memory = Memory::anonymous(100, Pages::Normal).unwrap();
    let base = u64::MAX - 200;
    let registration =
        Registration { pd: pair.b.pd, memory: memory.clone(), access: ALL, base, stream: None };
    let key = pair.b.rnic.registry().register(registration).unwrap();
    pair.a.post_with(1, write_to(key, base + 90), Payload::Inline(&[7; 10]), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    assert_eq!(bytes(&memory)[88..], [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
}

#[test]
fn a_message_has_at_most_four_gigabytes_minus_one_byte() {
    let mut pair = Pair::new();
    let (key, _) = pair.a.region(8, 0, ALL);
    // An invalid key is detected at sending; a message that is too long, at posting.
    let huge = [whole(key, u32::MAX), whole(key, 1)];
    let request = WorkRequest {
        wr_id: 1,
        operation: SEND,
        payload: Payload::Gather(&huge),
        flags: SendFlags::SIGNALED,
    };
    assert_eq!(pair.a.rnic.post_send(pair.a.qp, &request), Err(PostError::MessageTooLong));
    pair.a.post(2, SEND, &huge[..1]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(2, WcStatus::LocalProtection)]);
}

#[test]
fn an_empty_read_invalidates_its_own_sink_key_and_not_the_key_in_the_response() {
    let mut pair = Pair::new();
    let (source, _) = pair.b.region(10, 0, Access::REMOTE_READ);
    let (sink, _) = pair.a.region(10, 0, ALL);
    let (precious, _) = pair.a.region(10, 0, ALL);
    let operation = Operation::Read { remote: Remote { key: source, offset: 0 }, invalidate: true };
    pair.a.post(1, operation, &[whole(sink, 0)]);
    Pair::carry(&mut pair.a, &mut pair.b);
    let mut response = pair.b.pull().unwrap();
    response[2..6].copy_from_slice(&precious.value().to_be_bytes());
    pair.a.take(&response).unwrap();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    let user = pair.a.user();
    let opens = |key| pair.a.rnic.shared.keys.open(user, key, Access::REMOTE_READ, 0, 1).is_ok();
    assert_eq!((opens(precious), opens(sink)), (true, false));
}
