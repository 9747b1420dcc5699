//! `xwarp`: the command for users of xwarp.
#![forbid(unsafe_code)]

mod cli;

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, IsTerminal as _, Write},
    os::{fd::AsFd as _, unix::process::ExitStatusExt as _},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::{CommandFactory as _, Parser as _};
use xwarp_driver::{inspect::Description, one_line};
use xwarp_tool::{
    doctor,
    explain::{Options, explain},
    fabric, helper, lab,
    observed::{self, Choice},
    program::{NotStarted, say},
    run, sdp, stat,
};

use crate::cli::{
    CaptureArguments, Command, DoctorArguments, ExplainArguments, FabricArguments, FabricCommand,
    LabArguments, LabCommand, StatArguments, XwarpArguments,
};

fn main() -> ExitCode {
    let result = match XwarpArguments::parse().command {
        Command::Explain(arguments) => run_explain(&arguments),
        Command::Doctor(arguments) => run_doctor(&arguments),
        Command::Lab(arguments) => run_lab(&arguments),
        Command::Stat(arguments) => run_stat(&arguments),
        Command::Capture(arguments) => run_capture(&arguments),
        Command::Sdp(arguments) => started(sdp::run(&arguments.options(), &arguments.program)),
        Command::Run(arguments) => started(run::run(&arguments.options(), &arguments.program)),
        Command::Fabric(arguments) => run_fabric(&arguments),
        Command::Completions { shell } => print_completions(shell),
        Command::Manual { directory } => write_manual(&directory),
    };
    match result {
        Ok(code) => code,
        // The reader of a pipe has closed it.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            say(&one_line(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// The result of a call that replaces this process by a program: it returns if there is none. The status is that of shells.
fn started(result: Result<()>) -> Result<ExitCode> {
    let Err(error) = result else { return Ok(ExitCode::SUCCESS) };
    let Some(reason) = error.downcast_ref::<NotStarted>() else { return Err(error) };
    say(&reason.to_string());
    Ok(ExitCode::from(reason.status()))
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

fn run_explain(arguments: &ExplainArguments) -> Result<ExitCode> {
    let path = &arguments.file;
    let standard_input = path.as_os_str() == "-";
    let file = if standard_input {
        io::stdin().as_fd().try_clone_to_owned().map(File::from)
    } else {
        File::open(path)
    };
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let live = !file.metadata().is_ok_and(|file| file.is_file());
    let options = Options { live, ..arguments.options() };
    let input = BufReader::with_capacity(1 << 16, file);
    let stdout = io::stdout().lock();
    // The events of a pipe are seen when they occur: standard output is flushed after each line.
    let mut out: Box<dyn Write> = if live { Box::new(stdout) } else { Box::new(BufWriter::new(stdout)) };
    let result = explain(input, options, &mut out)?;
    out.flush()?;
    let name = if standard_input { "standard input".into() } else { path.display().to_string() };
    result.with_context(|| name)?;
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
    // Shells add 128 to the number of the signal that ended a program.
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

fn run_stat(arguments: &StatArguments) -> Result<ExitCode> {
    let choice = arguments.choice.choice();
    let interval = arguments.watch.map(Duration::from_secs);
    let out = &mut io::stdout().lock();
    let mut before = Vec::new();
    loop {
        let shared = shared_interfaces(&choice)?;
        let devices = match observed::find(&choice) {
            Ok(devices) => devices,
            // The helper's interfaces are shown as well.
            Err(_) if !shared.is_empty() => Vec::new(),
            Err(error) => return Err(error),
        };
        let samples = stat::samples(&devices);
        if arguments.json {
            stat::write_json(&samples, &before, &shared, out)?;
        } else {
            if interval.is_some() && io::stdout().is_terminal() {
                // The first column of the first line, and everything below it empty.
                write!(out, "\x1b[H\x1b[J")?;
            }
            helper::write(&shared, out)?;
            stat::write(&samples, &before, out)?;
        }
        out.flush()?;
        let Some(interval) = interval else { break };
        before = samples;
        thread::sleep(interval);
    }
    Ok(ExitCode::SUCCESS)
}

/// The interfaces of the helper, unless devices of one process were requested.
fn shared_interfaces(choice: &Choice) -> Result<Vec<Description>> {
    if choice.pid.is_some() {
        return Ok(Vec::new());
    }
    let mut shared = helper::interfaces()?;
    shared.retain(|shared| choice.interface.as_ref().is_none_or(|name| *name == shared.name));
    Ok(shared)
}

fn run_capture(arguments: &CaptureArguments) -> Result<ExitCode> {
    let device = observed::one(&arguments.choice.choice())?;
    let path = &arguments.write;
    let limit = arguments.seconds.map(Duration::from_secs);
    let ended = Arc::new(AtomicBool::new(false));
    let on_signal = Arc::clone(&ended);
    ctrlc::set_handler(move || on_signal.store(true, Ordering::Relaxed))?;
    if path.as_os_str() == "-" {
        anyhow::ensure!(
            !io::stdout().is_terminal(),
            "a capture is no text: write it to a file, or into a pipe"
        );
        observed::capture(&device, limit, &ended, &mut io::stdout().lock())?;
    } else {
        let mut file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        eprintln!("xwarp: recording {device} to {}; interrupt to end", path.display());
        observed::capture(&device, limit, &ended, &mut file)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn run_fabric(FabricArguments { name, command }: &FabricArguments) -> Result<ExitCode> {
    let name = name.as_deref();
    match command {
        FabricCommand::Start { idle } => fabric::start(name, *idle)?,
        FabricCommand::Serve { idle, detached } => {
            fabric::serve(name, Some(Duration::from_secs(*idle)).filter(|idle| !idle.is_zero()), *detached)?;
        }
        FabricCommand::Stop => fabric::stop(name)?,
        FabricCommand::Set { ends, faults } => {
            fabric::set(name, ends.names(), ends.one_way, &faults.words())?;
        }
        FabricCommand::Cut { ends, after, lasts } => {
            let named = [("after", after), ("for", lasts)];
            let set = named.iter().filter_map(|(word, value)| Some(format!(" {word} {}", value.as_ref()?)));
            fabric::set(name, ends.names(), ends.one_way, &format!("cut{}", set.collect::<String>()))?;
        }
        FabricCommand::Heal(ends) => fabric::set(name, ends.names(), ends.one_way, "heal")?,
        FabricCommand::Show => fabric::show(name, &mut io::stdout().lock())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn print_completions(shell: clap_complete::Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut XwarpArguments::command(), "xwarp", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

fn write_manual(directory: &Path) -> Result<ExitCode> {
    clap_mangen::generate_to(XwarpArguments::command(), directory)
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}
