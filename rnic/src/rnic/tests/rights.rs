//! The remote rights that a queue pair grants to its peer.

use super::*;
use crate::{
    ddp::DdpError,
    rdmap::{RdmapError, StreamError},
};

type Say = fn(&mut End, STag, STag);

/// An operation, the right that it needs, and the error of a peer without it.
type Case = (Say, Access, fn() -> StreamError);

const OPERATIONS: [Case; 3] = [
    (
        |a, key, _| a.post_with(1, write_to(key, 0), Payload::Inline(&[9; 8]), SendFlags::SIGNALED),
        Access::REMOTE_WRITE,
        || DdpError::InvalidStag.into(),
    ),
    (
        |a, key, sink| a.post(1, read_from(key, 0), &[whole(sink, 8)]),
        Access::REMOTE_READ,
        || RdmapError::AccessRights.into(),
    ),
    (
        |a, key, sink| {
            let remote = Remote { key, offset: 0 };
            a.post(1, Operation::FetchAdd { remote, add: 1, mask: 0 }, &[whole(sink, 8)]);
        },
        Access::REMOTE_ATOMIC,
        || RdmapError::AccessRights.into(),
    ),
];

#[test]
fn rfc5040_s7_2_a_right_that_the_queue_pair_denies_ends_the_stream() {
    for (say, right, error) in OPERATIONS {
        let mut pair = Pair::new();
        let (region, memory) = pair.b.region(8, 0, ALL);
        let (sink, _) = pair.a.region(8, 0, ALL);
        pair.b.rnic.allow(pair.b.qp, Access::REMOTE.difference(right)).unwrap();
        let before = bytes(&memory);
        say(&mut pair.a, region, sink);
        pair.run();
        assert_eq!(bytes(&memory), before, "{right:?}");
        let fault = AsyncEvent::QpFatal { qp: pair.b.qp, fault: QpFault::Local(error()) };
        assert_eq!(pair.b.async_events(), [fault], "{right:?}");
    }
}

/// The queue pair's own requests are not its peer's.
#[test]
fn a_queue_pair_that_grants_nothing_else_serves_one_right_and_its_own_requests() {
    for (say, right, _) in OPERATIONS {
        let mut pair = Pair::new();
        let (region, _) = pair.b.region(8, 0, ALL);
        let (sink, _) = pair.a.region(8, 0, ALL);
        pair.a.rnic.allow(pair.a.qp, Access::empty()).unwrap();
        pair.b.rnic.allow(pair.b.qp, right).unwrap();
        say(&mut pair.a, region, sink);
        pair.run();
        assert_eq!(pair.a.outcomes(), [(1, WcStatus::Success)], "{right:?}");
        assert_eq!(pair.b.async_events(), [], "{right:?}");
    }
}
