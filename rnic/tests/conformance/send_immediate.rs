//! Sends with immediate data, an extension of this project: `docs/decisions/0031-send-with-immediate-data.md`.

use xwarp_rnic::{
    Opcode, Operation, Payload, PostError, QpState, STag, SendFlags, WcStatus, WorkRequest,
    rnic::{QpAttributes, SrqAttributes},
};
use xwarp_tcp::mpa::MpaConfig;

use crate::peer::*;

const SUCCESS: WcStatus = WcStatus::Success;
/// RDMAP version 1, the opcode for experiments; the second one with the bit that solicits an event.
const CONTROL: u8 = 0x4f;
const SOLICITED: u8 = 0x5f;
const DATA: u32 = 0x0102_fffe;

fn message(control: u8, msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    untagged_word(control, DATA, 0, msn, mo, last, payload)
}

/// A connection to a peer that does not offer the extension.
fn without() -> World {
    let mut world = World::unconnected(|_, attributes| attributes);
    world.listen();
    world.conn = world.connect(world.qp, MpaConfig { send_immediate: false, ..MpaConfig::default() });
    world.say([write(STag::new(0), 0, b"")]);
    world
}

fn post(world: &mut World, operation: Operation) -> Result<(), PostError> {
    let request = WorkRequest { wr_id: 1, operation, payload: Payload::EMPTY, flags: SendFlags::SIGNALED };
    world.card.engine.rnic_mut().post_send(world.qp, &request)
}

#[test]
fn send_immediate_segments_have_the_data_in_place_of_the_tag() {
    let mut world = World::new();
    let (key, _) = world.region(3000, 7, ALL);
    let operation = Operation::SendImmediate { data: DATA.to_be_bytes() };
    world.post(1, operation, &[whole(key, 3000)]);
    world.post_flags(2, operation, Payload::Inline(b"ab"), SendFlags::SOLICITED | SendFlags::SIGNALED);
    world.post(3, operation, &[]);
    world.post(4, SEND, &[]);
    world.run();
    let heard = world.heard();
    let (short, long) = heard.split_last_chunk::<3>().map(|(long, short)| (short.to_vec(), long)).unwrap();
    assert!(long.len() > 1, "several segments");
    let mut mo = 0;
    for (number, segment) in long.iter().enumerate() {
        let payload = &segment[18..];
        let last = number + 1 == long.len();
        assert_eq!(*segment, message(CONTROL, 1, mo, last, &vec![7; payload.len()]));
        mo += payload.len() as u32;
    }
    assert_eq!(mo, 3000);
    let rest =
        [message(SOLICITED, 2, 0, true, b"ab"), message(CONTROL, 3, 0, true, b""), send(4, 0, true, b"")];
    assert_eq!(short, rest);
    let sent: Vec<_> =
        world.completions().iter().map(|c| (c.wr_id, c.status, c.opcode, c.byte_len)).collect();
    assert_eq!(sent, [(1, 3000), (2, 2), (3, 0), (4, 0)].map(|(id, len)| (id, SUCCESS, Opcode::Send, len)));
}

#[test]
fn send_immediate_completes_one_receive_with_length_and_data() {
    let mut world = World::new();
    let (key, memory) = world.region(8, 0, ALL);
    for wr_id in 1..5 {
        world.receive(wr_id, &[whole(key, 8)]);
    }
    world.say([
        message(CONTROL, 1, 0, false, b"abc"),
        message(CONTROL, 1, 3, true, b"defgh"),
        message(SOLICITED, 2, 0, true, b"xyz"),
        message(CONTROL, 3, 0, true, b""),
        send(4, 0, true, b"s"),
    ]);
    let got: Vec<_> = world.completions();
    assert!(got.iter().all(|c| (c.status, c.opcode, c.invalidated) == (SUCCESS, Opcode::Recv, None)));
    let got: Vec<_> = got.iter().map(|c| (c.wr_id, c.byte_len, c.solicited, c.immediate)).collect();
    let data = Some([1, 2, 255, 254, 0, 0, 0, 0]);
    assert_eq!(got, [(1, 8, false, data), (2, 3, true, data), (3, 0, false, data), (4, 1, false, None)]);
    assert_eq!(bytes(&memory), *b"syzdefgh");
    assert_eq!(world.heard(), [[0; 0]; 0]);
}

