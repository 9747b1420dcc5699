//! RFC 5041: Direct Data Placement.

use xwarp_rnic::{
    QpState, STag, WcStatus,
    rnic::{CmEvent, NoReceive, QpAttributes},
};

use crate::peer::*;

const SUCCESS: WcStatus = WcStatus::Success;

#[test]
fn rfc5041_s4_1_headers_that_the_card_sends() {
    let mut world = World::new();
    let (key, _) = world.region(3000, 5, ALL);
    let target = remote(0x0102_0304, 0x0506_0708_090a_0b0c);
    world.post(1, xwarp_rnic::Operation::Write { remote: target }, &[whole(key, 3000)]);
    world.post(2, SEND, &[whole(key, 3000)]);
    world.run();
    let heard = world.heard();
    let (writes, sends): (Vec<_>, Vec<_>) = heard.iter().partition(|u| u[0] & 0x80 != 0);
    for segments in [&writes, &sends] {
        assert!(segments.len() > 2);
        let (last, others) = segments.split_last().unwrap();
        assert!(last[0] & 0x40 != 0 && others.iter().all(|u| u[0] & 0x40 == 0), "L on the last one only");
        assert!(segments.iter().all(|u| u[0] & 0x3f == 1), "reserved bits zero, DV one");
    }
    let mut offset = 0;
    for write in writes {
        assert_eq!(write[1..6], [0x40, 1, 2, 3, 4], "the STag as the ULP gave it");
        assert_eq!(write[6..14], (0x0506_0708_090a_0b0cu64 + offset).to_be_bytes(), "TO counts on");
        offset += write.len() as u64 - 14;
    }
    assert_eq!(offset, 3000);
    let mut offset = 0u32;
    for send in sends {
        assert_eq!(send[1..14], [0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], "queue 0, MSN 1");
        assert_eq!(send[14..18], offset.to_be_bytes(), "MO counts on from zero");
        offset += send.len() as u32 - 18;
    }
    assert_eq!(offset, 3000);
}

#[test]
fn rfc5041_s4_1_reserved_bits_that_the_peer_sets_do_not_matter() {
    let mut world = World::new();
    let (key, memory) = world.region(4, 0, ALL);
    let mut segment = write(key, 0, b"data");
    segment[0] |= 0x3c;
    world.say([segment]);
    assert_eq!((world.state(), bytes(&memory)), (QpState::Rts, b"data".to_vec()));
}

#[test]
fn rfc5041_s4_3_msn_begins_at_one_and_steps_by_message_and_queue() {
    let mut world = World::new();
    let (key, _) = world.region(3000, 0, ALL);
    world.post(1, SEND, &[whole(key, 3000)]);
    world.post(2, SEND, &[]);
    let read = xwarp_rnic::Operation::Read { remote: remote(9, 0), invalidate: false };
    world.post(3, read, &[whole(key, 1)]);
    world.post(4, read, &[whole(key, 1)]);
    world.post(5, SEND, &[]);
    world.run();
    let msns: Vec<_> = world.heard().iter().map(|u| (u[9], u[13])).collect();
    assert_eq!(msns, [(0, 1), (0, 1), (0, 1), (0, 2), (1, 1), (1, 2), (0, 3)]);
}

#[test]
fn rfc5041_s5_2_a_tagged_segment_without_payload_names_nothing() {
    let mut world = World::new();
    world.receive(1, &[]);
    world.say([
        write(STag::new(0), u64::MAX, b""),
        write(STag::new(0xdead_beef), 7, b""),
        send(1, 0, true, b""),
    ]);
    assert_eq!((world.state(), world.outcomes()), (QpState::Rts, vec![(1, SUCCESS)]));
}

