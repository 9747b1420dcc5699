//! The environment of the scenario tests: two connections over a virtual wire ([`Pair`]), or one connection and
//! hand-made segments at exact times ([`Script`]). Both use public interfaces only.

mod pair;
mod script;
mod shared;

pub(super) use self::{
    pair::Pair,
    script::{IRS, ISS, Script, offset},
    shared::Shared,
};

use std::{cell::Cell, time::Duration};

use super::{Filled, Isn, Source};
use crate::{
    link::{FrameWriter, QueueId},
    seq::{SeqNum, StreamOffset},
    time::Instant,
    wire::{Flow, Mac, Path, VlanTags},
};

thread_local! {
    /// Whether the fast paths are on in this thread.
    static FAST_PATHS: Cell<bool> = const { Cell::new(true) };
}

/// Whether the fast paths are on: header prediction, and that of new data.
pub(super) fn fast_paths() -> bool {
    FAST_PATHS.get()
}

/// Calls `f` with the [fast paths](fast_paths) on or off.
pub(crate) fn with_fast_paths<T>(on: bool, f: impl FnOnce() -> T) -> T {
    let before = FAST_PATHS.replace(on);
    let result = f();
    FAST_PATHS.set(before);
    result
}

pub(super) fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub(super) fn at_ms(n: u64) -> Instant {
    Instant::ZERO + ms(n)
}

/// First numbers that are not hashed.
pub(crate) fn unhashed(isn: u32) -> Isn {
    Isn { seq: SeqNum::new(isn), stamps: isn }
}

/// The byte at `offset` of every test stream.
pub(super) fn pattern(offset: StreamOffset) -> u8 {
    (offset ^ offset >> 8 ^ offset >> 16).wrapping_mul(0x9d) as u8
}

/// Our path, or the peer's view of it.
pub(super) fn path(here: bool) -> Path {
    let (local, remote) = ("10.0.0.1:4791".parse().unwrap(), "10.0.0.2:50000".parse().unwrap());
    let (local_mac, remote_mac) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
    let flow = if here { Flow { local, remote } } else { Flow { local: remote, remote: local } };
    let (source_mac, next_hop_mac) = if here { (local_mac, remote_mac) } else { (remote_mac, local_mac) };
    Path {
        flow,
        source_mac,
        next_hop: Some(flow.remote.ip()),
        next_hop_mac,
        vlan: VlanTags::default(),
        mtu: 1500,
        queue: QueueId(0),
    }
}

/// A source of `total` bytes of the pattern in units that are never cut, followed by nothing or a FIN.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub total: u64,
    /// Bytes of a unit; 0 fills each segment completely.
    pub unit: usize,
    pub finish: bool,
    /// There may always be data, until one looks.
    pub announced: bool,
    /// The next offset to fill.
    pub at: StreamOffset,
}

impl Stream {
    pub(super) fn new(total: u64, unit: usize, finish: bool) -> Self {
        Self { total, unit, finish, announced: false, at: 0 }
    }
}

impl Source for Stream {
    fn has_data(&self) -> bool {
        self.at < self.total || self.finish
    }

    fn may_have_data(&self) -> bool {
        self.announced || self.has_data()
    }

    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled {
        assert_eq!(offset, self.at, "segments are filled in order");
        if self.at == self.total {
            return if self.finish { Filled::Finish } else { Filled::Nothing };
        }
        let left = (self.total - self.at) as usize;
        let len = if self.unit == 0 { left.min(out.room()) } else { left.min(self.unit) };
        if len > out.room() || len == 0 {
            return Filled::Nothing;
        }
        let bytes: Vec<u8> = (0..len as u64).map(|i| pattern(offset + i)).collect();
        assert_eq!(out.put(&bytes), len);
        self.at += len as u64;
        Filled::Segment { len, more: self.has_data() }
    }
}
