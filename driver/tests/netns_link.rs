//! Frames over a real veth pair, between two interfaces of ours: out of one's transmit frames into the
//! other's receive frames, and every frame accounted for.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::frame::Frame;
use common::*;
use xwarp_driver::{DriverConfig, FrameCensus, Interface, Mode, ModePreference};
use xwarp_tcp::link::{Link, QueueId, RxFrame, Steer, TxFrame};
use xwarp_tcp::wire::Flow;

/// Both sides opened, and one connection from A to B steered on both.
fn connected(lab: &Lab, config: &DriverConfig) -> (Interface, Interface, Frame) {
    let mut a = lab.open_with(Side::A, config).unwrap();
    let mut b = lab.open_with(Side::B, config).unwrap();
    let (local, remote) = (at(A4, 4000), at(B4, 5000));
    a.steer(Steer::Flow(Flow { local, remote })).unwrap();
    b.steer(Steer::Flow(Flow { local: remote, remote: local })).unwrap();
    let frame = Frame::tcp(a.attributes().mac, b.attributes().mac, local, remote);
    (a, b, frame)
}

fn forced(mode: Mode) -> DriverConfig {
    DriverConfig { mode: ModePreference::Force(mode), ..DriverConfig::default() }
}

#[test]
fn netns_frames_cross_in_both_modes_of_veth() {
    for mode in [Mode::Copy, Mode::Generic] {
        let lab = Lab::new();
        let (mut a, mut b, frame) = connected(&lab, &forced(mode));
        assert_eq!((a.attributes().mode, b.attributes().mode), (mode, mode));
        for size in [0, 1, 100, 1460] {
            let bytes = frame.clone().payload(&vec![size as u8; size]).build();
            send_bytes(&mut a, 0, &bytes);
            assert_eq!(receive_bytes(&mut b), bytes, "{mode} {size}");
        }
        let back = Frame::tcp(frame.to, frame.from, frame.destination, frame.source).build();
        send_bytes(&mut b, 0, &back);
        assert_eq!(receive_bytes(&mut a), back);
        assert_eq!(b.program_counters().unwrap().steered_flow, 4);
        assert_eq!(b.counters().received_frames, 4);
    }
}

#[test]
fn netns_probing_chooses_generic_mode_on_a_veth_of_one_queue() {
    let lab = Lab::with(1500, 2);
    assert_eq!(lab.open(Side::A).attributes().mode, Mode::Copy);
    let lab = Lab::new();
    let link = lab.open(Side::A);
    let attributes = link.attributes();
    assert_eq!(attributes.mode, Mode::Generic);
    assert_eq!((attributes.queues, attributes.mtu, attributes.path_mtu), (1, 1500, 1500));
    assert!(attributes.up && attributes.program_id != 0);
    assert_eq!(attributes.carrier, DEV);
}

/// The largest frame of the largest MTU fits one chunk, with two VLAN tags too.
#[test]
fn netns_the_largest_mtu_fits_one_chunk() {
    let lab = Lab::with(u32::from(xwarp_driver::SINGLE_CHUNK_MTU), 1);
    let config = DriverConfig { vlan: Some(42), service_vlan: Some(7), ..DriverConfig::default() };
    let (mut a, mut b, frame) = connected(&lab, &config);
    assert_eq!(a.attributes().path_mtu, 3502, "devices leave room for one tag only");
    let payload: Vec<u8> = (0..3502 - 40).map(|i| i as u8).collect();
    let bytes = frame.tags(&[(0x88a8, 7), (0x8100, 42)]).payload(&payload).build();
    assert_eq!(bytes.len(), 14 + 8 + 3502);
    send_bytes(&mut a, 0, &bytes);
    assert_eq!(receive_bytes(&mut b), bytes);
}

