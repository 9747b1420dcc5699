//! The objects of verbs through the public API, over the in-memory interface, in real time and with real threads.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::{thread, time::Duration};

use common::{LIMIT, connect, connect_with, devices, devices_with, pattern, queue_pair};
use xwarp_verbs::{
    Access, AsyncEvent, CompletionChannel, CompletionQueue, Device, DeviceOptions, FastRegionOptions, Memory,
    Opcode, Pages, Payload, PostError, PostListError, Progress, ProtectionDomain, QpState, QueuePair,
    QueuePairOptions, RecvRequest, Remote, ResourceError, STag, WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
    sim::WireConfig,
};

#[test]
fn every_operation_moves_its_bytes() {
    let [server, client] = connect(&devices(Progress::Auto), 1);
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let theirs = server.pd.allocate(300_000, rights).unwrap();
    let ours = client.pd.allocate(300_000, Access::LOCAL_WRITE).unwrap();
    let data = pattern(200_000, 3);
    ours.write(0, &data).unwrap();

    client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 200_000), theirs.remote(64)).signaled()).unwrap();
    let written = client.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((written.wr_id, written.opcode), (1, Opcode::RdmaWrite));
    assert_eq!(theirs.to_vec(64, 200_000).unwrap(), data);

    ours.memory().fill(0, 300_000, 0).unwrap();
    client.qp.post_send(&WorkRequest::read(2, ours.sge(5, 150_000), theirs.remote(64)).signaled()).unwrap();
    let read = client.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((read.wr_id, read.opcode, read.byte_len), (2, Opcode::RdmaRead, 150_000));
    assert_eq!(ours.to_vec(5, 150_000).unwrap(), data[..150_000]);

    theirs.memory().store_u64(0, 40).unwrap();
    client.qp.post_send(&WorkRequest::fetch_add(3, ours.sge(8, 8), theirs.remote(0), 2).signaled()).unwrap();
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().opcode, Opcode::FetchAdd);
    assert_eq!((ours.memory().load_u64(8), theirs.memory().load_u64(0)), (Ok(40), Ok(42)));
    client
        .qp
        .post_send(&WorkRequest::compare_swap(4, ours.sge(8, 8), theirs.remote(0), 42, 7).signaled())
        .unwrap();
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().opcode, Opcode::CompareSwap);
    assert_eq!((ours.memory().load_u64(8), theirs.memory().load_u64(0)), (Ok(42), Ok(7)));

    server.qp.post_recv(&RecvRequest::new(5, &[theirs.sge(100, 3), theirs.sge(0, 50)])).unwrap();
    client.qp.post_send(&WorkRequest::send(6, Payload::Inline(b"scatter")).signaled()).unwrap();
    let received = server.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((received.wr_id, received.opcode, received.byte_len), (5, Opcode::Recv, 7));
    assert_eq!(theirs.to_vec(100, 3).unwrap(), b"sca");
    assert_eq!(theirs.to_vec(0, 4).unwrap(), b"tter");
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 6);

    server.qp.post_recv(&RecvRequest::new(7, &[])).unwrap();
    client.qp.post_send(&WorkRequest::immediate(8, *b"12345678")).unwrap();
    let received = server.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((received.wr_id, received.immediate), (7, Some(*b"12345678")));
}

#[test]
fn completed_work_has_arrived_even_if_all_objects_are_dropped_at_once() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(1 << 20, Access::REMOTE_WRITE | Access::LOCAL_WRITE).unwrap();
    server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    let ours = client.pd.allocate(1 << 20, Access::empty()).unwrap();
    let data = pattern(1 << 20, 9);
    ours.write(0, &data).unwrap();
    client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 1 << 20), theirs.remote(0))).unwrap();
    client.qp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 2);
    drop((client, ours, pair));
    assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, 1);
    assert!(theirs.to_vec(0, 1 << 20).unwrap() == data);
    assert!(server.connection.wait_disconnected(LIMIT).unwrap());
}

