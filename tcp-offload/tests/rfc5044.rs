//! RFC 5044: requirements that the other tests of MPA do not cover.
#![allow(dead_code, reason = "another test file uses the rest of the support module")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "mpa/support.rs"]
mod support;

use support::{Reference, connected, ulpdus};
use xwarp_tcp::mpa::MpaConfig;

/// Markers with bits set in their reserved half, covered by a correct CRC.
#[test]
fn rfc5044_s4_2_reserved_half_of_a_marker_is_ignored() {
    let data = ulpdus(&[1000]);
    let mut stream = Reference::new(&data, true, true);
    for marker in [0, 512] {
        stream.bytes[marker] = 0xff;
        stream.bytes[marker + 1] = 0x80;
    }
    let at = stream.bytes.len() - 4;
    let crc = crc32c::crc32c(&stream.bytes[..at]).to_le_bytes();
    stream.bytes[at..].copy_from_slice(&crc);
    let (_, mut end) = connected(true, true);
    let start = end.contiguous;
    end.receive(start, &stream.bytes);
    assert_eq!(end.ulp.delivered, data);
    assert!(end.ulp.stream_errors().is_empty());
}

#[test]
fn rfc5044_s4_4_crc_is_the_default() {
    assert!(MpaConfig::default().crc);
}
