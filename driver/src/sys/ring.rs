//! The four rings of an AF_XDP socket. Each ring is memory that the kernel shares with us: two positions, a flag, and the
//! descriptors, whose number is a power of two. One side produces and the other consumes; a position is written by its
//! side only, and its release makes the descriptors before it visible to the other side.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::sockopt;
use rustix::net::xdp::XdpRingOffset;

use super::memory::Mapping;

/// Offsets by which `mmap` of a socket selects a ring (`XDP_PGOFF_*` and `XDP_UMEM_PGOFF_*` of `linux/if_xdp.h`).
const RECEIVE: u64 = 0;
const TRANSMIT: u64 = 0x8000_0000;
const FILL: u64 = 0x1_0000_0000;
const COMPLETION: u64 = 0x1_8000_0000;

/// The kernel sleeps until it is called (`XDP_RING_NEED_WAKEUP`).
const NEED_WAKEUP: u32 = 1;

/// A descriptor of the receive and transmit rings: `struct xdp_desc` of `linux/if_xdp.h`. Those of the other two rings are
/// bare addresses, of type `u64`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Descriptor {
    /// Offset in the frame memory.
    pub address: u64,
    pub len: u32,
    pub options: u32,
}

/// A mapped ring of descriptors `D`.
#[derive(Debug)]
struct Ring<D> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: NonNull<AtomicU32>,
    descriptors: NonNull<D>,
    entries: u32,
    /// Our position, and the other side's as it was last read. They count descriptors and wrap.
    ours: u32,
    theirs: u32,
    _mapping: Mapping,
}

// SAFETY: the mapping belongs to the process, and only the owner of the ring accesses our side of it.
unsafe impl<D: Send> Send for Ring<D> {}

impl<D: Copy> Ring<D> {
    /// Maps the ring at `selector` of the socket.
    ///
    /// # Safety
    /// `D` is the type of this ring's descriptors, any bytes are a value of it, and no other code uses our side of the
    /// ring.
    unsafe fn map(
        socket: BorrowedFd<'_>,
        selector: u64,
        at: XdpRingOffset,
        entries: u32,
    ) -> io::Result<Self> {
        let flags = at.flags.ok_or(io::ErrorKind::Unsupported)?;
        let len = usize::try_from(at.desc).map_err(io::Error::other)? + entries as usize * size_of::<D>();
        // The kernel refuses a length beyond the ring's.
        let mapping = Mapping::new(socket, selector, len)?;
        let inside = |offset: u64, bytes: usize| {
            let offset = usize::try_from(offset).ok()?;
            let right = offset.is_multiple_of(align_of::<u64>().min(bytes)) && offset + bytes <= len;
            // SAFETY: the offset is inside the mapping.
            right.then(|| unsafe { mapping.start().add(offset) })
        };
        let position = |offset| inside(offset, size_of::<AtomicU32>()).map(NonNull::cast::<AtomicU32>);
        let (producer, consumer, flags) = (position(at.producer), position(at.consumer), position(flags));
        let descriptors = inside(at.desc, size_of::<u64>()).map(NonNull::cast::<D>);
        let (Some(producer), Some(consumer), Some(flags), Some(descriptors)) =
            (producer, consumer, flags, descriptors)
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        Ok(Self { producer, consumer, flags, descriptors, entries, ours: 0, theirs: 0, _mapping: mapping })
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping, aligned, and accessed by both sides as an atomic word only.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as the producer's position.
        unsafe { self.consumer.as_ref() }
    }

    fn sleeps(&self) -> bool {
        // SAFETY: as the producer's position.
        unsafe { self.flags.as_ref() }.load(Ordering::Relaxed) & NEED_WAKEUP != 0
    }

    /// The descriptor at a position.
    fn at(&self, position: u32) -> NonNull<D> {
        // SAFETY: the remainder is below the number of entries, all of which are inside the mapping.
        unsafe { self.descriptors.add((position & (self.entries - 1)) as usize) }
    }
}

/// A ring that we fill and the kernel drains.
#[derive(Debug)]
pub(super) struct Producer<D>(Ring<D>);

impl<D: Copy> Producer<D> {
    /// Free entries; the kernel's position is read only when fewer than `want` are known.
    pub(super) fn room(&mut self, want: u32) -> u32 {
        let ring = &mut self.0;
        let known = ring.entries.saturating_sub(ring.ours.wrapping_sub(ring.theirs));
        if known >= want {
            return known;
        }
        ring.theirs = ring.consumer().load(Ordering::Acquire);
        ring.entries.saturating_sub(ring.ours.wrapping_sub(ring.theirs))
    }

