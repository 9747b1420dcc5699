//! Gathering: while an application polls and a connection has data in flight, small posts wait for the next poll, so that
//! several messages share a segment and several segments a kick (`docs/decisions/0012-*`).

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use xwarp_rnic::rnic::{Operation, Payload, WorkRequest};
use xwarp_tcp::time::Instant;

use crate::system::Clock;

/// Longest time that a post waits while the application continues to post or poll.
const LIMIT: Duration = Duration::from_micros(50);
/// Number of full segments at which gathered posts are sent.
const SEGMENTS: usize = 4;
/// Number of messages at which gathered posts are sent. With large segments, a send queue full of small messages would
/// be one segment, and the two ends would work in turn instead of at the same time. More bytes than in four segments of
/// 1500 are not too many: larger frames carry the bytes of larger messages in less time.
const MESSAGES: u64 = 64;
/// Number of messages after which a post checks whether the first one has waited long enough. Not every post checks,
/// because reading the clock takes as long as a post.
const MESSAGES_PER_LOOK: u64 = 8;
/// Estimate of the bytes that framing adds to a message: MPA's length, pad and CRC, and DDP's header.
const FRAMING_BYTES: usize = 26;
/// Value of `until` while no post waits.
const NOTHING: u64 = 0;

/// The waiting posts. Changed under the engine's lock only.
#[derive(Debug)]
pub(super) struct Gathered {
    /// The time at which the posts are sent without another poll, in nanoseconds of the device's clock.
    until: AtomicU64,
    /// The messages, and their bytes on the wire.
    messages: AtomicU64,
    bytes: AtomicU64,
    /// Posts waited since the progress thread last asked.
    lately: AtomicBool,
}

impl Gathered {
    pub(super) fn new() -> Self {
        Self {
            until: AtomicU64::new(NOTHING),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            lately: AtomicBool::new(false),
        }
    }

    /// Adds posts to the waiting ones. Returns false if all of them must be sent now: they fill segments of `emss`
    /// bytes, are many, or the first one has waited long enough.
    pub(super) fn add<'a>(
        &self,
        clock: &Clock,
        requests: impl ExactSizeIterator<Item = WorkRequest<'a>>,
        emss: usize,
    ) -> bool {
        let number = requests.len() as u64;
        let bytes = requests.map(|request| wire_bytes(&request)).fold(0, usize::saturating_add);
        let total = self.bytes.load(Ordering::Relaxed).saturating_add(bytes as u64);
        let before = self.messages.load(Ordering::Relaxed);
        let messages = before + number;
        let looks = messages / MESSAGES_PER_LOOK > before / MESSAGES_PER_LOOK;
        if total >= (SEGMENTS * emss) as u64 || messages >= MESSAGES || looks && self.is_due(clock.now()) {
            return false;
        }
        self.bytes.store(total, Ordering::Relaxed);
        self.messages.store(messages, Ordering::Relaxed);
        if !self.any() {
            self.until.store((clock.now() + LIMIT).as_nanos(), Ordering::Relaxed);
            self.lately.store(true, Ordering::Relaxed);
        }
        true
    }

    /// All posts were sent.
    pub(super) fn clear(&self) {
        if self.any() {
            self.until.store(NOTHING, Ordering::Relaxed);
            self.messages.store(0, Ordering::Relaxed);
            self.bytes.store(0, Ordering::Relaxed);
        }
    }

    /// Whether posts wait.
    pub(super) fn any(&self) -> bool {
        self.until.load(Ordering::Relaxed) != NOTHING
    }

    /// Whether waiting posts must be sent.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until != NOTHING && now.as_nanos() >= until
    }

    /// Whether posts have waited since the last call.
    pub(super) fn lately(&self) -> bool {
        self.lately.swap(false, Ordering::Relaxed)
    }
}

/// Estimate of the bytes of a request on the wire.
fn wire_bytes(request: &WorkRequest<'_>) -> usize {
    let payload = match (&request.operation, &request.payload) {
        (
            Operation::Send { .. }
            | Operation::SendImmediate { .. }
            | Operation::Write { .. }
            | Operation::WriteImmediate { .. },
            payload,
        ) => match payload {
            Payload::Inline(bytes) => bytes.len(),
            payload => payload.pieces().iter().map(|piece| piece.len as usize).sum(),
        },
        _ => 0,
    };
    payload.saturating_add(FRAMING_BYTES)
}
