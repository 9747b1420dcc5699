//! Target: the other end of a leg in shared memory.
//!
//! An input is: which end lies (0: the switch, 1: the owner of the memory), then operations, each a number and its arguments. The
//! handshake is honest but for bytes that the input changes. Afterwards the liar writes anything into the shared memory, between the
//! calls of the honest end.
//!
//! A switch that lies: the owner's chunks are conserved, each frame has the bytes that its pieces have, a leg that has ended delivers
//! nothing, and all tokens can be given back. An owner that lies: a frame has the length of its private copy and begins with the
//! checked head, the rings end, and nothing is written but the ring and the memory that its descriptors name.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use xwarp_leg::far::{Sink, Source, accept};
use xwarp_leg::memif::{Handshake, Master, Step};
use xwarp_leg::message::{receive_message, send_message};
use xwarp_leg::{Bells, Leg, LegSizes, MAX_FRAME_BYTES};
use xwarp_tcp::link::{Link as _, QueueId, RxFrame, TxFrame};

use crate::input::Input;

/// Largest number of operations of an input.
const MAX_OPERATIONS: usize = 300;
/// Bytes of a message of the handshake.
const MESSAGE_BYTES: usize = 128;
const RING_LOG2: u8 = 4;
const RING: u64 = 1 << RING_LOG2;
/// Where the rings begin, and the chunks. The owner of the memory arranges it so.
const TO_SWITCH: u64 = 0;
const TO_OWNER: u64 = 4096;
const CHUNKS: u64 = 8192;
/// Fields of a ring.
const HEAD: u64 = 6;
const TAIL: u64 = 64;
const DESCRIPTORS: u64 = 128;
const DESCRIPTOR_BYTES: u64 = 16;
const COOKIE: u32 = 0x3E3_1F20;

/// Runs one input.
pub fn target(data: &[u8]) {
    let mut input = Input::new(data);
    if input.u8().is_multiple_of(2) {
        the_switch_lies(&mut input);
    } else {
        the_owner_lies(&mut input);
    }
}

fn sockets(kind: SocketType) -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, kind, flags, None).expect("two sockets")
}

/// A message of the handshake, of which the input may change a byte.
fn message(kind: u16, fields: &[&[u8]], input: &mut Input<'_>) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    let all = [&kind.to_ne_bytes()[..], &fields.concat()].concat();
    bytes[..all.len()].copy_from_slice(&all);
    // Most messages stay as they are.
    if input.u8() == 0xff {
        bytes[usize::from(input.u8()) % MESSAGE_BYTES] = input.u8();
    }
    bytes
}

/// The memory as the liar sees it.
struct Memory(File);

impl Memory {
    /// Writes as much as the memory has room for.
    fn write(&self, at: u64, bytes: &[u8]) {
        let len = self.0.metadata().map_or(0, |found| found.len());
        let room = usize::try_from(len.saturating_sub(at)).unwrap_or(0).min(bytes.len());
        self.0.write_all_at(&bytes[..room], at).expect("the memory can be written");
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact_at(&mut bytes, at).expect("the memory can be read");
        bytes
    }

    fn half(&self, at: u64) -> u16 {
        let bytes = self.read(at, 2);
        u16::from_ne_bytes([bytes[0], bytes[1]])
    }

    /// Writes a lie: a position, a descriptor, or any bytes.
    fn lie(&self, input: &mut Input<'_>) {
        let ring = if input.u8().is_multiple_of(2) { TO_SWITCH } else { TO_OWNER };
        match input.u8() % 5 {
            0 => self.write(ring + HEAD, &u16::from(input.u8()).to_ne_bytes()),
            1 => self.write(ring + TAIL, &u16::from(input.u8()).to_ne_bytes()),
            2 => {
                let at = ring + DESCRIPTORS + u64::from(input.u8()) % RING * DESCRIPTOR_BYTES;
                let (continued, region) = (u16::from(input.u8() % 2), u16::from(input.u8() / 0xff));
                // Mostly a length that a chunk has, and a place in the memory.
                let len = if input.u8() == 0xff { input.u32() } else { u32::from(input.u16() % 4100) };
                let offset =
                    if input.u8() == 0xff { input.u32() } else { CHUNKS as u32 + u32::from(input.u16()) };
                let bytes = [
                    &continued.to_ne_bytes()[..],
                    &region.to_ne_bytes(),
                    &len.to_ne_bytes(),
                    &offset.to_ne_bytes(),
                ];
                self.write(at, &bytes.concat());
            }
            3 => self.write(ring + u64::from(input.u8()), &input.u64().to_ne_bytes()),
            _ => self.write(u64::from(input.u32()) % (1 << 18), &input.u64().to_ne_bytes()),
        }
    }
}

