//! [`Watchdog`]: the loop reports that it runs, and whoever has started this process ends and restarts it when it does not.
//!
//! That is systemd (`WatchdogSec=`, `sd_watchdog_enabled(3)`), or the [keeper](crate::keeper) of this program, which speaks the same
//! protocol. A loop that is stuck would answer no client; with `--keep`, the next helper goes on with the devices.

use std::time::{Duration, Instant};

/// The variable of the environment with the longest time without a report, in microseconds.
pub(crate) const LIMIT_VARIABLE: &str = "WATCHDOG_USEC";
/// The variable with the number of the process that is to report. Without it, every process is.
pub(crate) const PROCESS_VARIABLE: &str = "WATCHDOG_PID";
/// The report.
pub(crate) const REPORT: &str = "WATCHDOG=1";
/// Reports in the longest time without one: a late one is no reason to end.
const REPORTS: u32 = 3;

/// When the loop reports.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Watchdog {
    every: Duration,
    next: Instant,
}

impl Watchdog {
    /// The watchdog that the environment of this process asks for.
    pub(crate) fn of_environment(now: Instant) -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        let process = variable(PROCESS_VARIABLE);
        limit(variable(LIMIT_VARIABLE).as_deref(), process.as_deref(), std::process::id())
            .map(|limit| Self { every: limit / REPORTS, next: now })
    }

    /// Whether a report is due, which is sent then; and the time until the next.
    pub(crate) fn due(&mut self, now: Instant) -> (bool, Duration) {
        let is_due = now >= self.next;
        if is_due {
            self.next = now + self.every;
        }
        (is_due, self.next.saturating_duration_since(now))
    }
}

/// The longest time without a report of the process `own`, by both variables.
pub(crate) fn limit(limit: Option<&str>, process: Option<&str>, own: u32) -> Option<Duration> {
    let is_other = process.is_some_and(|process| process.parse() != Ok(own));
    let microseconds = limit?.parse().ok().filter(|microseconds| *microseconds > 0 && !is_other)?;
    Some(Duration::from_micros(microseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_of_this_process_alone_is_served() {
        assert_eq!(limit(Some("30000000"), None, 7), Some(Duration::from_secs(30)));
        assert_eq!(limit(Some("30000000"), Some("7"), 7), Some(Duration::from_secs(30)));
        for (wrong, process) in
            [(None, None), (Some("0"), None), (Some("-1"), None), (Some("x"), None), (Some("1"), Some("8"))]
        {
            assert_eq!(limit(wrong, process, 7), None, "{wrong:?} {process:?}");
        }
    }

    #[test]
    fn reports_are_sent_several_times_in_the_limit() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut watchdog = Watchdog { every: second, next: start };
        assert_eq!(watchdog.due(start), (true, second));
        assert_eq!(watchdog.due(start + second / 2), (false, second / 2));
        // A late report moves the next one.
        assert_eq!(watchdog.due(start + 3 * second), (true, second));
        assert_eq!(watchdog.due(start + 3 * second), (false, second));
    }
}
