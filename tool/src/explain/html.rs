//! `--html`: one page without scripts and without other files, with a sequence diagram of each connection.

use std::{
    fmt::Write as _,
    io::{self, Write},
};

use super::{
    connection::Summary,
    event::{Event, at, count},
};

/// Largest number of events that are kept for the page; later ones are counted.
const MAX_EVENTS: usize = 20_000;
/// Distances in the diagrams, in pixels: between events, from the left edge to the two ends, and to the right edge.
const STEP: usize = 30;
const LEFT: usize = 130;
const RIGHT: usize = 870;
const WIDTH: usize = 1000;

/// Events of other ends between two of one end that are looked at.
const LOOK_BACK: usize = 64;
/// Characters that fit between the two ends.
const MAX_LABEL: usize = 96;

const STYLE: &str = "
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1020px; padding: 0 1em; color: #1b1f24; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em } pre { white-space: pre-wrap; font-size: 13px }
svg { width: 100%; height: auto; font: 12px ui-monospace, monospace } line, path { stroke: #57606a } text { fill: #1b1f24 }
.bad line { stroke: #b3261e } .bad text { fill: #b3261e } .end { font-weight: bold }
@media (prefers-color-scheme: dark) {
  body { background: #14171a; color: #d7dce1 } text { fill: #d7dce1 } line, path { stroke: #8b949e }
  .bad line { stroke: #ff8a80 } .bad text { fill: #ff8a80 }
}";

/// The events of a capture, until the page is written.
#[derive(Debug, Default)]
pub struct DiagramPage {
    events: Vec<Shown>,
    not_shown: u64,
}

#[derive(Debug)]
struct Shown {
    connection: usize,
    from: usize,
    seconds: Option<f64>,
    text: String,
    is_bad: bool,
    key: Option<(&'static str, u64)>,
    /// Further events of the same kind directly after it.
    more: u64,
}

impl DiagramPage {
    /// Adds an event of an end. Repeated ones are counted, unless `all`.
    pub fn add(&mut self, connection: usize, from: usize, seconds: Option<f64>, event: &Event, all: bool) {
        let key = event.key().filter(|_| !all);
        let same = |shown: &&mut Shown| shown.connection == connection && shown.from == from;
        if let Some(last) = self.events.iter_mut().rev().take(LOOK_BACK).find(same)
            && key.is_some()
            && last.key == key
        {
            last.more += 1;
        } else if self.events.len() < MAX_EVENTS {
            let (text, is_bad) = (event.to_string(), event.is_trouble());
            self.events.push(Shown { connection, from, seconds, text, is_bad, key, more: 0 });
        } else {
            self.not_shown += 1;
        }
    }

    /// Writes the page: for each of these connections its summary, as text, and its diagram; then the totals.
    pub fn write(&self, summaries: &[(Summary, String)], total: &str, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>xwarp explain</title>"
        )?;
        writeln!(out, "<style>{STYLE}\n</style></head><body>\n<h1>xwarp explain</h1>")?;
        writeln!(out, "<pre>{}</pre>", escaped(total.trim()))?;
        if self.not_shown > 0 {
            writeln!(
                out,
                "<p>{} not shown: choose a connection with --connection.</p>",
                count(self.not_shown, "further event")
            )?;
        }
        for (summary, text) in summaries {
            let number = summary.connection;
            writeln!(
                out,
                "<h2 id=\"c{number}\">Connection {number}</h2>\n<pre>{}</pre>",
                escaped(text.trim())
            )?;
            self.write_diagram(number - 1, summary, out)?;
        }
        writeln!(out, "</body></html>")
    }

    fn write_diagram(&self, index: usize, summary: &Summary, out: &mut dyn Write) -> io::Result<()> {
        let events: Vec<_> = self.events.iter().filter(|event| event.connection == index).collect();
        let height = (events.len() + 2) * STEP;
        writeln!(
            out,
            "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Sequence of connection {}\">",
            index + 1
        )?;
        for (x, end) in [LEFT, RIGHT].into_iter().zip(&summary.ends) {
            writeln!(out, "<line x1=\"{x}\" y1=\"{STEP}\" x2=\"{x}\" y2=\"{height}\"/>")?;
            writeln!(
                out,
                "<text class=\"end\" x=\"{x}\" y=\"18\" text-anchor=\"middle\">{} {}</text>",
                end.name, end.address
            )?;
        }
        for (row, event) in events.into_iter().enumerate() {
            let y = (row + 2) * STEP - 6;
            // The arrow leads from the sender to the receiver.
            let (from, to, tip) =
                if event.from == 0 { (LEFT, RIGHT, RIGHT - 8) } else { (RIGHT, LEFT, LEFT + 8) };
            let class = if event.is_bad { " class=\"bad\"" } else { "" };
            let mut text = event.text.clone();
            if event.more > 0 {
                let _ = write!(text, " (and {} more like this)", event.more);
            }
            writeln!(out, "<g{class}><text x=\"4\" y=\"{y}\">{}</text>", at(event.seconds).trim())?;
            writeln!(
                out,
                "<line x1=\"{from}\" y1=\"{y}\" x2=\"{to}\" y2=\"{y}\"/><line x1=\"{tip}\" y1=\"{}\" x2=\"{to}\" y2=\"{y}\"/>\
                 <line x1=\"{tip}\" y1=\"{}\" x2=\"{to}\" y2=\"{y}\"/>",
                y - 4,
                y + 4
            )?;
            let above = y - 5;
            writeln!(
                out,
                "<text x=\"{}\" y=\"{above}\" text-anchor=\"middle\">{}<title>{}</title></text></g>",
                WIDTH / 2,
                escaped(&shortened(&text)),
                escaped(&text)
            )?;
        }
        writeln!(out, "</svg>")
    }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= MAX_LABEL {
        return text.to_owned();
    }
    text.chars().take(MAX_LABEL - 1).chain(['…']).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
