//! [`ForkMark`]: lets a forked child detect that it is one; the only unsafe code of this crate.

#![allow(unsafe_code)]

use std::io;

use memmap2::MmapMut;
use rustix::mm::{Advice, madvise};

/// Distinguishes the process that created the mark from its children (`fork`).
#[derive(Debug)]
pub(crate) struct ForkMark(MmapMut);

impl ForkMark {
    pub(crate) fn new() -> io::Result<Self> {
        let mut page = MmapMut::map_anon(1)?;
        page.fill(1);
        // SAFETY: the page is private and anonymous, as the advice demands; its effect is that children find zeroes, which
        // are values of bytes.
        unsafe { madvise(page.as_mut_ptr().cast(), page.len(), Advice::LinuxWipeOnFork)? };
        Ok(Self(page))
    }

    /// Whether this process is a child. Costs one read of memory.
    pub(crate) fn is_inherited(&self) -> bool {
        // SAFETY: the byte is inside the mapping. Volatile, because the kernel changes it in a child.
        unsafe { self.0.as_ptr().read_volatile() == 0 }
    }
}
