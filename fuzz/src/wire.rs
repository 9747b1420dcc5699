//! Target: the headers of received frames.
//!
//! An input is: flags (1: recompute the checksums; 2: the bytes are only TCP options), the chunk size, the
//! frame.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use xwarp_tcp::{
    link::Link,
    wire::{self, Inbound, Malformed, Options, Segment, Sum},
};

use crate::{input::Input, link::FuzzLink};

const MEND: u8 = 1;
const OPTIONS: u8 = 2;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let chunk = usize::from(input.u8()) * 8;
    if flags & OPTIONS != 0 {
        return options(input.rest());
    }
    let mut frame = input.rest().to_vec();
    if flags & MEND != 0 {
        mend(&mut frame);
    }
    let whole = parse(&frame, usize::MAX);
    assert_eq!(parse(&frame, chunk), whole, "the result depends on the chunks");
    if let Ok(Inbound::Tcp(segment)) = whole {
        agrees_with_etherparse(&frame, &segment);
        let wire = &mut [0; 64];
        let len = segment.options.emit(wire).expect("64 bytes hold all options");
        assert_eq!(Options::parse(&wire[..len]), segment.options);
    }
}

fn parse(frame: &[u8], chunk: usize) -> Result<Inbound, Malformed> {
    let mut link = FuzzLink::new(chunk);
    let frame = link.lend(frame);
    let parsed = wire::parse(&link, &frame);
    link.recycle(frame);
    parsed
}

fn agrees_with_etherparse(frame: &[u8], segment: &Segment) {
    let Segment { payload_start, payload_len, .. } = *segment;
    assert!(payload_start + payload_len <= frame.len(), "the payload lies within the frame");
    let Ok(sliced) = SlicedPacket::from_ethernet(frame) else { return };
    let (Some(net), Some(TransportSlice::Tcp(tcp))) = (sliced.net, sliced.transport) else { return };
    assert_eq!(segment.flow.remote.port(), tcp.source_port());
    assert_eq!(segment.flow.local.port(), tcp.destination_port());
    assert_eq!(segment.seq.value(), tcp.sequence_number());
    assert_eq!(segment.ack.value(), tcp.acknowledgment_number());
    let flags = segment.flags;
    assert_eq!((flags.syn, flags.ack, flags.fin, flags.rst), (tcp.syn(), tcp.ack(), tcp.fin(), tcp.rst()));
    // RFC 8200 allows a payload length of 0 with a jumbogram; etherparse then uses the available bytes.
    let jumbo = matches!(&net, NetSlice::Ipv6(ip) if ip.header().payload_length() == 0);
    if !jumbo {
        assert_eq!(&frame[payload_start..payload_start + payload_len], tcp.payload());
    }
}

fn options(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(40)];
    let options = Options::parse(bytes);
    let wire = &mut [0; 64];
    let len = options.emit(wire).expect("64 bytes hold all options");
    assert_eq!(len, options.wire_len());
    assert_eq!(Options::parse(&wire[..len]), options);
    assert!(options.sack_blocks().len() <= 4);
}

/// Recomputes the checksums of an IP packet as far as it is complete: IPv4's, and that of TCP or ICMP.
pub fn mend(frame: &mut [u8]) {
    let mut at = 14;
    let mut ethertype = frame.get(12..14).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
    for _ in 0..2 {
        if matches!(ethertype, 0x8100 | 0x88a8 | 0x9100) {
            ethertype = frame.get(at + 2..at + 4).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
            at += 4;
        }
    }
    let Some(packet) = frame.get_mut(at..) else { return };
    let Some((protocol, pseudo, transport)) = (match ethertype {
        0x0800 => mend_ipv4(packet),
        0x86dd => mend_ipv6(packet),
        _ => None,
    }) else {
        return;
    };
    let (field, pseudo) = match protocol {
        6 => (16, pseudo),
        1 => (2, Sum::of(&[])),
        58 => (2, pseudo),
        _ => return,
    };
    if transport.len() >= field + 2 {
        transport[field..field + 2].fill(0);
        let sum = Sum::of(transport).and(pseudo).checksum();
        transport[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    }
}

/// The protocol, the sum of the pseudo-header, and the transport's bytes.
type Transport<'a> = Option<(u8, Sum, &'a mut [u8])>;

fn mend_ipv4(packet: &mut [u8]) -> Transport<'_> {
    let header = usize::from(packet.first()? & 15) * 4;
    let total = usize::from(u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]));
    let total = total.min(packet.len());
    packet.get_mut(10..12)?.fill(0);
    let sum = Sum::of(packet.get(..header)?).checksum();
    packet.get_mut(10..12)?.copy_from_slice(&sum.to_be_bytes());
    let protocol = *packet.get(9)?;
    let addresses = Sum::of(packet.get(12..20)?);
    let transport = packet.get_mut(header..total)?;
    let pseudo = addresses.and_word(protocol.into()).and_word(transport.len() as u16);
    Some((protocol, pseudo, transport))
}

fn mend_ipv6(packet: &mut [u8]) -> Transport<'_> {
    let len = usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?]));
    let protocol = *packet.get(6)?;
    let addresses = Sum::of(packet.get(8..40)?);
    let end = (40 + len).min(packet.len());
    let transport = packet.get_mut(40..end)?;
    let pseudo = addresses.and_word(protocol.into()).and_word(transport.len() as u16);
    Some((protocol, pseudo, transport))
}
