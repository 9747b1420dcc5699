//! [`Shared`]: memory in a sealed file that two processes have mapped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use xwarp_tcp::copy;

/// The size of the file never changes.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A mapping that ends when this is dropped, and that a child process of `fork` does not inherit.
#[derive(Debug)]
pub(crate) struct Shared {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for Shared {}
// SAFETY: a shared reference gives atomic words, and copies as of another process's memory.
unsafe impl Sync for Shared {}

impl Shared {
    /// New memory of `len` bytes, and its file for the other end. Pages are allocated when they are used first.
    pub(crate) fn new(len: usize) -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create("xwarp-leg", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
        Ok((Self::map(file.as_fd(), len)?, file))
    }

    /// The memory that the other end made, of exactly `len` bytes.
    ///
    /// # Errors
    /// `InvalidInput`: the file is no `memfd` of ordinary pages whose size is sealed, or has another size.
    pub(crate) fn of(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        // Only files in memory have seals, and a file of a tmpfs that somebody has mounted cannot have these.
        if !fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS)) {
            return refuse("the memory of a leg must be a memfd with the seals SHRINK and GROW");
        }
        let found = fstat(file)?;
        // A huge page that is missing is a fault; an ordinary one is allocated.
        if found.st_dev != own_device()? {
            return refuse("the memory of a leg must be of ordinary pages");
        }
        if u64::try_from(found.st_size).ok() != Some(len as u64) {
            return refuse("the memory of a leg does not have the announced size");
        }
        Self::map(file, len)
    }

    fn map(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so no memory in use is replaced.
        let start = unsafe { mmap(std::ptr::null_mut(), len, rights, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::InvalidData)?;
        let shared = Self { start, len };
        // Parent and child would both use ring positions that are in private memory, and corrupt the rings.
        // SAFETY: the advice concerns this mapping only, and only what children see.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(shared)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Whether `len` bytes at `at` are inside.
    pub(crate) fn contains(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Copies the bytes at `at` to `out`. Returns false, and copies nothing, if they are not inside.
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) -> bool {
        if !self.contains(at, out.len()) {
            return false;
        }
        // SAFETY: the bytes are inside the mapping, and `out` is private memory.
        unsafe { copy::read(self.start.add(at).as_ptr(), out) }.is_ok()
    }

    /// Copies `bytes` to `at`. Returns false, and copies nothing, if they are not inside.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) -> bool {
        if !self.contains(at, bytes.len()) {
            return false;
        }
        // SAFETY: the bytes are inside the mapping, and `bytes` is private memory.
        unsafe { copy::write(self.start.add(at).as_ptr(), bytes) }.is_ok()
    }

    /// Copies `len` bytes at `at` to `to_at` of `to`, which may be the same memory. Returns false, and copies nothing, if they are
    /// not inside.
    pub(crate) fn copy(&self, at: usize, to: &Self, to_at: usize, len: usize) -> bool {
        if !self.contains(at, len) || !to.contains(to_at, len) {
            return false;
        }
        // SAFETY: both ranges are inside their mappings, and may overlap. Nothing is read into a value of this program.
        unsafe {
            libc::memmove(to.start.add(to_at).as_ptr().cast(), self.start.add(at).as_ptr().cast(), len)
        };
        true
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and every holder of an address into it owns or borrows this value.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// The device number of the kernel's own mount for files in memory of ordinary pages.
fn own_device() -> io::Result<u64> {
    static DEVICE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(*device);
    }
    let file = memfd_create("xwarp-leg", MemfdFlags::CLOEXEC)?;
    let device = fstat(&file)?.st_dev;
    Ok(*DEVICE.get_or_init(|| device))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sealed_memory_of_the_announced_size_is_mapped() {
        let (ours, file) = Shared::new(8192).unwrap();
        assert!(ours.write(8000, b"here"));
        let theirs = Shared::of(file.as_fd(), 8192).unwrap();
        let mut found = [0; 4];
        assert!(theirs.read(8000, &mut found));
        assert_eq!(&found, b"here");
        assert!(Shared::of(file.as_fd(), 4096).is_err());
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 8192).unwrap();
        assert!(Shared::of(unsealed.as_fd(), 8192).is_err());
        let program = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Shared::of(program.as_fd(), 8192).is_err());
        assert!(ftruncate(&file, 4096).is_err(), "the size is sealed");
    }

    #[test]
    fn no_access_leaves_the_memory() {
        let (memory, _file) = Shared::new(4096).unwrap();
        for (at, len) in [(4096, 1), (4095, 2), (usize::MAX, 1), (0, 4097), (usize::MAX - 3, 8)] {
            let mut bytes = vec![0; len];
            assert!(!memory.read(at, &mut bytes), "{at} {len}");
            assert!(!memory.write(at, &bytes), "{at} {len}");
            assert!(!memory.copy(at, &memory, 0, len) && !memory.copy(0, &memory, at, len), "{at} {len}");
        }
        assert!(memory.read(4096, &mut []));
    }
}
