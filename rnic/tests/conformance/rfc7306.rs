//! RFC 7306: atomic operations and Immediate Data.

use xwarp_rnic::{Access, Operation, Payload, QpState, Remote, STag, SendFlags, Sge, WcStatus};

use crate::peer::*;

const SUCCESS: WcStatus = WcStatus::Success;

/// An Atomic Request (figure 4), all fields by hand.
fn atomic(msn: u32, code: u32, id: u32, key: STag, to: u64, words: [u64; 4]) -> Vec<u8> {
    let head = [code.to_be_bytes(), id.to_be_bytes(), key.value().to_be_bytes()].concat();
    let tail = [&[to][..], &words].concat().iter().flat_map(|w| w.to_be_bytes()).collect::<Vec<_>>();
    untagged(0x4a, 1, msn, 0, true, &[head, tail].concat())
}

fn fetch_add(msn: u32, id: u32, key: STag, to: u64, add: u64, mask: u64) -> Vec<u8> {
    atomic(msn, 0, id, key, to, [add, mask, 0, u64::MAX])
}

#[test]
fn rfc7306_s4_messages_that_the_card_sends() {
    let mut world = World::new();
    let (key, _) = world.region(8, 0, ALL);
    let place = remote(0x0102_0304, 0x40);
    let piece = [whole(key, 8)];
    world.post(1, Operation::FetchAdd { remote: place, add: 5, mask: 0x80 }, &piece);
    let swap = Operation::CompareSwap { remote: place, compare: 1, compare_mask: 2, swap: 3, swap_mask: 4 };
    world.post(2, swap, &piece);
    world.post(3, Operation::Immediate { data: *b"12345678" }, &[]);
    world.post_flags(4, Operation::Immediate { data: *b"abcdefgh" }, Payload::EMPTY, SendFlags::SOLICITED);
    world.run();
    let heard = world.heard();
    let id = |u: &[u8]| u32::from_be_bytes([u[22], u[23], u[24], u[25]]);
    let place = STag::new(0x0102_0304);
    assert_eq!(heard[0], fetch_add(1, id(&heard[0]), place, 0x40, 5, 0x80));
    assert_eq!(heard[1], atomic(2, 2, id(&heard[1]), place, 0x40, [3, 4, 1, 2]));
    assert_ne!(id(&heard[0]), id(&heard[1]));
    assert_eq!(heard[2], untagged(0x48, 0, 1, 0, true, b"12345678"));
    assert_eq!(heard[3], untagged(0x49, 0, 2, 0, true, b"abcdefgh"));
}

#[test]
fn rfc7306_s5_2_2_responses_on_queue_3_in_the_order_of_the_requests() {
    let mut world = World::new();
    let (key, memory) = world.region(16, 0, Access::REMOTE_ATOMIC | Access::REMOTE_READ);
    memory.store_u64(8, 40).unwrap();
    world.say([
        fetch_add(1, 0xaaaa, key, 8, 2, 0),
        read_request(2, key, 8, 8),
        atomic(3, 2, 0xbbbb, key, 8, [7, u64::MAX, 42, u64::MAX]),
        atomic(4, 2, 0xcccc, key, 8, [9, u64::MAX, 42, u64::MAX]),
    ]);
    let heard = world.heard();
    let response = |msn, id: u32, word: u64| {
        untagged(0x4b, 3, msn, 0, true, &[&id.to_be_bytes()[..], &word.to_be_bytes()].concat())
    };
    assert_eq!(heard[0], response(1, 0xaaaa, 40));
    assert_eq!(heard[1][14..], 42u64.to_ne_bytes(), "the Read between them sees the sum");
    assert_eq!(heard[2], response(2, 0xbbbb, 42));
    assert_eq!(heard[3], response(3, 0xcccc, 7), "did not match: the word stays");
    assert_eq!(memory.load_u64(8), Ok(7));
    assert_eq!(world.outcomes(), [], "the ULP does not hear of them");
}

#[test]
fn rfc7306_s5_2_1_atomics_take_nothing_but_the_right_to_them() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 1, ALL - Access::REMOTE_ATOMIC);
    let request = fetch_add(1, 1, key, 0, 1, 0);
    world.say([request.clone()]);
    let terminate = world.terminate();
    assert_eq!((terminate.numbers(), bytes(&memory)), ((0, 1, 2), vec![1; 8]));
    assert_eq!((terminate.ddp.as_deref(), terminate.rdma), (Some(&request[..18]), None));
}

/// Sections 5.1.1, 5.1.2 and 8.2.
#[test]
fn rfc7306_s8_2_an_unaligned_word_ends_the_stream_untouched() {
    for code in [0, 2] {
        let mut world = World::new();
        let (key, memory) = world.region(16, 1, ALL);
        let request = atomic(1, code, 1, key, 4, [1, u64::MAX, 0x0101_0101_0101_0101, u64::MAX]);
        world.say([request.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), (0, 2, 7), "Remote Operation: catastrophic, localized to the stream");
        assert_eq!(terminate.length, Some(70));
        assert_eq!((terminate.ddp.as_deref(), terminate.rdma), (Some(&request[..18]), None));
        assert_eq!(bytes(&memory), [1; 16]);
    }
}

#[test]
fn rfc7306_s5_2_1_an_operation_code_of_none_is_an_error() {
    for code in [1, 3, 15] {
        let mut world = World::new();
        let (key, memory) = world.region(8, 1, ALL);
        world.say([atomic(1, code, 1, key, 0, [9, u64::MAX, 0, 0])]);
        assert_eq!(world.terminate().numbers(), (0, 2, 6), "unexpected opcode");
        assert_eq!(bytes(&memory), [1; 8]);
    }
}

