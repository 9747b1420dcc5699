//! Two engines over one registry.

use super::*;
use crate::rdmap::RdmapError;

/// An established queue pair of another engine, in the domain of `end`.
fn second_engine(end: &End) -> End {
    let mut rnic = Rnic::new(Arc::clone(end.rnic.registry()));
    let End { pd, cq, .. } = *end;
    let qp = rnic.create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
    rnic.connecting(qp, CONN, attempt(MpaConfig::default()));
    let ring = Arc::clone(&end.ring);
    let (wire, mulpdu) = (VecDeque::new(), MULPDU);
    let mut end = End { rnic, pd, cq, ring, qp, offset: 0, wire, finished: false, mulpdu };
    end.establish(4, 4, None);
    end
}

/// The ULPDU of a new peer's first message, an RDMA Write of `data`.
fn write(key: STag, data: &[u8]) -> Vec<u8> {
    let mut peer = Pair::new().a;
    peer.post_with(1, write_to(key, 0), Payload::Inline(data), SendFlags::SIGNALED);
    peer.pull().unwrap()
}

#[test]
fn a_key_is_valid_in_all_engines_and_ends_in_all_at_once() {
    let mut first = Pair::new().b;
    let mut second = second_engine(&first);
    assert_ne!(first.qp, second.qp);
    let (key, memory) = first.region(4, 0, ALL);
    for (end, data) in [(&mut first, b"one "), (&mut second, b"two ")] {
        end.take(&write(key, data)).unwrap();
        assert_eq!(bytes(&memory), data);
    }
    first.rnic.registry().deregister(key).unwrap();
    for end in [&mut first, &mut second] {
        assert_eq!(end.take(&write(key, b"late")), Err(Refusal::Stop));
        assert_eq!(bytes(&memory), b"two ", "no byte is written after that");
        end.rnic.forget(key);
    }
}

#[test]
fn a_window_ends_with_its_region_in_an_engine_that_has_used_it() {
    let mut end = Pair::new().b;
    let (region, memory) = end.region(4, 0, ALL);
    let window = end.rnic.registry().alloc_window(end.pd).unwrap().next();
    let binding = Binding { region, offset: 0, len: 4, base: 0, access: Access::REMOTE_WRITE };
    end.post(1, Operation::BindWindow { window, binding }, &[]);
    end.take(&write(window, b"one ")).unwrap();
    end.rnic.registry().revoke(region).unwrap();
    assert_eq!(end.take(&write(window, b"late")), Err(Refusal::Stop));
    assert_eq!(bytes(&memory), b"one ");
}

#[test]
fn an_engine_sees_that_another_registered_a_fast_region_again() {
    let mut first = Pair::new().b;
    let mut second = second_engine(&first);
    let registration = FastRegistration { pd: first.pd, max_pieces: 1, stream: None };
    let region = first.rnic.registry().alloc_fast_region(registration).unwrap();
    let mut register = |key, access| {
        let memory = Memory::anonymous(4, Pages::Normal).unwrap();
        first.post(1, Operation::LocalInvalidate { key: region }, &[]);
        first.poll();
        let operation = Operation::FastRegister { key, access, base: 0 };
        let pieces = [memory.clone()];
        first.post_with(2, operation, Payload::Memory(&pieces), SendFlags::SIGNALED);
        assert_eq!(first.outcomes(), [(2, WcStatus::Success)]);
        memory
    };
    // The same key twice, as after 256 registrations.
    for data in [b"one ", b"two "] {
        let memory = register(region, Access::REMOTE_WRITE);
        second.take(&write(region, data)).unwrap();
        assert_eq!(bytes(&memory), data);
    }
    let memory = register(region, Access::REMOTE_READ);
    assert_eq!(second.take(&write(region, b"late")), Err(Refusal::Stop));
    assert_eq!(bytes(&memory), [0; 4]);
}

