//! [`Ring`]: a ring of descriptors in shared memory, in the layout of memif version 2.
//!
//! A ring is 128 bytes of header and a power of two of descriptors, 16 bytes each. The end that owns the memory writes the
//! position `head`, up to which descriptors are with the other end; the other end writes `tail`, up to which it has given them
//! back. Both count descriptors, in 16 bits that wrap. Numbers have the byte order of the machine.
//!
//! | byte | field |
//! |--:|---|
//! | 0 | cookie |
//! | 4 | flags: bit 0 masks the wake-ups of the end that sets it |
//! | 6 | head |
//! | 64 | tail |
//! | 128 | descriptors: flags, region (16 bits each), length, offset, metadata (32 bits each) |

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use super::Shared;

/// Value of the first field.
const COOKIE: u32 = 0x3E3_1F20;
const FLAGS: usize = 4;
const HEAD: usize = 6;
const TAIL: usize = 64;
const DESCRIPTORS: usize = 128;
const DESCRIPTOR_BYTES: usize = 16;
/// The end that sets it needs no wake-ups.
const MASKED: u16 = 1;
/// Base-2 logarithm of the largest number of descriptors: positions have 16 bits.
pub(crate) const MAX_LOG2: u8 = 14;

/// The other end has written what no honest end writes; the text says what, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the other end of the leg {0}")]
pub struct Lie(pub &'static str);

/// A descriptor: bytes of a frame in a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Descriptor {
    /// The frame continues with the next descriptor.
    pub continued: bool,
    pub region: u16,
    pub len: u32,
    pub offset: u32,
}

/// A ring in shared memory.
#[derive(Debug)]
pub(crate) struct Ring {
    start: NonNull<u8>,
    mask: u16,
    _memory: Arc<Shared>,
}

// SAFETY: the memory belongs to the process, and is accessed by atomic words only.
unsafe impl Send for Ring {}

impl Ring {
    /// Bytes of a ring of `1 << log2` descriptors.
    pub(crate) const fn bytes(log2: u8) -> usize {
        DESCRIPTORS + (DESCRIPTOR_BYTES << log2)
    }

    /// The ring at byte `at` of `memory`. `None` if it is not inside, not aligned, or too large.
    pub(crate) fn at(memory: &Arc<Shared>, at: usize, log2: u8) -> Option<Self> {
        let fits = log2 <= MAX_LOG2 && at.is_multiple_of(64) && memory.contains(at, Self::bytes(log2));
        fits.then(|| Self {
            // SAFETY: inside the mapping.
            start: unsafe { memory.start().add(at) },
            mask: (1 << log2) - 1,
            _memory: Arc::clone(memory),
        })
    }

    fn half(&self, at: usize) -> &AtomicU16 {
        // SAFETY: the header is inside the mapping, which is page-aligned and lives as long as `self`; `at` is even.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    fn cookie(&self) -> &AtomicU32 {
        // SAFETY: as `half`.
        unsafe { self.start.cast().as_ref() }
    }

    /// The two words of the descriptor at a position.
    fn words(&self, position: u16) -> &[AtomicU64; 2] {
        let at = DESCRIPTORS + usize::from(position & self.mask) * DESCRIPTOR_BYTES;
        // SAFETY: the remainder is below the number of descriptors, all of which are inside the mapping, and 16-byte aligned.
        unsafe { self.start.add(at).cast().as_ref() }
    }

    /// Number of descriptors.
    pub(crate) fn len(&self) -> u16 {
        self.mask + 1
    }

    /// Prepares a new ring, whose memory is zero.
    pub(crate) fn format(&self) {
        self.cookie().store(COOKIE, Ordering::Relaxed);
    }

    /// Whether the owner has prepared the ring.
    pub(crate) fn is_formatted(&self) -> bool {
        self.cookie().load(Ordering::Relaxed) == COOKIE
    }

    pub(crate) fn head(&self) -> u16 {
        self.half(HEAD).load(Ordering::Acquire)
    }

    pub(crate) fn set_head(&self, head: u16) {
        self.half(HEAD).store(head, Ordering::Release);
    }

