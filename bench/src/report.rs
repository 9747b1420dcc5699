//! The report of a test: perftest's information block, its columns, and the same data as JSON.

mod json;

use std::{fmt::Write as _, fs, io::Write as _, path::Path};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value};

pub use self::json::{DeviceInfo, RdmaInfo, TestInfo};
use self::json::{Document, Extra, ExtraRow, Results};

use crate::{
    options::{Figure, OutputArgs},
    stats::Summary,
    units::RateUnit,
};

const RULE: &str = "---------------------------------------------------------------------------------------";

/// The description of a test: the information block, and `test_info` of the JSON.
#[derive(Debug, Clone)]
pub struct Info {
    /// The title, for example `RDMA_Write BW Test`.
    title: String,
    /// Labels and values, in print order.
    lines: Vec<(&'static str, String)>,
    /// The same data for the JSON.
    json: TestInfo,
}

impl Info {
    /// Creates a block with this title and no lines.
    pub fn new(title: impl Into<String>, test_info: TestInfo) -> Self {
        Self { title: title.into(), lines: Vec::new(), json: test_info }
    }

    /// Adds a line.
    #[must_use]
    pub fn line(mut self, label: &'static str, value: impl Into<Value>) -> Self {
        let value = match value.into() {
            Value::String(text) => text,
            other => other.to_string(),
        };
        self.lines.push((label, value));
        self
    }
}

/// One row of the table.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A bandwidth test.
    Bandwidth(BandwidthRow),
    /// A latency test over a number of messages.
    Latency(LatencyRow),
    /// A latency test over a duration.
    Duration(DurationRow),
}

/// The result of a bandwidth test.
#[derive(Debug, Clone, PartialEq)]
pub struct BandwidthRow {
    /// Size of a message.
    pub bytes: u64,
    /// Number of messages, over all queue pairs and directions.
    pub iterations: u64,
    /// Rate of the best window, in bytes a second.
    pub peak: Option<f64>,
    /// Mean rate, in bytes a second.
    pub average: f64,
    /// CPU time of both ends for the transfer.
    pub cpu: Option<CpuUse>,
}

/// CPU time of a transfer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuUse {
    /// Seconds of CPU time for each 2^30 bytes, at this end.
    pub local_seconds_per_gib: f64,
    /// The same at the other end, if known.
    pub remote_seconds_per_gib: Option<f64>,
    /// CPU time of this end divided by elapsed time, in percent of one CPU.
    pub utilisation: f64,
}

impl CpuUse {
    /// Computes the figures from CPU seconds of the two ends for `bytes` within `elapsed` seconds.
    pub fn of(local: f64, remote: Option<f64>, bytes: f64, elapsed: f64) -> Self {
        let gib = bytes / f64::from(1 << 30);
        Self {
            local_seconds_per_gib: local / gib,
            remote_seconds_per_gib: remote.map(|r| r / gib),
            utilisation: 100.0 * local / elapsed,
        }
    }

    /// CPU seconds for each 2^30 bytes: of both ends, or of this end alone if the other's are unknown.
    pub fn seconds_per_gib(&self) -> f64 {
        self.local_seconds_per_gib + self.remote_seconds_per_gib.unwrap_or(0.0)
    }
}

/// The result of a latency test.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyRow {
    /// Size of a message.
    pub bytes: u64,
    /// Number of measured messages.
    pub iterations: u64,
    /// Statistics in microseconds.
    pub summary: Summary,
}

/// The result of a latency test over a duration.
#[derive(Debug, Clone, PartialEq)]
pub struct DurationRow {
    /// Message size, count and statistics.
    pub latency: LatencyRow,
    /// Exchanges a second.
    pub transactions: f64,
}

impl Row {
    fn head(&self, unit: RateUnit, cpu: bool) -> String {
        match self {
            Self::Bandwidth(_) => {
                let unit = unit.name();
                let mut head = format!(
                    " {:<10} {:<14} {:<20} {:<22} {:<15}",
                    "#bytes",
                    "#iterations",
                    format!("BW peak[{unit}]"),
                    format!("BW average[{unit}]"),
                    "MsgRate[Mpps]"
                );
                if cpu {
                    let _ = write!(head, " {:<12} CPU[s/GiB]", "CPU_Util[%]");
                }
                head
            }
            Self::Latency(_) => " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]".to_owned(),
            Self::Duration(_) => " #bytes        #iterations       t_avg[usec]    tps average    t_min[usec]    t_max[usec]  t_typical[usec]   99% percentile[usec]   99.9% percentile[usec]".to_owned(),
        }
    }

