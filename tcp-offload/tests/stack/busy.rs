//! A stack that is never idle, because each of its turns receives a frame.

use xwarp_tcp::{
    link::Link,
    mpa::MpaConfig,
    sim::{RawPeer, RawSegment, SimLink, Wire, WireConfig, path},
    stack::{Stack, StackConfig},
    time::Instant,
    ulp::ConnId,
    wire::{self, Flags, Inbound},
};

use crate::support::{PORT, Upper};

struct Busy {
    stack: Stack<Upper>,
    upper: Upper,
    near: SimLink,
    far: SimLink,
}

impl Busy {
    /// The stack receives a frame of `peer` and transmits; the peer receives the answer.
    fn exchange(&mut self, peer: &mut RawPeer, frame: &[u8]) {
        let mut batch = Vec::new();
        self.far.inject(frame);
        assert_eq!(self.near.receive(&mut batch, 64), 1);
        for frame in batch.drain(..) {
            self.stack.receive(Instant::ZERO, &mut self.near, frame, &mut self.upper);
        }
        self.stack.transmit(Instant::ZERO, &mut self.near, &mut self.upper);
        self.far.receive(&mut batch, 64);
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = wire::parse(&self.far, &frame) {
                peer.receive(&segment);
            }
            self.far.recycle(frame);
        }
    }
}

/// A peer repeatedly opens a connection, sends data whose ACK is delayed, and resets the connection.
#[test]
fn removed_connections_leave_no_entry_in_the_lists_of_work() {
    let (_, near, far) = Wire::new(WireConfig::default());
    let (stack, upper) = (Stack::new(StackConfig::default()), Upper::default());
    let mut busy = Busy { stack, upper, near, far };
    busy.stack.listen(&mut busy.near, None, PORT, 8, 1500, MpaConfig::default()).unwrap();
    let mut owed = 0;
    for port in 1000..1200 {
        let mut peer = RawPeer::new(path(([10, 9, 0, 1], port), ([10, 1, 1, 1], PORT)), 7, false);
        let syn = peer.syn();
        busy.exchange(&mut peer, &syn);
        let ack = peer.data(&[]);
        busy.exchange(&mut peer, &ack);
        // The beginning of an MPA Request, whose ACK may wait.
        let data = peer.data(b"MPA ID");
        busy.exchange(&mut peer, &data);
        owed += busy.stack.table_sizes().owing;
        let flags = Flags { rst: true, ack: true, ..Flags::default() };
        let reset = peer.segment(&RawSegment { flags, ..RawSegment::default() });
        busy.exchange(&mut peer, &reset);
    }
    let sizes = busy.stack.table_sizes();
    assert_eq!(owed, 200, "each connection owed an ACK once");
    assert_eq!((sizes.connections, sizes.ready, sizes.owing), (0, 0, 0), "{sizes:?}");
}

/// The next segment of a connection is recognised by its headers, without looking the flow up, but not once the connection was
/// removed: then it is answered by a RST as any other without a connection.
#[test]
fn a_removed_connection_is_not_recognised_by_its_headers() {
    let (_, near, far) = Wire::new(WireConfig::default());
    let (stack, upper) = (Stack::new(StackConfig::default()), Upper::default());
    let mut busy = Busy { stack, upper, near, far };
    busy.stack.listen(&mut busy.near, None, PORT, 8, 1500, MpaConfig::default()).unwrap();
    let mut peer = RawPeer::new(path(([10, 9, 0, 1], 1000), ([10, 1, 1, 1], PORT)), 7, true);
    let syn = peer.syn();
    busy.exchange(&mut peer, &syn);
    for part in [b"".as_slice(), b"MPA", b" ID", b" Req"] {
        let frame = peer.data(part);
        busy.exchange(&mut peer, &frame);
    }
    assert_eq!(busy.stack.tcp_counters().bytes_in, 10);
    busy.stack.abort(ConnId { index: 0, generation: 0 });
    busy.stack.transmit(Instant::ZERO, &mut busy.near, &mut busy.upper);
    assert_eq!(busy.stack.table_sizes().connections, 0);
    assert!(!peer.reset, "its RST is not received yet");
    let mut batch = Vec::new();
    busy.far.receive(&mut batch, 64);
    for reset in batch {
        busy.far.recycle(reset);
    }
    let late = peer.data(b" Frame");
    busy.exchange(&mut peer, &late);
    assert!(peer.reset);
    assert_eq!(busy.stack.counters().no_connection, 1);
}