/// The owner of the memory, which is tested, and what it holds.
struct Owner {
    leg: Leg,
    received: Vec<RxFrame>,
    to_send: Vec<TxFrame>,
}

fn the_switch_lies(input: &mut Input<'_>) {
    let (ours, theirs) = sockets(SocketType::SEQPACKET);
    let version = 0x0200_u16.to_ne_bytes();
    // All answers wait before the questions.
    let answers = [
        message(2, &[&[0; 32], &version, &version, &[0; 6], &[14]], input),
        message(1, &[], input),
        message(1, &[], input),
        message(1, &[], input),
        message(1, &[], input),
        message(7, &[], input),
    ];
    for bytes in answers {
        send_message(theirs.as_fd(), &bytes, &[]).expect("there is room for the answers");
    }
    let sizes = LegSizes { receive_log2: RING_LOG2, transmit_log2: RING_LOG2 };
    let bells = Bells::of_sockets().expect("two sockets");
    let handshake = Handshake { id: 0, secret: "", patience: Duration::ZERO };
    let Ok(leg) = Leg::connect(ours, sizes, bells, &handshake) else { return };
    let Some(memory) = passed_memory(theirs.as_fd()) else { panic!("the owner has passed no memory") };
    let mut owner = Owner { leg, received: Vec::new(), to_send: Vec::new() };
    for _ in 0..MAX_OPERATIONS {
        if input.is_empty() {
            break;
        }
        match input.u8() % 12 {
            0..=3 => memory.lie(input),
            // What an honest switch does: it gives back all that it has got, or delivers a frame of one piece.
            4 => memory.write(TO_SWITCH + TAIL, &memory.half(TO_SWITCH + HEAD).to_ne_bytes()),
            5 => {
                let tail = memory.half(TO_OWNER + TAIL);
                let at = TO_OWNER + DESCRIPTORS + u64::from(tail) % RING * DESCRIPTOR_BYTES;
                memory.write(at + 4, &u32::from(input.u16() % 4097).to_ne_bytes());
                memory.write(TO_OWNER + TAIL, &tail.wrapping_add(1).to_ne_bytes());
            }
            6 => {
                let _ = send_message(theirs.as_fd(), &message(u16::from(input.u8()), &[], input), &[]);
                owner.leg.check();
            }
            operation => owner.does(operation, input),
        }
        owner.check();
    }
    owner.gives_all_back();
}

/// The memory that an owner passes in its handshake.
fn passed_memory(socket: BorrowedFd<'_>) -> Option<Memory> {
    let mut found = None;
    while let Ok((bytes, descriptors)) = receive_message(socket) {
        if bytes.first_chunk() == Some(&4_u16.to_ne_bytes()) {
            found = descriptors.into_iter().next();
        }
    }
    found.map(|descriptor| Memory(descriptor.into()))
}

