//! [`Deadline`]: the end of a wait whose limit the caller chose.

use std::time::{Duration, Instant};

/// The end of a wait. A limit beyond the range of the clock, such as [`Duration::MAX`], never passes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// The deadline that is `limit` from now.
    pub(crate) fn after(limit: Duration) -> Self {
        Self(Instant::now().checked_add(limit))
    }

    /// Whether the deadline has passed.
    pub(crate) fn passed(self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_beyond_the_clock_never_passes() {
        assert!(!Deadline::after(Duration::MAX).passed());
        assert!(!Deadline::after(Duration::from_secs(u64::MAX)).passed());
    }

    #[test]
    fn a_deadline_passes_after_its_limit_and_not_before() {
        let begin = Instant::now();
        let limit = Duration::from_millis(5);
        assert!(Deadline::after(Duration::ZERO).passed());
        assert!(!Deadline::after(Duration::from_secs(3600)).passed());
        let deadline = Deadline::after(limit);
        while !deadline.passed() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begin.elapsed() >= limit);
    }
}
