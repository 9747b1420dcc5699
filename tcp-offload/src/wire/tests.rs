//! Tests of the codecs: golden frames, comparison with etherparse, truncation at every length.

use super::*;
use crate::{
    link::{Link, RxFrame},
    sim::{SimLink, Wire, WireConfig},
};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;

fn links(chunk_bytes: usize) -> (SimLink, SimLink) {
    let (_, a, b) =
        Wire::new(WireConfig { chunk_bytes, tx_chunks: 4, rx_chunks: 4, ..WireConfig::default() });
    (a, b)
}

/// Sends raw bytes over the wire and parses the received frame.
fn parse_bytes(bytes: &[u8]) -> Result<Inbound, Malformed> {
    let (mut a, mut b) = links(4096);
    a.inject(bytes);
    let mut batch = Vec::new();
    b.receive(&mut batch, 1);
    let frame = batch.pop().expect("one frame");
    let parsed = parse(&b, &frame);
    b.recycle(frame);
    parsed
}

fn path(v6: bool, vlan: VlanTags) -> Path {
    let (local, remote) =
        if v6 { ("[fd00::1]:4791", "[fd00::2]:50000") } else { ("10.1.0.1:4791", "10.1.0.2:50000") };
    Path {
        flow: Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() },
        source_mac: Mac([2, 0, 0, 0, 0, 1]),
        next_hop: None,
        next_hop_mac: Mac([2, 0, 0, 0, 0, 2]),
        vlan,
        mtu: 1500,
        queue: QueueId(0),
    }
}

fn mirrored(path: &Path) -> Path {
    Path {
        flow: Flow { local: path.flow.remote, remote: path.flow.local },
        source_mac: path.next_hop_mac,
        next_hop_mac: path.source_mac,
        ..*path
    }
}

fn fields() -> Fields {
    Fields {
        seq: SeqNum::new(0xfffe_0001),
        ack: SeqNum::new(0x0102_0304),
        flags: Flags { ack: true, psh: true, ..Flags::default() },
        window: 0xabcd,
        options: Options {
            timestamps: Some(Timestamps { value: 0x1111_2222, echo: 0x3333_4444 }),
            ..Options::default()
        },
        ecn: Ecn::Ect0,
    }
}

fn frame(path: &Path, fields: &Fields, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; MAX_HEADER_BYTES + payload.len()];
    let len = Headers::new(path).emit(&mut out, fields, payload.len(), Sum::of(payload)).expect("room");
    out.truncate(len);
    out.extend_from_slice(payload);
    out
}

fn tags(n: usize) -> VlanTags {
    let mut tags = VlanTags::default();
    tags.0[..n].copy_from_slice(&[Some((0x88a8, 0x6123)), Some((0x8100, 0xf004))][2 - n..]);
    tags
}

fn segment_of(inbound: Result<Inbound, Malformed>) -> Segment {
    match inbound {
        Ok(Inbound::Tcp(segment)) => segment,
        other => panic!("not a segment: {other:?}"),
    }
}

