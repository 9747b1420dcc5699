//! The only unsafe code of this crate: the memory that we share with the kernel, its rings, one ioctl, one socket option, and
//! the descriptors that this process inherits. The module's interface is safe.
//!
//! The argument for all blocks below: we access a chunk's memory only while its [`Place`] is `Received` or `Retained`,
//! and the kernel only while it is `Fill`, `Sending` or `Released`. The places are private to [`Rings`], change only
//! together with the ring operation that hands a chunk over or takes it back, and are checked in release builds too. A
//! reference into a chunk borrows [`Rings`], so no hand-over can happen while it lives. The chunks of a frame are all
//! different: a chunk joins a chain only when it has just left the free stack or the receive ring.
#![expect(unsafe_code, reason = "the one place for it; see the module's argument")]

mod ethtool;
mod inherited;
mod memory;
mod metadata;
mod ring;
mod sizes;

use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use xwarp_leg::chains::Chains;
use xwarp_leg::frames::{FrameCensus, FrameTable, Place};
pub(crate) use xwarp_leg::{NotInherited, prepare_for_forks};
use xwarp_tcp::link::ChunksMut;

pub(crate) use self::ethtool::{
    QueueCounts, active_queues, complete_checksums, joins_segments, offloads_checksums, strips_vlan_tags,
};
pub use self::inherited::{close_inherited, inherited};
use self::memory::Memory;
use self::metadata::TransmitMetadata;
use self::ring::{Descriptor, SocketRings};
pub(crate) use self::sizes::Sizes;

/// Bytes of one chunk: the largest that the kernel allows, and one page.
pub(crate) const CHUNK_BYTES: usize = 4096;

/// Bytes at the start of each received chunk that the kernel reserves for XDP programs (`XDP_PACKET_HEADROOM`). Transmitted
/// chunks have room for metadata there, so that both directions have chunks of one capacity.
const HEADROOM_BYTES: usize = 256;

/// Largest number of bytes of a frame in one chunk.
pub(crate) const CHUNK_CAPACITY: usize = CHUNK_BYTES - HEADROOM_BYTES;

/// Largest number of chunks of a frame: one and the fragments of the kernel's socket buffers (`MAX_SKB_FRAGS`), of
/// which there are 17 unless the kernel was built for more.
pub(crate) const MAX_CHUNKS: usize = 18;

/// Option of a descriptor that is not the last of its frame (`XDP_PKT_CONTD` of `linux/if_xdp.h`).
const CONTINUED: u32 = 1 << 0;

/// The number of the queue from which frames come that another owner of the interface has handed over.
pub(crate) const HANDED_OVER: u16 = u16::MAX;

/// The number of the queue from which packets come that arrived in fragments.
pub(crate) const REASSEMBLED: u16 = u16::MAX - 1;

/// Receive chunks without which a queue that is added to an open interface is not served.
const MIN_ADDED_CHUNKS: usize = 64;

/// Descriptors moved by one ring operation.
const BATCH: usize = 64;
/// Bytes of a received chunk that are prefetched: headers and a short message. The processor itself prefetches longer reads.
const PREFETCHED_BYTES: usize = 256;

/// Frame memory, the frame table, and the rings of every queue.
pub(crate) struct Rings {
    // Queues are dropped before the memory that the kernel accesses for them.
    queues: Vec<Queue>,
    frames: FrameTable,
    chains: Chains,
    /// By chunk: where the received bytes are in it.
    received: Vec<Extent>,
    scratch: [Descriptor; BATCH],
    completed: [u64; BATCH],
    /// The socket to which the memory was registered, until it is bound to the first queue.
    unbound: Option<Queue>,
    /// Queues for which there are receive chunks since the interface was opened.
    first_queues: u16,
    /// Groups of receive chunks of the queues that were added since, and of reassembled packets.
    added_groups: Vec<u16>,
    reassembly: Option<u16>,
    /// The index of the interface to which the first socket is bound.
    interface: u32,
    /// The memory is registered for [`TransmitMetadata`].
    metadata: bool,
    memory: Memory,
}

