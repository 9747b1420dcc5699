//! Streaming data before MPA: RFC 5044 sections 7.1.3 and 7.1.5.

use std::time::Duration;

use allocation_counter::measure;
use proptest::prelude::*;
use xwarp_tcp::{
    framing::SetupError,
    mpa::{Markers, MpaConfig, MpaError},
    tcp::Filled,
    time::Instant,
    ulp::Event,
};

use crate::support::{End, LISTENER, Reference, connect, path, ulpdus};

const LIMIT: Duration = Duration::from_secs(3);

fn config() -> MpaConfig {
    MpaConfig { streaming: Some(LIMIT), markers: Markers::Require, ..MpaConfig::default() }
}

/// Both ends of a connection whose TCP is established.
fn streaming() -> (End, End) {
    let mut ends = (End::initiator(config()), End::responder(config()));
    assert_eq!(ends.0.fill(1448, 1448), Err(Filled::Nothing), "no request yet");
    ends.0.report_streaming();
    ends.1.report_streaming();
    assert_eq!(ends.0.ulp.events, [Event::Streaming { listener: None, path: path() }]);
    assert_eq!(ends.1.ulp.events, [Event::Streaming { listener: Some(LISTENER), path: path() }]);
    ends
}

/// Transfers everything that `from` has to send.
fn carry(from: &mut End, to: &mut End) {
    for segment in from.fill_all(1448) {
        let offset = to.contiguous;
        assert!(to.receive(offset, &segment));
    }
}

/// The log-in of figure 9, with messages of these lengths, followed by MPA.
fn log_in(hello: usize, ack: usize) -> (End, End) {
    let (mut initiator, mut responder) = streaming();
    let [hello, ack] = [hello, ack].map(|len| ulpdus(&[len]).remove(0));
    assert_eq!(initiator.session.stream_send(&hello), Ok(hello.len()));
    carry(&mut initiator, &mut responder);
    assert_eq!(responder.stream_recv(1 << 16), hello);
    responder.begin_mpa(&ack).unwrap();
    carry(&mut responder, &mut initiator);
    assert_eq!(initiator.stream_recv(1 << 16), ack);
    initiator.begin_mpa(b"").unwrap();
    (initiator, responder)
}

proptest! {
    /// Markers count from the first FPDU, whatever streaming data was sent before.
    #[test]
    fn prop_rfc5044_s7_1_3_mpa_begins_after_the_streaming_data(hello in 0usize..3000, ack in 0usize..3000) {
        let (initiator, responder) = log_in(hello, ack);
        let (mut initiator, mut responder) = connect(initiator, responder);
        let data = ulpdus(&[20, 700, 1400, 3]);
        let stream = Reference::new(&data, true, true).bytes;
        let (from_initiator, from_responder) = (initiator.sent.len(), responder.sent.len());
        initiator.ulp.to_send = data.clone().into();
        carry(&mut initiator, &mut responder);
        responder.ulp.to_send = data.clone().into();
        carry(&mut responder, &mut initiator);
        prop_assert_eq!(&responder.ulp.delivered, &data);
        prop_assert_eq!(&initiator.ulp.delivered, &data);
        prop_assert!(initiator.sent[from_initiator..] == stream);
        prop_assert!(responder.sent[from_responder..] == stream);
        prop_assert_eq!(from_initiator, hello + 29, "the request has 29 bytes");
        prop_assert_eq!(from_responder, ack + 31, "the reply has 31");
        prop_assert_eq!((initiator.link.lent(), responder.link.lent()), (0, 0));
    }

    /// Bytes that the application has not read belong to MPA, wherever segments are cut.
    #[test]
    fn prop_rfc5044_s7_1_3_unread_bytes_belong_to_mpa(cut in 1usize..40) {
        let (mut initiator, mut responder) = streaming();
        initiator.session.stream_send(b"hello").unwrap();
        initiator.begin_mpa(b" there").unwrap();
        let stream = initiator.fill_all(1448).concat();
        for (number, piece) in stream.chunks(cut).enumerate().rev() {
            prop_assert!(responder.receive(number * cut, piece));
        }
        prop_assert_eq!(responder.stream_recv(11), b"hello there");
        responder.begin_mpa(b"").unwrap();
        let requested = matches!(responder.ulp.events.last(), Some(Event::Requested { .. }));
        prop_assert!(requested, "the request was held");
        responder.accept();
        carry(&mut responder, &mut initiator);
        prop_assert!(initiator.ulp.established().is_some());
    }
}

