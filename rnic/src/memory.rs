//! Registered memory: the bytes that peers and the application share, and the only unsafe code of this crate.
//!
//! A peer may write a region at any moment, so this module never makes a Rust reference to its bytes: a reference
//! would promise exclusive or read-only access. Every access goes through [`xwarp_tcp::copy`], whose machine
//! instructions are opaque to the compiler (docs/decisions/0010): copies to and from private buffers, and accesses to
//! aligned words. All accesses are bounds-checked, in release builds too. A race between a copy and a peer yields
//! unspecified *values*, as on a hardware RNIC; anything that must be consistent (a CRC, a header) is computed from
//! the private side of the copy.

#![allow(unsafe_code)]

use std::{fmt, io, marker::PhantomData, ptr::NonNull, sync::Arc};

use memmap2::{Advice, MmapOptions, MmapRaw};
use xwarp_tcp::copy::{self, Fault};

/// Size of the pages of [`Pages::Huge`], as a power of two.
const HUGE_PAGE_BITS: u8 = 21;
/// Bytes of the private buffer for copies from one memory to another.
const BOUNCE_BYTES: usize = 1024;

/// An access that the memory does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// Some byte of the range lies outside of the memory.
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
    /// The memory is not mapped any more, or is protected, against the promise of its owner. Only reported where a signal handler
    /// uses [`landing`](copy::landing); otherwise the process ends.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// Which pages back an owned memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pages {
    /// Ordinary pages.
    #[default]
    Normal,
    /// Ordinary pages that the kernel is asked to merge into huge pages where possible.
    TransparentHuge,
    /// Pages from the kernel's pool of huge pages (2 MiB). Allocation fails when the pool has too few.
    Huge,
}

/// The owner of the bytes.
enum Backing {
    /// Our own anonymous mapping; unmapped with the last handle.
    Owned(#[expect(dead_code, reason = "held for its Drop")] MmapRaw),
    /// Memory of the caller, under the contract of [`Memory::borrowed`].
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

// SAFETY: the handle gives access only through `xwarp_tcp::copy`, which is sound from any number of threads, and the
// backing outlives the handle: an owned mapping by the `Arc`, a borrowed one by the contract of
// `Memory::borrowed`, which names all threads.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`: all methods take `&self` and are meant for concurrent use.
unsafe impl Sync for Memory {}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:p}, {} bytes)", self.base, self.len)
    }
}

/// A range of a memory, checked once, whose bytes are read from front to back.
#[derive(Debug)]
pub(crate) struct Reader<'m> {
    /// The next byte. With the `left - 1` bytes after it, it lies within the memory.
    from: *const u8,
    left: usize,
    /// [`read_gapped`](Self::read_gapped) has met a fault.
    broken: bool,
    memory: PhantomData<&'m Memory>,
}

impl Reader<'_> {
    /// Whether bytes that [`read_gapped`](Self::read_gapped) has copied could not be read.
    #[inline]
    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }

    /// A reader of no bytes.
    #[inline]
    pub(crate) fn empty() -> Self {
        Self { from: NonNull::dangling().as_ptr(), left: 0, broken: false, memory: PhantomData }
    }

    /// Copies the next bytes to all of `out`. Returns false, and has copied nothing, if the range has fewer. After a fault, the reader
    /// [is broken](Self::is_broken).
    #[inline]
    pub(crate) fn read_gapped(&mut self, out: &mut copy::GappedMut<'_>) -> bool {
        let n = out.len;
        if n > self.left {
            return false;
        }
        // SAFETY: as in `read`.
        self.broken |= unsafe { copy::read_gapped(self.from, out) }.is_err();
        // SAFETY: `n <= left`, so the address lies in the memory or one past its end.
        self.from = unsafe { self.from.add(n) };
        self.left -= n;
        true
    }

    /// Copies the next bytes to `out`. Returns their number, which is less than that of `out` only at the end of the range.
    #[inline]
    pub(crate) fn read(&mut self, out: &mut [u8]) -> Result<usize, Fault> {
        let n = out.len().min(self.left);
        let Some(out) = out.get_mut(..n) else { return Ok(0) };
        // SAFETY: the next `left` bytes are mapped, because the handle that this borrows keeps them so; a live exclusive
        // slice does not overlap them.
        unsafe { copy::read(self.from, out) }?;
        // SAFETY: `n <= left`, so the address lies in the memory or one past its end.
        self.from = unsafe { self.from.add(n) };
        self.left -= n;
        Ok(n)
    }
}

