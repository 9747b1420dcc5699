//! [`Running`]: a program under test. Its output is read as it arrives, and it is killed when dropped. [`wait_until`]: what its
//! output does not say.

use std::{
    io::{BufRead as _, BufReader, Read},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

/// Interval between two looks of [`wait_until`].
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks again and again until something is there, at most for `limit`.
pub fn wait_until<T>(what: &str, limit: Duration, mut there: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(there) = there() {
            return Ok(there);
        }
        ensure!(Instant::now() < end, "{what}: not within {limit:?}");
        thread::sleep(LOOK_EVERY);
    }
}

/// A started program.
#[derive(Debug)]
pub struct Running {
    child: Child,
    name: String,
    lines: Receiver<String>,
    /// The output so far, standard output and error interleaved in order of arrival.
    seen: Vec<String>,
}

impl Running {
    /// Starts the program and reads both outputs.
    pub fn start(command: Command) -> Result<Self> {
        Self::start_with(command, Stdio::null())
    }

    /// The same, with a standard input.
    pub fn start_with(mut command: Command, input: Stdio) -> Result<Self> {
        let name = format!("{command:?}");
        let mut child = command
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let (sender, lines) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            forward(out, sender.clone());
        }
        if let Some(err) = child.stderr.take() {
            forward(err, sender);
        }
        Ok(Self { child, name, lines, seen: Vec::new() })
    }

    /// Its process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process ids of its children.
    pub fn children(&self) -> Vec<i32> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let parent = |pid: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The name may contain anything.
            stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
        };
        pids.filter(|pid| parent(pid) == Some(self.id())).collect()
    }

    /// The output as far as it was read by the waiting methods.
    pub fn output(&self) -> String {
        self.seen.join("\n")
    }

    /// The lines so far, also those that no method has waited for.
    pub fn arrived(&mut self) -> &[String] {
        self.seen.extend(self.lines.try_iter());
        &self.seen
    }

    /// Waits for a line that contains `text`, and returns it.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<String> {
        self.wait_for_line(text, limit, |line| line.contains(text))
    }

    /// Waits for a line that `is` the one which `text` describes, and returns it.
    pub fn wait_for_line(
        &mut self,
        text: &str,
        limit: Duration,
        is: impl Fn(&String) -> bool,
    ) -> Result<String> {
        if let Some(line) = self.seen.iter().find(|line| is(line)) {
            return Ok(line.clone());
        }
        let until = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if is(&line) {
                        return Ok(line);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{}: no '{text}' within {limit:?}:\n{}", self.name, self.output())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{}: ended without '{text}':\n{}", self.name, self.output())
                }
            }
        }
    }

    /// Waits for the program to exit, with any status.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let until = Instant::now() + limit;
        // Read the output first: a program blocks while its pipe is full.
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{}: still running after {limit:?}:\n{}", self.name, self.output())
                }
            }
        }
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(2));
        }
        bail!("{}: closed its output and still runs after {limit:?}", self.name)
    }

    /// Waits for the program to exit successfully, and returns its output.
    pub fn finish(mut self, limit: Duration) -> Result<String> {
        let status = self.wait(limit)?;
        ensure!(status.success(), "{}: {status}:\n{}", self.name, self.output());
        Ok(self.output())
    }

    /// Sends a signal; `SIGKILL` simulates a crash.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("a process has an ID")?;
        kill_process(pid, signal).context("cannot signal")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the program has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(from: impl Read + Send + 'static, to: Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                break;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(command).unwrap()
    }

    #[test]
    fn readiness_is_a_line_of_output() {
        let mut running = shell("echo one; echo ready on port 7 >&2; exec sleep 60");
        assert_eq!(running.wait_for("ready", Duration::from_secs(10)).unwrap(), "ready on port 7");
        running.signal(Signal::KILL).unwrap();
        assert!(!running.wait(Duration::from_secs(10)).unwrap().success());
    }

    #[test]
    fn a_program_that_ends_is_distinguished_from_one_that_hangs() {
        let error =
            shell("echo no; exit 3").wait_for("ready", Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("ended without 'ready'") && error.contains("no"), "{error}");
        let error = shell("exec sleep 60").finish(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("still running"), "{error}");
        let error = shell("echo why; exit 3").finish(Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
    }
}
