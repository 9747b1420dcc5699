//! Windows, fast registration, invalidation, and RDMA Write with Immediate Data.

use proptest::prelude::*;
use xwarp_tcp::ulp::CloseReason;

use super::*;
use crate::{
    ddp::{DdpError, Tagged, Versions},
    rdmap::{RdmapError, StreamError},
};

const SUCCESS: WcStatus = WcStatus::Success;
const LENDABLE: Access = Access::LOCAL_WRITE.union(Access::WINDOW_BIND);

/// A binding of the `len` bytes at `offset` of a region, with the same tagged offsets.
fn part(region: STag, offset: u64, len: u64, access: Access) -> Binding {
    Binding { region, offset, len, base: offset, access }
}

impl End {
    fn window(&mut self) -> STag {
        self.rnic.registry().alloc_window(self.pd).unwrap()
    }

    fn fast_region(&mut self, max_pieces: u32) -> STag {
        self.rnic
            .registry()
            .alloc_fast_region(FastRegistration { pd: self.pd, max_pieces, stream: None })
            .unwrap()
    }

    /// Binds a window under its next key, which it returns.
    fn bind(&mut self, wr_id: u64, window: STag, binding: Binding) -> STag {
        let window = window.next();
        self.post(wr_id, Operation::BindWindow { window, binding }, &[]);
        window
    }

    fn register_fast(&mut self, wr_id: u64, key: STag, memory: &[Memory], access: Access, base: u64) {
        let operation = Operation::FastRegister { key, access, base };
        self.post_with(wr_id, operation, Payload::Memory(memory), SendFlags::SIGNALED);
    }

    fn write_inline(&mut self, wr_id: u64, key: STag, offset: u64, data: &[u8]) {
        self.post_with(wr_id, write_to(key, offset), Payload::Inline(data), SendFlags::SIGNALED);
    }
}

fn piece(fill: u8, len: usize) -> Memory {
    let memory = Memory::anonymous(len, Pages::Normal).unwrap();
    memory.fill(0, len, fill).unwrap();
    memory
}

