//! Single frames, by `smoltcp::wire`'s printers.

use smoltcp::wire::{EthernetFrame, Ipv4Packet, Ipv6Packet, PrettyPrinter};

use super::file::{LinkType, Packet};

/// Bytes of an Ethernet header, and of a VLAN tag.
const ETHERNET_BYTES: usize = 14;
const TAG_BYTES: usize = 4;
/// Largest number of VLAN tags of a frame that are shown.
const MAX_TAGS: usize = 2;

/// Describes a packet in several lines.
pub fn describe(packet: &Packet<'_>) -> String {
    let bytes = packet.bytes;
    match packet.link {
        LinkType::Ethernet => ethernet(bytes),
        LinkType::Other(_) => {
            format!("{}, {} bytes", packet.link.unexplained().unwrap_or_default(), bytes.len())
        }
        other => ip(bytes.get(other.bytes_before_ip()..).unwrap_or_default()),
    }
}

fn ip(bytes: &[u8]) -> String {
    match bytes.first().map(|first| first >> 4) {
        Some(4) => PrettyPrinter::<Ipv4Packet<&[u8]>>::new("", &bytes).to_string(),
        Some(6) => PrettyPrinter::<Ipv6Packet<&[u8]>>::new("", &bytes).to_string(),
        _ => format!("{} bytes that are not IP", bytes.len()),
    }
}

/// smoltcp does not know VLAN tags, so they are shown and removed.
fn ethernet(bytes: &[u8]) -> String {
    let mut frame = bytes.to_vec();
    let mut text = String::new();
    for _ in 0..MAX_TAGS {
        let Some(&[kind_high, kind_low, tag_high, tag_low]) =
            frame.get(12..).and_then(<[u8]>::first_chunk::<TAG_BYTES>)
        else {
            break;
        };
        if !matches!(u16::from_be_bytes([kind_high, kind_low]), 0x8100 | 0x88a8 | 0x9100) {
            break;
        }
        let id = u16::from_be_bytes([tag_high, tag_low]) & 0x0fff;
        text.extend(["VLAN ", &id.to_string(), "\n"]);
        frame.drain(12..12 + TAG_BYTES);
    }
    if frame.len() < ETHERNET_BYTES {
        return format!("{text}{} bytes, less than an Ethernet header", bytes.len());
    }
    text + &PrettyPrinter::<EthernetFrame<&[u8]>>::new("", &frame).to_string()
}
