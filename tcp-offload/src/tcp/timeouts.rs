//! Handling of timers that fire: retransmission and user timeout (RFC 6298, RFC 9293 section 3.8.3), window probes
//! (section 3.8.6.1), keepalive (section 3.8.4), and the soft errors reported for a peer that does not answer.

use super::{
    Connection, SoftError,
    connection::SurvivedError,
    sender::After,
    stage::Stage,
    timers::{KINDS, Timer},
};
use crate::{time::Instant, ulp::CloseReason};

/// Time-outs in a row without an answer that count as a full stop (RFC 4821 section 7.7): R1 of RFC 9293 section 3.8.3.
const R1: u32 = 3;

impl Connection {
    /// When [`Connection::on_timer`] has to be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// A time at or before [`Connection::deadline`] that is known without a look at each timer. When it passes,
    /// [`Connection::on_timer`] may find that no timer has fired, and makes it exact.
    #[inline]
    pub fn deadline_bound(&self) -> Option<Instant> {
        self.timers.bound()
    }

    /// Handles the timers that have fired, if any have. Afterwards [`Connection::transmit`] has to be called. Returns the reason
    /// when the connection has just ended.
    pub fn on_timer(&mut self, now: Instant) -> Option<CloseReason> {
        for timer in KINDS {
            if self.timers.expire(timer, now) {
                self.on_expired(timer, now);
            }
        }
        self.timers.settle();
        debug_assert!(
            self.timers.next().is_none_or(|at| at > now),
            "a timer handler has armed a timer at or before now: {:?}",
            self.timers
        );
        self.stage.take_ended()
    }

    fn on_expired(&mut self, timer: Timer, now: Instant) {
        match timer {
            Timer::Retransmit => match self.stage.syn_mut() {
                Some(syn) => {
                    syn.due = true;
                    let sent = syn.sent;
                    self.on_syn_timeout(now, sent);
                }
                None => self.on_retransmit_timeout(now),
            },
            Timer::Probe => self.on_probe_timeout(now),
            Timer::Reorder => {
                let recoveries = self.counters.recoveries;
                self.tx.on_reorder_timer(now, &mut self.counters);
                if self.counters.recoveries > recoveries {
                    self.marks.set_cwr(true);
                }
                self.act_on_probe_outcome(now);
                if let Some(at) = self.tx.reorder_at() {
                    self.timers.arm(Timer::Reorder, at);
                }
            }
            // The call of `transmit` that follows sends what was held.
            Timer::Pace => {}
            Timer::Persist => self.on_persist(now),
            // A stream that flows brings a segment more often.
            Timer::DelayedAck => self.ack.expire(now - self.config.ack_hold / 2),
            Timer::Keepalive => self.on_keepalive(now),
            Timer::Wait => self.on_wait_timeout(),
        }
    }

    /// Ends TIME-WAIT, FIN-WAIT-2 or the connection attempt. A close that has not finished in time, while the local end
    /// no longer reads, ends with a RST.
    fn on_wait_timeout(&mut self) {
        if self.unread && !matches!(self.stage, Stage::FinWait2(_) | Stage::TimeWait(..)) {
            self.abort_with(CloseReason::TimedOut);
        } else {
            self.end(CloseReason::TimedOut);
        }
    }

    /// Handles the time-out of the SYN or SYN-ACK, which was sent `sent` times. Excessive retransmissions of it are
    /// reported like those of data (RFC 9293 section 3.8.3, MUST-22).
    fn on_syn_timeout(&mut self, now: Instant, sent: u32) {
        if sent >= R1 {
            self.on_r1(now);
        }
    }

    /// Handles R1 of RFC 9293 section 3.8.3: reports a soft error to the user once, and requests another resolution of
    /// the next hop (MUST-20) after each further time-out.
    fn on_r1(&mut self, now: Instant) {
        self.record_soft_error(now, SoftError::NoAnswer);
        self.next_hop_doubtful = true;
    }

    /// Whether repeated time-outs have made the next hop doubtful since the last call, so that it should be resolved
    /// again.
    pub fn take_next_hop_doubt(&mut self) -> bool {
        std::mem::take(&mut self.next_hop_doubtful)
    }

