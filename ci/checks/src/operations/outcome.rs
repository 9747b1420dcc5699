//! What a connection lived through, the comparison of both transports, and the table.

use std::{fmt, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::Operation;

/// A gap that is longer than kernel TCP's by this is worse. Timers of the two differ by less: a delayed probe, a minimal RTO.
const LONGER: Duration = Duration::from_secs(2);

/// A gap below this is none.
const SHORT: Duration = Duration::from_millis(500);

/// What one connection lived through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// `kernel` or `xwarp`.
    pub transport: String,
    /// The server's address.
    pub server: Option<IpAddr>,
    /// Requests that were answered.
    pub exchanges: u64,
    /// Answers whose bytes were wrong.
    pub wrong: u64,
    /// The longest time from a request to its answer, or to the end.
    pub gap: Duration,
    /// When that request was sent, from the start.
    pub gap_at: Duration,
    /// How the connection ended too early.
    pub ended: Option<String>,
    /// Time that a new connection and an exchange took after it, or why there was none.
    pub anew: Result<Duration, String>,
}

impl Default for Outcome {
    fn default() -> Self {
        Self {
            transport: String::new(),
            server: None,
            exchanges: 0,
            wrong: 0,
            gap: Duration::ZERO,
            gap_at: Duration::ZERO,
            ended: None,
            anew: Err("not tried".to_owned()),
        }
    }
}

/// The verdict about an operation that did not run.
const MISSING: &str = "this kernel cannot do it";

/// Begins a line that holds an outcome.
const MARK: &str = "outcome: ";

impl Outcome {
    /// A line of the client's output.
    pub(super) fn to_line(&self) -> String {
        let ms = |time: Duration| time.as_millis() as u64;
        let value = json!({
            "transport": self.transport,
            "server": self.server.map(|it| it.to_string()),
            "exchanges": self.exchanges,
            "wrong": self.wrong,
            "gap_ms": ms(self.gap),
            "gap_at_ms": ms(self.gap_at),
            "ended": self.ended,
            "anew_ms": self.anew.as_ref().ok().map(|time| ms(*time)),
            "refused": self.anew.as_ref().err(),
        });
        format!("{MARK}{value}")
    }

    /// The outcomes in a client's output.
    pub(super) fn parse_all(output: &str) -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for line in output.lines().filter_map(|line| line.strip_prefix(MARK)) {
            let value: Value = serde_json::from_str(line).with_context(|| format!("not JSON: {line}"))?;
            all.push(Self::parse(&value).with_context(|| format!("incomplete: {line}"))?);
        }
        ensure!(!all.is_empty(), "no outcome in {output}");
        Ok(all)
    }

    fn parse(value: &Value) -> Option<Self> {
        let text = |name: &str| value[name].as_str().map(str::to_owned);
        let time = |name: &str| value[name].as_u64().map(Duration::from_millis);
        Some(Self {
            transport: text("transport")?,
            server: text("server")?.parse().ok(),
            exchanges: value["exchanges"].as_u64()?,
            wrong: value["wrong"].as_u64()?,
            gap: time("gap_ms")?,
            gap_at: time("gap_at_ms")?,
            ended: text("ended"),
            anew: time("anew_ms").ok_or_else(|| text("refused").unwrap_or_default()),
        })
    }

    /// Why this is worse than what the kernel's connection lived through.
    fn worse_than(&self, kernel: &Self) -> Option<&'static str> {
        if self.wrong > kernel.wrong {
            Some("wrong bytes")
        } else if self.ended.is_some() && kernel.ended.is_none() {
            Some("ended")
        } else if self.anew.is_err() && kernel.anew.is_ok() {
            Some("no new connection")
        } else if self.gap > kernel.gap + LONGER && kernel.ended.is_none() {
            Some("longer gap")
        } else if kernel.gap > LONGER && self.gap < SHORT {
            // Perhaps against the administrator's will.
            Some("went on")
        } else {
            None
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}", self.gap.as_secs_f64())?;
        if self.wrong > 0 {
            write!(f, ", {} wrong", self.wrong)?;
        }
        if let Some(ended) = &self.ended {
            write!(f, ", {ended}")?;
        }
        if let Err(refused) = &self.anew {
            write!(f, "; anew: {refused}")?;
        }
        Ok(())
    }
}

/// An operation and its outcomes.
#[derive(Debug, Clone)]
pub struct Row {
    /// What was done.
    pub operation: Operation,
    /// Whether `xwarpd` shared the interfaces.
    pub shared: bool,
    /// For each of the server's addresses, one with each transport; none if the kernel lacks what the operation needs.
    pub outcomes: Vec<Outcome>,
}