#[test]
fn a_disconnect_sends_earlier_posts_and_flushes_later_ones() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(1 << 20, Access::REMOTE_WRITE | Access::LOCAL_WRITE).unwrap();
    let ours = client.pd.allocate(1 << 20, Access::empty()).unwrap();
    let data = pattern(1 << 20, 4);
    ours.write(0, &data).unwrap();
    let all = ours.sge(0, 1 << 20);
    client.qp.post_send(&WorkRequest::write(1, all, theirs.remote(0)).signaled()).unwrap();
    client.connection.disconnect().unwrap();
    // Posted while the Write is still in flight, and flushed after it.
    client.qp.post_send(&WorkRequest::send(2, Payload::EMPTY)).unwrap();
    assert!(server.connection.wait_disconnected(LIMIT).unwrap());
    assert!(theirs.to_vec(0, 1 << 20).unwrap() == data);
    client.qp.post_send(&WorkRequest::send(3, Payload::EMPTY)).unwrap();
    let completions = [(); 3].map(|()| client.cq.spin(LIMIT).map(|c| (c.wr_id, c.status)));
    let expected = [(1, WcStatus::Success), (2, WcStatus::Flushed), (3, WcStatus::Flushed)];
    assert_eq!(completions, expected.map(Some));
}

/// Objects for a connection whose completion queue notifies on `channel`.
fn with_channel(
    device: &Device,
    channel: &CompletionChannel,
) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let cq = device.create_cq_with_channel(64, channel).unwrap();
    let pd = device.create_pd().unwrap();
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default()).unwrap();
    (pd, cq, qp)
}

#[test]
fn a_sleeping_application_loses_no_wakeup() {
    const ROUNDS: u64 = 500;
    for progress in [Progress::Auto, Progress::Thread, Progress::Application] {
        let pair = devices(progress);
        let ends = connect_with(&pair, 1, |device| with_channel(device, &CompletionChannel::new().unwrap()));
        thread::scope(|scope| {
            for (side, end) in ends.iter().enumerate() {
                scope.spawn(move || {
                    end.qp.post_recv(&RecvRequest::new(0, &[])).unwrap();
                    if side == 1 {
                        // The initiator speaks first (RFC 5044 section 7.1.3). The other end may not have
                        // posted yet: the message waits for it.
                        end.qp.post_send(&WorkRequest::send(0, Payload::EMPTY)).unwrap();
                    }
                    for round in 0..ROUNDS {
                        let got = end.cq.wait(LIMIT).unwrap().expect("a wake-up").check().unwrap();
                        assert_eq!(got.wr_id, round);
                        end.qp.post_recv(&RecvRequest::new(round + 1, &[])).unwrap();
                        if round + 1 < ROUNDS || side == 0 {
                            end.qp.post_send(&WorkRequest::send(round, Payload::EMPTY)).unwrap();
                        }
                    }
                });
            }
        });
    }
}

/// One thread waits for several channels of a device in turn, by notification and by descriptor.
#[test]
fn waits_for_several_channels_take_turns() {
    for progress in [Progress::Auto, Progress::Thread, Progress::Application] {
        let pair = devices(progress);
        let mut all: Vec<_> = (1..=3)
            .map(|port| {
                let channel = CompletionChannel::new().unwrap();
                // The client's queue is never armed.
                let ends = connect_with(&pair, port, |device| with_channel(device, &channel));
                (channel, ends)
            })
            .collect();
        while !all.is_empty() {
            for round in 0..12 {
                for (channel, [server, client]) in &all {
                    server.qp.post_recv(&RecvRequest::new(round, &[])).unwrap();
                    server.cq.arm(false);
                    client.qp.post_send(&WorkRequest::send(round, Payload::EMPTY)).unwrap();
                    let device = &server.device;
                    let notification = if round % 3 == 2 {
                        assert!(device.wait(channel, Some(LIMIT)).unwrap());
                        channel.poll()
                    } else {
                        device.wait_notification(channel, Some(LIMIT)).unwrap()
                    };
                    assert_eq!(notification.map(|found| found.cq), Some(server.cq.id()), "{progress:?}");
                    assert_eq!(server.cq.poll_one().unwrap().check().unwrap().wr_id, round);
                    assert!(
                        !device.wait(channel, Some(Duration::ZERO)).unwrap(),
                        "one notification for one arming"
                    );
                }
            }
            let (channel, [server, _client]) = all.remove(0);
            assert_eq!(
                server.device.wait_notification(&channel, Some(Duration::from_millis(5))).unwrap(),
                None
            );
        }
    }
}

