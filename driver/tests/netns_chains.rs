//! Frames of several chunks over a real veth pair: chains on both rings, and every chunk accounted for.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::frame::Frame;
use common::*;
use xwarp_driver::{DriverConfig, FrameCensus, Interface, Mode, ModePreference};
use xwarp_tcp::link::{Link, QueueId, RingFull, Steer, TxFrame};
use xwarp_tcp::wire::Flow;

/// Usable bytes of a chunk.
const CHUNK: usize = 3840;

/// Both sides opened, and one connection from A to B steered on B.
fn connected(lab: &Lab, config: &DriverConfig, [from, to]: [&str; 2]) -> (Interface, Interface, Frame) {
    let a = lab.open_with(Side::A, config).unwrap();
    let mut b = lab.open_with(Side::B, config).unwrap();
    let (local, remote) = (at(from, 4000), at(to, 5000));
    b.steer(Steer::Flow(Flow { local: remote, remote: local })).unwrap();
    let frame = Frame::tcp(a.attributes().mac, b.attributes().mac, local, remote);
    (a, b, frame)
}

/// A frame of `len` bytes with a pattern in its payload.
fn of_len(frame: &Frame, len: usize) -> Vec<u8> {
    let headers = frame.build().len();
    let payload: Vec<u8> = (0..len - headers).map(|at| (at / 251 + at) as u8).collect();
    frame.clone().payload(&payload).build()
}

fn submit(link: &mut Interface, bytes: &[u8]) -> Result<TxFrame, RingFull> {
    let mut frame = link.alloc(bytes.len()).unwrap();
    let mut rest = bytes;
    for chunk in link.tx_chunks(&mut frame).unwrap() {
        let (now, later) = rest.split_at(rest.len().min(chunk.len()));
        chunk[..now.len()].copy_from_slice(now);
        rest = later;
    }
    match link.submit(QueueId(0), &mut frame, bytes.len()) {
        Ok(()) => Ok(frame),
        Err(full) => {
            link.release(frame);
            Err(full)
        }
    }
}

#[test]
fn netns_frames_of_every_number_of_chunks_cross_in_both_modes() {
    for mode in [Mode::Copy, Mode::Generic] {
        for ends in [[A4, B4], [A6, B6]] {
            let lab = Lab::with(65_535, 1);
            let config = DriverConfig { mode: ModePreference::Force(mode), ..DriverConfig::default() };
            let (mut a, mut b, frame) = connected(&lab, &config, ends);
            assert_eq!((a.attributes().path_mtu, a.attributes().largest_mtu), (65_535, 65_535));
            let lens = (1..18).flat_map(|n| [n * CHUNK - 1, n * CHUNK, n * CHUNK + 1]).chain([80, 65_549]);
            for len in lens.filter(|len| *len <= 65_549) {
                let bytes = of_len(&frame, len);
                send_bytes(&mut a, 0, &bytes);
                let got = receive_one(&mut b);
                assert_eq!((got.len(), got.chunks()), (len, len.div_ceil(CHUNK)), "{mode}");
                let chunks: Vec<Vec<u8>> = b.rx_chunks(&got).iter().map(|chunk| chunk.to_vec()).collect();
                assert!(chunks[..got.chunks() - 1].iter().all(|chunk| chunk.len() == CHUNK));
                assert!(chunks.concat() == bytes, "{mode}: {len} bytes came otherwise");
                assert_eq!(b.frame_census().received, got.chunks());
                b.recycle(got);
            }
            eventually("all chunks are back", || {
                a.flush();
                b.flush();
                let (transmit, receive) = (config.transmit_chunks as usize, config.receive_chunks as usize);
                [&a, &b].iter().all(|link| {
                    let FrameCensus { free, fill, .. } = link.frame_census();
                    // The fill ring lacks fewer chunks than it is refilled with at a time.
                    free + fill == transmit + receive && free >= transmit && receive - fill < 32
                })
            });
            assert_eq!((b.counters().receive_malformed, b.counters().kernel_rx_dropped), (0, 0));
        }
    }
}

