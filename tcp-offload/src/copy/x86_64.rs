//! x86-64: moves through general and vector registers. All of the processor's loads acquire and all of its stores release.

use std::arch::asm;

use super::fault::{Fault, entry};

/// Length in bytes from which AVX with aligned stores is faster.
pub(super) const LONG: usize = 256;
/// Bytes that one pass of the AVX loop moves.
const BLOCK: usize = 128;
/// Bytes of an AVX register.
const VECTOR: usize = 32;

/// See [`super::read`].
#[expect(clippy::inline_always, reason = "its callers are not inlined")]
#[inline(always)]
pub(super) unsafe fn read(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract for `from`; `out` is exclusive for its length.
    unsafe { copy(from, out.as_mut_ptr(), out.len()) }
}

/// See [`super::write`].
#[expect(clippy::inline_always, reason = "its callers are not inlined")]
#[inline(always)]
pub(super) unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract for `to`; `bytes` is readable for its length.
    unsafe { copy(bytes.as_ptr(), to, bytes.len()) }
}

/// The text behind label 3 of an `asm!` block whose instructions between the labels 2 and 3 may fault: it sets `{e}` to 1 then, and
/// goes on at label 3. For blocks with results, which cannot have a label of Rust code.
macro_rules! fixed_up {
    () => {
        concat!(
            ".pushsection .text.xwarp_faults, \"ax\", @progbits\n",
            "4: mov {e:e}, 1\n",
            "jmp 3b\n",
            ".popsection\n",
            $crate::copy::fault::entry!("4b"),
        )
    };
}
pub(super) use fixed_up;

/// The result of an access that has faulted. A call whose result the compiler does not know, because it would load a constant in front of
/// each instruction that may fault.
#[cold]
#[inline(never)]
fn faulted() -> Result<(), Fault> {
    let mut e = 1u32;
    // SAFETY: changes nothing.
    unsafe { asm!("/* {e:e} */", e = inout(reg) e, options(nomem, nostack, preserves_flags)) };
    unless(e, ())
}

/// Copies `len` bytes that do not overlap, each once and in ascending order.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes as far as the machine is concerned.
#[expect(clippy::inline_always, reason = "its callers are not inlined")]
#[inline(always)]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> Result<(), Fault> {
    // SAFETY: the caller's contract; AVX is only used where it is present.
    unsafe {
        if len >= LONG && is_x86_feature_detected!("avx") {
            copy_long(from, to, len)
        } else {
            copy_short(from, to, len)
        }
    }
}

/// Moves one value from `$from` to `$to` through a register, and advances `$from`, `$to` and `$len` by its size. Returns the
/// caller's [`Fault`] after a fault.
macro_rules! step {
    ($from:ident, $to:ident, $len:ident, $size:literal, $class:ident, $load:literal, $store:literal) => {
        asm!(
            "2:",
            $load,
            $store,
            "3:",
            entry!("{fault}"),
            v = out($class) _,
            f = in(reg) $from,
            t = in(reg) $to,
            fault = label { return faulted() },
            options(nostack, preserves_flags),
        );
        $from = $from.add($size);
        $to = $to.add($size);
        $len -= $size;
    };
}

/// Like [`copy`], for short lengths.
///
/// # Safety
/// As [`copy`].
#[inline]
pub(super) unsafe fn copy_short(mut from: *const u8, mut to: *mut u8, mut len: usize) -> Result<(), Fault> {
    // SAFETY: every step moves bytes that lie within the `len` bytes which are left.
    unsafe {
        while len >= 32 {
            asm!(
                "2:",
                "movdqu {a}, [{f}]",
                "movdqu {b}, [{f} + 16]",
                "movdqu [{t}], {a}",
                "movdqu [{t} + 16], {b}",
                "3:",
                entry!("{fault}"),
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                f = in(reg) from,
                t = in(reg) to,
                fault = label { return faulted() },
                options(nostack, preserves_flags),
            );
            from = from.add(32);
            to = to.add(32);
            len -= 32;
        }
        if len >= 16 {
            step!(from, to, len, 16, xmm_reg, "movdqu {v}, [{f}]", "movdqu [{t}], {v}");
        }
        if len > 0 { copy_tail(from, to, len) } else { Ok(()) }
    }
}

/// Copies fewer than 16 bytes.
///
/// # Safety
/// As [`copy`].
#[inline]
#[expect(unused_assignments, reason = "the last step advances like the others")]
unsafe fn copy_tail(mut from: *const u8, mut to: *mut u8, mut len: usize) -> Result<(), Fault> {
    debug_assert!(len < 16);
    // SAFETY: the bits of `len` name sizes whose sum is `len`.
    unsafe {
        if len & 8 != 0 {
            step!(from, to, len, 8, reg, "mov {v:r}, qword ptr [{f}]", "mov qword ptr [{t}], {v:r}");
        }
        if len & 4 != 0 {
            step!(from, to, len, 4, reg, "mov {v:e}, dword ptr [{f}]", "mov dword ptr [{t}], {v:e}");
        }
        if len & 2 != 0 {
            step!(from, to, len, 2, reg, "movzx {v:e}, word ptr [{f}]", "mov word ptr [{t}], {v:x}");
        }
        if len & 1 != 0 {
            step!(from, to, len, 1, reg_byte, "mov {v}, byte ptr [{f}]", "mov byte ptr [{t}], {v}");
        }
    }
    Ok(())
}

