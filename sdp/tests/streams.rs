//! Streams and listeners over two devices that are joined in memory.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use xwarp_sdp::{
    Sdp, SdpListener, SdpOptions, SdpStream,
    wire::{Base, Message, Seq},
};
use xwarp_verbs::{
    Access, Device, DeviceOptions, FramingConfig, Markers, Memory, MpaConfig, Pages, Payload,
    QueuePairOptions, RecvRequest, Rtr, WorkRequest,
    cm::ConnectOptions,
    sim::{self, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(20);

fn devices() -> [Device; 2] {
    let (a, b) = sim::pair(WireConfig::default(), 1500).unwrap();
    [a, b].map(|end| Device::over(Box::new(end), DeviceOptions::default()).unwrap())
}

fn address(port: u16) -> SocketAddr {
    (sim::ipv4(1), port).into()
}

/// A connected pair: the accepted stream, then the connected one, and the service of the first.
fn pair_with(options: SdpOptions) -> (SdpStream, SdpStream, Sdp) {
    let [a, b] = devices();
    let server = Sdp::new(&a, options.clone()).unwrap();
    let client = Sdp::new(&b, options).unwrap();
    let listener = SdpListener::bind(&server, address(7)).unwrap();
    let connected = SdpStream::connect(&client, address(7)).unwrap();
    let (accepted, peer) = listener.accept().unwrap();
    assert_eq!(peer, connected.local_addr().unwrap());
    assert_eq!(accepted.local_addr().unwrap(), address(7));
    (accepted, connected, server)
}

fn pair() -> (SdpStream, SdpStream) {
    let (accepted, connected, _) = pair_with(SdpOptions::default());
    (accepted, connected)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// Waits until `done`, at most for [`LIMIT`].
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "{what} did not happen");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn both_directions_carry_megabytes_at_the_same_time() {
    let (accepted, connected) = pair();
    let (up, down) = (pattern(3_000_000, 1), pattern(2_000_000, 99));
    thread::scope(|scope| {
        for (stream, out) in [(&accepted, &down), (&connected, &up)] {
            scope.spawn(move || {
                let mut writer: &SdpStream = stream;
                // Pieces of many sizes.
                let (mut rest, mut n) = (&out[..], 1);
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(n.min(rest.len()));
                    writer.write_all(now).unwrap();
                    (rest, n) = (later, n * 3 % 70_001);
                }
                stream.shutdown(Shutdown::Write).unwrap();
            });
        }
        for (mut stream, expected) in [(&accepted, &up), (&connected, &down)] {
            scope.spawn(move || {
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                assert!(got == *expected, "{} of {} bytes, or others", got.len(), expected.len());
            });
        }
    });
}

#[test]
fn a_connected_stream_knows_its_addresses() {
    let [a, b] = devices();
    let server = Sdp::new(&a, SdpOptions::default()).unwrap();
    let client = Sdp::new(&b, SdpOptions::default()).unwrap();
    let listener = SdpListener::bind(&server, address(7)).unwrap();
    for _ in 0..100 {
        let connected = SdpStream::connect(&client, address(7)).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        assert_eq!(connected.local_addr().unwrap(), peer);
        assert_eq!(accepted.local_addr().unwrap(), connected.peer_addr().unwrap());
    }
}

#[test]
fn small_messages_are_answered_one_by_one() {
    let (mut accepted, mut connected) = pair();
    let server =
        thread::spawn(move || std::io::copy(&mut accepted.try_clone().unwrap(), &mut accepted).unwrap());
    for i in 0..500_u32 {
        connected.write_all(&i.to_be_bytes()).unwrap();
        let mut back = [0; 4];
        connected.read_exact(&mut back).unwrap();
        assert_eq!(u32::from_be_bytes(back), i);
    }
    connected.shutdown(Shutdown::Write).unwrap();
    assert_eq!(connected.read(&mut [0; 4]).unwrap(), 0, "the other end closes, too");
    assert_eq!(server.join().unwrap(), 2000);
}

#[test]
fn a_half_closed_stream_still_carries_the_other_direction() {
    let (mut accepted, mut connected) = pair();
    connected.shutdown(Shutdown::Write).unwrap();
    assert_eq!(connected.write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(accepted.read(&mut [0; 9]).unwrap(), 0);
    let bytes = pattern(300_000, 5);
    let expected = bytes.clone();
    let reader = thread::spawn(move || {
        let mut got = Vec::new();
        connected.read_to_end(&mut got).unwrap();
        assert!(got == expected);
    });
    accepted.write_all(&bytes).unwrap();
    drop(accepted);
    reader.join().unwrap();
}

#[test]
fn data_survives_the_close_of_the_stream_that_wrote_it() {
    let (mut accepted, mut connected) = pair();
    let bytes = pattern(200_000, 8);
    connected.write_all(&bytes).unwrap();
    drop(connected);
    let mut got = Vec::new();
    accepted.read_to_end(&mut got).unwrap();
    assert!(got == bytes);
}

#[test]
fn closing_with_unread_data_resets() {
    let (mut accepted, mut connected) = pair();
    connected.write_all(b"nobody reads this").unwrap();
    eventually("arrival", || accepted.peek(&mut [0; 4]).unwrap() == 4);
    accepted.write_all(b"x").unwrap();
    drop(accepted);
    eventually("the reset", || match connected.read(&mut [0; 4]) {
        Ok(n) => {
            assert!(n > 0, "no end of the stream");
            false
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            true
        }
    });
    assert!(connected.write(b"y").is_err());
}

#[test]
fn peek_leaves_bytes_and_limits_of_time_hold() {
    let (accepted, mut connected) = pair();
    let mut bytes = [0; 8];
    accepted.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let begin = Instant::now();
    assert_eq!((&accepted).read(&mut bytes).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(begin.elapsed() >= Duration::from_millis(30));
    assert!(accepted.set_read_timeout(Some(Duration::ZERO)).is_err());
    accepted.set_read_timeout(None).unwrap();
    connected.write_all(b"abcd").unwrap();
    assert_eq!(accepted.peek(&mut bytes).unwrap(), 4);
    assert_eq!((&accepted).read(&mut bytes[..2]).unwrap(), 2);
    assert_eq!((&accepted).read(&mut bytes).unwrap(), 2);
    assert_eq!(&bytes[..2], b"cd");
    accepted.set_nonblocking(true).unwrap();
    assert_eq!((&accepted).read(&mut bytes).unwrap_err().kind(), ErrorKind::WouldBlock);
    // A peer that does not read blocks the writer.
    connected.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
    let full = (0..1000).find_map(|_| connected.write(&vec![7; 65536]).err());
    assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
}

#[test]
fn the_descriptor_is_readable_exactly_while_a_read_would_not_block() {
    let [a, b] = devices();
    let (server, client) =
        (Sdp::new(&a, SdpOptions::default()).unwrap(), Sdp::new(&b, SdpOptions::default()).unwrap());
    let listener = SdpListener::bind(&server, address(9)).unwrap();
    assert!(!a.wait(&listener, Some(Duration::ZERO)).unwrap());
    let mut connected = SdpStream::connect(&client, address(9)).unwrap();
    assert!(a.wait(&listener, Some(LIMIT)).unwrap());
    let (mut accepted, _) = listener.accept().unwrap();
    assert!(!a.wait(&listener, Some(Duration::ZERO)).unwrap());
    listener.set_nonblocking(true);
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(!a.wait(&accepted, Some(Duration::ZERO)).unwrap());
    connected.write_all(b"ring").unwrap();
    assert!(a.wait(&accepted, Some(LIMIT)).unwrap());
    assert_eq!(accepted.read(&mut [0; 8]).unwrap(), 4);
    assert!(!a.wait(&accepted, Some(Duration::ZERO)).unwrap());
    drop(connected);
    assert!(a.wait(&accepted, Some(LIMIT)).unwrap(), "the end of the stream");
}

#[test]
fn out_of_band_data_stays_at_its_place_in_the_stream() {
    let (mut accepted, mut connected) = pair();
    connected.write_all(b"before").unwrap();
    connected.send_oob(b'!').unwrap();
    connected.write_all(b"after").unwrap();
    let mut bytes = [0; 32];
    let mut got = Vec::new();
    eventually("the mark", || {
        if !accepted.at_mark() {
            let n = accepted.read(&mut bytes).unwrap();
            got.extend_from_slice(&bytes[..n]);
        }
        accepted.at_mark()
    });
    assert_eq!(got, b"before");
    assert_eq!(accepted.recv_oob(), Some(b'!'));
    assert_eq!(accepted.recv_oob(), None);
    accepted.read_exact(&mut bytes[..5]).unwrap();
    assert_eq!(&bytes[..5], b"after");
}

#[test]
fn memory_is_transferred_by_rdma_in_both_ways() {
    const LEN: usize = 1 << 20;
    let [a, b] = devices();
    let [server, client] = [&a, &b].map(|device| Sdp::new(device, SdpOptions::default()).unwrap());
    let listener = SdpListener::bind(&server, address(7)).unwrap();
    let connected = SdpStream::connect(&client, address(7)).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let source = Memory::anonymous(LEN, Pages::Normal).unwrap();
    let bytes = pattern(LEN, 3);
    let rounds = 6;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                let mut bytes = bytes.clone();
                bytes[0] = round;
                source.write(0, &bytes).unwrap();
                connected.send_memory(&source, 0..LEN).unwrap();
            }
            connected.shutdown(Shutdown::Write).unwrap();
        });
        let sink = Memory::anonymous(LEN, Pages::Normal).unwrap();
        let mut got = vec![0; LEN];
        for round in 0..rounds {
            let mut at = 0;
            while at < LEN {
                at += accepted.recv_memory(&sink, at..LEN).unwrap();
            }
            sink.read(0, &mut got).unwrap();
            assert!(got[0] == round && got[1..] == bytes[1..], "round {round}");
        }
        assert_eq!(accepted.recv_memory(&sink, 0..LEN).unwrap(), 0);
    });
    let count = |sdp: &Sdp, name| sdp.counters().get(name).copied().unwrap_or_default();
    let read = count(&server, "sdp_bytes_read");
    assert!(read > 0, "the first ones are read");
    let both = read + count(&client, "sdp_bytes_written");
    assert!(both > (LEN * 3) as u64, "only {both} bytes were transferred by RDMA");
}

