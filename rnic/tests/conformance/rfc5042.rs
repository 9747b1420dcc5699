//! RFC 5042, and the security rules that RFCs 5040 (section 8.1) and 5041 (section 8.3) repeat.

use std::collections::HashSet;

use xwarp_rnic::{
    Access, AsyncEvent, Binding, Limits, Memory, Operation, Pages, QpFault, QpState, STag, WcStatus,
    ddp::DdpError,
    engine::{Engine, EngineConfig},
    rnic::{QpAttributes, Registration, SrqAttributes},
};
use xwarp_tcp::{mpa::MpaConfig, secret::Secret};

use crate::peer::*;

fn tags(seed: u64, count: usize) -> Vec<u32> {
    let engine = Engine::new(EngineConfig { secret: Secret::from_number(seed), ..EngineConfig::default() });
    let pd = engine.rnic().registry().alloc_pd().unwrap();
    let memory = Memory::anonymous(64, Pages::Normal).unwrap();
    (0..count)
        .map(|_| Registration { pd, memory: memory.clone(), access: ALL, base: 0, stream: None })
        .map(|registration| engine.rnic().registry().register(registration).unwrap().value())
        .collect()
}

#[test]
fn rfc5042_s6_1_1_tags_are_spread_and_follow_the_seed() {
    let [one, two] = [1, 2].map(|seed| tags(seed, 1000));
    assert_ne!(one[..4], two[..4]);
    assert_eq!(one.iter().collect::<HashSet<_>>().len(), 1000);
    // Sixteen parts of the whole range: none is empty, and neighbours are not registered one after the other.
    let parts: HashSet<_> = one.iter().map(|t| t >> 28).collect();
    assert_eq!(parts.len(), 16);
    assert!(one.windows(2).filter(|w| w[0].abs_diff(w[1]) < 1 << 12).count() < 20);
}

#[test]
fn rfc5042_s6_1_1_a_freed_tag_does_not_return_soon() {
    let engine = Engine::new(EngineConfig::default());
    let pd = engine.rnic().registry().alloc_pd().unwrap();
    let memory = Memory::anonymous(64, Pages::Normal).unwrap();
    let mut seen = HashSet::new();
    for _ in 0..10_000 {
        let registration = Registration { pd, memory: memory.clone(), access: ALL, base: 0, stream: None };
        let key = engine.rnic().registry().register(registration).unwrap();
        assert!(seen.insert(key));
        engine.rnic().registry().deregister(key).unwrap();
    }
}

/// Rights: each is needed for its operation, and none implies another.
#[test]
fn rfc5042_s6_3_5_access_rights_are_separate() {
    let reads = Access::REMOTE_READ;
    let writes = Access::REMOTE_WRITE;
    for access in [Access::LOCAL_WRITE, reads, writes, reads | writes] {
        let mut world = World::new();
        let (key, memory) = world.region(8, 7, access);
        world.say([write(key, 0, b"x")]);
        assert_eq!(world.state() == QpState::Rts, access.contains(writes));
        assert_eq!(bytes(&memory)[0] == b'x', access.contains(writes));
        let mut world = World::new();
        let (key, _) = world.region(8, 7, access);
        world.say([read_request(1, key, 0, 8)]);
        assert_eq!(world.state() == QpState::Rts, access.contains(reads));
    }
}

#[test]
fn rfc5042_s6_2_1_every_range_beside_the_region_is_refused() {
    for (to, len) in
        [(0u64, 9usize), (8, 1), (7, 2), (u64::MAX, 1), (u64::MAX - 7, 8), (1 << 32, 1), (1 << 63, 8)]
    {
        let mut world = World::new();
        let (key, memory) = world.region(8, 7, ALL);
        world.say([write(key, to, &vec![0; len])]);
        assert_eq!((world.state(), bytes(&memory)), (QpState::Terminate, vec![7; 8]), "{len} bytes at {to}");
    }
}

/// RFC 5042 section 6.4.5, RFC 5040 section 8.1.1 rule 7.
#[test]
fn rfc5042_s6_4_5_a_tag_that_streams_share_is_not_the_peers_to_invalidate() {
    let mut world = World::new();
    let attributes = QpAttributes::new(world.pd, world.cq, world.cq);
    let other = world.card.engine.rnic_mut().create_qp(attributes).unwrap();
    world.connect(other, MpaConfig::default());
    let (key, _) = world.region(8, 7, ALL);
    world.receive(1, &[]);
    world.say([untagged_word(0x44, key.value(), 0, 1, 0, true, b"")]);
    assert_eq!(world.terminate().numbers(), (0, 1, 9));
}

