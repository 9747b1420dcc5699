//! The only unsafe code of this crate: the memory that we share with the kernel, its rings, and one ioctl. The
//! module's interface is safe.
//!
//! The argument for all blocks below: a chunk's memory is touched by us only while its [`Place`] is
//! `Received` or `Retained`, and by the kernel only while it is `Fill`, `Sending` or `Released`. The
//! places are private to [`Rings`], change only together with the ring operation that hands a chunk
//! over or takes it back, and are checked in release builds too. A reference into a chunk borrows
//! [`Rings`], so no hand-over can happen while it lives. The chunks of a frame are all different: a chunk joins a
//! chain only when it has just left the free stack or the receive ring.
#![expect(unsafe_code, reason = "the one place for it; see the module's argument")]

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd};

use xsk_rs::config::{BindFlags, FrameSize, Interface, LibxdpFlags, QueueSize, SocketConfig, UmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

use xwarp_tcp::link::{ChunksMut, Pieces};

use crate::chains::Chains;
use crate::frames::{FrameCensus, FrameTable, Place};

/// Bytes of one chunk: the largest that the kernel allows, and one page.
pub(crate) const CHUNK_BYTES: usize = 4096;

/// Bytes at the start of each received chunk that the kernel reserves for XDP programs; xsk-rs reserves them for
/// transmission too.
const HEADROOM_BYTES: usize = 256;

/// Most bytes of a frame in one chunk.
pub(crate) const CHUNK_CAPACITY: usize = CHUNK_BYTES - HEADROOM_BYTES;

/// Most chunks of a frame: one and the fragments of the kernel's socket buffers (`MAX_SKB_FRAGS`), of which there are 17
/// unless the kernel was built for more.
pub(crate) const MOST_CHUNKS: usize = 18;

/// Option of a descriptor that is not the last of its frame (`XDP_PKT_CONTD` of `linux/if_xdp.h`).
const CONTINUED: u32 = 1 << 0;

/// Descriptors moved by one ring operation.
const BATCH: usize = 64;

/// Frame memory, the frame table, and the rings of every queue.
pub(crate) struct Rings {
    // Queues are dropped before the memory that the kernel accesses for them.
    queues: Vec<Queue>,
    frames: FrameTable,
    chains: Chains,
    /// By chunk: the descriptor of the received bytes.
    received: Vec<FrameDesc>,
    /// By chunk: the descriptor of the empty chunk.
    blank: Vec<FrameDesc>,
    scratch: [FrameDesc; BATCH],
    umem: Umem,
}

impl std::fmt::Debug for Rings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rings")
            .field("queues", &self.queues.len())
            .field("census", &self.frames.census())
            .finish_non_exhaustive()
    }
}

/// The rings of one queue.
struct Queue {
    tx: TxQueue,
    rx: RxQueue,
    fill: FillQueue,
    completion: CompQueue,
    /// The frame whose last chunk has not come yet.
    partial: Partial,
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

/// Sizes of memory and rings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Receive queues; each gets a socket.
    pub queues: u16,
    /// Transmit queues: the first ones of the receive queues.
    pub transmit_queues: u16,
    pub receive_per_queue: u32,
    pub transmit: u32,
    /// A power of two.
    pub transmit_ring: u32,
    /// Frames may have several chunks.
    pub multi_buffer: bool,
}

impl Sizes {
    pub(crate) const fn chunks(&self) -> u32 {
        self.queues as u32 * self.receive_per_queue + self.transmit
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.chunks() as u64 * CHUNK_BYTES as u64
    }