#[test]
fn send_immediate_takes_receives_of_a_shared_queue() {
    let mut world = World::with(|engine, attributes| {
        let srq = SrqAttributes { pd: attributes.pd, max_wr: 2, max_sge: 1, limit: 0 };
        let srq = engine.rnic().registry().create_srq(&srq).unwrap();
        QpAttributes { srq: Some(srq.id()), ..attributes }
    });
    let (key, memory) = world.region(4, 0, ALL);
    let srq = world.card.engine.rnic().query_qp(world.qp).unwrap().attributes.srq.unwrap();
    let queue = world.card.engine.rnic().registry().srq(srq).unwrap();
    queue.post(&xwarp_rnic::RecvRequest { wr_id: 9, scatter: &[whole(key, 4)] }).unwrap();
    world.say([message(CONTROL, 1, 0, true, b"four")]);
    let got: Vec<_> = world.completions().iter().map(|c| (c.wr_id, c.byte_len, c.immediate)).collect();
    assert_eq!(got, [(9, 4, Some([1, 2, 255, 254, 0, 0, 0, 0]))]);
    assert_eq!(bytes(&memory), *b"four");
}

#[test]
fn send_immediate_is_refused_at_the_post_when_the_peer_has_not_agreed() {
    let operation = Operation::SendImmediate { data: [1; 4] };
    let mut world = without();
    assert_eq!(post(&mut world, operation), Err(PostError::NoSendImmediate));
    let request =
        |operation| WorkRequest { wr_id: 2, operation, payload: Payload::EMPTY, flags: SendFlags::SIGNALED };
    let (qp, both) = (world.qp, [request(SEND), request(operation)]);
    let posted = world.card.engine.rnic_mut().post_all(qp, both.into_iter());
    assert_eq!(posted, Err((1, PostError::NoSendImmediate)));
    // RFC 7306's own messages are not of the extension.
    assert_eq!(post(&mut world, Operation::Immediate { data: [1; 8] }), Ok(()));
    world.run();
    assert_eq!(world.heard(), [untagged(0x48, 0, 1, 0, true, &[1; 8])]);
}

/// The Terminate that answers `ulpdu`: the error of a reserved opcode, or another one of DDP.
#[track_caller]
fn refused(mut world: World, ulpdu: Vec<u8>, numbers: (u8, u8, u8)) {
    let (key, memory) = world.region(8, 0, ALL);
    world.receive(1, &[whole(key, 8)]);
    let quoted = ulpdu[..if ulpdu[0] & 0x80 == 0 { 18 } else { 14 }].to_vec();
    let length = ulpdu.len() as u16;
    world.say([ulpdu]);
    let terminate = world.terminate();
    assert_eq!(terminate.numbers(), numbers);
    assert_eq!((terminate.length, terminate.ddp), (Some(length), Some(quoted)));
    assert_eq!(bytes(&memory), [0; 8], "nothing was placed");
    assert_eq!(world.state(), QpState::Terminate);
}

#[test]
fn send_immediate_that_was_not_negotiated_ends_the_stream_as_a_reserved_opcode_does() {
    for control in [CONTROL, SOLICITED] {
        refused(without(), message(control, 1, 0, true, b"hostile"), (0, 2, 6));
        refused(without(), message(control, 1, 0, true, b""), (0, 2, 6));
    }
}

#[test]
fn send_immediate_that_is_malformed_ends_the_stream() {
    // In a tagged segment, and on the queues of other messages.
    refused(World::new(), tagged(CONTROL, STag::new(1), 0, true, b"x"), (0, 2, 6));
    for queue in 1..4 {
        refused(World::new(), untagged_word(CONTROL, DATA, queue, 1, 0, true, b"x"), (0, 2, 6));
    }
    refused(World::new(), untagged_word(CONTROL, DATA, 4, 1, 0, true, b"x"), (1, 2, 1));
    // A wrong number, a gap before the first byte, and more bytes than the receive has.
    refused(World::new(), message(CONTROL, 2, 0, true, b"x"), (1, 2, 3));
    refused(World::new(), message(CONTROL, 1, 9, true, b"x"), (1, 2, 4));
    refused(World::new(), message(CONTROL, 1, 0, true, b"ninebytes"), (1, 2, 5));
}
