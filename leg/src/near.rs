//! [`Leg`]: the end of a leg that owns the memory, as a [`Link`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};
use xwarp_tcp::link::{
    ChunksMut, Kick, Kicked, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame,
};

use crate::frames::FrameCensus;
use crate::memif::{self, Handshake};
use crate::sys::{Arrived, Chunks, Descriptor, Lie, NotInherited, Ring, Shared};
use crate::{CHUNK_BYTES, MAX_FRAME_BYTES, chunks_of};

/// The only region of a leg's memory: the rings, then the chunks.
const REGION: u16 = 0;
/// Free receive chunks are given to the other end when there are so many, so that its cache line of the position is written rarely.
const REFILL_BATCH: usize = 16;

/// How many chunks a leg has in each direction; powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegSizes {
    /// Base-2 logarithm of the number of chunks for received frames.
    pub receive_log2: u8,
    /// Base-2 logarithm of the number of chunks for frames to send.
    pub transmit_log2: u8,
}

impl Default for LegSizes {
    /// 4 MiB to receive and 2 MiB to send, as many chunks as an AF_XDP queue has. Pages are allocated when they are used first.
    fn default() -> Self {
        Self { receive_log2: 10, transmit_log2: 9 }
    }
}

impl LegSizes {
    /// Bytes of memory of the leg.
    pub fn bytes(self) -> usize {
        self.base() + (CHUNK_BYTES << self.receive_log2) + (CHUNK_BYTES << self.transmit_log2)
    }

    /// Where the second ring begins, and the first chunk.
    fn second_ring(self) -> usize {
        Ring::bytes(self.transmit_log2).next_multiple_of(CHUNK_BYTES)
    }

    fn base(self) -> usize {
        self.second_ring() + Ring::bytes(self.receive_log2).next_multiple_of(CHUNK_BYTES)
    }
}

xwarp_tcp::counters! {
    /// Counters of a leg since it was connected. Frames are counted once, bytes from the Ethernet header on.
    pub struct LegCounters in "leg" {
        /// Frames received.
        received_frames,
        /// Their bytes.
        received_bytes,
        /// Received frames that were too long: dropped.
        receive_malformed,
        /// Frames given to the other end.
        sent_frames,
        /// Their bytes.
        sent_bytes,
        /// Wake-ups of the other end: system calls.
        wakeups,
        /// Wake-ups of this end that were read: system calls.
        woken,
        /// Submissions of a frame to a full ring.
        transmit_ring_full,
        /// Allocations of a transmit frame while none was free.
        transmit_exhausted,
    }
}

/// What wakes the ends of a leg.
#[derive(Debug)]
pub struct Bells {
    /// Readable for this end when frames have come.
    ours: OwnedFd,
    /// What the other end writes for that.
    theirs: OwnedFd,
}

impl Bells {
    /// A pair of sockets. A write to a socket never waits if its writer says so, whatever other processes do with it; a write to an
    /// eventfd waits when a process that has it makes it so. The switch of the fabric takes only such bells.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn of_sockets() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        Ok(Self { ours, theirs })
    }

    /// One eventfd, as other switches expect.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn of_eventfd() -> io::Result<Self> {
        let ours = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { theirs: ours.try_clone()?, ours })
    }
}

/// Wakes the other end, from any thread.
#[derive(Debug)]
pub struct Ringer {
    requested: AtomicBool,
    bell: OwnedFd,
    rung: std::sync::atomic::AtomicU64,
}

impl Kick for Ringer {
    fn kick(&self) -> Kicked {
        if !self.requested.load(Ordering::Relaxed) || !self.requested.swap(false, Ordering::AcqRel) {
            return Kicked::Nothing;
        }
        self.rung.fetch_add(1, Ordering::Relaxed);
        // A full counter wakes the other end too.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        Kicked::Done(1)
    }
}

