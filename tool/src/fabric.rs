//! `xwarp fabric`: serves the fabric of a user, starts, shows and ends it.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Write},
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::{
    signal::{SigSet, Signal, kill},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{fd::AsFd as _, process::setsid};
use xwarp_control::{Description, Reply, Request};
use xwarp_fabric::{Attempt, Options, Place, Server};
use xwarp_leg::{fabric::Fabric, hosts, keep_from_programs};

/// What a serving process writes when it serves.
const READY: &str = "ready";
/// Longest wait for another process that begins to serve.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two looks at it.
const PAUSE: Duration = Duration::from_millis(5);

/// Serves until no client has been there for `idle` (`None`: for ever), or a signal asks for the end. `detached`: writes a line when it
/// serves, and leaves its starter's session.
pub fn serve(name: Option<&str>, idle: Option<Duration>, detached: bool) -> Result<()> {
    let place = Place::of(name)?;
    let mut signals = SigSet::empty();
    signals.extend([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block()?;
    let stop = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let server = match Server::begin(&place, Options { idle }).context("serving the fabric")? {
        Attempt::Serving(server) => server,
        Attempt::Elsewhere if detached => return Ok(()),
        Attempt::Elsewhere => bail!("the fabric {} is served by another process", place.name()),
    };
    if detached {
        let _ = setsid();
        env::set_current_dir("/")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{READY}")?;
        out.flush()?;
        // Whoever waits for the end of the output goes on.
        let nothing = fs::File::options().write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdout(&nothing)?;
    } else {
        eprintln!("xwarp: serving the fabric {} at {}", place.name(), place.socket().display());
    }
    Ok(server.serve(Some(stop.as_fd()))?)
}

/// Starts a process that serves, and returns when it does. Does nothing if one serves already.
pub fn start(name: Option<&str>, idle: u64) -> Result<()> {
    keep_from_programs();
    let place = Place::of(name)?;
    let end = Instant::now() + PATIENCE;
    loop {
        if Fabric::connect_once(&place).is_ok() {
            return Ok(());
        }
        let log = fs::File::create(place.log())
            .with_context(|| format!("cannot write {}", place.log().display()))?;
        let mut command = Command::new(env::current_exe()?);
        command.arg0("xwarp-fabric").args(["fabric", "serve", "--detached", "--name", place.name()]);
        command.args(["--idle", &idle.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().context("starting a process")?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        if line.trim_end() == READY {
            return Ok(());
        }
        let status = child.wait()?;
        if !status.success() {
            let said = fs::read_to_string(place.log()).unwrap_or_default();
            bail!("{}", said.lines().last().unwrap_or("the serving process failed"));
        }
        // Another process holds the lock: it begins to serve, or ends.
        ensure!(Instant::now() < end, "another process holds {}, and does not serve", place.lock().display());
        thread::sleep(PAUSE);
    }
}

/// Ends the fabric: its devices end.
pub fn stop(name: Option<&str>) -> Result<()> {
    let place = Place::of(name)?;
    let fabric =
        Fabric::connect_once(&place).with_context(|| format!("the fabric {} does not run", place.name()))?;
    kill(nix::unistd::Pid::from_raw(i32::try_from(fabric.pid()?)?), Signal::SIGTERM)?;
    let end = Instant::now() + PATIENCE;
    while Fabric::connect_once(&place).is_ok() {
        ensure!(Instant::now() < end, "the fabric does not end");
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Changes the faults between two hosts, in both directions unless `one_way`.
pub fn set(name: Option<&str>, [from, to]: [&str; 2], one_way: bool, words: &str) -> Result<()> {
    let place = Place::of(name)?;
    let fabric =
        Fabric::connect_once(&place).with_context(|| format!("the fabric {} does not run", place.name()))?;
    fabric.set_faults(from, to, words)?;
    if !one_way {
        fabric.set_faults(to, from, words)?;
    }
    Ok(())
}

/// Prints the hosts of the fabric, and its counters.
pub fn show(name: Option<&str>, out: &mut dyn Write) -> Result<()> {
    let place = Place::of(name)?;
    let Ok(fabric) = Fabric::connect_once(&place) else {
        writeln!(
            out,
            "the fabric {} does not run: it starts with the first program that asks",
            place.name()
        )?;
        return Ok(());
    };
    writeln!(out, "fabric {} (pid {}) at {}", place.name(), fabric.pid()?, place.socket().display())?;
    let mut number = 0;
    let last = loop {
        let host = describe(&fabric, number)?;
        let [v4, v6] = hosts::addresses(number);
        writeln!(out, "  {:<16} {v4:<16} {v6:<24} {} devices", host.name, host.devices)?;
        number += 1;
        if number >= host.interfaces {
            break host;
        }
    };
    for (name, value) in last.counters.iter().filter(|(_, value)| *value > 0) {
        writeln!(out, "  {name} {value}")?;
    }
    Ok(())
}

fn describe(fabric: &Fabric, number: u16) -> Result<Description> {
    match fabric.call(Request::Describe { number })? {
        Reply::Described(description) => Ok(description),
        other => bail!("an unexpected answer: {other:?}"),
    }
}
