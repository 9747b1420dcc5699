//! `xwarp doctor`: checks what a machine and an interface need to run xwarp. Each problem has a remedy. The texts of
//! problems are those of the driver's errors, so that they name the same limits and capabilities.

mod fabric;
mod interface;
mod machine;
mod shared;

use std::io::{self, Write};

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it must be.
    Ok,
    /// Works, but the user should know a fact.
    Note,
    /// Works under some conditions only.
    Warning,
    /// xwarp does not work.
    Problem,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The checked item, in one word.
    pub check: &'static str,
    /// The severity.
    pub status: Status,
    /// The finding, as text.
    pub found: String,
    /// The remedy.
    pub advice: Option<String>,
}

impl Finding {
    fn new(check: &'static str, status: Status, found: impl Into<String>) -> Self {
        Self { check, status, found: found.into(), advice: None }
    }

    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Status::Ok, found)
    }

    fn note(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Status::Note, found)
    }

    fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Status::Warning, found)
    }

    fn problem(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Status::Problem, found)
    }

    fn advice(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}

/// Checks the machine, and an interface of the calling thread's network namespace. With `open`, the interface is also opened
/// for a moment.
pub fn examine(interface: Option<&str>, open: bool) -> Vec<Finding> {
    let (finding, shared) = shared::find();
    if let Some((name, granted)) =
        interface.and_then(|name| Some((name, shared.iter().find(|shared| shared.name == name)?)))
    {
        // This process needs no privileges, and may not see the interface.
        return shared::examine(name, granted, finding, open);
    }
    let rights = machine::Rights::of_this_process();
    let mut findings = machine::examine(&rights);
    findings.push(finding);
    findings.push(fabric::find());
    match interface {
        Some(name) => findings.extend(interface::examine(name, &rights, open)),
        None => findings.push(interface::list()),
    }
    findings
}

/// Whether xwarp cannot work.
pub fn has_problem(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.status == Status::Problem)
}

/// Prints findings for people.
pub fn write(findings: &[Finding], out: &mut dyn Write) -> io::Result<()> {
    for Finding { check, status, found, advice } in findings {
        let status = match status {
            Status::Ok => "ok",
            Status::Note => "note",
            Status::Warning => "WARNING",
            Status::Problem => "PROBLEM",
        };
        writeln!(out, "{status:<8} {check:<10} {found}")?;
        if let Some(advice) = advice {
            writeln!(out, "{:19} -> {advice}", "")?;
        }
    }
    Ok(())
}

/// Prints findings as one JSON object.
pub fn write_json(findings: &[Finding], out: &mut dyn Write) -> io::Result<()> {
    #[derive(Serialize)]
    struct Report<'a> {
        problem: bool,
        findings: &'a [Finding],
    }
    serde_json::to_writer_pretty(&mut *out, &Report { problem: has_problem(findings), findings })?;
    writeln!(out)
}
