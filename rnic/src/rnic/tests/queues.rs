//! Completion queues, shared receive queues, limits, and when objects may be destroyed.

use super::*;

fn completion(wr_id: u64, status: WcStatus, solicited: bool) -> WorkCompletion {
    let qp = <QpId as table::Id>::from_raw(0);
    WorkCompletion {
        wr_id,
        status,
        opcode: Opcode::Recv,
        qp,
        context: 0,
        byte_len: 0,
        invalidated: None,
        immediate: None,
        solicited,
        overtook: false,
    }
}

#[test]
fn an_armed_queue_notifies_once_and_only_for_the_requested_entries() {
    let bell = Arc::new(Bell::default());
    let ring = CompletionRing::new(16, Some(bell.clone()));
    let notifies = |wr_id, status, solicited| {
        let before = bell.0.load(Ordering::Relaxed);
        let notified = ring.push(completion(wr_id, status, solicited)).unwrap();
        assert_eq!(bell.0.load(Ordering::Relaxed) - before, usize::from(notified));
        notified
    };
    assert!(!notifies(1, WcStatus::Success, true), "not armed");
    ring.arm(true);
    assert!(!notifies(2, WcStatus::Success, false), "not solicited");
    assert!(notifies(3, WcStatus::Success, true));
    assert!(!notifies(4, WcStatus::Success, true), "once");
    ring.arm(true);
    assert!(notifies(5, WcStatus::Flushed, false), "an error counts as solicited");
    ring.arm(false);
    ring.arm(true);
    assert!(notifies(6, WcStatus::Success, false), "the wider request stays in force");
    let mut out = Vec::new();
    assert_eq!((ring.poll(&mut out, 4), ring.poll(&mut out, 9), ring.len()), (4, 2, 0));
    assert!(out.iter().map(|c| c.wr_id).eq(1..=6));
}

#[test]
fn a_resized_queue_keeps_its_entries_and_their_order() {
    let ring = CompletionRing::new(2, None);
    ring.push(completion(1, WcStatus::Success, false)).unwrap();
    ring.push(completion(2, WcStatus::Success, false)).unwrap();
    assert_eq!(ring.resize(1), Err(2));
    ring.resize(5).unwrap();
    assert_eq!(ring.capacity(), 5);
    for wr_id in 3..6 {
        ring.push(completion(wr_id, WcStatus::Success, false)).unwrap();
    }
    assert_eq!(ring.len(), 5);
    assert!(std::iter::from_fn(|| ring.pop()).map(|c| c.wr_id).eq(1..6));
    ring.resize(1).unwrap();
    ring.push(completion(6, WcStatus::Success, false)).unwrap();
    assert_eq!(ring.pop().map(|c| c.wr_id), Some(6));
}

#[test]
fn a_ring_is_polled_from_another_thread_while_it_is_filled_and_resized() {
    const ENTRIES: u64 = 20_000;
    let ring = CompletionRing::new(64, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = 0;
            while next < ENTRIES {
                match ring.pop() {
                    Some(entry) => {
                        assert_eq!(entry.wr_id, next);
                        next += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
        for wr_id in 0..ENTRIES {
            while ring.len() >= 60 {
                std::thread::yield_now();
            }
            if wr_id % 1000 == 999 {
                ring.resize(64).unwrap();
            }
            ring.push(completion(wr_id, WcStatus::Success, false)).unwrap();
        }
    });
}

#[test]
fn several_threads_fill_and_poll_a_ring_and_each_entry_comes_once_in_order() {
    const FILLERS: u64 = 2;
    const ENTRIES: u64 = 10_000;
    let ring = CompletionRing::new(256, None);
    let polled = std::sync::Mutex::new(Vec::new());
    let all = (FILLERS * ENTRIES) as usize;
    std::thread::scope(|scope| {
        for filler in 0..FILLERS {
            let ring = &ring;
            scope.spawn(move || {
                for number in 0..ENTRIES {
                    while ring.len() >= 250 {
                        std::thread::yield_now();
                    }
                    ring.push(completion(number << 8 | filler, WcStatus::Success, false)).unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                let mut mine = Vec::new();
                while polled.lock().unwrap().len() < all {
                    if ring.poll_each(20, |entry| mine.push(entry.wr_id)) == 0 {
                        std::thread::yield_now();
                    }
                    // What one thread polls of one filler is in the order of its entries.
                    for filler in 0..FILLERS {
                        assert!(mine.iter().filter(|wr_id| **wr_id & 0xff == filler).is_sorted());
                    }
                    polled.lock().unwrap().append(&mut mine);
                }
            });
        }
    });
    let mut polled = polled.into_inner().unwrap();
    polled.sort_unstable();
    polled.dedup();
    assert_eq!((polled.len(), ring.len()), (all, 0));
}

#[test]
fn a_poller_that_arms_before_it_sleeps_misses_no_entry() {
    const ENTRIES: u64 = 5000;
    struct Waker(std::thread::Thread);
    impl Notify for Waker {
        fn notify(&self) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Waker(std::thread::current()));
    let ring = CompletionRing::new(ENTRIES as u32, Some(waker));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for wr_id in 0..ENTRIES {
                ring.push(completion(wr_id, WcStatus::Success, false)).unwrap();
                std::thread::yield_now();
            }
        });
        let mut next = 0;
        while next < ENTRIES {
            ring.arm(false);
            let found = ring.poll_each(usize::MAX, |entry| {
                assert_eq!(entry.wr_id, next);
                next += 1;
            });
            if found == 0 {
                // Only a notification ends this: the test hangs if one is missed.
                std::thread::park();
            }
        }
    });
}

