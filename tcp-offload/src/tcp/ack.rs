//! When to acknowledge (RFC 9293 section 3.8.6.3, RFC 5681 section 4.2, and the project's rules of
//! `docs/decisions/0002-acknowledgements-wait-for-an-idle-turn.md`).

use std::time::Duration;

use super::TcpConfig;
use crate::time::Instant;

/// Number of ACKs that follow the rules of RFC 5681 on a new connection, after a gap and after a [`PAUSE`].
const QUICK_ACKS: u16 = 16;

/// Largest number of ACKs sent by these rules after one was held while the peer was silent.
const MAX_QUICK_ACKS: u16 = 1024;

/// Full segments between two of these ACKs (RFC 5681 section 4.2).
const QUICK_EVERY: usize = 2;

/// A segment of fewer bytes never counts as full: the largest segment of a peer that sends only short messages is itself short.
/// This is the default MSS of RFC 9293 section 3.7.1.
const LEAST_FULL: usize = 536;

/// After this time without payload, the peer's congestion window may be small again: RFC 5681 section 4.1 lets it restart after a
/// retransmission time-out, and few implementations have one of less than 200 ms.
const PAUSE: Duration = Duration::from_millis(100);

/// The pending ACK, and its urgency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owed {
    Nothing,
    /// The ACK of a single short segment, which waits for the application's answer also when the engine is idle.
    Answer,
    /// An ACK of segments after which the peer had more to send. While the application polls, it waits for those.
    Held,
    /// An ACK that may wait for data to carry it.
    Pending,
    /// An ACK that is sent with the next transmission.
    Now,
}

/// The delayed-ACK state of one connection.
#[derive(Debug, Clone)]
pub(super) struct AckPolicy {
    owed: Owed,
    /// Bytes taken since the last ACK.
    bytes: usize,
    /// The time at which payload was last taken in order.
    taken_at: Instant,
    /// ACKs that are still sent by the rules of RFC 5681.
    quick: u16,
    /// The value of `quick` after the next ACK that is held while the peer is silent.
    penalty: u16,
}

impl AckPolicy {
    /// The state of a new connection.
    pub(super) fn new(now: Instant) -> Self {
        Self { owed: Owed::Nothing, bytes: 0, taken_at: now, quick: QUICK_ACKS, penalty: 1 }
    }

    /// The state after the quick ACKs of a new connection.
    #[cfg(test)]
    pub(super) fn settled(now: Instant) -> Self {
        Self { quick: 0, ..Self::new(now) }
    }

