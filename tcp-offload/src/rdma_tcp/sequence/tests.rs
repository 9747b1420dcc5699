//! The rules of section 4, segment by segment.

use super::*;
use crate::rdma_tcp::BufferPlace;

fn header(number: u32, first: bool, last: bool, kind: SegmentKind) -> SegmentHeader {
    let (number, order) = (MessageNumber(number), Order::STRICT);
    SegmentHeader { first, last, solicited: false, number, order, kind }
}

fn send(offset: u32) -> SegmentKind {
    SegmentKind::Send { offset, control: SendControl::None }
}

fn write(offset: u64, total: u32) -> SegmentKind {
    SegmentKind::Write { to: BufferPlace { id: 9, offset }, total }
}

const RESPONSE: SegmentKind = SegmentKind::ReadResponse { offset: 0 };

#[test]
fn rdma_tcp_s4_segments_of_the_two_groups_interleave_and_those_of_one_do_not() {
    let mut sequence = Sequence::new(MessageNumber(u32::MAX));
    let steps = [
        (header(u32::MAX, true, false, send(0)), 10, Ok(())),
        (header(77, true, false, RESPONSE), 10, Ok(())),
        (header(u32::MAX, false, false, send(10)), 10, Ok(())),
        (header(u32::MAX, true, true, write(0, 4)), 4, Err(SegmentError::Message)),
        (header(0, true, true, write(0, 4)), 4, Err(SegmentError::Number)),
        (header(78, true, true, RESPONSE), 10, Err(SegmentError::Message)),
        (header(78, false, true, RESPONSE), 10, Err(SegmentError::Message)),
        (header(77, false, true, RESPONSE), 10, Ok(())),
        (header(77, false, true, RESPONSE), 10, Err(SegmentError::Message)),
        (header(u32::MAX, false, true, send(19)), 1, Err(SegmentError::Offset)),
        (header(u32::MAX, false, true, send(20)), 1, Ok(())),
        (header(0, false, true, write(0, 4)), 4, Err(SegmentError::Message)),
        (header(0, true, false, write(100, 8)), 4, Ok(())),
        (header(0, false, true, write(104, 9)), 4, Err(SegmentError::Message)),
        (header(0, false, true, write(104, 8)), 3, Err(SegmentError::Length)),
        (header(0, false, false, write(104, 8)), 4, Err(SegmentError::Length)),
        (header(0, false, true, write(104, 8)), 5, Err(SegmentError::Length)),
        (header(0, false, true, write(103, 8)), 4, Err(SegmentError::Offset)),
        (header(0, false, true, write(104, 8)), 4, Ok(())),
    ];
    for (at, (header, payload, expected)) in steps.into_iter().enumerate() {
        assert_eq!(sequence.accept(&header, payload), expected, "step {at}");
    }
    assert_eq!(sequence.due(), MessageNumber(1));
}

#[test]
fn rdma_tcp_a4_all_segments_of_a_message_have_the_same_order_field() {
    let mut sequence = Sequence::new(MessageNumber(1));
    sequence.accept(&header(1, true, false, send(0)), 4).unwrap();
    let other = SegmentHeader { order: Order(3), ..header(1, false, true, send(4)) };
    assert_eq!(sequence.accept(&other, 4), Err(SegmentError::Message));
}

#[test]
fn rdma_tcp_a19_a_terminate_may_interrupt_a_message() {
    let mut sequence = Sequence::new(MessageNumber(1));
    let terminate = |number| {
        let control = SendControl::Terminate { code: 0x1203 };
        header(number, true, true, SegmentKind::Send { offset: 0, control })
    };
    assert_eq!(sequence.check(&terminate(2), 0), Err(SegmentError::Number), "no message is open");
    sequence.accept(&header(1, true, false, send(0)), 4).unwrap();
    assert_eq!(sequence.check(&terminate(1), 0), Err(SegmentError::Message));
    sequence.accept(&terminate(2), 0).unwrap();
    assert_eq!(sequence.due(), MessageNumber(3));
}

#[test]
fn rdma_tcp_a10_messages_without_bytes_are_allowed() {
    let mut sequence = Sequence::new(MessageNumber(1));
    sequence.accept(&header(1, true, true, send(0)), 0).unwrap();
    sequence.accept(&header(2, true, true, write(0, 0)), 0).unwrap();
    let request = SegmentKind::ReadRequest { from: BufferPlace { id: 1, offset: 0 }, total: 0, atomic: None };
    sequence.accept(&header(3, true, true, request), 0).unwrap();
    assert_eq!(sequence.due(), MessageNumber(4));
}

#[test]
fn the_terms_of_a_send_are_those_of_its_first_segment() {
    let mut sequence = Sequence::new(MessageNumber(1));
    let control = SendControl::Invalidate { stag: 5 };
    let first = header(1, true, false, SegmentKind::Send { offset: 0, control });
    sequence.accept(&first, 4).unwrap();
    let terms = Some(SendTerms { control, solicited: false });
    assert_eq!(sequence.check(&header(1, false, true, send(4)), 1), Ok(terms));
}
