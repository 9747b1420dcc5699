//! The end of connections: by removal of their address, and through TIME-WAIT.

use std::time::Duration;

use xwarp_tcp::{
    link::{Link, RxFrame, rx_pieces},
    secret::Secret,
    sim::{Faults, Node, SimLink, path},
    stack::{Stack, StackConfig},
    tcp::{Keepalive, TcpConfig},
    ulp::{CloseReason, ConnId},
    wire::{
        Fields, Flags, Flow, Headers, Inbound, MAX_HEADER_BYTES, Options, Segment, Sum, Timestamps, parse,
    },
};

use crate::{
    flood::{forged, syn},
    support::{Lab, PORT, Upper},
};

#[test]
fn removing_an_address_resets_its_open_and_half_open_connections() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    for host in 0..10 {
        forged(&mut lab.stranger, host, 1024, &syn(7));
    }
    lab.pass(Duration::from_millis(1));
    assert_eq!((lab.server.stack.connections(), lab.server.stack.half_open()), (1, 10));
    let before = lab.server.stack.tcp_counters().segments_out;
    let other = "10.1.1.2".parse().unwrap();
    lab.server.stack.address_removed(lab.now, &mut lab.server.link, other);
    assert_eq!((lab.server.stack.connections(), lab.server.stack.half_open()), (1, 10));
    let address = "10.1.1.1".parse().unwrap();
    lab.server.stack.address_removed(lab.now, &mut lab.server.link, address);
    assert_eq!(lab.server.stack.half_open(), 0);
    lab.pass(Duration::from_millis(1));
    assert_eq!(lab.server.stack.connections(), 0);
    assert_eq!(lab.server.stack.tcp_counters().segments_out - before, 11, "a reset for each");
    assert_eq!(lab.server.link.census().rules, 1, "the listener's");
    assert_eq!(lab.client.upper.closed.get(&conn.index), Some(&CloseReason::Reset));
    lab.pass(Duration::from_secs(20));
    assert_eq!(lab.server.stack.tcp_counters().segments_out - before, 11, "no reset is retransmitted");
    lab.server.assert_nothing_leaked();
}

/// The server's last data and FIN arrive, but the client's acknowledgements are lost for 10 s. TIME-WAIT lasts as
/// long as the server retransmits, which thus learns that everything was delivered.
#[test]
fn rfc9293_s3_10_7_4_the_last_data_is_acknowledged_even_after_a_long_back_off() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    let server = lab.server.upper.established[0];
    // A responder waits for the initiator's first FPDU.
    lab.client.send(conn, 100);
    lab.pass(Duration::from_millis(5));
    lab.client.finish(conn);
    lab.server.send(server, 1000);
    lab.lose_until(Duration::from_secs(10));
    lab.pass(Duration::from_secs(25));
    assert_eq!(lab.client.upper.delivered, 1000);
    let closed = [lab.client.upper.closed.get(&conn.index), lab.server.upper.closed.get(&server.index)];
    assert_eq!(closed, [Some(&CloseReason::Graceful); 2]);
    lab.assert_no_errors();
}

/// Frames that have arrived at a link, with their parsed segments.
fn arrived(link: &mut SimLink) -> Vec<(RxFrame, Segment)> {
    let mut frames = Vec::new();
    link.receive(&mut frames, 64);
    let said = |frame: RxFrame| match parse(link, &frame) {
        Ok(Inbound::Tcp(segment)) => (frame, segment),
        other => panic!("not TCP: {other:?}"),
    };
    frames.into_iter().map(said).collect()
}

/// Injects a frame with `payload` on `flow`, to the client or the server.
fn inject(link: &mut SimLink, flow: Flow, fields: &Fields, payload: &[u8]) {
    let mut frame = vec![0; MAX_HEADER_BYTES];
    let mut path = path(flow.local, flow.remote);
    if flow.local.port() == PORT {
        (path.source_mac, path.next_hop_mac) = (path.next_hop_mac, path.source_mac);
    }
    let len = Headers::new(&path).emit(&mut frame, fields, payload.len(), Sum::of(payload)).unwrap();
    frame.truncate(len);
    frame.extend(payload);
    link.inject(&frame);
}

/// A client and the server's end of it in full operation.
fn connected(lab: &mut Lab) -> (ConnId, ConnId) {
    let conn = lab.connect();
    lab.pass(Duration::from_millis(5));
    lab.client.send(conn, 100);
    lab.pass(Duration::from_millis(5));
    (conn, lab.server.upper.established[0])
}

