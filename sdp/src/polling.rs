//! Reads and writes that do not wait, for callers that poll, and the sleep of a caller that reads.
//!
//! A caller that polls runs the device itself: arriving frames wake no thread. The service thread does not serve the
//! connection meanwhile, and resumes some milliseconds after the last poll, or when the caller announces that it stops.
//!
//! A caller that sleeps runs the device itself when frames arrive, so that a message wakes this thread only. The service
//! thread serves the connection whenever no caller sleeps.

use std::{
    io,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use xwarp_verbs::Slept;

use crate::{
    socket::{State, Until},
    stream::{SdpStream, Sending},
};

impl SdpStream {
    /// Reads the data received in messages, without waiting. Data that the peer has advertised stays for
    /// [`recv_memory`](Self::recv_memory), or for a plain read, which requests messages; data after an out-of-band byte
    /// stays until that byte is taken.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        self.poll_read(out, None)
    }

    /// Like [`Self::try_read`], but runs the device until data arrives or is advertised, at least once and at most for
    /// `limit`. The calling thread does not sleep.
    pub fn try_read_for(&self, out: &mut [u8], limit: Duration) -> io::Result<usize> {
        self.poll_read(out, Some(limit))
    }

    /// Copies what has come in messages without taking it out of the stream and without waiting, up to an out-of-band byte; returns
    /// the number of bytes. A read of as many returns at once.
    pub fn try_peek(&self, out: &mut [u8]) -> usize {
        self.socket().lock().machine.peek(out)
    }

    /// With a limit, the caller polls.
    fn poll_read(&self, out: &mut [u8], limit: Option<Duration>) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let mut end = None;
        loop {
            let mut state = self.socket().lock();
            let polls = state.machine.buffered() == 0 && (limit.is_some() || state.is_polled());
            let (found, rest) = if polls { self.socket().poll(&mut state) } else { (false, None) };
            let left = state.machine.has_offer() || state.machine.oob_is_next();
            let outcome = if left { None } else { self.read_step(&mut state, out, false) };
            // A poll that finds nothing has nothing to execute: every change of the machine is followed by its actions, unless
            // an earlier call has deferred them. A caller that polls and has got data will soon write or read again.
            if matches!(outcome, Some(Ok(1..))) && state.can_wait() {
                state.deferred = true;
            } else if found || state.deferred {
                self.socket().drive(&mut state);
            } else if outcome.is_some() {
                self.socket().drive_waiting(&mut state);
            }
            if let Some(outcome) = outcome {
                return outcome;
            }
            drop(state);
            if let Some(rest) = rest
                && !left
            {
                rest.sleep();
            }
            let limit = limit.filter(|limit| !limit.is_zero() && !left);
            if limit.is_none_or(|limit| Instant::now() >= *end.get_or_insert_with(|| Instant::now() + limit))
            {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::hint::spin_loop();
        }
    }

    /// Writes as many bytes as there is room for, without waiting.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let (mut state, mut rest) = (self.socket().lock(), None);
        if state.is_polled() && !state.can_send() {
            // This frees the slots of acknowledged messages, and receives credit. Otherwise a turn of the engine would
            // only send an acknowledgement that these bytes can carry.
            rest = self.socket().poll_and_drive(&mut state);
        }
        let step = |state: &mut State| self.write_step(state, bytes);
        let outcome = self.attempt(&mut state, step);
        drop(state);
        outcome.unwrap_or_else(|| {
            if let Some(rest) = rest {
                rest.sleep();
            }
            Err(io::ErrorKind::WouldBlock.into())
        })
    }

    /// Runs the device until the peer has received all data, at most for `limit`; returns whether it has. The calling
    /// thread does not sleep.
    pub fn poll_sent(&self, sending: &Sending, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let mut state = self.socket().lock();
            let rest = self.socket().poll_and_drive(&mut state);
            if state.error().is_some() {
                return false;
            }
            if sending.is_done(&state) {
                return true;
            }
            drop(state);
            if let Some(rest) = rest {
                rest.sleep();
            }
            if Instant::now() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Reads like [`Self::try_read`] before (`begins`) and after a [`sleep`](Self::sleep). Before it, announces that the
    /// caller stops polling. Data that this call takes wakes no other reader.
    pub fn try_read_to_sleep(&self, out: &mut [u8], begins: bool) -> io::Result<usize> {
        let mut state = self.socket().lock();
        if begins {
            state.polled = None;
            state.take_completions(&self.socket().core);
        } else {
            // Notification is still requested. Another turn of the engine would send the acknowledgement that the
            // program's answer can carry.
            state.poll_completions(&self.socket().core);
        }
        let left = state.machine.has_offer() || state.machine.oob_is_next();
        let outcome =
            if left { None } else { self.attempt(&mut state, |state| self.read_step(state, out, false)) };
        self.socket().drive(&mut state);
        outcome.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Sleeps until frames have come to the device, [`Self::end_sleep`] is called, a signal handler has run or `limit`
    /// has passed. The frames may be those of another connection.
    pub fn sleep(&self, limit: Option<Duration>) -> io::Result<Slept> {
        self.socket().core.sleeps.fetch_add(1, Ordering::Relaxed);
        let queue = self.socket().lock().link.as_ref().map(|link| link.cq.clone());
        queue.map_or(Ok(Slept::Refused), |queue| queue.sleep(limit))
    }

    /// Ends the present [`sleep`](Self::sleep) on the device, or else the next one.
    pub fn end_sleep(&self) {
        self.socket().core.device.end_sleep();
    }

    /// Announces that the caller stops polling, or does not read after a [`sleep`](Self::sleep): arrivals then wake the service at
    /// once, not after its next check.
    pub fn end_polling(&self) {
        self.socket().end_polling();
    }

    /// Whether a read would not wait.
    pub fn is_readable(&self) -> bool {
        self.socket().lock().is_readable()
    }

    /// Whether advertised data waits, or an out-of-band byte has arrived or was announced.
    pub fn has_offer_or_oob(&self) -> bool {
        self.socket().has_offer_or_oob()
    }

    /// Waits until a read would not wait, at most for the time limit of reads.
    pub fn wait_readable(&self) -> io::Result<()> {
        self.wait_readable_or(|| false)
    }

    /// Does the same; also ends when `is_over` returns true and a read would not have waited.
    pub fn wait_readable_or(&self, is_over: impl Fn() -> bool) -> io::Result<()> {
        self.until(Until::Readable, self.read_timeout()?, |state| {
            (state.is_readable() || is_over()).then_some(Ok(()))
        })
    }
}
