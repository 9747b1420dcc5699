//! Frames through a leg, and ends that lie.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use xwarp_tcp::link::{Link as _, QueueId, RxFrame, TxFrame};

use super::*;
use crate::memif::{Handshake, Master, Step};
use crate::sys::Descriptor;
use crate::{Bells, Leg, LegSizes};

const SIZES: LegSizes = LegSizes { receive_log2: 4, transmit_log2: 5 };
const QUEUE: QueueId = QueueId(0);

/// Both ends of a leg.
fn leg(sizes: LegSizes, bells: Bells) -> Result<(Leg, Master, Source, Sink), String> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let far = thread::spawn(move || serve(theirs));
    let handshake = Handshake { id: 0, secret: "", patience: Duration::from_secs(10) };
    let near = Leg::connect(ours, sizes, bells, &handshake);
    let far = far.join().unwrap();
    let near = near.map_err(|error| error.to_string())?;
    far.map(|(master, source, sink)| (near, master, source, sink))
}

fn serve(socket: OwnedFd) -> Result<(Master, Source, Sink), String> {
    let mut master = Master::new(socket, 1 << 20).unwrap();
    loop {
        match master.read() {
            Ok(Step::Nothing) => thread::sleep(Duration::from_micros(100)),
            Ok(Step::Gone) => return Err("gone".into()),
            Ok(Step::Asked(asked)) => {
                let ends = accept(asked);
                match &ends {
                    Ok(_) => master.connected(),
                    Err(text) => master.disconnect(text),
                }
                return ends.map(|(source, sink)| (master, source, sink));
            }
            Err(lie) => {
                master.disconnect(&lie.to_string());
                return Err(lie.to_string());
            }
        }
    }
}