#[test]
fn only_solicited_completions_wake_when_asked_so() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let channel = CompletionChannel::new().unwrap();
    let cq = server.device.create_cq_with_channel(8, &channel).unwrap();
    let srq = server.pd.create_srq(8, 1).unwrap();
    let qp = server.pd.create_qp_with_srq(&cq, &cq, &srq, QueuePairOptions::default()).unwrap();
    let listener = server.device.listen(common_address(2), ListenOptions::default()).unwrap();
    let (pd, _, peer) = queue_pair(&client.device, QueuePairOptions::default());
    let (accepted, _connected) = thread::scope(|scope| {
        let accepted = scope
            .spawn(|| listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap());
        let connected =
            client.device.connect(&peer, common_address(2), ConnectOptions::default(), LIMIT).unwrap();
        (accepted.join().unwrap(), connected)
    });
    for wr_id in 0..3 {
        srq.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
    }
    assert_eq!(srq.posted(), Ok(3));
    cq.arm(true);
    peer.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
    assert!(!server.device.wait(&channel, Some(Duration::from_millis(50))).unwrap(), "not solicited");
    peer.post_send(&WorkRequest::send(2, Payload::EMPTY).solicited()).unwrap();
    assert!(server.device.wait(&channel, Some(LIMIT)).unwrap());
    assert_eq!(channel.poll().map(|notification| notification.cq), Some(cq.id()));
    assert_eq!(channel.poll(), None);
    let mut all = Vec::new();
    assert_eq!(cq.poll(&mut all, 8), 2);
    assert_eq!(all.iter().map(|c| c.solicited).collect::<Vec<_>>(), [false, true]);
    drop((accepted, pd));
}

fn common_address(port: u16) -> std::net::SocketAddr {
    (xwarp_verbs::sim::ipv4(1), port).into()
}

#[test]
fn a_peer_reaches_only_the_memory_that_it_was_given() {
    let pair = devices(Progress::Auto);
    let place = |port, ask: &dyn Fn(&common::End) -> Remote| {
        let [server, client] = connect(&pair, port);
        let remote = ask(&server);
        let ours = client.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 64), remote).signaled()).unwrap();
        // The write itself is acknowledged by TCP; the Terminate that follows ends the queue pair.
        assert!(client.connection.wait_disconnected(LIMIT).unwrap());
        assert_eq!(client.qp.state(), QpState::Error);
        let fault = client.device.async_events();
        assert!(client.device.wait(&fault, Some(LIMIT)).unwrap());
        assert!(matches!(fault.poll(), Some(AsyncEvent::QpFatal { qp, .. }) if qp == client.qp.id()));
    };
    let read_only = |server: &common::End| {
        let region = server.pd.allocate(64, Access::REMOTE_READ).unwrap();
        let remote = region.remote(0);
        std::mem::forget(region);
        remote
    };
    place(1, &read_only);
    place(2, &|server| server.pd.allocate(64, Access::REMOTE_WRITE).unwrap().remote(0));
    place(3, &|_| Remote { key: STag::new(0x0102_0304), offset: 0 });
}

#[test]
fn dropping_a_region_ends_it_for_work_that_names_it() {
    let pair = devices(Progress::Auto);
    let [_server, client] = connect(&pair, 1);
    let ours = client.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let piece = ours.sge(0, 64);
    drop(ours);
    client.qp.post_send(&WorkRequest::send(1, piece).signaled()).unwrap();
    assert_eq!(client.cq.spin(LIMIT).unwrap().status, WcStatus::LocalProtection);
}

#[test]
fn masked_atomics_and_swap_change_only_the_bits_that_count() {
    let [server, client] = connect(&devices(Progress::Auto), 1);
    let theirs = server.pd.allocate(8, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).unwrap();
    let ours = client.pd.allocate(8, Access::LOCAL_WRITE).unwrap();
    let (local, remote) = (ours.sge(0, 8), theirs.remote(0));
    let run = |before: u64, request: WorkRequest<'_>| {
        theirs.memory().store_u64(0, before).unwrap();
        client.qp.post_send(&request.signaled()).unwrap();
        client.cq.spin(LIMIT).unwrap().check().unwrap();
        assert_eq!(ours.memory().load_u64(0), Ok(before), "the former value comes back");
        theirs.memory().load_u64(0).unwrap()
    };
    // Two fields of 32 bits: the carry of the lower one is lost.
    let fields = 1 << 31 | 1 << 63;
    let sum =
        run(0x0000_0001_ffff_ffff, WorkRequest::masked_fetch_add(1, local, remote, 0x1_0000_0001, fields));
    assert_eq!(sum, 0x0000_0002_0000_0000);
    // The low byte is compared, the high byte is replaced.
    let exchange = |expected| {
        WorkRequest::masked_compare_swap(2, local, remote, (expected, 0xff), (u64::MAX, 0xff << 56))
    };
    assert_eq!(run(0x0012_3456_789a_bc07, exchange(0x07)), 0xff12_3456_789a_bc07);
    assert_eq!(run(0x0012_3456_789a_bc07, exchange(0x08)), 0x0012_3456_789a_bc07);
    assert_eq!(run(77, WorkRequest::swap(3, local, remote, 99)), 99);
}

