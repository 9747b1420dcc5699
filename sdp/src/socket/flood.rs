//! The limit of messages that transfer nothing.

use std::time::{Duration, Instant};

/// Messages without payload allowed in a second, if nothing is transferred.
const MAX_IDLE_MESSAGES: u32 = 1000;
/// Further messages for each transfer in either direction. An honest peer answers, updates credit, advertises and
/// changes modes a few times for each.
const MESSAGES_PER_TRANSFER: u32 = 16;

/// Bounds the messages of the peer without payload by a number for each second and each transfer.
pub(super) struct Flood {
    /// Messages that are left in this second.
    left: u32,
    since: Instant,
}

impl Flood {
    pub(super) fn new(now: Instant) -> Self {
        Self { left: MAX_IDLE_MESSAGES + 1, since: now }
    }

    /// A transfer in either direction allows further messages.
    pub(super) fn transferred(&mut self) {
        self.left = self.left.saturating_add(MESSAGES_PER_TRANSFER);
    }

    /// Counts a message; returns whether the limit is exceeded.
    pub(super) fn count(&mut self, now: Instant) -> bool {
        if now >= self.since + Duration::from_secs(1) {
            *self = Self::new(now);
        }
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sdp_s16_messages_that_transfer_nothing_are_limited() {
        let now = Instant::now();
        let mut flood = Flood::new(now);
        assert!((0..1000).all(|_| !flood.count(now)));
        assert!(flood.count(now));
        assert!((0..1000).all(|_| !flood.count(now + Duration::from_secs(1))), "another second");
        flood.transferred();
        assert!((0..16).all(|_| !flood.count(now + Duration::from_secs(1))), "a transfer allows a few");
        assert!(flood.count(now + Duration::from_secs(1)), "and not as many as a second");
    }
}
