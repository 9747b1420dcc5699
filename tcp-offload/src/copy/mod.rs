//! Access to memory that others read and write at the same time, CRC32c, and the sum of the Internet checksum: the only
//! unsafe code of this crate.
//!
//! Registered memory is shared with peers, with threads of the application, with C code and with other processes,
//! without any lock. Rust defines no meaning for plain copies there (a data race is undefined behaviour), nor for
//! atomic accesses of different sizes to the same bytes. Therefore the compiler never sees an access to the shared
//! side: each one is a machine instruction in an `asm!` block, which Rust treats as foreign code (docs/decisions/0010).
//! The value that such an instruction reads is arbitrary to the compiler; the private side of every copy is an ordinary
//! slice, and everything that must be consistent is computed from it, or from the registers on the way to it.
//!
//! Guarantees of a copy on the shared side:
//! - each byte is read or written exactly once, so that a value the application stores after it has seen ours is not
//!   overwritten by a second store of the same copy;
//! - a copy of exactly one aligned word of 8, 4 or 2 bytes is not torn;
//! - on x86-64 the bytes become visible in ascending order.
//!
//! An access to a page that is gone returns a [`Fault`] where a signal handler uses [`landing`]; see the module `fault`.
//!
//! On other processors, and under Miri, the shared side is accessed by relaxed atomic bytes and by atomic words.

#![allow(unsafe_code)]

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[path = "aarch64.rs"]
mod access;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "portable.rs"]
mod access;
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[path = "x86_64.rs"]
mod access;
mod crc;
mod fault;
mod gaps;
pub(crate) mod sum;
#[cfg(test)]
mod tests;

pub use fault::{Fault, landing};
pub(crate) use gaps::NumberedGaps;
pub use gaps::{Gapped, GappedMut, Gaps, Sum};

/// Copies `out.len()` bytes from the shared memory at `from` into `out`.
///
/// # Safety
/// `from` must be valid for reads of `out.len()` bytes as far as the machine is concerned (mapped and readable, or faults are
/// handled by [`landing`]); the bytes must not overlap `out`. Others may write them meanwhile.
#[inline]
pub unsafe fn read(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract; `out` is exclusive.
    unsafe { access::read(from, out) }
}

/// Copies `bytes` to the shared memory at `to`.
///
/// # Safety
/// `to` must be valid for writes of `bytes.len()` bytes as far as the machine is concerned (mapped and writable, or faults are
/// handled by [`landing`]); the bytes must not overlap `bytes`. Others may read and write them meanwhile.
#[inline]
pub unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract.
    unsafe { access::write(to, bytes) }
}

/// Copies bytes from the shared memory at `from` into all of the space of `out`, and makes its [`Sum`] if that is wanted and takes
/// less time in the same pass. After a fault, the contents of the space and its gaps are undefined, and there is no sum.
///
/// # Safety
/// As [`read()`], for `out.len` bytes.
#[inline]
pub unsafe fn read_gapped(from: *const u8, out: &mut GappedMut<'_>) -> Result<(), Fault> {
    // SAFETY: the caller's contract.
    if out.sum != Sum::Apart && unsafe { read_summed(from, out) }? {
        return Ok(());
    }
    let GappedMut { bytes, len, gaps, sum } = out;
    match bytes.get_mut(..*len) {
        // SAFETY: the caller's contract.
        Some(space) if *len <= gaps.first => unsafe { read_run(from, space) },
        // SAFETY: the caller's contract.
        _ => unsafe { read_around_gaps(from, GappedMut { bytes, len: *len, gaps: *gaps, sum: *sum }) },
    }
}

/// [`read_gapped`] in one pass with the [`Sum`], not inlined, because few spaces want one. Returns false, and has written nothing, if
/// several passes take less time.
///
/// # Safety
/// As [`read_gapped`].
#[inline(never)]
unsafe fn read_summed(from: *const u8, out: &mut GappedMut<'_>) -> Result<bool, Fault> {
    // SAFETY: the caller's contract: `space` has as many bytes outside of gaps as `out`.
    out.sum_by(|crc, space, gaps| unsafe { crc::copy(crc, from, space, gaps) })
}

/// [`read()`], not inlined, because it is long.
///
/// # Safety
/// As [`read()`].
#[inline(never)]
unsafe fn read_run(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract.
    unsafe { access::read(from, out) }
}