    pub(crate) fn tail(&self) -> u16 {
        self.half(TAIL).load(Ordering::Acquire)
    }

    pub(crate) fn set_tail(&self, tail: u16) {
        self.half(TAIL).store(tail, Ordering::Release);
    }

    /// Sets whether this end needs no wake-ups. After it was told that it needs some, it looks once more.
    pub(crate) fn mask_wakeups(&self, masked: bool) {
        self.half(FLAGS).store(if masked { MASKED } else { 0 }, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Whether the other end needs a wake-up, after this end has moved its position.
    pub(crate) fn wants_wakeup(&self) -> bool {
        fence(Ordering::SeqCst);
        self.half(FLAGS).load(Ordering::Relaxed) & MASKED == 0
    }

    /// Reads the descriptor at a position, each word once.
    pub(crate) fn descriptor(&self, position: u16) -> Descriptor {
        let [first, second] = self.words(position);
        let [f0, f1, r0, r1, len @ ..] = first.load(Ordering::Relaxed).to_ne_bytes();
        let [o0, o1, o2, o3, ..] = second.load(Ordering::Relaxed).to_ne_bytes();
        Descriptor {
            continued: u16::from_ne_bytes([f0, f1]) & 1 != 0,
            region: u16::from_ne_bytes([r0, r1]),
            len: u32::from_ne_bytes(len),
            offset: u32::from_ne_bytes([o0, o1, o2, o3]),
        }
    }

    pub(crate) fn set_descriptor(&self, position: u16, descriptor: Descriptor) {
        let Descriptor { continued, region, len, offset } = descriptor;
        let [f0, f1] = u16::from(continued).to_ne_bytes();
        let [r0, r1] = region.to_ne_bytes();
        let [l0, l1, l2, l3] = len.to_ne_bytes();
        let [o0, o1, o2, o3] = offset.to_ne_bytes();
        let [first, second] = self.words(position);
        first.store(u64::from_ne_bytes([f0, f1, r0, r1, l0, l1, l2, l3]), Ordering::Relaxed);
        second.store(u64::from_ne_bytes([o0, o1, o2, o3, 0, 0, 0, 0]), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Arc<Shared> {
        Arc::new(Shared::new(8192).unwrap().0)
    }

    /// The bytes of a descriptor and of the positions are those of memif's header file.
    #[test]
    fn the_layout_is_memifs() {
        let memory = memory();
        let ring = Ring::at(&memory, 64, 4).unwrap();
        ring.format();
        ring.set_head(0x0102);
        ring.set_tail(0x0304);
        ring.mask_wakeups(true);
        let written = Descriptor { continued: true, region: 7, len: 1500, offset: 4096 };
        ring.set_descriptor(17, written);
        assert_eq!((ring.descriptor(1), ring.len()), (written, 16));
        let mut bytes = [0; 64 + 128 + 32];
        assert!(memory.read(0, &mut bytes));
        let expected = [&0x3E3_1F20_u32.to_ne_bytes()[..], &1_u16.to_ne_bytes(), &0x0102_u16.to_ne_bytes()];
        assert_eq!(bytes[64..72], expected.concat());
        assert_eq!(bytes[128..130], 0x0304_u16.to_ne_bytes());
        let expected = [
            &1_u16.to_ne_bytes()[..],
            &7_u16.to_ne_bytes(),
            &1500_u32.to_ne_bytes(),
            &4096_u32.to_ne_bytes(),
        ];
        assert_eq!(bytes[64 + 128 + 16..64 + 128 + 28], expected.concat());
    }

    #[test]
    fn a_ring_lies_inside_its_memory() {
        let memory = memory();
        for (at, log2) in [(0, 9), (8192 - 128, 0), (32, 2), (usize::MAX & !63, 2), (0, 15), (0, u8::MAX)] {
            assert!(log2 > MAX_LOG2 || Ring::at(&memory, at, log2).is_none(), "{at} {log2}");
        }
        assert!(Ring::at(&memory, 8192 - 128 - 64, 2).is_some());
        assert!(Ring::at(&memory, 0, 15).is_none() && Ring::at(&memory, 0, 255).is_none());
    }
}