#[test]
fn netns_census_accounts_for_every_frame() {
    let lab = Lab::new();
    let config =
        DriverConfig { receive_chunks: 64, transmit_chunks: 32, ring_size: 16, ..DriverConfig::default() };
    let (mut a, mut b, frame) = connected(&lab, &config);
    let bytes = frame.payload(&[7; 500]).build();
    assert_eq!(a.frame_census(), FrameCensus { free: 32, fill: 64, ..FrameCensus::default() });

    // All transmit frames out; then none is left.
    let mut out: Vec<TxFrame> = (0..32).map(|_| a.alloc(bytes.len()).unwrap()).collect();
    assert!(a.alloc(1).is_none());
    assert_eq!(a.frame_census().retained, 32);

    // The ring takes 16; the others wait for room.
    for frame in &mut out {
        a.tx_chunks(frame).unwrap().chunk_mut(0)[..bytes.len()].copy_from_slice(&bytes);
    }
    let submitted = out
        .iter_mut()
        .map(|frame| usize::from(a.submit(QueueId(0), frame, bytes.len()).is_ok()))
        .sum::<usize>();
    assert_eq!((submitted, a.counters().transmit_ring_full), (16, 16));
    assert_eq!(a.frame_census().sending, 16);
    assert!(a.tx_chunks(&mut out[0]).is_none(), "the kernel still reads it");
    assert!(a.submit(QueueId(0), &mut out[0], 1).is_err(), "nor can it be sent twice at once");

    // Half of them are given back while being sent.
    let kept = out.split_off(8);
    for frame in out {
        a.release(frame);
    }
    assert_eq!((a.frame_census().sending, a.frame_census().released), (8, 8));
    eventually("completions come", || {
        a.flush();
        a.frame_census() == FrameCensus { free: 8, retained: 24, fill: 64, ..FrameCensus::default() }
    });

    // The other side keeps the received frames, then recycles them.
    let mut held: Vec<RxFrame> = Vec::new();
    eventually("all frames arrive", || {
        b.receive(&mut held, 64);
        held.len() == 16
    });
    assert_eq!(b.frame_census().received, 16);
    assert!(held.iter().all(|frame| b.rx_chunks(frame).as_slice() == [&bytes[..]]));
    for frame in held {
        b.recycle(frame);
    }
    for frame in kept {
        a.release(frame);
    }
    assert!(a.frame_census().nothing_out() && b.frame_census().nothing_out());
    assert_eq!(a.frame_census(), FrameCensus { free: 32, fill: 64, ..FrameCensus::default() });
}

/// A frame that was filled must not be refused: its bytes are taken from the application already, so it would count as lost.
#[test]
fn netns_the_transmit_ring_has_room_for_all_frames_by_default() {
    let lab = Lab::new();
    let (mut a, _b, frame) = connected(&lab, &DriverConfig::default());
    let bytes = frame.payload(&[7; 500]).build();
    let mut out: Vec<TxFrame> = std::iter::from_fn(|| a.alloc(bytes.len())).collect();
    assert_eq!(out.len(), DriverConfig::default().transmit_chunks as usize);
    for frame in &mut out {
        a.tx_chunks(frame).unwrap().chunk_mut(0)[..bytes.len()].copy_from_slice(&bytes);
        assert!(a.submit(QueueId(0), frame, bytes.len()).is_ok());
    }
    assert_eq!(a.counters().transmit_ring_full, 0);
    for frame in out {
        a.release(frame);
    }
}

/// A retained frame is patched and sent again, as a retransmission does.
#[test]
fn netns_a_retained_frame_is_sent_again() {
    let lab = Lab::new();
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    let bytes = frame.payload(b"once").build();
    let mut token = a.alloc(bytes.len()).unwrap();
    a.tx_chunks(&mut token).unwrap().chunk_mut(0)[..bytes.len()].copy_from_slice(&bytes);
    for round in 0..3u8 {
        eventually("the last transmission is over", || {
            a.flush();
            a.tx_chunks(&mut token).is_some()
        });
        let last = bytes.len() - 1;
        a.tx_chunks(&mut token).unwrap().chunk_mut(0)[last] = round;
        a.submit(QueueId(0), &mut token, bytes.len()).unwrap();
        a.flush();
        let got = receive_bytes(&mut b);
        assert_eq!((&got[..last], got[last]), (&bytes[..last], round));
    }
    a.release(token);
}