    /// Most chunks of a frame, of which rings and memory of each direction hold at least four.
    pub(crate) fn frame_chunks(&self) -> usize {
        let least = self.receive_per_queue.min(self.transmit).min(self.transmit_ring) / 4;
        if self.multi_buffer { MOST_CHUNKS.min(least as usize).max(1) } else { 1 }
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// The errno behind an error of xsk-rs, whose own text hides it.
fn cause(error: &dyn std::error::Error) -> io::Error {
    let errno = error.source().and_then(|s| s.downcast_ref::<io::Error>()).and_then(io::Error::raw_os_error);
    errno.map_or_else(|| io::Error::other(error.to_string()), io::Error::from_raw_os_error)
}

/// Chunks of a frame of `len` bytes.
pub(crate) const fn chunks_of(len: usize) -> usize {
    if len == 0 { 1 } else { len.div_ceil(CHUNK_CAPACITY) }
}

impl Partial {
    /// Appends `chunk`, whose descriptor is `right` or not.
    fn add(&mut self, chains: &mut Chains, chunk: u32, bytes: usize, right: bool) {
        self.malformed |= !right || usize::from(self.chunks) >= MOST_CHUNKS;
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

impl Rings {
    /// Allocates and registers the frame memory; no queue is bound yet.
    pub(crate) fn new(sizes: Sizes) -> io::Result<Self> {
        let ring = |n: u32| QueueSize::new(n).map_err(invalid);
        let config = UmemConfig::builder()
            .frame_size(FrameSize::new(CHUNK_BYTES as u32).map_err(invalid)?)
            .fill_queue_size(ring(sizes.receive_per_queue.next_power_of_two())?)
            .comp_queue_size(ring(sizes.transmit_ring)?)
            .build()
            .map_err(invalid)?;
        let chunks = NonZeroU32::new(sizes.chunks()).ok_or(io::ErrorKind::InvalidInput)?;
        let (umem, blank) = Umem::new(config, chunks, false).map_err(|error| cause(&error))?;
        Ok(Self {
            queues: Vec::new(),
            frames: FrameTable::new(sizes.queues, sizes.receive_per_queue, sizes.transmit),
            chains: Chains::new(sizes.chunks()),
            received: blank.clone(),
            blank,
            scratch: [FrameDesc::default(); BATCH],
            umem,
        })
    }

    /// Binds a socket to the next queue of interface `name` and fills its fill ring. `flags` count for
    /// the first socket only; the others share its memory and with it its mode.
    pub(crate) fn bind(&mut self, name: &str, sizes: Sizes, flags: BindFlags) -> io::Result<()> {
        let ring = |n: u32| QueueSize::new(n).map_err(invalid);
        let name: Interface = name.parse().map_err(invalid)?;
        let mut config = SocketConfig::builder();
        config
            .rx_queue_size(ring(sizes.receive_per_queue.next_power_of_two())?)
            .tx_queue_size(ring(sizes.transmit_ring)?)
            .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
            .bind_flags(if sizes.multi_buffer { flags | BindFlags::XDP_USE_SG } else { flags });
        let queue = self.queues.len() as u16;
        // SAFETY: no socket of this UMEM is bound to this queue (each call binds the next one), and the
        // flag that the contract asks for is set anyway.
        let bound = unsafe { Socket::new(config.build(), &self.umem, &name, u32::from(queue)) };
        let (tx, rx, rings) = bound.map_err(|error| cause(&error))?;
        let (fill, completion) =
            rings.ok_or_else(|| io::Error::other("the queue came without fill and completion rings"))?;
        self.queues.push(Queue { tx, rx, fill, completion, partial: Partial::default() });
        self.refill(queue);
        Ok(())
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
        self.frames.receive_free(queue)
    }

    pub(crate) fn receive_out(&self, queue: u16) -> usize {
        self.frames.receive_out(queue)
    }

    /// The socket of a queue.
    pub(crate) fn socket(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        let fd = self.queues.get(usize::from(queue))?.rx.fd().as_raw_fd();
        // SAFETY: the queue owns the open socket, and the result borrows `self`, which owns the queue.
        Some(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether the kernel sleeps until it is kicked to transmit on the queue.
    pub(crate) fn transmit_sleeps(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|q| q.tx.needs_wakeup())
    }

    /// Whether the kernel sleeps until it is woken after the fill ring was filled.
    pub(crate) fn fill_sleeps(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_some_and(|q| q.fill.needs_wakeup())
    }

    /// Puts the queue's free chunks on its fill ring.
    pub(crate) fn refill(&mut self, queue: u16) {
        let Some(rings) = self.queues.get_mut(usize::from(queue)) else { return };
        loop {
            let room = (rings.fill.nb_free(BATCH as u32) as usize).min(BATCH);
            let mut n = 0;
            while n < room
                && let Some(chunk) = self.frames.fill(queue)
            {
                self.scratch[n] = self.blank[chunk as usize];
                n += 1;
            }
            // SAFETY: these chunks are of this UMEM and have just become `Fill`, so nobody else uses them;
            // the ring has room for all of them, so none stays behind.
            let filled = unsafe { rings.fill.produce(&self.scratch[..n]) };
            debug_assert_eq!(filled, n, "the fill ring had room");
            if n < BATCH {
                return;
            }
        }
    }

    /// Takes up to `max` received frames of a queue, and hands each to `take`.
    pub(crate) fn receive(&mut self, queue: u16, max: usize, mut take: impl FnMut(Arrived)) -> Taken {
        let mut taken = Taken::default();
        let Some(rings) = self.queues.get_mut(usize::from(queue)) else { return taken };
        while taken.frames < max {
            let want = (max - taken.frames).min(BATCH);
            // SAFETY: the descriptors are plain values that the call overwrites; what they name is checked below.
            let n = unsafe { rings.rx.consume(&mut self.scratch[..want]) };
            for desc in &self.scratch[..n] {
                let (chunk, start) = ((desc.addr() / CHUNK_BYTES) as u32, desc.addr() % CHUNK_BYTES);
                let bytes = desc.lengths().data();
                let ours = self.frames.received(chunk).is_ok();
                if ours {
                    self.received[chunk as usize] = *desc;
                }
                rings.partial.add(&mut self.chains, chunk, bytes, ours && start + bytes <= CHUNK_BYTES);
                if ours && rings.partial.malformed {
                    let recycled = self.frames.recycle(chunk);
                    debug_assert!(recycled.is_ok(), "it has just been received");
                }
                if desc.has_more_frames() {
                    continue;
                }
                let Partial { head, chunks, bytes, malformed, .. } = std::mem::take(&mut rings.partial);
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

    /// The bytes of a received frame, chunk by chunk; nothing when it is not received.
    pub(crate) fn received(&self, head: u32) -> Pieces<'_> {
        let received = |chunk: &u32| self.frames.place(*chunk) == Some(Place::Received);
        let bytes = |chunk: u32| {
            // SAFETY: the chunk is `Received`, so the kernel does not write it and we only read it (`&self`);
            // the descriptor was checked to lie inside the chunk when it came.
            unsafe { self.umem.data(&self.received[chunk as usize]) }.contents()
        };
        self.chains.iter(head).filter(received).map(bytes).collect()
    }

    /// Received -> free, to be filled again, for all chunks of a frame.
    pub(crate) fn recycle(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let recycled = self.frames.recycle(chunk);
            debug_assert!(recycled.is_ok(), "chunk {chunk} is not received");
        }
    }

    /// A frame of so many chunks to send from, named by its first chunk.
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

    /// The memory of a frame that is retained, chunk by chunk; `None` while the kernel may read it.
    pub(crate) fn retained(&mut self, head: u32) -> Option<ChunksMut<'_>> {
        if !self.is_retained(head) {
            return None;
        }
        let mut chunks = ChunksMut::new();
        for chunk in self.chains.iter(head) {
            let mut desc = self.blank[chunk as usize];
            // SAFETY: the chunk is `Retained`, so the kernel does not use it, and `&mut self` keeps every other
            // reference to it away.
            let mut data = unsafe { self.umem.data_mut(&mut desc) };
            data.cursor().set_pos(CHUNK_CAPACITY);
            let memory = data.contents_mut();
            let (start, len) = (memory.as_mut_ptr(), memory.len());
            // SAFETY: the same memory as just above, in the region that `self.umem` keeps mapped; only the
            // borrow is made longer, from the local descriptor to `&mut self`. The other slices are of other
            // chunks of the chain.
            chunks.push(unsafe { std::slice::from_raw_parts_mut(start, len) });
        }
        Some(chunks)
    }

    /// Puts the first `len` bytes of a retained frame on the queue's transmit ring, and frees the chunks behind
    /// them. Returns the number of chunks that the frame has now. `None` when the ring has no room for all of
    /// them or the frame is still being sent; nothing has changed then.
    ///
    /// The queue must be one that can transmit: the kernel does not check.
    pub(crate) fn submit(&mut self, queue: u16, head: u32, len: usize) -> Option<u16> {
        let count = chunks_of(len);
        if count > self.chains.len(head).min(BATCH) || !self.is_retained(head) {
            return None;
        }
        let rings = self.queues.get_mut(usize::from(queue))?;
        if (rings.tx.nb_free(count as u32) as usize) < count {
            return None;
        }
        for chunk in self.chains.truncate(head, count) {
            let released = self.frames.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} is retained");
        }
        for (at, (desc, chunk)) in self.scratch.iter_mut().zip(self.chains.iter(head)).enumerate() {
            let sending = self.frames.sending(chunk);
            debug_assert!(sending.is_ok(), "chunk {chunk} is retained");
            let bytes = (len - at * CHUNK_CAPACITY).min(CHUNK_CAPACITY);
            *desc = self.blank[chunk as usize];
            // SAFETY: the chunk was `Retained` a moment ago and the kernel does not know of it yet; the memory
            // is not touched, only the descriptor's length is written.
            unsafe { self.umem.data_mut(desc) }.cursor().set_pos(bytes);
            desc.set_options(if at + 1 < count { CONTINUED } else { 0 });
        }
        // SAFETY: the chunks are of this UMEM and are `Sending` from now on, so nobody writes them; the ring has
        // room for all of them, so none stays behind.
        let produced = unsafe { rings.tx.produce(&self.scratch[..count]) };
        debug_assert_eq!(produced, count, "the transmit ring had room");
        Some(count as u16)
    }

    /// The token of a frame is given back.
    pub(crate) fn release(&mut self, head: u32) {
        for chunk in self.chains.truncate(head, 0) {
            let released = self.frames.release(chunk);
            debug_assert!(released.is_ok(), "chunk {chunk} has no token");
        }
    }

    /// Takes the chunks that the kernel has sent; returns how many.
    pub(crate) fn complete(&mut self, queue: u16) -> usize {
        let Some(rings) = self.queues.get_mut(usize::from(queue)) else { return 0 };
        let mut completed = 0;
        loop {
            // SAFETY: the descriptors are plain values that the call overwrites; their chunks are checked below.
            let n = unsafe { rings.completion.consume(&mut self.scratch) };
            for desc in &self.scratch[..n] {
                let sent = self.frames.sent((desc.addr() / CHUNK_BYTES) as u32);
                debug_assert!(sent.is_ok(), "the kernel completed a chunk that was not being sent");
            }
            completed += n;
            if n < BATCH {
                return completed;
            }
        }
    }

    /// Transmit descriptors that the kernel has not taken yet.
    pub(crate) fn transmit_pending(&mut self, queue: u16, ring: u32) -> u32 {
        self.queues.get_mut(usize::from(queue)).map_or(0, |q| ring.saturating_sub(q.tx.nb_free_exact()))
    }
}

/// `struct ethtool_channels` of `linux/ethtool.h`.
#[repr(C)]
#[derive(Default)]
struct EthtoolChannels {
    cmd: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx_count: u32,
    tx_count: u32,
    other_count: u32,
    combined_count: u32,
}

/// `struct ethtool_value` of `linux/ethtool.h`.
#[repr(C)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GGRO: u32 = 0x2b;
const ETH_FLAG_LRO: u32 = 1 << 15;
const ETH_FLAG_RXVLAN: u32 = 1 << 8;

/// Receive and transmit queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueCounts {
    pub receive: u32,
    pub transmit: u32,
}

/// The queues of an interface that are in use now (not the most there could be), as its driver tells;
/// `None` when it does not.
pub(crate) fn active_queues(any_socket: BorrowedFd<'_>, name: &str) -> Option<QueueCounts> {
    let mut channels = EthtoolChannels { cmd: ETHTOOL_GCHANNELS, ..Default::default() };
    // SAFETY: ETHTOOL_GCHANNELS writes one `ethtool_channels`, which `channels` is laid out as.
    unsafe { ethtool(any_socket, name, (&raw mut channels).cast()) }.then(|| QueueCounts {
        receive: channels.rx_count + channels.combined_count,
        transmit: channels.tx_count + channels.combined_count,
    })
}

/// Whether the interface takes VLAN tags off received frames before XDP sees them.
pub(crate) fn strips_vlan_tags(any_socket: BorrowedFd<'_>, name: &str) -> bool {
    ethtool_value(any_socket, name, ETHTOOL_GFLAGS) & ETH_FLAG_RXVLAN != 0
}

/// Whether received segments are joined by the kernel (GRO), or by the device (LRO).
pub(crate) fn joins_segments(any_socket: BorrowedFd<'_>, name: &str) -> (bool, bool) {
    let flags = ethtool_value(any_socket, name, ETHTOOL_GFLAGS);
    (ethtool_value(any_socket, name, ETHTOOL_GGRO) != 0, flags & ETH_FLAG_LRO != 0)
}

/// The answer to a request that reads one number; 0 when the driver does not tell.
fn ethtool_value(any_socket: BorrowedFd<'_>, name: &str, cmd: u32) -> u32 {
    let mut value = EthtoolValue { cmd, data: 0 };
    // SAFETY: the requests that are passed here write one `ethtool_value`, which `value` is laid out as.
    let told = unsafe { ethtool(any_socket, name, (&raw mut value).cast()) };
    if told { value.data } else { 0 }
}

/// One SIOCETHTOOL request about interface `name`; whether it succeeded.
///
/// # Safety
/// `command` points to the structure that belongs to the command in its first field, writable.
unsafe fn ethtool(any_socket: BorrowedFd<'_>, name: &str, command: *mut libc::c_char) -> bool {
    // SAFETY: `ifreq` is plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays zero: the kernel reads a C string.
    if name.len() >= request.ifr_name.len() {
        return false;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = command;
    // SAFETY: SIOCETHTOOL reads the name and does to the structure what the caller vouches for; both live
    // longer than the call.
    unsafe { libc::ioctl(any_socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) == 0 }
}