#[test]
fn rfc5041_s5_2_a_message_without_payload_is_one_segment_and_takes_one_buffer() {
    let mut world = World::new();
    world.post(1, SEND, &[]);
    world.post(2, xwarp_rnic::Operation::Write { remote: remote(5, 0) }, &[]);
    world.run();
    let lengths: Vec<_> = world.heard().iter().map(|u| (u.len(), u[0])).collect();
    assert_eq!(lengths, [(18, 0x41), (14, 0xc1)]);
    for wr_id in 5..8 {
        world.receive(wr_id, &[]);
    }
    let _ = world.outcomes();
    world.say([send(1, 0, true, b""), send(2, 0, true, b"")]);
    assert_eq!(world.outcomes(), [(5, SUCCESS), (6, SUCCESS)]);
}

#[test]
fn rfc5041_s5_4_a_message_is_delivered_once_whole_and_with_its_length() {
    let mut world = World::new();
    let (key, memory) = world.region(100, 0, ALL);
    world.receive(1, &[whole(key, 100)]);
    world.say([send(1, 0, false, &[1; 30]), send(1, 30, false, &[2; 30])]);
    assert_eq!(world.outcomes(), [], "not before the segment with L");
    world.say([send(1, 60, true, &[3; 7])]);
    let done = world.completions();
    assert_eq!((done.len(), done[0].byte_len), (1, 67));
    assert_eq!(bytes(&memory)[..68], [vec![1; 30], vec![2; 30], vec![3; 7], vec![0]].concat());
}

#[test]
fn rfc5041_s5_4_a_message_with_a_hole_is_never_delivered() {
    let mut world = World::new();
    let (key, _) = world.region(100, 0, ALL);
    world.receive(1, &[whole(key, 100)]);
    world.say([send(1, 0, false, &[1; 10]), send(1, 20, true, &[3; 10])]);
    assert_eq!(world.terminate().numbers(), (1, 2, 4), "invalid MO");
    assert_eq!(world.outcomes(), [(1, WcStatus::LocalLength)]);
}

#[test]
fn rfc5041_s6_2_1_the_peers_close_leaves_our_direction_open() {
    let mut world = World::new();
    world.receive(7, &[]);
    world.finish();
    assert!(world.card.events.iter().any(|e| matches!(e, CmEvent::Disconnected { .. })), "the ULP is told");
    assert_eq!(world.outcomes(), [(7, WcStatus::Flushed)]);
    world.post(1, SEND, &[]);
    world.run();
    assert_eq!((world.outcomes(), world.heard().len()), (vec![(1, SUCCESS)], 1));
    let qp = world.qp;
    world.card.engine.disconnect(qp).unwrap();
    world.run();
    let conn = world.conn;
    assert!(world.talk(conn).events.iter().any(|e| matches!(e, xwarp_tcp::ulp::Event::PeerClosed)));
}

#[test]
fn rfc5041_s6_2_1_a_graceful_close_sends_all_that_was_posted_and_refuses_more() {
    let mut world = World::new();
    let (key, _) = world.region(100_000, 3, ALL);
    world.post(1, SEND, &[whole(key, 100_000)]);
    let qp = world.qp;
    world.card.engine.disconnect(qp).unwrap();
    world.post(2, SEND, &[]);
    world.run();
    let total: usize = world.heard().iter().map(|u| u.len() - 18).sum();
    assert_eq!(total, 100_000);
    let mut outcomes = world.outcomes();
    outcomes.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(outcomes, [(1, SUCCESS), (2, WcStatus::Flushed)]);
}

fn strict(_: &mut xwarp_rnic::engine::Engine, mut attributes: QpAttributes) -> QpAttributes {
    attributes.options.no_receive = NoReceive::Terminate;
    attributes
}

