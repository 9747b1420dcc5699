//! Checksums left to hardware are accepted only from peers that habitually send them.

use std::time::Duration;

use xwarp_tcp::{
    mpa::{MpaConfig, MpaRequest},
    sim::{Checksums, RawPeer, WireConfig, path},
    tcp::TcpConfig,
    wire::{Mac, Path},
};

use crate::{
    raw::RawPeer as Stranger,
    support::{Lab, PORT},
};

/// Offsets in a frame of IPv4 without tags.
const ADDRESSES: std::ops::Range<usize> = 26..34;
const TCP: usize = 34;
const CHECKSUM: std::ops::Range<usize> = TCP + 16..TCP + 18;

/// Replaces the TCP checksum by the sum of the pseudo-header, as checksum offload leaves it (RFC 9293 section 3.1).
fn leave_to_hardware(mut frame: Vec<u8>) -> Vec<u8> {
    let words = frame[ADDRESSES].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let mut sum = words.sum::<u32>() + 6 + (frame.len() - TCP) as u32;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    frame[CHECKSUM].copy_from_slice(&(sum as u16).to_be_bytes());
    frame
}

struct Peer<'a> {
    lab: &'a mut Lab,
    raw: RawPeer,
    offloads: bool,
}

impl<'a> Peer<'a> {
    /// Opens a connection to the server, without the MPA Request.
    fn open(lab: &'a mut Lab, offloads: bool) -> Self {
        Stranger::listen_in(lab);
        let mut peer = Self {
            lab,
            raw: RawPeer::new(path(([10, 9, 0, 1], 5000), ([10, 1, 1, 1], PORT)), 7, false),
            offloads,
        };
        let syn = peer.raw.syn();
        peer.inject(syn);
        peer.receive();
        let ack = peer.raw.data(&[]);
        peer.inject(ack);
        peer
    }

    fn inject(&mut self, frame: Vec<u8>) {
        let frame = if self.offloads { leave_to_hardware(frame) } else { frame };
        self.lab.stranger.inject(&frame);
        self.lab.pass(Duration::from_millis(1));
    }

    fn receive(&mut self) {
        let flow = self.raw.path().flow;
        for (segment, _) in self.lab.inbox.extract_if(.., |(segment, _)| segment.flow == flow) {
            self.raw.receive(&segment);
        }
    }

    /// An MPA Request, next in order.
    fn request(&mut self) -> Vec<u8> {
        let request = MpaRequest { revision: 1, crc: true, ..MpaRequest::default() };
        self.raw.data(&request.emit())
    }

    fn is_established(&mut self) -> bool {
        self.lab.pass(Duration::from_millis(1));
        !self.lab.server.upper.established.is_empty()
    }

    fn bad_checksums(&self) -> u64 {
        self.lab.server.stack.counters().bad_checksum
    }
}

#[test]
fn a_corrupted_segment_that_looks_like_checksum_offload_is_dropped() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let mut peer = Peer::open(&mut lab, false);
    let request = peer.request();
    peer.inject(leave_to_hardware(request.clone()));
    assert!(!peer.is_established());
    assert_eq!(peer.bad_checksums(), 1);
    peer.inject(request);
    assert!(peer.is_established());
}

/// Forged segments need the four-tuple only: they are outside the window.
#[test]
fn forged_segments_do_not_stop_a_peer_that_leaves_its_checksums_to_hardware() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let mut peer = Peer::open(&mut lab, true);
    let request = peer.request();
    let forged = RawPeer::new(*peer.raw.path(), 0x4000_0000, false).data(b"forged");
    for _ in 0..8 {
        peer.lab.stranger.inject(&forged);
    }
    peer.inject(request);
    assert!(peer.is_established());
    assert_eq!(peer.bad_checksums(), 0);
}

/// They come before the answer.
#[test]
fn forged_segments_do_not_keep_out_the_answer_of_such_a_peer() {
    let links = WireConfig { checksums: Checksums::Partial, ..WireConfig::default() };
    let mut lab = Lab::over(&links, TcpConfig::default(), MpaConfig::default(), 8, |_| {});
    lab.connect();
    let route = path(([10, 1, 1, 1], PORT), ([10, 1, 0, 1], lab.port));
    let forged =
        RawPeer::new(Path { source_mac: Mac([2, 0, 0, 0, 0, 9]), ..route }, 7, false).data(b"forged");
    for _ in 0..8 {
        lab.stranger.inject(&forged);
    }
    lab.pass(Duration::from_millis(50));
    assert_eq!(lab.client.upper.established.len(), 1);
    let counters = lab.client.stack.counters();
    assert_eq!((counters.bad_checksum, counters.frames_in - counters.partial_checksum), (0, 8));
}

#[test]
fn a_peer_that_leaves_all_checksums_to_hardware_is_served() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let mut peer = Peer::open(&mut lab, true);
    let request = peer.request();
    peer.inject(request);
    assert!(peer.is_established());
    assert_eq!(peer.bad_checksums(), 0);
}

/// Three such segments once turned the check off (RFC 9293 MUST-3): one corrupted frame in 65536 has the sum of the pseudo-header.
#[test]
fn forged_segments_do_not_turn_off_the_check_of_a_peer_that_computes_its_checksums() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let mut peer = Peer::open(&mut lab, false);
    let request = peer.request();
    let forged = RawPeer::new(*peer.raw.path(), 0x4000_0000, false).data(b"forged");
    for _ in 0..8 {
        peer.lab.stranger.inject(&leave_to_hardware(forged.clone()));
    }
    peer.lab.pass(Duration::from_millis(1));
    peer.inject(leave_to_hardware(request.clone()));
    assert!(!peer.is_established(), "a corrupted segment was taken");
    peer.inject(request);
    assert!(peer.is_established());
}
