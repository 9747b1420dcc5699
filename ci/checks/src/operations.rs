//! `xwarp-operations`: what kernel TCP and xwarp do while a host or a network is operated. Verified requests and answers cross the same veth over both, in
//! both address families, while a script changes an address, a route, a link or a filter. Each operation is a function in a file of
//! `ci/checks/operations`, and a row of the table: the longest time without an answer, how the connection ended, and whether a new one can be
//! made afterwards.

mod list;
mod outcome;
mod traffic;

use std::{
    collections::VecDeque,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};

pub use self::{
    list::{Network, Operation},
    outcome::{Outcome, Row},
};
use crate::{
    lab::{HOP_INTERFACES, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    rounds,
};

/// Time for a step that does not depend on the operation: starting a program, connecting.
const STEP: Duration = Duration::from_secs(60);

/// Operations of hosts and networks under kernel TCP and xwarp side by side, as a table.
#[derive(Debug, Parser)]
#[command(name = "xwarp-operations")]
#[allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]
struct Args {
    #[command(subcommand)]
    part: Option<Part>,
    /// Only operations whose name contains one of these words
    words: Vec<String>,
    /// List the operations and end
    #[arg(long)]
    list: bool,
    /// Both ends share their interfaces by xwarpd
    #[arg(long)]
    shared: bool,
    /// Number of operations at the same time, each in a lab of its own
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16))]
    parallel: u16,
    /// Also write the table to this file, in Markdown
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// The two ends of the traffic, which the program starts in the namespaces.
#[derive(Debug, Subcommand)]
enum Part {
    /// Answer requests on all addresses, until killed
    #[command(hide = true)]
    Serve {
        /// The helper's socket, if there is one
        #[arg(long)]
        socket: Option<PathBuf>,
    },
    /// Exchange requests and answers
    #[command(hide = true)]
    Talk {
        /// The helper's socket, if there is one
        #[arg(long)]
        socket: Option<PathBuf>,
        /// Duration in seconds
        seconds: u64,
        /// The server's addresses
        servers: Vec<IpAddr>,
    },
}

/// Runs the program.
pub fn main() -> Result<()> {
    let args = Args::parse();
    match args.part {
        Some(Part::Serve { socket }) => return traffic::serve(socket),
        Some(Part::Talk { socket, seconds, servers }) => {
            return traffic::talk(socket, Duration::from_secs(seconds), &servers);
        }
        None => {}
    }
    let mut operations = Operation::all()?;
    operations.retain(|it| args.words.is_empty() || args.words.iter().any(|word| it.name.contains(word)));
    if args.list {
        for it in &operations {
            println!("{:28} {}", it.name, it.what);
        }
        return Ok(());
    }
    ensure!(!operations.is_empty(), "no operation has such a name; --list lists them");
    let programs = rounds::programs()?;
    let runner = Runner {
        program: programs.join("xwarp-operations"),
        helper: args.shared.then(|| programs.join("xwarp-helper")),
        parallel: args.parallel.into(),
    };
    let rows = runner.run_all(operations)?;
    rounds::publish(&outcome::table(&rows), args.out.as_deref())?;
    let worse: Vec<&str> = rows
        .iter()
        .filter(|row| row.is_worse_without_reason())
        .map(|row| row.operation.name.as_str())
        .collect();
    ensure!(worse.is_empty(), "worse than kernel TCP, without a reason: {}", worse.join(", "));
    Ok(())
}

/// How operations are run.
#[derive(Debug, Clone)]
pub struct Runner {
    /// This program.
    pub program: PathBuf,
    /// The helper that shares the interfaces; without it the programs own them.
    pub helper: Option<PathBuf>,
    /// How many labs there are at the same time.
    pub parallel: usize,
}

impl Runner {
    /// Runs `operations` and returns their rows in the same order.
    pub fn run_all(&self, operations: Vec<Operation>) -> Result<Vec<Row>> {
        let waiting: Mutex<VecDeque<_>> = Mutex::new(operations.into_iter().enumerate().collect());
        let rows = Mutex::new(Vec::new());
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        thread::scope(|scope| {
            for _ in 0..self.parallel {
                scope.spawn(|| {
                    while let Some((number, operation)) = next() {
                        let name = operation.name.clone();
                        let row = self.run(operation).with_context(|| format!("operation {name}"));
                        match &row {
                            Ok(row) => eprintln!("{row}"),
                            Err(error) => eprintln!("{error:#}"),
                        }
                        rows.lock().unwrap_or_else(PoisonError::into_inner).push((number, row));
                    }
                });
            }
        });
        let mut rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
        rows.sort_by_key(|(number, _)| *number);
        rows.into_iter().map(|(_, row)| row).collect()
    }

