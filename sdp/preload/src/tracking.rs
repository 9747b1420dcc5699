//! Which descriptors are the only ones of their socket: the program got the number from `socket` or `accept`, and since then no call
//! that this library replaces has closed or duplicated it, passed it on, or started a process.
//!
//! All bytes of such a socket pass the replaced calls, so the direct path can count them and needs no query to the
//! kernel. Everything here is lock-free: the calls may come from signal handlers and from children of `vfork`.

use std::{
    ffi::CStr,
    os::fd::RawFd,
    ptr, slice,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use libc::{c_int, c_void, dl_phdr_info, size_t};

/// Higher numbers are not tracked.
pub const NUMBERS: usize = 4096;

/// Serial numbers of descriptors: a number of the kernel that is used again gets another one.
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The serial number of the tracked descriptor with this number; 0 if there is none.
static OWNED: [AtomicU64; NUMBERS] = [const { AtomicU64::new(0) }; NUMBERS];
/// A `FILE` of the C library has this number, and reads, writes and closes it without our functions.
static FILES: [AtomicBool; NUMBERS] = [const { AtomicBool::new(false) }; NUMBERS];
/// The program has bound the socket with this number to a port of its choice.
static CHOSEN: [AtomicBool; NUMBERS] = [const { AtomicBool::new(false) }; NUMBERS];
/// Descriptors up to this serial number may be held by other processes.
static SHARED: AtomicU64 = AtomicU64::new(0);
/// Descriptors up to this serial number are those of a parent.
static INHERITED: AtomicU64 = AtomicU64::new(0);
/// The process can use descriptors by calls that bypass this library.
static UNSEEN: AtomicBool = AtomicBool::new(false);

fn place<T>(table: &'static [T; NUMBERS], fd: RawFd) -> Option<&'static T> {
    table.get(usize::try_from(fd).ok()?)
}

/// A new serial number. Taken before the call that makes the descriptor: a fork after that is then newer.
pub fn serial() -> u64 {
    NEXT.fetch_add(1, Ordering::AcqRel)
}

/// The kernel has returned a new descriptor.
pub fn created(fd: RawFd, serial: u64) {
    // The C library closes and replaces the standard descriptors without our functions: by their `FILE`s, and in
    // daemon().
    let seen =
        fd > libc::STDERR_FILENO && !place(&FILES, fd).is_some_and(|file| file.load(Ordering::Acquire));
    if let Some(owned) = place(&OWNED, fd) {
        owned.store(if seen { serial } else { 0 }, Ordering::Release);
    }
    bound(fd, false);
}

/// The program has bound a socket, to a port of its choice or to any.
pub fn bound(fd: RawFd, chosen_port: bool) {
    if let Some(chosen) = place(&CHOSEN, fd)
        && chosen.load(Ordering::Relaxed) != chosen_port
    {
        chosen.store(chosen_port, Ordering::Relaxed);
    }
}

/// Whether the program has bound the socket to a port of its choice, as far as it was seen.
pub fn has_chosen_port(fd: RawFd) -> bool {
    place(&CHOSEN, fd).is_some_and(|chosen| chosen.load(Ordering::Relaxed))
}

/// The descriptor was closed or replaced, is no longer the only one of its socket, or bytes may bypass the count.
pub fn forget(fd: RawFd) {
    if let Some(owned) = place(&OWNED, fd) {
        owned.store(0, Ordering::Release);
    }
}

/// The same for all numbers from `first` to `last`.
pub fn forget_range(first: u32, last: u32) {
    let first = usize::try_from(first).unwrap_or(usize::MAX);
    let last = usize::try_from(last).unwrap_or(usize::MAX);
    OWNED.iter().take(last.saturating_add(1)).skip(first).for_each(|owned| owned.store(0, Ordering::Release));
}

/// Another process gets copies of all descriptors.
pub fn forget_all() {
    SHARED.fetch_max(NEXT.load(Ordering::Acquire) - 1, Ordering::AcqRel);
}

/// From now on, descriptors may be used by calls that bypass this library.
pub fn forget_for_ever() {
    UNSEEN.store(true, Ordering::Release);
}

/// This process is a forked child.
pub fn forked() {
    INHERITED.store(NEXT.load(Ordering::Acquire) - 1, Ordering::Release);
}

/// A `FILE` has taken or released this number.
pub fn has_file(fd: RawFd, has: bool) {
    forget(fd);
    if let Some(file) = place(&FILES, fd) {
        file.store(has, Ordering::Release);
    }
}

/// The serial number of a tracked descriptor; 0 for others.
pub fn serial_of(fd: RawFd) -> u64 {
    place(&OWNED, fd).map_or(0, |owned| owned.load(Ordering::Acquire))
}

/// Whether `fd` still is the descriptor with this serial number, and the only one of its socket.
pub fn is_alone(fd: RawFd, serial: u64) -> bool {
    serial > SHARED.load(Ordering::Acquire) && serial_of(fd) == serial && !UNSEEN.load(Ordering::Acquire)
}

/// Whether this process, not its parent, has taken this serial number.
pub fn is_own(serial: u64) -> bool {
    serial > INHERITED.load(Ordering::Acquire)
}

/// Looks for objects in the process that make system calls of their own: Go's runtime and liburing. Nothing is tracked beside them.
pub fn look_at_objects() {
    /// Number of objects that had ever been loaded at the last check.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let seen = SEEN.load(Ordering::Relaxed);
    let mut loaded = seen;
    // SAFETY: the callback has the right type and gets a pointer to `loaded`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut loaded).cast()) };
    if loaded != seen {
        // SAFETY: the callback has the right type and uses no pointer.
        unsafe { libc::dl_iterate_phdr(Some(look), ptr::null_mut()) };
        SEEN.store(loaded, Ordering::Relaxed);
    }
}

/// Stores how many objects were ever loaded.
unsafe extern "C" fn count(object: *mut dl_phdr_info, _: size_t, loaded: *mut c_void) -> c_int {
    // SAFETY: the C library passes an object; `loaded` is that of `look_at_objects`.
    unsafe { *loaded.cast::<u64>() = (*object).dlpi_adds };
    1
}

unsafe extern "C" fn look(object: *mut dl_phdr_info, _: size_t, _: *mut c_void) -> c_int {
    // SAFETY: the C library passes an object.
    if is_unseen(unsafe { &*object }) {
        forget_for_ever();
    }
    0
}

fn is_unseen(object: &dl_phdr_info) -> bool {
    // SAFETY: the name is null or a string.
    let name = (!object.dlpi_name.is_null()).then(|| unsafe { CStr::from_ptr(object.dlpi_name) });
    if name.is_some_and(|name| name.to_bytes().windows(8).any(|part| part == b"liburing")) {
        return true;
    }
    // SAFETY: the object has this many headers.
    let headers = unsafe { slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
    headers.iter().filter(|header| header.p_type == libc::PT_NOTE).any(|header| {
        let at = ptr::with_exposed_provenance::<u8>((object.dlpi_addr + header.p_vaddr) as usize);
        // SAFETY: notes are loaded with the object.
        has_note_of_go(unsafe { slice::from_raw_parts(at, header.p_memsz as usize) })
    })
}

/// Whether one of these ELF notes is that of Go's linker.
fn has_note_of_go(mut notes: &[u8]) -> bool {
    let word = |bytes: &[u8], at: usize| {
        bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes)
    };
    while let (Some(name), Some(content)) = (word(notes, 0), word(notes, 4)) {
        if notes.get(12..16) == Some(b"Go\0\0") {
            return true;
        }
        let padded = |len: u32| (len as usize).next_multiple_of(4);
        notes = notes.get(12 + padded(name) + padded(content)..).unwrap_or_default();
    }
    false
}
