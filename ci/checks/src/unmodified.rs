//! The distribution's RDMA programs in a lab, under `xwarp run`.

use std::{
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    lab::{INTERFACE, Lab, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
    vm::built,
};

/// Output of clients when no server listens yet.
pub(crate) const REFUSALS: [&str; 4] = ["REJECTED", "event bl blka 8", "refused", "Couldn't connect"];
/// Time limit for a server to listen, and the interval between two attempts.
const LISTENS_WITHIN: Duration = Duration::from_secs(40);
const RETRY: Duration = Duration::from_millis(200);
/// Time limit of one program.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Path of `xwarp`, which finds the library of `xwarp run` beside itself.
pub fn xwarp() -> Result<PathBuf> {
    built("libxwarp_compat.so")?;
    built("xwarp")
}

/// Starts `line`, a program and its arguments, over xwarp.
pub fn start(lab: &Lab, side: Side, line: &str) -> Result<Running> {
    start_with(lab, side, &[], line)
}

/// The same, with environment variables.
pub fn start_with(lab: &Lab, side: Side, variables: &[(&str, &str)], line: &str) -> Result<Running> {
    let mut command = command(lab, side, &[INTERFACE], line)?;
    command.envs(variables.iter().copied());
    Running::start(command)
}

/// The same, with these interfaces as devices.
pub fn start_over(lab: &Lab, side: Side, devices: &[&str], line: &str) -> Result<Running> {
    Running::start(command(lab, side, devices, line)?)
}

/// The same, with leave to replace another owner's XDP program.
pub fn start_replacing(lab: &Lab, side: Side, line: &str) -> Result<Running> {
    let mut command = lab.program(side, xwarp()?);
    command.args(["run", "--replace-program", "--device", INTERFACE]).args(line.split_whitespace());
    Running::start(command)
}

/// Starts `line` on side A as a user without privileges, over an interface that a helper shares.
pub fn start_shared(lab: &Lab, shared: &SharedInterface, line: &str) -> Result<Running> {
    let mut command = lab.command(Side::A, "prlimit");
    command.args(["--memlock=0", "setpriv", &format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}")]);
    command.args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
    command.arg(xwarp()?).args(["run", "--device", INTERFACE]).args(line.split_whitespace());
    command.env("XWARP_HELPER", shared.socket());
    Running::start(command)
}

fn command(lab: &Lab, side: Side, devices: &[&str], line: &str) -> Result<Command> {
    let mut command = lab.program(side, xwarp()?);
    command.arg("run").args(devices.iter().flat_map(|device| ["--device", device]));
    command.args(line.split_whitespace());
    Ok(command)
}

/// Compiles a program of `tests/compat` and returns its path.
pub fn compiled(lab: &Lab, name: &str, libraries: &[&str]) -> Result<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat").join(name).with_extension("c");
    let program = lab.file(name);
    let output = Command::new("cc").arg("-o").arg(&program).arg(&source).args(libraries).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program.display().to_string())
}

/// Runs `line` to its successful end and returns its output.
pub fn run(lab: &Lab, side: Side, line: &str) -> Result<String> {
    start(lab, side, line)?.finish(LIMIT)
}

/// The same, with environment variables.
pub fn run_with(lab: &Lab, side: Side, variables: &[(&str, &str)], line: &str) -> Result<String> {
    start_with(lab, side, variables, line)?.finish(LIMIT)
}

/// Runs a server on side B and a client on side A; both must succeed. Returns their output.
pub fn pair(lab: &Lab, server: &str, client: &str) -> Result<[String; 2]> {
    let mut server = start(lab, Side::B, server)?;
    let client = connect(lab, &mut server, client)?;
    let server = server.finish(LIMIT).with_context(|| format!("the client said: {client}"))?;
    Ok([server, client])
}

/// Runs a client on side A to its successful end, and returns its output.
pub fn connect(lab: &Lab, server: &mut Running, client: &str) -> Result<String> {
    connect_by(server, client, || start(lab, Side::A, client))
}

/// Waits until a server on side B listens at `address`, by connecting with the kernel of side A. Such a connection has no MPA
/// Request, so it is not reported to the server. A client of several connections needs this, because it cannot be started again:
/// if the server begins to listen between the first and the last connection, it accepts some and waits for the others.
pub fn await_listener(lab: &Lab, address: SocketAddr) -> Result<()> {
    let begin = Instant::now();
    lab.within(Side::A, || {
        while let Err(error) = TcpStream::connect_timeout(&address, LISTENS_WITHIN) {
            ensure!(begin.elapsed() < LISTENS_WITHIN, "nobody listens at {address}: {error}");
            std::thread::sleep(RETRY);
        }
        Ok(())
    })?
}

/// Runs the client that `start` starts to its successful end, and returns its output. Programs do not report when they
/// listen, so a client that is refused is started again.
pub fn connect_by(server: &mut Running, client: &str, start: impl Fn() -> Result<Running>) -> Result<String> {
    let begin = Instant::now();
    loop {
        let mut running = start()?;
        let status = running.wait(LIMIT).with_context(|| format!("the server said: {}", server.output()))?;
        let said = running.output();
        if status.success() {
            return Ok(said);
        }
        let is_early = REFUSALS.iter().any(|words| said.contains(words)) && begin.elapsed() < LISTENS_WITHIN;
        if !is_early {
            // The server does not end unless its client succeeds.
            let _ = server.wait(Duration::from_millis(100));
            bail!("{client}: {status}:\n{said}\nthe server said: {}", server.output());
        }
        std::thread::sleep(RETRY);
    }
}
