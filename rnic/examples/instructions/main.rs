//! Instructions of both ends per small message and per full frame, by function: two engines in one thread on a link in
//! memory, counted by callgrind. No noise of a machine moves these figures, so they show the cost or saving of a
//! change.
//!
//!     ci/instructions [--record | --framings]      needs valgrind, which the script installs
//!
//! The link's own work does not count, nor does the kernel's.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on panics")]

mod counted;
mod memory_link;
mod profile;

use std::{
    env,
    fmt::Write as _,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use xwarp_tcp::{
    framing::FramingConfig,
    mpa::{Markers, MpaConfig},
    rdma_tcp::RdmaTcpConfig,
};

use self::{
    counted::{Pair, SCENARIOS, Scenario, Unit},
    profile::{Profile, is_bytes},
};

const HELP: &str = "\
Counts the instructions of both ends per message and per frame under callgrind, and prints what moved since the
figures that were recorded last.

usage: instructions [--record]              --record replaces the recorded figures
       instructions --framings              compares the framings
       instructions --count NAME FRAMING    runs the traffic of one scenario, under the profiler";

/// The page with the recorded figures.
const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/measurements/instructions.md");

/// The function whose instructions count: the traffic.
const COUNTED: &str = "*counted::Pair::counted*";

/// The same function in another pattern, because callgrind has one setting per pattern. Before it begins, the link's
/// functions switch counting on, so the costs until then are dropped.
const STARTS: &str = "*Pair::counted*";

/// The functions within it whose instructions do not count.
const LINK: &str = "*MemoryLink as xwarp_tcp::link::Link*";

/// Functions with fewer instructions per unit are not listed.
const LEAST_LISTED: f64 = 10.0;

/// Changes of fewer instructions per unit are not printed.
const LEAST_MOVED: f64 = 5.0;

/// Figures of one scenario, per unit.
struct Figures {
    scenario: Scenario,
    /// Everything, and the part of copies, CRCs and checksums.
    total: f64,
    bytes: f64,
    /// Functions with their instructions, the largest first.
    functions: Vec<(String, f64)>,
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--count", name, framing] => count(name, framing),
        ["--framings"] => compare_framings(),
        [] => report(false),
        ["--record"] => report(true),
        _ => println!("{HELP}"),
    }
}

/// Names of the framings: MPA with markers, without, and RDMA/TCP.
const FRAMINGS: [&str; 3] = ["markers", "no-markers", "rdma-tcp"];

fn framing(name: &str) -> FramingConfig {
    match name {
        "markers" => MpaConfig::default().into(),
        "no-markers" => MpaConfig { markers: Markers::Off, ..MpaConfig::default() }.into(),
        _ => RdmaTcpConfig::default().into(),
    }
}

fn count(name: &str, of: &str) {
    let scenario = SCENARIOS.iter().find(|s| s.name == name).expect("a scenario's name");
    println!("{}", Pair::new(*scenario, &framing(of)).run());
}

/// Prints the instructions of each scenario with each framing: all, and besides those that work on the bytes.
fn compare_framings() {
    println!("| scenario | unit | MPA, markers | MPA, no markers | RDMA/TCP |\n|---|---|--:|--:|--:|");
    for scenario in SCENARIOS {
        let columns = FRAMINGS.map(|framing| {
            let Figures { total, bytes, .. } = profiled(scenario, framing);
            format!("{total:.0} ({:.0})", total - bytes)
        });
        println!("| {} | {} | {} |", scenario.name, unit(&scenario), columns.join(" | "));
    }
}

fn report(record: bool) {
    let recorded = fs::read_to_string(RECORD).unwrap_or_default();
    let figures: Vec<_> = SCENARIOS.into_iter().map(|scenario| profiled(scenario, FRAMINGS[0])).collect();
    let page = page(&figures);
    println!("{page}");
    print_moved(&recorded, &page);
    if record {
        fs::write(RECORD, page).unwrap();
    }
}