    fn line(&self, unit: RateUnit, cpu: bool) -> String {
        match self {
            Self::Bandwidth(row) => {
                let peak = row.peak.map_or_else(|| "0.00".to_owned(), |p| format!("{:.2}", unit.convert(p)));
                let mut line = format!(
                    " {:<10} {:<14} {:<20} {:<22} {:<15}",
                    row.bytes,
                    row.iterations,
                    peak,
                    format!("{:.2}", unit.convert(row.average)),
                    format!("{:.6}", row.message_rate())
                );
                if let (true, Some(cpu)) = (cpu, row.cpu) {
                    let _ = write!(line, " {:<12.2} {:.3}", cpu.utilisation, cpu.seconds_per_gib());
                }
                line
            }
            Self::Latency(LatencyRow { bytes, iterations, summary: s }) => format!(
                " {bytes:<7} {iterations:<14} {:<14.2} {:<14.2} {:<14.2} {:<14.2} {:<14.2} {:<22.2} {:<18.2}",
                s.min, s.max, s.typical, s.average, s.stdev, s.p99, s.p999
            ),
            Self::Duration(DurationRow {
                latency: LatencyRow { bytes, iterations, summary: s },
                transactions,
            }) => format!(
                " {bytes:<13} {iterations:<17} {:<14.2} {transactions:<14.2} {:<14.2} {:<12.2} {:<17.2} {:<22.2} {:<18.2}",
                s.average, s.min, s.max, s.typical, s.p99, s.p999
            ),
        }
    }

    fn figure(&self, what: Figure, unit: RateUnit) -> Option<String> {
        match (self, what) {
            (Self::Bandwidth(row), Figure::Bandwidth) => Some(format!("{:.2}", unit.convert(row.average))),
            (Self::Bandwidth(row), Figure::MessageRate) => Some(format!("{:.6}", row.message_rate())),
            (Self::Latency(row), Figure::Latency) => Some(format!("{:.2}", row.summary.average)),
            (Self::Duration(row), Figure::Latency) => Some(format!("{:.2}", row.latency.summary.average)),
            _ => None,
        }
    }

    /// Message size in bytes, and number of messages.
    fn extent(&self) -> (u64, u64) {
        match self {
            Self::Bandwidth(row) => (row.bytes, row.iterations),
            Self::Latency(row) | Self::Duration(DurationRow { latency: row, .. }) => {
                (row.bytes, row.iterations)
            }
        }
    }
}

impl BandwidthRow {
    /// Millions of messages a second.
    pub fn message_rate(&self) -> f64 {
        self.average / self.bytes as f64 / 1e6
    }
}

/// Prints the rows of a test as they are measured and keeps them for the JSON.
#[derive(Debug)]
pub struct Report {
    output: OutputArgs,
    info: Info,
    rows: Vec<Row>,
}

impl Report {
    /// Prints the information block.
    pub fn begin(output: &OutputArgs, info: Info) -> Self {
        if output.output.is_none() {
            print(&block(&info));
        }
        Self { output: output.clone(), info, rows: Vec::new() }
    }

    /// Prints a line (addresses, keys) between the block and the table.
    pub fn note(&self, text: &str) {
        if self.output.output.is_none() {
            print(&format!(" {text}\n"));
        }
    }

    /// Prints a row, and the column heads before the first row.
    pub fn row(&mut self, row: Row) {
        let unit = self.output.unit();
        if let Some(what) = self.output.output {
            if let Some(figure) = row.figure(what, unit) {
                print(&format!("{figure}\n"));
            }
        } else {
            if self.rows.is_empty() {
                print(&format!("{RULE}\n{}\n", row.head(unit, self.output.cpu_util)));
            }
            print(&format!("{}\n", row.line(unit, self.output.cpu_util)));
        }
        self.rows.push(row);
    }

    /// Prints the closing line and writes the JSON; its object `xwarp` contains `other`.
    pub fn end(self, other: Map<String, Value>) -> Result<()> {
        if self.output.output.is_none() {
            print(&format!("{RULE}\n"));
        }
        if !self.output.out_json {
            return Ok(());
        }
        let path = self.output.out_json_file.as_deref().unwrap_or(Path::new("perftest_out.json"));
        let mut text = serde_json::to_string_pretty(&self.document(other))?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn document(&self, other: Map<String, Value>) -> Document<'_> {
        let (unit, output) = (self.output.unit(), &self.output);
        Document {
            test_info: &self.info.json,
            results: self.rows.last().map(|row| Results::of(row, unit, output.cpu_util, output.output)),
            xwarp: Extra {
                bw_unit: unit.name(),
                rows: self.rows.iter().map(|row| ExtraRow::of(row, unit)).collect(),
                other,
            },
        }
    }
}

fn block(info: &Info) -> String {
    let mut text = format!("{RULE}\n{:>42}{}\n", "", info.title);
    for pair in info.lines.chunks(2) {
        for (label, value) in pair {
            let _ = write!(text, " {label:<15} : {value:<15}");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text.push_str(RULE);
    text.push('\n');
    text
}

/// Prints to standard output. A closed pipe is not an error.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests;