/// The end of a leg that owns its memory: an interface with one queue, whose frames another process carries.
///
/// It serves until the other end hangs up or lies; then it carries nothing any more, and [`ended`](Self::ended) says why.
#[derive(Debug)]
pub struct Leg {
    chunks: Chunks,
    /// Frames to the other end.
    transmit: Posted,
    /// Frames from the other end.
    receive: Posted,
    partial: Arrived,
    /// The rest of a frame that is too long is dropped up to its end.
    skipping: bool,
    ringer: Arc<Ringer>,
    /// The kicks are the caller's.
    handed_over: bool,
    /// Frames were submitted since the last flush.
    sent_since_flush: bool,
    /// Readable when frames have come while this end was not looking.
    bell: OwnedFd,
    /// The other end is asked for wake-ups.
    is_armed: bool,
    counters: LegCounters,
    ended: Option<String>,
    /// The connection, whose end is the other end's.
    socket: OwnedFd,
    not_inherited: Vec<NotInherited>,
}

/// The owner's side of a ring: descriptors that are with the other end, in order.
#[derive(Debug)]
struct Posted {
    ring: Ring,
    head: u16,
    tail: u16,
    /// The chunks of the descriptors from `tail` to `head`.
    chunks: VecDeque<u32>,
}

impl Posted {
    fn new(ring: Ring) -> Self {
        ring.format();
        let chunks = VecDeque::with_capacity(ring.len().into());
        Self { ring, head: 0, tail: 0, chunks }
    }

    /// Descriptors that can be posted.
    fn room(&self) -> usize {
        usize::from(self.ring.len()) - self.chunks.len()
    }

    fn post(&mut self, chunk: u32, descriptor: Descriptor) {
        self.ring.set_descriptor(self.head, descriptor);
        self.head = self.head.wrapping_add(1);
        self.chunks.push_back(chunk);
    }

    /// Makes the posted descriptors visible to the other end.
    fn publish(&self) {
        self.ring.set_head(self.head);
    }

    /// How many descriptors the other end has given back since they were [taken](Self::take).
    fn given_back(&self) -> Result<usize, Lie> {
        let count = usize::from(self.ring.tail().wrapping_sub(self.tail));
        if count <= self.chunks.len() {
            Ok(count)
        } else {
            Err(Lie("gives back descriptors that it does not have"))
        }
    }

    /// The next descriptor that was given back, and its chunk.
    fn take(&mut self) -> Option<(u32, Descriptor)> {
        let chunk = self.chunks.pop_front()?;
        let descriptor = self.ring.descriptor(self.tail);
        self.tail = self.tail.wrapping_add(1);
        Some((chunk, descriptor))
    }
}

impl Leg {
    /// Connects a leg over `socket`, a socket of Unix domain and type `SOCK_SEQPACKET` on which the other end speaks memif as its
    /// master, within `patience`.
    ///
    /// # Errors
    /// The other end hangs up, refuses, speaks another version, or does not answer in time.
    pub fn connect(
        socket: OwnedFd,
        sizes: LegSizes,
        bells: Bells,
        handshake: &Handshake<'_>,
    ) -> io::Result<Self> {
        let bytes = sizes.bytes();
        let (memory, file) = Shared::new(bytes)?;
        let memory = Arc::new(memory);
        let transmit = Ring::at(&memory, 0, sizes.transmit_log2);
        let receive = Ring::at(&memory, sizes.second_ring(), sizes.receive_log2);
        let chunks = Chunks::new(&memory, sizes.base(), 1 << sizes.receive_log2, 1 << sizes.transmit_log2);
        let (Some(transmit), Some(receive), Some(chunks)) = (transmit, receive, chunks) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let to_them = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut leg = Self {
            chunks,
            transmit: Posted::new(transmit),
            receive: Posted::new(receive),
            partial: Arrived::default(),
            skipping: false,
            ringer: Arc::new(Ringer {
                requested: AtomicBool::new(false),
                bell: to_them,
                rung: std::sync::atomic::AtomicU64::new(0),
            }),
            handed_over: false,
            sent_since_flush: false,
            bell: bells.ours,
            is_armed: true,
            counters: LegCounters::default(),
            ended: None,
            socket,
            not_inherited: Vec::new(),
        };
        leg.refill();
        memif::greet(
            leg.socket.as_fd(),
            handshake,
            &memif::Offer {
                memory: file.as_fd(),
                bytes: bytes as u64,
                to_master: (0, sizes.transmit_log2, leg.ringer.bell.as_fd()),
                to_slave: (sizes.second_ring() as u32, sizes.receive_log2, bells.theirs.as_fd()),
            },
        )?;
        leg.not_inherited.push(NotInherited::new([
            leg.socket.as_fd(),
            leg.bell.as_fd(),
            leg.ringer.bell.as_fd(),
        ]));
        Ok(leg)
    }

