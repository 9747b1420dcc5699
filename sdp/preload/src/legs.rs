//! The names of connections: from the addresses of a socket that is joined to a leg to those of its connection over SDP.
//!
//! The table lies in memory whose descriptor stays open across `exec`: a program that is started with the library finds it, maps it for
//! reads, and recognises its sockets by their cookies. A program without the table sees addresses of its own host, never of the
//! loopback, as those of a remote peer.
//!
//! The table lies in memory that forked children share, and is read without a lock: a child may name connections that its
//! parent has made, before and after the fork, and a signal handler may interrupt a writer. An entry whose words are being
//! written has an odd version.

use std::{
    fs,
    net::{Ipv6Addr, SocketAddr},
    os::fd::{AsFd, RawFd},
    ptr, slice,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap},
};

use crate::{numbers, sys};

/// Entries of the table. Only those that are used take memory.
const ENTRIES: usize = 65536;
/// Entries of a bucket.
const BUCKET: usize = 16;
/// Words of an address: 16 bytes, then the port.
const WORDS: usize = 3;
/// Words of an entry.
const ALL: usize = 4 * WORDS + 1;
/// Bytes of a table, whose entries begin behind the first page.
const FIRST_PAGE: usize = 4096;
const TABLE_BYTES: usize = FIRST_PAGE + ENTRIES * size_of::<Entry>();
/// The name by which a program finds the tables of those before it, and how many it looks at.
const NAME: &str = "xwarp-sdp-names";
const MOST_INHERITED: usize = 16;

/// Local and peer address.
pub type Names = (SocketAddr, SocketAddr);

#[repr(C)]
struct Entry {
    version: AtomicU32,
    /// The connection has ended: the entry makes room first.
    ended: AtomicBool,
    /// The socket's own two addresses, those of the connection over SDP, and the socket's cookie.
    words: [AtomicU64; ALL],
}

/// The table of this process and its forked children, and those that it has inherited by `exec`.
struct Tables {
    own: &'static [Entry],
    used: &'static AtomicU64,
    inherited: Vec<&'static [Entry]>,
}

static TABLES: OnceLock<Option<Tables>> = OnceLock::new();

/// Maps a table: its first page has the word that says whether it was used.
fn map(memory: impl AsFd, protection: ProtFlags) -> Option<(&'static AtomicU64, &'static [Entry])> {
    // SAFETY: a new mapping, which is never unmapped.
    let map = unsafe { mmap(ptr::null_mut(), TABLE_BYTES, protection, MapFlags::SHARED, memory, 0) }.ok()?;
    // SAFETY: the mapping has this length, is aligned to a page, and any bytes are valid atomics. Those of a mapping for reads are
    // only loaded.
    unsafe {
        let entries = slice::from_raw_parts(map.byte_add(FIRST_PAGE).cast::<Entry>(), ENTRIES);
        Some((&*map.cast::<AtomicU64>(), entries))
    }
}

/// Nobody can write to a table by its descriptor: only its process and forked children have a mapping from before this seal.
const SEALS: SealFlags = SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Makes a table that programs which are started by `exec` find among their descriptors.
fn make() -> Option<(&'static AtomicU64, &'static [Entry])> {
    let memory = memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    ftruncate(&memory, TABLE_BYTES as u64).ok()?;
    let made = map(&memory, ProtFlags::READ | ProtFlags::WRITE)?;
    if fcntl_add_seals(&memory, SEALS).is_ok() {
        sys::keep_across_exec(&memory, numbers::LEAST);
    }
    Some(made)
}

/// The tables among the descriptors that this program got by `exec`. One that was never used is closed.
fn inherited() -> Vec<&'static [Entry]> {
    let Ok(descriptors) = fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let name = format!("/memfd:{NAME} (deleted)");
    let is_table =
        |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == name.as_str());
    let numbers = descriptors.flatten().filter(is_table);
    let numbers: Vec<RawFd> = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let tables = numbers.into_iter().take(MOST_INHERITED).filter_map(|number| {
        let memory = sys::borrow(number)?;
        let status = fstat(memory).ok()?;
        // One that another user has made, and passed to our parent, may lie.
        let owner = [0, rustix::process::geteuid().as_raw()].contains(&status.st_uid);
        let sealed = fcntl_get_seals(memory).is_ok_and(|seals| seals.contains(SEALS));
        if !owner || !sealed || status.st_size != TABLE_BYTES as i64 {
            return None;
        }
        let (used, entries) = map(memory, ProtFlags::READ)?;
        if used.load(Ordering::Acquire) == 0 {
            sys::close(number);
            return None;
        }
        Some(entries)
    });
    tables.collect()
}

/// Finds the tables of the programs before this one, and creates its own, before the first fork.
pub fn init() {
    TABLES.get_or_init(|| {
        let inherited = inherited();
        make().map(|(used, own)| Tables { own, used, inherited })
    });
}

fn tables() -> Option<&'static Tables> {
    TABLES.get()?.as_ref()
}

/// From now on, this process and its children may have connections over SDP.
pub fn will_be_used() {
    if let Some(tables) = tables() {
        tables.used.store(1, Ordering::Release);
    }
}

