//! The hostile end of a connection: hand-made TCP segments, valid or invalid as the input requires, and
//! checks of every segment that the engine sends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use etherparse::{NetSlice, SlicedPacket, TcpSlice, TransportSlice};

use crate::{canary::betrays, wire::mend};

/// The engine's port.
pub const CARD_PORT: u16 = 4791;
/// The peer's first initial sequence number, near the wrap.
const ISN: u32 = u32::MAX - 700;
/// Distance of the initial sequence numbers of two connections in succession: more than is ever sent.
const NEXT_ISN: u32 = 1 << 24;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const ICMPV6: u8 = 58;

/// TCP control bits.
pub const FIN: u8 = 1;
/// See [`FIN`].
pub const SYN: u8 = 2;
/// See [`FIN`].
pub const RST: u8 = 4;
/// See [`FIN`].
pub const ACK: u8 = 16;

/// Addresses of the engine and its peers; each connection has its own port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    v6: bool,
}

impl Addresses {
    /// Creates addresses of IPv6 or IPv4.
    pub fn new(v6: bool) -> Self {
        Self { v6 }
    }

    fn end(self, number: u8) -> IpAddr {
        if self.v6 {
            Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()).into()
        } else {
            Ipv4Addr::new(192, 0, 2, number).into()
        }
    }

    /// The engine's address.
    pub fn card(self) -> SocketAddr {
        (self.end(1), CARD_PORT).into()
    }

    /// The peer's address.
    pub fn peer(self) -> IpAddr {
        self.end(2)
    }

    /// Offset of the addresses in a frame of this module, and the offset of the ports.
    pub fn places(self) -> (usize, usize) {
        if self.v6 { (22, 54) } else { (26, 34) }
    }

    /// Encodes the IP header of a packet from one end to the other.
    fn ip_header(self, [from, to]: [u8; 2], protocol: u8, payload: usize) -> Vec<u8> {
        let mut header = if self.v6 {
            let [high, low] = (payload as u16).to_be_bytes();
            vec![0x60, 0, 0, 0, high, low, protocol, 64]
        } else {
            let [high, low] = (20 + payload as u16).to_be_bytes();
            vec![0x45, 0, high, low, 0, 0, 0x40, 0, 64, protocol, 0, 0]
        };
        for end in [from, to] {
            match self.end(end) {
                IpAddr::V4(ip) => header.extend_from_slice(&ip.octets()),
                IpAddr::V6(ip) => header.extend_from_slice(&ip.octets()),
            }
        }
        header
    }

    /// Encodes a frame to the engine, with correct checksums.
    fn frame(self, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        frame.extend_from_slice(if self.v6 { &[0x86, 0xdd] } else { &[8, 0] });
        frame.extend_from_slice(&self.ip_header([2, 1], protocol, payload.len()));
        frame.extend_from_slice(payload);
        mend(&mut frame);
        frame
    }
}

/// The peer's state of one TCP connection.
#[derive(Debug)]
pub struct Peer {
    addresses: Addresses,
    port: u16,
    timestamps: bool,
    isn: u32,
    /// The window of acknowledgements and data.
    pub window: u16,
    /// The bytes sent in order.
    said: Vec<u8>,
    /// The engine's initial sequence number, after its SYN has arrived.
    card_isn: Option<u32>,
    /// The engine's stream from its first byte, and whether its FIN has arrived.
    pub heard: Vec<u8>,
    /// Whether each byte of `heard` has arrived; the others are gaps.
    came: Vec<bool>,
    heard_fin: bool,
    last_timestamp: u32,
    /// Number of bytes sent in order.
    pub sent: u32,
    /// Offset of the first FPDU of the peer.
    pub origin: u32,
    /// The clock of the timestamps, in milliseconds.
    pub clock: u32,
    acknowledged: usize,
}