/// A SYN with the layout that Linux uses: 10.200.1.1:40582 to 10.200.1.2:7471.
fn linux_syn() -> Vec<u8> {
    let head = [
        0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
        0x45, 0x00, 0x00, 0x3c, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x06, 0x00, 0x00, 10, 200, 1, 1, 10, 200, 1,
        2, // IPv4
        0x9e, 0x86, 0x1d, 0x2f, 0x0a, 0x0b, 0x0c, 0x0d, 0, 0, 0, 0, 0xa0, 0x02, 0xfa, 0xf0, 0, 0, 0,
        0, // TCP
        2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0x10, 0, 0, 0, 0, 0, 1, 3, 3, 7,
    ];
    let mut frame = head.to_vec();
    let sum = slow_checksum(&frame[14..34], &[]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    let pseudo = [10, 200, 1, 1, 10, 200, 1, 2, 0, 6, 0, 40];
    let sum = slow_checksum(&frame[34..], &pseudo);
    frame[50..52].copy_from_slice(&sum.to_be_bytes());
    frame
}

fn slow_checksum(bytes: &[u8], pseudo: &[u8]) -> u16 {
    let sum: u32 =
        bytes.chunks(2).chain(pseudo.chunks(2)).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn a_syn_is_read_field_by_field() {
    let segment = segment_of(parse_bytes(&linux_syn()));
    assert_eq!(segment.flow.local, "10.200.1.2:7471".parse().unwrap());
    assert_eq!(segment.flow.remote, "10.200.1.1:40582".parse().unwrap());
    assert_eq!(segment.source_mac, Mac([2, 0, 0, 0, 0, 1]));
    assert_eq!(segment.destination_mac, Mac([2, 0, 0, 0, 0, 2]));
    assert_eq!(segment.seq, SeqNum::new(0x0a0b_0c0d));
    assert!(segment.flags.is_plain_syn());
    assert_eq!(segment.window, 64_240);
    assert_eq!(segment.options.mss, Some(1460));
    assert_eq!(segment.options.window_scale, Some(7));
    assert!(segment.options.sack_permitted);
    assert_eq!((segment.payload_start, segment.payload_len), (74, 0));
    assert!(!segment.partial_checksum);
}

#[test]
fn golden_bytes_of_an_ipv4_data_segment() {
    let got = frame(&path(false, VlanTags::default()), &fields(), b"hello");
    let mut want = vec![
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, // Ethernet
        0x45, 0x02, 0, 57, 0, 0, 0x40, 0, 64, 6, 0x26, 0xb9, 10, 1, 0, 1, 10, 1, 0,
        2, // IPv4, ECT(0), DF
        0x12, 0xb7, 0xc3, 0x50, 0xff, 0xfe, 0, 1, 1, 2, 3, 4, 0x80, 0x18, 0xab, 0xcd, 0, 0, 0, 0, // TCP
        1, 1, 8, 10, 0x11, 0x11, 0x22, 0x22, 0x33, 0x33, 0x44, 0x44,
    ];
    want.extend_from_slice(b"hello");
    want[24..26].copy_from_slice(&[0, 0]);
    let ip = slow_checksum(&want[14..34], &[]);
    want[24..26].copy_from_slice(&ip.to_be_bytes());
    let mut padded = want[34..].to_vec();
    padded.push(0);
    let tcp = slow_checksum(&padded, &[10, 1, 0, 1, 10, 1, 0, 2, 0, 6, 0, 37]);
    want[50..52].copy_from_slice(&tcp.to_be_bytes());
    assert_eq!(got, want);
}

#[test]
fn an_independent_decoder_agrees_with_emitted_frames() {
    for v6 in [false, true] {
        for vlan in [tags(0), tags(1), tags(2)] {
            let path = path(v6, vlan);
            let bytes = frame(&path, &fields(), b"some payload");
            let packet = SlicedPacket::from_ethernet(&bytes).expect("etherparse reads it");
            assert_eq!(packet.vlan_ids().len(), vlan.0.iter().flatten().count());
            let (Some(net), Some(TransportSlice::Tcp(tcp))) = (&packet.net, &packet.transport) else {
                panic!("no TCP")
            };
            let checksum = match net {
                NetSlice::Ipv4(ip) => {
                    assert_eq!(ip.header().header_checksum(), ip.header().to_header().calc_header_checksum());
                    assert!(ip.header().dont_fragment());
                    tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()).unwrap()
                }
                NetSlice::Ipv6(ip) => {
                    tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()).unwrap()
                }
                NetSlice::Arp(_) => panic!("not ARP"),
            };
            assert_eq!(tcp.checksum(), checksum);
            assert_eq!(tcp.payload(), b"some payload");
            assert_eq!((tcp.source_port(), tcp.destination_port()), (4791, 50_000));
        }
    }
}

#[test]
fn emitted_segments_are_read_back() {
    for v6 in [false, true] {
        for vlan in [tags(0), tags(1), tags(2)] {
            let path = path(v6, vlan);
            let mut bytes = frame(&path, &fields(), b"payload");
            let end = bytes.len();
            bytes.extend([0x55; 9]); // Ethernet padding
            let segment = segment_of(parse_bytes(&bytes));
            assert_eq!(segment.flow, mirrored(&path).flow);
            assert_eq!((segment.vlan, segment.ecn), (vlan, Ecn::Ect0));
            let want = fields();
            assert_eq!((segment.seq, segment.ack, segment.flags), (want.seq, want.ack, want.flags));
            assert_eq!((segment.window, segment.options), (want.window, want.options));
            assert_eq!((segment.payload_start, segment.payload_len), (end - 7, 7));
        }
    }
}