/// Bytes in a chunk; inside the chunk's bounds.
#[derive(Debug, Clone, Copy, Default)]
struct Extent {
    start: u32,
    len: u32,
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rings")
            .field("queues", &self.queues.len())
            .field("census", &self.frames.census())
            .finish_non_exhaustive()
    }
}

/// The socket and the rings of one queue.
struct Queue {
    rings: SocketRings,
    socket: OwnedFd,
    /// The frame whose last chunk has not arrived yet.
    partial: Partial,
}

impl Queue {
    /// The queue of a socket that has rings.
    fn over(socket: OwnedFd, sizes: &Sizes) -> io::Result<Self> {
        let rings = SocketRings::map(socket.as_fd(), sizes.entries())?;
        Ok(Self { rings, socket, partial: Partial::default() })
    }
}

/// The first chunks of a frame.
#[derive(Debug, Clone, Copy, Default)]
struct Partial {
    head: u32,
    last: u32,
    chunks: u16,
    bytes: u32,
    /// A descriptor of the frame was wrong, or the frame has too many: none of its chunks is kept.
    malformed: bool,
}

/// A received frame: a chain of chunks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    pub head: u32,
    pub chunks: u16,
    pub bytes: u32,
}

/// The outcome of a batch of receive descriptors.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Taken {
    pub frames: usize,
    pub malformed: usize,
}

/// Chunks of a frame of `len` bytes.
pub(crate) const fn chunks_of(len: usize) -> usize {
    if len == 0 { 1 } else { len.div_ceil(CHUNK_CAPACITY) }
}

/// The chunk of an address in the frame memory, and the offset in the chunk. An address beyond the memory is in no chunk.
fn chunk_at(address: u64) -> (u32, usize) {
    let chunk = u32::try_from(address / CHUNK_BYTES as u64).unwrap_or(u32::MAX);
    (chunk, (address % CHUNK_BYTES as u64) as usize)
}

impl Partial {
    /// Appends `chunk`; `right` says whether its descriptor was valid.
    fn add(&mut self, chains: &mut Chains, chunk: u32, bytes: usize, right: bool) {
        self.malformed |= !right || usize::from(self.chunks) >= MAX_CHUNKS;
        if self.malformed {
            return;
        }
        if self.chunks == 0 {
            chains.begin(chunk);
            self.head = chunk;
        } else {
            chains.append(self.head, self.last, chunk);
        }
        self.last = chunk;
        self.chunks += 1;
        self.bytes += bytes as u32;
    }
}

/// A new AF_XDP socket of the calling thread's network namespace, without memory and rings.
pub(crate) fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Registers `memory` to a new socket, with [`TransmitMetadata`] in front of frames or without. The caller is charged for the
/// locked pages, unless it has `CAP_IPC_LOCK`.
fn register(socket: BorrowedFd<'_>, memory: &Memory, metadata: bool) -> io::Result<()> {
    let registration = XdpUmemReg {
        addr: memory.mapping.start().as_ptr() as u64,
        len: memory.mapping.len() as u64,
        chunk_size: CHUNK_BYTES as u32,
        headroom: 0,
        flags: if metadata { TransmitMetadata::REGISTERED } else { XdpUmemRegFlags::empty() },
        tx_metadata_len: if metadata { TransmitMetadata::BYTES as u32 } else { 0 },
    };
    Ok(sockopt::set_xdp_umem_reg(socket, registration)?)
}

/// Registers `bytes` of memory that another process made to a socket of that process.
pub(crate) fn register_for(socket: BorrowedFd<'_>, memory: OwnedFd, bytes: u64) -> io::Result<()> {
    register(socket, &Memory::of(memory, bytes as usize)?, false)
}

fn with_chains(flags: SocketAddrXdpFlags, sizes: &Sizes) -> SocketAddrXdpFlags {
    if sizes.multi_buffer { flags | SocketAddrXdpFlags::XDP_USE_SG } else { flags }
}

/// Restricts `socket` to interface `index` of the calling thread's network namespace.
pub(crate) fn bind_to_interface(socket: BorrowedFd<'_>, index: u32) -> rustix::io::Result<()> {
    let size = size_of::<u32>() as libc::socklen_t;
    let option = (libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX);
    // SAFETY: the kernel reads one integer, which outlives the call.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), option.0, option.1, (&raw const index).cast(), size) };
    if result == 0 {
        return Ok(());
    }
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Err(rustix::io::Errno::from_raw_os_error(errno))
}