#[test]
fn a_window_gives_access_to_a_part_of_a_region_without_remote_rights() {
    let mut pair = Pair::new();
    let (region, memory) = pair.b.region(100, 0, LENDABLE);
    let window = pair.b.window();
    let key = pair.b.bind(7, window, part(region, 10, 20, Access::REMOTE_WRITE | Access::REMOTE_READ));
    let completion = pair.b.poll()[0];
    assert_eq!((completion.wr_id, completion.status, completion.opcode), (7, SUCCESS, Opcode::BindWindow));
    pair.a.write_inline(1, key, 10, &[9; 20]);
    let (sink, to) = pair.a.region(20, 0, ALL);
    pair.a.post(2, read_from(key, 10), &[whole(sink, 20)]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
    assert_eq!(bytes(&to), [9; 20]);
    assert_eq!(bytes(&memory)[9..31], [vec![9], vec![9; 20], vec![30]].concat());
}

#[test]
fn a_window_rejects_access_that_it_does_not_grant() {
    type Say = fn(&mut End, STag, STag, STag);
    let cases: [(Say, StreamError); 6] = [
        (|a, key, _, _| a.write_inline(1, key, 29, &[1; 2]), DdpError::TaggedBounds.into()),
        (|a, key, _, _| a.write_inline(1, key, 9, &[1]), DdpError::TaggedBounds.into()),
        (|a, key, _, sink| a.post(1, read_from(key, 10), &[whole(sink, 1)]), RdmapError::AccessRights.into()),
        (|a, key, _, _| a.write_inline(1, key.next(), 10, &[1]), DdpError::InvalidStag.into()),
        (|a, _, region, _| a.write_inline(1, region, 10, &[1]), DdpError::InvalidStag.into()),
        (
            |a, key, _, sink| {
                let remote = Remote { key, offset: 16 };
                a.post(1, Operation::FetchAdd { remote, add: 1, mask: 0 }, &[whole(sink, 8)]);
            },
            RdmapError::AccessRights.into(),
        ),
    ];
    for (say, error) in cases {
        let mut pair = Pair::new();
        let (region, memory) = pair.b.region(100, 0, LENDABLE);
        let (sink, _) = pair.a.region(8, 0, ALL);
        let window = pair.b.window();
        let key = pair.b.bind(7, window, part(region, 10, 20, Access::REMOTE_WRITE));
        let before = bytes(&memory);
        say(&mut pair.a, key, region, sink);
        pair.run();
        assert_eq!(bytes(&memory), before, "{error}");
        let fault = AsyncEvent::QpFatal { qp: pair.b.qp, fault: QpFault::Local(error) };
        assert_eq!(pair.b.async_events(), [fault]);
    }
}

#[test]
fn a_zero_based_window_hides_the_address_of_its_bytes() {
    let mut pair = Pair::new();
    let (region, memory) = pair.b.region(100, 0, LENDABLE);
    let window = pair.b.window();
    let binding = Binding { base: 0, ..part(region, 40, 8, Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) };
    let key = pair.b.bind(1, window, binding);
    pair.a.write_inline(1, key, 4, b"four");
    pair.run();
    assert_eq!(bytes(&memory)[44..48], *b"four");
    let (sink, _) = pair.a.region(8, 0, ALL);
    memory.store_u64(40, 1).unwrap();
    let remote = Remote { key, offset: 0 };
    pair.a.post(2, Operation::FetchAdd { remote, add: 1, mask: 0 }, &[whole(sink, 8)]);
    pair.run();
    assert_eq!(memory.load_u64(40), Ok(2));
}

#[test]
fn an_invalidated_window_is_bound_again_under_another_key() {
    let mut pair = Pair::new();
    let (region, memory) = pair.b.region(100, 0, LENDABLE);
    let mut key = pair.b.window();
    for round in 0..300u64 {
        let before = key;
        key = pair.b.bind(1, key, part(region, round % 90, 10, Access::REMOTE_WRITE));
        assert_eq!((key.index(), key.key()), (before.index(), before.key().wrapping_add(1)));
        pair.a.write_inline(1, key, round % 90, &[round as u8; 10]);
        pair.run();
        assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
        assert_eq!(bytes(&memory)[round as usize % 90], round as u8);
        if round % 2 == 0 {
            pair.b.post(2, Operation::LocalInvalidate { key }, &[]);
            assert_eq!(pair.b.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
        } else {
            pair.b.receive(3, &[]);
            pair.a.post(2, Operation::Send { invalidate: Some(key) }, &[]);
            pair.run();
            assert_eq!(pair.a.outcomes(), [(2, SUCCESS)]);
            let got = pair.b.poll();
            assert_eq!((got[1].wr_id, got[1].invalidated), (3, Some(key)));
        }
    }
    pair.a.write_inline(1, key, 0, b"late");
    pair.run();
    let fault = QpFault::Local(DdpError::InvalidStag.into());
    assert_eq!(pair.b.async_events(), [AsyncEvent::QpFatal { qp: pair.b.qp, fault }]);
}

#[test]
fn a_binding_or_invalidation_takes_effect_before_the_next_request() {
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, LENDABLE);
    let (inbox, heard) = pair.a.region(4, 0, ALL);
    pair.a.receive(1, &[whole(inbox, 4)]);
    let window = pair.b.window();
    // In one batch, after a message that fills the pipe: the key is valid when the peer learns it.
    let (big, _) = pair.b.region(5000, 0, Access::empty());
    let (sink, _) = pair.a.region(5000, 0, ALL);
    pair.b.post(0, write_to(sink, 0), &[whole(big, 5000)]);
    let key = pair.b.bind(1, window, part(region, 0, 100, Access::REMOTE_WRITE));
    assert_eq!(pair.b.poll(), [], "requests complete in order");
    pair.b.post_with(2, SEND, Payload::Inline(&key.value().to_be_bytes()), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.b.outcomes(), [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]);
    let heard = STag::new(u32::from_be_bytes(bytes(&heard).try_into().unwrap()));
    pair.a.write_inline(1, heard, 0, b"valid");
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (1, SUCCESS)]);
}

