//! `xwarp stat`: samples of running devices, as text and as JSON.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    time::{Duration, Instant},
};

use serde::Serialize;

use xwarp_driver::inspect::Description;

use crate::{
    helper,
    observed::{Device, printable},
};

/// Longest time that the devices of one user may take for their answers, together.
const PATIENCE_OF_USER: Duration = Duration::from_secs(5);

/// A device at one time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// Facts and counters of the device by name.
    pub device: BTreeMap<String, String>,
    /// Facts and counters of each queue pair by name.
    pub queue_pairs: Vec<BTreeMap<String, String>>,
}

/// Asks devices. Those that do not answer are left out; a user whose devices delay their answers delays nobody for long.
pub fn samples(devices: &[Device]) -> Vec<Sample> {
    let mut waited: BTreeMap<u32, Duration> = BTreeMap::new();
    let ask = |device: &Device| {
        let waited = waited.entry(device.owner()).or_default();
        if *waited >= PATIENCE_OF_USER {
            return None;
        }
        let begin = Instant::now();
        let answer = device.describe();
        *waited += begin.elapsed();
        parse(&answer.ok()?)
    };
    devices.iter().filter_map(ask).collect()
}

/// Reads an answer; `None` if it is incomplete or of another version. Its texts are those of another user, perhaps, and come
/// without control characters.
fn parse(answer: &str) -> Option<Sample> {
    let mut lines = answer.lines();
    let version = lines.next()?.strip_prefix("xwarp ")?;
    if version.parse() != Ok(xwarp_verbs::observe::VERSION) {
        return None;
    }
    let mut sample = Sample { device: BTreeMap::new(), queue_pairs: Vec::new() };
    for line in lines {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "end" => return Some(sample),
            "qp" => {
                let fields = value.split(' ').filter_map(|field| field.split_once('='));
                let fields = fields.map(|(name, value)| (printable(name), printable(value)));
                sample.queue_pairs.push(fields.collect());
            }
            _ => drop(sample.device.insert(printable(name), printable(value))),
        }
    }
    None
}

impl Sample {
    fn fact(&self, name: &str) -> &str {
        self.device.get(name).map_or("", String::as_str)
    }

    fn is_same_device(&self, other: &Self) -> bool {
        ["pid", "interface"].iter().all(|name| self.fact(name) == other.fact(name))
    }

    /// Seconds since an earlier sample of the same device.
    fn seconds_since(&self, earlier: &Self) -> Option<f64> {
        let nanoseconds = |sample: &Self| sample.fact("nanoseconds").parse::<u64>().ok();
        let passed = nanoseconds(self)?.checked_sub(nanoseconds(earlier)?)?;
        (passed > 0).then_some(passed as f64 / 1e9)
    }
}

fn number(qp: &BTreeMap<String, String>, name: &str) -> Option<u64> {
    qp.get(name)?.parse().ok()
}

/// Growth of a counter of the queue pair per second since the sample before.
fn rate(qp: &BTreeMap<String, String>, name: &str, sample: &Sample, before: &[Sample]) -> Option<f64> {
    let earlier = before.iter().find(|earlier| sample.is_same_device(earlier))?;
    let same = earlier.queue_pairs.iter().find(|other| other.get("number") == qp.get("number"))?;
    let grown = number(qp, name)?.checked_sub(number(same, name)?)?;
    Some(grown as f64 / sample.seconds_since(earlier)?)
}

/// Prints samples as text; `before` has the previous samples.
pub fn write(samples: &[Sample], before: &[Sample], out: &mut dyn Write) -> io::Result<()> {
    for sample in samples {
        let Sample { queue_pairs, .. } = sample;
        let owner = match (sample.fact("mode"), sample.fact("shared")) {
            ("memory", "true") => "on the fabric",
            (_, "true") => "shared by xwarpd",
            _ => "owned",
        };
        writeln!(
            out,
            "{} of process {} ({}): {}, {owner}, MTU {}, {}, {} queue pair{}",
            sample.fact("interface"),
            sample.fact("pid"),
            sample.fact("process"),
            sample.fact("mode"),
            sample.fact("mtu"),
            if sample.fact("up") == "true" { "up" } else { "DOWN" },
            queue_pairs.len(),
            if queue_pairs.len() == 1 { "" } else { "s" }
        )?;
        if queue_pairs.is_empty() {
            continue;
        }
        writeln!(
            out,
            "  {:>6} {:<10} {:<40} {:>9} {:>9} {:>9} {:>8} {:>10} {:>10}",
            "qp", "state", "peer", "rtt us", "wnd", "flight", "retrans", "in MB/s", "out MB/s"
        )?;
        for qp in queue_pairs {
            write_qp(qp, sample, before, out)?;
        }
    }
    writeln!(out)
}

