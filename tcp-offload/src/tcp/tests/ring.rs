//! Segments that find too few slots in the transmit ring, or no free frame. Their bytes have been taken from the source
//! already, so they count as sent, wait for the next turn, and precede everything behind them.

use super::{bulk, silent};
use crate::{
    sim::WireConfig,
    tcp::{
        PathMtuConfig, TcpConfig,
        testing::{Script, Stream, ms, offset},
    },
    wire::{Options, Segment},
};

/// More slots than any run needs.
const AMPLE: usize = 256;

fn offsets(segments: &[Segment]) -> Vec<i32> {
    segments.iter().filter(|s| s.payload_len > 0).map(offset).collect()
}

#[test]
fn bytes_that_wait_for_a_ring_slot_count_as_sent_once() {
    let mut script = Script::established(TcpConfig::default(), bulk(3));
    script.limit_ring(2);
    assert_eq!(offsets(&script.run()), [0, 1000], "the third is waiting");
    let waiting = script.conn.info();
    assert_eq!((waiting.counters.bytes_out, script.source.at), (3000, 3000));
    assert_eq!((waiting.in_flight, waiting.chunks_retained), (2000, 3));
    assert_eq!(offsets(&script.run()), [2000]);
    let sent = script.conn.info();
    assert_eq!((sent.counters.bytes_out, sent.in_flight), (3000, 3000));
    script.ack(3000, &[]);
    script.tear_down();
}

/// RFC 5682 section 3.1 step 2b: two new segments are sent. The first of them has found no slot.
#[test]
fn rfc5682_s3_1_new_data_of_f_rto_that_was_not_sent_precedes_more_new_data() {
    let mut script = Script::established(TcpConfig { rto_min: ms(3), ..TcpConfig::default() }, bulk(40));
    script.run();
    script.wait(ms(30));
    assert!(script.conn.counters().rto_expired > 0);
    let next = script.source.at as i32;
    script.limit_ring(0);
    assert!(script.ack(2000, &[]).is_empty());
    let filled = script.source.at as i32;
    assert!(filled > next, "a segment was filled and waits");
    script.limit_ring(AMPLE);
    assert_eq!(offsets(&script.run()), [next, filled]);
}

/// RFC 8985 section 7.3: a tail loss probe of new data exceeds a full congestion window.
#[test]
fn rfc8985_s7_3_a_probe_that_was_not_sent_precedes_more_new_data() {
    let mut script = Script::established(TcpConfig::default(), bulk(30));
    assert_eq!(script.run().len(), 10);
    script.limit_ring(0);
    assert!(script.wait(ms(150)).is_empty());
    let waiting = script.conn.info();
    assert_eq!((script.source.at, waiting.cwnd, waiting.in_flight), (11_000, 10_000, 10_000));
    assert_eq!(waiting.counters.rto_expired, 0);
    script.limit_ring(AMPLE);
    assert_eq!(offsets(&script.run()), [10_000], "one segment beyond the congestion window");
    let sent = script.conn.info();
    assert_eq!((script.source.at, sent.in_flight, sent.counters.tlp_probes), (11_000, 11_000, 1));
}

/// The undo of a reduction (RFC 4015) clears loss marks, but not that of a segment that was never transmitted.
#[test]
fn rfc3522_s3_2_a_segment_that_was_not_sent_stays_due_after_an_undo() {
    let mut script = Script::connecting(TcpConfig::default(), bulk(40));
    let clock = script.run()[0].options.timestamps.expect("offered").value;
    script.stamp(500, clock);
    script.syn_ack(Options { mss: Some(1012), sack_permitted: true, ..script.template.options });
    let original = script.run()[0].options.timestamps.expect("stamped").value;
    script.now += ms(5);
    script.stamp(501, original);
    // The retransmission finds a slot, the new data behind it does not.
    script.limit_ring(1);
    let next = script.source.at as i32;
    assert_eq!(offsets(&script.ack(0, &[(1000, 9000)])), [0]);
    assert!(script.source.at as i32 > next, "a segment was filled and waits");
    script.limit_ring(0);
    script.now += ms(1);
    script.ack(1000, &[(2000, 10_000)]);
    assert_eq!(script.conn.counters().undone, 1);
    script.limit_ring(AMPLE);
    assert_eq!(offsets(&script.run())[0], next);
}

/// A segment of three chunks finds too few slots, but an ACK finds one. Its sequence number must not cover bytes that
/// were not sent.
#[test]
fn an_ack_does_not_number_bytes_that_wait_for_ring_slots() {
    let links = WireConfig { chunk_bytes: 512, ..Script::links() };
    let mut script = Script::established_over(&links, TcpConfig::default(), silent());
    script.run();
    script.source = bulk(1);
    script.limit_ring(2);
    assert!(script.run().is_empty());
    assert_eq!(script.source.at, 1000, "the segment was filled and waits");
    script.data(0, 1000);
    let sent = script.data(1000, 1000);
    assert_eq!(sent.iter().map(|s| (offset(s), s.payload_len)).collect::<Vec<_>>(), [(0, 0)]);
    script.limit_ring(AMPLE);
    assert_eq!(offsets(&script.run()), [0]);
}

/// Otherwise two ends whose frames are all in flight would wait for each other's ACK.
#[test]
fn data_that_waits_for_frames_does_not_delay_acks() {
    let config = TcpConfig { reserve_chunks: 256, ..TcpConfig::default() };
    let mut script = Script::established(config, silent());
    script.run();
    script.source = bulk(1);
    assert!(script.run().is_empty(), "all frames are reserved");
    script.data(0, 1000);
    let sent = script.data(1000, 1000);
    assert_eq!((script.conn.contiguous(), script.source.at), (2000, 0));
    assert_eq!(sent.len(), 1, "{sent:?}");
    assert_eq!((sent[0].payload_len, sent[0].flags.ack), (0, true));
}

/// Silly window avoidance lets a peer open half of its window at a time, rounded down to its scale (RFC 9293 section
/// 3.8.6.2.2). A unit that is never cut must fit that, or it would never be sent.
#[test]
fn rfc9293_s3_8_6_2_2_a_unit_fits_half_of_the_largest_window() {
    let path_mtu = PathMtuConfig { probing: false, ..PathMtuConfig::default() };
    let config = TcpConfig { timestamps: false, path_mtu, ..TcpConfig::default() };
    let mut script = Script::connecting_over(&Script::links(), 9000, config, silent());
    script.run();
    script.template.window = 8000;
    script.syn_ack(Options { mss: Some(8960), sack_permitted: true, ..Options::default() });
    let unit = script.conn.emss();
    script.source = Stream::new(10 * unit as u64, unit, false);
    script.run();
    let mut acked = script.source.at as u32;
    assert!(acked > 0, "a unit of {unit} bytes fits the window of 8000");
    script.template.window = 3968;
    for _ in 0..10 {
        script.now += ms(1);
        script.ack(acked, &[]);
        acked = script.source.at as u32;
    }
    assert_eq!(script.source.at, script.source.total, "units of {unit} bytes");
}
