//! Other processors, and Miri: relaxed atomic bytes and atomic words. [`read`] and [`write`] may tear a word here. When
//! another thread accesses the same bytes as words at the same time, accesses of different sizes mix, for which Rust
//! defines no meaning; therefore the supported processors have their own instructions.

use super::fault::Fault;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// See [`super::read`].
pub(super) unsafe fn read(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    for (at, byte) in out.iter_mut().enumerate() {
        // SAFETY: `at` is less than the length that the caller vouches for.
        *byte = unsafe { AtomicU8::from_ptr(from.add(at).cast_mut()) }.load(Ordering::Relaxed);
    }
    Ok(())
}

/// See [`super::write`].
pub(super) unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), Fault> {
    for (at, byte) in bytes.iter().enumerate() {
        // SAFETY: `at` is less than the length that the caller vouches for.
        unsafe { AtomicU8::from_ptr(to.add(at)) }.store(*byte, Ordering::Relaxed);
    }
    Ok(())
}

/// One word's load and store.
macro_rules! words {
    ($($load:ident $store:ident $atomic:ty, $word:ty;)*) => {$(
        /// See the function of the same name above.
        pub(super) unsafe fn $load(at: *const $word) -> Result<$word, Fault> {
            // SAFETY: the caller's contract.
            Ok(unsafe { <$atomic>::from_ptr(at.cast_mut()) }.load(Ordering::Acquire))
        }

        /// See the function of the same name above.
        pub(super) unsafe fn $store(at: *mut $word, value: $word) -> Result<(), Fault> {
            // SAFETY: the caller's contract.
            unsafe { <$atomic>::from_ptr(at) }.store(value, Ordering::Release);
            Ok(())
        }
    )*};
}

words! {
    load_u8 store_u8 AtomicU8, u8;
    load_u16 store_u16 AtomicU16, u16;
    load_u32 store_u32 AtomicU32, u32;
    load_u64 store_u64 AtomicU64, u64;
}

/// See [`super::compare_exchange_u64`].
pub(super) unsafe fn compare_exchange_u64(at: *mut u64, current: u64, new: u64) -> Result<u64, Fault> {
    // SAFETY: the caller's contract.
    let word = unsafe { AtomicU64::from_ptr(at) };
    Ok(word
        .compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
        .unwrap_or_else(|before| before))
}
