//! RFC 5040: the RDMA protocol.

use std::time::Duration;

use xwarp_rnic::{
    Access, AsyncEvent, Memory, Operation, Pages, Payload, QpFault, QpState, STag, SendFlags, WcStatus,
    rdmap::TerminateHeader, rnic::CmEvent,
};

use crate::peer::*;

const SUCCESS: WcStatus = WcStatus::Success;

fn read_of(key: u32, offset: u64) -> Operation {
    Operation::Read { remote: remote(key, offset), invalidate: false }
}

#[test]
fn rfc5040_s4_1_control_field_queue_and_invalidate_stag_of_every_message() {
    let mut world = World::new();
    let (key, _) = world.region(64, 1, ALL);
    let invalidate = Some(STag::new(0x0a0b_0c0d));
    let piece = [whole(key, 8)];
    world.post(1, Operation::Write { remote: remote(9, 0) }, &piece);
    world.post(2, SEND, &piece);
    world.post(3, Operation::Send { invalidate }, &piece);
    let flags = SendFlags::SOLICITED;
    world.post_flags(4, SEND, Payload::Gather(&piece), flags);
    world.post_flags(5, Operation::Send { invalidate }, Payload::Gather(&piece), flags);
    world.post(6, read_of(9, 0), &piece);
    world.say([read_request(1, key, 0, 8)]);
    let heads: Vec<_> = world
        .heard()
        .iter()
        .map(|u| match u[0] {
            0xc1 => (u[1], 0, 0),
            0x41 => (u[1], u32::from_be_bytes([u[2], u[3], u[4], u[5]]), u[9]),
            flags => panic!("flags {flags:#x}"),
        })
        .collect();
    // RV is 01b, and the two reserved bits are zero.
    for head in [
        (0x40, 0, 0),
        (0x43, 0, 0),
        (0x44, 0x0a0b_0c0d, 0),
        (0x45, 0, 0),
        (0x46, 0x0a0b_0c0d, 0),
        (0x41, 0, 1),
        (0x42, 0, 0),
    ] {
        assert!(heads.contains(&head), "{head:x?} in {heads:x?}");
    }
    assert_eq!(heads.len(), 7);
}

#[test]
fn rfc5040_s4_1_reserved_bits_and_an_unused_invalidate_stag_are_ignored() {
    let mut world = World::new();
    let (key, _) = world.region(8, 1, ALL);
    world.receive(1, &[]);
    world.say([untagged_word(0x73, key.value(), 0, 1, 0, true, b""), read_request(1, key, 0, 8)]);
    assert_eq!((world.state(), world.completions()[0].invalidated), (QpState::Rts, None));
    assert_eq!(world.heard().len(), 1, "the region can still be read");
}

#[test]
fn rfc5040_s4_4_read_request_header() {
    let mut world = World::new();
    let (key, _) = world.region(64, 1, ALL);
    let piece = xwarp_rnic::Sge { key, offset: 5, len: 33 };
    world.post(1, read_of(0x0102_0304, 0x0506_0708_090a_0b0c), &[piece]);
    world.run();
    let heard = world.heard();
    assert_eq!(heard[0][18..22], key.value().to_be_bytes(), "Data Sink STag");
    assert_eq!(heard[0][22..30], 5u64.to_be_bytes(), "Data Sink Tagged Offset");
    assert_eq!(heard[0][30..34], 33u32.to_be_bytes(), "RDMA Read Message Size");
    assert_eq!(heard[0][34..], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], "Data Source STag and Tagged Offset");
}

#[test]
fn rfc5040_s4_4_the_sink_is_copied_without_a_look() {
    let mut world = World::new();
    let (key, _) = world.region(3000, 9, Access::REMOTE_READ);
    world.say([read_request(1, key, 0, 3000)]);
    let heard = world.heard();
    let mut offset = 0x1000u64;
    for response in &heard {
        assert_eq!(response[1..6], [0x42, 0, 0, 0, 0x77]);
        assert_eq!(response[6..14], offset.to_be_bytes());
        assert!(response[14..].iter().all(|b| *b == 9));
        offset += response.len() as u64 - 14;
    }
    assert_eq!(offset, 0x1000 + 3000);
}