impl Peer {
    /// Creates a peer that has sent nothing.
    pub fn new(addresses: Addresses, port: u16, timestamps: bool) -> Self {
        Self {
            addresses,
            port,
            timestamps,
            isn: ISN,
            window: 0xffff,
            said: Vec::new(),
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

    /// The peer's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the engine has sent its SYN.
    pub fn met(&self) -> bool {
        self.card_isn.is_some()
    }

    /// The sequence number at distance `delta` from the next one to send.
    pub fn seq(&self, delta: i32) -> u32 {
        self.isn.wrapping_add(1).wrapping_add(self.sent).wrapping_add_signed(delta)
    }

    /// The acknowledgement number of all bytes that arrived without a gap.
    pub fn ack(&self) -> u32 {
        let Some(isn) = self.card_isn else { return 0 };
        let len = self.contiguous();
        let fin = u32::from(self.heard_fin && len == self.came.len());
        isn.wrapping_add(1).wrapping_add(len as u32).wrapping_add(fin)
    }

    fn contiguous(&self) -> usize {
        self.came.iter().take_while(|came| **came).count()
    }

    /// Encodes the SYN, or the SYN-ACK to the engine's SYN.
    pub fn syn(&self) -> Vec<u8> {
        let flags = if self.met() { SYN | ACK } else { SYN };
        self.segment(flags, self.isn, self.ack(), 0xffff, &[])
    }

    /// Encodes a segment with the next payload.
    pub fn data(&mut self, payload: &[u8]) -> Vec<u8> {
        let frame = self.segment(ACK, self.seq(0), self.ack(), self.window, payload);
        self.sent = self.sent.wrapping_add(payload.len() as u32);
        self.said.extend_from_slice(payload);
        frame
    }

    /// Encodes a segment that retransmits up to `len` of the last `back` bytes, and continues them with `more`.
    pub fn again(&self, back: usize, len: usize, more: &[u8]) -> Vec<u8> {
        let back = back.min(self.said.len()).min(1 << 16);
        let last = &self.said[self.said.len() - back..];
        let payload: Vec<u8> = last.iter().chain(more).take(len.min(1400)).copied().collect();
        self.segment(ACK, self.seq(-(back as i32)), self.ack(), self.window, &payload)
    }

    /// Encodes `last` with a FIN, and the SYN of a new connection with the same ports, to which the peer belongs from
    /// then on.
    pub fn replace(&mut self, last: &[u8]) -> [Vec<u8>; 2] {
        let fin = self.segment(FIN | ACK, self.seq(0), self.ack(), self.window, last);
        let isn = self.isn.wrapping_add(NEXT_ISN);
        let clock = self.clock.wrapping_add(1);
        *self = Self { isn, clock, ..Self::new(self.addresses, self.port, self.timestamps) };
        [fin, self.syn()]
    }

    /// Encodes an acknowledgement, if there is something new to acknowledge.
    pub fn acknowledge(&mut self) -> Option<Vec<u8>> {
        let now = self.contiguous() + usize::from(self.heard_fin);
        if now == self.acknowledged {
            return None;
        }
        self.acknowledged = now;
        Some(self.segment(ACK, self.seq(0), self.ack(), self.window, &[]))
    }

    /// Encodes any segment, with correct checksums.
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
        let header = 20 + options.len() as u8;
        let mut tcp = self.port.to_be_bytes().to_vec();
        tcp.extend_from_slice(&CARD_PORT.to_be_bytes());
        tcp.extend_from_slice(&seq.to_be_bytes());
        tcp.extend_from_slice(&ack.to_be_bytes());
        tcp.extend_from_slice(&[(header / 4) << 4, flags]);
        tcp.extend_from_slice(&window.to_be_bytes());
        tcp.extend_from_slice(&[0; 4]);
        tcp.extend_from_slice(&options);
        tcp.extend_from_slice(payload);
        self.addresses.frame(TCP, &tcp)
    }

    /// Encodes an ICMP error about a segment of the engine. IPv4: unreachable with this code; IPv6: packet
    /// too big for code 4, otherwise unreachable.
    pub fn icmp(&self, code: u8, mtu: u16) -> Vec<u8> {
        let [high, low] = mtu.to_be_bytes();
        let (protocol, header) = match (self.addresses.v6, code) {
            (false, _) => (ICMP, [3, code]),
            (true, 4) => (ICMPV6, [2, 0]),
            (true, _) => (ICMPV6, [1, code]),
        };
        let mut icmp = header.to_vec();
        icmp.extend_from_slice(&[0, 0, 0, 0, high, low]);
        let quoted = self.addresses.ip_header([1, 2], TCP, 1480);
        let seq = self.card_isn.unwrap_or_default().wrapping_add(1).wrapping_add(self.acknowledged as u32);
        icmp.extend_from_slice(&quoted);
        icmp.extend_from_slice(&CARD_PORT.to_be_bytes());
        icmp.extend_from_slice(&self.port.to_be_bytes());
        icmp.extend_from_slice(&seq.to_be_bytes());
        self.addresses.frame(protocol, &icmp)
    }

    /// Receives a segment from the engine; its bytes must not contradict earlier ones.
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
        // A probe has the number of an acknowledged byte; a SYN has no offset.
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

/// Parses a frame sent by the engine and checks its lengths, checksums and addresses. Returns the destination
/// port.
pub fn inspect(addresses: Addresses, frame: &[u8], hear: impl FnOnce(u16, &TcpSlice<'_>)) {
    let sliced = SlicedPacket::from_ethernet(frame).expect("a sent frame can be parsed");
    let (from, to, len): (IpAddr, IpAddr, usize) = match &sliced.net {
        Some(NetSlice::Ipv4(ip)) => {
            let header = ip.header();
            (header.source_addr().into(), header.destination_addr().into(), header.total_len().into())
        }
        Some(NetSlice::Ipv6(ip)) => {
            let header = ip.header();
            let len = 40 + usize::from(header.payload_length());
            (header.source_addr().into(), header.destination_addr().into(), len)
        }
        _ => panic!("the engine sends IP only"),
    };
    assert_eq!((from, to), (addresses.card().ip(), addresses.peer()));
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("the engine sends TCP only") };
    let mut mended = frame.to_vec();
    mend(&mut mended);
    assert_eq!(mended, frame, "the checksums are correct");
    assert_eq!(14 + len, frame.len(), "the length is that of the frame");
    hear(tcp.destination_port(), tcp);
}