/// Whether there may be connections over SDP.
pub fn are_used() -> bool {
    tables().is_some_and(|tables| tables.used.load(Ordering::Acquire) != 0 || !tables.inherited.is_empty())
}

fn encode(address: SocketAddr) -> [u64; WORDS] {
    let bits = sys::mapped(address.ip()).to_bits();
    [(bits >> 64) as u64, bits as u64, u64::from(address.port())]
}

fn decode(words: [u64; WORDS]) -> SocketAddr {
    let [high, low, port] = words;
    let ip = Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low));
    SocketAddr::new(ip.to_canonical(), port as u16)
}

fn words(names: Names) -> [u64; 2 * WORDS] {
    let mut words = [0; 2 * WORDS];
    words[..WORDS].copy_from_slice(&encode(names.0));
    words[WORDS..].copy_from_slice(&encode(names.1));
    words
}

/// Index of the first entry of the bucket for a socket with these addresses. Ports of the loopback are close to each
/// other, and often all even or all odd.
fn bucket(socket: Names) -> usize {
    let ports = u32::from(socket.0.port()) << 16 | u32::from(socket.1.port());
    let mixed = (ports ^ ports >> 15).wrapping_mul(0x9e37_79b1);
    (mixed >> 16) as usize % (ENTRIES / BUCKET) * BUCKET
}

impl Entry {
    fn load(&self) -> Option<[u64; ALL]> {
        let version = self.version.load(Ordering::Acquire);
        let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (version & 1 == 0 && version != 0 && self.version.load(Ordering::Relaxed) == version).then_some(words)
    }

    /// Writes the entry, unless another thread or process is writing it.
    fn store(&self, version: u32, words: [u64; ALL]) -> bool {
        let begun = self.version.compare_exchange(
            version,
            version.wrapping_add(1),
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
        if version & 1 == 1 || begun.is_err() {
            return false;
        }
        fence(Ordering::Release);
        for (to, from) in self.words.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
        // Never zero, which marks an unused entry.
        self.version.store(version.wrapping_add(2).max(2), Ordering::Release);
        true
    }
}

fn in_bucket(table: &'static [Entry], socket: Names) -> &'static [Entry] {
    table.get(bucket(socket)..).and_then(|rest| rest.get(..BUCKET)).unwrap_or_default()
}

/// Stores that the socket with the addresses `socket` (its own, then its peer's) is the connection `names` over SDP. `cookie` is
/// that of the socket, 0 if it is not known.
pub fn insert(socket: Names, names: Names, cookie: u64) {
    let Some(tables) = tables() else { return };
    will_be_used();
    let entries = in_bucket(tables.own, socket);
    let key = words(socket);
    let mut all = [0; ALL];
    all[..2 * WORDS].copy_from_slice(&key);
    all[2 * WORDS..4 * WORDS].copy_from_slice(&words(names));
    all[4 * WORDS] = cookie;
    // The same socket's old entry first, then one that was never written or whose connection has ended, and then one that was written
    // least often.
    let same = |entry: &&Entry| entry.load().is_some_and(|words| words[..2 * WORDS] == key);
    let version = |entry: &&Entry| entry.version.load(Ordering::Relaxed);
    let age = |entry: &&Entry| {
        let version = version(entry);
        (version != 0 && !entry.ended.load(Ordering::Relaxed), version)
    };
    for _ in 0..BUCKET {
        let place = entries.iter().find(same).or_else(|| entries.iter().min_by_key(age));
        let Some(place) = place else { return };
        place.ended.store(false, Ordering::Relaxed);
        if place.store(version(&place), all) {
            return;
        }
    }
}

/// The connection of the socket with these addresses has ended: its entry may be used again. Until then the names are those of the
/// socket with its cookie.
pub fn ended(socket: Names) {
    let Some(tables) = tables() else { return };
    let key = words(socket);
    let same = |entry: &&Entry| entry.load().is_some_and(|words| words[..2 * WORDS] == key);
    if let Some(entry) = in_bucket(tables.own, socket).iter().find(same) {
        entry.ended.store(true, Ordering::Release);
    }
}

/// The connection over SDP of the socket with these addresses and this cookie. While its leg exists, no other socket has the
/// addresses; later, and in the table of another program, only the cookie shows that it is the same socket.
pub fn find(socket: Names, cookie: impl Fn() -> Option<u64>) -> Option<Names> {
    let tables = tables()?;
    let key = words(socket);
    let look = |table: &'static [Entry], is_own: bool| {
        let found = in_bucket(table, socket).iter().filter_map(|entry| Some((entry, entry.load()?)));
        let (entry, words) = found.into_iter().find(|(_, words)| words[..2 * WORDS] == key)?;
        let lasts = match words[4 * WORDS] {
            0 => is_own && !entry.ended.load(Ordering::Acquire),
            known => cookie() == Some(known),
        };
        lasts.then_some(words)
    };
    let found =
        look(tables.own, true).or_else(|| tables.inherited.iter().find_map(|table| look(table, false)))?;
    let (local, peer) = found[2 * WORDS..4 * WORDS].split_at(WORDS);
    Some((decode(local.try_into().ok()?), decode(peer.try_into().ok()?)))
}