#[test]
fn rfc5040_s4_8_a_read_that_breaks_off_is_quoted_where_it_stands() {
    let mut world = World::new();
    let (key, _) = world.region(20_000_000, 9, Access::REMOTE_READ);
    // The region is deregistered during the response: only the first part can be sent.
    world.say_and_interrupt(read_request(1, key, 0, 20_000_000));
    world.card.engine.rnic().registry().deregister(key).unwrap();
    world.run();
    let heard = world.heard();
    let sent: usize = heard.iter().filter(|u| u[1] == 0x42).map(|u| u.len() - 14).sum();
    assert!(sent > 0 && sent < 20_000_000);
    let terminate = Terminate::read(&heard.last().unwrap()[18..]);
    assert_eq!(terminate.numbers(), (0, 1, 0), "Remote Protection Error: invalid STag");
    assert_eq!(terminate.ddp.unwrap(), read_request(1, key, 0, 0)[..18]);
    let rest = (20_000_000 - sent) as u32;
    let quoted = terminate.rdma.unwrap();
    assert_eq!(quoted[4..12], (0x1000 + sent as u64).to_be_bytes());
    assert_eq!(quoted[12..16], rest.to_be_bytes());
    assert_eq!(quoted[20..28], (sent as u64).to_be_bytes());
}

#[test]
fn rfc5040_s5_1_a_write_is_placed_without_a_notification() {
    let mut world = World::new();
    let (key, memory) = world.region(4, 0, Access::REMOTE_WRITE);
    world.receive(1, &[]);
    world.say([write(key, 0, b"data")]);
    assert_eq!((bytes(&memory), world.outcomes()), (b"data".to_vec(), vec![]));
}

#[test]
fn rfc5040_s5_2_1_requests_are_answered_in_order_and_need_no_receive() {
    let mut world = World::new();
    let (key, _) = world.region(64, 9, Access::REMOTE_READ);
    world.say([read_request(1, key, 0, 10), read_request(2, key, 0, 0), read_request(3, key, 0, 30)]);
    let heard = world.heard();
    let lengths: Vec<_> = heard.iter().map(|u| (u[0], u[1], u.len() - 14)).collect();
    assert_eq!(lengths, [(0xc1, 0x42, 10), (0xc1, 0x42, 0), (0xc1, 0x42, 30)]);
    assert_eq!(world.outcomes(), [], "the ULP does not hear of them");
}

#[test]
fn rfc5040_s5_2_1_a_read_of_nothing_validates_nothing() {
    let mut world = World::new();
    world.say([read_request(1, STag::new(0xdead_beef), u64::MAX, 0)]);
    let heard = world.heard();
    assert_eq!((world.state(), heard.len(), heard[0].len()), (QpState::Rts, 1, 14));
    assert_eq!(heard[0][..6], [0xc1, 0x42, 0, 0, 0, 0x77]);
}

#[test]
fn rfc5040_s5_2_2_more_requests_than_ird_end_the_stream() {
    let mut world = World::new();
    let (key, _) = world.region(20_000_000, 9, Access::REMOTE_READ);
    world.say((1..=u32::from(DEPTH) + 1).map(|msn| read_request(msn, key, 0, 20_000_000)));
    assert_eq!(world.terminate().numbers(), (1, 2, 2), "invalid MSN: no buffer available");
}

#[test]
fn rfc5040_s5_3_every_send_takes_one_receive_in_order_and_says_what_it_is() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0, ALL);
    for wr_id in 1..=4 {
        world.receive(wr_id, &[whole(key, 8)]);
    }
    let shut = world.region(8, 0, ALL).0;
    let open = |stag: STag, control, msn| untagged_word(control, stag.value(), 0, msn, 0, true, b"12345678");
    world.say([send(1, 0, true, b""), untagged(0x45, 0, 2, 0, true, b"abc"), send(3, 0, true, b"x")]);
    let done: Vec<_> = world.completions().iter().map(|c| (c.wr_id, c.byte_len, c.solicited)).collect();
    assert_eq!(done, [(1, 0, false), (2, 3, true), (3, 1, false)]);
    assert_eq!(bytes(&memory)[..3], *b"xbc");
    world.say([open(shut, 0x46, 4)]);
    let done = world.completions();
    assert_eq!((done[0].wr_id, done[0].invalidated, done[0].solicited), (4, Some(shut), true));
    world.say([write(shut, 0, b"x")]);
    assert_eq!(world.terminate().numbers(), (1, 1, 0), "the tag is invalid from then on");
}

