//! What is printed: perftest's information block, its columns, and the same as JSON.

use std::{fmt::Write as _, fs, io::Write as _, path::Path};

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use crate::{
    options::{Figure, OutputArgs},
    stats::Summary,
    units::RateUnit,
};

const RULE: &str = "---------------------------------------------------------------------------------------";

/// What the information block says about the test.
#[derive(Debug, Clone, Default)]
pub struct Info {
    /// As `RDMA_Write BW Test`.
    pub title: String,
    /// Label and value, in the order in which they are printed.
    pub lines: Vec<(&'static str, String)>,
}

impl Info {
    /// A block with this title.
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), lines: Vec::new() }
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

/// One line of the table.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// Of a bandwidth test.
    Bandwidth(BandwidthRow),
    /// Of a latency test with a number of messages.
    Latency(LatencyRow),
    /// Of a latency test with a duration.
    Rate(RateRow),
}

/// A bandwidth.
#[derive(Debug, Clone, PartialEq)]
pub struct BandwidthRow {
    /// Size of a message.
    pub bytes: u64,
    /// Messages, over all queue pairs and directions.
    pub iterations: u64,
    /// The best window, in bytes a second.
    pub peak: Option<f64>,
    /// In bytes a second.
    pub average: f64,
    /// CPU time of the two ends for what was sent.
    pub cpu: Option<CpuUse>,
}

/// CPU time that a transfer took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CpuUse {
    /// Seconds of CPU time for each 2^30 bytes, at this end.
    pub local_seconds_per_gib: f64,
    /// At the other end, when it told.
    pub remote_seconds_per_gib: Option<f64>,
    /// CPU time of this end by elapsed time, in percent of one CPU.
    pub utilisation: f64,
}

impl CpuUse {
    /// From CPU seconds of the two ends for `bytes` within `elapsed` seconds.
    pub fn of(local: f64, remote: Option<f64>, bytes: f64, elapsed: f64) -> Self {
        let gib = bytes / f64::from(1 << 30);
        Self {
            local_seconds_per_gib: local / gib,
            remote_seconds_per_gib: remote.map(|r| r / gib),
            utilisation: 100.0 * local / elapsed,
        }
    }

    /// Of both ends together; of this end alone when the other did not tell.
    pub fn seconds_per_gib(&self) -> f64 {
        self.local_seconds_per_gib + self.remote_seconds_per_gib.unwrap_or(0.0)
    }
}

/// A latency.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyRow {
    /// Size of a message.
    pub bytes: u64,
    /// Messages measured.
    pub iterations: u64,
    /// In microseconds.
    pub summary: Summary,
}

/// A latency measured over a time.
#[derive(Debug, Clone, PartialEq)]
pub struct RateRow {
    /// Size of a message.
    pub bytes: u64,
    /// Messages measured.
    pub iterations: u64,
    /// Microseconds, the mean.
    pub average: f64,
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
            Self::Rate(_) => " #bytes        #iterations       t_avg[usec]    tps average".to_owned(),
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
            Self::Rate(row) => {
                format!(
                    " {:<13} {:<17} {:<14.2} {:<14.2}",
                    row.bytes, row.iterations, row.average, row.transactions
                )
            }
        }
    }

    fn figure(&self, what: Figure, unit: RateUnit) -> Option<String> {
        match (self, what) {
            (Self::Bandwidth(row), Figure::Bandwidth) => Some(format!("{:.2}", unit.convert(row.average))),
            (Self::Bandwidth(row), Figure::MessageRate) => Some(format!("{:.6}", row.message_rate())),
            (Self::Latency(row), Figure::Latency) => Some(format!("{:.2}", row.summary.average)),
            (Self::Rate(row), Figure::Latency) => Some(format!("{:.2}", row.average)),
            _ => None,
        }
    }

    /// As an object with perftest's names.
    pub fn to_json(&self, unit: RateUnit) -> Value {
        match self {
            Self::Bandwidth(row) => {
                let mut object = Map::new();
                object.insert("MsgSize".into(), row.bytes.into());
                object.insert("n_iterations".into(), row.iterations.into());
                object.insert("BW_peak".into(), row.peak.map(|p| unit.convert(p)).into());
                object.insert("BW_average".into(), unit.convert(row.average).into());
                object.insert("MsgRate".into(), row.message_rate().into());
                if let Some(cpu) = row.cpu {
                    object.insert("CPU_util".into(), cpu.utilisation.into());
                    object.insert("CPU_sec_per_GiB_local".into(), cpu.local_seconds_per_gib.into());
                    object.insert("CPU_sec_per_GiB_remote".into(), cpu.remote_seconds_per_gib.into());
                }
                Value::Object(object)
            }
            Self::Latency(LatencyRow { bytes, iterations, summary: s }) => json!({
                "MsgSize": bytes, "n_iterations": iterations, "t_min": s.min, "t_max": s.max, "t_typical": s.typical,
                "t_avg": s.average, "t_stdev": s.stdev, "t_99%": s.p99, "t_99.9%": s.p999,
            }),
            Self::Rate(row) => json!({
                "MsgSize": row.bytes, "n_iterations": row.iterations, "t_avg": row.average, "tps_average": row.transactions,
            }),
        }
    }
}