#[test]
fn rfc5044_s7_1_5_readable_data_is_reported_once_until_it_is_read() {
    let (_, mut end) = streaming();
    let readable = |end: &End| end.ulp.events.iter().filter(|e| **e == Event::StreamReadable).count();
    assert!(end.receive(1, b"b"));
    assert_eq!(readable(&end), 0, "a gap");
    assert!(end.receive(0, b"a"));
    assert!(end.receive(2, b"c"));
    assert_eq!(readable(&end), 1);
    assert_eq!(end.stream_recv(2), b"ab");
    assert!(end.receive(3, b"d"));
    assert_eq!(readable(&end), 1, "not everything was read");
    assert_eq!(end.stream_recv(9), b"cd");
    assert!(end.receive(4, b"e"));
    assert_eq!(readable(&end), 2);
    // Before the connection is reported, data waits.
    let mut end = End::responder(config());
    assert!(end.session.is_silent() && end.session.awaits_report());
    assert!(end.receive(0, b"early"));
    assert!(!end.session.is_silent());
    assert!(end.ulp.events.is_empty());
    end.report_streaming();
    assert!(!end.session.awaits_report());
    assert_eq!(end.ulp.events[1..], [Event::StreamReadable]);
}

#[test]
fn rfc5044_s7_1_5_streaming_data_is_bounded_in_both_directions() {
    let (mut end, _) = streaming();
    let bytes = vec![7; 70_000];
    assert_eq!(end.session.stream_send(&bytes), Ok(65_536));
    assert_eq!(end.session.stream_send(&bytes), Ok(0));
    assert_eq!(end.begin_mpa(b"x"), Err(SetupError::StreamBufferFull));
    assert_eq!(end.fill_all(1448).concat(), bytes[..65_536]);
    assert_eq!(end.session.stream_send(&bytes[..2]), Ok(2), "sent bytes make room");
    for at in (0..65_536).step_by(1024) {
        assert!(end.receive(at, &bytes[..1024]));
    }
    assert!(!end.receive(65_536, &bytes[..1024]), "TCP treats it as lost");
    assert_eq!(end.stream_recv(70_000).len(), 65_536);
    assert!(end.receive(65_536, &bytes[..1024]));
    end.session.release(&mut end.link);
    assert_eq!(end.link.lent(), 0);
}

/// The peer's window always leaves some bytes unsent, and the application always sends more.
#[test]
fn sent_streaming_data_uses_no_memory() {
    let (mut end, _) = streaming();
    let bytes = vec![7; 65_536];
    assert_eq!(end.session.stream_send(&bytes), Ok(65_536));
    end.sent.reserve(2 << 20);
    let used = measure(|| {
        for _ in 0..1000 {
            let sent = end.fill(1448, 1448).unwrap();
            assert_eq!(end.session.stream_send(&bytes[..sent.len()]), Ok(sent.len()));
        }
    });
    assert!(used.bytes_max < 4 * 65_536, "{} bytes for 64 KiB waiting to be sent", used.bytes_max);
}

#[test]
fn rfc5044_s7_1_2_rule_10_streaming_has_a_time_limit_and_then_the_start_up() {
    let (mut initiator, mut responder) = streaming();
    for end in [&mut initiator, &mut responder] {
        assert_eq!(end.session.deadline(), Some(Instant::ZERO + LIMIT));
    }
    responder.begin_mpa(b"now").unwrap();
    let limit = Instant::ZERO + MpaConfig::default().startup_timeout;
    assert_eq!(responder.session.deadline(), Some(limit), "for the request");
    for (end, at) in [(&mut initiator, Instant::ZERO + LIMIT), (&mut responder, limit)] {
        end.now = at;
        end.on_timer();
        assert_eq!(end.session.failed(), Some(MpaError::StartupTimeout.into()));
        assert_eq!(end.session.stream_send(b"late"), Err(SetupError::NotStreaming));
    }
}

#[test]
fn rfc5044_s7_1_5_streaming_ends_with_mpa_or_the_peers_fin() {
    let (mut initiator, mut responder) = log_in(5, 5);
    for end in [&mut initiator, &mut responder] {
        assert_eq!(end.session.stream_send(b"x"), Err(SetupError::NotStreaming));
        assert_eq!(end.session.stream_recv(&mut end.link, &mut [0]), Err(SetupError::NotStreaming));
        assert_eq!(end.begin_mpa(b""), Err(SetupError::NotStreaming));
    }
    let (mut end, _) = streaming();
    end.peer_closed();
    assert_eq!(end.session.failed(), Some(MpaError::Truncated.into()));
    // Without the setting there is no streaming data.
    let mut end = End::responder(MpaConfig::default());
    assert_eq!(end.session.stream_send(b"x"), Err(SetupError::NotStreaming));
    assert!(!end.session.awaits_report());
}

/// More streaming bytes of the peer are not a valid request.
#[test]
fn rfc5044_s7_1_2_invalid_bytes_where_mpa_should_begin_end_the_connection() {
    let (_, mut end) = streaming();
    assert!(end.receive(0, b"hello, and more"));
    assert_eq!(end.stream_recv(5), b"hello");
    end.begin_mpa(b"go").unwrap();
    assert_eq!(end.session.failed(), Some(MpaError::InvalidKey.into()));
}
