//! Registered memory: the bytes that peers and the application share, and the only unsafe code of this crate.
//!
//! A peer may write a region at any moment, so nothing here ever makes a Rust reference to its bytes, which
//! would promise that nobody else touches them. Like the guest memory of a virtual machine monitor it is
//! reached by copies to and from private buffers, and by atomic words. Every access is bounds checked,
//! in release builds too. A race between a copy and a peer yields unspecified *values*, as on an RNIC;
//! whatever must be consistent (a CRC, a header) is computed from the private side of the copy.

#![allow(unsafe_code)]

use std::{
    fmt, io,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, compiler_fence},
    },
};

use memmap2::{Advice, MmapOptions, MmapRaw};

/// An access that the memory does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// Some byte of the range lies outside.
    #[error("bytes {offset}..+{len} lie outside of a memory of {size} bytes")]
    OutOfBounds {
        /// First byte of the range.
        offset: usize,
        /// Bytes of the range.
        len: usize,
        /// Bytes of the memory.
        size: usize,
    },
    /// An atomic word does not lie on a multiple of its size.
    #[error("the word at byte {offset} is not aligned")]
    Unaligned {
        /// First byte of the word.
        offset: usize,
    },
    /// A write to memory that was declared read-only.
    #[error("the memory is read-only")]
    ReadOnly,
}

/// Which pages back an owned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pages {
    /// Ordinary pages.
    #[default]
    Normal,
    /// Ordinary pages that the kernel is asked to merge to huge ones where it can.
    TransparentHuge,
    /// Pages from the kernel's huge page pool (2 MiB); fails when the pool has not enough.
    Huge,
}

/// What keeps the bytes valid.
enum Backing {
    /// Our own anonymous mapping; unmapped with the last handle.
    Owned(#[expect(dead_code, reason = "held for its Drop")] MmapRaw),
    /// The caller's, by the contract of [`Memory::borrowed`].
    Borrowed,
}

/// A handle to bytes that several parties read and write; clones are handles to the same bytes.
#[derive(Clone)]
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    _backing: Arc<Backing>,
}

// SAFETY: the handle gives access only through raw copies and atomics, which are sound from any number of
// threads (races give unspecified values, see the module), and the backing outlives the handle: an owned
// mapping by the `Arc`, a borrowed one by the contract of `Memory::borrowed`, which names all threads.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`: all methods take `&self` and are meant for concurrent use.
unsafe impl Sync for Memory {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:p}, {} bytes)", self.base, self.len)
    }
}

/// Word-sized raw access; the macro keeps the one argument for soundness in one place.
macro_rules! words {
    ($($load:ident $store:ident $atomic:ty, $word:ty, $name:literal;)*) => {$(
        #[doc = concat!("Reads the aligned ", $name, " at `offset` (host byte order) in one piece; what its writer wrote before it is visible after it.")]
        pub fn $load(&self, offset: usize) -> Result<$word, AccessError> {
            let at = self.word(offset, size_of::<$word>())?;
            // SAFETY: `word` checked that the bytes lie inside the memory and are aligned; the backing is
            // alive while `self` is; every party uses atomics or raw copies.
            Ok(unsafe { <$atomic>::from_ptr(at.cast()) }.load(Ordering::Acquire))
        }

        #[doc = concat!("Writes the aligned ", $name, " at `offset` (host byte order) in one piece, after everything this thread wrote before.")]
        pub fn $store(&self, offset: usize, value: $word) -> Result<(), AccessError> {
            let at = self.writable()?.word(offset, size_of::<$word>())?;
            // SAFETY: as in the load above; the memory is writable.
            unsafe { <$atomic>::from_ptr(at.cast()) }.store(value, Ordering::Release);
            Ok(())
        }
    )*};
}