impl Rings {
    /// Allocates and registers the frame memory; no queue is bound yet.
    pub(crate) fn new(sizes: Sizes) -> io::Result<Self> {
        let memory = Memory::new(sizes.bytes() as usize)?;
        let wanted = sizes.offload_checksums;
        let socket = new_socket()?;
        let metadata = match register(socket.as_fd(), &memory, wanted) {
            // A kernel before 6.8 knows no metadata.
            Err(error) if wanted && error.raw_os_error() == Some(libc::EINVAL) => {
                register(socket.as_fd(), &memory, false)?;
                false
            }
            registered => registered.map(|()| wanted)?,
        };
        Self::unbound(socket, memory, sizes, metadata)
    }

    /// Allocates frame memory and registers it to a socket that a helper granted, or lets `helper` do that if this process may
    /// not lock so much; no queue is bound yet.
    pub(crate) fn granted(
        socket: OwnedFd,
        sizes: Sizes,
        helper: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let memory = Memory::new(sizes.bytes() as usize)?;
        match register(socket.as_fd(), &memory, false) {
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => helper(memory.file())?,
            registered => registered?,
        }
        Self::unbound(socket, memory, sizes, false)
    }

    fn unbound(socket: OwnedFd, memory: Memory, sizes: Sizes, metadata: bool) -> io::Result<Self> {
        ring::make(socket.as_fd(), sizes.entries())?;
        let unbound = Some(Queue::over(socket, &sizes)?);
        Ok(Self {
            queues: Vec::new(),
            frames: FrameTable::new(sizes.receive_groups(), sizes.receive_per_queue, sizes.transmit),
            chains: Chains::new(sizes.chunks()),
            received: vec![Extent::default(); sizes.chunks() as usize],
            scratch: [Descriptor::default(); BATCH],
            completed: [0; BATCH],
            unbound,
            first_queues: sizes.queues,
            added_groups: Vec::new(),
            reassembly: None,
            interface: 0,
            metadata,
            memory,
        })
    }

    /// Whether the kernel completes the checksums of frames.
    pub(crate) fn offloads_checksums(&self) -> bool {
        self.metadata
    }

