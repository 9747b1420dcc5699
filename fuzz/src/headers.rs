//! Target: the RDMAP and DDP headers of a ULPDU, and the header of a segment of RDMA/TCP.
//!
//! An input is the ULPDU or the segment.

use xwarp_rnic::{
    ddp::{Header, Malformed, RawHeader, Versions},
    rdmap::{
        ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, AtomicRequest, AtomicResponse, Control,
        READ_REQUEST_BYTES, ReadRequest, TERMINATE_MAX_BYTES, TerminateHeader,
    },
};
use xwarp_tcp::rdma_tcp::{ConnectionId, HEADER_MAX_BYTES, SegmentHeader};

/// Runs one input.
pub fn target(data: &[u8]) {
    segment(data);
    for versions in [Versions::Ietf, Versions::Rdmac] {
        ddp(data, versions);
        for &byte in data.iter().take(2) {
            if let Ok(control) = Control::parse(byte, versions) {
                assert_eq!(Control::parse(control.byte(versions), versions), Ok(control));
            }
        }
    }
    terminate(data);
    let body = data.get(18..).unwrap_or_default();
    terminate(body);
    for bytes in [data, body] {
        let read = ReadRequest::parse(bytes);
        assert_eq!(read.is_some(), bytes.len() >= READ_REQUEST_BYTES);
        if let Some(read) = read {
            assert_eq!(read.to_bytes(), bytes[..READ_REQUEST_BYTES]);
        }
        let atomic = AtomicRequest::parse(bytes);
        assert_eq!(atomic.is_some(), bytes.len() >= ATOMIC_REQUEST_BYTES);
        if let Some(Some(atomic)) = atomic {
            assert_eq!(AtomicRequest::parse(&atomic.to_bytes()), Some(Some(atomic)));
            atomic.operation.apply(u64::MAX);
        }
        let response = AtomicResponse::parse(bytes);
        assert_eq!(response.is_some(), bytes.len() >= ATOMIC_RESPONSE_BYTES);
        if let Some(response) = response {
            assert_eq!(AtomicResponse::parse(&response.to_bytes()), Some(response));
        }
    }
}

fn segment(bytes: &[u8]) {
    let Ok(header) = SegmentHeader::parse(bytes, bytes.len()) else { return };
    let mut out = [0; HEADER_MAX_BYTES];
    let len = header.emit(ConnectionId(0), bytes.len() - header.bytes(), &mut out);
    assert_eq!(len, header.bytes());
    assert_eq!(SegmentHeader::parse(&out, bytes.len()), Ok(header), "round trip");
    // Version, length and Connection ID belong to the framing.
    assert_eq!((out[1], &out[12..len]), (bytes[1], &bytes[12..len]));
    for short in 0..len {
        assert!(SegmentHeader::parse(&bytes[..short], bytes.len()).is_err());
    }
}

fn ddp(bytes: &[u8], versions: Versions) {
    let raw = RawHeader::read(bytes);
    match Header::parse(bytes, versions) {
        Ok(header) | Err(Malformed::Version(_, header)) => {
            let mut out = [0; 18];
            assert_eq!(header.emit(versions, &mut out), header.bytes());
            assert_eq!(Header::parse(&out, versions), Ok(header), "round trip");
            assert_eq!(out[1..header.bytes()], bytes[1..header.bytes()]);
            let raw = raw.expect("a header of this length");
            assert_eq!(raw.as_bytes(), &bytes[..header.bytes()], "a quote equals the received bytes");
            for short in 0..header.bytes() {
                assert_eq!(Header::parse(&bytes[..short], versions), Err(Malformed::Truncated));
            }
        }
        Err(Malformed::Truncated) => assert!(raw.is_none()),
    }
}

fn terminate(bytes: &[u8]) {
    let Some(header) = TerminateHeader::parse(bytes) else {
        assert!(bytes.len() < 4);
        return;
    };
    let mut out = [0; TERMINATE_MAX_BYTES];
    let len = header.emit(&mut out);
    assert!(len >= 4, "it can be written");
    assert_eq!(TerminateHeader::parse(&out[..len]), Some(header), "round trip");
}
