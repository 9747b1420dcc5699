//! [`Memory`]: the mapping of frame memory (UMEM), which the kernel reads and writes too.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// Seals of frame memory: its size never changes.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Seals of memory that a helper registers: its pages cannot be taken out any more, and nobody maps it anew to write.
const HELPERS_SEALS: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SEAL);

/// A mapping that ends when this is dropped, and that a child process of `fork` does not inherit.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, readable, writable and shared, with all pages present.
    pub(super) fn new(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::with(MapFlags::SHARED | MapFlags::POPULATE, fd, offset, len)
    }

    fn with(flags: MapFlags, fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so no memory in use is replaced.
        let start = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, offset)?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        let mapping = Self { start, len };
        // Parent and child would both use ring positions that are in private memory, and corrupt the rings.
        // SAFETY: the advice concerns this mapping only, and only what children see.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(mapping)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Prefetches the cache lines of `len` bytes at `offset`, all at once: another CPU may have written them.
    #[inline]
    pub(super) fn prefetch(&self, offset: usize, len: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..len).step_by(CACHE_LINE) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let at = self.start.as_ptr().wrapping_add(offset).wrapping_add(line);
            // SAFETY: the instruction is a hint; it reads nothing and never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast_const().cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (offset, len);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every holder of an address into it owns or borrows this value.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Frame memory and its file.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(super) mapping: Mapping,
    file: OwnedFd,
}

impl Memory {
    /// New memory of `len` bytes, all pages present. It is shared memory, so that `fork` does not copy its pinned pages, and so
    /// that a helper can register it.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let file = memfd_create("xwarp-umem", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let mapping = Mapping::new(&file, 0, len)?;
        Ok(Self { mapping, file })
    }

    /// The memory that another process made: a sealed file of exactly `len` bytes. All pages are present, and therefore charged
    /// to the other process, and none can be taken out.
    pub(crate) fn of(file: OwnedFd, len: usize) -> io::Result<Self> {
        let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        // A file of a mounted file system, which could block its reader, cannot have these seals.
        if !fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS)) {
            return refuse("frame memory must be a memfd with the seals SHRINK and GROW");
        }
        if fstat(&file)?.st_size != len as i64 {
            return refuse("frame memory does not have the announced size");
        }
        let mapping = Mapping::with(MapFlags::SHARED, &file, 0, len)?;
        fcntl_add_seals(&file, HELPERS_SEALS)?;
        // A page that is missing now would be allocated by this process, and charged to it. The unit of `st_blocks` is 512 bytes
        // on every file system.
        if fstat(&file)?.st_blocks * 512 < len as i64 {
            return refuse("pages of the frame memory are missing");
        }
        Ok(Self { mapping, file })
    }

    /// The file, to be passed to a helper.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;

    use super::*;

    const BYTES: usize = 1 << 16;

    /// Pages that a client takes out of memory before the helper registers it would be allocated by the helper.
    #[test]
    fn attack_pages_of_memory_that_a_helper_registers_stay() {
        let memory = Memory::new(BYTES).unwrap();
        let take_out = || {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(memory.file(), flags, 0, BYTES as u64 / 2)
        };
        let passed = || memory.file().try_clone_to_owned().unwrap();
        let helpers = Memory::of(passed(), BYTES).unwrap();
        assert_eq!(take_out(), Err(Errno::PERM));
        assert!(Memory::of(passed(), BYTES).is_err(), "twice");
        drop(helpers);
        assert_eq!(take_out(), Err(Errno::PERM));
        let memory = Memory::new(BYTES).unwrap();
        fallocate(memory.file(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096).unwrap();
        let refused = Memory::of(memory.file().try_clone_to_owned().unwrap(), BYTES).unwrap_err();
        assert!(refused.to_string().contains("missing"), "{refused}");
    }
}