    /// Whether a segment was retransmitted without an answer since.
    pub fn waits_for_answer(&self) -> bool {
        self.tx.rtt.backoff() > 0
    }

    /// Records an error that the connection may survive. The same error is reported once, and again only after an
    /// acknowledgement of new data.
    pub(super) fn record_soft_error(&mut self, now: Instant, error: SoftError) {
        let lasting = |last: &SurvivedError| last.error == error && last.at >= self.tx.progress;
        let reported = self.soft_error.filter(lasting).is_some_and(|last| last.reported);
        self.soft_error = Some(SurvivedError { error, at: now, reported });
    }

    /// The soft error that has to be reported.
    pub fn take_soft_error(&mut self) -> Option<SoftError> {
        let last = self.soft_error.as_mut().filter(|last| !last.reported)?;
        last.reported = true;
        Some(last.error)
    }

    fn on_retransmit_timeout(&mut self, now: Instant) {
        if self.tx.waits_too_long(now) {
            return self.end(CloseReason::TimedOut);
        }
        self.counters.rto_expired += 1;
        let (peer, rto) = (self.path.flow.remote, self.tx.rtt.rto());
        tracing::debug!(%peer, state = ?self.state(), ?rto, "retransmission time-out");
        self.tx.on_timeout(now, self.clock.is_none());
        // The first new segment reports each reduction of the window, whatever its reason (RFC 3168 section 6.1.2).
        self.marks.set_cwr(true);
        if let Some(step) = self.tx.rtt.backoff().checked_sub(R1) {
            self.on_r1(now);
            self.full_stop(now, step);
        }
        self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
    }

    /// Restarts the retransmission time-out because the first segment was retransmitted: it is not retransmitted again
    /// within less than a time-out (RFC 6298 section 5, RFC 6675 section 6).
    pub(super) fn restart_timeout(&mut self, now: Instant) {
        let at = self.tx.rtt.rto_after(now);
        self.timers.arm(Timer::Retransmit, self.tx.bound_by_user_timeout(now, at));
    }

    /// Whether the peer's answers alone keep the connection open while its window is closed (RFC 9293 section 3.8.6.1).
    /// Once the user has closed the connection, only progress does (as RFC 6429 explains).
    pub(super) fn answers_keep_it_open(&self) -> bool {
        self.stage.is_wanted() && !self.unread
    }

    /// Schedules a tail loss probe (RFC 8985 section 7.3).
    fn on_probe_timeout(&mut self, now: Instant) {
        self.due.loss_probe = self.tx.may_probe();
        self.tx.arm(now, &mut self.timers, &self.config, After::Timeout);
    }

    /// Schedules a window probe (RFC 9293 section 3.8.6.1). The connection stays open as long as the peer answers.
    fn on_persist(&mut self, now: Instant) {
        if self.tx.waits_too_long(now) {
            return self.end(CloseReason::TimedOut);
        }
        self.window_probes += 1;
        self.due.window_probe = true;
    }

    /// Starts the keepalive timer, or stops it when keepalive is off.
    pub(super) fn arm_keepalive(&mut self, now: Instant) {
        match self.config.keepalive {
            Some(keepalive) => self.timers.arm(Timer::Keepalive, now + keepalive.first_probe(self.passive)),
            None => self.timers.disarm(Timer::Keepalive),
        }
    }

    /// Restarts the keepalive period: a segment arrived that only the peer can have sent.
    pub(super) fn note_life(&mut self, now: Instant) {
        self.last_heard = now;
        self.keepalives = 0;
    }

    fn on_keepalive(&mut self, now: Instant) {
        let Some(keepalive) = self.config.keepalive else { return };
        let first = self.last_heard + keepalive.first_probe(self.passive);
        if now < first {
            return self.timers.arm(Timer::Keepalive, first);
        }
        if self.keepalives >= keepalive.probes {
            return self.end(CloseReason::TimedOut);
        }
        // While data is outstanding, its retransmissions show whether the peer is alive.
        if self.tx.queue.is_empty() {
            self.keepalives += 1;
            self.counters.keepalives += 1;
            self.due.empty_probe = true;
        }
        self.timers.arm(Timer::Keepalive, now + keepalive.interval);
    }
}
