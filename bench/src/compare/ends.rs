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

use super::{libfabric, samples::Outcome};
use crate::options::CompareArgs;

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

/// Fails when the user has interrupted the program.
pub(super) fn go_on() -> Result<()> {
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

    /// Runs `command` as server and as client, and returns the rows of the client's result.
    pub(super) fn measure(&self, command: &[String], limit: Duration) -> Result<Vec<Outcome>> {
        let until = Instant::now() + limit;
        let mut server = End::start(self.command(&self.namespaces.1, self.cpus.1, command))?;
        server.wait_until_it_listens()?;
        let _ = fs::remove_file(&self.json);
        let mut client = self.command(&self.namespaces.0, self.cpus.0, command);
        client.args(["--out_json", "--out_json_file"]).arg(&self.json).arg(&self.server);
        End::start(client)?.finish(until).context("the client")?;
        server.finish(until).context("the server")?;
        let text = fs::read_to_string(&self.json).context("the client wrote no result")?;
        Outcome::parse_all(&text)
    }

    /// Runs libfabric's program with these options as server and as client, and returns the client's figures for messages of
    /// `bytes`.
    pub(super) fn measure_libfabric(
        &self,
        options: &[String],
        bytes: u64,
        limit: Duration,
    ) -> Result<Outcome> {
        let until = Instant::now() + limit;
        let end = |namespace: &str, cpu: usize| {
            let mut line = Command::new("ip");
            line.args(["netns", "exec", namespace, "taskset", "-c", &cpu.to_string(), libfabric::PROGRAM]);
            line.args(options);
            line
        };
        let mut server = End::start(end(&self.namespaces.1, self.cpus.1))?;
        server.wait_until_bound(libfabric::CONTROL_PORT)?;
        let mut client = end(&self.namespaces.0, self.cpus.0);
        client.arg(&self.server);
        let mut client = End::start(client)?;
        client.finish(until).context("the client")?;
        server.finish(until).context("the server")?;
        libfabric::parse(&client.output()?, bytes)
    }

    /// Runs `command` in the client's namespace, without a server.
    pub(super) fn measure_alone(&self, command: &[String], limit: Duration) -> Result<Outcome> {
        let until = Instant::now() + limit;
        let _ = fs::remove_file(&self.json);
        let mut alone = self.command(&self.namespaces.0, self.cpus.0, command);
        alone.arg("--json").arg(&self.json);
        End::start(alone)?.finish(until)?;
        Outcome::parse_idle(&fs::read_to_string(&self.json).context("there is no result")?)
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

    /// Waits until a process in this one's namespace listens on a TCP port, for a program that does not say when it does.
    fn wait_until_bound(&mut self, port: u16) -> Result<()> {
        let until = Instant::now() + READY;
        loop {
            go_on()?;
            let table =
                |name| fs::read_to_string(format!("/proc/{}/net/{name}", self.0.id())).unwrap_or_default();
            if ["tcp", "tcp6"].map(table).iter().any(|sockets| is_listening(sockets, port)) {
                return Ok(());
            }
            if let Some(status) = self.0.try_wait()? {
                bail!("the server: {status}: {}", self.words());
            }
            ensure!(Instant::now() < until, "the server does not listen after {READY:?}");
            thread::sleep(LOOK);
        }
    }

    /// The standard output of a process that has ended.
    fn output(&mut self) -> Result<String> {
        let mut text = String::new();
        self.0.stdout.take().context("the output is piped")?.read_to_string(&mut text)?;
        Ok(text)
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

/// Whether a socket listens on `port`, by the kernel's table of TCP sockets.
fn is_listening(sockets: &str, port: u16) -> bool {
    let end = format!(":{port:04X}");
    sockets.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, local, _, "0A", ..] if local.ends_with(&end))
    })
}

impl Outcome {
    /// Reads the JSON of a run with `--report_gbits`.
    fn parse_all(text: &str) -> Result<Vec<Self>> {
        let all: serde_json::Value = serde_json::from_str(text)?;
        let rows = all["xwarp"]["rows"].as_array().filter(|rows| !rows.is_empty());
        let memory = all["xwarp"]["memory"]["bytes_per_connection"].as_f64();
        rows.context("no result in the JSON")?.iter().map(|row| Self::parse(row, memory)).collect()
    }

    /// Reads the JSON of `idle`.
    fn parse_idle(text: &str) -> Result<Self> {
        let all: serde_json::Value = serde_json::from_str(text)?;
        let number = |name: &str| all[name].as_f64().with_context(|| format!("no {name} in the JSON"));
        let (idle_cpu, registration) = (number("cpu_percent")?, number("registration_us")?);
        Ok(Self { idle_cpu: Some(idle_cpu), registration: Some(registration), ..Self::default() })
    }

    fn parse(row: &serde_json::Value, memory: Option<f64>) -> Result<Self> {
        let ends = [row["cpu_sec_per_gib_local"].as_f64(), row["cpu_sec_per_gib_remote"].as_f64()];
        let outcome = Self {
            bytes: row["bytes"].as_u64().context("no size in the JSON")?,
            latency: row["latency"]["typical"].as_f64(),
            tail: row["latency"]["p99"].as_f64(),
            bandwidth: row["bw_average"].as_f64(),
            rate: row["msg_rate"].as_f64(),
            cpu: ends.into_iter().flatten().reduce(|a, b| a + b),
            memory,
            ..Self::default()
        };
        ensure!(outcome.latency.or(outcome.bandwidth).is_some(), "no figure in the JSON");
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_socket_is_found_in_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
                     0: 00000000:B9E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 8253954 1\n   \
                     1: 02094D0A:B9E9 01094D0A:D09E 06 00000000:00000000 03:0000173C 00000000     0        0 0 3\n";
        assert!(is_listening(table, 47592));
        assert!(!is_listening(table, 47593), "in TIME-WAIT");
        assert!(!is_listening("", 47592));
    }

    #[test]
    fn both_kinds_of_results_are_read() {
        let latency = r#"{"xwarp": {"rows": [{"bytes": 64, "latency": {"typical": 1.5, "p99": 2.5}}]}}"#;
        let expected = Outcome { bytes: 64, latency: Some(1.5), tail: Some(2.5), ..Outcome::default() };
        assert_eq!(Outcome::parse_all(latency).unwrap(), [expected]);
        let bandwidth = r#"{"xwarp": {"memory": {"bytes_per_connection": 4000.0}, "rows": [
            {"bytes": 2, "bw_average": 20.0, "msg_rate": 3.0, "cpu_sec_per_gib_local": 0.25, "cpu_sec_per_gib_remote": 0.5},
            {"bytes": 4, "bw_average": 30.0}]}}"#;
        let outcomes = Outcome::parse_all(bandwidth).unwrap();
        let [first, second] = outcomes.as_slice() else { panic!("{outcomes:?}") };
        assert_eq!((first.bandwidth, first.rate, first.cpu), (Some(20.0), Some(3.0), Some(0.75)));
        assert_eq!((second.bytes, second.cpu, second.memory), (4, None, Some(4000.0)));
        let idle = Outcome::parse_idle(r#"{"cpu_percent": 0.5, "registration_us": 1.25}"#).unwrap();
        assert_eq!((idle.idle_cpu, idle.registration), (Some(0.5), Some(1.25)));
        assert!(Outcome::parse_idle("{}").is_err());
        for empty in [r#"{"xwarp": {"rows": []}}"#, r#"{"xwarp": {"rows": [{"bytes": 2}]}}"#, "{"] {
            assert!(Outcome::parse_all(empty).is_err(), "{empty}");
        }
    }
}