    /// Binds a socket to the next queue of interface `index` and fills its fill ring. `flags` count for
    /// the first socket only; the others share its memory and with it its mode.
    pub(crate) fn bind(&mut self, index: u32, sizes: Sizes, flags: SocketAddrXdpFlags) -> io::Result<()> {
        let number = u32::from(sizes.number_of(self.queues()));
        let queue = if let Some(first) = self.queues.first() {
            let socket = new_socket()?;
            ring::make(socket.as_fd(), sizes.entries())?;
            let queue = Queue::over(socket, &sizes)?;
            let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, index, number);
            bind(&queue.socket, &SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: first.socket.as_fd() })?;
            queue
        } else {
            let queue = self.unbound.take().ok_or(io::ErrorKind::NotFound)?;
            let addr = SocketAddrXdp::new(with_chains(flags, &sizes), index, number);
            if let Err(errno) = bind(&queue.socket, &addr) {
                // The caller may try again.
                self.unbound = Some(queue);
                return Err(errno.into());
            }
            queue
        };
        self.interface = index;
        let number = self.queues.len() as u16;
        self.queues.push(queue);
        self.refill(number);
        Ok(())
    }

    /// Binds a socket to a queue that the interface has more than when it was opened. It gets some of the transmit chunks.
    ///
    /// # Errors
    /// `EAGAIN` while too few of them are free; those of the kernel, such as `EBUSY`.
    pub(crate) fn bind_added(&mut self, sizes: Sizes) -> io::Result<()> {
        let most = sizes.receive_per_queue as usize;
        // There are chunks already after an attempt that failed.
        if usize::from(self.queues() - self.first_queues) == self.added_groups.len() {
            let group = self.frames.add_queue(MIN_ADDED_CHUNKS, most).ok_or(io::ErrorKind::WouldBlock)?;
            self.added_groups.push(group);
        }
        self.bind(self.interface, sizes, SocketAddrXdpFlags::empty())
    }

    /// The group of receive chunks of a queue. The group for frames that are handed over follows those of the first queues.
    fn group(&self, queue: u16) -> u16 {
        match queue {
            queue if queue < self.first_queues => queue,
            HANDED_OVER => self.first_queues,
            REASSEMBLED => self.reassembly.unwrap_or(u16::MAX),
            queue => {
                let added = self.added_groups.get(usize::from(queue - self.first_queues));
                added.copied().unwrap_or(u16::MAX)
            }
        }
    }

    /// Copies a packet that arrived in fragments to chunks that no queue uses: some of the transmit chunks, from the first such packet
    /// on. `None` when they are too few.
    pub(crate) fn adopt_reassembled(&mut self, frame: &[u8]) -> Option<Arrived> {
        if self.reassembly.is_none() {
            self.reassembly = self.frames.add_queue(MAX_CHUNKS, 2 * MAX_CHUNKS);
        }
        self.adopt_to(self.reassembly?, frame)
    }

    /// The address of an empty chunk's bytes in the frame memory.
    fn blank(chunk: u32) -> u64 {
        u64::from(chunk) * CHUNK_BYTES as u64 + HEADROOM_BYTES as u64
    }

    pub(crate) fn queues(&self) -> u16 {
        self.queues.len() as u16
    }

    pub(crate) fn census(&self) -> FrameCensus {
        self.frames.census()
    }

    pub(crate) fn transmit_free(&self) -> usize {
        self.frames.transmit_free()
    }

    pub(crate) fn receive_free(&self, queue: u16) -> usize {
        self.frames.receive_free(self.group(queue))
    }

    /// Receive chunks of a queue that are not received.
    pub(crate) fn receive_available(&self, queue: u16) -> usize {
        let group = self.group(queue);
        self.frames.receive_total(group) - self.frames.receive_out(group)
    }

    /// The socket of a queue.
    pub(crate) fn socket(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        Some(self.queues.get(usize::from(queue))?.socket.as_fd())
    }

    /// Whether the kernel sleeps until it is kicked to transmit on the queue.
    pub(crate) fn transmit_sleeps(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|q| q.rings.transmit.sleeps())
    }

    /// Whether the kernel sleeps until it is woken after the fill ring was filled.
    pub(crate) fn fill_sleeps(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|q| q.rings.fill.sleeps())
    }

    /// Puts the queue's free chunks on its fill ring.
    pub(crate) fn refill(&mut self, queue: u16) {
        let group = self.group(queue);
        let Some(Queue { rings, .. }) = self.queues.get_mut(usize::from(queue)) else { return };
        // The kernel does not use these chunks, and we do not either from now on: they are `Fill`.
        while rings.fill.room(1) > 0
            && let Some(chunk) = self.frames.fill(group)
        {
            rings.fill.push(Self::blank(chunk));
        }
        rings.fill.publish();
    }

    /// Takes up to `max` received frames of a queue, and hands each to `take`.
    pub(crate) fn receive(&mut self, queue: u16, max: usize, mut take: impl FnMut(Arrived)) -> Taken {
        let mut taken = Taken::default();
        let Some(Queue { rings, partial, .. }) = self.queues.get_mut(usize::from(queue)) else {
            return taken;
        };
        while taken.frames < max {
            let want = (max - taken.frames).min(BATCH);
            let n = rings.receive.take(&mut self.scratch[..want]);
            for desc in &self.scratch[..n] {
                let bytes = (desc.len as usize).min(PREFETCHED_BYTES);
                self.memory.mapping.prefetch(desc.address as usize, bytes);
            }
            for desc in &self.scratch[..n] {
                let (chunk, start) = chunk_at(desc.address);
                let bytes = desc.len as usize;
                let inside = start + bytes <= CHUNK_BYTES;
                let ours = self.frames.received(chunk).is_ok();
                if ours && inside {
                    self.received[chunk as usize] = Extent { start: start as u32, len: desc.len };
                }
                partial.add(&mut self.chains, chunk, bytes, ours && inside);
                if ours && partial.malformed {
                    let recycled = self.frames.recycle(chunk);
                    debug_assert!(recycled.is_ok(), "it has just been received");
                }
                if desc.options & CONTINUED != 0 {
                    continue;
                }
                let Partial { head, chunks, bytes, malformed, .. } = std::mem::take(partial);
                if !malformed {
                    taken.frames += 1;
                    take(Arrived { head, chunks, bytes });
                    continue;
                }
                taken.malformed += 1;
                let kept = (chunks > 0).then(|| self.chains.truncate(head, 0));
                for chunk in kept.into_iter().flatten() {
                    let recycled = self.frames.recycle(chunk);
                    debug_assert!(recycled.is_ok(), "it was kept");
                }
            }
            if n < want {
                break;
            }
        }
        taken
    }

    /// Copies a frame that another owner has handed over to chunks that no queue uses. `None` when they are too few.
    pub(crate) fn adopt(&mut self, frame: &[u8]) -> Option<Arrived> {
        self.adopt_to(self.group(HANDED_OVER), frame)
    }

    fn adopt_to(&mut self, group: u16, frame: &[u8]) -> Option<Arrived> {
        if self.frames.receive_free(group) < chunks_of(frame.len()) {
            return None;
        }
        let mut arrived = Partial::default();
        for piece in frame.chunks(CHUNK_CAPACITY) {
            let chunk = self.frames.fill(group)?;
            let received = self.frames.received(chunk);
            debug_assert!(received.is_ok(), "it was free");
            let at = Self::blank(chunk) as usize;
            // SAFETY: the chunk is `Received`, so the kernel does not use it, and `&mut self` keeps every reference to it away;
            // the piece is not longer than a chunk's capacity, and all chunks lie inside the mapping.
            unsafe {
                let to = self.memory.mapping.start().add(at).as_ptr();
                std::ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len());
            }
            self.received[chunk as usize] = Extent { start: HEADROOM_BYTES as u32, len: piece.len() as u32 };
            arrived.add(&mut self.chains, chunk, piece.len(), true);
        }
        let Partial { head, chunks, bytes, .. } = arrived;
        (chunks > 0).then_some(Arrived { head, chunks, bytes })
    }

    /// The bytes of a received frame, chunk by chunk; nothing when it is not received.
    pub(crate) fn received(&self, head: u32) -> impl Iterator<Item = &[u8]> {
        let received = |chunk: &u32| self.frames.place(*chunk) == Some(Place::Received);
        let bytes = |chunk: u32| {
            let Extent { start, len } = self.received[chunk as usize];
            let at = chunk as usize * CHUNK_BYTES + start as usize;
            // SAFETY: the chunk is `Received`, so the kernel does not write it and we only read it (`&self`);
            // the extent was checked to lie inside the chunk when it came, and all chunks lie inside the mapping.
            unsafe { std::slice::from_raw_parts(self.memory.mapping.start().add(at).as_ptr(), len as usize) }
        };
        self.chains.iter(head).filter(received).map(bytes)
    }

    /// Received -> free, to be filled again, for all chunks of a frame.
    pub(crate) fn recycle(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let recycled = self.frames.recycle(chunk);
            debug_assert!(recycled.is_ok(), "chunk {chunk} is not received");
        }
    }

    /// A transmit frame of `chunks` chunks, named by its first chunk.
    pub(crate) fn alloc(&mut self, chunks: usize) -> Option<u32> {
        if self.frames.transmit_free() < chunks {
            return None;
        }
        let head = self.frames.alloc()?;
        self.chains.begin(head);
        let mut last = head;
        for _ in 1..chunks {
            let chunk = self.frames.alloc()?;
            self.chains.append(head, last, chunk);
            last = chunk;
        }
        Some(head)
    }

    /// Whether the kernel reads no chunk of the frame, which has some.
    fn is_retained(&self, head: u32) -> bool {
        let mut places = self.chains.iter(head).map(|chunk| self.frames.place(chunk));
        self.chains.len(head) > 0 && places.all(|place| place == Some(Place::Retained))
    }

    /// Appends the memory of a frame that is retained to `chunks`, chunk by chunk. Returns false, and appends nothing,
    /// while the kernel may read it.
    pub(crate) fn retained_into<'a>(&'a mut self, head: u32, chunks: &mut ChunksMut<'a>) -> bool {
        if !self.is_retained(head) {
            return false;
        }
        for chunk in self.chains.iter(head) {
            let at = Self::blank(chunk) as usize;
            // SAFETY: the chunk is `Retained`, so the kernel does not use it, and `&mut self` keeps every other
            // reference to it away. The other slices are of other chunks of the chain, and all chunks lie inside the
            // mapping, which `self` keeps.
            chunks.push(unsafe {
                std::slice::from_raw_parts_mut(self.memory.mapping.start().add(at).as_ptr(), CHUNK_CAPACITY)
            });
        }
        true
    }

    /// Puts the first `len` bytes of a retained frame on the queue's transmit ring, and frees the chunks behind
    /// them. Returns the number of chunks that the frame has now. `None` when the ring has no room for all of
    /// them or the frame is still being sent; nothing has changed then. The kernel completes the checksum of the TCP header
    /// that begins at byte `left_checksum`, if it [does that](Self::offloads_checksums).
    ///
    /// The queue must be one that can transmit: the kernel does not check.
    pub(crate) fn submit(
        &mut self,
        queue: u16,
        head: u32,
        len: usize,
        left_checksum: Option<NonZeroU16>,
    ) -> Option<u16> {
        let count = chunks_of(len);
        if count > self.chains.len(head).min(BATCH) || !self.is_retained(head) {
            return None;
        }
        let transmit = &mut self.queues.get_mut(usize::from(queue))?.rings.transmit;
        if (transmit.room(count as u32) as usize) < count {
            return None;
        }
        for chunk in self.chains.truncate(head, count) {
            let released = self.frames.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} is retained");
        }
        let mut first = 0;
        if let Some(header) = left_checksum.filter(|_| self.metadata) {
            let metadata = TransmitMetadata::complete_tcp_checksum(header.get());
            let at = Self::blank(head) as usize - TransmitMetadata::BYTES;
            // SAFETY: the chunk is `Retained`, so the kernel does not use it, and `&mut self` keeps every reference to it away.
            // The headroom is inside the chunk and has room for the metadata, and its end is aligned like the chunk.
            unsafe { self.memory.mapping.start().add(at).cast().write(metadata) };
            first = TransmitMetadata::PRESENT;
        }
        // From now on the chunks are `Sending`, so we do not write them.
        for (at, chunk) in self.chains.iter(head).enumerate() {
            let sending = self.frames.sending(chunk);
            debug_assert!(sending.is_ok(), "chunk {chunk} is retained");
            let options = std::mem::take(&mut first) | if at + 1 < count { CONTINUED } else { 0 };
            let len = (len - at * CHUNK_CAPACITY).min(CHUNK_CAPACITY) as u32;
            transmit.push(Descriptor { address: Self::blank(chunk), len, options });
        }
        transmit.publish();
        Some(count as u16)
    }

    /// Takes back the token of a frame.
    pub(crate) fn release(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let released = self.frames.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} has no token");
        }
    }

    /// Takes the chunks that the kernel has sent; returns how many.
    pub(crate) fn complete(&mut self, queue: u16) -> usize {
        let Some(Queue { rings, .. }) = self.queues.get_mut(usize::from(queue)) else { return 0 };
        let mut completed = 0;
        loop {
            let n = rings.completion.take(&mut self.completed);
            for address in &self.completed[..n] {
                let sent = self.frames.sent(chunk_at(*address).0);
                debug_assert!(sent.is_ok(), "the kernel completed a chunk that was not being sent");
            }
            completed += n;
            if n < BATCH {
                return completed;
            }
        }
    }

    /// Transmit descriptors that the kernel has not taken yet.
    pub(crate) fn transmit_pending(&mut self, queue: u16) -> u32 {
        self.queues.get_mut(usize::from(queue)).map_or(0, |q| q.rings.transmit.pending())
    }
}