    /// Runs one operation in a lab of its own.
    fn run(&self, operation: Operation) -> Result<Row> {
        let routed = operation.network == Network::Routed;
        let lab = Lab::up(LabOptions { hop: routed, queues: operation.queues, ..LabOptions::default() })?;
        let mut script = Script::new(&lab);
        script.run(match operation.network {
            Network::Direct => "direct",
            Network::Routed => "routed",
        })?;
        let helpers = [self.help(&lab, Side::A)?, self.help(&lab, Side::B)?];
        let mut server = self.start(&lab, Side::B, &["serve"])?;
        server.wait_for("listens", STEP)?;
        script.server = server.id();
        let servers: Vec<String> = operation.servers.iter().map(ToString::to_string).collect();
        let seconds = operation.seconds.to_string();
        let mut line = vec!["talk", &seconds];
        line.extend(servers.iter().map(String::as_str));
        let mut client = self.start(&lab, Side::A, &line)?;
        client.wait_for("talks", STEP)?;
        script.client = client.id();
        thread::sleep(Duration::from_secs(1));
        let performed = script.run(&operation.name);
        let text = client.finish(Duration::from_secs(operation.seconds) + STEP)?;
        drop(helpers);
        match performed {
            // What the kernel was built without.
            Err(error)
                if ["Unknown device type", "not supported"]
                    .iter()
                    .any(|it| error.to_string().contains(it)) =>
            {
                Ok(Row { operation, shared: self.helper.is_some(), outcomes: Vec::new() })
            }
            performed => performed.and_then(|()| {
                Ok(Row { outcomes: Outcome::parse_all(&text)?, shared: self.helper.is_some(), operation })
            }),
        }
    }

    /// Starts this program in one namespace.
    fn start(&self, lab: &Lab, side: Side, words: &[&str]) -> Result<Running> {
        let mut command = lab.command(side, &self.program);
        command.args(words);
        if self.helper.is_some() {
            command.args(["--socket".as_ref(), socket(lab, side).as_os_str()]);
        }
        Running::start(command)
    }

    /// Starts the helper of one side, if there shall be one.
    fn help(&self, lab: &Lab, side: Side) -> Result<Option<Running>> {
        let Some(helper) = &self.helper else { return Ok(None) };
        let mut command = lab.command(side, helper);
        command.args([INTERFACE.as_ref(), "--socket".as_ref(), socket(lab, side).as_os_str()]);
        let mut helper = Running::start(command)?;
        helper.wait_for("ready", STEP)?;
        Ok(Some(helper))
    }
}

/// Where the helper of a side listens.
fn socket(lab: &Lab, side: Side) -> PathBuf {
    lab.file(match side {
        Side::A => "a.sock",
        Side::B => "b.sock",
    })
}

/// The scripts of the operations, with the names of one lab.
struct Script<'a> {
    lab: &'a Lab,
    server: u32,
    client: u32,
}

impl<'a> Script<'a> {
    fn new(lab: &'a Lab) -> Self {
        Self { lab, server: 0, client: 0 }
    }

    /// Runs a function of the scripts.
    fn run(&self, function: &str) -> Result<()> {
        let mut bash = Command::new("bash");
        bash.args(["-euc", "for file in \"$1\"/*.sh; do . \"$file\"; done; \"$2\"", "bash"])
            .arg(list::folder())
            .arg(function)
            .env("LAB_A", self.lab.namespace(Side::A))
            .env("LAB_B", self.lab.namespace(Side::B))
            .env("LAB_HOP", self.lab.hop_namespace())
            .env("SERVER", self.server.to_string())
            .env("CLIENT", self.client.to_string())
            .env("X", INTERFACE)
            .env("HOP_A", HOP_INTERFACES[0])
            .env("HOP_B", HOP_INTERFACES[1])
            .env("SCRATCH", self.lab.file(""));
        Running::start(bash)?.finish(STEP).map(drop)
    }
}

/// Text of a file of `ci/checks/operations`.
fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