/// A window is bound to one stream: no other stream can use it, whatever else they share, and only its own peer can
/// invalidate it.
#[test]
fn rfc5042_s6_4_5_a_window_is_one_streams_alone() {
    let mut world = World::new();
    let attributes = QpAttributes::new(world.pd, world.cq, world.cq);
    let other = world.card.engine.rnic_mut().create_qp(attributes).unwrap();
    let second = world.connect(other, MpaConfig::default());
    let (region, memory) = world.region(64, 7, Access::LOCAL_WRITE | Access::WINDOW_BIND);
    let window = world.card.engine.rnic().registry().alloc_window(world.pd).unwrap().next();
    let binding = Binding { region, offset: 8, len: 8, base: 0, access: Access::REMOTE_WRITE };
    world.post(1, Operation::BindWindow { window, binding }, &[]);
    world.say([write(window, 0, b"ours")]);
    assert_eq!(bytes(&memory)[7..13], *b"\x07ours\x07");
    world.say_on(second, [write(window, 0, b"none")]);
    assert_eq!(bytes(&memory)[8..12], *b"ours");
    assert_eq!(world.card.engine.rnic().query_qp(other).unwrap().state, QpState::Terminate);
    let fault = QpFault::Local(DdpError::StagNotAssociated.into());
    assert!(world.asyncs().contains(&AsyncEvent::QpFatal { qp: other, fault }));
    world.receive(2, &[]);
    world.say([untagged_word(0x44, window.value(), 0, 1, 0, true, b"")]);
    assert_eq!(world.outcomes(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    world.say([write(window, 0, b"late")]);
    assert_eq!(world.terminate().numbers(), (1, 1, 0));
    assert_eq!(bytes(&memory)[8..12], *b"ours");
}

#[test]
fn rfc5042_s6_4_6_the_overflow_of_a_completion_queue_ends_its_streams_alone() {
    let mut world = World::with(|engine, attributes| {
        let (small, _) = engine.rnic().registry().create_cq(2, None).unwrap();
        QpAttributes { recv_cq: small, ..attributes }
    });
    let attributes = QpAttributes::new(world.pd, world.cq, world.cq);
    let other = world.card.engine.rnic_mut().create_qp(attributes).unwrap();
    let second = world.connect(other, MpaConfig::default());
    for wr_id in 0..4 {
        world.receive(wr_id, &[]);
    }
    world.say((1..=4).map(|msn| send(msn, 0, true, b"")));
    assert_ne!(world.state(), QpState::Rts);
    assert!(world.asyncs().iter().any(|e| matches!(e, AsyncEvent::CqOverflow { .. })));
    let (key, memory) = world.region(4, 0, ALL);
    world.say_on(second, [write(key, 0, b"fine")]);
    assert_eq!(world.card.engine.rnic().query_qp(other).unwrap().state, QpState::Rts);
    assert_eq!(bytes(&memory), b"fine");
}

#[test]
fn rfc5042_s6_4_3_1_a_shared_receive_queue_reports_when_it_runs_low() {
    let mut srq = None;
    let mut world = World::with(|engine, a| {
        let made = engine
            .rnic()
            .registry()
            .create_srq(&SrqAttributes { pd: a.pd, max_wr: 8, max_sge: 1, limit: 3 })
            .unwrap();
        srq = Some(made.id());
        QpAttributes { srq: Some(made.id()), ..a }
    });
    let srq = srq.unwrap();
    for wr_id in 0..4 {
        let request = xwarp_rnic::RecvRequest { wr_id, scatter: &[] };
        world.card.engine.rnic().registry().srq(srq).unwrap().post(&request).unwrap();
    }
    world.say([send(1, 0, true, b"")]);
    assert_eq!(world.asyncs(), []);
    world.say([send(2, 0, true, b"")]);
    assert_eq!(world.asyncs(), [AsyncEvent::SrqLimit { srq }]);
    assert_eq!(world.outcomes(), [(0, WcStatus::Success), (1, WcStatus::Success)]);
}

#[test]
fn rfc5042_s6_4_1_every_resource_has_a_limit() {
    let limits = Limits { max_pd: 2, max_mr: 2, max_cq: 2, max_qp: 2, max_srq: 2, ..Limits::default() };
    let mut engine = Engine::new(EngineConfig { limits, ..EngineConfig::default() });
    let pd = engine.rnic().registry().alloc_pd().unwrap();
    engine.rnic().registry().alloc_pd().unwrap();
    assert!(engine.rnic().registry().alloc_pd().is_err());
    let memory = Memory::anonymous(64, Pages::Normal).unwrap();
    let registration = || Registration { pd, memory: memory.clone(), access: ALL, base: 0, stream: None };
    let keys: Vec<STag> =
        (0..2).map(|_| engine.rnic().registry().register(registration()).unwrap()).collect();
    assert!(engine.rnic().registry().register(registration()).is_err());
    engine.rnic().registry().deregister(keys[0]).unwrap();
    assert!(engine.rnic().registry().register(registration()).is_ok());
    let (cq, _) = engine.rnic().registry().create_cq(8, None).unwrap();
    engine.rnic().registry().create_cq(8, None).unwrap();
    assert!(engine.rnic().registry().create_cq(8, None).is_err());
    assert!(engine.rnic().registry().resize_cq(cq, u32::MAX).is_err(), "entries are limited too");
    for _ in 0..2 {
        engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).unwrap();
        engine.rnic().registry().create_srq(&SrqAttributes { pd, max_wr: 1, max_sge: 1, limit: 0 }).unwrap();
    }
    assert!(engine.rnic_mut().create_qp(QpAttributes::new(pd, cq, cq)).is_err());
    assert!(
        engine.rnic().registry().create_srq(&SrqAttributes { pd, max_wr: 1, max_sge: 1, limit: 0 }).is_err()
    );
}