#[test]
fn advertised_memory_reaches_a_plain_reader_in_messages() {
    const LEN: usize = 300_000;
    let (mut accepted, connected) = pair();
    let source = Memory::anonymous(LEN, Pages::Normal).unwrap();
    source.write(0, &pattern(LEN, 4)).unwrap();
    let sender = thread::spawn(move || {
        connected.send_memory(&source, 0..LEN).unwrap();
        connected.send_memory(&source, 0..10).unwrap();
    });
    let mut got = Vec::new();
    accepted.read_to_end(&mut got).unwrap();
    sender.join().unwrap();
    assert!(got[..LEN] == pattern(LEN, 4) && got[LEN..] == pattern(10, 4));
}

#[test]
fn unread_memory_is_sent_in_messages_after_a_second() {
    const LEN: usize = 100_000;
    let (mut accepted, connected) = pair();
    let source = Memory::anonymous(LEN, Pages::Normal).unwrap();
    // The readers start late, and both ends send first: neither end may hang.
    connected.send_memory(&source, 0..LEN).unwrap();
    let mut got = vec![1; LEN];
    accepted.read_exact(&mut got).unwrap();
    assert!(got.iter().all(|byte| *byte == 0));
}

#[test]
fn a_receive_into_memory_that_times_out_leaves_the_stream_intact() {
    let (accepted, mut connected) = pair();
    let sink = Memory::anonymous(100_000, Pages::Normal).unwrap();
    accepted.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(accepted.recv_memory(&sink, 0..100_000).unwrap_err().kind(), ErrorKind::WouldBlock);
    connected.write_all(b"still here").unwrap();
    accepted.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(accepted.recv_memory(&sink, 0..100_000).unwrap(), 10);
}