const FRAMES: u32 = 20_000;

/// A long stream through few frames: order kept, nothing lost, nothing leaked.
#[test]
fn netns_a_long_stream_loses_and_leaks_nothing() {
    let lab = Lab::new();
    let config =
        DriverConfig { receive_chunks: 256, transmit_chunks: 64, ring_size: 64, ..DriverConfig::default() };
    let (mut a, mut b, frame) = connected(&lab, &config);
    let template = frame.payload(&[0; 1000]).build();
    let at = template.len() - 4;
    let (mut next, mut expected, mut batch) = (0u32, 0u32, Vec::new());
    eventually_within(20, "the stream ends", || {
        for _ in 0..48 {
            if next == FRAMES {
                break;
            }
            let Some(mut token) = a.alloc(template.len()) else { break };
            let mut chunks = a.tx_chunks(&mut token).unwrap();
            chunks.chunk_mut(0)[..template.len()].copy_from_slice(&template);
            chunks.chunk_mut(0)[at..template.len()].copy_from_slice(&next.to_be_bytes());
            drop(chunks);
            let sent = a.submit(QueueId(0), &mut token, template.len()).is_ok();
            a.release(token);
            if !sent {
                break;
            }
            next += 1;
        }
        a.flush();
        b.receive(&mut batch, 64);
        for frame in batch.drain(..) {
            let number = b.rx_chunks(&frame)[0][at..].try_into().map(u32::from_be_bytes).unwrap();
            assert_eq!(number, expected);
            expected += 1;
            b.recycle(frame);
        }
        expected == FRAMES
    });
    a.flush();
    let (sent, got) = (a.counters(), b.counters());
    assert_eq!((sent.sent_frames, got.received_frames), (u64::from(FRAMES), u64::from(FRAMES)));
    assert_eq!(
        (sent.kick_lost, sent.kick_failed, got.kernel_rx_dropped, got.receive_malformed),
        (0, 0, 0, 0)
    );
    assert!(a.frame_census().nothing_out() && b.frame_census().nothing_out(), "{:?}", a.frame_census());
}

/// A frame larger than the device's MTU is lost with EBUSY, which we count; the ring still works.
#[test]
fn netns_a_lost_frame_is_counted() {
    let lab = Lab::new();
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    send_bytes(&mut a, 0, &frame.clone().payload(&[1; 3000]).build());
    assert_eq!(a.counters().kick_lost, 1);
    let small = frame.payload(&[2; 30]).build();
    send_bytes(&mut a, 0, &small);
    assert_eq!(receive_bytes(&mut b), small);
    assert!(a.frame_census().nothing_out());
}

/// A descriptor longer than a chunk never reaches the ring.
#[test]
fn netns_a_length_beyond_the_chunk_is_refused() {
    let lab = Lab::new();
    let mut a = lab.open_with(Side::A, &forced(Mode::Copy)).unwrap();
    let capacity = a.chunk_bytes();
    assert!(a.alloc(capacity + 1).is_none());
    let mut token = a.alloc(capacity).unwrap();
    assert_eq!(a.tx_chunks(&mut token).unwrap().chunk(0).len(), capacity);
    assert!(a.submit(QueueId(0), &mut token, capacity + 1).is_err());
    a.release(token);
    assert!(a.frame_census().nothing_out());
}

/// The fill ring is refilled in batches, but never left empty while chunks are free.
#[test]
fn netns_few_receive_chunks_serve_many_frames() {
    for receive_chunks in [2, 40] {
        let lab = Lab::new();
        let config = DriverConfig { receive_chunks, ..DriverConfig::default() };
        let (mut a, mut b, frame) = connected(&lab, &config);
        for n in 0..100 {
            let bytes = frame.clone().payload(&[n; 100]).build();
            send_bytes(&mut a, 0, &bytes);
            assert_eq!(receive_bytes(&mut b), bytes, "frame {n} of {receive_chunks} chunks");
        }
        assert_eq!(b.counters().kernel_rx_dropped, 0);
    }
}

