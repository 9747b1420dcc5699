//! Reads and writes that do not wait, for callers that poll.
//!
//! A caller that polls runs the device itself: what arrives wakes no thread. The service thread leaves the connection alone
//! meanwhile, and serves it again a millisecond after the last poll.

use std::{
    io,
    time::{Duration, Instant},
};

use crate::{socket::State, stream::SdpStream};

impl SdpStream {
    /// Reads what has come in messages, without waiting. Data that the peer has advertised stays for
    /// [`recv_memory`](Self::recv_memory), or for a plain read, which asks for messages.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        self.try_read_for(out, Duration::ZERO)
    }

    /// As [`Self::try_read`], but polls until something comes, at most for `limit`. The calling thread does not sleep.
    pub fn try_read_for(&self, out: &mut [u8], limit: Duration) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let mut end = None;
        loop {
            let mut state = self.socket().lock();
            if state.machine.buffered() == 0 && (state.is_polled() || !limit.is_zero()) {
                self.socket().poll(&mut state);
            }
            if !state.machine.has_offer()
                && let Some(outcome) = self.attempt(&mut state, |state| self.read_step(state, out, false))
            {
                return outcome;
            }
            drop(state);
            if limit.is_zero() || Instant::now() >= *end.get_or_insert_with(|| Instant::now() + limit) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::hint::spin_loop();
        }
    }

    /// Writes as much as there is room for, without waiting.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.socket().lock();
        if state.is_polled() {
            // Slots of messages that were acknowledged become free.
            self.socket().poll(&mut state);
        }
        let step = |state: &mut State| self.write_step(state, bytes);
        self.attempt(&mut state, step).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Whether data waits that the peer has advertised.
    pub fn has_offer(&self) -> bool {
        self.socket().lock().machine.has_offer()
    }

    /// Waits until a read would not wait, at most for the time limit of reads.
    pub fn wait_readable(&self) -> io::Result<()> {
        self.until(self.read_timeout()?, |state| state.is_readable().then_some(Ok(())))
    }
}
