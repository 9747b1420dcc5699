//! Streams sent by Linux's Soft-iWARP (kernel 6.1, recorded on a virtual wire): our receiver accepts every FPDU, and
//! framing the ULPDUs again gives the same bytes.

use std::{collections::BTreeMap, path::Path};

use etherparse::{SlicedPacket, TransportSlice};
use pcap_file::pcap::PcapReader;
use xwarp_tcp::{
    mpa::{Markers, MpaConfig, MpaRequest, RequestRevision, Rtr},
    ulp::Event,
};

use crate::support::{End, Reference};

/// The segments with payload of one connection: those of the initiator and those of the responder, each by
/// offset in its stream.
type Directions = [BTreeMap<usize, Vec<u8>>; 2];

/// The connections in a capture, by the initiator's port, in order of their SYNs.
fn read(name: &str) -> Vec<Directions> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(name);
    let mut reader = PcapReader::new(std::fs::File::open(path).unwrap()).unwrap();
    let mut connections: Vec<(u16, [u32; 2], Directions)> = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.unwrap();
        let sliced = SlicedPacket::from_ethernet(&packet.data).unwrap();
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else { continue };
        let (from, to) = (tcp.source_port(), tcp.destination_port());
        if tcp.syn() && !tcp.ack() {
            connections.push((from, [0; 2], Directions::default()));
        }
        let connection = connections.iter_mut().find(|(port, ..)| [from, to].contains(port));
        let (initiator, first, directions) = connection.unwrap();
        let side = usize::from(from != *initiator);
        if tcp.syn() {
            first[side] = tcp.sequence_number().wrapping_add(1);
        } else if !tcp.payload().is_empty() {
            let offset = tcp.sequence_number().wrapping_sub(first[side]);
            directions[side].insert(offset as usize, tcp.payload().to_vec());
        }
    }
    connections.into_iter().map(|(.., directions)| directions).collect()
}

/// Feeds `segments` to `end`, forwards or, except for the start-up frame, backwards.
fn feed(end: &mut End, segments: &BTreeMap<usize, Vec<u8>>, backwards: bool) {
    let mut rest: Vec<_> = segments.iter().skip(1).collect();
    if backwards {
        rest.reverse();
    }
    for (offset, payload) in rest {
        assert!(end.receive(*offset, payload));
    }
    assert_eq!(end.ulp.stream_errors(), []);
    end.peer_closed();
    assert_eq!(end.ulp.events.last(), Some(&Event::PeerClosed), "everything was delivered");
    assert_eq!(end.link.lent(), 0);
}

/// Frames the delivered ULPDUs again and compares them with the stream after the start-up frame. Only the pad may
/// differ: siw does not clear it, contrary to RFC 5044 section 4.1, and computes the CRC over it as it is.
fn reframes(end: &End, segments: &BTreeMap<usize, Vec<u8>>, crc: bool) {
    let stream: Vec<u8> = segments.values().flatten().copied().collect();
    let stream = &stream[segments[&0].len()..];
    let again = Reference::new(&end.ulp.delivered, false, crc);
    assert_eq!(again.bytes.len(), stream.len());
    for ((from, to), ulpdu) in again.ranges.iter().zip(&end.ulp.delivered) {
        let pad = from + 2 + ulpdu.len();
        assert_eq!(again.bytes[*from..pad], stream[*from..pad]);
        let sum = if crc { crc32c::crc32c(&stream[*from..to - 4]) } else { 0 };
        assert_eq!(stream[to - 4..*to], sum.to_le_bytes());
    }
}

/// Replays every connection of a capture. `fpdus` is the number of FPDUs in each direction of each connection.
fn replay(name: &str, fpdus: &[[usize; 2]]) {
    let connections = read(name);
    assert_eq!(connections.len(), fpdus.len());
    for (directions, fpdus) in connections.iter().zip(fpdus) {
        replay_connection(directions, *fpdus);
    }
}

fn replay_connection(directions: &Directions, fpdus: [usize; 2]) {
    let (request, _) = MpaRequest::parse(&directions[0][&0]).unwrap().unwrap();
    for backwards in [false, true] {
        let config = MpaConfig { crc: false, markers: Markers::Prefer, ..MpaConfig::default() };
        let mut responder = End::responder(config.clone());
        assert!(responder.receive(0, &directions[0][&0]));
        responder.accept();
        assert_eq!(responder.ulp.established().unwrap().crc, request.crc);
        feed(&mut responder, &directions[0], backwards);
        assert_eq!(responder.ulp.delivered.len(), fpdus[0]);
        reframes(&responder, &directions[0], request.crc);

        let mut initiator = End::initiator(MpaConfig {
            markers: Markers::Off,
            crc: request.crc,
            revision: if request.revision == 1 { RequestRevision::One } else { RequestRevision::PreferTwo },
            peer_to_peer: match request.enhanced.and_then(|e| e.peer_to_peer) {
                Some(_) => vec![Rtr::Write, Rtr::Read],
                None => Vec::new(),
            },
            ..config
        });
        initiator.fill_all(1448);
        assert!(initiator.receive(0, &directions[1][&0]));
        let established = initiator.ulp.established().unwrap();
        assert_eq!(established.crc, request.crc);
        assert_eq!(established.peer_to_peer, request.enhanced.is_some_and(|e| e.peer_to_peer.is_some()));
        feed(&mut initiator, &directions[1], backwards);
        assert_eq!(initiator.ulp.delivered.len(), fpdus[1]);
        reframes(&initiator, &directions[1], request.crc);
    }
}

/// The numbers of FPDUs are those that tshark counts.
#[test]
fn siw_captures_with_crc() {
    replay("rping-rev2-crc.pcap", &[[6, 8]]);
    replay("rping-ipv6-crc.pcap", &[[6, 8]]);
    replay("send-1x10001-crc.pcap", &[[11, 11], [40, 2]]);
    replay("write-read-8k-crc.pcap", &[[16, 16], [5, 30]]);
}

#[test]
fn siw_captures_in_peer_to_peer_mode() {
    replay("rping-p2p-write-rtr-crc.pcap", &[[7, 8]]);
    replay("rping-p2p-read-rtr-crc.pcap", &[[7, 9]]);
}

#[test]
fn siw_captures_without_crc() {
    replay("rping-rev2-nocrc.pcap", &[[12, 16]]);
    replay("rping-rev1-nocrc.pcap", &[[1, 0]]);
}