/// An application may abort a connection as soon as it has received the last message. The peer's message has arrived,
/// so it must not be reported as lost.
#[test]
fn received_data_is_acknowledged_before_a_reset() {
    for bytes in [0, 1000] {
        let mut lab = Lab::new(TcpConfig::default(), 8);
        let (conn, server) = connected(&mut lab);
        lab.client.send(conn, bytes);
        lab.client.turn(lab.now);
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
        for (frame, _) in arrived(&mut lab.server.link) {
            lab.server.stack.receive(lab.now, &mut lab.server.link, frame, &mut lab.server.upper);
        }
        assert_eq!(lab.server.upper.delivered, 100 + bytes as u64);
        lab.server.stack.abort(server);
        lab.server.turn(lab.now);
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
        let (frames, segments): (Vec<_>, Vec<_>) = arrived(&mut lab.client.link).into_iter().unzip();
        let (reset, acks) = segments.split_last().unwrap();
        assert!(reset.flags.rst, "{segments:?}");
        assert_eq!(acks.len(), usize::from(bytes > 0), "{segments:?}");
        assert!(acks.iter().all(|segment| !segment.flags.rst && segment.ack == reset.ack));
        for frame in frames {
            lab.client.stack.receive(lab.now, &mut lab.client.link, frame, &mut lab.client.upper);
        }
        assert_eq!(lab.client.upper.closed.get(&conn.index), Some(&CloseReason::Reset));
    }
}

/// In FIN-WAIT-2 one batch brings the peer's FIN, the data before it, and the SYN of a new incarnation.
#[test]
fn the_end_of_a_connection_is_reported_before_a_newer_syn_replaces_it() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let (conn, server) = connected(&mut lab);
    lab.client.finish(conn);
    lab.client.turn(lab.now);
    lab.now += Duration::from_millis(1);
    lab.wire.advance(lab.now);
    lab.server.send(server, 1000);
    lab.server.turn(lab.now);
    lab.now += Duration::from_millis(1);
    lab.wire.advance(lab.now);
    let mut frames = arrived(&mut lab.client.link);
    let [.., (_, data), (_, fin)] = &frames[..] else { panic!("data and FIN") };
    assert!(data.payload_len > 1000 && fin.flags.fin);
    let stamp = fin.options.timestamps.unwrap();
    let options = Options { timestamps: Some(Timestamps { value: stamp.value + 1, echo: 0 }), ..fin.options };
    let flags = Flags { syn: true, ..Flags::default() };
    let syn = Fields { seq: fin.seq.add(100_000), flags, window: 65_535, options, ..Fields::default() };
    let there = Flow { local: fin.flow.remote, remote: fin.flow.local };
    inject(&mut lab.stranger, there, &syn, &[]);
    lab.now += Duration::from_millis(1);
    lab.wire.advance(lab.now);
    // The FIN overtakes the data, which then fills the gap.
    frames.reverse();
    frames.extend(arrived(&mut lab.client.link));
    assert!(frames.last().unwrap().1.flags.syn);
    for (frame, _) in frames {
        lab.client.stack.receive(lab.now, &mut lab.client.link, frame, &mut lab.client.upper);
    }
    assert_eq!(lab.client.upper.closed.get(&conn.index), Some(&CloseReason::Graceful));
    assert_eq!(lab.client.stack.connections(), 0, "the SYN has replaced TIME-WAIT");
    assert_eq!(lab.client.upper.delivered, 1000);
}

/// A program that is started again knows neither the sequence numbers nor the timestamps of its predecessor, whose port the
/// server still has in TIME-WAIT. Half of the new SYNs seem to be old there.
#[test]
fn rfc9293_s3_5_1_a_restarted_program_connects_at_once_from_a_port_in_time_wait() {
    let mut reset = 0;
    for seed in 10..26 {
        let mut lab = Lab::new(TcpConfig::default(), 8);
        let (conn, server) = connected(&mut lab);
        lab.server.finish(server);
        lab.pass(Duration::from_millis(5));
        lab.client.finish(conn);
        lab.pass(Duration::from_millis(5));
        assert_eq!(lab.server.upper.closed.get(&server.index), Some(&CloseReason::Graceful));
        assert_eq!((lab.server.stack.connections(), lab.client.stack.connections()), (1, 0));
        let secret = Secret::from_number(seed);
        lab.client.stack = Stack::new(StackConfig { secret, ..StackConfig::default() });
        lab.client.upper = Upper::default();
        lab.port -= 1;
        let again = lab.connect();
        lab.pass(Duration::from_millis(5));
        assert_eq!(lab.client.upper.established, [again], "seed {seed}");
        reset += lab.client.stack.tcp_counters().retransmits;
    }
    assert!((1..16).contains(&reset), "{reset} of 16 SYNs seemed old");
}