#[test]
fn a_poller_may_use_the_ring_for_each_entry() {
    let ring = CompletionRing::new(16, None);
    for wr_id in 0..12 {
        ring.push(completion(wr_id, WcStatus::Success, false)).unwrap();
    }
    let mut found = Vec::new();
    let n = ring.poll_each(10, |entry| {
        ring.push(completion(entry.wr_id + 100, WcStatus::Success, false)).unwrap();
        found.push(entry.wr_id);
    });
    assert_eq!((n, ring.len()), (10, 12));
    assert!(found.into_iter().eq(0..10));
}

#[test]
fn rfc5042_s6_4_6_an_overflow_ends_the_queue_pairs_of_that_queue_and_no_others() {
    let mut end = End::new(|_, a| a);
    let (small, ring) = end.rnic.registry().create_cq(2, None).unwrap();
    let victim = end.rnic.create_qp(QpAttributes::new(end.pd, small, end.cq)).unwrap();
    let conn = ConnId { index: 1, generation: 0 };
    end.rnic.connecting(victim, conn, attempt(MpaConfig::default()));
    end.establish(1, 1, None);
    let mut established = end.rnic.query_qp(end.qp).unwrap();
    let qp = end.qp;
    end.qp = victim;
    let agreed = |rnic: &mut Rnic| {
        let pair = rnic.qps.get_mut(victim).unwrap();
        pair.establish(1, 1, (path().flow.local, path().flow.remote));
    };
    agreed(&mut end.rnic);
    end.receive(50, &[]);
    for wr_id in 0..3 {
        end.post(wr_id, SEND, &[]);
    }
    let mut offset = 0;
    while let PulledUlpdu { pulled: Pulled::Ulpdu | Pulled::LastUlpdu, end: at, .. } =
        sim::pull(&mut end.rnic, conn, offset, MULPDU, MULPDU)
    {
        offset = at;
    }
    end.rnic.acked(conn, offset);
    assert!(ring.overflowed());
    assert_eq!(ring.len(), 2);
    assert_eq!(end.state(), QpState::Terminate);
    assert_eq!(end.outcomes(), [(50, WcStatus::Flushed)], "the other queue gets a completion");
    let events = end.async_events();
    let fatal = AsyncEvent::QpFatal { qp: victim, fault: QpFault::CqOverflow };
    assert_eq!(events, [AsyncEvent::CqOverflow { cq: small }, fatal]);
    established.send_outstanding = 0;
    assert_eq!(
        end.rnic.query_qp(qp).unwrap(),
        established,
        "a queue pair that does not use it is not affected"
    );
}