#[test]
fn a_connection_shows_its_tcp_numbers_and_counters() {
    let pair = devices(Progress::Auto);
    let (_pd, _cq, idle) = queue_pair(&pair[0], QueuePairOptions::default());
    assert!(idle.tcp_info().is_none() && idle.counters().iter().next().is_none());
    let [server, client] = connect(&pair, 1);
    server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    client.qp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    client.cq.spin(LIMIT).unwrap().check().unwrap();
    let info = client.qp.tcp_info().unwrap();
    assert!(info.srtt.is_some() && info.cwnd >= 2 * info.emss as u64, "{info:?}");
    assert_eq!(info.counters.rto_expired, 0);
    // The ready-to-receive message of peer-to-peer mode (RFC 6581 section 5), and the Send.
    assert_eq!(client.qp.counters().value("framing.ulpdus_sent"), Some(2));
    assert!(client.qp.counters().value("tcp.segments_out") >= Some(2));
}

#[test]
fn completions_carry_the_context_of_their_queue_pair() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect_with(&pair, 1, |device| {
        let context = if device.is(&pair[0]) { 7 } else { u64::MAX };
        queue_pair(device, QueuePairOptions { context, ..Default::default() })
    });
    server.qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    client.qp.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().context, 7);
    assert_eq!(client.cq.spin(LIMIT).unwrap().check().unwrap().context, u64::MAX);
    server.qp.post_recv(&RecvRequest::new(3, &[])).unwrap();
    server.qp.abort().unwrap();
    let flushed = server.cq.spin(LIMIT).unwrap();
    assert_eq!((flushed.status, flushed.context), (WcStatus::Flushed, 7));
}

#[test]
fn verbs_refuse_what_cannot_be() {
    let pair = devices(Progress::Auto);
    let (pd, cq, qp) = queue_pair(&pair[0], QueuePairOptions { max_recv_wr: 1, ..Default::default() });
    let (other_pd, other_cq, _other) = queue_pair(&pair[1], QueuePairOptions::default());
    assert_eq!(qp.post_send(&WorkRequest::send(1, Payload::EMPTY)), Err(PostError::NotConnected));
    qp.post_recv(&RecvRequest::new(1, &[])).unwrap();
    assert_eq!(qp.post_recv(&RecvRequest::new(2, &[])), Err(PostError::QueueFull(1)));
    assert_eq!(
        qp.post_recv_list(&[RecvRequest::new(2, &[]), RecvRequest::new(3, &[])]),
        Err(PostListError { posted: 0, source: PostError::QueueFull(1) })
    );
    assert!(pd.create_qp(&cq, &other_cq, QueuePairOptions::default()).is_err(), "a queue of another device");
    let foreign = other_pd.create_srq(4, 1).unwrap();
    assert_eq!(
        pd.create_qp_with_srq(&cq, &cq, &foreign, QueuePairOptions::default()).err(),
        Some(ResourceError::ForeignSrq)
    );
    assert!(pair[0].create_cq(0).is_err());
    assert!(pair[0].attributes().limits.max_qp > 1000);
    assert_eq!(pair[0].attributes().interface.name, "sim1");
    assert_eq!(qp.query().unwrap().recv_outstanding, 1);
}

#[test]
fn a_borrowed_memory_serves_as_a_region() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    // An anonymous memory takes the place of the application's memory: it outlives the region.
    let bytes = Memory::anonymous(4096, Pages::Normal).unwrap();
    let base = std::ptr::NonNull::new(bytes.as_ptr()).unwrap();
    // SAFETY: `bytes` outlives `region`, is mapped and writable, and is only reached by raw access.
    let memory = unsafe { Memory::borrowed(base, 4096) };
    let options = xwarp_verbs::RegionOptions { base: base.as_ptr() as u64, ..Default::default() };
    let region = server.pd.register_with(memory, Access::REMOTE_WRITE, options).unwrap();
    assert_eq!(region.remote(16).offset, base.as_ptr() as u64 + 16);
    let ours = client.pd.allocate(8, Access::empty()).unwrap();
    ours.write(0, b"borrowed").unwrap();
    client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 8), region.remote(16)).signaled()).unwrap();
    client.cq.spin(LIMIT).unwrap().check().unwrap();
    let mut seen = [0; 8];
    bytes.read(16, &mut seen).unwrap();
    assert_eq!(&seen, b"borrowed");
    drop(region);
}