/// SHLD-3, through MPA: the peer keeps sending after the server has rejected its request.
#[test]
fn rfc9293_s3_6_1_data_of_a_rejected_peer_is_answered_by_a_reset() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    lab.server.upper.deaf = true;
    lab.connect();
    lab.pass(Duration::from_millis(5));
    let request = lab.server.upper.requested[0];
    lab.server.stack.reject(lab.now, request, b"no").unwrap();
    lab.server.turn(lab.now);
    lab.now += Duration::from_millis(1);
    lab.wire.advance(lab.now);
    let (frame, fin) = arrived(&mut lab.client.link).pop().unwrap();
    assert!(fin.flags.fin);
    lab.client.link.recycle(frame);
    let stamp = fin.options.timestamps.unwrap();
    let options = Options {
        timestamps: Some(Timestamps { value: stamp.echo, echo: stamp.value }),
        ..Options::default()
    };
    let flags = Flags { ack: true, ..Flags::default() };
    let sends = |acked: u32| Fields {
        seq: fin.ack,
        ack: fin.seq.add(acked),
        flags,
        window: 65_535,
        options,
        ..Fields::default()
    };
    let say = |lab: &mut Lab, acked| {
        inject(&mut lab.stranger, fin.flow, &sends(acked), b"more");
        lab.now += Duration::from_millis(1);
        lab.wire.advance(lab.now);
        lab.server.turn(lab.now);
        lab.server.stack.tcp_counters()
    };
    assert_eq!(
        (say(&mut lab, 0).unread, lab.server.stack.connections()),
        (1, 1),
        "our FIN is not acknowledged yet"
    );
    assert_eq!((say(&mut lab, 1).unread, lab.server.stack.connections()), (2, 0));
    assert_eq!(lab.server.upper.closed.get(&request.index), Some(&CloseReason::Aborted));
}

/// A duplicate of the client's SYN arrives when the server has forgotten the connection, while the client is in TIME-WAIT:
/// the client acknowledges what it has received (RFC 9293 section 3.10.7.4), which is no answer to the new SYN-ACK.
#[test]
fn rfc9293_s3_5_a_syn_that_arrives_after_its_connection_has_ended_opens_none() {
    let mut lab = Lab::new(TcpConfig::default(), 8);
    let conn = lab.connect();
    lab.client.turn(lab.now);
    lab.now += Duration::from_millis(1);
    lab.wire.advance(lab.now);
    let (frame, first) = arrived(&mut lab.server.link).pop().unwrap();
    assert!(first.flags.is_plain_syn());
    let syn = rx_pieces(&lab.server.link, &frame, 0, frame.len()).concat();
    lab.server.stack.receive(lab.now, &mut lab.server.link, frame, &mut lab.server.upper);
    lab.pass(Duration::from_millis(5));
    lab.client.send(conn, 100);
    lab.client.finish(conn);
    lab.pass(Duration::from_millis(5));
    assert_eq!(lab.client.upper.closed.get(&conn.index), Some(&CloseReason::Graceful));
    assert_eq!((lab.client.stack.connections(), lab.server.stack.connections()), (1, 0));
    let before = lab.client.stack.tcp_counters();
    lab.client.link.inject(&syn);
    lab.pass(Duration::from_micros(500));
    assert_eq!(lab.server.stack.half_open(), 1, "the SYN is answered");
    let after = lab.client.stack.tcp_counters();
    assert_eq!(after.segments_out - before.segments_out, 1, "an ACK of the old numbers");
    assert!(lab.server.stack.tcp_counters().segments_out > 0);
    lab.pass(Duration::from_secs(10));
    assert_eq!((lab.server.stack.half_open(), lab.server.stack.connections()), (0, 0));
    assert_eq!((lab.server.upper.established.len(), lab.client.stack.connections()), (1, 0));
    lab.assert_no_errors();
    lab.server.assert_nothing_leaked();
}

/// The server aborts, and its reset is lost. Only a keepalive probe shows an idle client that the connection is gone.
#[test]
fn rfc9293_s3_8_4_keepalive_detects_that_the_peers_reset_was_lost() {
    let second = Duration::from_secs(1);
    for keepalive in [None, Some(Keepalive { idle: 10 * second, interval: second, probes: 5 })] {
        let mut lab = Lab::new(TcpConfig { keepalive, ..TcpConfig::default() }, 8);
        let (conn, server) = connected(&mut lab);
        lab.wire.set_faults(0, Faults { loss: 1.0, ..Faults::default() });
        lab.server.stack.abort(server);
        lab.pass(Duration::from_millis(1));
        assert_eq!(lab.wire.tally(0).lost, 1, "the reset");
        assert_eq!((lab.client.stack.connections(), lab.server.stack.connections()), (1, 0));
        lab.wire.set_faults(0, Faults::default());
        lab.pass(60 * second);
        let probed = keepalive.is_some();
        let closed = lab.client.upper.closed.get(&conn.index);
        assert_eq!(closed, probed.then_some(&CloseReason::Reset));
        assert_eq!(lab.client.stack.tcp_counters().keepalives, u64::from(probed));
        assert_eq!(lab.server.stack.counters().resets_sent, u64::from(probed));
    }
}
