//! The signals that ask the helper to end, read from a descriptor by the server loop.

use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context as _, Result};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// The descriptor of the signals.
#[derive(Debug)]
pub(crate) struct Signals(SignalFd);

impl Signals {
    /// Takes the signals from the calling thread and from all threads that it starts: call it before the first one starts.
    /// A signal that whoever started the helper ignores stays ignored (SIGHUP under nohup).
    pub(crate) fn take() -> Result<Self> {
        Self::take_also(SigSet::empty())
    }

    /// The same, and the ends of child processes.
    pub(crate) fn take_with_children() -> Result<Self> {
        Self::take_also(Signal::SIGCHLD.into())
    }

    fn take_also(mut signals: SigSet) -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = ignored(&status);
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            if ignored & (1 << (signal as u32 - 1)) == 0 {
                signals.add(signal);
            }
        }
        signals.thread_block().context("blocking signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self(SignalFd::with_flags(&signals, flags).context("a descriptor for signals")?))
    }

    /// The signal that has arrived.
    pub(crate) fn arrived(&self) -> Option<Signal> {
        read(self.0.as_fd())
    }

    /// Readable after a signal.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Reads the next signal from the descriptor of signals, without waiting.
pub(crate) fn read(signals: BorrowedFd<'_>) -> Option<Signal> {
    // `struct signalfd_siginfo`, which begins with the signal's number.
    let mut info = [0; 128];
    let read = rustix::io::read(signals, &mut info).ok()?;
    let number = info.first_chunk().filter(|_| read == info.len())?;
    Signal::try_from(i32::from_ne_bytes(*number)).ok()
}

/// The set of ignored signals in /proc/PID/status.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read() {
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n"), 0x1001);
        assert_eq!(ignored(""), 0);
    }
}