#[test]
fn a_region_that_is_registered_again_keeps_its_key_and_loses_its_former_memory_and_rights() {
    let mut first = Pair::new().b;
    let (key, before) = first.region(4, 0, Access::REMOTE_WRITE);
    let mut second = second_engine(&first);
    let registry = first.rnic.registry();
    second.take(&write(key, b"one ")).unwrap();
    let memory = Memory::anonymous(4, Pages::Normal).unwrap();
    let again = |pd, access| Registration { pd, memory: memory.clone(), access, base: 0, stream: None };
    registry.reregister(key, again(first.pd, Access::REMOTE_WRITE)).unwrap();
    // As an engine that has not forgotten the key yet.
    second.take(&write(key, b"two ")).unwrap();
    assert_eq!((bytes(&before), bytes(&memory)), (b"one ".to_vec(), b"two ".to_vec()));
    let other = registry.alloc_pd().unwrap();
    registry.reregister(key, again(other, Access::REMOTE_WRITE)).unwrap();
    let used = ResourceError::InUse(Object::ProtectionDomain, 1);
    assert_eq!(registry.dealloc_pd(other), Err(used));
    let (user, need) = (second.user(), Access::REMOTE_WRITE);
    let opened = |end: &End| end.rnic.shared.keys.open(user, key, need, 0, 4).err();
    assert_eq!(opened(&second), Some(keys::KeyError::Foreign));
    registry.reregister(key, again(first.pd, Access::REMOTE_READ)).unwrap();
    registry.dealloc_pd(other).unwrap();
    assert_eq!(opened(&second), Some(keys::KeyError::Access));

    let window = registry.alloc_window(first.pd).unwrap();
    registry.reregister(key, again(first.pd, ALL)).unwrap();
    let binding = Binding { region: key, offset: 0, len: 4, base: 0, access: Access::REMOTE_READ };
    registry.with_keys(|keys| keys.bind(user, window, &binding)).unwrap();
    let bound = Err(ResourceError::InUse(Object::Region, 1));
    assert_eq!(registry.reregister(key, again(first.pd, Access::empty())), bound);
    registry.dealloc_window(window).unwrap();
    registry.deregister(key).unwrap();
    let gone = Err(ResourceError::UnknownKey(key));
    assert_eq!(registry.reregister(key, again(first.pd, ALL)), gone);
}

#[test]
fn queue_pairs_of_all_engines_count_in_a_domain_and_have_different_ids() {
    let first = Pair::new().b;
    let mut second = second_engine(&first);
    let memory = Memory::anonymous(4, Pages::Normal).unwrap();
    let region = |stream| {
        let (pd, memory) = (first.pd, memory.clone());
        first.rnic.registry().register(Registration { pd, memory, access: ALL, base: 0, stream }).unwrap()
    };
    // Another engine's queue pair owns the one; the streams of both share the other (RFC 5040 section 8.1.1, rule 7).
    let (foreign, shared) = (region(Some(first.qp)), region(None));
    let user = second.user();
    let opened = second.rnic.shared.keys.open(user, foreign, Access::REMOTE_WRITE, 0, 4);
    assert_eq!(opened.err(), Some(keys::KeyError::Foreign));
    let invalidated = second.rnic.shared.keys.invalidate_remotely(user, shared);
    assert_eq!(invalidated, Err(RdmapError::CannotInvalidate));
    let used = ResourceError::InUse(Object::ProtectionDomain, 4);
    assert_eq!(first.rnic.registry().dealloc_pd(first.pd), Err(used));
}

#[test]
fn an_overflow_ends_the_queue_pairs_of_each_engine_that_adds_an_entry() {
    let mut first = Pair::new().b;
    let mut second = second_engine(&first);
    // Room for one completion.
    first.rnic.registry().resize_cq(first.cq, 1).unwrap();
    let complete = |end: &mut End, wr_id| {
        end.receive(wr_id, &[]);
        let mut peer = Pair::new().a;
        peer.post(wr_id, SEND, &[]);
        let _ = end.take(&peer.pull().unwrap());
        end.state()
    };
    assert_eq!(complete(&mut first, 1), QpState::Rts);
    let mut third = second_engine(&first);
    assert_eq!(complete(&mut second, 2), QpState::Terminate);
    assert_eq!(first.state(), QpState::Rts, "its engine has not added an entry since");
    assert_eq!(complete(&mut third, 3), QpState::Terminate);
    let overflows = |end: &mut End| {
        let events = end.async_events();
        let count = |event: &&AsyncEvent| matches!(event, AsyncEvent::CqOverflow { .. });
        events.iter().filter(count).count()
    };
    assert_eq!([&mut first, &mut second, &mut third].map(overflows), [0, 1, 0], "reported once");
    assert_eq!(first.outcomes(), [(1, WcStatus::Success)]);
    // Also a queue pair that is created later.
    let mut late = second_engine(&first);
    assert_eq!(complete(&mut late, 4), QpState::Terminate);
}