#[test]
fn a_shared_queue_reports_its_limit_once_and_a_failed_pair_its_last_receive() {
    let mut pair = Pair::with(|rnic, a| {
        let srq = rnic
            .registry()
            .create_srq(&SrqAttributes { pd: a.pd, max_wr: 4, max_sge: 1, limit: 2 })
            .unwrap()
            .id();
        QpAttributes { srq: Some(srq), ..a }
    });
    let srq = pair.b.rnic.query_qp(pair.b.qp).unwrap().attributes.srq.unwrap();
    for wr_id in 0..4 {
        pair.b.rnic.post_srq_recv(srq, &RecvRequest { wr_id, scatter: &[] }).unwrap();
    }
    let full = pair.b.rnic.post_srq_recv(srq, &RecvRequest { wr_id: 9, scatter: &[] });
    assert_eq!(full, Err(PostError::QueueFull(4)));
    let own = pair.b.rnic.post_recv(pair.b.qp, &RecvRequest { wr_id: 9, scatter: &[] });
    assert_eq!(own, Err(PostError::Unknown), "no receive queue of its own with a shared one");
    for wr_id in 0..4 {
        pair.a.post(wr_id, SEND, &[]);
    }
    pair.run();
    assert_eq!(pair.b.async_events(), [AsyncEvent::SrqLimit { srq }]);
    pair.b.rnic.registry().resize_srq(srq, 8).unwrap();
    pair.b.rnic.arm_srq_limit(srq, 1).unwrap();
    assert_eq!(pair.b.async_events(), [AsyncEvent::SrqLimit { srq }], "there are fewer already");
    pair.b.rnic.fail_qp(pair.b.qp).unwrap();
    assert_eq!(pair.b.async_events(), [AsyncEvent::LastWqeReached { qp: pair.b.qp }]);
}

#[test]
fn objects_are_kept_while_others_use_them() {
    let mut rnic = Rnic::new(registry(Limits { max_qp: 1, max_mr: 1, ..Limits::default() }, 1));
    let pd = rnic.registry().alloc_pd().unwrap();
    let (cq, _) = rnic.registry().create_cq(8, None).unwrap();
    let srq =
        rnic.registry().create_srq(&SrqAttributes { pd, max_wr: 1, max_sge: 1, limit: 0 }).unwrap().id();
    let attributes = QpAttributes { srq: Some(srq), ..QpAttributes::new(pd, cq, cq) };
    let qp = rnic.create_qp(attributes).unwrap();
    let memory = Memory::anonymous(8, Pages::Normal).unwrap();
    let registration = Registration { pd, memory, access: ALL, base: 0, stream: Some(qp) };
    let key = rnic.registry().register(registration.clone()).unwrap();
    assert_eq!(
        rnic.create_qp(attributes).err(),
        Some(ResourceError::TooMany { object: Object::QueuePair, limit: 1 })
    );
    assert_eq!(
        rnic.registry().register(registration.clone()).err(),
        Some(ResourceError::TooMany { object: Object::Region, limit: 1 })
    );
    assert_eq!(rnic.registry().dealloc_pd(pd), Err(ResourceError::InUse(Object::ProtectionDomain, 3)));
    assert_eq!(rnic.registry().destroy_cq(cq), Err(ResourceError::InUse(Object::CompletionQueue, 2)));
    assert_eq!(rnic.registry().destroy_srq(srq), Err(ResourceError::InUse(Object::SharedReceiveQueue, 1)));
    rnic.destroy_qp(qp).unwrap();
    assert_eq!(rnic.destroy_qp(qp), Err(ResourceError::Unknown(Object::QueuePair)));
    rnic.registry().destroy_cq(cq).unwrap();
    rnic.registry().destroy_srq(srq).unwrap();
    rnic.registry().deregister(key).unwrap();
    assert_eq!(rnic.registry().register(registration).err(), Some(ResourceError::Unknown(Object::QueuePair)));
    rnic.registry().dealloc_pd(pd).unwrap();
}

