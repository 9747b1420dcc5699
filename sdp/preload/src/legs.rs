//! The names of connections: from the addresses of a socket on the loopback to those of its connection over SDP.
//!
//! The table lies in memory that forked children share, and is read without a lock: a child may name connections that its
//! parent has made, before and after the fork, and a signal handler may interrupt a writer. An entry whose words are being
//! written has an odd version.

use std::{
    net::{Ipv6Addr, SocketAddr},
    ptr, slice,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence},
    },
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::sys;

/// Entries of the table. Only those that are used take memory.
const ENTRIES: usize = 65536;
/// Entries of a bucket.
const BUCKET: usize = 16;
/// Words of an address: 16 bytes, then the port.
const WORDS: usize = 3;

/// Local and peer address.
pub type Names = (SocketAddr, SocketAddr);

#[repr(C)]
struct Entry {
    version: AtomicU32,
    /// The connection has ended: the entry makes room first.
    ended: AtomicBool,
    /// The socket's own two addresses, then those of the connection over SDP.
    words: [AtomicU64; 4 * WORDS],
}

fn table() -> Option<&'static [Entry]> {
    static TABLE: OnceLock<Option<&'static [Entry]>> = OnceLock::new();
    *TABLE.get_or_init(|| {
        // SAFETY: a new mapping, which is never unmapped.
        let map = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                ENTRIES * size_of::<Entry>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
            )
        };
        // SAFETY: the mapping has this length, is aligned to a page, and zeroed atomics are valid.
        map.ok().map(|map| unsafe { slice::from_raw_parts(map.cast::<Entry>(), ENTRIES) })
    })
}

/// Creates the table, before the first fork.
pub fn init() {
    table();
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
    fn load(&self) -> Option<[u64; 4 * WORDS]> {
        let version = self.version.load(Ordering::Acquire);
        let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (version & 1 == 0 && version != 0 && self.version.load(Ordering::Relaxed) == version).then_some(words)
    }

    /// Writes the entry, unless another thread or process is writing it.
    fn store(&self, version: u32, words: [u64; 4 * WORDS]) -> bool {
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

/// Stores that the socket with the addresses `socket` (its own, then its peer's) is the connection `names` over SDP.
pub fn insert(socket: Names, names: Names) {
    let Some(table) = table() else { return };
    let Some(entries) = table.get(bucket(socket)..).and_then(|rest| rest.get(..BUCKET)) else { return };
    let key = words(socket);
    let mut all = [0; 4 * WORDS];
    all[..2 * WORDS].copy_from_slice(&key);
    all[2 * WORDS..].copy_from_slice(&words(names));
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

/// The connection of the socket with these addresses has ended. Its names stay until others need the room.
pub fn ended(socket: Names) {
    let Some(entries) = table().and_then(|table| table.get(bucket(socket)..)?.get(..BUCKET)) else { return };
    let key = words(socket);
    let same = |entry: &&Entry| entry.load().is_some_and(|words| words[..2 * WORDS] == key);
    if let Some(entry) = entries.iter().find(same) {
        entry.ended.store(true, Ordering::Relaxed);
    }
}

/// The connection over SDP of the socket with these addresses.
pub fn find(socket: Names) -> Option<Names> {
    let entries = table()?.get(bucket(socket)..)?.get(..BUCKET)?;
    let key = words(socket);
    let found = entries.iter().filter_map(Entry::load).find(|words| words[..2 * WORDS] == key)?;
    let (local, peer) = found[2 * WORDS..].split_at(WORDS);
    Some((decode(local.try_into().ok()?), decode(peer.try_into().ok()?)))
}