    /// Records payload that was taken in order. The ACK is due once the bytes of `ack_every` segments of `full` bytes are
    /// unacknowledged, or a quarter of the advertised window, of which `window` bytes are left. Until then it is held, unless the
    /// peer `pushed` the payload; with an `answer_delay`, that of a single pushed segment that is not full waits for the
    /// application's answer. Returns the time after which the ACK is due, if its timer has to be armed.
    #[expect(
        clippy::inline_always,
        reason = "its caller knows some arguments; a call takes 38 instructions more"
    )]
    #[inline(always)]
    pub(super) fn in_order(
        &mut self,
        now: Instant,
        len: usize,
        pushed: bool,
        full: usize,
        window: usize,
        config: &TcpConfig,
    ) -> Option<Duration> {
        if now.since(self.taken_at) >= PAUSE {
            self.quick = self.quick.max(QUICK_ACKS);
        }
        self.taken_at = now;
        self.bytes += len;
        let quick = self.quick > 0;
        let every = config.ack_every as usize;
        let least = QUICK_EVERY.min(every) * full;
        let enough = |bytes: usize| quick || bytes >= (every * full).min((window + bytes) / 4);
        let due = self.bytes >= least && enough(self.bytes);
        let held = !quick && !pushed && !due;
        if self.owed == Owed::Held && !held {
            self.penalty = 1;
        }
        match self.owed {
            _ if due => {
                self.owed = Owed::Now;
                None
            }
            Owed::Nothing | Owed::Answer if held => {
                self.owed = Owed::Held;
                Some(config.ack_hold)
            }
            Owed::Nothing
                if config.answer_delay.is_some()
                    && !quick
                    && pushed
                    && (self.bytes < LEAST_FULL || self.bytes < full) =>
            {
                self.owed = Owed::Answer;
                config.answer_delay
            }
            Owed::Nothing | Owed::Answer => {
                self.owed = Owed::Pending;
                Some(config.delayed_ack)
            }
            Owed::Held if !held => {
                self.owed = Owed::Pending;
                None
            }
            Owed::Held | Owed::Pending | Owed::Now => None,
        }
    }

    /// Makes an ACK due at once.
    pub(super) fn now(&mut self) {
        self.owed = Owed::Now;
    }

    /// Makes an ACK due at once, and quickens the next ones: segments have been lost or reordered, so the peer's congestion
    /// window may be small.
    pub(super) fn disturbed(&mut self) {
        self.owed = Owed::Now;
        self.quick = self.quick.max(QUICK_ACKS);
    }

    /// Makes a held or delayed ACK due now, unless it waits for an answer. Returns whether an ACK is due.
    pub(super) fn flush(&mut self) -> bool {
        if let Owed::Held | Owed::Pending = self.owed {
            self.owed = Owed::Now;
        }
        self.owed == Owed::Now
    }

    /// Makes the ACK that is owed due now, because its timer has expired. If the peer has been silent since `silent_since`, it
    /// may have waited for the held one: the next ACKs are not held, twice as many each time until one was held with success.
    pub(super) fn expire(&mut self, silent_since: Instant) {
        if self.owed == Owed::Held {
            if self.taken_at <= silent_since {
                self.quick = self.quick.max(self.penalty);
                self.penalty = (2 * self.penalty).min(MAX_QUICK_ACKS);
            } else {
                self.penalty = 1;
            }
        }
        if self.owed != Owed::Nothing {
            self.owed = Owed::Now;
        }
    }

    /// Whether data was taken since the last ACK.
    pub(super) fn is_owed(&self) -> bool {
        self.owed != Owed::Nothing
    }

    /// Whether the ACK waits for the application's answer only.
    pub(super) fn awaits_answer(&self) -> bool {
        self.owed == Owed::Answer
    }

    pub(super) fn is_held(&self) -> bool {
        self.owed == Owed::Held
    }

    pub(super) fn is_due(&self) -> bool {
        self.owed == Owed::Now
    }

    /// Records that a segment with the current acknowledgment number was sent.
    pub(super) fn sent(&mut self) {
        if self.owed != Owed::Nothing {
            self.owed = Owed::Nothing;
            self.bytes = 0;
            self.quick = self.quick.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: usize = 1 << 20;
    const BEFORE: Instant = Instant::from_nanos(0);
    const NOW: Instant = Instant::from_nanos(1);
    /// The times of the timers in [`answered`].
    const HOLD: Option<Duration> = Some(Duration::from_micros(50));
    const DELAY: Option<Duration> = Some(Duration::from_millis(1));
    const ANSWER: Option<Duration> = Some(Duration::from_millis(40));

    /// Takes a full segment of 1000 bytes.
    fn take(ack: &mut AckPolicy, pushed: bool) -> Option<Duration> {
        ack.in_order(NOW, 1000, pushed, 1000, WINDOW, &config())
    }

    fn config() -> TcpConfig {
        TcpConfig { ack_every: 8, ..TcpConfig::default() }
    }

    fn answered() -> TcpConfig {
        TcpConfig { answer_delay: ANSWER, ..config() }
    }

    /// Takes a pushed segment of 100 bytes, of a peer whose segments are answered.
    fn take_answered(ack: &mut AckPolicy) -> Option<Duration> {
        ack.in_order(NOW, 100, true, 1000, WINDOW, &answered())
    }

    #[test]
    fn the_ack_of_a_single_short_segment_waits_for_the_answer() {
        let mut ack = AckPolicy::settled(NOW);
        assert_eq!(take_answered(&mut ack), ANSWER);
        assert!(ack.awaits_answer() && ack.is_owed() && !ack.flush(), "an idle turn does not send it");
        ack.sent();
        assert!(!ack.is_owed());
        assert_eq!(take_answered(&mut ack), ANSWER);
        ack.expire(BEFORE);
        assert!(ack.is_due());
        ack.sent();
        assert_eq!(ack.in_order(NOW, 1000, true, 1000, WINDOW, &answered()), DELAY, "a full one");
    }

    /// The peer sends without waiting for answers, so it may wait for ACKs.
    #[test]
    fn the_ack_of_a_second_segment_waits_for_no_answer() {
        let mut ack = AckPolicy::settled(NOW);
        take_answered(&mut ack);
        assert_eq!(take_answered(&mut ack), DELAY, "the timer of the answer is longer");
        assert!(!ack.awaits_answer() && ack.flush());
        ack.sent();
        take_answered(&mut ack);
        assert_eq!(ack.in_order(NOW, 100, false, 1000, WINDOW, &answered()), HOLD);
        assert!(ack.is_held());
    }

    /// The window of a peer that has just sent nothing for long, or lost much, may be a single segment.
    #[test]
    fn a_quick_ack_waits_for_no_answer() {
        let mut ack = AckPolicy::new(NOW);
        assert_eq!(take_answered(&mut ack), DELAY);
        assert!(ack.flush());
    }

    #[test]
    fn a_new_connection_acknowledges_every_second_segment() {
        let mut ack = AckPolicy::new(NOW);
        for _ in 0..QUICK_ACKS {
            assert_eq!(take(&mut ack, false), DELAY);
            assert_eq!(take(&mut ack, false), None);
            assert!(ack.is_due());
            ack.sent();
        }
        assert_eq!(take(&mut ack, false), HOLD);
    }

    #[test]
    fn an_ack_is_delayed_until_enough_bytes_or_a_flush() {
        let mut ack = AckPolicy::settled(NOW);
        assert!(!ack.flush());
        assert_eq!(take(&mut ack, true), DELAY);
        for _ in 0..6 {
            assert_eq!(take(&mut ack, true), None);
            assert!(!ack.is_due());
        }
        take(&mut ack, true);
        assert!(ack.is_due());
        ack.sent();
        assert!(!ack.is_due());
        assert_eq!(ack.in_order(NOW, 1, true, 1000, WINDOW, &config()), DELAY);
        assert!(ack.flush());
        assert!(ack.is_due());
    }

    #[test]
    fn an_ack_is_held_while_the_peer_has_more_to_send() {
        let mut ack = AckPolicy::settled(NOW);
        assert_eq!(take(&mut ack, false), HOLD);
        assert!(ack.is_held());
        take(&mut ack, true);
        assert!(!ack.is_held() && ack.is_owed(), "the last of a message");
    }

    #[test]
    fn a_small_window_is_acknowledged_by_quarters_but_not_single_segments() {
        for (window, segments) in [(16_000, 4), (40_000, 8), (2000, 2)] {
            let mut ack = AckPolicy::settled(NOW);
            let until_due = (1..100).find(|_| {
                let left = window - ack.bytes;
                ack.in_order(NOW, 1000, false, 1000, left - 1000, &config());
                ack.is_due()
            });
            assert_eq!(until_due, Some(segments), "window of {window} bytes");
        }
    }

    /// A peer with a window of three segments waits for each ACK that is held.
    #[test]
    fn acks_held_in_vain_become_rare() {
        let (mut ack, mut vain) = (AckPolicy::settled(NOW), 0);
        for _ in 0..10_000 {
            for _ in 0..3 {
                take(&mut ack, false);
                if ack.is_due() {
                    ack.sent();
                }
            }
            vain += u32::from(ack.is_held());
            ack.expire(NOW);
            ack.sent();
        }
        assert!((1..40).contains(&vain), "{vain} of 10000 windows");
    }

    #[test]
    fn rfc5681_s4_1_a_stream_that_pauses_begins_with_quick_acks() {
        let mut ack = AckPolicy::settled(NOW);
        assert_eq!(take(&mut ack, false), HOLD);
        ack.flush();
        ack.sent();
        assert_eq!(ack.in_order(NOW + PAUSE, 1000, false, 1000, WINDOW, &config()), DELAY);
        assert_eq!(ack.in_order(NOW + PAUSE, 1000, false, 1000, WINDOW, &config()), None);
        assert!(ack.is_due());
    }

    #[test]
    fn a_slow_stream_is_forgiven_its_pauses() {
        let mut ack = AckPolicy::settled(NOW);
        for silent in [true, true, true, false, true] {
            while ack.quick > 0 || !ack.is_held() {
                take(&mut ack, false);
                if ack.is_due() {
                    ack.sent();
                }
            }
            ack.expire(if silent { NOW } else { BEFORE });
            ack.sent();
        }
        assert_eq!(ack.penalty, 2);
    }

    #[test]
    fn a_stream_that_flows_again_is_held_again() {
        let mut ack = AckPolicy::settled(NOW);
        for _ in 0..3 {
            take(&mut ack, false);
            ack.expire(NOW);
            ack.sent();
            while ack.quick > 0 {
                take(&mut ack, false);
                ack.flush();
                ack.sent();
            }
        }
        assert!(ack.penalty > 1);
        for _ in 0..8 {
            take(&mut ack, false);
        }
        assert!(ack.is_due());
        assert_eq!(ack.penalty, 1);
    }
}