#[test]
fn connecting_fails_without_a_listener_or_without_sdp() {
    let [a, b] = devices();
    let client = Sdp::new(&b, SdpOptions::default()).unwrap();
    let refused = SdpStream::connect(&client, address(99)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{refused}");
    // An iWARP peer whose private data is no Hello is rejected, and counted.
    let server = Sdp::new(&a, SdpOptions::default()).unwrap();
    let _listener = SdpListener::bind(&server, address(98)).unwrap();
    let cq = b.create_cq(16).unwrap();
    let pd = b.create_pd().unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    // Without fall-back to other MPA settings, so that there is only one attempt.
    let mpa = MpaConfig { peer_to_peer: vec![Rtr::EmptyFpdu], markers: Markers::Off, ..MpaConfig::default() };
    let options = ConnectOptions {
        private_data: b"not a Hello".to_vec(),
        framing: Some(FramingConfig::Mpa(mpa)),
        ..Default::default()
    };
    assert!(b.connect(&qp, address(98), options, LIMIT).is_err());
    assert_eq!(server.counters().get("sdp_short"), Some(&1));
}

/// A peer made of plain verbs, which has sent a Hello and received the HelloAck.
struct RawPeer {
    qp: xwarp_verbs::QueuePair,
    cq: xwarp_verbs::CompletionQueue,
    pd: xwarp_verbs::ProtectionDomain,
    connection: xwarp_verbs::cm::Connection,
    /// The HelloAck's.
    bufs: u16,
}

fn raw_peer(device: &Device, port: u16) -> RawPeer {
    let (_, hello) = xwarp_sdp::machine::Machine::connect(&SdpOptions::default().connection);
    let cq = device.create_cq(64).unwrap();
    let pd = device.create_pd().unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    let inbox = pd.allocate(16 << 10, Access::LOCAL_WRITE).unwrap();
    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, inbox.len())])).unwrap();
    let mpa = MpaConfig { peer_to_peer: vec![Rtr::EmptyFpdu], ..MpaConfig::default() };
    let framing = Some(FramingConfig::Mpa(mpa));
    let options = ConnectOptions { private_data: hello, framing, ..Default::default() };
    let connection = device.connect(&qp, address(port), options, LIMIT).unwrap();
    let ack = cq.spin(LIMIT).unwrap().check().unwrap();
    let ack = inbox.to_vec(0, ack.byte_len as usize).unwrap();
    let Ok((Base { bufs, .. }, Message::HelloAck(_), b"")) = Message::parse(&ack) else { panic!("{ack:?}") };
    RawPeer { qp, cq, pd, connection, bufs }
}

