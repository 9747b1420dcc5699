//! The distribution's RDMA programs in a lab, under `xwarp run`.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    lab::{INTERFACE, Lab, Side},
    process::Running,
    vm::built,
};

/// What clients say when nobody listens yet.
const REFUSALS: [&str; 4] = ["REJECTED", "CM event bl blka 8", "refused", "Couldn't connect"];
/// Time limit for a server to listen, and the interval between two attempts.
const LISTENS_WITHIN: Duration = Duration::from_secs(15);
const RETRY: Duration = Duration::from_millis(200);
/// Time limit of one program.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Path of `xwarp`, which finds the library beside itself.
fn xwarp() -> Result<PathBuf> {
    built("libxwarp_compat.so")?;
    built("xwarp")
}

/// Starts `line`, a program and its arguments, over xwarp.
pub fn start(lab: &Lab, side: Side, line: &str) -> Result<Running> {
    start_with(lab, side, &[], line)
}

/// The same, with environment variables.
pub fn start_with(lab: &Lab, side: Side, variables: &[(&str, &str)], line: &str) -> Result<Running> {
    let mut command = lab.command(side, xwarp()?);
    command.args(["run", "--device", INTERFACE]).args(line.split_whitespace());
    command.envs(variables.iter().copied());
    Running::start(command)
}

/// Runs `line` to its successful end and returns what it said.
pub fn run(lab: &Lab, side: Side, line: &str) -> Result<String> {
    start(lab, side, line)?.finish(LIMIT)
}

/// Runs a server on side B and a client on side A; both must succeed. Returns what they said.
pub fn pair(lab: &Lab, server: &str, client: &str) -> Result<[String; 2]> {
    let mut server = start(lab, Side::B, server)?;
    let client = connect(lab, &mut server, client)?;
    let server = server.finish(LIMIT).with_context(|| format!("the client said: {client}"))?;
    Ok([server, client])
}

/// Runs a client on side A to its successful end, and returns what it said. Programs do not say when they listen, so a client
/// that is refused is started again.
pub fn connect(lab: &Lab, server: &mut Running, client: &str) -> Result<String> {
    let begin = Instant::now();
    loop {
        let mut running = start(lab, Side::A, client)?;
        let status = running.wait(LIMIT).with_context(|| format!("the server said: {}", server.output()))?;
        let said = running.output();
        if status.success() {
            return Ok(said);
        }
        let is_early = REFUSALS.iter().any(|words| said.contains(words)) && begin.elapsed() < LISTENS_WITHIN;
        if !is_early {
            // Without success of its client the server does not end.
            let _ = server.wait(Duration::from_millis(100));
            bail!("{client}: {status}:\n{said}\nthe server said: {}", server.output());
        }
        std::thread::sleep(RETRY);
    }
}