/// Each check of section 7.1 with its code of section 7.2, the quoted part, and that no byte of the segment is
/// placed.
#[test]
fn rfc5041_s7_1_untagged_errors() {
    let mut version_2 = send(1, 0, true, b"x");
    version_2[0] = 0x42;
    let cases = [
        (untagged(0x43, 4, 1, 0, true, b"x"), (1, 2, 1)),
        (send(2, 0, true, b"x"), (1, 2, 3)),
        (send(0, 0, true, b"x"), (1, 2, 3)),
        (send(1, 17, true, b"x"), (1, 2, 4)),
        (send(1, u32::MAX, true, b"xx"), (1, 2, 4)),
        (send(1, 0, true, &[1; 17]), (1, 2, 5)),
        (send(1, 16, true, b"x"), (1, 2, 5)),
        (version_2, (1, 2, 6)),
    ];
    for (segment, numbers) in cases {
        let mut world = World::with(strict);
        let (key, memory) = world.region(32, 0xee, ALL);
        world.receive(1, &[whole(key, 16)]);
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), numbers, "{segment:?}");
        assert_eq!(terminate.length, Some(segment.len() as u16));
        assert_eq!(terminate.ddp, Some(segment[..18].to_vec()));
        assert_eq!((terminate.rdma, bytes(&memory)), (None, vec![0xee; 32]));
    }
}

/// The queues whose messages the RNIC itself consumes also have buffers for the messages that are due.
#[test]
fn rfc5041_s7_1_messages_for_the_card_are_checked_before_placement() {
    let terminate = [0x01, 0x02, 0, 0];
    let cases = [
        (untagged(0x41, 1, 2, 0, true, &[0; 28]), (1, 2, 3)),
        (untagged(0x4a, 1, 0, 0, true, &[0; 52]), (1, 2, 3)),
        (untagged(0x4b, 3, 2, 0, true, &[0; 12]), (1, 2, 3)),
        (untagged(0x47, 2, 2, 0, true, &terminate), (1, 2, 3)),
        (untagged(0x47, 2, 0, 0, true, &terminate), (1, 2, 3)),
        (untagged(0x47, 2, 1, 4, true, &terminate), (1, 2, 4)),
    ];
    for (segment, numbers) in cases {
        let mut world = World::new();
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), numbers, "{segment:?}");
        assert_eq!(terminate.ddp, Some(segment[..18].to_vec()));
    }
}

#[test]
fn rfc5041_s7_1_no_buffer_is_an_error_in_strict_mode() {
    let mut world = World::with(strict);
    world.say([send(1, 0, true, b"x")]);
    assert_eq!(world.terminate().numbers(), (1, 2, 2));
}

#[test]
fn rfc5041_s7_1_no_buffer_is_recovered_by_the_window_otherwise() {
    let mut world = World::new();
    let (key, memory) = world.region(1, 0, ALL);
    world.say([send(1, 0, true, b"x")]);
    assert_eq!((world.state(), world.outcomes()), (QpState::Rts, vec![]));
    world.receive(1, &[whole(key, 1)]);
    world.run();
    assert_eq!((world.outcomes(), bytes(&memory)), (vec![(1, SUCCESS)], b"x".to_vec()));
}

/// Section 7.1: the report has the DDP header and the segment's length, also when the wait for a receive timed out.
#[test]
fn rfc5041_s7_1_no_buffer_in_time_is_reported_with_the_segment_that_waited() {
    let mut world = World::new();
    let segment = send(1, 0, true, b"x");
    world.say([segment.clone()]);
    world.run_for(std::time::Duration::from_secs(6));
    let terminate = world.terminate();
    assert_eq!(terminate.numbers(), (1, 2, 2));
    assert_eq!(terminate.length, Some(segment.len() as u16));
    assert_eq!((terminate.ddp.as_deref(), terminate.rdma), (Some(&segment[..18]), None));
}

/// RFC 5040 section 4.8: no DDP header is present with a Local Catastrophic Error, of DDP too.
#[test]
fn rfc5041_s7_2_a_local_error_of_ddp_quotes_nothing() {
    let mut world = World::new();
    let (key, _) = world.region(8, 0, ALL);
    world.receive(1, &[whole(key, 8)]);
    world.card.engine.rnic().registry().deregister(key).unwrap();
    world.say([send(1, 0, true, b"x")]);
    let terminate = world.terminate();
    assert_eq!(terminate.numbers(), (1, 0, 0));
    assert_eq!((terminate.length, terminate.ddp, terminate.rdma), (None, None, None));
    assert_eq!(world.outcomes(), [(1, WcStatus::LocalProtection)]);
}

