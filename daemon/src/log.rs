//! The log, on standard error. Nothing that happens to it reaches the rest of the program: a full disk or a closed pipe loses
//! lines, a reader that has stopped does too, and a user who causes many lines causes a limited number. A thread writes them.

use std::fmt;
use std::io::{self, IsTerminal as _, Write};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::fstat;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::privileges;

/// Lines of one kind at once, and each second on average. Clients cause most lines, and journald would drop those of all
/// services after 10 000 in 30 s.
const BURST_LINES: f64 = 200.0;
const LINES_PER_SECOND: f64 = 20.0;

/// Lines that wait to be written.
const MAX_WAITING: usize = 1024;
/// Longest time that the end of the program waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The log. Dropping it writes the lines that wait, unless that takes too long.
pub(crate) struct Log {
    lines: SyncSender<Vec<u8>>,
    ended: Receiver<()>,
}

impl Drop for Log {
    fn drop(&mut self) {
        // An empty line is the last one.
        if self.lines.try_send(Vec::new()).is_ok() {
            let _ = self.ended.recv_timeout(LAST_LINES);
        }
    }
}

/// Starts the log.
pub(crate) fn start() -> io::Result<Log> {
    let (lines, waiting) = sync_channel::<Vec<u8>>(MAX_WAITING);
    let (alive, ended) = channel();
    thread::Builder::new().name("xwarpd-log".into()).spawn(move || {
        let _alive = alive;
        if privileges::drop_all().is_ok() {
            for line in waiting.iter().take_while(|line| !line.is_empty()) {
                let _ = io::stderr().write_all(&line);
            }
        }
    })?;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    // An error of the writer would otherwise be reported by a macro that panics on another one.
    let log = log.log_internal_errors(false).with_writer(Sink::new(lines.clone()));
    if is_journal() {
        let plain = Format::default().with_target(false).with_ansi(false).without_time().with_level(false);
        log.with_ansi(false).event_format(Priorities(plain)).init();
    } else {
        log.with_ansi(io::stderr().is_terminal()).init();
    }
    Ok(Log { lines, ended })
}

/// Whether standard error leads to systemd's journal, which reads a priority in front of each line (sd-daemon(3)).
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    fstat(io::stderr()).is_ok_and(|found| stream == format!("{}:{}", found.st_dev, found.st_ino))
}

/// A format with the priority of syslog in front of each line. The journal adds the time.
struct Priorities<F>(F);

impl<S, N> FormatEvent<S, N> for Priorities<Format<Full, ()>>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let priority = match *event.metadata().level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        write!(writer, "<{priority}>")?;
        self.0.format_event(context, writer, event)
    }
}

/// The thread that writes, behind the limits. Warnings and errors have a limit of their own, so that no number of ordinary lines
/// hides them; lines for debugging, which an administrator has asked for, have none.
#[derive(Debug)]
struct Sink {
    lines: SyncSender<Vec<u8>>,
    ordinary: Mutex<Budget>,
    grave: Mutex<Budget>,
}

impl Sink {
    fn new(lines: SyncSender<Vec<u8>>) -> Self {
        Self { lines, ordinary: Mutex::default(), grave: Mutex::default() }
    }
}

/// The lines that may be written now.
#[derive(Debug)]
struct Budget {
    left: f64,
    at: Instant,
    /// Lines that were left out since the last one that was written.
    omitted: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: BURST_LINES, at: Instant::now(), omitted: 0 }
    }
}

impl Budget {
    /// Takes a line: the number of lines that were left out before it, or `None` if it is left out too.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.left = (self.left + passed * LINES_PER_SECOND).min(BURST_LINES);
        self.at = now;
        if self.left < 1.0 {
            self.omitted += 1;
            return None;
        }
        self.left -= 1.0;
        Some(std::mem::take(&mut self.omitted))
    }
}

/// The writer of one line; without a way to the thread if the line is left out.
struct Line<'a> {
    lines: Option<&'a SyncSender<Vec<u8>>>,
    omitted: u64,
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: Some(&self.lines), omitted: 0 }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line<'a> {
        let budget = match *metadata.level() {
            Level::ERROR | Level::WARN => &self.grave,
            Level::INFO => &self.ordinary,
            _ => return self.make_writer(),
        };
        // A budget changes in single steps.
        let mut budget = budget.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = budget.take(Instant::now());
        Line { lines: taken.map(|_| &self.lines), omitted: taken.unwrap_or(0) }
    }
}

impl Write for Line<'_> {
    /// Hands the line over, and reports success in any case.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(lines) = self.lines {
            let mut line = Vec::new();
            if self.omitted > 0 {
                let _ = writeln!(line, "{} lines were left out: too many in a second", self.omitted);
                self.omitted = 0;
            }
            line.extend_from_slice(bytes);
            // Full: nobody reads, or the disk is slow.
            let _ = lines.try_send(line);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_and_counted() {
        let start = Instant::now();
        let mut budget = Budget { at: start, ..Budget::default() };
        let written = (0..5000).filter(|_| budget.take(start).is_some()).count();
        assert_eq!(written, BURST_LINES as usize);
        assert_eq!(budget.take(start + Duration::from_secs(1)), Some(5000 - BURST_LINES as u64));
        assert_eq!(budget.take(start + Duration::from_secs(1)), Some(0));
    }
}
