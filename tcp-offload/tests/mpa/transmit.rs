//! The transmit direction: a session frames as RFC 5044 section 4 requires, and no segment boundary cuts an FPDU.

use proptest::prelude::*;
use xwarp_tcp::tcp::Filled;

use crate::support::{Reference, connected, ulpdus};

proptest! {
    #[test]
    fn prop_transmit_agrees_with_the_reference(
        lengths in proptest::collection::vec(prop_oneof![0usize..80, 300usize..1400], 1..40),
        rooms in proptest::collection::vec(0usize..1448, 1..40),
        markers: bool,
        crc: bool,
    ) {
        let (mut end, _) = connected(markers, crc);
        let startup = end.sent.len();
        let data = ulpdus(&lengths);
        end.ulp.to_send = data.clone().into();
        end.ulp.finish = true;
        let mut borders = vec![startup];
        // Sometimes the window is too small for the next FPDU.
        for room in rooms {
            if end.fill(1448, room).is_ok() {
                borders.push(end.sent.len());
            }
        }
        while end.fill(1448, 1448).is_ok() {
            borders.push(end.sent.len());
        }
        prop_assert_eq!(end.fill(1448, 1448), Err(Filled::Finish));

        let reference = Reference::new(&data, markers, crc);
        prop_assert_eq!(&end.sent[startup..], &reference.bytes[..]);
        for border in borders {
            let at = border - startup;
            let between = at == 0 || reference.ranges.iter().any(|(_, end)| *end == at);
            prop_assert!(between, "a segment boundary at {} cuts an FPDU", at);
        }
        let ends: Vec<_> = reference.ranges.iter().map(|(_, end)| (startup + end) as u64).collect();
        prop_assert_eq!(end.ulp.pulled.iter().map(|(_, end)| *end).collect::<Vec<_>>(), ends);
        prop_assert_eq!(end.session.counters().ulpdus_sent, data.len() as u64);
    }
}

#[test]
fn rfc5044_s4_5_mulpdu_follows_the_emss_and_not_the_window() {
    let (mut end, _) = connected(true, true);
    end.ulp.to_send = ulpdus(&[1000]).into();
    assert_eq!(end.fill(1448, 400), Err(Filled::Nothing));
    assert_eq!(end.ulp.mulpdu, 1448 - 6 - 12);
    assert!(end.fill(1448, 1448).is_ok());
}

/// RFC 4821 section 6.2: TCP can probe only with real data. The probe is filled with whole FPDUs.
#[test]
fn a_path_mtu_probe_is_filled_to_its_last_byte() {
    for (markers, probe) in [(true, 1448), (true, 1409), (false, 1448), (true, 3000)] {
        let (mut end, _) = connected(markers, true);
        end.ulp.to_send = ulpdus(&[20_000]).into();
        assert_eq!(
            end.fill(1000, probe),
            Err(Filled::Nothing),
            "nothing fits, but the upper layer learns the room"
        );
        end.ulp.to_send = ulpdus(&[end.ulp.mulpdu]).into();
        assert_eq!(end.fill(1000, probe).map(|segment| segment.len()), Ok(probe & !3));
        assert_eq!(end.session.counters().ulpdus_sent, 1);
    }
}

#[test]
fn rfc5044_s5_1_several_small_fpdus_share_a_segment() {
    let (mut end, _) = connected(true, true);
    end.ulp.to_send = ulpdus(&[18; 200]).into();
    let segments = end.fill_all(1448);
    // 24 bytes each, and three markers in 1448 bytes.
    assert!(segments.len() == 4 && segments[0].len() > 1448 - 24);
}

/// RFC 5044 figure 6: an FPDU after one of 492 bytes, with its marker within the DDP segment.
#[test]
fn rfc5044_s4_3_figure_6_from_the_transmitter() {
    let (mut end, _) = connected(true, true);
    let startup = end.sent.len();
    let mut send = vec![0; 42];
    send[..2].copy_from_slice(&[0x41, 0x43]);
    send[13] = 2;
    // 492 bytes: the marker in front, length, 480 bytes of ULPDU with pad, CRC.
    end.ulp.to_send = [vec![0; 480], send].into();
    end.fill_all(1448);
    let second = &end.sent[startup + 0x1ec..];
    assert_eq!(second.len(), 0x34);
    assert_eq!(second[0x14..0x18], [0, 0, 0, 0x14]);
    assert_eq!(second[0x30..], [0x84, 0x92, 0x58, 0x98]);
}

/// A marker that is due between two FPDUs belongs to the second and contains zero (RFC 5044 section 4.3).
#[test]
fn rfc5044_s4_3_marker_between_fpdus_is_zero_and_in_the_crc_of_the_second() {
    let (mut end, _) = connected(true, true);
    let startup = end.sent.len();
    // 4 bytes of marker, 2 + 502 of length and ULPDU, 4 of CRC: 512.
    let data = ulpdus(&[502, 10]);
    end.ulp.to_send = data.into();
    end.fill_all(1448);
    let second = &end.sent[startup + 512..];
    assert_eq!(second[..6], [0, 0, 0, 0, 0, 10]);
    let (covered, crc) = second.split_at(second.len() - 4);
    assert_eq!(crc32c::crc32c(covered).to_le_bytes(), crc);
}

/// A marker right after the pad precedes the CRC and is covered by it (RFC 5044 section 4.4, 1).
#[test]
fn rfc5044_s4_4_marker_between_pad_and_crc() {
    let (mut end, _) = connected(true, true);
    let startup = end.sent.len();
    end.ulp.to_send = ulpdus(&[506, 10]).into();
    end.fill_all(1448);
    let stream = &end.sent[startup..];
    assert_eq!(stream[512..516], [0, 0, 0x01, 0xfc], "508 bytes back to the length field");
    assert_eq!(crc32c::crc32c(&stream[..516]).to_le_bytes(), stream[516..520]);
    assert_eq!(stream[520..522], [0, 10]);
}