#[test]
fn a_fenced_invalidation_waits_for_an_earlier_read() {
    let mut pair = Pair::new();
    let (source, _) = pair.b.region(3000, 5, Access::REMOTE_READ);
    let key = pair.a.fast_region(1);
    let memory = piece(0, 3000);
    pair.a.register_fast(1, key, std::slice::from_ref(&memory), Access::LOCAL_WRITE, 0);
    pair.a.post(2, read_from(source, 0), &[whole(key, 3000)]);
    let invalidate = Operation::LocalInvalidate { key };
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    pair.a.post_with(3, invalidate, Payload::EMPTY, flags);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS), (3, SUCCESS)]);
    assert_eq!(bytes(&memory)[..3], [5, 6, 7]);
    // Without the fence the request does not wait, and the response finds no memory.
    let key = key.next();
    pair.a.register_fast(4, key, &[memory], Access::LOCAL_WRITE, 0);
    pair.a.post(5, read_from(source, 0), &[whole(key, 3000)]);
    pair.a.pull_all();
    pair.a.post(6, Operation::LocalInvalidate { key }, &[]);
    pair.run();
    let flushed = WcStatus::LocalProtection;
    assert_eq!(pair.a.outcomes(), [(4, SUCCESS), (5, flushed), (6, SUCCESS)]);
}

#[test]
fn invalid_bindings_fail_and_end_the_stream() {
    let bad = |name: &str, change: &dyn Fn(&mut End, STag, &mut Binding) -> STag| {
        let mut pair = Pair::new();
        let (region, _) = pair.b.region(100, 0, LENDABLE);
        let window = pair.b.window();
        let mut binding = part(region, 0, 100, Access::REMOTE_READ);
        let key = change(&mut pair.b, window, &mut binding);
        pair.b.poll();
        pair.b.post(5, Operation::BindWindow { window: key, binding }, &[]);
        assert_eq!(pair.b.outcomes(), [(5, WcStatus::MemoryManagement)], "{name}");
        assert_eq!(pair.b.state(), QpState::Terminate, "{name}");
        assert_eq!(pair.b.terminate().layer, 0, "{name}");
    };
    bad("no such window", &|_, _, _| STag::new(0x0101_0101));
    bad("a region for a window", &|_, _, binding| binding.region);
    bad("bound already", &|b, window, binding| b.bind(1, window, *binding).next());
    bad("no such region", &|_, window, binding| {
        binding.region = binding.region.next();
        window
    });
    bad("a window for a region", &|_, window, binding| {
        binding.region = window;
        window
    });
    bad("too long", &|_, window, binding| {
        binding.len = 101;
        window
    });
    bad("before the region", &|b, window, binding| {
        let memory = piece(0, 8);
        let registration = Registration { pd: b.pd, memory, access: LENDABLE, base: 50, stream: None };
        *binding = part(b.rnic.registry().register(registration).unwrap(), 49, 1, Access::REMOTE_READ);
        window
    });
    bad("nothing", &|_, window, binding| {
        binding.len = 0;
        window
    });
    bad("wraps", &|_, window, binding| {
        binding.base = u64::MAX - 10;
        window
    });
    bad("local rights", &|_, window, binding| {
        binding.access |= Access::LOCAL_WRITE;
        window
    });
    bad("a region that allows no windows", &|b, window, binding| {
        binding.region = b.region(100, 0, Access::LOCAL_WRITE).0;
        window
    });
    bad("remote write without local write", &|b, window, binding| {
        binding.region = b.region(100, 0, Access::WINDOW_BIND).0;
        binding.access = Access::REMOTE_WRITE;
        window
    });
    bad("a fast region that is invalid", &|b, window, binding| {
        binding.region = b.fast_region(1);
        window
    });
    bad("a region of another domain", &|b, window, binding| {
        let other = b.rnic.registry().alloc_pd().unwrap();
        let own = std::mem::replace(&mut b.pd, other);
        binding.region = b.region(100, 0, LENDABLE).0;
        b.pd = own;
        window
    });
    bad("a window of another domain", &|b, _, _| {
        let other = b.rnic.registry().alloc_pd().unwrap();
        b.rnic.registry().alloc_window(other).unwrap()
    });
}

