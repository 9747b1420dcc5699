//! The only unsafe code of this crate: the memory that we share with the kernel, its rings, and one ioctl. The
//! module's interface is safe.
//!
//! The argument for all blocks below: a chunk's memory is touched by us only while its [`Place`] is
//! `Received` or `Retained`, and by the kernel only while it is `Fill`, `Sending` or `Released`. The
//! places are private to [`Rings`], change only together with the ring operation that hands a chunk
//! over or takes it back, and are checked in release builds too. A reference into a chunk borrows
//! [`Rings`], so no hand-over can happen while it lives.
#![expect(unsafe_code, reason = "the one place for it; see the module's argument")]

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd};

use xsk_rs::config::{BindFlags, FrameSize, Interface, LibxdpFlags, QueueSize, SocketConfig, UmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

use crate::frames::{FrameCensus, FrameTable, Place};

/// Bytes of one chunk: the largest that the kernel allows, and one page.
pub(crate) const CHUNK_BYTES: usize = 4096;

/// Bytes at the start of each received chunk that the kernel reserves for XDP programs; xsk-rs reserves them for
/// transmission too.
const HEADROOM_BYTES: usize = 256;

/// Largest frame in one chunk, in bytes.
pub(crate) const CHUNK_CAPACITY: usize = CHUNK_BYTES - HEADROOM_BYTES;

/// Descriptors moved by one ring operation.
const BATCH: usize = 64;

/// Frame memory, the frame table, and the rings of every queue.
pub(crate) struct Rings {
    // Queues are dropped before the memory that the kernel accesses for them.
    queues: Vec<Queue>,
    frames: FrameTable,
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
}

/// A received frame that lies in one chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    pub chunk: u32,
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
}

impl Sizes {
    pub(crate) const fn chunks(&self) -> u32 {
        self.queues as u32 * self.receive_per_queue + self.transmit
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.chunks() as u64 * CHUNK_BYTES as u64
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
            .bind_flags(flags);
        let queue = self.queues.len() as u16;
        // SAFETY: no socket of this UMEM is bound to this queue (each call binds the next one), and the
        // flag that the contract asks for is set anyway.
        let bound = unsafe { Socket::new(config.build(), &self.umem, &name, u32::from(queue)) };
        let (tx, rx, rings) = bound.map_err(|error| cause(&error))?;
        let (fill, completion) =
            rings.ok_or_else(|| io::Error::other("the queue came without fill and completion rings"))?;
        self.queues.push(Queue { tx, rx, fill, completion });
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
                let whole = start + bytes <= CHUNK_BYTES && !desc.has_more_frames();
                match self.frames.received(chunk) {
                    Ok(()) if whole => {
                        self.received[chunk as usize] = *desc;
                        take(Arrived { chunk, bytes: bytes as u32 });
                        taken.frames += 1;
                    }
                    Ok(()) => {
                        let recycled = self.frames.recycle(chunk);
                        debug_assert!(recycled.is_ok(), "it has just been received");
                        taken.malformed += 1;
                    }
                    Err(_) => taken.malformed += 1,
                }
            }
            if n < want {
                break;
            }
        }
        taken
    }

    /// The bytes of a received chunk; nothing when it is not received.
    pub(crate) fn received(&self, chunk: u32) -> &[u8] {
        if self.frames.place(chunk) != Some(Place::Received) {
            return &[];
        }
        // SAFETY: the chunk is `Received`, so the kernel does not write it and we only read it (`&self`);
        // the descriptor was checked to lie inside the chunk when it came.
        unsafe { self.umem.data(&self.received[chunk as usize]) }.contents()
    }

    /// Received -> free, to be filled again.
    pub(crate) fn recycle(&mut self, chunk: u32) {
        let recycled = self.frames.recycle(chunk);
        debug_assert!(recycled.is_ok(), "chunk {chunk} is not received");
    }

    /// A chunk to send from.
    pub(crate) fn alloc(&mut self) -> Option<u32> {
        self.frames.alloc()
    }

    /// The memory of a chunk that is retained; `None` while the kernel may read it.
    pub(crate) fn retained(&mut self, chunk: u32) -> Option<&mut [u8]> {
        if self.frames.place(chunk) != Some(Place::Retained) {
            return None;
        }
        let mut desc = self.blank[chunk as usize];
        // SAFETY: the chunk is `Retained`, so the kernel does not use it, and `&mut self` keeps every other
        // reference to it away.
        let mut data = unsafe { self.umem.data_mut(&mut desc) };
        data.cursor().set_pos(CHUNK_CAPACITY);
        let memory = data.contents_mut();
        let (start, len) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the same memory as just above, in the region that `self.umem` keeps mapped; only the
        // borrow is made longer, from the local descriptor to `&mut self`.
        Some(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    /// Puts the first `len` bytes of a retained chunk on the queue's transmit ring. False when the ring
    /// is full or the chunk is still being sent; nothing has changed then.
    ///
    /// The queue must be one that can transmit: the kernel does not check.
    pub(crate) fn submit(&mut self, queue: u16, chunk: u32, len: usize) -> bool {
        let Some(rings) = self.queues.get_mut(usize::from(queue)) else { return false };
        if len > CHUNK_CAPACITY || rings.tx.nb_free(1) == 0 || self.frames.sending(chunk).is_err() {
            return false;
        }
        let mut desc = self.blank[chunk as usize];
        // SAFETY: the chunk was `Retained` a moment ago and the kernel does not know of it yet; the memory
        // is not touched, only the descriptor's length is written.
        unsafe { self.umem.data_mut(&mut desc) }.cursor().set_pos(len);
        // SAFETY: the chunk is of this UMEM and is `Sending` from now on, so nobody writes it.
        let produced = unsafe { rings.tx.produce_one(&desc) };
        debug_assert_eq!(produced, 1, "the transmit ring had room");
        true
    }

    /// The token of a chunk is given back.
    pub(crate) fn release(&mut self, chunk: u32) {
        let released = self.frames.release(chunk);
        debug_assert!(released.is_ok(), "chunk {chunk} has no token");
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
#[derive(Default)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_GFLAGS: u32 = 0x25;
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
    let mut flags = EthtoolValue { cmd: ETHTOOL_GFLAGS, ..Default::default() };
    // SAFETY: ETHTOOL_GFLAGS writes one `ethtool_value`, which `flags` is laid out as.
    let told = unsafe { ethtool(any_socket, name, (&raw mut flags).cast()) };
    told && flags.data & ETH_FLAG_RXVLAN != 0
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
