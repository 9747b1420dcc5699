//! The memory limit for held bytes is shared by all connections, and old gaps are evicted.

use std::time::Duration;

use xwarp_tcp::{
    link::{Link, RxFrame},
    mpa::{MpaConfig, MpaRequest},
    sim::{Node, RawPeer, RawSegment, SimLink, WireConfig, fpdu, path, run},
    tcp::TcpConfig,
    time::Instant,
    wire::{self, Inbound, Segment},
};

use crate::support::{Lab, PORT};

/// A raw peer of the server, with a connection in full operation.
struct Stranger {
    peer: RawPeer,
}

impl Stranger {
    fn new(lab: &mut Lab, port: u16) -> Self {
        let peer = RawPeer::new(path(([10, 1, 2, 1], port), ([10, 1, 1, 1], PORT)), 7, true);
        let mut this = Self { peer };
        let syn = this.peer.syn();
        lab.stranger.inject(&syn);
        this.receive(lab);
        let request = MpaRequest { revision: 1, crc: true, ..MpaRequest::default() };
        let request = this.peer.data(&request.emit());
        lab.stranger.inject(&request);
        this.receive(lab);
        assert!(this.peer.received > 0, "the MPA Reply has arrived");
        this
    }

    fn receive(&mut self, lab: &mut Lab) {
        let segments = pass(lab, Duration::from_millis(10));
        let flow = self.peer.path().flow;
        for segment in segments.iter().filter(|s| s.flow == flow) {
            self.peer.receive(segment);
        }
    }

    /// Sends `bytes` bytes of an FPDU that never ends, beginning `gap` bytes after the last byte sent.
    fn send(&mut self, lab: &mut Lab, gap: i32, bytes: usize) {
        for at in (0..bytes).step_by(1400) {
            let payload = &[0xee; 1400];
            let segment = RawSegment { seq: gap + at as i32, payload, ..RawSegment::ack() };
            lab.stranger.inject(&self.peer.segment(&segment));
        }
        self.receive(lab);
    }
}

/// The segments that arrive at the strangers' link.
struct Inbox<'a> {
    link: &'a mut SimLink,
    segments: Vec<Segment>,
}

impl Node for Inbox<'_> {
    fn turn(&mut self, _: Instant) -> bool {
        let mut batch = Vec::<RxFrame>::new();
        let received = self.link.receive(&mut batch, 1000);
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = wire::parse(self.link, &frame) {
                self.segments.push(segment);
            }
            self.link.recycle(frame);
        }
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

/// Advances virtual time by `time`; returns the segments that arrived at the strangers' link.
fn pass(lab: &mut Lab, time: Duration) -> Vec<Segment> {
    let mut inbox = Inbox { link: &mut lab.stranger, segments: Vec::new() };
    run(&lab.wire, &mut [&mut lab.client, &mut lab.server, &mut inbox], lab.now, time, |_, _| false);
    lab.now += time;
    inbox.segments
}

fn lab(receive_window: u32) -> Lab {
    let tcp = TcpConfig { receive_window, receive_window_max: receive_window, ..TcpConfig::default() };
    let wire = WireConfig { tx_chunks: 512, rx_chunks: 2048, ..WireConfig::default() };
    let mut lab = Lab::over(&wire, tcp, MpaConfig::default(), 64, |stack| stack.most_held_bytes = 100_000);
    lab.hear_stranger();
    lab
}

#[test]
fn the_connection_with_the_oldest_gap_is_evicted_when_memory_for_held_bytes_is_short() {
    let mut lab = lab(1 << 18);
    let mut peers: Vec<Stranger> = (1..=4).map(|port| Stranger::new(&mut lab, port)).collect();
    peers[0].send(&mut lab, 1000, 56_000);
    peers[1].send(&mut lab, 1000, 56_000);
    let counters = lab.server.stack.counters();
    assert!(lab.server.stack.held_bytes() <= 100_000 && counters.refused_payloads > 0);
    assert_eq!(counters.holders_evicted, 0, "the gaps are young");
    pass(&mut lab, Duration::from_secs(1));
    peers[2].send(&mut lab, 1000, 42_000);
    assert_eq!(lab.server.stack.counters().holders_evicted, 1, "evicting the first connection is enough");
    assert!(lab.server.stack.held_bytes() <= 100_000);
    // The first peer can retransmit the dropped bytes.
    pass(&mut lab, Duration::from_secs(1));
    peers[0].send(&mut lab, 1000, 56_000);
    assert_eq!(lab.server.stack.counters().holders_evicted, 2);
    lab.assert_no_errors();
}

/// Unfinished FPDUs in order were acknowledged and cannot be dropped. When they fill the memory, their connections
/// are terminated, oldest first.
#[test]
fn unfinished_fpdus_do_not_exhaust_the_memory_for_held_bytes() {
    let mut lab = lab(1 << 18);
    for port in 1..=20 {
        let mut peer = Stranger::new(&mut lab, port);
        // The length field has the value 61166.
        peer.send(&mut lab, 0, 14_000);
        pass(&mut lab, Duration::from_secs(1));
        assert!(lab.server.stack.held_bytes() <= 100_000 + 14_000);
    }
    assert!(
        lab.server.upper.errors.iter().all(|e| e == "StreamError(Mpa(Stalled))"),
        "{:?}",
        lab.server.upper.errors
    );
    assert!(lab.server.stack.counters().holders_evicted >= 12);
}

/// RFC 5044 allows FPDUs of 64 KiB, which a smaller receive window must not block.
#[test]
fn an_fpdu_longer_than_the_receive_window_is_delivered() {
    let mut lab = lab(8 << 10);
    let mut peer = Stranger::new(&mut lab, 1);
    let bytes = fpdu(0, false, &vec![0xa5; 60_000]);
    for payload in bytes.chunks(1400) {
        let frame = peer.peer.data(payload);
        lab.stranger.inject(&frame);
        peer.receive(&mut lab);
    }
    assert_eq!(lab.server.upper.delivered, 60_000);
    lab.assert_no_errors();
}
