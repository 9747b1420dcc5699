use etherparse::{IpFragOffset, IpNumber, Ipv4Header, Ipv6FragmentHeader, Ipv6Header, SlicedPacket};

use super::*;

const PAYLOAD: usize = 1400;

/// A segment: the other decoder reads the length of its header.
fn payload() -> Vec<u8> {
    (0..PAYLOAD).map(|at| if at == 12 { 5 << 4 } else { (at % 251) as u8 }).collect()
}

/// A fragment of the packet `id` from host `source`, with bytes `range` of `payload`.
fn fragment(v6: bool, source: u8, id: u16, range: std::ops::Range<usize>, payload: &[u8]) -> Vec<u8> {
    let (more, offset) =
        (range.end < payload.len(), IpFragOffset::try_new((range.start / 8) as u16).unwrap());
    let part = &payload[range];
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if v6 {
        frame.extend([0x86, 0xdd]);
        let ip = Ipv6Header {
            payload_length: (part.len() + 8) as u16,
            next_header: IpNumber::IPV6_FRAGMENTATION_HEADER,
            hop_limit: 64,
            source: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, source],
            destination: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            ..Ipv6Header::default()
        };
        ip.write(&mut frame).unwrap();
        let header = Ipv6FragmentHeader::new(IpNumber::TCP, offset, more, id.into());
        frame.extend(header.to_bytes());
    } else {
        frame.extend([0x08, 0x00]);
        let mut ip =
            Ipv4Header::new(part.len() as u16, 64, IpNumber::TCP, [10, 0, 0, source], [10, 0, 0, 1]).unwrap();
        (ip.identification, ip.dont_fragment, ip.more_fragments, ip.fragment_offset) =
            (id, false, more, offset);
        ip.header_checksum = ip.calc_header_checksum();
        ip.write(&mut frame).unwrap();
    }
    frame.extend(part);
    frame
}

fn parts(v6: bool, source: u8, id: u16) -> [Vec<u8>; 3] {
    let payload = payload();
    [0..560, 560..1120, 1120..PAYLOAD].map(|range| fragment(v6, source, id, range, &payload))
}

/// What another decoder reads from the whole frame.
fn assert_whole(frame: &[u8]) {
    let packet = SlicedPacket::from_ethernet(frame).unwrap_or_else(|error| panic!("{error}"));
    let ip = packet.net.as_ref().unwrap().ip_payload_ref().unwrap();
    assert_eq!((ip.fragmented, ip.ip_number), (false, IpNumber::TCP));
    assert_eq!(ip.payload, payload());
    if let Some(etherparse::NetSlice::Ipv4(ip)) = packet.net {
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum());
    }
}

#[test]
fn fragments_in_any_order_make_the_packet() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for v6 in [false, true] {
        for order in orders {
            let (mut held, parts, now) = (Reassembler::default(), parts(v6, 2, 7), Instant::now());
            for index in &order[..2] {
                assert_eq!(held.add(now, &parts[*index]), None);
                assert_eq!(held.add(now, &parts[*index]), None, "a duplicate");
            }
            assert_whole(&held.add(now, &parts[order[2]]).unwrap());
            assert!(held.0.is_empty());
        }
    }
}

#[test]
fn rfc3168_s5_3_a_mark_of_a_fragment_marks_the_packet() {
    for v6 in [false, true] {
        let (mut held, mut parts, now) = (Reassembler::default(), parts(v6, 2, 7), Instant::now());
        for part in &mut parts {
            part[15] |= if v6 { 0x20 } else { 2 };
        }
        parts[1][15] |= if v6 { 0x30 } else { 3 };
        if !v6 {
            for part in &mut parts {
                part[24..26].fill(0);
                let sum = !Sum::of(&part[14..34]).fold();
                part[24..26].copy_from_slice(&sum.to_be_bytes());
            }
        }
        held.add(now, &parts[0]);
        held.add(now, &parts[1]);
        let whole = held.add(now, &parts[2]).unwrap();
        assert_whole(&whole);
        assert_eq!(whole[15] & if v6 { 0x30 } else { 3 }, if v6 { 0x30 } else { 3 });
    }
}