/// [`read_gapped`] if there are gaps. A call for each of the pieces takes longer than to find the gaps here.
///
/// # Safety
/// As [`read_gapped`].
#[inline(never)]
unsafe fn read_around_gaps(mut from: *const u8, mut out: GappedMut<'_>) -> Result<(), Fault> {
    let mut done = Ok(());
    out.for_each(|space| {
        // SAFETY: the caller's contract; all pieces together have at most `out.len` bytes.
        if let Err(fault) = unsafe { access::read(from, space) } {
            done = Err(fault);
        }
        // SAFETY: as above: the address lies in the memory, or one past its end.
        from = unsafe { from.add(space.len()) };
    });
    done
}

/// Copies `source` without its gaps to the shared memory at `to`.
///
/// # Safety
/// As [`write()`], for `source.len` bytes.
#[inline]
pub unsafe fn write_gapped(to: *mut u8, source: &Gapped<'_>) -> Result<(), Fault> {
    match source.bytes.get(..source.len) {
        // SAFETY: the caller's contract.
        Some(bytes) if source.len <= source.gaps.first => unsafe { write_run(to, bytes) },
        // SAFETY: the caller's contract.
        _ => unsafe { write_around_gaps(to, *source) },
    }
}

/// [`write()`], not inlined, because it is long.
///
/// # Safety
/// As [`write()`].
#[inline(never)]
unsafe fn write_run(to: *mut u8, bytes: &[u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract.
    unsafe { access::write(to, bytes) }
}

/// [`write_gapped`] if there are gaps; see [`read_around_gaps`].
///
/// # Safety
/// As [`write_gapped`].
#[inline(never)]
unsafe fn write_around_gaps(mut to: *mut u8, source: Gapped<'_>) -> Result<(), Fault> {
    let mut done = Ok(());
    source.for_each(|bytes| {
        // SAFETY: the caller's contract; all pieces together have at most `source.len` bytes.
        if let Err(fault) = unsafe { access::write(to, bytes) } {
            done = Err(fault);
        }
        // SAFETY: as above: the address lies in the memory, or one past its end.
        to = unsafe { to.add(bytes.len()) };
    });
    done
}

/// The CRC32c of bytes whose CRC32c is `crc`, followed by `bytes`; 0 is the CRC of no bytes.
#[inline]
pub fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    crc::sum(crc, bytes)
}

/// Access to one aligned word of shared memory.
macro_rules! words {
    ($($load:ident $store:ident $word:ty, $name:literal;)*) => {$(
        #[doc = concat!("Loads the ", $name, " at `at` in one piece. Accesses after it in program order take place after it (acquire).")]
        ///
        /// # Safety
        /// `at` must be mapped, readable and aligned to the size of the word. Others may write it meanwhile.
        #[inline]
        pub unsafe fn $load(at: *const $word) -> Result<$word, Fault> {
            debug_assert!(at.is_aligned());
            // SAFETY: the caller's contract.
            unsafe { access::$load(at) }
        }

        #[doc = concat!("Stores the ", $name, " at `at` in one piece. Accesses before it in program order take place before it (release).")]
        ///
        /// # Safety
        /// `at` must be mapped, writable and aligned to the size of the word. Others may access it meanwhile.
        #[inline]
        pub unsafe fn $store(at: *mut $word, value: $word) -> Result<(), Fault> {
            debug_assert!(at.is_aligned());
            // SAFETY: the caller's contract.
            unsafe { access::$store(at, value) }
        }
    )*};
}

words! {
    load_u8 store_u8 u8, "byte";
    load_u16 store_u16 u16, "16-bit word";
    load_u32 store_u32 u32, "32-bit word";
    load_u64 store_u64 u64, "64-bit word";
}

/// Replaces the 64-bit word at `at` by `new` if it is `current`, atomically with regard to all atomic accesses of other
/// processors (acquire and release). Returns the previous word.
///
/// # Safety
/// `at` must be mapped, readable, writable (even when the words differ) and aligned to 8 bytes.
/// Others may access it meanwhile.
#[inline]
pub unsafe fn compare_exchange_u64(at: *mut u64, current: u64, new: u64) -> Result<u64, Fault> {
    debug_assert!(at.is_aligned());
    // SAFETY: the caller's contract.
    unsafe { access::compare_exchange_u64(at, current, new) }
}
