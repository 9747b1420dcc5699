//! A peer without a stack, which sends the segments that a test builds and parses those that it receives.

use std::{net::Ipv4Addr, time::Duration};

use xwarp_tcp::{
    link::{Link, rx_pieces},
    mpa::MpaRequest,
    seq::SeqNum,
    sim::{Faults, Node, SimLink, path},
    time::Instant,
    wire::{self, Fields, Flags, Flow, Headers, Inbound, MAX_HEADER_BYTES, Mac, Options, Path, Segment, Sum},
};

use crate::support::{Lab, PORT};

/// One connection of a raw peer to the server.
pub struct RawPeer {
    path: Path,
    /// The next sequence number to send.
    pub seq: SeqNum,
    /// The next sequence number expected.
    pub ack: SeqNum,
}

const ACK: Flags =
    Flags { fin: false, syn: false, rst: false, psh: false, ack: true, ece: false, cwr: false };

impl RawPeer {
    /// Makes the stranger's link receive, so that raw peers can complete handshakes.
    pub fn listen_in(lab: &mut Lab) {
        lab.wire.set_faults(2, Faults { delay: Duration::from_micros(50), ..Faults::default() });
    }

    /// A peer at `port` of host number `host` that has sent nothing yet.
    pub fn new(host: u32, port: u16) -> Self {
        let source = Ipv4Addr::from(0x0a09_0000 + host);
        let path =
            Path { source_mac: Mac([2, 0, 0, 0, 0, 9]), ..path((source, port), ([10, 1, 1, 1], PORT)) };
        Self { path, seq: SeqNum::new(1000), ack: SeqNum::default() }
    }

    /// Completes the handshake of a connection and stays silent.
    pub fn open(lab: &mut Lab, host: u32, port: u16) -> Self {
        let mut peer = Self::new(host, port);
        let options = Options { mss: Some(1460), window_scale: Some(7), ..Options::default() };
        let flags = Flags { syn: true, ..Flags::default() };
        peer.send(lab, &Fields { seq: peer.seq, flags, window: 65_535, options, ..Fields::default() }, &[]);
        peer.seq = peer.seq.add(1);
        lab.pass(Duration::from_millis(1));
        peer.receive(lab);
        assert_ne!(peer.ack, SeqNum::default(), "no SYN-ACK");
        peer.acknowledge(lab, 65_535);
        lab.pass(Duration::from_millis(1));
        peer
    }

    /// The four-tuple as the server sees it.
    pub fn flow_at_server(&self) -> Flow {
        Flow { local: self.path.flow.remote, remote: self.path.flow.local }
    }

    /// Sends one segment.
    pub fn send(&self, lab: &mut Lab, fields: &Fields, payload: &[u8]) {
        let mut frame = [0; MAX_HEADER_BYTES];
        let headers = Headers::new(&self.path);
        let len = headers.emit(&mut frame, fields, payload.len(), Sum::of(payload)).unwrap();
        lab.stranger.inject(&[&frame[..len], payload].concat());
    }

    /// Sends an ACK of all that was received, with `window` as the field on the wire.
    pub fn acknowledge(&self, lab: &mut Lab, window: u16) {
        let fields = Fields { seq: self.seq, ack: self.ack, flags: ACK, window, ..Fields::default() };
        self.send(lab, &fields, &[]);
    }

    /// Sends an MPA Request without markers.
    pub fn request(&mut self, lab: &mut Lab) {
        let request = MpaRequest { revision: 1, crc: true, ..MpaRequest::default() };
        self.send_data(lab, &request.emit());
    }

    /// Sends payload with the current acknowledgment and a full window.
    pub fn send_data(&mut self, lab: &mut Lab, payload: &[u8]) {
        let fields = Fields { seq: self.seq, ack: self.ack, flags: ACK, window: 65_535, ..Fields::default() };
        self.send(lab, &fields, payload);
        self.seq = self.seq.add(payload.len() as u32);
    }

    /// Returns the segments received by this peer with their payloads. Data in order advances the acknowledgment.
    pub fn receive(&mut self, lab: &mut Lab) -> Vec<(Segment, Vec<u8>)> {
        let flow = self.path.flow;
        let received: Vec<_> = lab.inbox.extract_if(.., |(segment, _)| segment.flow == flow).collect();
        for (segment, _) in &received {
            if segment.flags.syn {
                self.ack = segment.seq.add(1);
            } else if segment.seq == self.ack {
                self.ack = self.ack.add(segment.payload_len as u32);
            }
        }
        received
    }
}

/// Stores the segments that arrive at the stranger's link.
pub struct Mailbox<'a> {
    pub link: &'a mut SimLink,
    pub inbox: &'a mut Vec<(Segment, Vec<u8>)>,
}

impl Node for Mailbox<'_> {
    fn turn(&mut self, _now: Instant) -> bool {
        let mut batch = Vec::new();
        let received = self.link.receive(&mut batch, 64);
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = wire::parse(self.link, &frame) {
                let pieces = rx_pieces(self.link, &frame, segment.payload_start, segment.payload_len);
                let payload = pieces.concat();
                self.inbox.push((segment, payload));
            }
            self.link.recycle(frame);
        }
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}
