//! ARMv8 (64 bits): moves through general and vector registers; `ldar` and `stlr` where an order is guaranteed.

use std::arch::asm;

use super::fault::{Fault, entry};

/// See [`super::read`].
#[inline]
pub(super) unsafe fn read(from: *const u8, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract for `from`; `out` is exclusive for its length.
    unsafe { copy(from, out.as_mut_ptr(), out.len()) }
}

/// See [`super::write`].
#[inline]
pub(super) unsafe fn write(to: *mut u8, bytes: &[u8]) -> Result<(), Fault> {
    // SAFETY: the caller's contract for `to`; `bytes` is readable for its length.
    unsafe { copy(bytes.as_ptr(), to, bytes.len()) }
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
            fault = label { return Err(Fault) },
            options(nostack, preserves_flags),
        );
        $from = $from.add($size);
        $to = $to.add($size);
        $len -= $size;
    };
}

/// Copies `len` bytes that do not overlap, each once.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes as far as the machine is concerned.
#[inline]
#[expect(unused_assignments, reason = "the last step advances like the others")]
unsafe fn copy(mut from: *const u8, mut to: *mut u8, mut len: usize) -> Result<(), Fault> {
    // SAFETY: every step moves bytes that lie within the `len` bytes which are left.
    unsafe {
        while len >= 64 {
            asm!(
                "2:",
                "ldp {a:q}, {b:q}, [{f}]",
                "ldp {c:q}, {d:q}, [{f}, #32]",
                "stp {a:q}, {b:q}, [{t}]",
                "stp {c:q}, {d:q}, [{t}, #32]",
                "3:",
                entry!("{fault}"),
                a = out(vreg) _,
                b = out(vreg) _,
                c = out(vreg) _,
                d = out(vreg) _,
                f = in(reg) from,
                t = in(reg) to,
                fault = label { return Err(Fault) },
                options(nostack, preserves_flags),
            );
            from = from.add(64);
            to = to.add(64);
            len -= 64;
        }
        while len >= 16 {
            step!(from, to, len, 16, vreg, "ldr {v:q}, [{f}]", "str {v:q}, [{t}]");
        }
        if len >= 8 {
            step!(from, to, len, 8, reg, "ldr {v:x}, [{f}]", "str {v:x}, [{t}]");
        }
        if len >= 4 {
            step!(from, to, len, 4, reg, "ldr {v:w}, [{f}]", "str {v:w}, [{t}]");
        }
        if len >= 2 {
            step!(from, to, len, 2, reg, "ldrh {v:w}, [{f}]", "strh {v:w}, [{t}]");
        }
        if len >= 1 {
            step!(from, to, len, 1, reg, "ldrb {v:w}, [{f}]", "strb {v:w}, [{t}]");
        }
    }
    Ok(())
}

/// As on x86-64.
macro_rules! fixed_up {
    () => {
        concat!(
            ".pushsection .text.xwarp_faults, \"ax\", @progbits\n",
            "4: mov {e:w}, #1\n",
            "b 3b\n",
            ".popsection\n",
            entry!("4b"),
        )
    };
}

/// `value`, unless `e` was set by the text of [`fixed_up`].
#[inline]
fn unless<T>(e: u32, value: T) -> Result<T, Fault> {
    if e == 0 { Ok(value) } else { Err(Fault) }
}

/// One word's load and store.
macro_rules! words {
    ($($load:ident $store:ident $word:ty, $load_text:literal, $store_text:literal;)*) => {$(
        /// See the function of the same name above.
        #[inline]
        pub(super) unsafe fn $load(at: *const $word) -> Result<$word, Fault> {
            let value: $word;
            let mut e = 0u32;
            // SAFETY: the caller's contract. Not `readonly` and not `pure`: it orders and is not repeated.
            unsafe {
                asm!(
                    "2:",
                    $load_text,
                    "3:",
                    fixed_up!(),
                    v = out(reg) value,
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
                    v = in(reg) value,
                    a = in(reg) at,
                    fault = label { return Err(Fault) },
                    options(nostack, preserves_flags),
                );
            }
            Ok(())
        }
    )*};
}

words! {
    load_u8 store_u8 u8, "ldarb {v:w}, [{a}]", "stlrb {v:w}, [{a}]";
    load_u16 store_u16 u16, "ldarh {v:w}, [{a}]", "stlrh {v:w}, [{a}]";
    load_u32 store_u32 u32, "ldar {v:w}, [{a}]", "stlr {v:w}, [{a}]";
    load_u64 store_u64 u64, "ldar {v:x}, [{a}]", "stlr {v:x}, [{a}]";
}

/// See [`super::compare_exchange_u64`].
#[inline]
pub(super) unsafe fn compare_exchange_u64(at: *mut u64, current: u64, new: u64) -> Result<u64, Fault> {
    let before: u64;
    let mut e = 0u32;
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "2:",
            "ldaxr {b}, [{a}]",
            "cmp {b}, {c}",
            "b.ne 5f",
            "stlxr {s:w}, {n}, [{a}]",
            "cbnz {s:w}, 2b",
            "b 3f",
            "5:",
            "clrex",
            "3:",
            fixed_up!(),
            a = in(reg) at,
            b = out(reg) before,
            c = in(reg) current,
            n = in(reg) new,
            s = out(reg) _,
            e = inout(reg) e,
            options(nostack),
        );
    }
    unless(e, before)
}