#[test]
fn packets_of_others_do_not_mix() {
    for v6 in [false, true] {
        let (mut held, now) = (Reassembler::default(), Instant::now());
        let all = [(2, 7), (2, 8), (3, 7)].map(|(source, id)| parts(v6, source, id));
        for place in 0..2 {
            for parts in &all {
                assert_eq!(held.add(now, &parts[place]), None);
            }
        }
        for parts in &all {
            assert_whole(&held.add(now, &parts[2]).unwrap());
        }
    }
}

#[test]
fn rfc5722_s4_an_overlap_ends_the_packet() {
    for v6 in [false, true] {
        let payload = payload();
        for range in [552..1120, 0..568, 1112..PAYLOAD] {
            let (mut held, parts, now) = (Reassembler::default(), parts(v6, 2, 7), Instant::now());
            held.add(now, &parts[0]);
            held.add(now, &parts[1]);
            assert_eq!(held.add(now, &fragment(v6, 2, 7, range.clone(), &payload)), None);
            assert!(held.0.is_empty(), "{range:?}");
        }
        // Two ends, an end before another fragment, and a fragment that is no multiple of 8 bytes.
        let short = &payload[..1120];
        for wrong in [
            fragment(v6, 2, 7, 1128..PAYLOAD, &payload),
            fragment(v6, 2, 7, 560..1120, short),
            fragment(v6, 2, 7, 560..565, &payload),
        ] {
            let (mut held, parts, now) = (Reassembler::default(), parts(v6, 2, 7), Instant::now());
            held.add(now, &parts[2]);
            held.add(now, &wrong);
            assert!(held.0.is_empty(), "{}", held.0.len());
        }
    }
}

#[test]
fn attack_fragments_are_held_within_bounds() {
    for v6 in [false, true] {
        let (mut held, now) = (Reassembler::default(), Instant::now());
        for id in 0..1000 {
            held.add(now, &parts(v6, 2, id)[0]);
            assert!(held.0.len() <= MAX_PER_SOURCE);
        }
        for source in 0..200 {
            held.add(now, &parts(v6, source, 7)[0]);
            assert!(held.0.len() <= MAX_PACKETS);
        }
        // The newest is complete, the oldest is gone.
        let last = parts(v6, 199, 7);
        held.add(now, &last[1]);
        assert_whole(&held.add(now, &last[2]).unwrap());
        held.add(now, &parts(v6, 250, 7)[0]);
        let later = now + MAX_AGE;
        assert_eq!(held.add(later, &parts(v6, 250, 7)[1]), None);
        assert_eq!(held.0.len(), 1, "all others were too old");
        assert_eq!(held.add(later, &parts(v6, 250, 7)[2]), None);
    }
    // A packet in fragments of 8 bytes.
    let (mut held, payload, now) = (Reassembler::default(), payload(), Instant::now());
    for start in (0..=MAX_FRAGMENTS).map(|number| number * 8) {
        held.add(now, &fragment(false, 2, 7, start..start + 8, &payload));
    }
    assert!(held.0.is_empty());
}

#[test]
fn frames_that_are_cut_or_no_fragments_are_ignored() {
    for v6 in [false, true] {
        let one = &parts(v6, 2, 7)[0];
        for len in 0..one.len() {
            assert_eq!(Reassembler::default().add(Instant::now(), &one[..len]), None);
            assert!(parse(&one[..len]).is_none(), "{len} bytes");
        }
        assert!(parse(one).is_some());
        let mut tagged = one.clone();
        tagged.splice(12..12, [0x81, 0, 0, 42]);
        assert_eq!(parse(&tagged).unwrap().payload, parse(one).unwrap().payload);
    }
    let whole = fragment(false, 2, 7, 0..PAYLOAD, &payload());
    assert!(parse(&whole).is_none());
}