#[test]
fn requests_that_do_not_fit_are_rejected_when_they_are_posted() {
    let options = QueuePairOptions {
        max_send_wr: 2,
        max_recv_wr: 1,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 4,
        ..QueuePairOptions::default()
    };
    let mut pair = Pair::with(|_, a| QpAttributes { options, ..a });
    let qp = pair.a.qp;
    let sge = Sge { key: STag::new(1), offset: 0, len: 8 };
    let mut post = |operation, payload: Payload<'_>| {
        let request = WorkRequest { wr_id: 0, operation, payload, flags: SendFlags::empty() };
        pair.a.rnic.post_send(qp, &request)
    };
    assert_eq!(post(SEND, Payload::Gather(&[sge; 3])), Err(PostError::TooManyPieces(2)));
    assert_eq!(post(SEND, Payload::Inline(&[0; 5])), Err(PostError::InlineTooLong(4)));
    assert_eq!(post(read_from(STag::new(1), 0), Payload::Gather(&[sge; 2])), Err(PostError::Payload));
    assert_eq!(post(read_from(STag::new(1), 0), Payload::Inline(&[])), Err(PostError::Payload));
    let add = Operation::FetchAdd { remote: Remote::default(), add: 1, mask: 0 };
    assert_eq!(post(add, Payload::Gather(&[Sge { len: 4, ..sge }])), Err(PostError::Payload));
    assert_eq!(post(Operation::Immediate { data: [0; 8] }, Payload::Gather(&[sge])), Err(PostError::Payload));
    post(SEND, Payload::EMPTY).unwrap();
    post(SEND, Payload::EMPTY).unwrap();
    assert_eq!(post(SEND, Payload::EMPTY), Err(PostError::QueueFull(2)));
    let mut receive = |scatter: &[Sge]| pair.a.rnic.post_recv(qp, &RecvRequest { wr_id: 0, scatter });
    assert_eq!(receive(&[sge; 2]), Err(PostError::TooManyPieces(1)));
    receive(&[sge]).unwrap();
    assert_eq!(receive(&[]), Err(PostError::QueueFull(1)));
}

#[test]
fn objects_with_invalid_attributes_are_rejected() {
    let mut end = End::new(|_, a| a);
    let attributes = QpAttributes::new(end.pd, end.cq, end.cq);
    let limits = end.rnic.limits().clone();
    for max_send_wr in [limits.max_qp_wr + 1, 0] {
        let options = QueuePairOptions { max_send_wr, ..attributes.options };
        let refused = end.rnic.create_qp(QpAttributes { options, ..attributes });
        assert!(matches!(refused, Err(ResourceError::Attribute { attribute: "max_send_wr", .. })));
    }
    let other = end.rnic.registry().alloc_pd().unwrap();
    let srq = end
        .rnic
        .registry()
        .create_srq(&SrqAttributes { pd: other, max_wr: 1, max_sge: 1, limit: 0 })
        .unwrap()
        .id();
    let foreign = QpAttributes { srq: Some(srq), ..attributes };
    assert_eq!(end.rnic.create_qp(foreign).err(), Some(ResourceError::ForeignSrq));
    assert!(end.rnic.registry().create_cq(0, None).is_err());
    let memory = Memory::anonymous(8, Pages::Normal).unwrap();
    let wraps = Registration { pd: end.pd, memory, access: ALL, base: u64::MAX - 7, stream: None };
    assert_eq!(end.rnic.registry().register(wraps).err(), Some(ResourceError::Memory));
}

/// A second queue pair of `end`, connected, that shares its receive queue.
fn second_user(end: &mut End) -> (QpId, ConnId) {
    let attributes = end.rnic.query_qp(end.qp).unwrap().attributes;
    let qp = end.rnic.create_qp(attributes).unwrap();
    let conn = ConnId { index: 1, generation: 0 };
    end.rnic.connecting(qp, conn, attempt(MpaConfig::default()));
    let pair = end.rnic.qps.get_mut(qp).unwrap();
    pair.establish(4, 4, (path().flow.local, path().flow.remote));
    (qp, conn)
}

