//! The number of ACKs of a stream, and the delay of the last one (decision 2 in `docs/decisions`).

use std::time::Duration;

use xwarp_tcp::{sim::Faults, stack::Polling, tcp::TcpConfig};

use crate::support::Lab;

/// Bytes of a stream.
const STREAM: usize = 3_000_000;

/// A stream on a line of 10 Gbit/s.
struct Streamed {
    data_segments: u64,
    acks: u64,
    /// Time until the last byte was acknowledged.
    took: Duration,
}

/// Sends `bytes` to a server that receives each segment in a turn of its own.
fn stream(tcp: TcpConfig, polled: bool, bytes: usize) -> Streamed {
    let mut lab = Lab::new(tcp, 8);
    lab.server.stack.set_polling(if polled { Polling::Yes } else { Polling::No });
    for end in 0..2 {
        let (delay, rate_bytes) = (Duration::from_micros(2), Some(1_250_000_000));
        lab.wire.set_faults(end, Faults { delay, rate_bytes, ..Faults::default() });
    }
    let conn = lab.connect();
    lab.pass(Duration::from_millis(50));
    // The part of the stream that gets quick ACKs.
    lab.client.send(conn, STREAM / 10);
    lab.pass(Duration::from_secs(1));
    let counters =
        |lab: &Lab| (lab.client.stack.tcp_counters().segments_out, lab.server.stack.tcp_counters().acks_out);
    let (begin, before) = (lab.now, counters(&lab));
    lab.client.send(conn, bytes);
    while lab.client.stack.info(conn).unwrap().in_flight > 0 || lab.now == begin {
        lab.pass(Duration::from_micros(5));
    }
    let after = counters(&lab);
    lab.assert_no_errors();
    Streamed { data_segments: after.0 - before.0, acks: after.1 - before.1, took: lab.now.since(begin) }
}

#[test]
fn idle_turns_spare_the_acks_of_a_stream_while_the_application_polls() {
    let [polled, sleeping] = [true, false].map(|polled| stream(TcpConfig::default(), polled, STREAM));
    assert!(polled.acks <= polled.data_segments / 12, "{} of {}", polled.acks, polled.data_segments);
    assert!(sleeping.acks >= sleeping.data_segments / 2, "{} of {}", sleeping.acks, sleeping.data_segments);
}

/// The last segment is pushed, so its ACK does not wait for more.
#[test]
fn the_last_ack_of_a_message_is_not_held() {
    for bytes in [1_000, 2_900, 65_536] {
        let [polled, sleeping] = [true, false].map(|polled| stream(TcpConfig::default(), polled, bytes));
        let late = polled.took.saturating_sub(sleeping.took);
        assert!(late < Duration::from_micros(15), "{bytes} bytes were acknowledged {late:?} later");
    }
}
