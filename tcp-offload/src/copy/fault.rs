//! Faults of accesses to shared memory: the page is not mapped any more, is protected, or lies behind the end of its file.
//!
//! The owner of borrowed memory promises to keep it mapped, and breaks the promise at times: it frees a buffer before it
//! deregisters it, or another process truncates the file. The processor then stops at one of the instructions of this module's
//! siblings, and the kernel sends SIGSEGV or SIGBUS. Each of these instructions has an entry in a table, which names where the
//! program may go on instead: there, the access returns [`Fault`]. A signal handler looks up the instruction by [`landing`]. Without
//! such a handler, which this crate does not install, the signal ends the process as before.
//!
//! The table is a section of the object file, so accesses without a fault cost nothing.

/// An access to shared memory that the memory management of the processor has refused. What was copied before it is undefined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the memory is not mapped, or is protected")]
pub struct Fault;

/// The text that adds an entry for the instructions from label 2 to label 3 of an `asm!` block: they land at `$landing`.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
macro_rules! entry {
    ($landing:literal) => {
        concat!(
            // Kept by the linker ("R"), because no code refers to single entries.
            ".pushsection xwarp_faults, \"aR\", @progbits\n",
            ".balign 4\n",
            ".long 2b - .\n",
            ".long 3b - .\n",
            ".long ",
            $landing,
            " - .\n",
            ".popsection",
        )
    };
}
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
pub(super) use entry;

/// An entry of the table: distances from each field to the address that it names.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[repr(C)]
struct Entry {
    /// The first instruction.
    from: i32,
    /// The end of the last one.
    to: i32,
    landing: i32,
}

#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
impl Entry {
    fn address(field: &i32) -> usize {
        std::ptr::from_ref(field).addr().wrapping_add_signed(*field as isize)
    }
}

/// All entries of this program or library.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
fn table() -> &'static [Entry] {
    use std::arch::asm;

    let (start, end): (*const Entry, *const Entry);
    // SAFETY: only loads two addresses, which the linker defines. The empty entry makes sure that there is a section.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!(
            "2:",
            "3:",
            entry!("2b"),
            ".hidden __start_xwarp_faults",
            ".hidden __stop_xwarp_faults",
            "lea {start}, [rip + __start_xwarp_faults]",
            "lea {end}, [rip + __stop_xwarp_faults]",
            start = out(reg) start,
            end = out(reg) end,
            options(nomem, nostack, preserves_flags),
        );
        #[cfg(target_arch = "aarch64")]
        asm!(
            "2:",
            "3:",
            entry!("2b"),
            ".hidden __start_xwarp_faults",
            ".hidden __stop_xwarp_faults",
            "adrp {start}, __start_xwarp_faults",
            "add {start}, {start}, :lo12:__start_xwarp_faults",
            "adrp {end}, __stop_xwarp_faults",
            "add {end}, {end}, :lo12:__stop_xwarp_faults",
            start = out(reg) start,
            end = out(reg) end,
            options(nomem, nostack, preserves_flags),
        );
    }
    let len = (end.addr() - start.addr()) / size_of::<Entry>();
    // SAFETY: the section consists of entries, and is never written.
    unsafe { std::slice::from_raw_parts(start, len) }
}

/// Where the program may go on if the instruction at this address has faulted: the access then returns [`Fault`]. `None` if it is
/// not an instruction that accesses shared memory.
///
/// For handlers of SIGSEGV and SIGBUS: it allocates nothing, locks nothing and may be called at any time.
pub fn landing(instruction: usize) -> Option<usize> {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
    {
        let named =
            |entry: &&Entry| (Entry::address(&entry.from)..Entry::address(&entry.to)).contains(&instruction);
        table().iter().find(named).map(|entry| Entry::address(&entry.landing))
    }
    #[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
    {
        let _ = instruction;
        None
    }
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod tests;