#[test]
fn a_peer_that_writes_all_the_time_writes_no_byte_after_deregistration() {
    const LEN: usize = 1 << 18;
    let pair = devices(Progress::Auto);
    for round in 1..=20 {
        let [server, client] = connect(&pair, round);
        let memory = Memory::anonymous(LEN, Pages::Normal).unwrap();
        let region = server.pd.register(memory.clone(), Access::REMOTE_WRITE).unwrap();
        let ours = client.pd.allocate(LEN, Access::empty()).unwrap();
        ours.memory().fill(0, LEN, 1).unwrap();
        for _ in 0..100 {
            client.qp.post_send(&WorkRequest::write(1, ours.sge(0, LEN), region.remote(0))).unwrap();
        }
        let mut first = [0];
        while first == [0] {
            client.cq.poll_one();
            memory.read(0, &mut first).unwrap();
        }
        drop(region);
        memory.fill(0, LEN, 2).unwrap();
        assert!(client.connection.wait_disconnected(LIMIT).unwrap(), "the key is invalid");
        let mut bytes = vec![0; LEN];
        memory.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 2), "round {round}");
    }
}

#[test]
fn a_window_lends_a_part_of_a_region_until_the_peer_gives_it_back() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(4096, Access::LOCAL_WRITE | Access::WINDOW_BIND).unwrap();
    let window = server.pd.alloc_window().unwrap();
    let ours = client.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    ours.write(0, b"borrowed").unwrap();
    // The initiator speaks first.
    client.qp.post_send(&WorkRequest::write(0, Payload::EMPTY, Remote::default())).unwrap();
    let mut theirs = theirs;
    for round in 0..3 {
        let key = window.next_key();
        let binding = theirs.binding(1000, 8, Access::REMOTE_WRITE).zero_based();
        server.qp.post_send(&WorkRequest::bind_window(1, key, binding).signaled()).unwrap();
        let bound = server.cq.spin(LIMIT).unwrap().check().unwrap();
        assert_eq!((bound.wr_id, bound.opcode), (1, Opcode::BindWindow));
        let (back, error) = theirs.deregister().unwrap_err();
        assert!(matches!(error, ResourceError::InUse(_, 1)), "{error}");
        theirs = back;
        server.qp.post_recv(&RecvRequest::new(2, &[])).unwrap();
        let remote = Remote { key, offset: 0 };
        client.qp.post_send(&WorkRequest::write(round, ours.sge(0, 8), remote)).unwrap();
        let done = WorkRequest::send_with_invalidate(round, Payload::EMPTY, key).signaled();
        client.qp.post_send(&done).unwrap();
        client.cq.spin(LIMIT).unwrap().check().unwrap();
        let received = server.cq.spin(LIMIT).unwrap().check().unwrap();
        assert_eq!((received.wr_id, received.invalidated), (2, Some(key)));
        assert_eq!(theirs.to_vec(1000, 8).unwrap(), b"borrowed");
        theirs.memory().fill(0, 4096, 0).unwrap();
    }
    theirs.deregister().unwrap();
}

#[test]
fn a_fast_region_lends_memory_by_a_work_request() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let region = server.pd.alloc_fast_region(FastRegionOptions::default()).unwrap();
    let memory = Memory::anonymous(8192, Pages::Normal).unwrap();
    memory.write(8000, b"fast").unwrap();
    let pieces = [memory.slice(8000, 2).unwrap(), memory.slice(8002, 100).unwrap()];
    let ours = client.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    client.qp.post_send(&WorkRequest::write(0, Payload::EMPTY, Remote::default())).unwrap();
    for _ in 0..2 {
        let key = region.next_key();
        let register = WorkRequest::fast_register(1, key, &pieces, Access::REMOTE_READ, 7).signaled();
        server.qp.post_send(&register).unwrap();
        assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().opcode, Opcode::FastRegister);
        let remote = Remote { key, offset: 7 };
        client.qp.post_send(&WorkRequest::read(1, ours.sge(0, 4), remote).signaled()).unwrap();
        client.cq.spin(LIMIT).unwrap().check().unwrap();
        assert_eq!(ours.to_vec(0, 4).unwrap(), b"fast");
        server.qp.post_send(&WorkRequest::local_invalidate(2, key).signaled()).unwrap();
        assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().opcode, Opcode::LocalInvalidate);
    }
    assert!(server.device.attributes().limits.max_fast_pieces >= 16);
}