impl Row {
    /// Pairs of kernel TCP's and our outcome, in the order of the addresses.
    fn pairs(&self) -> impl Iterator<Item = (&Outcome, &Outcome)> {
        let of = |name: &'static str| {
            let mut all: Vec<&Outcome> = self.outcomes.iter().filter(|it| it.transport == name).collect();
            all.sort_by_key(|it| it.server);
            all
        };
        of("kernel").into_iter().zip(of("xwarp"))
    }

    /// What was worse, if anything was.
    pub fn worse(&self) -> Option<&'static str> {
        self.pairs().find_map(|(kernel, ours)| ours.worse_than(kernel))
    }

    /// Whether this kernel has what the operation needs.
    pub fn ran(&self) -> bool {
        !self.outcomes.is_empty()
    }

    /// The reason that is given for it.
    fn reason(&self) -> Option<&String> {
        let shared = self.operation.reason_shared.as_ref().filter(|_| self.shared);
        self.operation.reason.as_ref().or(shared)
    }

    /// Whether something was worse, and no reason is given for it.
    pub fn is_worse_without_reason(&self) -> bool {
        self.worse().is_some() && self.reason().is_none()
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.operation.name)?;
        for (kernel, ours) in self.pairs() {
            write!(f, " kernel {kernel}, xwarp {ours};")?;
        }
        let verdict = if self.ran() { "as kernel TCP" } else { MISSING };
        write!(f, " {}", self.worse().unwrap_or(verdict))
    }
}

/// The table, in Markdown.
pub(super) fn table(rows: &[Row]) -> String {
    let head = [
        "| operation | kernel TCP, IPv4 | xwarp | kernel TCP, IPv6 | xwarp | |",
        "|---|---|---|---|---|---|",
    ];
    let mut lines = head.map(str::to_owned).to_vec();
    let mut group = "";
    for row in rows {
        if row.operation.group != group {
            group = &row.operation.group;
            lines.push(format!("| **{group}** | | | | | |"));
        }
        let mut cells = vec![row.operation.what.clone()];
        cells.extend(row.pairs().flat_map(|(kernel, ours)| [kernel.to_string(), ours.to_string()]));
        cells.resize(5, String::new());
        cells.push(match (row.worse(), row.reason()) {
            (Some(worse), Some(reason)) => format!("{worse}: {reason}"),
            (Some(worse), None) => format!("**{worse}**"),
            (None, _) if !row.ran() => MISSING.to_owned(),
            (None, _) => String::new(),
        });
        lines.push(format!("| {} |", cells.join(" | ")));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(gap: u64, ended: Option<&str>) -> Outcome {
        Outcome {
            transport: "xwarp".to_owned(),
            server: Some(IpAddr::from([10, 77, 0, 2])),
            exchanges: 7,
            gap: Duration::from_millis(gap),
            ended: ended.map(str::to_owned),
            anew: Ok(Duration::from_millis(3)),
            ..Outcome::default()
        }
    }

    #[test]
    fn outcomes_are_read_as_they_were_printed() {
        let refused = Outcome { anew: Err("refused".to_owned()), ..outcome(4, Some("reset")) };
        let text = format!("talks\n{}\n{}\n", outcome(5, None).to_line(), refused.to_line());
        assert_eq!(Outcome::parse_all(&text).unwrap(), [outcome(5, None), refused]);
        assert!(Outcome::parse_all("talks\n").is_err());
    }

    #[test]
    fn an_early_end_a_refusal_and_another_gap_are_worse() {
        let kernel = outcome(1000, None);
        assert_eq!(outcome(2900, None).worse_than(&kernel), None);
        assert_eq!(outcome(3100, None).worse_than(&kernel), Some("longer gap"));
        assert_eq!(outcome(100, None).worse_than(&outcome(3100, None)), Some("went on"));
        assert_eq!(outcome(10, Some("reset")).worse_than(&kernel), Some("ended"));
        assert_eq!(outcome(10, Some("reset")).worse_than(&outcome(1, Some("reset"))), None);
        let refused = Outcome { anew: Err("refused".to_owned()), ..kernel.clone() };
        assert_eq!(refused.worse_than(&kernel), Some("no new connection"));
        assert_eq!(Outcome { wrong: 1, ..kernel.clone() }.worse_than(&kernel), Some("wrong bytes"));
    }
}
