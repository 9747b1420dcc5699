//! A progress line on the terminal during long runs; hidden when standard error is not a terminal.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Run time before the line appears.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time between two redraws: long, because a redraw costs the measured loop a system call.
const INTERVAL: Duration = Duration::from_millis(500);

/// The progress of one row of the table.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    next: Instant,
    bytes: u64,
    start: Instant,
}

impl Progress {
    /// Creates a line for `total` units (messages, or milliseconds of a timed run) of messages of `bytes`
    /// bytes. The line is hidden when standard error is not a terminal, or with `quiet`.
    pub fn new(total: u64, bytes: u64, quiet: bool) -> Self {
        let start = Instant::now();
        let bar = (!quiet && std::io::stderr().is_terminal())
            .then(|| ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden()));
        Self { bar, total, next: start + PATIENCE, bytes, start }
    }

    /// Updates the line: at `now`, `done` units and `messages` messages are complete.
    pub fn at(&mut self, now: Instant, done: u64, messages: u64) {
        if self.bar.is_none() || now < self.next {
            return;
        }
        self.draw(now, done, messages);
    }

    #[cold]
    fn draw(&mut self, now: Instant, done: u64, messages: u64) {
        let Some(bar) = &self.bar else { return };
        if bar.is_hidden() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("  {bar:30} {percent:>3}%  {msg}") {
                bar.set_style(style);
            }
        }
        self.next = now + INTERVAL;
        let seconds = (now - self.start).as_secs_f64();
        let rate = messages as f64 / seconds;
        bar.set_message(format!(
            "{} bytes: {:.2} Gb/sec, {:.4} Mpps",
            self.bytes,
            rate * self.bytes as f64 * 8e-9,
            rate * 1e-6
        ));
        bar.set_position(done.min(self.total));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