#[test]
fn a_write_with_immediate_reports_the_written_length() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(100_000, Access::REMOTE_WRITE).unwrap();
    let ours = client.pd.allocate(100_000, Access::empty()).unwrap();
    server.qp.post_recv(&RecvRequest::new(4, &[])).unwrap();
    let piece = ours.sge(0, 99_000);
    let request = WorkRequest::write_with_immediate(1, piece, theirs.remote(1000), *b"99000 by");
    client.qp.post_send(&request.signaled()).unwrap();
    let sent = client.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((sent.wr_id, sent.opcode), (1, Opcode::RdmaWrite));
    let got = server.cq.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!((got.wr_id, got.opcode), (4, Opcode::RecvImmediate));
    assert_eq!((got.byte_len, got.immediate), (99_000, Some(*b"99000 by")));
}

#[test]
fn many_threads_post_and_poll_one_queue_pair() {
    let pair = devices(Progress::Auto);
    let big = QueuePairOptions { max_send_wr: 2000, max_recv_wr: 2000, ..Default::default() };
    let [server, client] = connect_with(&pair, 1, |device| queue_pair(device, big));
    let inbox = server.pd.allocate(8 * 1200, Access::LOCAL_WRITE).unwrap();
    for i in 0..1200 {
        server.qp.post_recv(&RecvRequest::new(i, &[inbox.sge(8 * i as usize, 8)])).unwrap();
    }
    thread::scope(|scope| {
        for worker in 0..4u64 {
            let qp = &client.qp;
            scope.spawn(move || {
                for i in 0..300u64 {
                    let bytes = (worker << 32 | i).to_be_bytes();
                    qp.post_send(&WorkRequest::send(i, Payload::Inline(&bytes))).unwrap();
                }
            });
        }
    });
    let mut next = [0; 4];
    for i in 0..1200 {
        let got = server.cq.spin(LIMIT).unwrap().check().unwrap();
        assert_eq!(got.wr_id, i);
        let bytes: [u8; 8] = inbox.to_vec(8 * i as usize, 8).unwrap().try_into().unwrap();
        let value = u64::from_be_bytes(bytes);
        let worker = (value >> 32) as usize;
        assert_eq!(value & 0xffff_ffff, next[worker], "each thread's messages are in order");
        next[worker] += 1;
    }
    assert_eq!(next, [300; 4]);
}

#[test]
fn a_peer_is_served_while_the_application_does_not_call() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(8, Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
    // Also after busy polling that the server ends without notice.
    for _ in 0..200 {
        assert!(server.cq.poll_one().is_none());
    }
    let ours = client.pd.allocate(8, Access::LOCAL_WRITE).unwrap();
    ours.write(0, b"spinning").unwrap();
    client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 8), theirs.remote(0)).signaled()).unwrap();
    let word = u64::from_ne_bytes(*b"spinning");
    let begin = std::time::Instant::now();
    while theirs.memory().load_u64(0) != Ok(word) {
        assert!(begin.elapsed() < LIMIT, "the write was never placed");
        std::hint::spin_loop();
    }
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[test]
fn a_completion_queue_is_resized_around_its_waiting_entries() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    for wr_id in 0..20 {
        server.qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
    }
    let say = |count: u64| {
        for wr_id in 0..count {
            client.qp.post_send(&WorkRequest::send(wr_id, Payload::EMPTY).signaled()).unwrap();
        }
        for _ in 0..count {
            client.cq.spin(LIMIT).unwrap().check().unwrap();
        }
    };
    say(10);
    assert!(server.cq.resize(9).is_err(), "ten wait");
    server.cq.resize(10).unwrap();
    assert_eq!(server.cq.capacity(), 10);
    server.cq.resize(4096).unwrap();
    say(10);
    for wr_id in 0..20 {
        assert_eq!(server.cq.spin(LIMIT).unwrap().check().unwrap().wr_id, wr_id);
    }
    assert!(!server.cq.overflowed());
    let most = server.device.attributes().limits.max_cqe;
    assert!(server.cq.resize(most + 1).is_err() && server.cq.resize(0).is_err());
}