#[test]
fn every_truncation_and_every_flipped_bit_is_rejected() {
    for v6 in [false, true] {
        let bytes = frame(&path(v6, tags(1)), &fields(), b"payload!");
        for len in 0..bytes.len() {
            assert_eq!(parse_bytes(&bytes[..len]), Err(Malformed::Truncated), "{len} of {}", bytes.len());
        }
        for bit in 18 * 8..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let parsed = parse_bytes(&flipped);
            // IPv6 has no header checksum: no checksum covers its traffic class, flow label and hop limit, and a
            // different next header makes it a different packet.
            let uncovered = v6 && (bit / 8 < 22 || (24..26).contains(&(bit / 8)));
            assert!(uncovered || parsed.is_err(), "bit {bit} flipped: {parsed:?}");
        }
    }
}

#[test]
fn ipv4_options_are_skipped_and_fragments_rejected() {
    let plain = frame(&path(false, VlanTags::default()), &fields(), b"x");
    let mut long = plain[..34].to_vec();
    long[14] = 0x46;
    long[16..18].copy_from_slice(&(plain.len() as u16 - 14 + 4).to_be_bytes());
    long.extend([0x94, 4, 0, 0]); // router alert
    long.extend(&plain[34..]);
    long[24..26].copy_from_slice(&[0, 0]);
    let sum = slow_checksum(&long[14..38], &[]);
    long[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(segment_of(parse_bytes(&long)).payload_start, plain.len() - 1 + 4);

    // A loose and a strict source route (RFC 1122 section 3.2.1.8).
    for route in [131, 137] {
        let mut routed = long.clone();
        routed[34..38].copy_from_slice(&[1, route, 3, 4]);
        routed[24..26].copy_from_slice(&[0, 0]);
        let sum = slow_checksum(&routed[14..38], &[]);
        routed[24..26].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(parse_bytes(&routed), Err(Malformed::SourceRoute));
    }

    for fragment in [[0x20, 0], [0, 1]] {
        let mut bytes = plain.clone();
        bytes[20..22].copy_from_slice(&fragment);
        bytes[24..26].copy_from_slice(&[0, 0]);
        let sum = slow_checksum(&bytes[14..34], &[]);
        bytes[24..26].copy_from_slice(&sum.to_be_bytes());
        assert_eq!(parse_bytes(&bytes), Err(Malformed::Fragment));
    }
    let mut v6 = frame(&path(true, VlanTags::default()), &fields(), b"x");
    v6[20] = 44;
    // More fragments: the first bytes of the TCP header stand for a fragment header here.
    v6[57] = 1;
    assert_eq!(parse_bytes(&v6), Err(Malformed::Fragment));
}

/// Headers, each with its type.
type Extensions<'a> = &'a [(u8, &'a [u8])];

/// The frame of `plain` (IPv6) with headers between IP and TCP, each with its type; their first byte is filled in.
fn with_extensions(plain: &[u8], headers: Extensions<'_>) -> Vec<u8> {
    let extra: usize = headers.iter().map(|(_, bytes)| bytes.len()).sum();
    let mut long = plain[..54].to_vec();
    long[18..20].copy_from_slice(&((plain.len() - 54 + extra) as u16).to_be_bytes());
    let types: Vec<u8> = headers.iter().map(|(kind, _)| *kind).chain([6]).collect();
    long[20] = types[0];
    for ((_, bytes), next) in headers.iter().zip(&types[1..]) {
        long.push(*next);
        long.extend(&bytes[1..]);
    }
    long.extend(&plain[54..]);
    long
}

/// Options and whole "fragments" are skipped, as kernel TCP does.
#[test]
fn rfc8200_s4_extension_headers_are_skipped_unless_they_forbid_it() {
    const HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const DESTINATION: u8 = 60;
    let plain = frame(&path(true, VlanTags::default()), &fields(), b"x");
    let pad = [0, 0, 1, 4, 0, 0, 0, 0];
    let longer = [0, 1, 0x1e, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 1, 0];
    let whole = [0, 0, 0, 0, 0, 0, 0, 7];
    let arrived = [0, 0, 0, 0, 0, 0, 0, 0];
    let skipped: [Extensions<'_>; 5] = [
        &[(HOP, &pad)],
        &[(DESTINATION, &longer)],
        &[(FRAGMENT, &whole)],
        &[(HOP, &longer), (DESTINATION, &pad), (ROUTING, &arrived), (FRAGMENT, &whole)],
        &[(DESTINATION, &pad[..]); 8],
    ];
    for headers in skipped {
        let long = with_extensions(&plain, headers);
        let extra = long.len() - plain.len();
        let segment = segment_of(parse_bytes(&long));
        assert_eq!(segment.payload_start, plain.len() - 1 + extra, "{headers:?}");
        assert_eq!(
            segment,
            Segment { payload_start: segment.payload_start, ..segment_of(parse_bytes(&plain)) }
        );
        for len in 54..54 + extra {
            assert!(parse_bytes(&long[..len]).is_err(), "{headers:?}: {len} bytes");
        }
    }
    let first = [0, 0, 0, 1, 0, 0, 0, 7];
    let on_its_way = [0, 0, 0, 1, 0, 0, 0, 0];
    let discard = [0, 0, 0x40, 4, 0, 0, 0, 0];
    let beyond = [0, 0, 1, 9, 0, 0, 0, 0];
    let refused: [(Extensions<'_>, Malformed); 6] = [
        (&[(FRAGMENT, &first)], Malformed::Fragment),
        (&[(ROUTING, &on_its_way)], Malformed::SourceRoute),
        (&[(DESTINATION, &discard)], Malformed::Extension),
        (&[(DESTINATION, &beyond)], Malformed::HeaderLength),
        (&[(DESTINATION, &pad), (HOP, &pad)], Malformed::Extension),
        (&[(DESTINATION, &pad[..]); 9], Malformed::Extension),
    ];
    for (headers, reason) in refused {
        assert_eq!(parse_bytes(&with_extensions(&plain, headers)), Err(reason), "{headers:?}");
    }
}

#[test]
fn a_checksum_left_to_hardware_is_accepted_and_reported() {
    let mut bytes = frame(&path(false, VlanTags::default()), &fields(), b"payload");
    let len = (bytes.len() - 34) as u16;
    let pseudo = super::ip::pseudo_header([10, 1, 0, 1].into(), [10, 1, 0, 2].into(), 6, len.into());
    bytes[50..52].copy_from_slice(&pseudo.fold().to_be_bytes());
    let segment = segment_of(parse_bytes(&bytes));
    assert!(segment.partial_checksum);
    bytes[50] ^= 1;
    assert_eq!(parse_bytes(&bytes), Err(Malformed::Checksum));
}

#[test]
fn addresses_that_no_connection_can_have_are_rejected() {
    for (local, remote) in [
        ("224.0.0.1:1", "10.0.0.2:2"),
        ("0.0.0.0:1", "10.0.0.2:2"),
        ("10.0.0.1:0", "10.0.0.2:2"),
        ("[ff02::1]:1", "[fd00::2]:2"),
        ("10.0.0.1:1", "224.0.0.1:2"),
        ("10.0.0.1:1", "255.255.255.255:2"),
        ("10.0.0.1:1", "10.0.0.2:0"),
        ("[fd00::1]:1", "[ff02::1]:2"),
        ("[::]:1", "[fd00::2]:2"),
        // RFC 1122 section 3.2.1.3: loopback, reserved, "this network".
        ("10.0.0.1:1", "127.0.0.1:2"),
        ("127.9.9.9:1", "10.0.0.2:2"),
        ("10.0.0.1:1", "240.0.0.1:2"),
        ("10.0.0.1:1", "0.1.2.3:2"),
        ("[fd00::1]:1", "[::1]:2"),
    ] {
        let mut path = path(false, VlanTags::default());
        path.flow = Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() };
        assert_eq!(
            parse_bytes(&frame(&path, &fields(), b"")),
            Err(Malformed::Address),
            "{local} to {remote}"
        );
    }
}

/// A link whose frames do not leave the host.
struct WithinHost(SimLink);

impl Link for WithinHost {
    crate::forward_link!(0: chunk_bytes, offloads_checksums, tx_available, rx_capacity, rx_available, receive, rx_chunks,
        rx_head, recycle, alloc, tx_chunks_into, submit, release, flush, steer, unsteer);

    fn is_within_host(&self) -> bool {
        true
    }
}

#[test]
fn loopback_addresses_are_ends_of_connections_within_a_host() {
    for (local, remote, taken) in [
        ("127.0.0.1:1", "127.0.0.1:2", true),
        ("127.77.0.1:1", "127.77.0.2:2", true),
        ("[::1]:1", "[::1]:2", true),
        ("127.0.0.1:1", "224.0.0.1:2", false),
        ("[::1]:1", "[ff02::1]:2", false),
    ] {
        let mut path = path(local.starts_with('['), VlanTags::default());
        path.flow = Flow { local: local.parse().unwrap(), remote: remote.parse().unwrap() };
        let bytes = frame(&path, &fields(), b"");
        let (mut a, b) = links(4096);
        a.inject(&bytes);
        let mut batch = Vec::new();
        let mut within = WithinHost(b);
        within.receive(&mut batch, 1);
        let frame = batch.pop().expect("one frame");
        let parsed = parse(&within, &frame);
        within.recycle(frame);
        assert_eq!(matches!(parsed, Ok(Inbound::Tcp(_))), taken, "{local} to {remote}: {parsed:?}");
    }
}

#[test]
fn packets_other_than_tcp_are_other() {
    let mut arp = vec![0xff; 6];
    arp.extend([2, 0, 0, 0, 0, 1, 0x08, 0x06]);
    arp.extend([0; 46]);
    assert_eq!(parse_bytes(&arp), Ok(Inbound::Other));
    let mut udp = frame(&path(true, VlanTags::default()), &fields(), b"");
    udp[20] = 17;
    assert_eq!(parse_bytes(&udp), Ok(Inbound::Other));
    let mut three_tags = frame(&path(false, tags(2)), &fields(), b"");
    three_tags.splice(12..12, [0x88, 0xa8, 0, 1]);
    assert_eq!(parse_bytes(&three_tags), Ok(Inbound::Other));
}

/// An ICMP error from a router, quoting `quoted` from its IP header on.
fn icmp(v6: bool, header: [u8; 8], quoted: &[u8]) -> Vec<u8> {
    let mut message = header.to_vec();
    message.extend_from_slice(quoted);
    let mut out = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9];
    if v6 {
        let (from, to): (std::net::Ipv6Addr, std::net::Ipv6Addr) =
            ("fd00::9".parse().unwrap(), "fd00::1".parse().unwrap());
        let pseudo = super::ip::pseudo_header(from.into(), to.into(), 58, message.len());
        let sum = Sum::of(&message).and(pseudo).checksum();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        out.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        out.extend((message.len() as u16).to_be_bytes());
        out.extend([58, 64]);
        out.extend(from.octets());
        out.extend(to.octets());
    } else {
        let sum = Sum::of(&message).checksum();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        out.extend([8, 0, 0x45, 0]);
        out.extend((message.len() as u16 + 20).to_be_bytes());
        out.extend([0, 0, 0, 0, 64, 1, 0, 0, 10, 9, 9, 9, 10, 1, 0, 1]);
        let sum = slow_checksum(&out[14..34], &[]);
        out[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    out.extend(message);
    out
}

#[test]
fn icmp_errors_name_our_flow_sequence_number_and_mtu() {
    for v6 in [false, true] {
        let path = path(v6, VlanTags::default());
        let quoted = &frame(&path, &fields(), b"some payload")[14..];
        let shortest = if v6 { 48 } else { 28 };
        let too_big = if v6 { [2, 0, 0, 0, 0, 0, 5, 0x14] } else { [3, 4, 0, 0, 0, 0, 5, 0x14] };
        for len in 0..quoted.len() {
            let want = IcmpError { flow: path.flow, seq: fields().seq, kind: IcmpKind::TooBig { mtu: 1300 } };
            let want = if len < shortest { Inbound::Other } else { Inbound::Icmp(want) };
            assert_eq!(parse_bytes(&icmp(v6, too_big, &quoted[..len])), Ok(want), "{len} bytes quoted");
        }
        let port = if v6 { [1, 4, 0, 0, 0, 0, 0, 0] } else { [3, 3, 0, 0, 0, 0, 0, 0] };
        let host = if v6 { [1, 3, 0, 0, 0, 0, 0, 0] } else { [3, 1, 0, 0, 0, 0, 0, 0] };
        for (header, hard) in [(port, true), (host, false)] {
            let Ok(Inbound::Icmp(error)) = parse_bytes(&icmp(v6, header, quoted)) else { panic!("no error") };
            assert_eq!(error.kind, IcmpKind::Unreachable { hard });
        }
        let echo = if v6 { [128, 0, 0, 0, 0, 0, 0, 1] } else { [8, 0, 0, 0, 0, 0, 0, 1] };
        assert_eq!(parse_bytes(&icmp(v6, echo, quoted)), Ok(Inbound::Other));
        // Source Quench (RFC 6633); there is none in IPv6.
        assert_eq!(parse_bytes(&icmp(v6, [4, 0, 0, 0, 0, 0, 0, 0], quoted)), Ok(Inbound::Other));
        let mut broken = icmp(v6, too_big, quoted);
        *broken.last_mut().unwrap() ^= 1;
        assert_eq!(parse_bytes(&broken), Err(Malformed::Checksum));
    }
}

/// Sends a RST for `segment` and reads it at the other end.
fn reset_for(segment: &Segment) -> Option<Segment> {
    let (mut a, mut b) = links(4096);
    assert!(send_reset(&mut a, segment, 0, HOP_LIMIT));
    a.flush();
    assert_eq!(a.census().tx_out, 0);
    let mut batch = Vec::new();
    b.receive(&mut batch, 1);
    batch.pop().map(|frame: RxFrame| {
        let parsed = parse(&b, &frame);
        b.recycle(frame);
        segment_of(parsed)
    })
}

#[test]
fn rfc9293_s3_10_7_1_resets_for_unknown_connections() {
    let with_ack = segment_of(parse_bytes(&frame(&path(true, tags(2)), &fields(), b"abc")));
    let reset = reset_for(&with_ack).expect("a RST");
    assert_eq!(reset.seq, with_ack.ack);
    assert_eq!(reset.flags, Flags { rst: true, ..Flags::default() });
    assert_eq!(reset.flow, Flow { local: with_ack.flow.remote, remote: with_ack.flow.local });
    assert_eq!(reset.vlan, with_ack.vlan);

    let syn = segment_of(parse_bytes(&linux_syn()));
    let reset = reset_for(&syn).expect("a RST");
    assert_eq!((reset.seq, reset.ack), (SeqNum::new(0), syn.seq.add(1)));
    assert_eq!(reset.flags, Flags { rst: true, ack: true, ..Flags::default() });
    assert_eq!(reset_for(&reset), None, "a RST is not answered");
}

#[test]
fn rfc7323_s5_2_a_reset_echoes_the_timestamp_that_it_answers() {
    let syn = segment_of(parse_bytes(&linux_syn()));
    let sent = syn.options.timestamps.expect("Linux offers timestamps");
    let reset = reset_for(&syn).expect("a RST");
    assert_eq!(reset.options.timestamps, Some(Timestamps { value: 0, echo: sent.value }));
    let without = Segment { options: Options::default(), ..syn };
    assert_eq!(reset_for(&without).expect("a RST").options.timestamps, None);
}

proptest! {
    #[test]
    fn prop_any_bytes_parse_or_fail_without_panic(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..160), v6: bool, tagged: bool,
    ) {
        let _ = parse_bytes(&bytes);
        // The same bytes after valid headers, which lead deeper into the parser.
        let start: &[u8] = match (v6, tagged) {
            (false, false) => &[8, 0, 0x45],
            (true, false) => &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 60, 6],
            (false, true) => &[0x81, 0, 0, 5, 8, 0, 0x46],
            (true, true) => &[0x81, 0, 0, 5, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 60, 58],
        };
        if let Some(to) = bytes.get_mut(12..12 + start.len()) {
            to.copy_from_slice(start);
        }
        let _ = parse_bytes(&bytes);
    }

    #[test]
    fn prop_segments_are_read_as_written(
        seq: u32, ack: u32, window: u16, bits: u8, v6: bool, n in 0usize..3,
        payload in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let bit = |n: u8| bits & (1 << n) != 0;
        let flags = Flags {
            fin: bit(0), syn: bit(1), rst: bit(2), psh: bit(3), ack: bit(4), ece: bit(6), cwr: bit(7),
        };
        let fields = Fields { seq: SeqNum::new(seq), ack: SeqNum::new(ack), flags, window, ..fields() };
        let path = path(v6, tags(n));
        let segment = segment_of(parse_bytes(&frame(&path, &fields, &payload)));
        prop_assert_eq!((segment.seq, segment.ack, segment.flags), (fields.seq, fields.ack, fields.flags));
        prop_assert_eq!((segment.window, segment.payload_len), (window, payload.len()));
    }
}

/// Overwrites the checksums by right ones, that of TCP with `partial` by the sum of the pseudo-header, of a frame without tags whose
/// IPv4 header has no options.
fn correct_checksums(frame: &mut [u8], v6: bool, partial: bool) {
    let (start, addresses) = if v6 { (54, 22..54) } else { (34, 26..34) };
    if frame.len() < start + 20 {
        return;
    }
    if !v6 {
        frame[24..26].fill(0);
        let sum = slow_checksum(&frame[14..34], &[]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
    }
    frame[start + 16..start + 18].fill(0);
    let len = (frame.len() - start) as u16;
    let mut pseudo = frame[addresses].to_vec();
    pseudo.extend([0, 6]);
    pseudo.extend(len.to_be_bytes());
    let mut segment = frame[start..].to_vec();
    segment.resize(segment.len().next_multiple_of(2), 0);
    let sum = if partial { !slow_checksum(&[], &pseudo) } else { slow_checksum(&segment, &pseudo) };
    frame[start + 16..start + 18].copy_from_slice(&sum.to_be_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn prop_the_fast_path_through_the_parser_agrees_with_the_general_one(
        v6: bool, bits in 0u8..8, n in prop_oneof![4 => Just(0usize), 1 => 1usize..3], stamped in prop::bool::weighted(0.9),
        payload in prop::collection::vec(any::<u8>(), 0..300),
        changes in prop::collection::vec((0usize..100, any::<u8>()), 0..4),
        padding in 0usize..8, cut in prop_oneof![3 => Just(0usize), 1 => 0usize..120], correct: bool, partial: bool,
    ) {
        let bit = |n: u8| bits & (1 << n) != 0;
        let flags = Flags { ack: !bit(0), psh: bit(1), fin: bit(0) && bit(2), ..Flags::default() };
        let options = if stamped { fields().options } else { Options::default() };
        let mut bytes = frame(&path(v6, tags(n)), &Fields { flags, options, ..fields() }, &payload);
        for (at, byte) in changes {
            if let Some(to) = bytes.get_mut(at) {
                *to = byte;
            }
        }
        if correct && n == 0 {
            correct_checksums(&mut bytes, v6, partial);
        }
        bytes.resize(bytes.len() + padding, 0);
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        let (mut a, mut b) = links(4096);
        a.inject(&bytes);
        let mut batch = Vec::new();
        b.receive(&mut batch, 1);
        if let Some(frame) = batch.pop() {
            prop_assert_eq!(parse(&b, &frame), parse::parse_any(&b.rx_chunks(&frame), &frame));
            b.recycle(frame);
        }
    }
}

/// The frames of `bytes` as `link` receives them in chunks of `chunk_bytes`, and the link.
fn received(chunk_bytes: usize, bytes: [&[u8]; 2]) -> (SimLink, Vec<RxFrame>) {
    let (_, mut a, mut b) = Wire::new(WireConfig { chunk_bytes, rx_chunks: 64, ..WireConfig::default() });
    for bytes in bytes {
        a.inject(bytes);
    }
    let mut batch = Vec::new();
    b.receive(&mut batch, 2);
    (b, batch)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// What a template recognises is what the parser returns.
    #[test]
    fn prop_a_template_agrees_with_the_parser(
        first in prop::collection::vec(any::<u8>(), 0..300), payload in prop::collection::vec(any::<u8>(), 0..600),
        psh: bool, fin in prop::bool::weighted(0.1), v6: bool, numbers: [u32; 2], window: u16,
        changes in prop::collection::vec((0usize..100, any::<u8>()), 0..3),
        padding in 0usize..8, cut in prop_oneof![3 => Just(0usize), 1 => 0usize..120], correct: bool, partial: bool,
        chunk_bytes in prop_oneof![2 => Just(4096usize), 1 => 100usize..300],
    ) {
        let path = path(v6, VlanTags::default());
        let flags = Flags { ack: true, psh, fin, ..Flags::default() };
        let [seq, ack] = numbers.map(SeqNum::new);
        let before = Fields { flags: Flags { ack: true, ..Flags::default() }, ..fields() };
        let timestamps = Some(Timestamps { value: seq.value(), echo: ack.value() });
        let options = Options { timestamps, ..before.options };
        let mut first = frame(&path, &before, &first);
        let mut bytes = frame(&path, &Fields { seq, ack, flags, window, options, ..before }, &payload);
        if partial {
            correct_checksums(&mut first, v6, true);
            correct_checksums(&mut bytes, v6, true);
        }
        let unchanged = changes.is_empty() && cut == 0 && !fin;
        for (at, byte) in changes {
            if let Some(to) = bytes.get_mut(at) {
                *to = byte;
            }
        }
        if correct {
            correct_checksums(&mut bytes, v6, partial);
        }
        bytes.resize(bytes.len() + padding, 0);
        bytes.truncate(bytes.len() - cut.min(bytes.len()));
        let (mut link, frames) = received(chunk_bytes, [&first, &bytes]);
        if let [first, second] = frames.as_slice() {
            let template = Template::new(&link, first, &segment_of(parse(&link, first)));
            prop_assert!(template.is_some());
            let plain = template.as_ref().and_then(|template| template.read(&link, second));
            prop_assert!(plain.is_some() || !unchanged);
            if let Some((template, plain)) = template.zip(plain) {
                let segment = template.segment(&plain, second.queue());
                prop_assert_eq!(segment.predictable(), Some(plain));
                // The sum of the pseudo-header may be the complete checksum by chance.
                let parsed = Segment { partial_checksum: segment.partial_checksum, ..segment_of(parse(&link, second)) };
                prop_assert_eq!(parsed, segment);
            }
        }
        for frame in frames {
            link.recycle(frame);
        }
    }

    #[test]
    fn prop_a_sum_is_correct_if_it_folds_to_all_ones(words in prop::collection::vec(any::<[u8; 4]>(), 0..9)) {
        let sum = words.iter().fold(Sum::default(), |sum, word| sum.and(Sum::of_u32(*word)));
        let whole = sum.and_word(sum.checksum());
        prop_assert_eq!(sum.is_correct(), sum.fold() == 0xffff);
        prop_assert_eq!(whole.is_correct(), whole.fold() == 0xffff);
    }
}

/// The last option of a kind counts, even an empty one: it replaces the earlier option.
#[test]
fn rfc2018_s3_an_empty_sack_option_replaces_an_earlier_one() {
    let options = [5, 10, 0, 0, 0, 1, 0, 0, 0, 2, 5, 2];
    assert_eq!(Options::parse(&options), Options::default());
}

#[test]
fn rfc9293_s3_9_1_9_and_s3_9_2_dscp_and_hop_limit_are_emitted() {
    let emit = |v6| {
        let mut bytes = [0; MAX_HEADER_BYTES];
        let headers = Headers::new(&path(v6, VlanTags::default())).with_service(0b10_1110, 7);
        headers.emit(&mut bytes, &fields(), 0, Sum::default()).expect("room");
        bytes
    };
    let v4 = emit(false);
    assert_eq!((v4[15], v4[22]), (0b1011_1010, 7), "next to ECT(0)");
    assert_eq!(Sum::of(&v4[14..34]).fold(), 0xffff, "the header checksum is updated");
    let v6 = emit(true);
    assert_eq!((v6[14], v6[15], v6[21]), (0b0110_1011, 0b1010_0000, 7));
}