#[test]
fn violations_of_a_peer_end_its_connection_only_and_have_names() {
    let [a, b] = devices();
    let server = Sdp::new(&a, SdpOptions::default()).unwrap();
    let listener = SdpListener::bind(&server, address(97)).unwrap();
    let base = |mseq, mseq_ack| Base { bufs: 1, mseq: Seq(mseq), mseq_ack: Seq(mseq_ack), ..Base::default() };
    let cases = [
        ("sdp_sequence", base(2, 0), Message::Data, &b""[..]),
        ("sdp_acknowledgement", base(1, 1), Message::Data, b""),
        ("sdp_completion", base(1, 0), Message::RdmaRdCompl { len: 1 }, b""),
        (
            "sdp_mode_change",
            base(1, 0),
            Message::ModeChange { half: xwarp_sdp::wire::Half::Send, mode: xwarp_sdp::wire::Mode::Combined },
            b"",
        ),
        ("sdp_suspend", base(1, 0), Message::SuspComm { port: 1 }, b""),
    ];
    for (counter, base, message, payload) in cases {
        let RawPeer { qp, connection, .. } = raw_peer(&b, 97);
        let (mut accepted, _) = listener.accept().unwrap();
        let mut bytes = Vec::new();
        message.emit(base, payload.len() as u32, &mut bytes);
        qp.post_send(&WorkRequest::send(1, Payload::Inline(&bytes))).unwrap();
        assert!(accepted.read(&mut [0; 4]).is_err(), "{counter}");
        assert_eq!(server.counters().get(counter), Some(&1), "{counter}");
        assert!(connection.wait_disconnected(LIMIT).unwrap());
    }
}