    /// Readable while frames wait.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Readable when the other end has hung up; see [`check`](Self::check).
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes over the wake-ups: from now on [`flush`](Link::flush) only requests them.
    pub fn ringer(&mut self) -> Arc<Ringer> {
        self.handed_over = true;
        Arc::clone(&self.ringer)
    }

    /// Counters since it was connected.
    pub fn counters(&self) -> LegCounters {
        let mut counters = self.counters;
        counters.wakeups += self.ringer.rung.load(Ordering::Relaxed);
        counters
    }

    /// Number of chunks in each place. Examines every chunk: for tests and diagnosis.
    pub fn frame_census(&self) -> FrameCensus {
        self.chunks.census()
    }

    /// Why it carries nothing any more, for people.
    pub fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Looks whether the other end has hung up, without waiting.
    pub fn check(&mut self) {
        if self.ended.is_none()
            && let Err(reason) = memif::listen(self.socket.as_fd())
        {
            self.end(reason);
        }
    }

    /// Ends the leg.
    pub fn end(&mut self, reason: String) {
        self.ended.get_or_insert(reason);
    }

    fn lied(&mut self, lie: Lie) {
        tracing::error!(%lie, "the leg ends");
        self.end(lie.to_string());
    }

    /// Gives the free receive chunks to the other end.
    fn refill(&mut self) {
        let mut any = false;
        while self.receive.room() > 0
            && let Some(chunk) = self.chunks.fill()
        {
            let (len, offset) = (CHUNK_BYTES as u32, self.chunks.offset(chunk) as u32);
            self.receive.post(chunk, Descriptor { continued: false, region: REGION, len, offset });
            any = true;
        }
        if any {
            self.receive.publish();
        }
    }

    /// Takes back the chunks of frames that the other end has taken.
    fn complete(&mut self) {
        match self.transmit.given_back() {
            Ok(count) => {
                for _ in 0..count {
                    let Some((chunk, _)) = self.transmit.take() else { return };
                    self.chunks.sent(chunk);
                }
            }
            Err(lie) => self.lied(lie),
        }
    }

    /// Takes received frames; returns how many.
    fn take_frames(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> Result<usize, Lie> {
        let mut frames = 0;
        let mut left = self.receive.given_back()?;
        while frames < max && left > 0 {
            let Some((chunk, descriptor)) = self.receive.take() else { break };
            left -= 1;
            self.skipping |= !self.chunks.arrived(&mut self.partial, chunk, descriptor.len);
            if descriptor.continued {
                continue;
            }
            let frame = std::mem::take(&mut self.partial);
            if std::mem::take(&mut self.skipping) || frame.bytes as usize > MAX_FRAME_BYTES {
                self.counters.receive_malformed += 1;
                if frame.chunks > 0 {
                    self.chunks.recycle(frame.head);
                }
                continue;
            }
            frames += 1;
            self.counters.received_frames += 1;
            self.counters.received_bytes += u64::from(frame.bytes);
            batch.push(RxFrame::new(frame.head, frame.chunks, frame.bytes, QueueId(0)));
        }
        Ok(frames)
    }

    /// The other end need not wake this one, which looks for frames itself.
    fn disarm(&mut self) {
        if !self.is_armed {
            return;
        }
        self.is_armed = false;
        self.receive.ring.mask_wakeups(true);
        let mut bytes = [0; 64];
        // An eventfd is empty after one read, a socket when there is no message.
        while recv_any(self.bell.as_fd(), &mut bytes) {
            self.counters.woken += 1;
        }
    }

    fn arm(&mut self) {
        self.is_armed = true;
        self.receive.ring.mask_wakeups(false);
    }
}

/// Reads a wake-up without waiting; returns whether there was one.
fn recv_any(bell: BorrowedFd<'_>, bytes: &mut [u8]) -> bool {
    match recv(bell, &mut *bytes, RecvFlags::DONTWAIT) {
        Ok((_, len)) => len > 0,
        Err(rustix::io::Errno::NOTSOCK) => rustix::io::read(bell, bytes).is_ok(),
        Err(_) => false,
    }
}

impl Link for Leg {
    fn chunk_bytes(&self) -> usize {
        CHUNK_BYTES
    }