/// Section 5.3 and 7.2, rules 4 and 5: the tag to invalidate must be one that the peer may name.
#[test]
fn rfc5040_s7_2_invalidate_stag_errors() {
    for foreign in [false, true] {
        let mut world = World::new();
        world.receive(1, &[]);
        let stag = if foreign {
            let pd = world.card.engine.rnic().registry().alloc_pd().unwrap();
            world.register(&Memory::anonymous(8, Pages::Normal).unwrap(), pd, ALL, None)
        } else {
            STag::new(0x1234_5678)
        };
        let segment = untagged_word(0x44, stag.value(), 0, 1, 0, true, b"");
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!((terminate.layer, terminate.error_type), (0, 1), "Remote Protection Error");
        assert_eq!(terminate.code, if foreign { 9 } else { 0 }, "invalid, or cannot be invalidated");
        assert_eq!((terminate.ddp.as_deref(), terminate.rdma), (Some(&segment[..]), None));
        assert_eq!(world.outcomes(), [(1, WcStatus::Flushed)], "not delivered");
    }
}

#[test]
fn rfc5040_s5_4_a_terminate_ends_both_directions_and_is_reported_to_the_ulp() {
    let mut world = World::new();
    let (key, _) = world.region(8, 0, ALL);
    world.receive(1, &[]);
    world.post(2, read_of(9, 0), &[whole(key, 8)]);
    world.run();
    assert_eq!(world.heard().len(), 1);
    // Remote Protection Error, access rights violation, without headers.
    world.say([untagged(0x47, 2, 1, 0, true, &[0x01, 0x02, 0, 0])]);
    let fault = world.asyncs().into_iter().find_map(|e| match e {
        AsyncEvent::QpFatal { fault, .. } => Some(fault),
        _ => None,
    });
    let told = TerminateHeader {
        layer: 0,
        error_type: 1,
        code: 2,
        segment_length: None,
        ddp_header: None,
        rdma_header: None,
    };
    assert_eq!(fault, Some(QpFault::Remote(told)));
    let mut outcomes = world.outcomes();
    outcomes.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(outcomes, [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]);
    assert_eq!((world.state(), world.heard().len()), (QpState::Error, 0), "and nothing is answered");
    let conn = world.conn;
    let events = &world.talk(conn).events;
    assert!(
        events.iter().any(|e| matches!(e, xwarp_tcp::ulp::Event::PeerClosed)),
        "closed in order: {events:?}"
    );
}

#[test]
fn rfc5040_s5_4_nothing_follows_a_terminate() {
    let mut world = World::new();
    let (key, _) = world.region(20_000_000, 1, ALL);
    world.post(1, SEND, &[whole(key, 20_000_000)]);
    world.say([read_request(1, key, 0, 8), write(STag::new(1), 0, b"x"), read_request(2, key, 0, 8)]);
    assert_eq!(world.terminate().numbers(), (1, 1, 0));
    world.post(2, SEND, &[]);
    world.run();
    assert_eq!(world.heard().len(), 0);
    assert_eq!(world.outcomes(), [(1, WcStatus::Flushed), (2, WcStatus::Flushed)]);
}