/// The peer keeps to its credits, but all that it sends is empty.
#[test]
fn sdp_s16_a_peer_that_floods_ends_its_connection_only() {
    const SLOT: usize = 64;
    let [a, b] = devices();
    let server = Sdp::new(&a, SdpOptions::default()).unwrap();
    let listener = SdpListener::bind(&server, address(96)).unwrap();
    let good = SdpStream::connect(&Sdp::new(&b, SdpOptions::default()).unwrap(), address(96)).unwrap();
    let (mut served, _) = listener.accept().unwrap();
    let RawPeer { qp, cq, pd, connection, bufs } = raw_peer(&b, 96);
    let (mut accepted, _) = listener.accept().unwrap();
    let inbox = pd.allocate(32 * SLOT, Access::LOCAL_WRITE).unwrap();
    let post = |slot: u64| {
        let piece = inbox.sge(slot as usize * SLOT, SLOT);
        qp.post_recv(&RecvRequest::new(slot, &[piece]))
    };
    (0..32).for_each(|slot| post(slot).unwrap());
    let (mut sent, mut told, mut mseq_ack) = (0_u32, (bufs, Seq(0)), Seq(0));
    let begin = Instant::now();
    while !server.counters().contains_key("sdp_flood") {
        assert!(begin.elapsed() < LIMIT && sent < 3000, "{sent} messages: {:?}", server.counters());
        // The last credit but one makes the server tell more.
        while i64::from(told.0) - i64::from(sent.wrapping_sub(told.1.0)) >= 2 {
            sent += 1;
            let mut bytes = Vec::new();
            Message::Data.emit(
                Base { bufs: 30, mseq: Seq(sent), mseq_ack, ..Base::default() },
                0,
                &mut bytes,
            );
            if qp.post_send(&WorkRequest::send(1000, Payload::Inline(&bytes))).is_err() {
                break;
            }
        }
        while let Some(completion) = cq.poll_one() {
            let Ok(done) = completion.check() else { continue };
            if done.wr_id < 32 {
                let message = inbox.to_vec(done.wr_id as usize * SLOT, done.byte_len as usize).unwrap();
                let (base, ..) = Message::parse(&message).unwrap();
                (told, mseq_ack) = ((base.bufs, base.mseq_ack), base.mseq);
                let _ = post(done.wr_id);
            }
        }
    }
    assert!(sent > 1000, "only {sent} messages");
    assert!(accepted.read(&mut [0; 4]).is_err());
    assert!(connection.wait_disconnected(LIMIT).unwrap());
    (&good).write_all(b"good").unwrap();
    served.read_exact(&mut [0; 4]).unwrap();
}

/// Sends of memory in both directions at once: the end of a send does not wait for the reads of the other direction.
#[test]
fn memory_is_transferred_in_both_directions_at_once() {
    const LEN: usize = 1 << 18;
    const TIMES: usize = 40;
    let ends = <[SdpStream; 2]>::from(pair());
    let (done, finished) = std::sync::mpsc::channel();
    for (number, end) in ends.into_iter().enumerate() {
        let end = std::sync::Arc::new(end);
        let (sends, receives) = (std::sync::Arc::clone(&end), end);
        let both = [done.clone(), done.clone()];
        let [sent, received] = both;
        let data = |seed: usize| pattern(LEN, seed as u8);
        thread::spawn(move || {
            let memory = Memory::anonymous(LEN, Pages::Normal).unwrap();
            memory.write(0, &data(number)).unwrap();
            for _ in 0..TIMES {
                sends.send_memory(&memory, 0..LEN).unwrap();
            }
            sends.shutdown(Shutdown::Write).unwrap();
            sent.send(()).unwrap();
        });
        thread::spawn(move || {
            let memory = Memory::anonymous(LEN, Pages::Normal).unwrap();
            let (mut bytes, mut all) = (vec![0; LEN], Vec::new());
            loop {
                let len = receives.recv_memory(&memory, 0..LEN).unwrap();
                if len == 0 {
                    break;
                }
                memory.read(0, &mut bytes[..len]).unwrap();
                all.extend_from_slice(&bytes[..len]);
            }
            assert!(all == data(1 - number).repeat(TIMES), "the bytes of direction {number}");
            received.send(()).unwrap();
        });
    }
    for _ in 0..4 {
        finished.recv_timeout(3 * LIMIT).expect("a direction does not go on");
    }
}

