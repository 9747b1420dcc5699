//! Reclaims transmit frames that wait for slow peers when frames are scarce
//! (`docs/decisions/0009-frames-are-shared-by-thresholds.md`).

use super::{MAX_STARVED, Stack};
use crate::{
    link::Link,
    time::{Duration, Instant},
    ulp::{CloseReason, ConnId, Ulp},
};

/// Time for which unacknowledged data keeps its frame when frames are scarce. On a short path, all frames turn over faster:
/// data that is older belongs to a peer that is slow, silent or far away.
const FRAME_AGE: Duration = Duration::from_millis(2);

/// Time between two sweeps while frames are scarce.
const SWEEP_INTERVAL: Duration = FRAME_AGE;

/// Entries of the connection table that one sweep visits. Sweeps visit a table of the default size limit in a quarter of a
/// second.
const SWEEP_CONNECTIONS: usize = 256;

/// Largest number of bytes that one sweep moves; copying them takes about 100 us.
const SWEEP_BYTES: usize = 1 << 20;

/// State of the sweeps over the connection table. Each sweep starts where the last one ended.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    next: usize,
    due: Option<Instant>,
}

impl Sweep {
    /// When the next sweep is due, if frames are scarce.
    #[inline]
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Schedules a sweep, because a connection could not send for lack of frames.
    pub(super) fn request(&mut self, now: Instant) {
        self.due.get_or_insert(now + SWEEP_INTERVAL);
    }
}

impl<U: Ulp> Stack<U> {
    /// Lets waiting connections send: one for each chunk that has become free, and at least one.
    pub(super) fn retry_waiting(&mut self, link: &dyn Link) {
        if self.turns.waiting() > 0 {
            self.retry_some(link);
        }
    }

    #[cold]
    fn retry_some(&mut self, link: &dyn Link) {
        let freed = link.tx_available().saturating_sub(self.free_at_shortage);
        let _ = (0..freed.clamp(1, MAX_STARVED)).all(|_| self.turns.retry_one());
    }

    /// Bytes that may still be moved to the heap.
    fn spill_room(&self) -> usize {
        self.config.most_spilled_bytes.saturating_sub(self.spilled)
    }

    /// Bytes of unacknowledged payload on the heap, of all connections.
    pub fn spilled_bytes(&self) -> usize {
        self.spilled
    }

    /// Moves payloads that have waited for long to the heap. When the heap's share is nearly full, each sweep resets
    /// one connection: the one, among those visited, whose data has been unacknowledged for longest, if for longer
    /// than [`StackConfig::stall_limit`](super::StackConfig::stall_limit).
    pub(super) fn sweep_frames(&mut self, now: Instant, link: &mut dyn Link) {
        if self.sweep.due.is_none_or(|due| due > now) {
            return;
        }
        self.sweep.due = None;
        let before = now - FRAME_AGE;
        let places = self.slots.capacity();
        let mut budget = SWEEP_BYTES;
        let mut oldest: Option<(Instant, u32)> = None;
        for _ in 0..places.min(SWEEP_CONNECTIONS) {
            let index = self.sweep.next % places;
            self.sweep.next = index + 1;
            let room = budget.min(self.spill_room());
            let Some(slot) = self.slots.get_mut(index) else { continue };
            let moved = slot.tcp.spill(link, before, room);
            slot.spilled += moved;
            self.spilled += moved;
            self.counters.spilled_bytes += moved as u64;
            budget -= moved;
            if let Some(since) = slot.tcp.unacknowledged_since() {
                let candidate = (since, index as u32);
                oldest = Some(oldest.map_or(candidate, |oldest| oldest.min(candidate)));
            }
            if moved > 0 {
                // It may have been limited by its own frames.
                self.make_ready(index as u32);
            }
        }
        // Seven eighths count as full, because the remaining room may be smaller than one segment.
        let full = self.spilled >= self.config.most_spilled_bytes / 8 * 7;
        if let Some((since, index)) = oldest.filter(|(since, _)| now.since(*since) > self.config.stall_limit)
            && full
        {
            self.reset_stalled(now, since, index);
        }
    }

    fn reset_stalled(&mut self, now: Instant, since: Instant, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let conn = ConnId { index, generation: slot.generation };
        let (remote, waited) = (slot.tcp.flow().remote, now.since(since));
        tracing::warn!(%remote, ?conn, ?waited, "connection reset: its unacknowledged data retains frames that other connections need");
        slot.tcp.abort_with(CloseReason::TimedOut);
        self.counters.stalled_resets += 1;
        self.make_ready(index);
    }
}