/// Runs one scenario under callgrind.
fn profiled(scenario: Scenario, framing: &str) -> Figures {
    let output = env::temp_dir().join(format!("xwarp-instructions-{}-{}", std::process::id(), scenario.name));
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--dump-line=no"])
        .args([COUNTED, LINK].map(|function| format!("--toggle-collect={function}")))
        .arg(format!("--zero-before={STARTS}"))
        .arg(format!("--callgrind-out-file={}", output.display()))
        .arg(env::current_exe().unwrap())
        .args(["--count", scenario.name, framing])
        .stderr(Stdio::inherit())
        .output()
        .expect("valgrind runs");
    assert!(run.status.success(), "{}: {}", scenario.name, run.status);
    let units: f64 = String::from_utf8_lossy(&run.stdout).trim().parse().unwrap();
    let profile = Profile::parse(&fs::read_to_string(&output).unwrap());
    fs::remove_file(&output).unwrap();
    let per_unit = |instructions: u64| instructions as f64 / units;
    let mut functions: Vec<_> = profile.0.iter().map(|(name, n)| (name.clone(), per_unit(*n))).collect();
    functions.sort_by(|a, b| b.1.total_cmp(&a.1));
    Figures { scenario, total: per_unit(profile.total()), bytes: per_unit(profile.bytes()), functions }
}

/// The page with all figures.
fn page(figures: &[Figures]) -> String {
    let mut page = String::from(HEAD);
    for Figures { scenario, total, bytes, .. } in figures {
        let unit = unit(scenario);
        let besides = total - bytes;
        writeln!(
            page,
            "| {} | {} | {unit} | {total:.0} | {bytes:.0} | **{besides:.0}** |",
            scenario.name, scenario.what
        )
        .unwrap();
    }
    for Figures { scenario, functions, .. } in figures {
        write!(
            page,
            "\n## {}, by function, per {}\n\n| instructions | function |\n|--:|---|\n",
            scenario.name,
            unit(scenario)
        )
        .unwrap();
        for (name, instructions) in functions.iter().filter(|f| f.1 >= LEAST_LISTED) {
            let mark = if is_bytes(name) { " (bytes)" } else { "" };
            writeln!(page, "| {instructions:.0} | `{name}`{mark} |").unwrap();
        }
    }
    page
}

fn unit(scenario: &Scenario) -> &'static str {
    match scenario.unit {
        Unit::Message => "message",
        Unit::Frame => "frame",
    }
}

/// Prints the rows of both pages that differ by more than [`LEAST_MOVED`].
fn print_moved(recorded: &str, page: &str) {
    let (before, now) = (rows(recorded), rows(page));
    if before.is_empty() {
        return println!("Nothing was recorded in {}.", Path::new(RECORD).display());
    }
    println!("Moved since the recorded figures:");
    for (key, new) in &now {
        let old = before.iter().find(|(k, _)| k == key).map_or(0.0, |(_, old)| *old);
        if (new - old).abs() >= LEAST_MOVED {
            println!("{:+8.0}  {old:8.0} -> {new:8.0}  {key}", new - old);
        }
    }
    for (key, old) in before.iter().filter(|(k, _)| now.iter().all(|(key, _)| key != k)) {
        println!("{:+8.0}  {old:8.0} -> {:8.0}  {key}", -old, 0.0);
    }
}

/// Rows of a page, with the heading they stand under: name and instructions.
fn rows(page: &str) -> Vec<(String, f64)> {
    let mut heading = "";
    let mut rows = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            heading = title.split(',').next().unwrap_or_default();
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let row = match cells[..] {
            [name, _, _, total, _, _] => Some((format!("{name}: in all"), total)),
            [instructions, function] => Some((format!("{heading}: {function}"), instructions)),
            _ => None,
        };
        rows.extend(row.and_then(|(key, number)| Some((key, number.parse().ok()?))));
    }
    rows
}

const HEAD: &str = "\
# Instructions per message and per frame

Printed by `ci/instructions --record`. Two engines run in one thread and virtual time on a link in memory, under callgrind
(`rnic/examples/instructions`); each figure is the sum of both ends, from posting to the completion at both, including
acknowledgements, polls and turns. The work of the link does not count, nor does the kernel's; the lock and the clock of the
public API are not part of it. CRC and markers are on, IPv4 unless the name says v6, one connection. *Bytes* is the part that
works on the bytes themselves: copies of payload, CRC32c and TCP checksum. Figures do not depend on the machine's speed or load;
they do depend on the compiler and on which instructions valgrind knows (it has no AVX-512).

| scenario | traffic | unit | instructions | bytes | besides bytes |
|---|---|---|--:|--:|--:|
";
