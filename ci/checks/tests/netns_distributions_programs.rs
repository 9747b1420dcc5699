//! The RDMA programs of other distributions than this machine's, in root file systems that `ci/distributions` makes, over the
//! libraries that were built here. The outcome of each row of the table in `docs/compat.md` is compared with its cell.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::fmt::Write as _;

use xwarp_checks::programs::{documented, run_all};

/// Runs the programs of `suite`; each row must have the outcome that its cell in `column` says.
fn programs_of(suite: &'static str, column: &str) {
    let cells = documented(column).unwrap();
    let mut wrong = String::new();
    for outcome in run_all(suite) {
        let cell = cells.iter().find(|(programs, _)| programs == outcome.programs);
        let (_, cell) = cell.unwrap_or_else(|| panic!("no row {}", outcome.programs));
        if cell.starts_with("yes") == outcome.result.is_ok() {
            continue;
        }
        writeln!(wrong, "{}: {cell}, but: {:?}", outcome.programs, outcome.result).unwrap();
    }
    assert!(wrong.is_empty(), "docs/compat.md, {column}:\n{wrong}");
}

#[test]
fn netns_distributions_debian_13_runs_the_programs() {
    programs_of("trixie", "Debian 13");
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_distributions_debian_12_runs_the_programs() {
    programs_of("bookworm", "Debian 12");
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_distributions_forky_runs_the_programs() {
    programs_of("forky", "forky, sid");
}

#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_distributions_sid_runs_the_programs() {
    programs_of("sid", "forky, sid");
}