#[test]
fn rfc7306_s5_2_2_more_requests_than_ird_end_the_stream() {
    // Beside the Reads there is room for as many atomics, and no more.
    for last in [8, 9] {
        let mut world = World::new();
        let (key, _) = world.region(20_000_000, 0, ALL);
        let reads = (1..=4).map(|msn| read_request(msn, key, 0, 20_000_000));
        world.say(reads.chain((5..=last).map(|msn| fetch_add(msn, msn, key, 0, 1, 0))));
        if last == 8 {
            assert_eq!(world.state(), QpState::Rts);
        } else {
            assert_eq!(world.terminate().numbers(), (1, 2, 2));
        }
    }
}

#[test]
fn rfc7306_s5_4_an_atomic_completes_with_its_response() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0, ALL);
    world.post(1, Operation::FetchAdd { remote: remote(9, 0), add: 1, mask: 0 }, &[whole(key, 8)]);
    world.run();
    assert_eq!(world.outcomes(), []);
    let id: Vec<u8> = world.heard()[0][22..26].to_vec();
    world.say([untagged(0x4b, 3, 1, 0, true, &[&id[..], &77u64.to_be_bytes()].concat())]);
    assert_eq!((world.outcomes(), memory.load_u64(0)), (vec![(1, SUCCESS)], Ok(77)));
}

#[test]
fn rfc7306_s5_2_2_an_invalid_response_is_an_error() {
    for wrong in [
        untagged(0x4b, 3, 1, 0, true, &[0xff; 12]),
        untagged(0x4b, 3, 2, 0, true, &[0; 12]),
        untagged(0x4b, 3, 1, 0, true, &[0; 11]),
        untagged(0x4b, 2, 1, 0, true, &[0; 12]),
    ] {
        let mut world = World::new();
        let (key, memory) = world.region(8, 5, ALL);
        world.post(1, Operation::FetchAdd { remote: remote(9, 0), add: 1, mask: 0 }, &[whole(key, 8)]);
        world.say([wrong.clone()]);
        assert_ne!(world.state(), QpState::Rts, "{wrong:x?}");
        assert_ne!(world.outcomes()[0].1, SUCCESS);
        assert_eq!(bytes(&memory), [5; 8]);
    }
}

#[test]
fn rfc7306_s6_3_immediate_data_is_eight_bytes_in_a_receive_of_its_own() {
    let mut world = World::new();
    for wr_id in 1..=3 {
        world.receive(wr_id, &[]);
    }
    let [first, second] = [(0x48, b"12345678"), (0x49, b"abcdefgh")];
    world.say([
        untagged(first.0, 0, 1, 0, true, first.1),
        untagged(second.0, 0, 2, 0, true, second.1),
        send(3, 0, true, b""),
    ]);
    let done: Vec<_> = world.completions().iter().map(|c| (c.wr_id, c.immediate, c.solicited)).collect();
    assert_eq!(done, [(1, Some(*first.1), false), (2, Some(*second.1), true), (3, None, false)]);
}

#[test]
fn rfc7306_s6_3_immediate_data_of_another_length_is_an_error() {
    for len in [0, 7, 9] {
        let mut world = World::new();
        world.receive(1, &[]);
        world.say([untagged(0x48, 0, 1, 0, true, &vec![1; len])]);
        assert_ne!(world.state(), QpState::Rts, "{len} bytes");
        assert_eq!(world.outcomes(), [(1, WcStatus::Flushed)]);
    }
}

#[test]
fn rfc7306_s4_1_version_and_queue_are_checked() {
    for (segment, numbers) in [
        (untagged(0x88, 0, 1, 0, true, &[0; 8]), (0, 2, 5)),
        (untagged(0x48, 1, 1, 0, true, &[0; 8]), (0, 2, 6)),
        (untagged(0x4a, 0, 1, 0, true, &[0; 52]), (0, 2, 6)),
    ] {
        let mut world = World::new();
        world.receive(1, &[]);
        world.say([segment]);
        assert_eq!(world.terminate().numbers(), numbers);
    }
}

#[test]
fn rfc7306_s6_a_write_with_immediate_is_sent_as_two_messages() {
    let mut world = World::new();
    let (key, _) = world.region(3000, 5, ALL);
    let remote = Remote { key: STag::new(0x1234_5678), offset: 9 };
    let operation = Operation::WriteImmediate { remote, data: *b"8 octets" };
    let pieces = [Sge { key, offset: 0, len: 3000 }];
    let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
    world.post_flags(1, operation, Payload::Gather(&pieces), flags);
    world.run();
    let heard = world.heard();
    let (immediate, writes) = heard.split_last().unwrap();
    assert_eq!(*immediate, untagged(0x49, 0, 1, 0, true, b"8 octets"));
    assert!(writes.iter().all(|segment| segment[1] == 0x40 && segment[2..6] == [0x12, 0x34, 0x56, 0x78]));
    let last: Vec<bool> = writes.iter().map(|segment| segment[0] & 0x40 != 0).collect();
    assert!(last.iter().rev().skip(1).all(|last| !last) && last.ends_with(&[true]));
    assert_eq!(writes.iter().map(|segment| segment.len() - 14).sum::<usize>(), 3000);
    assert_eq!(world.outcomes(), [(1, SUCCESS)]);
}