/// A frame sent on queue q arrives on queue q of the other end of a veth pair.
#[test]
fn netns_every_queue_has_a_socket() {
    let lab = Lab::with(1500, 3);
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    assert_eq!((a.attributes().queues, b.fds().count()), (3, 3));
    assert_eq!(b.rx_capacity(), DriverConfig::default().receive_chunks as usize);
    for queue in [2, 0, 1, 2] {
        let bytes = frame.clone().payload(&[queue as u8; 64]).build();
        send_bytes(&mut a, queue, &bytes);
        let got = receive_one(&mut b);
        assert_eq!((got.queue(), b.rx_chunks(&got).concat()), (QueueId(queue), bytes));
        b.recycle(got);
    }
    assert_eq!(b.program_counters().unwrap().dropped_no_socket, 0);
}

/// Queues take turns: a small batch does not starve the last one.
#[test]
fn netns_queues_take_turns() {
    let lab = Lab::with(1500, 2);
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    let bytes = frame.build();
    for _ in 0..8 {
        send_bytes(&mut a, 0, &bytes);
        send_bytes(&mut a, 1, &bytes);
    }
    let mut order = Vec::new();
    while order.len() < 16 {
        let frame = receive_one(&mut b);
        order.push(frame.queue().0);
        b.recycle(frame);
    }
    assert_eq!(order, [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1]);
}

/// Of two owners of an interface only one listens yet: it also gets the SYNs that arrive on the other one's queue.
#[test]
fn netns_a_syn_is_handed_over_to_the_owner_that_listens() {
    let lab = Lab::with(1500, 2);
    let mut a = lab.open(Side::A);
    let owners = lab.run(Side::B, || Interface::open_several(DEV, 2, &DriverConfig::default())).unwrap();
    let [mut first, mut second] = <[Interface; 2]>::try_from(owners).unwrap();
    let flow = Flow { local: at(B4, 5000), remote: at(A4, 4000) };
    let syn = Frame::tcp(a.attributes().mac, first.attributes().mac, flow.remote, flow.local).syn().build();
    let listener = Steer::Listener { addr: None, port: flow.local.port() };
    second.steer(listener).unwrap();
    send_bytes(&mut a, 0, &syn);
    let got = receive_one(&mut first);
    assert!(first.hand_over(&got, &flow));
    first.recycle(got);
    assert_eq!(receive_bytes(&mut second), syn);

    first.steer(listener).unwrap();
    send_bytes(&mut a, 0, &syn);
    let got = receive_one(&mut first);
    assert!(!first.hand_over(&got, &flow), "it listens itself");
    first.recycle(got);
    assert_eq!(second.counters().handed_in, 1);
}

/// Only the active queues get a socket: two were made, one is in use.
#[test]
fn netns_inactive_queues_are_left_alone() {
    let lab = Lab::with(1500, 2);
    for side in [Side::A, Side::B] {
        lab.sh(side, &format!("ethtool -L {DEV} rx 1 tx 1"));
    }
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    assert_eq!(a.attributes().queues, 1);
    let bytes = frame.build();
    send_bytes(&mut a, 0, &bytes);
    assert_eq!(receive_bytes(&mut b), bytes);
}

/// Two receive queues, one transmit queue: frames for the second are sent on the first.
#[test]
fn netns_fewer_transmit_than_receive_queues() {
    let lab = Lab::with_queues(1500, 2, 1);
    let (mut a, mut b, frame) = connected(&lab, &DriverConfig::default());
    assert_eq!((a.attributes().queues, b.attributes().queues), (2, 2));
    for queue in [0, 1, 1] {
        let bytes = frame.clone().payload(&[queue as u8; 9]).build();
        send_bytes(&mut a, queue, &bytes);
        let got = receive_one(&mut b);
        assert_eq!((got.queue(), b.rx_chunks(&got).concat()), (QueueId(0), bytes));
        b.recycle(got);
    }
    assert!(a.frame_census().nothing_out() && a.unsent() == 0);
}