#[test]
fn a_receive_is_given_to_the_next_live_queue_pair_if_the_first_is_dead() {
    type Die = fn(&mut End);
    let deaths: [Die; 4] = [
        |end| end.rnic.fail_qp(end.qp).unwrap(),
        |end| end.rnic.event(CONN, Event::StreamError(xwarp_tcp::mpa::MpaError::Withheld.into())),
        |end| end.rnic.event(CONN, Event::Closed(xwarp_tcp::ulp::CloseReason::Reset)),
        |end| end.rnic.destroy_qp(end.qp).unwrap(),
    ];
    for die in deaths {
        for dies_after_the_post in [false, true] {
            let mut pair = Pair::with(|rnic, a| {
                let attributes = SrqAttributes { pd: a.pd, max_wr: 8, max_sge: 1, limit: 0 };
                QpAttributes { srq: Some(rnic.registry().create_srq(&attributes).unwrap().id()), ..a }
            });
            let end = &mut pair.b;
            let srq = end.rnic.query_qp(end.qp).unwrap().attributes.srq.unwrap();
            let (_, other) = second_user(end);
            let message = placement::send_segment(1, 0, true, &[]);
            assert_eq!(end.take(&message), Err(Refusal::Withhold));
            let pieces = [&message[..]];
            let ulpdu = Ulpdu::new(&pieces);
            assert_eq!(end.rnic.place(other, &ulpdu, Arrival::InOrder).err(), Some(Refusal::Withhold));
            if !dies_after_the_post {
                die(end);
            }
            end.rnic.post_srq_recv(srq, &RecvRequest { wr_id: 1, scatter: &[] }).unwrap();
            if dies_after_the_post {
                die(end);
            }
            assert!(end.rnic.has_deferred());
            assert_eq!(end.rnic.next_resume(), Some(other));
            end.rnic.place(other, &ulpdu, Arrival::InOrder).unwrap();
            assert_eq!(end.rnic.next_resume(), None);
        }
    }
}

#[test]
fn a_resumed_queue_pair_that_uses_no_receive_leaves_it_to_the_next_one() {
    let mut pair = Pair::with(|rnic, a| {
        let attributes = SrqAttributes { pd: a.pd, max_wr: 8, max_sge: 1, limit: 0 };
        QpAttributes { srq: Some(rnic.registry().create_srq(&attributes).unwrap().id()), ..a }
    });
    let end = &mut pair.b;
    let srq = end.rnic.query_qp(end.qp).unwrap().attributes.srq.unwrap();
    let (_, other) = second_user(end);
    let message = placement::send_segment(1, 0, true, &[]);
    let pieces = [&message[..]];
    let ulpdu = Ulpdu::new(&pieces);
    assert_eq!(end.take(&message), Err(Refusal::Withhold));
    assert_eq!(end.rnic.place(other, &ulpdu, Arrival::InOrder).err(), Some(Refusal::Withhold));
    end.rnic.post_srq_recv(srq, &RecvRequest { wr_id: 1, scatter: &[] }).unwrap();
    // The stack no longer knows the first connection, or its session has stopped: nothing is placed.
    assert_eq!(end.rnic.next_resume(), Some(CONN));
    assert_eq!(end.rnic.next_resume(), Some(other));
    assert_eq!(end.rnic.next_resume(), None);
}

#[test]
fn a_completion_queue_that_is_resized_often_keeps_one_ring() {
    let ring = CompletionRing::new(1, None);
    for wr_id in 0..1_000_000u32 {
        ring.resize(1 + wr_id % 2).unwrap();
    }
    ring.push(completion(7, WcStatus::Success, false)).unwrap();
    assert_eq!((ring.len(), ring.pop().map(|c| c.wr_id)), (1, Some(7)));
    drop(ring);
}

#[test]
fn a_region_of_one_queue_pair_is_never_accessible_to_a_later_one() {
    let mut end = End::new(|_, a| a);
    let attributes = QpAttributes::new(end.pd, end.cq, end.cq);
    let owner = end.rnic.create_qp(attributes).unwrap();
    let memory = Memory::anonymous(8, Pages::Normal).unwrap();
    let registration = Registration { pd: end.pd, memory, access: ALL, base: 0, stream: Some(owner) };
    let key = end.rnic.registry().register(registration).unwrap();
    end.rnic.destroy_qp(owner).unwrap();
    for _ in 0..5000 {
        let qp = end.rnic.create_qp(attributes).unwrap();
        let user = User { pd: end.pd, qp, rights: Access::all() };
        let opened = end.rnic.shared.keys.open(user, key, Access::REMOTE_WRITE, 0, 8);
        assert_eq!(opened.err(), Some(keys::KeyError::Foreign), "{qp:?} is not {owner:?}");
        end.rnic.destroy_qp(qp).unwrap();
    }
}