/// Makes a segment for a region of 32 bytes.
type Make = fn(STag) -> Vec<u8>;

#[test]
fn rfc5041_s7_1_tagged_errors() {
    let other_pd = |world: &mut World| {
        let pd = world.card.engine.rnic().registry().alloc_pd().unwrap();
        let memory = xwarp_rnic::Memory::anonymous(32, xwarp_rnic::Pages::Normal).unwrap();
        world.register(&memory, pd, ALL, None)
    };
    let cases: [(Make, (u8, u8, u8)); 6] = [
        (|key| write(STag::new(key.value() ^ 1), 0, b"x"), (1, 1, 0)),
        (|key| write(key, 33, b"x"), (1, 1, 1)),
        (|key| write(key, 30, b"xyz"), (1, 1, 1)),
        (|key| write(key, u64::MAX, b"xy"), (1, 1, 3)),
        (|key| write(key, u64::MAX - 1, b"xyz"), (1, 1, 3)),
        (
            |key| {
                let mut segment = write(key, 0, b"x");
                segment[0] = 0xc0;
                segment
            },
            (1, 1, 4),
        ),
    ];
    for (make, numbers) in cases {
        let mut world = World::new();
        let (key, memory) = world.region(32, 0xee, ALL);
        let segment = make(key);
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), numbers, "{segment:?}");
        assert_eq!(terminate.length, Some(segment.len() as u16));
        assert_eq!(terminate.ddp, Some(segment[..14].to_vec()));
        assert_eq!((terminate.rdma, bytes(&memory)), (None, vec![0xee; 32]));
    }
    let mut world = World::new();
    let key = other_pd(&mut world);
    world.say([write(key, 0, b"x")]);
    assert_eq!(world.terminate().numbers(), (1, 1, 2));
}

#[test]
fn rfc5041_s7_1_after_an_error_later_segments_are_dropped_in_silence() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0xee, ALL);
    world.receive(1, &[whole(key, 8)]);
    world.say([write(STag::new(1), 0, b"x"), write(key, 0, b"later"), send(1, 0, true, b"later")]);
    assert_eq!(world.terminate().numbers(), (1, 1, 0));
    assert_eq!(bytes(&memory), [0xee; 8]);
    assert_eq!(world.outcomes(), [(1, WcStatus::Flushed)]);
    world.say([write(key, 0, b"still")]);
    assert_eq!((bytes(&memory), world.heard().len()), (vec![0xee; 8], 0));
}

#[test]
fn rfc5041_s8_2_a_tag_of_one_stream_opens_nothing_to_another() {
    let mut world = World::new();
    let memory = xwarp_rnic::Memory::anonymous(4, xwarp_rnic::Pages::Normal).unwrap();
    let attributes = QpAttributes::new(world.pd, world.cq, world.cq);
    let other = world.card.engine.rnic_mut().create_qp(attributes).unwrap();
    let key = world.register(&memory, world.pd, ALL, Some(world.qp));
    let second = world.connect(other, xwarp_tcp::mpa::MpaConfig::default());
    world.say_on(second, [write(key, 0, b"evil")]);
    assert_eq!(bytes(&memory), [0; 4]);
    assert_eq!(world.card.engine.rnic().query_qp(other).unwrap().state, QpState::Terminate);
    world.say([write(key, 0, b"good")]);
    assert_eq!((world.state(), bytes(&memory)), (QpState::Rts, b"good".to_vec()));
}

#[test]
fn rfc5041_s8_3_revocation_is_immediate() {
    let mut world = World::new();
    let (key, memory) = world.region(4, 0, ALL);
    world.say([write(key, 0, b"good")]);
    assert_eq!(bytes(&memory), b"good");
    world.card.engine.rnic().registry().deregister(key).unwrap();
    world.say([write(key, 0, b"evil")]);
    assert_eq!(bytes(&memory), b"good");
    assert_eq!(world.terminate().numbers(), (1, 1, 0));
}
