//! The memory limit for received bytes that cannot be placed or delivered yet: all connections share
//! [`StackConfig::most_held_bytes`].

use super::Stack;
#[cfg(doc)]
use super::StackConfig;
use crate::{
    framing::either,
    link::Link,
    time::Instant,
    ulp::{ConnId, Ulp},
};

impl<U: Ulp> Stack<U> {
    /// Bytes that may be held in addition to those held now. When fewer than the `wanted` bytes of a payload are
    /// free, the connection with the oldest held bytes is evicted first, if those are at least
    /// [`StackConfig::gap_age`] old.
    pub(super) fn spare_hold(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        wanted: usize,
        ulp: &mut U,
    ) -> usize {
        let spare = self.config.most_held_bytes.saturating_sub(self.held);
        if spare < wanted
            && let Some((oldest, since)) = self.holders.oldest()
            && now.since(since) >= self.config.gap_age
        {
            self.shed(now, link, oldest, ulp);
        }
        self.config.most_held_bytes.saturating_sub(self.held)
    }

    /// Updates the shares of connection `index` in the memory that connections share.
    pub(super) fn count_memory(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let (held, spilled) = (either!(&slot.session => held_bytes()), slot.tcp.spilled_bytes());
        if (held | slot.held) != 0 {
            self.held = self.held + held - std::mem::replace(&mut slot.held, held);
            self.holders.note(index, either!(&slot.session => stalled_since()));
        }
        self.spilled = self.spilled + spilled - std::mem::replace(&mut slot.spilled, spilled);
    }

    /// Drops the bytes that connection `index` holds beyond a gap. When it holds none there, its stream is
    /// terminated.
    fn shed(&mut self, now: Instant, link: &mut dyn Link, index: u32, ulp: &mut U) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let conn = ConnId { index, generation: slot.generation };
        self.counters.holders_evicted += 1;
        if either!(&mut slot.session => shed(ulp, conn, link)) {
            slot.tcp.renege();
        }
        slot.tcp.withheld(either!(&slot.session => window_bytes()));
        self.after_change(now, link, index, None, ulp);
    }
}