    /// Memory does not change bytes on their way, so nobody needs a checksum over them.
    fn offloads_checksums(&self) -> bool {
        true
    }

    fn is_within_host(&self) -> bool {
        true
    }

    fn tx_available(&self) -> usize {
        self.chunks.transmit_free()
    }

    fn rx_capacity(&self) -> usize {
        self.receive.ring.len().into()
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        self.chunks.receive_available()
    }

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        if self.ended.is_some() {
            return 0;
        }
        self.complete();
        let mut taken = self.take_frames(batch, max);
        if taken == Ok(0) && !self.is_armed {
            // Frames may have come before the other end could see that it has to wake this one.
            self.arm();
            taken = self.take_frames(batch, max);
        }
        match taken {
            Ok(0) => 0,
            Ok(frames) => {
                self.disarm();
                frames
            }
            Err(lie) => {
                self.lied(lie);
                0
            }
        }
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.chunks.received(frame.head()).collect()
    }

    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        self.chunks.received(frame.head()).next().unwrap_or_default()
    }

    fn recycle(&mut self, frame: RxFrame) {
        self.chunks.recycle(frame.head());
        let with_them = self.receive.chunks.len();
        if self.chunks.receive_free() >= REFILL_BATCH.min(with_them.max(1)) {
            self.refill();
        }
    }

    fn alloc(&mut self, len: usize) -> Option<TxFrame> {
        let chunks = chunks_of(len);
        if self.chunks.transmit_free() < chunks {
            self.complete();
        }
        let head = self.chunks.alloc(chunks);
        self.counters.transmit_exhausted += u64::from(head.is_none());
        head.map(|head| TxFrame::new(head, chunks as u16))
    }

    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool {
        self.chunks.retained_into(frame.head(), chunks)
    }

    fn submit(&mut self, _queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        let count = chunks_of(len);
        let head = frame.head();
        let fits = count <= self.chunks.len(head) && len <= MAX_FRAME_BYTES && self.chunks.is_retained(head);
        if !fits || self.transmit.room() < count {
            self.counters.transmit_ring_full += 1;
            return Err(RingFull);
        }
        let Self { chunks, transmit, .. } = self;
        let base = chunks.offset(0);
        let mut left = len;
        chunks.send(head, count, |chunk| {
            let bytes = left.min(CHUNK_BYTES);
            left -= bytes;
            let offset = (base + chunk as usize * CHUNK_BYTES) as u32;
            transmit
                .post(chunk, Descriptor { continued: left > 0, region: REGION, len: bytes as u32, offset });
        });
        transmit.publish();
        frame.shorten(count as u16);
        self.sent_since_flush = true;
        self.counters.sent_frames += 1;
        self.counters.sent_bytes += len as u64;
        Ok(())
    }

    fn release(&mut self, frame: TxFrame) {
        self.chunks.release(frame.head());
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.sent_since_flush)
            && self.ended.is_none()
            && self.transmit.ring.wants_wakeup()
        {
            self.ringer.requested.store(true, Ordering::Release);
            if !self.handed_over {
                self.ringer.kick();
            }
        }
        if self.chunks.transmit_free() < usize::from(self.transmit.ring.len()) / 2 {
            self.complete();
        }
    }

    /// All frames to the ports of this process are its own.
    fn steer(&mut self, _rule: Steer) -> Result<(), SteerError> {
        Ok(())
    }

    fn unsteer(&mut self, _rule: Steer) {}
}