    /// Entries that the kernel has not taken yet.
    pub(super) fn pending(&mut self) -> u32 {
        self.0.entries - self.room(self.0.entries)
    }

    /// Appends a descriptor. Call it at most as often as there is [room](Self::room), and [`publish`](Self::publish) then.
    pub(super) fn push(&mut self, descriptor: D) {
        let ring = &mut self.0;
        // SAFETY: the entry is inside the mapping; the kernel reads it only after its position was published.
        unsafe { ring.at(ring.ours).write(descriptor) };
        ring.ours = ring.ours.wrapping_add(1);
    }

    /// Hands the appended descriptors to the kernel.
    pub(super) fn publish(&mut self) {
        self.0.producer().store(self.0.ours, Ordering::Release);
    }

    /// Whether the kernel sleeps until it is called.
    pub(super) fn sleeps(&self) -> bool {
        self.0.sleeps()
    }
}

/// A ring that the kernel fills and we drain.
#[derive(Debug)]
pub(super) struct Consumer<D>(Ring<D>);

impl<D: Copy> Consumer<D> {
    /// Moves descriptors to the front of `to`; returns how many.
    pub(super) fn take(&mut self, to: &mut [D]) -> usize {
        let ring = &mut self.0;
        let wanted = to.len() as u32;
        let mut there = ring.theirs.wrapping_sub(ring.ours);
        if there < wanted {
            ring.theirs = ring.producer().load(Ordering::Acquire);
            there = ring.theirs.wrapping_sub(ring.ours);
        }
        // The count exceeds the ring's entries only if its memory was corrupted.
        let count = there.min(wanted).min(ring.entries) as usize;
        if count == 0 {
            return 0;
        }
        for to in to.iter_mut().take(count) {
            // SAFETY: the entry is inside the mapping, and the kernel does not write it before we release our position.
            *to = unsafe { ring.at(ring.ours).read() };
            ring.ours = ring.ours.wrapping_add(1);
        }
        ring.consumer().store(ring.ours, Ordering::Release);
        count
    }
}

/// Entries of the rings, each a power of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entries {
    /// Of the receive and fill rings.
    pub receive: u32,
    /// Of the transmit and completion rings.
    pub transmit: u32,
}

/// Sets the number of entries of the four rings of a socket that is not bound yet.
pub(super) fn make(socket: BorrowedFd<'_>, entries: Entries) -> io::Result<()> {
    sockopt::set_xdp_umem_fill_ring_size(socket, entries.receive)?;
    sockopt::set_xdp_umem_completion_ring_size(socket, entries.transmit)?;
    sockopt::set_xdp_rx_ring_size(socket, entries.receive)?;
    sockopt::set_xdp_tx_ring_size(socket, entries.transmit)?;
    Ok(())
}

/// The rings of one socket.
#[derive(Debug)]
pub(super) struct SocketRings {
    pub receive: Consumer<Descriptor>,
    pub transmit: Producer<Descriptor>,
    pub fill: Producer<u64>,
    pub completion: Consumer<u64>,
}

impl SocketRings {
    /// Maps the rings of a socket, which have `entries`. No other code may use them. Older kernels (6.1) refuse this
    /// with `EBUSY` once the socket is bound, so the creator of a socket maps its rings first.
    pub(super) fn map(socket: BorrowedFd<'_>, entries: Entries) -> io::Result<Self> {
        if !entries.receive.is_power_of_two() || !entries.transmit.is_power_of_two() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = sockopt::xdp_mmap_offsets(socket)?;
        let Entries { receive, transmit } = entries;
        // SAFETY: each ring has the type of its descriptors in `linux/if_xdp.h`, all of plain integers. The rings of
        // a socket are mapped once: by the caller who has just registered memory to it.
        unsafe {
            Ok(Self {
                receive: Consumer(Ring::map(socket, RECEIVE, at.rx, receive)?),
                transmit: Producer(Ring::map(socket, TRANSMIT, at.tx, transmit)?),
                fill: Producer(Ring::map(socket, FILL, at.fr, receive)?),
                completion: Consumer(Ring::map(socket, COMPLETION, at.cr, transmit)?),
            })
        }
    }
}