#[test]
fn a_shared_receive_queue_reports_when_it_runs_low_and_when_a_queue_pair_leaves_it() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let cq = server.device.create_cq(64).unwrap();
    let srq = server.pd.create_srq(8, 1).unwrap();
    let qp = server.pd.create_qp_with_srq(&cq, &cq, &srq, QueuePairOptions::default()).unwrap();
    let listener = server.device.listen(common_address(2), ListenOptions::default()).unwrap();
    let (_pd, sent, peer) = queue_pair(&client.device, QueuePairOptions::default());
    let (_accepted, connected) = thread::scope(|scope| {
        let accepted = scope
            .spawn(|| listener.accept(LIMIT).unwrap().accept(&qp, AcceptOptions::default(), LIMIT).unwrap());
        let connected =
            client.device.connect(&peer, common_address(2), ConnectOptions::default(), LIMIT).unwrap();
        (accepted.join().unwrap(), connected)
    });
    for wr_id in 0..4 {
        srq.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
    }
    srq.arm_limit(3).unwrap();
    let events = server.device.async_events();
    let next = || server.device.wait(&events, Some(LIMIT)).unwrap().then(|| events.poll().unwrap());
    peer.post_send(&WorkRequest::send(1, Payload::EMPTY)).unwrap();
    peer.post_send(&WorkRequest::send(2, Payload::EMPTY).signaled()).unwrap();
    sent.spin(LIMIT).unwrap().check().unwrap();
    assert_eq!(next(), Some(AsyncEvent::SrqLimit { srq: srq.id() }), "two are left");
    // The last queue pair takes no receives with it.
    connected.disconnect().unwrap();
    assert_eq!(next(), Some(AsyncEvent::LastWqeReached { qp: qp.id() }));
    assert_eq!(srq.posted(), Ok(2));
    for wr_id in 0..2 {
        assert_eq!(cq.spin(LIMIT).unwrap().check().unwrap().wr_id, wr_id);
    }
    assert!(cq.poll_one().is_none(), "receives of a shared queue are not flushed");
}