fn honest() -> (Leg, Master, Source, Sink) {
    leg(SIZES, Bells::of_sockets().unwrap()).unwrap()
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

fn write(leg: &mut Leg, frame: &mut TxFrame, bytes: &[u8]) {
    let mut left = bytes;
    for chunk in leg.tx_chunks(frame).unwrap() {
        let (now, later) = left.split_at(left.len().min(chunk.len()));
        chunk[..now.len()].copy_from_slice(now);
        left = later;
    }
    assert!(left.is_empty());
}

fn read(leg: &Leg, frame: &RxFrame) -> Vec<u8> {
    leg.rx_chunks(frame).concat()
}

fn receive(leg: &mut Leg) -> Vec<RxFrame> {
    let mut batch = Vec::new();
    leg.receive(&mut batch, usize::MAX);
    batch
}

#[test]
fn frames_of_all_lengths_pass_both_ways() {
    let (mut leg, _master, mut source, mut sink) = honest();
    for (seed, len) in [1, 60, 4095, 4096, 4097, 9000, 65535, 65536].into_iter().enumerate() {
        let sent = bytes(len, seed as u8);
        let mut frame = leg.alloc(len).unwrap();
        write(&mut leg, &mut frame, &sent);
        leg.submit(QUEUE, &mut frame, len).unwrap();
        leg.flush();
        assert!(leg.tx_chunks(&mut frame).is_none(), "the other end may read it");
        let mut found = Vec::new();
        let mut head = [0; 100];
        assert!(source.next(&mut head, |frame| found = frame.to_vec()).unwrap());
        assert!(found == sent, "{len} bytes");
        assert!(!source.next(&mut head, |_| panic!("a second frame")).unwrap());
        source.give_back();
        assert_eq!(receive(&mut leg), []);
        assert!(leg.tx_chunks(&mut frame).is_some(), "it may be sent again");
        leg.release(frame);
        // And back.
        assert_eq!(sink.deliver_bytes(&sent), Ok(Delivered::Yes));
        let [frame] = <[RxFrame; 1]>::try_from(receive(&mut leg)).unwrap();
        assert!(read(&leg, &frame) == sent && frame.len() == len, "{len} bytes");
        leg.recycle(frame);
    }
    let census = leg.frame_census();
    assert!(census.nothing_out(), "{census:?}");
}

#[test]
fn a_frame_passes_from_one_leg_to_another_as_it_was_checked() {
    let (mut from, _first, mut source, _) = honest();
    let (mut to, _second, _, mut sink) = honest();
    let sent = bytes(5000, 1);
    let mut frame = from.alloc(5000).unwrap();
    write(&mut from, &mut frame, &sent);
    from.submit(QUEUE, &mut frame, 5000).unwrap();
    let mut head = [0; 64];
    let memory = Arc::clone(&source.memory);
    source
        .next(&mut head, |frame| {
            // The sender changes its memory after the headers were looked at.
            let at = frame.pieces[0].at;
            assert!(memory.write(at, &[0xee; 64]));
            assert_eq!(sink.deliver(frame), Ok(Delivered::Yes));
        })
        .unwrap();
    let [received] = <[RxFrame; 1]>::try_from(receive(&mut to)).unwrap();
    assert!(read(&to, &received) == sent);
    to.recycle(received);
    from.release(frame);
}

#[test]
fn a_receiver_without_memory_loses_frames_and_goes_on() {
    let (mut leg, _master, _, mut sink) = honest();
    for seed in 0..16 {
        assert_eq!(sink.deliver_bytes(&bytes(100, seed)), Ok(Delivered::Yes));
    }
    assert_eq!(sink.deliver_bytes(&[1]), Ok(Delivered::Full));
    let frames = receive(&mut leg);
    assert_eq!(frames.len(), 16);
    for (seed, frame) in frames.into_iter().enumerate() {
        assert_eq!(read(&leg, &frame), bytes(100, seed as u8));
        leg.recycle(frame);
    }
    assert_eq!(sink.deliver_bytes(&bytes(65536, 3)), Ok(Delivered::Yes));
    assert_eq!(receive(&mut leg).len(), 1);
}

#[test]
fn a_sleeper_is_woken_and_one_that_looks_is_not() {
    let (mut leg, _master, source, mut sink) = honest();
    assert_eq!(receive(&mut leg), []);
    sink.deliver_bytes(&[1]).unwrap();
    assert!(sink.wake(), "it had found nothing");
    let frames = receive(&mut leg);
    assert_eq!((frames.len(), leg.counters().woken), (1, 1));
    sink.deliver_bytes(&[2]).unwrap();
    assert!(!sink.wake(), "it has found something, and looks again");
    frames.into_iter().chain(receive(&mut leg)).for_each(|frame| leg.recycle(frame));
    // The other way.
    let mut send = |sleeps| {
        source.sleep(sleeps);
        let before = leg.counters().wakeups;
        let mut frame = leg.alloc(1).unwrap();
        leg.submit(QUEUE, &mut frame, 1).unwrap();
        leg.flush();
        leg.release(frame);
        leg.counters().wakeups - before
    };
    assert_eq!((send(true), send(false)), (1, 0));
}

#[test]
fn attack_wakeups_that_could_wait_are_refused() {
    let refused = leg(SIZES, Bells::of_eventfd().unwrap()).unwrap_err();
    assert!(refused.contains("must be a socket"), "{refused}");
    let refused = leg(LegSizes { receive_log2: 10, ..SIZES }, Bells::of_sockets().unwrap()).unwrap_err();
    assert!(refused.contains("more memory"), "{refused}");
}

/// What a liar writes.
#[derive(Debug, Clone)]
enum Lied {
    Head { to_master: bool, value: u16 },
    Tail { to_master: bool, value: u16 },
    Descriptor { to_master: bool, at: u16, continued: bool, region: u16, len: u32, offset: u32 },
    Bytes { at: usize, value: u64 },
}

fn lies() -> impl Strategy<Value = Lied> {
    // Near what an honest end writes, and anywhere.
    let position = || prop_oneof![0..80_u16, any::<u16>()];
    let len = prop_oneof![0..9000_u32, Just(65536), Just(65537), any::<u32>()];
    let offset = prop_oneof![(0..250_000_u32), any::<u32>()];
    prop_oneof![
        (any::<bool>(), position()).prop_map(|(to_master, value)| Lied::Head { to_master, value }),
        (any::<bool>(), position()).prop_map(|(to_master, value)| Lied::Tail { to_master, value }),
        (any::<bool>(), 0..32_u16, any::<bool>(), prop_oneof![4 => Just(0), 1 => any::<u16>()], len, offset)
            .prop_map(|(to_master, at, continued, region, len, offset)| Lied::Descriptor {
                to_master,
                at,
                continued,
                region,
                len,
                offset
            }),
        (0..250_000_usize, any::<u64>()).prop_map(|(at, value)| Lied::Bytes { at, value }),
    ]
}

fn lie(lied: &Lied, source: &Source, sink: &Sink) {
    let ring = |to_master: &bool| if *to_master { &source.ring } else { &sink.ring };
    match lied {
        Lied::Head { to_master, value } => ring(to_master).set_head(*value),
        Lied::Tail { to_master, value } => ring(to_master).set_tail(*value),
        Lied::Descriptor { to_master, at, continued, region, len, offset } => {
            let (continued, region, len, offset) = (*continued, *region, *len, *offset);
            ring(to_master).set_descriptor(*at, Descriptor { continued, region, len, offset });
        }
        Lied::Bytes { at, value } => _ = source.memory.write(*at, &value.to_ne_bytes()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever the owner of the memory writes, the switch takes at most what a ring has, delivers or refuses, and ends.
    #[test]
    fn prop_a_switch_survives_an_owner_that_lies(all in prop::collection::vec(lies(), 1..60)) {
        let (_leg, _master, mut source, mut sink) = honest();
        let mut head = [0; 100];
        'lies: for lied in &all {
            lie(lied, &source, &sink);
            for _ in 0..40 {
                let mut longest = 0;
                match source.next(&mut head, |frame| {
                    longest = frame.len();
                    assert_eq!(frame.to_vec().len(), longest);
                    let _ = sink.deliver(frame);
                }) {
                    Ok(true) => prop_assert!(longest <= MAX_FRAME_BYTES),
                    Ok(false) => break,
                    Err(_) => break 'lies,
                }
            }
            source.give_back();
            if sink.deliver_bytes(&[7; 5000]).is_err() {
                break;
            }
            sink.wake();
        }
    }

    /// Whatever the switch writes, the owner counts its chunks right, hands up frames that lie in its chunks, and ends its leg or goes
    /// on.
    #[test]
    fn prop_an_owner_survives_a_switch_that_lies(all in prop::collection::vec(lies(), 1..60)) {
        let (mut leg, _master, source, sink) = honest();
        let total = leg.frame_census().total();
        let mut held = Vec::new();
        for lied in &all {
            lie(lied, &source, &sink);
            if let Some(mut frame) = leg.alloc(5000) {
                let sent = leg.submit(QUEUE, &mut frame, 5000);
                prop_assert!(sent.is_err() || leg.tx_chunks(&mut frame).is_none());
                held.push(frame);
            }
            leg.flush();
            for frame in receive(&mut leg) {
                prop_assert!(frame.len() <= MAX_FRAME_BYTES);
                prop_assert_eq!(read(&leg, &frame).len(), frame.len());
                leg.recycle(frame);
            }
            prop_assert_eq!(leg.frame_census().total(), total);
            if held.len() > 3 {
                held.drain(..).for_each(|frame| leg.release(frame));
            }
        }
        for frame in held {
            leg.release(frame);
        }
        prop_assert_eq!(leg.frame_census().total(), total);
    }
}
