//! `xwarp`: the command for people who use or examine xwarp.
#![forbid(unsafe_code)]

mod cli;

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Write as _},
    process::ExitCode,
};

use anyhow::{Context as _, Result};
use clap::Parser as _;
use xwarp_tool::{doctor, explain::explain, lab};

use crate::cli::{Command, DoctorArguments, ExplainArguments, LabArguments, LabCommand, XwarpArguments};

fn main() -> ExitCode {
    let result = match XwarpArguments::parse().command {
        Command::Explain(arguments) => run_explain(&arguments),
        Command::Doctor(arguments) => run_doctor(&arguments),
        Command::Lab(arguments) => run_lab(&arguments),
    };
    match result {
        Ok(code) => code,
        // The reader of a pipe has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xwarp: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

fn run_explain(arguments: &ExplainArguments) -> Result<ExitCode> {
    let path = &arguments.file;
    let input: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Box::new(BufReader::with_capacity(1 << 16, file))
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let result = explain(input, arguments.options(), &mut out)?;
    out.flush()?;
    result.with_context(|| path.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

fn run_doctor(arguments: &DoctorArguments) -> Result<ExitCode> {
    let findings = doctor::examine(arguments.interface.as_deref(), arguments.open);
    let out = &mut io::stdout().lock();
    if arguments.json {
        doctor::write_json(&findings, out)?;
    } else {
        doctor::write(&findings, out)?;
    }
    Ok(if doctor::has_problem(&findings) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The exit code is that of the program that ran in the lab.
fn run_lab(LabArguments { name, command }: &LabArguments) -> Result<ExitCode> {
    let status = match command {
        LabCommand::Up(arguments) => lab::up(name, &arguments.properties()),
        LabCommand::Down => lab::down(name),
        LabCommand::Show => lab::show(name),
        LabCommand::Run { side, command } => lab::run(name, side.name(), command),
    };
    let status = status.context("the lab is made by a script: is bash installed?")?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