/// Draining a queue pair: after its last event, each request has completed, once and in order.
#[test]
fn a_disconnected_queue_pair_is_drained_when_its_last_event_comes() {
    let pair = devices(Progress::Auto);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(1 << 16, Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
    let ours = client.pd.allocate(1 << 16, Access::LOCAL_WRITE).unwrap();
    for wr_id in 100..105 {
        client.qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
        server.qp.post_recv(&RecvRequest::new(wr_id, &[])).unwrap();
    }
    let (all, one) = (ours.sge(0, 1 << 16), ours.sge(0, 1));
    client
        .qp
        .post_send_list(&[
            WorkRequest::read(1, all, theirs.remote(0)).signaled(),
            WorkRequest::write(2, all, theirs.remote(0)).signaled(),
            WorkRequest::send(3, Payload::EMPTY).fenced().signaled(),
            WorkRequest::read(4, one, theirs.remote(0)).signaled(),
        ])
        .unwrap();
    client.connection.disconnect().unwrap();
    client.qp.post_send(&WorkRequest::send(5, Payload::EMPTY)).unwrap();
    assert!(server.connection.wait_disconnected(LIMIT).unwrap());
    server.connection.disconnect().unwrap();
    for end in [&client, &server] {
        while end.qp.state() != QpState::Error {
            end.device.wait(end.device.async_events(), Some(Duration::from_millis(1))).unwrap();
        }
    }
    let outcomes = |cq: &xwarp_verbs::CompletionQueue| {
        let mut all = Vec::new();
        cq.poll(&mut all, 64);
        all.iter().map(|c| (c.wr_id, c.status)).collect::<Vec<_>>()
    };
    let at_client = outcomes(&client.cq);
    let (sends, receives): (Vec<_>, Vec<_>) = at_client.iter().partition(|(wr_id, _)| *wr_id < 100);
    assert_eq!(sends.len(), 5, "{at_client:?}");
    let done = |wr_id| (wr_id, WcStatus::Success);
    let in_order: Vec<_> = sends.iter().filter(|(wr_id, _)| *wr_id != 5).copied().collect();
    assert_eq!(in_order, [done(1), done(2), done(3), done(4)], "what was posted before is done");
    assert!(sends.contains(&(5, WcStatus::Flushed)), "what comes later is not");
    assert_eq!(receives, (100..105).map(|id| (id, WcStatus::Flushed)).collect::<Vec<_>>());
    let at_server = outcomes(&server.cq);
    let flushed = (101..105).map(|id| (id, WcStatus::Flushed));
    assert_eq!(at_server, [done(100)].into_iter().chain(flushed).collect::<Vec<_>>());
    let info = client.qp.query().unwrap();
    assert_eq!((info.send_outstanding, info.recv_outstanding), (0, 0));
}

#[test]
fn a_queue_pair_reports_its_attributes_and_the_negotiated_parameters() {
    let pair = devices(Progress::Auto);
    let options =
        QueuePairOptions { max_send_wr: 7, max_send_sge: 2, max_inline_data: 40, ..Default::default() };
    let [server, client] = connect_with(&pair, 1, |device| queue_pair(device, options));
    let info = client.qp.query().unwrap();
    assert_eq!(info.attributes.options, options);
    assert_eq!(
        (info.state, info.ird, info.ord),
        (QpState::Rts, client.connection.ird(), client.connection.ord())
    );
    let (local, remote) = info.addresses.unwrap();
    assert_eq!(server.qp.query().unwrap().addresses, Some((remote, local)));
    let peer = client.connection.peer_depths();
    assert_eq!(peer.ird, Some(server.qp.query().unwrap().ird));
    assert_eq!(peer.ord, Some(server.qp.query().unwrap().ord));
    let limits = client.device.attributes().limits;
    assert!(limits.max_mw > 0 && limits.max_fast_pieces > 0 && limits.max_sge >= 4);
}

#[test]
fn counters_have_stable_names() {
    let pair = devices(Progress::Auto);
    let before = pair[1].counters();
    let ends = connect(&pair, 1);
    let after = pair[1].counters();
    assert_eq!(before.value("stack.active_opens"), Some(0));
    let grown = after.since(&before);
    assert_eq!(grown.value("stack.active_opens"), Some(1));
    assert!(grown.value("tcp.segments_in").unwrap_or(0) >= 2, "{grown}");
    assert_eq!(pair[0].counters().value("stack.passive_opens"), Some(1));
    assert_eq!(after.value("no.such"), None);
    // Counters of RDMAP and DDP, and of their Terminates.
    let [server, client] = ends;
    let theirs = server.pd.allocate(64, Access::REMOTE_WRITE).unwrap();
    client.qp.post_send(&WorkRequest::write(1, Payload::Inline(b"count me"), theirs.remote(0))).unwrap();
    let beyond = WorkRequest::write(2, Payload::Inline(b"count me"), theirs.remote(60));
    client.qp.post_send(&beyond.signaled()).unwrap();
    assert!(client.connection.wait_disconnected(LIMIT).unwrap());
    assert!(server.connection.wait_disconnected(LIMIT).unwrap());
    let [at_server, at_client] = [pair[0].counters(), pair[1].counters()];
    assert_eq!(at_server.value("ddp.write_bytes"), Some(8));
    assert_eq!(at_server.value("rdmap.terminate_sent_ddp_bounds"), Some(1));
    assert_eq!(at_client.value("rdmap.terminate_received_ddp_bounds"), Some(1));
    assert_eq!(at_client.value("rdmap.terminate_received_other"), Some(0));
    assert!(at_client.value("rdmap.writes").unwrap() >= 1);
}

#[test]
fn data_survives_a_lossy_cable() {
    use xwarp_verbs::sim::Faults;
    let faults = Faults { loss: 0.02, ..Faults::default() };
    let wire = WireConfig { faults: [faults; 2], ..WireConfig::default() };
    let pair = devices_with(&DeviceOptions::default(), &wire);
    let [server, client] = connect(&pair, 1);
    let theirs = server.pd.allocate(1 << 20, Access::REMOTE_WRITE | Access::LOCAL_WRITE).unwrap();
    let ours = client.pd.allocate(1 << 20, Access::empty()).unwrap();
    let data = pattern(1 << 20, 77);
    ours.write(0, &data).unwrap();
    client.qp.post_send(&WorkRequest::write(1, ours.sge(0, 1 << 20), theirs.remote(0)).signaled()).unwrap();
    client.cq.spin(Duration::from_mins(1)).unwrap().check().unwrap();
    assert!(theirs.to_vec(0, 1 << 20).unwrap() == data);
    assert!(client.device.counters().value("tcp.retransmits").unwrap() > 0);
}