/// Defines the accesses to aligned words, with one soundness argument for all of them.
macro_rules! words {
    ($($load:ident $store:ident $word:ty, $name:literal;)*) => {$(
        #[doc = concat!("Loads the aligned ", $name, " at `offset` (host byte order) in one piece. A store by [`Memory`] that it sees, and everything before that store, happened before it (acquire).")]
        pub fn $load(&self, offset: usize) -> Result<$word, AccessError> {
            let at = self.word(offset, size_of::<$word>())?;
            // SAFETY: `word` checked that the bytes lie inside the memory and are aligned; the backing is
            // alive while `self` is.
            Ok(unsafe { copy::$load(at.cast()) }?)
        }

        #[doc = concat!("Stores the aligned ", $name, " at `offset` (host byte order) in one piece, after everything that this thread wrote before (release).")]
        pub fn $store(&self, offset: usize, value: $word) -> Result<(), AccessError> {
            let at = self.writable()?.word(offset, size_of::<$word>())?;
            // SAFETY: as in the load above; the memory is writable.
            Ok(unsafe { copy::$store(at.cast(), value) }?)
        }
    )*};
}

impl Memory {
    /// Maps `len` zeroed bytes, which are unmapped with the last handle. The mapping is rounded up to whole pages of
    /// the kind in `pages`; bytes beyond `len` cannot be accessed.
    pub fn anonymous(len: usize, pages: Pages) -> io::Result<Self> {
        let mut options = MmapOptions::new();
        options.len(mapping_len(len, pages).ok_or(io::ErrorKind::OutOfMemory)?);
        if pages == Pages::Huge {
            options.huge(Some(HUGE_PAGE_BITS));
        }
        let map = MmapRaw::from(options.map_anon()?);
        if pages == Pages::TransparentHuge {
            map.advise(Advice::HugePage)?;
        }
        let base = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, writable: true, _backing: Arc::new(Backing::Owned(map)) })
    }

    /// A handle to memory of the caller.
    ///
    /// # Safety
    /// From now until the last clone and the last [`slice`](Self::slice) of the handle are gone (a region that was
    /// registered with it counts as one clone until it is deregistered, and a fast region until it is
    /// invalidated or dropped, which is immediate; a work request for a fast registration until it completes):
    /// - the `len` bytes at `base` stay mapped, readable, and writable (if they are not, use
    ///   [`Memory::borrowed_read_only`]), or a handler of SIGSEGV and SIGBUS makes accesses that fault return
    ///   [`AccessError::Fault`] (see [`landing`](copy::landing)) and nothing else is mapped there;
    /// - nobody holds or makes a Rust reference (`&` or `&mut`) that overlaps them, except to types with
    ///   interior mutability (`UnsafeCell`, atomics);
    /// - accesses by others at a time when the device may access the same bytes (for as long as a peer may read or
    ///   write them, or a work request names them) are accesses that the Rust compiler does not see: by C code, another
    ///   process, the kernel, `asm!`, or the methods of a [`Memory`]. Rust code may also use `AtomicU64` for an aligned word
    ///   that the device accesses only by [`update_u64`](Self::update_u64) (RFC 7306) at that time. For plain and volatile
    ///   accesses of Rust code such a race is undefined behaviour; they are fine before and after.
    pub unsafe fn borrowed(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, writable: true, _backing: Arc::new(Backing::Borrowed) }
    }

    /// A handle to read-only memory of the caller.
    ///
    /// # Safety
    /// As [`Memory::borrowed`], but the bytes need not be writable, and shared references to them may exist
    /// as long as nobody else writes them.
    pub unsafe fn borrowed_read_only(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len, writable: false, _backing: Arc::new(Backing::Borrowed) }
    }

    /// A read-only handle to the same bytes.
    #[must_use]
    pub fn into_read_only(self) -> Self {
        Self { writable: false, ..self }
    }

    /// A handle to the `len` bytes from `offset` on.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Self, AccessError> {
        let base = NonNull::new(self.range(offset, len)?).unwrap_or(self.base);
        Ok(Self { base, len, ..self.clone() })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the bytes may be written.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Address of the first byte. This type cannot guarantee the soundness of accesses through the pointer.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Whether `offset..offset + len` lies inside of the memory.
    pub fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Copies the bytes from `offset` into `out` and fills it.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        let from = self.range(offset, out.len())?;
        // SAFETY: `range` checked the source, which is mapped; a live exclusive slice does not overlap it.
        Ok(unsafe { copy::read(from, out) }?)
    }

    /// A reader of the `len` bytes from `offset`.
    #[inline]
    pub(crate) fn reader(&self, offset: usize, len: usize) -> Result<Reader<'_>, AccessError> {
        Ok(Reader { from: self.range(offset, len)?, left: len, broken: false, memory: PhantomData })
    }

    /// Copies all of `bytes` to `offset`. An aligned word of 2, 4 or 8 bytes is written in one access, for
    /// applications that poll a counter which a peer writes.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.writable()?.range(offset, bytes.len())?;
        // SAFETY: `range` checked the destination, which is mapped and writable; a live slice does not overlap it.
        Ok(unsafe { copy::write(to, bytes) }?)
    }

    /// As [`write`](Self::write), for bytes between gaps.
    #[expect(clippy::inline_always, reason = "each segment calls it once, and its result is large")]
    #[inline(always)]
    pub fn write_gapped(&self, offset: usize, source: &copy::Gapped<'_>) -> Result<(), AccessError> {
        let to = self.writable()?.range(offset, source.len)?;
        // SAFETY: as in `write`.
        Ok(unsafe { copy::write_gapped(to, source) }?)
    }

    /// Copies `len` bytes from `offset` to `to_offset` of `to`, which may be the same memory and overlap.
    pub fn copy_to(&self, offset: usize, to: &Self, to_offset: usize, len: usize) -> Result<(), AccessError> {
        let from = self.range(offset, len)?;
        let target = to.writable()?.range(to_offset, len)?;
        let mut bounce = [0; BOUNCE_BYTES];
        let parts = len.div_ceil(BOUNCE_BYTES);
        // If the target begins within the source, the last part must be read before it is overwritten.
        let backwards = target.addr() > from.addr();
        for part in 0..parts {
            let at = if backwards { parts - 1 - part } else { part } * BOUNCE_BYTES;
            let part = &mut bounce[..(len - at).min(BOUNCE_BYTES)];
            self.read(offset + at, part)?;
            to.write(to_offset + at, part)?;
        }
        Ok(())
    }

    /// Sets the `len` bytes from `offset` to `byte`.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) -> Result<(), AccessError> {
        self.writable()?.range(offset, len)?;
        let pattern = [byte; BOUNCE_BYTES];
        for at in (0..len).step_by(BOUNCE_BYTES) {
            self.write(offset + at, &pattern[..(len - at).min(BOUNCE_BYTES)])?;
        }
        Ok(())
    }

    words! {
        load_u8 store_u8 u8, "byte";
        load_u16 store_u16 u16, "16-bit word";
        load_u32 store_u32 u32, "32-bit word";
        load_u64 store_u64 u64, "64-bit word";
    }

    /// Atomically replaces the aligned 64-bit word at `offset` by `f` of its value, or leaves it unchanged when `f`
    /// returns `None`; returns the former value. The step is atomic with regard to every other atomic access,
    /// including those of application threads. `f` may be called several times. RFC 7306's FetchAdd, CmpSwap and Swap
    /// are built on it.
    pub fn update_u64(
        &self,
        offset: usize,
        mut f: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, AccessError> {
        let at: *mut u64 = self.writable()?.word(offset, size_of::<u64>())?.cast();
        // SAFETY: inside, aligned, alive.
        let mut seen = unsafe { copy::load_u64(at) }?;
        while let Some(new) = f(seen) {
            // SAFETY: as above, and the memory is writable.
            let before = unsafe { copy::compare_exchange_u64(at, seen, new) }?;
            if before == seen {
                break;
            }
            seen = before;
        }
        Ok(seen)
    }

    /// Address of byte `offset`, if `len` bytes from there lie inside of the memory.
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

/// Number of bytes to map for `len` bytes. The kernel rounds a mapping of huge pages up, but refuses to unmap a
/// length that is no multiple of the page size. `None` when rounding up overflows.
fn mapping_len(len: usize, pages: Pages) -> Option<usize> {
    match pages {
        Pages::Normal | Pages::TransparentHuge => Some(len),
        Pages::Huge => len.max(1).checked_next_multiple_of(1 << HUGE_PAGE_BITS),
    }
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

    proptest! {
        #[test]
        fn prop_copies_within_one_memory_equal_copy_within(from in 0usize..3000, to in 0usize..3000, len in 0usize..3000) {
            let memory = Memory::anonymous(6000, Pages::Normal).unwrap();
            let mut oracle: Vec<u8> = (0..6000_usize).map(|i| (i * 7 + i / 256) as u8).collect();
            memory.write(0, &oracle).unwrap();
            memory.copy_to(from, &memory, to, len).unwrap();
            oracle.copy_within(from..from + len, to);
            let mut all = vec![0; 6000];
            memory.read(0, &mut all).unwrap();
            prop_assert_eq!(all, oracle);
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
    fn fill_writes_the_named_bytes_only() {
        let memory = Memory::anonymous(5000, Pages::Normal).unwrap();
        memory.fill(100, 4000, 9).unwrap();
        let mut all = vec![0; 5000];
        memory.read(0, &mut all).unwrap();
        let expected = |at: usize| if (100..4100).contains(&at) { 9 } else { 0 };
        assert!(all.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    }

    #[test]
    fn mappings_of_huge_pages_are_whole_pages() {
        const HUGE: usize = 2 << 20;
        assert_eq!(mapping_len(5000, Pages::Normal), Some(5000));
        for (len, mapped) in [(0, HUGE), (1, HUGE), (HUGE, HUGE), (HUGE + 1, 2 * HUGE)] {
            assert_eq!(mapping_len(len, Pages::Huge), Some(mapped), "{len} bytes");
        }
        assert_eq!(mapping_len(usize::MAX, Pages::Huge), None);
        assert!(Memory::anonymous(usize::MAX, Pages::Huge).is_err());
    }

    /// Needs pages in the kernel's pool (`vm.nr_hugepages`); without them the test checks that allocation fails.
    #[test]
    fn huge_pages_are_unmapped_with_the_last_handle() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let len = (2 << 20) + 5;
        let memory = match Memory::anonymous(len, Pages::Huge) {
            Ok(memory) => memory,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
                return;
            }
        };
        assert_eq!(memory.len(), len);
        assert!(memory.write(len, &[1]).is_err(), "the rest of the last page is not accessible");
        let begin = format!("{:x}-", memory.as_ptr().addr());
        assert!(maps().lines().any(|line| line.starts_with(&begin)));
        drop(memory);
        assert!(!maps().lines().any(|line| line.starts_with(&begin)), "the mapping is still there");
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
