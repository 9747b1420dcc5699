//! The hostile end of a connection: TCP segments made by hand, as good or bad as the input wants them, and a check of
//! every segment that the engine sends.

use std::net::Ipv4Addr;

use etherparse::{NetSlice, SlicedPacket, TcpSlice, TransportSlice};

use crate::{canary::betrays, wire::mend};

/// The engine's address and port.
pub const CARD: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 4791);
/// The peer's address; each connection has a port of its own.
pub const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);
/// Where the peer's sequence numbers begin, near the wrap.
const ISN: u32 = u32::MAX - 700;

/// TCP control bits.
pub const FIN: u8 = 1;
/// See [`FIN`].
pub const SYN: u8 = 2;
/// See [`FIN`].
pub const RST: u8 = 4;
/// See [`FIN`].
pub const ACK: u8 = 16;

/// One TCP connection, as far as a peer knows it.
#[derive(Debug)]
pub struct Peer {
    port: u16,
    timestamps: bool,
    /// The engine's initial sequence number, once its SYN came.
    card_isn: Option<u32>,
    /// What the engine has sent, from its first byte on, and whether it has sent its FIN.
    pub heard: Vec<u8>,
    /// Bytes of `heard` that came; the others are gaps.
    came: Vec<bool>,
    heard_fin: bool,
    last_timestamp: u32,
    /// Bytes sent in order.
    pub sent: u32,
    /// Where our FPDUs begin.
    pub origin: u32,
    /// Milliseconds: the timestamps' clock.
    pub clock: u32,
    acknowledged: usize,
}