#[test]
fn a_region_cannot_be_deregistered_while_windows_are_bound() {
    let mut pair = Pair::new();
    let (region, memory) = pair.b.region(100, 0, LENDABLE | Access::REMOTE_WRITE);
    let [first, second] = [pair.b.window(), pair.b.window()];
    let first = pair.b.bind(1, first, part(region, 0, 10, Access::REMOTE_WRITE));
    let second = pair.b.bind(2, second, part(region, 0, 10, Access::REMOTE_WRITE));
    let in_use = |windows| Err(ResourceError::InUse(Object::Region, windows));
    assert_eq!(pair.b.rnic.registry().deregister(region), in_use(2));
    pair.b.rnic.registry().dealloc_window(first).unwrap();
    assert_eq!(pair.b.rnic.registry().dealloc_window(first), Err(ResourceError::UnknownKey(first)));
    assert_eq!(pair.b.rnic.registry().deregister(region), in_use(1));
    // Revoking the region ends the access of its window.
    pair.b.rnic.registry().revoke(region).unwrap();
    pair.a.write_inline(1, second, 0, b"late");
    pair.run();
    assert_eq!(bytes(&memory)[..4], [0, 1, 2, 3]);
    assert_eq!(pair.b.state(), QpState::Terminate);
    // The window can be freed, and so can the domain.
    pair.b.rnic.registry().dealloc_window(second).unwrap();
    let qp = pair.b.qp;
    pair.b.rnic.destroy_qp(qp).unwrap();
    assert_eq!(pair.b.rnic.registry().dealloc_pd(pair.b.pd), Ok(()));
}

#[test]
fn a_window_is_unbound_when_its_stream_ends() {
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, LENDABLE);
    let window = pair.b.window();
    let binding = part(region, 0, 10, Access::REMOTE_WRITE);
    let key = pair.b.bind(1, window, binding);
    let qp = pair.b.qp;
    pair.b.rnic.fail_qp(qp).unwrap();
    pair.b.rnic.event(CONN, Event::Closed(CloseReason::Aborted));
    assert_eq!(pair.b.rnic.registry().deregister(region), Err(ResourceError::InUse(Object::Region, 1)));
    pair.b.rnic.reset_qp(qp).unwrap();
    assert_eq!(pair.b.rnic.registry().with_keys(|keys| keys.bound_windows(region)), Some(0));
    // The queue pair's next peer finds the window unbound.
    pair.b.rnic.connecting(qp, CONN, attempt(MpaConfig::default()));
    pair.b.establish(4, 4, None);
    let mut other = Pair::new().a;
    other.write_inline(1, key, 0, b"x");
    let ulpdu = other.pull().unwrap();
    assert_eq!(pair.b.take(&ulpdu), Err(Refusal::Stop));
    // So does destroying the queue pair.
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, LENDABLE);
    let window = pair.b.window();
    pair.b.bind(1, window, part(region, 0, 10, Access::REMOTE_WRITE));
    pair.b.rnic.destroy_qp(pair.b.qp).unwrap();
    pair.b.rnic.registry().deregister(region).unwrap();
}

#[test]
fn a_region_with_windows_cannot_be_invalidated() {
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, ALL);
    let window = pair.b.window();
    let key = pair.b.bind(1, window, part(region, 0, 10, Access::REMOTE_WRITE));
    pair.b.receive(2, &[]);
    pair.a.post(1, Operation::Send { invalidate: Some(region) }, &[]);
    pair.run();
    let fault = QpFault::Local(RdmapError::CannotInvalidate.into());
    assert_eq!(pair.b.async_events(), [AsyncEvent::QpFatal { qp: pair.b.qp, fault }]);
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, ALL);
    let window = pair.b.window();
    assert_eq!(pair.b.bind(1, window, part(region, 0, 10, Access::REMOTE_WRITE)), key);
    pair.b.post(2, Operation::LocalInvalidate { key: region }, &[]);
    assert_eq!(pair.b.outcomes(), [(1, SUCCESS), (2, WcStatus::MemoryManagement)]);
}

/// An invalidated region stays usable for its owner, but a window would give peers again what the invalidation took.
#[test]
fn a_window_cannot_be_bound_to_a_region_that_was_invalidated() {
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, ALL);
    pair.b.post(1, Operation::LocalInvalidate { key: region }, &[]);
    let window = pair.b.window();
    pair.b.bind(2, window, part(region, 0, 10, Access::REMOTE_WRITE));
    assert_eq!(pair.b.outcomes(), [(1, SUCCESS), (2, WcStatus::MemoryManagement)]);
}