impl Owner {
    fn does(&mut self, operation: u8, input: &mut Input<'_>) {
        match operation {
            7 => {
                let had_ended = self.leg.ended().is_some();
                let held = self.received.len();
                let count = self.leg.receive(&mut self.received, usize::from(input.u8() % 32));
                assert_eq!(self.received.len(), held + count, "another number of frames");
                assert!(!had_ended || count == 0, "an ended leg delivers");
                for frame in &self.received[held..] {
                    let bytes: usize = self.leg.rx_chunks(frame).iter().map(|chunk| chunk.len()).sum();
                    assert_eq!(bytes, frame.len(), "the pieces of a frame");
                    assert!(bytes <= MAX_FRAME_BYTES, "a frame of {bytes} bytes");
                    assert!(self.leg.rx_head(frame).len() <= bytes, "the head of a frame");
                }
            }
            8 if !self.received.is_empty() => {
                let frame = self.received.swap_remove(usize::from(input.u8()) % self.received.len());
                self.leg.recycle(frame);
            }
            9 => self.to_send.extend(self.leg.alloc(usize::from(input.u16()))),
            10 if !self.to_send.is_empty() => {
                let at = usize::from(input.u8()) % self.to_send.len();
                let _ = self.leg.submit(QueueId(0), &mut self.to_send[at], usize::from(input.u16()));
                self.leg.flush();
            }
            11 if !self.to_send.is_empty() => {
                let mut frame = self.to_send.swap_remove(usize::from(input.u8()) % self.to_send.len());
                if let Some(chunks) = self.leg.tx_chunks(&mut frame) {
                    for chunk in chunks {
                        chunk.fill(7);
                    }
                }
                self.leg.release(frame);
            }
            _ => {}
        }
    }

    fn check(&self) {
        let census = self.leg.frame_census();
        assert_eq!(census.total() as u64, 2 * RING, "chunks are lost: {census:?}");
        let received: usize = self.received.iter().map(RxFrame::chunks).sum();
        // A frame of which the end has not come yet holds chunks too.
        assert!(census.received >= received, "{received} received chunks have tokens: {census:?}");
        let to_send: usize = self.to_send.iter().map(TxFrame::chunks).sum();
        assert_eq!(census.retained + census.sending, to_send, "chunks to send: {census:?}");
    }

    fn gives_all_back(mut self) {
        for frame in self.received.drain(..) {
            self.leg.recycle(frame);
        }
        for frame in self.to_send.drain(..) {
            self.leg.release(frame);
        }
        self.check();
    }
}

/// The switch's end of a leg, which is tested.
struct Switch {
    source: Source,
    sink: Sink,
    /// Where the rings really are, and the number of descriptors of the one to the owner.
    from_owner: u64,
    to_owner: u64,
    ring: u64,
    has_ended: bool,
}

/// Bytes of the memory of an owner that lies.
const MEMORY_BYTES: u64 = CHUNKS + 16 * 4096;

fn the_owner_lies(input: &mut Input<'_>) {
    let (ours, theirs) = sockets(SocketType::SEQPACKET);
    let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    let memory = Memory(memory.into());
    memory.0.set_len(MEMORY_BYTES).expect("memory");
    if input.u8() != 0xff {
        fcntl_add_seals(&memory.0, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    }
    for ring in [TO_SWITCH, TO_OWNER] {
        memory.write(ring, &COOKIE.to_ne_bytes());
    }
    let ringer = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let (_bell, their_bell) = sockets(SocketType::DGRAM);
    let Ok(mut master) = Master::new(ours, MEMORY_BYTES) else { return };
    let ring = |flags: u16, offset: u64, input: &mut Input<'_>| {
        let offset = (offset as u32).to_ne_bytes();
        message(5, &[&flags.to_ne_bytes(), &[0; 4], &offset, &[RING_LOG2], &[0; 2]], input)
    };
    let version = 0x0200_u16.to_ne_bytes();
    let steps = [
        (message(3, &[&version, &[0; 61]], input), None),
        (message(4, &[&[0; 2], &MEMORY_BYTES.to_ne_bytes()], input), Some(memory.0.as_fd())),
        (ring(1, TO_SWITCH, input), Some(ringer.as_fd())),
        (ring(0, TO_OWNER, input), Some(their_bell.as_fd())),
        (message(6, &[&[0; 32]], input), None),
    ];
    // The input may have changed which ring is which, and where it is.
    let of_flag = |flag: u8| {
        let step = steps[2..4].iter().find(|(bytes, _)| bytes[2] & 1 == flag);
        step.map(|(bytes, _)| (u32::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]), bytes[12]))
    };
    let (to_switch, to_owner) = (of_flag(1), of_flag(0));
    let mut asked = None;
    for (bytes, descriptor) in steps {
        let _ = send_message(theirs.as_fd(), &bytes, descriptor.as_slice());
        match master.read() {
            Ok(Step::Nothing) => {}
            Ok(Step::Asked(leg)) => asked = Some(leg),
            Ok(Step::Gone) | Err(_) => return,
        }
    }
    let Some(Ok((source, sink))) = asked.map(accept) else { return };
    master.connected();
    let (Some((to_switch, _)), Some((to_owner, log2))) = (to_switch, to_owner) else {
        panic!("a leg with rings of one direction only");
    };
    let mut switch = Switch {
        source,
        sink,
        from_owner: to_switch.into(),
        to_owner: to_owner.into(),
        ring: 1 << log2,
        has_ended: false,
    };
    for _ in 0..MAX_OPERATIONS {
        if input.is_empty() || switch.has_ended {
            break;
        }
        match input.u8() % 8 {
            0..=3 => memory.lie(input),
            operation => switch.does(operation, &memory, input),
        }
    }
}