impl Peer {
    /// A peer that has sent nothing.
    pub fn new(port: u16, timestamps: bool) -> Self {
        Self {
            port,
            timestamps,
            card_isn: None,
            heard: Vec::new(),
            came: Vec::new(),
            heard_fin: false,
            last_timestamp: 0,
            sent: 0,
            origin: 0,
            clock: 1,
            acknowledged: 0,
        }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the engine has sent its SYN.
    pub fn met(&self) -> bool {
        self.card_isn.is_some()
    }

    /// The sequence number of the byte that is `delta` from the one to be sent next.
    pub fn seq(&self, delta: i32) -> u32 {
        ISN.wrapping_add(1).wrapping_add(self.sent).wrapping_add_signed(delta)
    }

    /// What acknowledges all that came without a gap.
    pub fn ack(&self) -> u32 {
        let Some(isn) = self.card_isn else { return 0 };
        let len = self.contiguous();
        let fin = u32::from(self.heard_fin && len == self.came.len());
        isn.wrapping_add(1).wrapping_add(len as u32).wrapping_add(fin)
    }

    fn contiguous(&self) -> usize {
        self.came.iter().take_while(|came| **came).count()
    }

    /// The SYN, or the answer to the engine's.
    pub fn syn(&self) -> Vec<u8> {
        let flags = if self.met() { SYN | ACK } else { SYN };
        self.segment(flags, ISN, self.ack(), 0xffff, &[])
    }

    /// Payload that is next in order.
    pub fn data(&mut self, payload: &[u8]) -> Vec<u8> {
        let frame = self.segment(ACK, self.seq(0), self.ack(), 0xffff, payload);
        self.sent = self.sent.wrapping_add(payload.len() as u32);
        frame
    }

    /// An acknowledgement, when there is something new.
    pub fn acknowledge(&mut self) -> Option<Vec<u8>> {
        let now = self.contiguous() + usize::from(self.heard_fin);
        if now == self.acknowledged {
            return None;
        }
        self.acknowledged = now;
        Some(self.segment(ACK, self.seq(0), self.ack(), 0xffff, &[]))
    }

    /// Any segment, with good checksums.
    pub fn segment(&self, flags: u8, seq: u32, ack: u32, window: u16, payload: &[u8]) -> Vec<u8> {
        let mut options = Vec::new();
        if flags & SYN != 0 {
            options.extend_from_slice(&[2, 4, 5, 180, 1, 3, 3, 2, 1, 1, 4, 2]);
        }
        if self.timestamps {
            options.extend_from_slice(&[1, 1, 8, 10]);
            options.extend_from_slice(&self.clock.to_be_bytes());
            options.extend_from_slice(&self.last_timestamp.to_be_bytes());
        }
        let tcp = 20 + options.len();
        let total = (20 + tcp + payload.len()) as u16;
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        frame.extend_from_slice(&[0x45, 0, (total >> 8) as u8, total as u8, 0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend_from_slice(&PEER.octets());
        frame.extend_from_slice(&CARD.0.octets());
        frame.extend_from_slice(&self.port.to_be_bytes());
        frame.extend_from_slice(&CARD.1.to_be_bytes());
        frame.extend_from_slice(&seq.to_be_bytes());
        frame.extend_from_slice(&ack.to_be_bytes());
        frame.extend_from_slice(&[(tcp as u8 / 4) << 4, flags]);
        frame.extend_from_slice(&window.to_be_bytes());
        frame.extend_from_slice(&[0; 4]);
        frame.extend_from_slice(&options);
        frame.extend_from_slice(payload);
        mend(&mut frame);
        frame
    }

    /// An ICMP error about a segment that the engine has sent.
    pub fn icmp(&self, code: u8, mtu: u16) -> Vec<u8> {
        let seq = self.card_isn.unwrap_or_default().wrapping_add(1).wrapping_add(self.acknowledged as u32);
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        frame.extend_from_slice(&[0x45, 0, 0, 56, 0, 0, 0x40, 0, 64, 1, 0, 0]);
        frame.extend_from_slice(&PEER.octets());
        frame.extend_from_slice(&CARD.0.octets());
        frame.extend_from_slice(&[3, code, 0, 0, 0, 0, (mtu >> 8) as u8, mtu as u8]);
        frame.extend_from_slice(&[0x45, 0, 5, 220, 0, 0, 0x40, 0, 64, 6, 0, 0]);
        frame.extend_from_slice(&CARD.0.octets());
        frame.extend_from_slice(&PEER.octets());
        frame.extend_from_slice(&CARD.1.to_be_bytes());
        frame.extend_from_slice(&self.port.to_be_bytes());
        frame.extend_from_slice(&seq.to_be_bytes());
        mend(&mut frame);
        frame
    }

    /// A segment of the engine's to this peer: its bytes must not contradict those that came before.
    pub fn hear(&mut self, tcp: &TcpSlice<'_>) {
        if tcp.syn() {
            self.card_isn = Some(tcp.sequence_number());
        }
        let Some(isn) = self.card_isn else { return };
        if let Some(etherparse::TcpOptionElement::Timestamp(value, _)) = tcp
            .options_iterator()
            .flatten()
            .find(|option| matches!(option, etherparse::TcpOptionElement::Timestamp(..)))
        {
            self.last_timestamp = value;
        }
        if tcp.rst() {
            return;
        }
        let offset = tcp.sequence_number().wrapping_sub(isn).wrapping_sub(1);
        let payload = tcp.payload();
        assert!(!betrays(payload), "memory that the peer may not read was sent");
        // A probe repeats a byte that was acknowledged; a SYN has no offset.
        if tcp.syn() || offset > 1 << 24 || payload.is_empty() && !tcp.fin() {
            return;
        }
        let offset = offset as usize;
        let end = offset + payload.len();
        if self.heard.len() < end {
            self.heard.resize(end, 0);
            self.came.resize(end, false);
        }
        for (at, byte) in (offset..).zip(payload) {
            assert!(!self.came[at] || self.heard[at] == *byte, "byte {at} of the stream has changed");
            self.heard[at] = *byte;
            self.came[at] = true;
        }
        self.heard_fin |= tcp.fin();
    }
}

/// Reads a frame that the engine has sent, and checks it: lengths, checksums, addresses. Returns the port it is for.
pub fn inspect(frame: &[u8], hear: impl FnOnce(u16, &TcpSlice<'_>)) {
    let sliced = SlicedPacket::from_ethernet(frame).expect("what is sent can be read");
    let Some(NetSlice::Ipv4(ip)) = &sliced.net else { panic!("IPv4 is answered by IPv4") };
    assert_eq!((ip.header().source_addr(), ip.header().destination_addr()), (CARD.0, PEER));
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("the engine sends TCP only") };
    let mut mended = frame.to_vec();
    mend(&mut mended);
    assert_eq!(mended, frame, "the checksums are good");
    assert_eq!(14 + usize::from(ip.header().total_len()), frame.len(), "the length is that of the frame");
    hear(tcp.destination_port(), tcp);
}