#[test]
fn a_window_cannot_be_used_as_local_memory() {
    let mut pair = Pair::new();
    let (region, _) = pair.b.region(100, 0, ALL);
    let window = pair.b.window();
    let key = pair.b.bind(1, window, part(region, 0, 10, Access::REMOTE_READ));
    pair.b.post(2, SEND, &[whole(key, 10)]);
    pair.run();
    assert_eq!(pair.b.outcomes(), [(1, SUCCESS), (2, WcStatus::LocalProtection)]);
}

#[test]
fn a_fast_region_of_several_pieces_is_accessible_across_them() {
    let mut pair = Pair::new();
    let key = pair.b.fast_region(4);
    let [one, two, three] = [piece(1, 1000), piece(2, 2000), piece(3, 1000)];
    let list = [one.slice(100, 500).unwrap(), two.clone(), one.slice(0, 0).unwrap(), three.clone()];
    pair.b.register_fast(1, key, &list, ALL, 1 << 40);
    let completion = pair.b.poll()[0];
    assert_eq!((completion.status, completion.opcode), (SUCCESS, Opcode::FastRegister));
    drop(list);
    let (source, _) = pair.a.region(3500, 0, ALL);
    pair.a.post(1, write_to(key, 1 << 40), &[whole(source, 3500)]);
    let (sink, to) = pair.a.region(1000, 0, ALL);
    pair.a.post(2, read_from(key, (1 << 40) + 2000), &[whole(sink, 1000)]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
    let sent: Vec<u8> = (0..3500).map(|i| i as u8).collect();
    assert_eq!(bytes(&one), [vec![1; 100], sent[..500].to_vec(), vec![1; 400]].concat());
    assert_eq!(bytes(&two), sent[500..2500]);
    assert_eq!(bytes(&three), sent[2500..]);
    assert_eq!(bytes(&to), sent[2000..3000]);
    // Its owner may also send from it, and windows may be bound to it.
    let window = pair.b.window();
    let window = pair.b.bind(2, window, part(key, (1 << 40) + 499, 2, Access::REMOTE_WRITE));
    pair.a.write_inline(3, window, (1 << 40) + 499, b"!!");
    pair.run();
    assert_eq!((bytes(&one)[599], bytes(&two)[0]), (b'!', b'!'));
    pair.a.receive(9, &[whole(sink, 1000)]);
    pair.b.post(3, SEND, &[Sge { key, offset: (1 << 40) + 400, len: 200 }]);
    pair.run();
    assert_eq!(bytes(&to)[..99], sent[400..499]);
    // One byte beyond the end is outside.
    pair.a.write_inline(4, key, (1 << 40) + 3500, b"x");
    pair.run();
    let fault = QpFault::Local(DdpError::TaggedBounds.into());
    assert_eq!(pair.b.async_events(), [AsyncEvent::QpFatal { qp: pair.b.qp, fault }]);
}

#[test]
fn an_atomic_word_must_lie_in_one_piece() {
    let mut pair = Pair::new();
    let key = pair.b.fast_region(2);
    let [one, two] = [piece(0, 12), piece(0, 12)];
    pair.b.register_fast(1, key, &[one.clone(), two.clone()], ALL, 0);
    let (sink, _) = pair.a.region(8, 0, ALL);
    let add = |offset| Operation::FetchAdd { remote: Remote { key, offset }, add: 1, mask: 0 };
    pair.a.post(1, add(0), &[whole(sink, 8)]);
    pair.a.post(2, add(12), &[whole(sink, 8)]);
    pair.run();
    assert_eq!((one.load_u64(0), two.load_u64(0)), (Ok(1), Ok(1)));
    pair.a.post(3, add(8), &[whole(sink, 8)]);
    pair.run();
    let fault = QpFault::Local(RdmapError::StreamCatastrophic.into());
    assert_eq!(pair.b.async_events(), [AsyncEvent::QpFatal { qp: pair.b.qp, fault }]);
}

#[test]
fn a_fast_region_is_reused_under_new_keys_and_old_keys_are_invalid() {
    let mut pair = Pair::new();
    let first = pair.b.fast_region(1);
    let mut key = first;
    for round in 0..5u8 {
        let memory = piece(round, 64);
        pair.b.register_fast(1, key, std::slice::from_ref(&memory), Access::REMOTE_READ, 0);
        let (sink, to) = pair.a.region(64, 99, ALL);
        pair.a.post(1, read_from(key, 0), &[whole(sink, 64)]);
        pair.run();
        assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
        assert_eq!(bytes(&to), [round; 64]);
        pair.b.post(2, Operation::LocalInvalidate { key }, &[]);
        assert_eq!(pair.b.outcomes(), [(1, SUCCESS), (2, SUCCESS)]);
        key = key.next();
    }
    pair.b.register_fast(1, key, &[piece(0, 64)], ALL, 0);
    pair.a.write_inline(1, first, 0, b"stale");
    pair.run();
    let fault = QpFault::Local(DdpError::InvalidStag.into());
    assert_eq!(pair.b.async_events(), [AsyncEvent::QpFatal { qp: pair.b.qp, fault }]);
}

#[test]
fn invalid_fast_registrations_fail() {
    let bad = |name: &str, list: &[Memory], access: Access, base: u64, key: &dyn Fn(&mut End) -> STag| {
        let mut pair = Pair::new();
        let key = key(&mut pair.b);
        pair.b.poll();
        pair.b.register_fast(5, key, list, access, base);
        assert_eq!(pair.b.outcomes(), [(5, WcStatus::MemoryManagement)], "{name}");
        assert_eq!(pair.b.state(), QpState::Terminate, "{name}");
    };
    let fresh = |b: &mut End| b.fast_region(1);
    let memory = piece(0, 8);
    let one = std::slice::from_ref(&memory);
    bad("too many pieces", &[memory.clone(), memory.clone()], ALL, 0, &fresh);
    bad("wraps", one, ALL, u64::MAX - 2, &fresh);
    bad("no such key", one, ALL, 0, &|_| STag::new(0x0101_0101));
    bad("an ordinary region", one, ALL, 0, &|b| b.region(8, 0, ALL).0);
    bad("a window", one, ALL, 0, &|b| b.window());
    bad("registered already", one, ALL, 0, &|b| {
        let key = b.fast_region(1);
        b.register_fast(1, key, one, ALL, 0);
        key.next()
    });
    bad("another stream's", one, ALL, 0, &|b| {
        let other = b.rnic.create_qp(QpAttributes::new(b.pd, b.cq, b.cq)).unwrap();
        let registration = FastRegistration { pd: b.pd, max_pieces: 1, stream: Some(other) };
        b.rnic.registry().alloc_fast_region(registration).unwrap()
    });
    let constant = piece(7, 8).into_read_only();
    bad("writing what is read-only", std::slice::from_ref(&constant), Access::REMOTE_WRITE, 0, &fresh);
    let mut pair = Pair::new();
    let key = pair.b.fast_region(1);
    pair.b.register_fast(1, key, &[constant], Access::REMOTE_READ, 0);
    assert_eq!(pair.b.outcomes(), [(1, SUCCESS)]);
}

#[test]
fn payloads_that_do_not_fit_a_memory_request_are_rejected_at_once() {
    let mut end = Pair::new().a;
    let (region, memory) = end.region(8, 0, ALL);
    let window = end.window();
    let fast = Operation::FastRegister { key: window, access: ALL, base: 0 };
    let bind = Operation::BindWindow { window, binding: part(region, 0, 8, ALL) };
    let list = [memory];
    let piece = [whole(region, 8)];
    for (operation, payload) in [
        (fast, Payload::EMPTY),
        (fast, Payload::Inline(b"bytes")),
        (bind, Payload::Gather(&piece)),
        (bind, Payload::Memory(&list)),
        (SEND, Payload::Memory(&list)),
        (read_from(region, 0), Payload::Memory(&list)),
    ] {
        let request = WorkRequest { wr_id: 1, operation, payload, flags: SendFlags::SIGNALED };
        assert_eq!(end.rnic.post_send(end.qp, &request), Err(PostError::Payload));
    }
}

#[test]
fn windows_and_fast_regions_have_limits() {
    let limits = Limits { max_mr: 2, max_mw: 1, max_fast_pieces: 3, ..Limits::default() };
    let rnic = Rnic::new(registry(limits, 1));
    let pd = rnic.registry().alloc_pd().unwrap();
    let fast = |max_pieces| FastRegistration { pd, max_pieces, stream: None };
    let window = rnic.registry().alloc_window(pd).unwrap();
    assert_eq!(
        rnic.registry().alloc_window(pd),
        Err(ResourceError::TooMany { object: Object::Window, limit: 1 })
    );
    assert!(matches!(rnic.registry().alloc_fast_region(fast(4)), Err(ResourceError::Attribute { .. })));
    assert!(matches!(rnic.registry().alloc_fast_region(fast(0)), Err(ResourceError::Attribute { .. })));
    let key = rnic.registry().alloc_fast_region(fast(3)).unwrap();
    rnic.registry().alloc_fast_region(fast(1)).unwrap();
    assert_eq!(
        rnic.registry().alloc_fast_region(fast(1)),
        Err(ResourceError::TooMany { object: Object::Region, limit: 2 })
    );
    assert_eq!(rnic.registry().dealloc_pd(pd), Err(ResourceError::InUse(Object::ProtectionDomain, 3)));
    assert_eq!(rnic.registry().deregister(window), Err(ResourceError::UnknownKey(window)));
    assert_eq!(rnic.registry().dealloc_window(key), Err(ResourceError::UnknownKey(key)));
    rnic.registry().dealloc_window(window).unwrap();
    rnic.registry().deregister(key).unwrap();
    rnic.registry().alloc_window(pd).unwrap();
    rnic.registry().alloc_fast_region(fast(1)).unwrap();
}

#[test]
fn rfc7306_s6_a_write_with_immediate_is_one_request_and_two_messages() {
    let mut pair = Pair::new();
    let (source, from) = pair.a.region(5000, 1, Access::empty());
    let (sink, to) = pair.b.region(9000, 0, Access::REMOTE_WRITE);
    for wr_id in 0..3 {
        pair.b.receive(wr_id, &[]);
    }
    let write =
        |offset| Operation::WriteImmediate { remote: Remote { key: sink, offset }, data: *b"immediat" };
    pair.a.post_with(1, write(100), Payload::Gather(&[whole(source, 5000)]), SendFlags::SIGNALED);
    pair.a.post_with(2, write(8000), Payload::Inline(b"inline"), SendFlags::SIGNALED | SendFlags::SOLICITED);
    pair.a.post(3, write(u64::MAX), &[]);
    pair.run();
    let sent = pair.a.poll();
    assert!(sent.iter().map(|c| (c.wr_id, c.status)).eq((1..4).map(|id| (id, SUCCESS))));
    assert!(sent.iter().all(|c| c.opcode == Opcode::RdmaWrite));
    let got: Vec<_> =
        pair.b.poll().iter().map(|c| (c.opcode, c.byte_len, c.immediate, c.solicited)).collect();
    let data = Some(*b"immediat");
    assert_eq!(got, [5000, 6, 0].map(|len| (Opcode::RecvImmediate, len, data, len == 6)));
    assert_eq!(bytes(&to)[100..5100], bytes(&from));
    assert_eq!(bytes(&to)[8000..8006], *b"inline");
}

#[test]
fn rfc7306_s6_immediate_data_reports_only_the_length_of_its_own_write() {
    let mut pair = Pair::new();
    let (sink, _) = pair.b.region(100, 0, ALL);
    for wr_id in 0..4 {
        pair.b.receive(wr_id, &[]);
    }
    let immediate = Operation::Immediate { data: [0; 8] };
    pair.a.write_inline(1, sink, 0, &[1; 30]);
    pair.a.write_inline(2, sink, 0, &[1; 20]);
    pair.a.post(3, immediate, &[]);
    pair.a.post(4, immediate, &[]);
    pair.a.write_inline(5, sink, 0, &[1; 10]);
    pair.a.post(6, SEND, &[]);
    pair.a.post(7, immediate, &[]);
    pair.run();
    assert!(pair.b.poll().iter().map(|c| c.byte_len).eq([20, 0, 0, 0]));
}

#[test]
fn immediate_data_waits_for_a_receive_after_its_write_was_placed() {
    let mut pair = Pair::new();
    let (sink, to) = pair.b.region(16, 0, ALL);
    let remote = Remote { key: sink, offset: 0 };
    let operation = Operation::WriteImmediate { remote, data: [5; 8] };
    pair.a.post_with(1, operation, Payload::Inline(b"already written."), SendFlags::SIGNALED);
    pair.run();
    assert_eq!(bytes(&to), *b"already written.");
    assert_eq!((pair.a.poll(), pair.b.poll()), (vec![], vec![]));
    pair.b.receive(9, &[]);
    pair.run();
    assert_eq!(pair.a.outcomes(), [(1, SUCCESS)]);
    assert_eq!(pair.b.outcomes(), [(9, SUCCESS)]);
}

/// A Write of one segment.
fn segment_to(key: STag, to: u64, payload: &[u8]) -> Vec<u8> {
    [&Tagged { last: true, control: 0x40, stag: key, to }.to_bytes(Versions::Ietf)[..], payload].concat()
}

proptest! {
    /// A fast region of scattered pieces and a window on a part of it, invalidated and opened again at any time: a
    /// segment changes exactly the bytes that a plain table of bytes predicts.
    #[test]
    fn prop_pieces_and_windows_open_exactly_their_bytes(
        pieces in prop::collection::vec((0usize..240, 0usize..16), 1..6),
        cut in (0u64..40, 1u64..40),
        steps in prop::collection::vec((0u8..8, 0u64..90, 0usize..24), 1..60),
    ) {
        const BASE: u64 = 30;
        let mut pair = Pair::new();
        let memory = piece(0, 256);
        let list: Vec<Memory> = pieces.iter().map(|(at, len)| memory.slice(*at, *len).unwrap()).collect();
        // The location of each byte of the region.
        let places: Vec<usize> = pieces.iter().flat_map(|(at, len)| *at..at + len).collect();
        let mut oracle = vec![0u8; 256];
        let mut region = pair.b.fast_region(8);
        pair.b.register_fast(1, region, &list, Access::REMOTE_WRITE | LENDABLE, BASE);
        let mut window = pair.b.window();
        let shown = cut.0..(cut.0 + cut.1).min(places.len() as u64);
        let mut bound = false;
        for (round, (kind, to, len)) in steps.into_iter().enumerate() {
            let payload = vec![round as u8 + 1; len];
            let (key, first, opened) = match kind {
                0 if !shown.is_empty() && !bound => {
                    let binding = Binding { base: 7, ..part(region, BASE + shown.start, shown.end - shown.start, Access::REMOTE_WRITE) };
                    window = pair.b.bind(2, window, binding);
                    bound = true;
                    continue;
                }
                1 if bound => {
                    pair.b.post(3, Operation::LocalInvalidate { key: window }, &[]);
                    bound = false;
                    continue;
                }
                2 if !bound => {
                    pair.b.post(4, Operation::LocalInvalidate { key: region }, &[]);
                    region = region.next();
                    pair.b.register_fast(5, region, &list, Access::REMOTE_WRITE | LENDABLE, BASE);
                    continue;
                }
                3 | 4 => (region, BASE, 0..places.len() as u64),
                5 => (region.next(), BASE, 0..0),
                _ => (window, 7, if bound { shown.clone() } else { 0..0 }),
            };
            let start = (to + opened.start).wrapping_sub(first);
            let fits = to >= first && start + len as u64 <= opened.end && !opened.is_empty();
            let placed = pair.b.place(&segment_to(key, to, &payload), Arrival::Early).is_ok();
            prop_assert_eq!(placed, fits || len == 0);
            if fits {
                for (place, byte) in places[start as usize..].iter().zip(&payload) {
                    oracle[*place] = *byte;
                }
            }
            prop_assert_eq!(bytes(&memory), &oracle[..]);
        }
        prop_assert!(pair.b.outcomes().iter().all(|(_, status)| *status == SUCCESS));
    }
}