/// Chunks that a frame was allocated with and does not use are free at once; the others are retained and can be sent
/// again.
#[test]
fn netns_chunks_behind_the_frames_end_become_free() {
    let lab = Lab::with(9000, 1);
    let config = DriverConfig::default();
    let (mut a, mut b, frame) = connected(&lab, &config, [A4, B4]);
    let (bytes, all) = (of_len(&frame, 4000), config.transmit_chunks as usize);
    let mut sent = a.alloc(9014).unwrap();
    assert_eq!((sent.chunks(), a.tx_available()), (3, all - 3));
    let mut chunks = a.tx_chunks(&mut sent).unwrap();
    chunks.chunk_mut(0).copy_from_slice(&bytes[..CHUNK]);
    chunks.chunk_mut(1)[..160].copy_from_slice(&bytes[CHUNK..]);
    drop(chunks);
    for _ in 0..2 {
        eventually("the frame is sent", || a.submit(QueueId(0), &mut sent, 4000).is_ok());
        assert_eq!((sent.chunks(), a.tx_available()), (2, all - 2));
        a.flush();
        assert_eq!(receive_bytes(&mut b), bytes);
        eventually("it is complete", || {
            a.flush();
            a.tx_chunks(&mut sent).is_some()
        });
    }
    a.release(sent);
    assert_eq!(a.tx_available(), all);
}

/// A ring that has room for a part of a frame takes none of it.
#[test]
fn netns_a_frame_is_put_on_the_ring_whole_or_not_at_all() {
    let lab = Lab::with(9000, 1);
    let config = DriverConfig { ring_size: 16, ..DriverConfig::default() };
    let (mut a, mut b, frame) = connected(&lab, &config, [A4, B4]);
    let bytes = of_len(&frame, 9014);
    let kept: Vec<TxFrame> = (0..5).map(|_| submit(&mut a, &bytes).unwrap()).collect();
    assert_eq!(a.unsent(), 15);
    assert_eq!(submit(&mut a, &bytes), Err(RingFull));
    let free = config.transmit_chunks as usize - 15;
    assert_eq!((a.unsent(), a.frame_census().sending, a.frame_census().free), (15, 15, free));
    a.flush();
    for _ in 0..5 {
        assert_eq!(receive_bytes(&mut b), bytes);
    }
    for frame in kept {
        a.release(frame);
    }
    assert_eq!(b.counters().receive_malformed, 0);
}

/// With memory for few chunks, our paths are limited to frames that leave room for others; the kernel's own traffic may
/// use the interface's MTU.
#[test]
fn netns_few_chunks_limit_our_paths_only() {
    let lab = Lab::with(9000, 1);
    let config = DriverConfig { receive_chunks: 8, ..DriverConfig::default() };
    let link = lab.open_with(Side::A, &config).unwrap();
    assert_eq!((link.attributes().mtu, link.attributes().path_mtu), (9000, 7658));
    lab.sh(Side::B, &format!("ping -q -c 2 -i 0.01 -s 8000 -W 1 {A4}"));
    lab.sh(Side::A, &format!("ip link set {DEV} mtu 5000"));
    let mut link = link;
    eventually("the new MTU is known", || {
        link.events(|_| ()).unwrap();
        link.attributes().path_mtu == 5000
    });
}

/// At an MTU of one chunk, native XDP is opened without support for longer frames, and stays so. Generic mode must receive what
/// the peer's kernel did not segment.
#[test]
fn netns_an_mtu_of_one_chunk_needs_chains_in_generic_mode_only() {
    let one = xwarp_driver::SINGLE_CHUNK_MTU;
    for (mode, expected) in [(Mode::Copy, one), (Mode::Generic, u16::MAX)] {
        let lab = Lab::with(u32::from(one), 1);
        let config = DriverConfig { mode: ModePreference::Force(mode), ..DriverConfig::default() };
        let link = lab.open_with(Side::A, &config).unwrap();
        let (path, largest) = (link.attributes().path_mtu, link.attributes().largest_mtu);
        assert_eq!((path, largest), (one, expected), "{mode}");
    }
}