/// Like [`copy`], for at least [`LONG`] bytes.
///
/// # Safety
/// As [`copy`]; the processor has AVX.
#[target_feature(enable = "avx")]
pub(super) unsafe fn copy_long(mut from: *const u8, mut to: *mut u8, mut len: usize) -> Result<(), Fault> {
    debug_assert!(len >= LONG);
    // SAFETY: the head is shorter than a vector, and there are at least `LONG` bytes; the loop moves whole blocks of
    // the rest; every step moves bytes that lie within the `len` bytes which are left.
    unsafe {
        let head = to.addr().wrapping_neg() % VECTOR;
        if head & 1 != 0 {
            step!(from, to, len, 1, reg_byte, "mov {v}, byte ptr [{f}]", "mov byte ptr [{t}], {v}");
        }
        if head & 2 != 0 {
            step!(from, to, len, 2, reg, "movzx {v:e}, word ptr [{f}]", "mov word ptr [{t}], {v:x}");
        }
        if head & 4 != 0 {
            step!(from, to, len, 4, reg, "mov {v:e}, dword ptr [{f}]", "mov dword ptr [{t}], {v:e}");
        }
        if head & 8 != 0 {
            step!(from, to, len, 8, reg, "mov {v:r}, qword ptr [{f}]", "mov qword ptr [{t}], {v:r}");
        }
        if head & 16 != 0 {
            step!(from, to, len, 16, xmm_reg, "vmovdqu {v}, [{f}]", "vmovdqu [{t}], {v}");
        }
        let blocks = len / BLOCK;
        if blocks > 0 {
            let mut e = 0u32;
            asm!(
                ".p2align 5",
                "2:",
                "vmovdqu {a}, [{f}]",
                "vmovdqu {b}, [{f} + 32]",
                "vmovdqu {c}, [{f} + 64]",
                "vmovdqu {d}, [{f} + 96]",
                "sub {f}, -128",
                "vmovdqa [{t}], {a}",
                "vmovdqa [{t} + 32], {b}",
                "vmovdqa [{t} + 64], {c}",
                "vmovdqa [{t} + 96], {d}",
                "sub {t}, -128",
                "dec {n}",
                "jnz 2b",
                "3:",
                fixed_up!(),
                a = out(ymm_reg) _,
                b = out(ymm_reg) _,
                c = out(ymm_reg) _,
                d = out(ymm_reg) _,
                f = inout(reg) from,
                t = inout(reg) to,
                n = inout(reg) blocks => _,
                e = inout(reg) e,
                options(nostack),
            );
            if e != 0 {
                return faulted();
            }
            len %= BLOCK;
        }
        while len >= VECTOR {
            step!(from, to, len, 32, ymm_reg, "vmovdqu {v}, [{f}]", "vmovdqa [{t}], {v}");
        }
        if len >= 16 {
            step!(from, to, len, 16, xmm_reg, "vmovdqu {v}, [{f}]", "vmovdqa [{t}], {v}");
        }
        copy_tail(from, to, len)
    }
}

/// `value`, unless `e` was set by the text of [`fixed_up`].
#[inline]
fn unless<T>(e: u32, value: T) -> Result<T, Fault> {
    if e == 0 { Ok(value) } else { Err(Fault) }
}

/// One word's load and store.
macro_rules! words {
    ($($load:ident $store:ident $word:ty, $class:ident, $load_text:literal, $store_text:literal;)*) => {$(
        /// See the function of the same name above.
        #[inline]
        pub(super) unsafe fn $load(at: *const $word) -> Result<$word, Fault> {
            let value;
            let mut e = 0u32;
            // SAFETY: the caller's contract. Not `readonly` and not `pure`: it orders and is not repeated.
            unsafe {
                asm!(
                    "2:",
                    $load_text,
                    "3:",
                    fixed_up!(),
                    v = out($class) value,
                    a = in(reg) at,
                    e = inout(reg) e,
                    options(nostack, preserves_flags),
                );
            }
            unless(e, value)
        }

        /// See the function of the same name above.
        #[inline]
        pub(super) unsafe fn $store(at: *mut $word, value: $word) -> Result<(), Fault> {
            // SAFETY: the caller's contract.
            unsafe {
                asm!(
                    "2:",
                    $store_text,
                    "3:",
                    entry!("{fault}"),
                    v = in($class) value,
                    a = in(reg) at,
                    fault = label { return faulted() },
                    options(nostack, preserves_flags),
                );
            }
            Ok(())
        }
    )*};
}

words! {
    load_u8 store_u8 u8, reg_byte, "mov {v}, byte ptr [{a}]", "mov byte ptr [{a}], {v}";
    load_u16 store_u16 u16, reg, "mov {v:x}, word ptr [{a}]", "mov word ptr [{a}], {v:x}";
    load_u32 store_u32 u32, reg, "mov {v:e}, dword ptr [{a}]", "mov dword ptr [{a}], {v:e}";
    load_u64 store_u64 u64, reg, "mov {v:r}, qword ptr [{a}]", "mov qword ptr [{a}], {v:r}";
}

/// See [`super::compare_exchange_u64`].
#[inline]
pub(super) unsafe fn compare_exchange_u64(at: *mut u64, current: u64, new: u64) -> Result<u64, Fault> {
    let before;
    let mut e = 0u32;
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "2:",
            "lock cmpxchg qword ptr [{a}], {n}",
            "3:",
            fixed_up!(),
            a = in(reg) at,
            n = in(reg) new,
            e = inout(reg) e,
            inout("rax") current => before,
            options(nostack),
        );
    }
    unless(e, before)
}