#[test]
fn rfc5040_s5_4_a_failed_queue_pair_is_closed_although_its_peer_continues_to_send() {
    let mut world = World::new();
    world.say([write(STag::new(1), 0, b"x")]);
    assert_eq!(world.terminate().numbers(), (1, 1, 0));
    // The peer never closes, and sends data every few seconds.
    for _ in 0..12 {
        world.run_for(Duration::from_secs(5));
        world.say([write(STag::new(1), 0, b"x")]);
    }
    let closed = |event: &CmEvent| matches!(event, CmEvent::Closed { .. });
    assert!(world.card.events.iter().any(closed), "{:?}", world.card.events);
    assert_eq!(world.card.engine.stack().connections(), 0);
    let qp = world.qp;
    world.card.engine.rnic_mut().reset_qp(qp).unwrap();
}

#[test]
fn rfc5040_s5_5_r13_messages_go_out_in_the_order_they_were_posted() {
    let mut world = World::new();
    let (key, _) = world.region(5000, 1, ALL);
    world.post(1, SEND, &[whole(key, 5000)]);
    world.post(2, Operation::Write { remote: remote(9, 0) }, &[whole(key, 5000)]);
    world.post(3, read_of(9, 0), &[whole(key, 8)]);
    world.post(4, SEND, &[]);
    world.run();
    let mut opcodes: Vec<_> = world.heard().iter().map(|u| u[1] & 0xf).collect();
    opcodes.dedup();
    assert_eq!(opcodes, [3, 0, 1, 3]);
}

#[test]
fn rfc5040_s5_5_r19_a_read_completes_with_the_last_byte_of_its_response() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0, ALL);
    world.post(1, read_of(9, 0), &[whole(key, 8)]);
    world.say([tagged(0x42, key, 0, false, b"1234")]);
    assert_eq!(world.outcomes(), []);
    world.say([tagged(0x42, key, 4, true, b"5678")]);
    assert_eq!((world.outcomes(), bytes(&memory)), (vec![(1, SUCCESS)], b"12345678".to_vec()));
}

#[test]
fn rfc5040_s5_2_2_an_unsolicited_response_changes_nothing() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0, ALL);
    world.say([tagged(0x42, key, 0, true, b"12345678")]);
    assert_eq!(world.terminate().numbers(), (0, 2, 6), "unexpected opcode");
    assert_eq!(bytes(&memory), [0; 8]);
}

#[test]
fn rfc5040_s6_1_outbound_reads_never_exceed_ord() {
    let mut world = World::new();
    let (key, _) = world.region(8, 0, ALL);
    for wr_id in 0..10 {
        world.post(wr_id, read_of(9, 0), &[whole(key, 8)]);
    }
    world.run();
    assert_eq!(world.heard().len(), usize::from(DEPTH));
    world.say([tagged(0x42, key, 0, true, b"12345678")]);
    assert_eq!((world.heard().len(), world.outcomes().len()), (1, 1));
}

#[test]
fn rfc5040_s7_1_an_error_of_our_own_sends_the_codes_alone() {
    let mut world = World::new();
    world.post(1, SEND, &[whole(STag::new(3), 8)]);
    world.run();
    let terminate = world.terminate();
    assert_eq!((terminate.layer, terminate.error_type), (0, 0), "Local Catastrophic Error");
    assert_eq!((terminate.length, terminate.ddp, terminate.rdma), (None, None, None));
    assert_eq!(world.outcomes(), [(1, WcStatus::LocalProtection)]);
    assert!(world.asyncs().iter().any(|e| matches!(e, AsyncEvent::QpFatal { .. })), "the ULP is told");
}

#[test]
fn rfc5040_s7_1_the_first_error_is_the_one_in_the_terminate() {
    let mut world = World::new();
    let first = untagged(0x43, 9, 1, 0, true, b"");
    world.say([first.clone(), write(STag::new(1), 0, b"x"), untagged(0x4e, 0, 1, 0, true, b"")]);
    let terminate = world.terminate();
    assert_eq!((terminate.numbers(), terminate.ddp), ((1, 2, 1), Some(first)));
}