impl Switch {
    fn does(&mut self, operation: u8, memory: &Memory, input: &mut Input<'_>) {
        match operation {
            // All frames: the rings are empty after that, because nobody writes meanwhile.
            4 => {
                let mut head = [0; 160];
                let mut frames = 0;
                loop {
                    let mut found = None;
                    match self.source.next(&mut head, |frame| {
                        found = Some((frame.len(), frame.head().to_vec(), frame.to_vec()));
                    }) {
                        Ok(true) => {
                            let (len, head, all) = found.expect("a frame was taken");
                            assert!(len <= MAX_FRAME_BYTES, "a frame of {len} bytes");
                            assert_eq!((all.len(), head.len()), (len, len.min(160)), "the copy of a frame");
                            assert!(all.starts_with(&head), "the copy differs from what was checked");
                            frames += 1;
                            assert!(frames <= 1 << 14, "more frames than a ring has");
                        }
                        Ok(false) => break,
                        Err(_) => return self.has_ended = true,
                    }
                }
                self.source.give_back();
            }
            5 => {
                let bytes = vec![0xa5; usize::from(input.u16())];
                self.delivers(memory, |_, sink| sink.deliver_bytes(&bytes).is_err());
            }
            // A frame of the owner back to itself.
            6 => self.delivers(memory, |source, sink| {
                let mut lied = false;
                let taken = source.next(&mut [0; 60], |frame| lied = sink.deliver(frame).is_err());
                source.give_back();
                lied || taken.is_err()
            }),
            _ => {
                self.source.sleep(input.u8().is_multiple_of(2));
                let _ = self.source.has_frames();
                self.sink.wake();
            }
        }
    }

    /// Delivers, and compares what was written with what the owner has posted.
    fn delivers(&mut self, memory: &Memory, deliver: impl FnOnce(&mut Source, &mut Sink) -> bool) {
        let before = memory.read(0, MEMORY_BYTES as usize);
        self.has_ended = deliver(&mut self.source, &mut self.sink);
        let after = memory.read(0, MEMORY_BYTES as usize);
        let word = |at: u64| {
            let bytes = before.get(at as usize..).and_then(<[u8]>::first_chunk);
            u64::from(u32::from_ne_bytes(*bytes.expect("the ring is in the memory")))
        };
        let descriptors = self.to_owner + DESCRIPTORS;
        let mut allowed = Vec::new();
        allowed.push(self.to_owner..descriptors + self.ring * DESCRIPTOR_BYTES);
        // The position up to which it has given back descriptors of its own ring.
        allowed.push(self.from_owner + TAIL..self.from_owner + TAIL + 2);
        for index in 0..self.ring {
            let at = descriptors + index * DESCRIPTOR_BYTES;
            allowed.push(word(at + 8)..word(at + 8) + word(at + 4));
        }
        for (at, _) in before.iter().zip(&after).enumerate().filter(|(_, (before, after))| before != after) {
            assert!(allowed.iter().any(|range| range.contains(&(at as u64))), "byte {at} was written");
        }
    }
}