impl Memory {
    /// Zeroed memory of our own.
    pub fn anonymous(len: usize, pages: Pages) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        options.len(len);
        if pages == Pages::Huge {
            options.huge(Some(21));
        }
        let map = MmapRaw::from(options.map_anon()?);
        if pages == Pages::TransparentHuge {
            map.advise(Advice::HugePage)?;
        }
        let base = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, writable: true, _backing: Arc::new(Backing::Owned(map)) })
    }

    /// Memory of the caller's.
    ///
    /// # Safety
    /// From now until the last clone and the last [`slice`](Self::slice) of the handle are gone (a region that was
    /// registered with it counts as one clone until it is deregistered, and a fast region until it is
    /// invalidated or dropped, which is immediate; a work request for a fast registration until it completes):
    /// - the `len` bytes at `base` stay mapped, readable, and writable (if they are not, use
    ///   [`Memory::borrowed_read_only`]);
    /// - nobody holds or makes a Rust reference (`&` or `&mut`) that overlaps them, except to types with
    ///   interior mutability that are sound under foreign writes (atomics, `UnsafeCell` behind raw access);
    /// - accesses by others that race with ours are plain machine accesses of C code or raw/volatile/atomic
    ///   accesses of Rust code, in any thread, and their values are treated as arbitrary.
    pub unsafe fn borrowed(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, writable: true, _backing: Arc::new(Backing::Borrowed) }
    }

    /// Memory of the caller's that must not be written.
    ///
    /// # Safety
    /// As [`Memory::borrowed`], but the bytes need not be writable, and shared references to them may exist
    /// as long as nobody else writes them.
    pub unsafe fn borrowed_read_only(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, writable: false, _backing: Arc::new(Backing::Borrowed) }
    }

    /// The same bytes, not to be written through this handle.
    #[must_use]
    pub fn into_read_only(self) -> Self {
        Self { writable: false, ..self }
    }

    /// A handle to the `len` bytes from `offset` on.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self, AccessError> {
        let base = NonNull::new(self.range(offset, len)?).unwrap_or(self.base);
        Ok(Self { base, len, ..self.clone() })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte at all.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the bytes may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Address of the first byte. What is done with it is outside of what this type can keep sound.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Whether `offset..offset + len` lies inside.
    pub fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Copies the bytes from `offset` on into `out`, all of it.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        let from = self.range(offset, out.len())?;
        // SAFETY: `range` checked the source; `out` is a live exclusive slice of the same length.
        unsafe { copy(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset`, all of them.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.writable()?.range(offset, bytes.len())?;
        // SAFETY: `range` checked the destination, which is writable; `bytes` is a live slice.
        unsafe { copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `offset` to `to_offset` of `to`, which may be the same memory and overlap.
    pub fn copy_to(&self, offset: usize, to: &Self, to_offset: usize, len: usize) -> Result<(), AccessError> {
        let from = self.range(offset, len)?;
        let to = to.writable()?.range(to_offset, len)?;
        // SAFETY: both ranges are checked, the destination is writable, and `copy` allows overlap.
        unsafe { copy(from, to, len) };
        Ok(())
    }

    /// Writes `len` times `byte` from `offset` on.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Result<(), AccessError> {
        let to = self.writable()?.range(offset, len)?;
        // SAFETY: `range` checked the destination, which is writable.
        unsafe { to.write_bytes(byte, len) };
        compiler_fence(Ordering::SeqCst);
        Ok(())
    }

    words! {
        load_u8 store_u8 AtomicU8, u8, "byte";
        load_u16 store_u16 AtomicU16, u16, "16-bit word";
        load_u32 store_u32 AtomicU32, u32, "32-bit word";
        load_u64 store_u64 AtomicU64, u64, "64-bit word";
    }

    /// Replaces the aligned 64-bit word at `offset` by `f` of it, or leaves it when that is `None`, in one atomic step with
    /// regard to every other atomic access, also of the application's own CPU; returns the word before. `f`
    /// may be called several times. (The base of RFC 7306's FetchAdd, CmpSwap and Swap.)
    pub fn update_u64(&self, offset: usize, f: impl FnMut(u64) -> Option<u64>) -> Result<u64, AccessError> {
        let at = self.writable()?.word(offset, size_of::<u64>())?;
        // SAFETY: as in the loads and stores: inside, aligned, alive, writable.
        let word = unsafe { AtomicU64::from_ptr(at.cast()) };
        Ok(match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, f) {
            Ok(before) | Err(before) => before,
        })
    }

    /// Address of `offset`, when the range from there lies inside.
    fn range(&self, offset: usize, len: usize) -> Result<*mut u8, AccessError> {
        if self.contains(offset, len) {
            // SAFETY: `offset <= self.len`, so the address lies in the memory or one past its end.
            Ok(unsafe { self.base.as_ptr().add(offset) })
        } else {
            Err(AccessError::OutOfBounds { offset, len, size: self.len })
        }
    }

    /// Address of an aligned word.
    fn word(&self, offset: usize, size: usize) -> Result<*mut u8, AccessError> {
        let at = self.range(offset, size)?;
        if at.addr().is_multiple_of(size) { Ok(at) } else { Err(AccessError::Unaligned { offset }) }
    }

    fn writable(&self) -> Result<&Self, AccessError> {
        if self.writable { Ok(self) } else { Err(AccessError::ReadOnly) }
    }
}

/// Copies `len` bytes as the processor does it, once.
///
/// Not inlined, and closed by a compiler fence, so that no optimisation reads the shared side a second time
/// in place of the private copy. An aligned word goes in one piece, for applications that watch a counter
/// which a peer writes.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes; neither may be freed meanwhile.
#[inline(never)]
#[expect(clippy::cast_ptr_alignment, reason = "only what lies aligned is taken for a word")]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let aligned = (from.addr() | to.addr()).is_multiple_of(len.max(1));
    match len {
        // SAFETY: the caller's contract; both addresses are aligned to the word.
        8 if aligned => unsafe { to.cast::<u64>().write_volatile(from.cast::<u64>().read_volatile()) },
        // SAFETY: as above.
        4 if aligned => unsafe { to.cast::<u32>().write_volatile(from.cast::<u32>().read_volatile()) },
        // SAFETY: the caller's contract; `ptr::copy` allows overlap.
        _ => unsafe { std::ptr::copy(from, to, len) },
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_copies_equal_a_plain_vector(ops in prop::collection::vec((0usize..300, prop::collection::vec(any::<u8>(), 0..80)), 0..40)) {
            let memory = Memory::anonymous(256, Pages::Normal).unwrap();
            let mut oracle = vec![0u8; 256];
            for (offset, bytes) in ops {
                let fits = offset + bytes.len() <= 256;
                prop_assert_eq!(memory.write(offset, &bytes).is_ok(), fits);
                if fits {
                    oracle[offset..offset + bytes.len()].copy_from_slice(&bytes);
                }
                let mut all = vec![0; 256];
                memory.read(0, &mut all).unwrap();
                prop_assert_eq!(&all, &oracle);
            }
        }
    }

    #[test]
    fn bounds_hold_at_the_edges_and_for_overflowing_ranges() {
        let memory = Memory::anonymous(16, Pages::Normal).unwrap();
        assert_eq!(memory.write(16, &[]), Ok(()));
        assert_eq!(memory.write(16, &[0]), Err(AccessError::OutOfBounds { offset: 16, len: 1, size: 16 }));
        assert!(!memory.contains(usize::MAX, 1));
        assert!(memory.load_u64(9).is_err());
        assert_eq!(memory.load_u64(4), Err(AccessError::Unaligned { offset: 4 }));
        assert!(memory.fill(usize::MAX, 2, 1).is_err());
    }

    #[test]
    fn a_slice_is_the_same_bytes_within_narrower_bounds() {
        let memory = Memory::anonymous(16, Pages::Normal).unwrap();
        let slice = memory.slice(4, 8).unwrap();
        slice.write(0, b"narrower").unwrap();
        assert!(slice.write(1, b"narrower").is_err());
        let mut out = [0; 8];
        memory.read(4, &mut out).unwrap();
        assert_eq!(&out, b"narrower");
        assert!(memory.slice(9, 8).is_err() && memory.slice(usize::MAX, 2).is_err());
        assert!(memory.slice(16, 0).unwrap().is_empty());
        drop(memory);
        assert_eq!(slice.load_u8(0), Ok(b'n'), "the slice keeps the mapping");
    }

    #[test]
    fn read_only_memory_refuses_every_write() {
        static BYTES: [u8; 8] = [7; 8];
        // SAFETY: a static lives for ever, and nobody writes it.
        let memory = unsafe { Memory::borrowed_read_only(NonNull::from(&BYTES).cast(), 8) };
        let mut out = [0; 8];
        memory.read(0, &mut out).unwrap();
        assert_eq!(out, BYTES);
        assert_eq!(memory.write(0, &[1]), Err(AccessError::ReadOnly));
        assert_eq!(memory.fill(0, 1, 1), Err(AccessError::ReadOnly));
        assert_eq!(memory.store_u32(0, 1), Err(AccessError::ReadOnly));
        assert_eq!(memory.update_u64(0, Some), Err(AccessError::ReadOnly));
    }

    #[test]
    fn copies_between_memories_and_within_one_may_overlap() {
        let a = Memory::anonymous(8, Pages::TransparentHuge).unwrap();
        a.write(0, &[1, 2, 3, 4]).unwrap();
        a.copy_to(0, &a, 2, 4).unwrap();
        let mut out = [0; 8];
        a.read(0, &mut out).unwrap();
        assert_eq!(out, [1, 2, 1, 2, 3, 4, 0, 0]);
    }

    #[test]
    fn atomic_updates_from_two_threads_lose_nothing() {
        let memory = Memory::anonymous(8, Pages::Normal).unwrap();
        thread::scope(|s| {
            for _ in 0..2 {
                let memory = memory.clone();
                s.spawn(move || {
                    for _ in 0..1000 {
                        memory.update_u64(0, |v| Some(v + 1)).unwrap();
                    }
                });
            }
        });
        assert_eq!(memory.load_u64(0), Ok(2000));
        assert_eq!(memory.update_u64(0, |_| None), Ok(2000));
        assert_eq!(memory.load_u64(0), Ok(2000));
    }
}
