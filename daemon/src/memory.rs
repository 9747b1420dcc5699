//! [`MemoryFiles`]: which descriptors of clients may be closed on the server loop.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, memfd_create};
use rustix::io::Result;

/// Recognises frame memory as clients make it: a file in the kernel's own mount for memory (`memfd_create`), sealed against
/// shrinking. Closing it frees its pages and waits for nothing. Other files, also those of a tmpfs that a user has mounted, may
/// be the last file of a whole file system.
#[derive(Debug)]
pub(crate) struct MemoryFiles {
    device: u64,
}

impl MemoryFiles {
    pub(crate) fn new() -> Result<Self> {
        let file = memfd_create("xwarpd", MemfdFlags::CLOEXEC)?;
        Ok(Self { device: fstat(&file)?.st_dev })
    }

    pub(crate) fn is_memory(&self, descriptor: &OwnedFd) -> bool {
        // Only files in memory have seals, and a file of a tmpfs cannot be sealed against shrinking.
        let sealed = fcntl_get_seals(descriptor).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        sealed && fstat(descriptor).is_ok_and(|found| found.st_dev == self.device)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fcntl_add_seals;

    use super::*;

    #[test]
    fn attack_only_sealed_memory_is_closed_on_the_loop() {
        let files = MemoryFiles::new().unwrap();
        let made = |flags| memfd_create("test", flags | MemfdFlags::CLOEXEC).unwrap();
        let sealed = made(MemfdFlags::ALLOW_SEALING);
        assert!(!files.is_memory(&sealed), "not sealed yet");
        fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(files.is_memory(&sealed));
        // A file of a tmpfs has the seal against further seals.
        assert!(!files.is_memory(&made(MemfdFlags::empty())));
        assert!(!files.is_memory(&std::fs::File::open("/proc/self/exe").unwrap().into()));
    }
}
