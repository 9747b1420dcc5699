//! Target: MPA start-up frames, as bytes and through a session.
//!
//! An input is: settings, segment boundaries (a count, then that many bytes), the peer's stream.

use std::time::Duration;

use xwarp_tcp::{
    framing::FramingError,
    mpa::{Markers, MpaConfig, MpaReply, MpaRequest, RequestRevision, Rtr},
    ulp::Event,
};

use crate::{input::Input, session::End};

const REVISION_1: u8 = 8;
const PEER_TO_PEER: u8 = 16;
const RESPONDER: u8 = 32;
const PERMISSIVE: u8 = 64;
/// The first bytes of the stream are streaming data.
const STREAMING: u8 = 128;
const STREAMING_BYTES: usize = 16;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    let settings = input.u8();
    let cuts = input.u8();
    let cuts = input.bytes((cuts % 16).into());
    let stream = input.rest();
    requests(stream);
    replies(stream);
    let (whole, cut) = (session(settings, &[], stream), session(settings, cuts, stream));
    assert_eq!(whole.1, cut.1, "the result depends on the segmentation");
    // A responder reports the Request before it reports that the initiator did not wait for the Reply.
    if settings & RESPONDER == 0 {
        assert_eq!(whole.0, cut.0, "the result depends on the segmentation");
    }
}

fn requests(stream: &[u8]) {
    let parsed = MpaRequest::parse(stream);
    if let Ok(Some((request, len))) = &parsed {
        assert_eq!(MpaRequest::parse(&request.emit()).map(|r| r.map(|(r, _)| r)), Ok(Some(request.clone())));
        for short in 0..*len {
            assert_eq!(MpaRequest::parse(&stream[..short]), Ok(None), "{short} of {len} bytes");
        }
    }
}

fn replies(stream: &[u8]) {
    let parsed = MpaReply::parse(stream);
    if let Ok(Some((reply, len))) = &parsed {
        assert_eq!(MpaReply::parse(&reply.emit()).map(|r| r.map(|(r, _)| r)), Ok(Some(reply.clone())));
        for short in 0..*len {
            assert_eq!(MpaReply::parse(&stream[..short]), Ok(None), "{short} of {len} bytes");
        }
    }
}

fn config(settings: u8) -> MpaConfig {
    MpaConfig {
        markers: [Markers::Prefer, Markers::Require, Markers::Off][usize::from(settings & 3) % 3],
        crc: settings & 4 != 0,
        revision: if settings & REVISION_1 != 0 { RequestRevision::One } else { RequestRevision::PreferTwo },
        permissive: settings & PERMISSIVE != 0,
        streaming: (settings & STREAMING != 0).then_some(Duration::from_secs(1)),
        peer_to_peer: if settings & PEER_TO_PEER != 0 && settings & REVISION_1 == 0 {
            vec![Rtr::Write, Rtr::Read]
        } else {
            Vec::new()
        },
        ..MpaConfig::default()
    }
}

/// Feeds a session with `stream`; returns the events and the error, if any.
fn session(settings: u8, cuts: &[u8], stream: &[u8]) -> (Vec<Event>, Option<FramingError>) {
    let config = config(settings);
    let responder = settings & RESPONDER != 0;
    let mut end = if responder { End::responder(config) } else { End::initiator(config) };
    let mut at = 0;
    let mut lengths = cuts.iter().map(|cut| usize::from(*cut).max(1));
    while at < stream.len() {
        let len = lengths.next().unwrap_or(1400).min(stream.len() - at);
        end.segment(at, &stream[at..at + len]);
        at += len;
    }
    if settings & STREAMING != 0 {
        end.begin_mpa(STREAMING_BYTES);
    }
    if responder && end.requested() {
        end.accept();
    }
    end.peer_closed();
    let failed = end.session.failed();
    let events = std::mem::take(&mut end.ulp.events);
    assert!(end.ulp.delivered.len() <= end.ulp.placed.len());
    end.over();
    (events, failed)
}