#[test]
fn data_that_arrived_is_received_into_memory_after_the_connection_has_ended() {
    let (accepted, mut connected) = pair();
    let bytes = pattern(24, 6);
    connected.write_all(&bytes).unwrap();
    connected.shutdown(Shutdown::Write).unwrap();
    accepted.shutdown(Shutdown::Write).unwrap();
    accepted.wait_closed().unwrap();
    let memory = Memory::anonymous(1, Pages::Normal).unwrap();
    // The service frees the queue pair within 200 ms, meanwhile or before.
    for byte in bytes {
        assert_eq!(accepted.recv_memory(&memory, 0..1).unwrap(), 1);
        let mut got = [0];
        memory.read(0, &mut got).unwrap();
        assert_eq!(got, [byte]);
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(accepted.recv_memory(&memory, 0..1).unwrap(), 0);
    assert_eq!((&accepted).read(&mut [0; 4]).unwrap(), 0);
}

#[test]
fn shutting_down_the_receiving_direction_ends_receives_that_wait() {
    let (accepted, mut connected) = pair();
    let (started, begins) = std::sync::mpsc::channel();
    let (done, ends) = std::sync::mpsc::channel();
    let receiver = accepted.try_clone().unwrap();
    thread::spawn(move || {
        let memory = Memory::anonymous(100_000, Pages::Normal).unwrap();
        assert_eq!(receiver.recv_memory(&memory, 0..100_000).unwrap(), 1);
        started.send(()).unwrap();
        done.send(receiver.recv_memory(&memory, 0..100_000).map_err(|e| e.kind())).unwrap();
    });
    connected.write_all(b"1").unwrap();
    begins.recv_timeout(LIMIT).unwrap();
    // The second receive ends, whether it waits already or not.
    accepted.shutdown(Shutdown::Read).unwrap();
    assert_eq!(ends.recv_timeout(LIMIT).expect("the receive waits for ever"), Ok(0));
}

#[test]
fn data_for_a_closed_stream_resets_it() {
    let (accepted, mut connected, _server) = pair_with(SdpOptions::default());
    drop(accepted);
    assert_eq!(connected.read(&mut [0; 4]).unwrap(), 0);
    // Less than the closed end could buffer.
    connected.write_all(b"nobody reads this").unwrap();
    let (done, ends) = std::sync::mpsc::channel();
    thread::spawn(move || done.send(connected.wait_closed().map_err(|e| e.kind())));
    assert_eq!(ends.recv_timeout(LIMIT).expect("no reset"), Err(ErrorKind::ConnectionReset));
}

/// A caller that polls leaves what follows from a read to its next call. The service does it when there is none.
#[test]
fn a_writer_gets_credit_from_a_reader_that_stops_polling() {
    let (accepted, mut connected) = pair();
    let mut one = [0];
    for _ in 0..100 {
        connected.write_all(b"a").unwrap();
        assert_eq!(accepted.try_read_for(&mut one, LIMIT).unwrap(), 1);
    }
    for _ in 0..100 {
        connected.write_all(b"b").unwrap();
        connected.wait_sent(Some(LIMIT)).unwrap();
    }
    let mut rest = [0; 100];
    accepted.try_clone().unwrap().read_exact(&mut rest).unwrap();
    assert_eq!(rest, [b'b'; 100]);
}