/// Opcode and version, rules 2 and 3.
#[test]
fn rfc5040_s7_2_opcode_and_version_errors() {
    let cases = [
        (untagged(0x4c, 0, 1, 0, true, b""), (0, 2, 6)),
        (untagged(0x4e, 0, 1, 0, true, b""), (0, 2, 6)),
        // Known opcodes where they are not allowed: an untagged Write, a tagged Send, a Send on queue 1.
        (untagged(0x40, 0, 1, 0, true, b""), (0, 2, 6)),
        (tagged(0x43, STag::new(0), 0, true, b""), (0, 2, 6)),
        (untagged(0x43, 1, 1, 0, true, b""), (0, 2, 6)),
        (untagged(0x83, 0, 1, 0, true, b""), (0, 2, 5)),
        (untagged(0xc1, 1, 1, 0, true, &[0; 28]), (0, 2, 5)),
        (tagged(0x80, STag::new(0), 0, true, b""), (0, 2, 5)),
    ];
    for (segment, numbers) in cases {
        let mut world = World::new();
        world.receive(1, &[]);
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), numbers, "{segment:x?}");
        let header = if segment[0] & 0x80 == 0 { 18 } else { 14 };
        assert_eq!(terminate.length, Some(segment.len() as u16));
        assert_eq!((terminate.ddp.as_deref(), terminate.rdma), (Some(&segment[..header]), None));
    }
}

/// The checks of a Read Request, with both headers quoted (figure 10).
#[test]
fn rfc5040_s7_2_read_request_errors() {
    type Make = fn(&mut World, STag) -> Vec<u8>;
    let cases: [(Make, u8); 7] = [
        (|_, key| read_request(1, STag::new(key.value() ^ 1), 0, 8), 0),
        (|_, key| read_request(1, key, 33, 1), 1),
        (|_, key| read_request(1, key, 30, 3), 1),
        (|_, key| read_request(1, key, u64::MAX, 2), 4),
        (
            |world, _| {
                read_request(1, world.region(8, 0, Access::LOCAL_WRITE | Access::REMOTE_WRITE).0, 0, 8)
            },
            2,
        ),
        (
            |world, _| {
                let pd = world.card.engine.rnic().registry().alloc_pd().unwrap();
                let memory = Memory::anonymous(8, Pages::Normal).unwrap();
                read_request(1, world.register(&memory, pd, ALL, None), 0, 8)
            },
            3,
        ),
        (|_, key| read_request(1, key, 0, u32::MAX), 1),
    ];
    for (make, code) in cases {
        let mut world = World::new();
        let (key, _) = world.region(32, 0, ALL);
        let segment = make(&mut world, key);
        world.say([segment.clone()]);
        let terminate = world.terminate();
        assert_eq!(terminate.numbers(), (0, 1, code), "{segment:x?}");
        assert_eq!(terminate.length, Some(46));
        assert_eq!(terminate.ddp.as_deref(), Some(&segment[..18]));
        assert_eq!(terminate.rdma.as_deref(), Some(&segment[18..]));
    }
}

#[test]
fn rfc5040_s7_2_requests_that_are_not_one_whole_segment() {
    let request = read_header(STag::new(1), 0, 8);
    for (segment, numbers) in [
        (untagged(0x41, 1, 1, 4, true, &request), (1, 2, 4)),
        (untagged(0x41, 1, 1, 0, false, &request), (1, 2, 5)),
        (untagged(0x41, 1, 1, 0, true, &[&request[..], &[0]].concat()), (1, 2, 5)),
        (untagged(0x41, 1, 2, 0, true, &request), (1, 2, 3)),
    ] {
        let mut world = World::new();
        world.say([segment.clone()]);
        assert_eq!(world.terminate().numbers(), numbers, "{segment:x?}");
    }
}

#[test]
fn rfc5040_s6_2_1_an_mpa_error_comes_with_the_layers_numbers_and_no_header() {
    let mut world = World::new();
    world.receive(1, &[]);
    world.corrupt_with_good_checksums();
    world.say([write(STag::new(1), 0, &[0; 1300])]);
    let terminate = world.terminate();
    assert_eq!(terminate.numbers(), (2, 0, 2), "LLP, MPA, CRC error");
    assert_eq!((terminate.length, terminate.ddp, terminate.rdma), (None, None, None));
    assert_eq!(world.outcomes(), [(1, WcStatus::Flushed)]);
}