impl BandwidthRow {
    /// Millions of messages a second.
    fn message_rate(&self) -> f64 {
        self.average / self.bytes as f64 / 1e6
    }
}

/// Prints a test as it goes, and keeps it for the JSON.
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

    /// Prints addresses, keys and the like, between the block and the table.
    pub fn note(&self, text: &str) {
        if self.output.output.is_none() {
            print(&format!(" {text}\n"));
        }
    }

    /// Prints a row, the heads before the first.
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

    /// Prints the last line and writes the JSON. `extra` goes into the JSON beside the results.
    pub fn end(self, extra: Option<(&str, Value)>) -> Result<()> {
        if self.output.output.is_none() {
            print(&format!("{RULE}\n"));
        }
        if !self.output.out_json {
            return Ok(());
        }
        let path = self.output.out_json_file.as_deref().unwrap_or(Path::new("perftest_out.json"));
        let mut text = serde_json::to_string_pretty(&self.to_json(extra))?;
        text.push('\n');
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn to_json(&self, extra: Option<(&str, Value)>) -> Value {
        let unit = self.output.unit();
        let mut info = Map::new();
        info.insert("test".into(), self.info.title.clone().into());
        for (label, value) in &self.info.lines {
            info.insert(label.trim().replace(' ', "_"), value.clone().into());
        }
        let mut all = Map::new();
        all.insert("test_info".into(), info.into());
        all.insert("BW_unit".into(), unit.name().into());
        all.insert("results".into(), self.rows.iter().map(|row| row.to_json(unit)).collect());
        if let Some((name, value)) = extra {
            all.insert(name.into(), value);
        }
        Value::Object(all)
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

/// A closed pipe behind us is not worth a panic.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bandwidth() -> Row {
        Row::Bandwidth(BandwidthRow {
            bytes: 65536,
            iterations: 1000,
            peak: Some(2.0 * 1_048_576.0),
            average: 1_048_576.0,
            cpu: Some(CpuUse::of(0.5, Some(0.25), f64::from(1 << 30), 1.0)),
        })
    }

    fn fields(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn a_bandwidth_row_has_perftests_columns() {
        let row = bandwidth();
        let unit = RateUnit::MebibytesPerSecond;
        assert_eq!(
            row.head(unit, false),
            " #bytes     #iterations    BW peak[MiB/sec]     BW average[MiB/sec]    MsgRate[Mpps]  "
        );
        assert_eq!(fields(&row.line(unit, false)), ["65536", "1000", "2.00", "1.00", "0.000016"]);
        assert_eq!(fields(&row.line(unit, true))[5..], ["50.00", "0.750"]);
        assert_eq!(fields(&row.line(RateUnit::GigabitsPerSecond, false))[3], "0.01");
    }

    #[test]
    fn a_latency_row_has_perftests_columns() {
        let summary =
            Summary { min: 1.0, max: 9.0, typical: 2.0, average: 3.0, stdev: 0.5, p99: 8.0, p999: 8.5 };
        let row = Row::Latency(LatencyRow { bytes: 2, iterations: 1000, summary });
        let line = row.line(RateUnit::default(), false);
        assert_eq!(fields(&line), ["2", "1000", "1.00", "9.00", "2.00", "3.00", "0.50", "8.00", "8.50"]);
        assert_eq!(row.figure(Figure::Latency, RateUnit::default()).as_deref(), Some("3.00"));
        assert_eq!(row.figure(Figure::Bandwidth, RateUnit::default()), None);
    }

    #[test]
    fn json_is_valid_and_has_perftests_names() {
        let output = OutputArgs {
            report_gbits: false,
            out_json: true,
            out_json_file: None,
            output: None,
            cpu_util: false,
            pin: None,
        };
        let info = Info::new("RDMA_Write BW Test").line("Transport type", "IW").line("Number of qps", 1);
        let report = Report { output, info, rows: vec![bandwidth()] };
        let text = report.to_json(Some(("counters", json!({"drops": 0})))).to_string();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["test_info"]["Transport_type"], "IW");
        assert_eq!(value["results"][0]["MsgSize"], 65536);
        assert_eq!(value["results"][0]["BW_average"], 1.0);
        assert_eq!(value["counters"]["drops"], 0);
    }

    #[test]
    fn the_block_has_two_labels_a_line() {
        let text = block(
            &Info::new("Send BW Test").line("Device", "xw0").line("Number of qps", 4).line("Mtu", 1500),
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1].trim(), "Send BW Test");
        assert_eq!(lines[2], " Device          : xw0             Number of qps   : 4");
        assert_eq!(lines[3], " Mtu             : 1500");
    }
}