fn write_qp(
    qp: &BTreeMap<String, String>,
    sample: &Sample,
    before: &[Sample],
    out: &mut dyn Write,
) -> io::Result<()> {
    let text = |name: &str| qp.get(name).map_or("-", String::as_str);
    let rtt = number(qp, "srtt_ns").filter(|ns| *ns > 0);
    let rtt = rtt.map_or_else(|| "-".to_owned(), |ns| format!("{:.1}", ns as f64 / 1e3));
    let rate =
        |name| rate(qp, name, sample, before).map_or_else(|| "-".to_owned(), |r| format!("{:.3}", r / 1e6));
    writeln!(
        out,
        "  {:>6} {:<10} {:<40} {rtt:>9} {:>9} {:>9} {:>8} {:>10} {:>10}",
        text("number"),
        text("state"),
        text("peer"),
        text("cwnd"),
        text("in_flight"),
        text("retransmits"),
        rate("bytes_in"),
        rate("bytes_out")
    )
}

/// Prints samples and the interfaces of the helper as one JSON object in one line. Numbers are numbers; rates are bytes per
/// second.
pub fn write_json(
    samples: &[Sample],
    before: &[Sample],
    shared: &[Description],
    out: &mut dyn Write,
) -> io::Result<()> {
    use serde_json::{Map, Value};
    let object = |fields: &BTreeMap<String, String>| -> Map<String, Value> {
        let value = |text: &String| match (text.parse::<u64>(), text.parse::<bool>()) {
            (Ok(number), _) => Value::from(number),
            (_, Ok(truth)) => Value::from(truth),
            _ => Value::from(text.as_str()),
        };
        fields.iter().map(|(name, text)| (name.clone(), value(text))).collect()
    };
    let devices: Vec<Value> = samples
        .iter()
        .map(|sample| {
            let qps = sample.queue_pairs.iter().map(|qp| {
                let mut fields = object(qp);
                for (name, counter) in [("in_rate", "bytes_in"), ("out_rate", "bytes_out")] {
                    if let Some(rate) = rate(qp, counter, sample, before) {
                        fields.insert(name.to_owned(), rate.into());
                    }
                }
                Value::Object(fields)
            });
            let mut device = object(&sample.device);
            device.insert("queue_pairs".to_owned(), qps.collect());
            Value::Object(device)
        })
        .collect();
    serde_json::to_writer(
        &mut *out,
        &serde_json::json!({ "devices": devices, "shared": helper::json(shared) }),
    )?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "xwarp 1\npid 7\ninterface xw0\nup true\nnanoseconds 2000000000\ntcp.segments_in 9\n\
                          qp number=3 state=connected peer=[fd77::2]:4791 srtt_ns=12500 cwnd=14480 bytes_in=4000000 bytes_out=0\nend\n";

    #[test]
    fn answers_are_read_whole_or_not_at_all() {
        let sample = parse(ANSWER).unwrap();
        assert_eq!(sample.fact("tcp.segments_in"), "9");
        assert_eq!(number(&sample.queue_pairs[0], "cwnd"), Some(14480));
        for cut in 0..ANSWER.len() - 4 {
            assert_eq!(parse(&ANSWER[..cut]), None, "{cut}");
        }
        assert_eq!(parse(&ANSWER.replace("xwarp 1", "xwarp 2")), None);
    }

    #[test]
    fn rates_are_the_growth_between_two_samples() {
        let before = parse(ANSWER).unwrap();
        let later = ANSWER.replace("nanoseconds 2", "nanoseconds 4").replace("bytes_in=4", "bytes_in=9");
        let mut out = Vec::new();
        write(&[parse(&later).unwrap()], &[before], &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("xw0 of process 7"), "{text}");
        assert!(text.contains("[fd77::2]:4791") && text.contains("12.5") && text.contains("2.500"), "{text}");
    }
}
