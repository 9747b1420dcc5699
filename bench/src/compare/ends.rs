//! The two ends of a measurement: this program, once in each namespace.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::options::CompareArgs;

/// The result of one measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Outcome {
    /// The result, in microseconds or Gb/sec.
    pub value: f64,
    /// 99th percentile, in microseconds.
    pub tail: Option<f64>,
    /// Seconds of CPU time of both ends for each GiB.
    pub cpu: Option<f64>,
}

/// Parameters for starting the two ends.
#[derive(Debug)]
pub(super) struct Ends {
    program: PathBuf,
    namespaces: (String, String),
    cpus: (usize, usize),
    server: String,
    json: PathBuf,
}

/// Set by SIGINT and SIGTERM.
static STOP: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM end a measurement with an error, so that the interfaces' settings are restored.
pub(super) fn stop_in_order() -> Result<()> {
    ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed)).context("cannot install a signal handler")
}

fn go_on() -> Result<()> {
    ensure!(!STOP.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

/// Time for the server to start listening.
const READY: Duration = Duration::from_secs(20);
/// Time between two polls of a process: long, because this process shares the cores with the measurement.
const LOOK: Duration = Duration::from_millis(20);

impl Ends {
    pub(super) fn new(args: &CompareArgs, cpus: (usize, usize)) -> Result<Self> {
        Ok(Self {
            program: env::current_exe().context("cannot find the path of this program")?,
            namespaces: (args.netns_a.clone(), args.netns_b.clone()),
            cpus,
            server: args.server.to_string(),
            json: env::temp_dir().join(format!("xwarp-compare-{}.json", std::process::id())),
        })
    }

    /// Runs `command` as server and as client, and returns the client's result.
    pub(super) fn measure(&self, command: &[String], limit: Duration) -> Result<Outcome> {
        let until = Instant::now() + limit;
        let mut server = End::start(self.command(&self.namespaces.1, self.cpus.1, command))?;
        server.wait_until_it_listens()?;
        let _ = fs::remove_file(&self.json);
        let mut client = self.command(&self.namespaces.0, self.cpus.0, command);
        client.args(["--out_json", "--out_json_file"]).arg(&self.json).arg(&self.server);
        End::start(client)?.finish(until).context("the client")?;
        server.finish(until).context("the server")?;
        let text = fs::read_to_string(&self.json).context("the client wrote no result")?;
        Outcome::parse(&text)
    }

    fn command(&self, namespace: &str, cpu: usize, command: &[String]) -> Command {
        let mut line = Command::new("ip");
        line.args(["netns", "exec", namespace]).arg(&self.program).args(command);
        line.args(["--pin", &cpu.to_string()]);
        line
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.json);
    }
}

/// A running process; killed when dropped.
struct End(Child);

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl End {
    fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Self(command.spawn().context("cannot run 'ip netns exec'")?))
    }

    fn wait_until_it_listens(&mut self) -> Result<()> {
        let out = self.0.stdout.take().context("the server's output is piped")?;
        let (tell, told) = mpsc::channel();
        // Keeps reading after the line, so that the server never blocks on a full pipe.
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if line.contains("Waiting for a client") {
                    let _ = tell.send(());
                }
            }
        });
        let until = Instant::now() + READY;
        loop {
            go_on()?;
            match told.recv_timeout(LOOK) {
                Ok(()) => return Ok(()),
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(mpsc::RecvTimeoutError::Timeout) => bail!("the server does not listen after {READY:?}"),
                Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the server: {}", self.words()),
            }
        }
    }

    /// The process's standard error.
    fn words(&mut self) -> String {
        let _ = self.0.kill();
        let mut text = String::new();
        if let Some(mut err) = self.0.stderr.take() {
            let _ = err.read_to_string(&mut text);
        }
        text.trim().to_owned()
    }

    fn finish(&mut self, until: Instant) -> Result<()> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "{status}: {}", self.words());
                return Ok(());
            }
            if Instant::now() >= until {
                bail!("not done in time: {}", self.words());
            }
            go_on()?;
            thread::sleep(LOOK);
        }
    }
}
