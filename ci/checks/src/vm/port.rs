//! The command channel of a machine; `ci/vm/init` documents the protocol. Commands run in parallel; one
//! thread reads the answers and passes each to the job that waits for it.

use std::{
    collections::HashMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

/// Time limit for answers that require no work of the machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// Time between two polls of a command's output.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The output and status of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The shell's status: 128 plus the signal number for a command that was killed; `None` while it runs.
    pub status: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Finished {
    /// Both outputs, for an error message.
    pub fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

enum Answer {
    Part(Finished),
    Done(Finished),
}

type Waiting = Mutex<HashMap<u64, Sender<Answer>>>;

/// The host's end of the channel.
#[derive(Debug)]
pub(super) struct Port {
    stream: Mutex<UnixStream>,
    waiting: Arc<Waiting>,
    number: AtomicU64,
}

impl Port {
    pub(super) fn connect(path: &Path) -> Result<Arc<Self>> {
        let stream =
            UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))?;
        let reader = stream.try_clone().context("cannot share a socket")?;
        let waiting = Arc::new(Waiting::default());
        let to = Arc::clone(&waiting);
        thread::spawn(move || {
            // An error ends the machine: every waiting job sees a closed channel.
            let _ = read_answers(reader, &to);
            to.lock().unwrap_or_else(PoisonError::into_inner).clear();
        });
        Ok(Arc::new(Self { stream: Mutex::new(stream), waiting, number: AtomicU64::new(1) }))
    }

    /// Starts a command.
    pub(super) fn spawn(self: &Arc<Self>, command: &str) -> Result<Job> {
        ensure!(!command.contains('\n'), "a command is one line: {command}");
        let id = self.number.fetch_add(1, Ordering::Relaxed);
        let (sender, answers) = mpsc::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id, sender);
        let job = Job { port: Arc::clone(self), id, command: command.to_owned(), answers, finished: None };
        self.say(&format!("run {id} {command}\n"))?;
        Ok(job)
    }

    fn say(&self, line: &str) -> Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(line.as_bytes()).context("the machine has ended")
    }

    pub(super) fn close(&self) {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // The socket may already be closed.
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn read_answers(stream: UnixStream, waiting: &Waiting) -> io::Result<()> {
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut words = line.split_whitespace();
        let done = words.next() == Some("done");
        let id: u64 = words.next().and_then(|w| w.parse().ok()).ok_or_else(broken)?;
        let status: Option<i32> = words.next().and_then(|w| w.parse().ok());
        let mut text = || -> io::Result<String> {
            let len: usize = words.next().and_then(|w| w.parse().ok()).ok_or_else(broken)?;
            let mut bytes = vec![0; len];
            stream.read_exact(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let finished = Finished { status, stdout: text()?, stderr: text()? };
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        // The waiting job may have been dropped.
        if done {
            if let Some(to) = waiting.remove(&id) {
                let _ = to.send(Answer::Done(finished));
            }
        } else if let Some(to) = waiting.get(&id) {
            let _ = to.send(Answer::Part(finished));
        }
    }
}

/// A command in a machine; killed when it is dropped.
#[derive(Debug)]
pub struct Job {
    port: Arc<Port>,
    id: u64,
    command: String,
    answers: Receiver<Answer>,
    finished: Option<Finished>,
}

impl Job {
    /// Waits until the command has printed `text` on either output; an error with the output if it exits
    /// before.
    pub fn wait_for(&mut self, text: &str, limit: Duration) -> Result<()> {
        let said = self.watch(limit, |so_far| so_far.text().contains(text))?;
        if said.text().contains(text) {
            return Ok(());
        }
        ensure!(
            said.status.is_none(),
            "'{}' ended without '{text}': {:?}\n{}",
            self.command,
            said.status,
            said.text()
        );
        bail!("'{}': no '{text}' within {limit:?}:\n{}", self.command, said.text())
    }

    /// Waits until `is_enough` accepts the output, the command exits, or the time limit passes; returns the output so
    /// far.
    pub fn watch(&mut self, limit: Duration, is_enough: impl Fn(&Finished) -> bool) -> Result<Finished> {
        let until = Instant::now() + limit;
        loop {
            let so_far = self.output()?;
            if is_enough(&so_far) || so_far.status.is_some() || Instant::now() >= until {
                return Ok(so_far);
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// The output so far; complete and with the status after the command has exited.
    pub fn output(&mut self) -> Result<Finished> {
        if let Some(finished) = &self.finished {
            return Ok(finished.clone());
        }
        self.port.say(&format!("peek {}\n", self.id))?;
        match self.answers.recv_timeout(ANSWER_LIMIT) {
            Ok(Answer::Part(part)) => Ok(part),
            Ok(Answer::Done(finished)) => Ok(self.finished.insert(finished).clone()),
            Err(RecvTimeoutError::Timeout) => bail!("the machine does not answer about '{}'", self.command),
            Err(RecvTimeoutError::Disconnected) => bail!("the machine ended during '{}'", self.command),
        }
    }

    /// Waits for the command to exit, with any status. At the time limit it is killed, and the error has its
    /// output.
    pub fn wait(&mut self, limit: Duration) -> Result<Finished> {
        if let Some(finished) = self.wait_until(Instant::now() + limit)? {
            return Ok(finished);
        }
        self.signal("KILL")?;
        let said = self.wait_until(Instant::now() + ANSWER_LIMIT)?.map(|finished| finished.text());
        bail!("'{}' still ran after {limit:?}:\n{}", self.command, said.unwrap_or_default())
    }

    fn wait_until(&mut self, until: Instant) -> Result<Option<Finished>> {
        while self.finished.is_none() {
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Answer::Done(finished)) => self.finished = Some(finished),
                Ok(Answer::Part(_)) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(None),
                Err(RecvTimeoutError::Disconnected) => bail!("the machine ended during '{}'", self.command),
            }
        }
        Ok(self.finished.clone())
    }

    /// Waits for the command to exit successfully, and returns its standard output.
    pub fn succeed(&mut self, limit: Duration) -> Result<String> {
        let finished = self.wait(limit)?;
        ensure!(
            finished.status == Some(0),
            "'{}': status {}:\n{}",
            self.command,
            finished.status.unwrap_or(-1),
            finished.text()
        );
        Ok(finished.stdout)
    }

    /// Sends a signal (`TERM`, `KILL`, ...) to the command's process group; `INT` is ignored, as background
    /// commands of a shell do.
    pub fn signal(&self, signal: &str) -> Result<()> {
        self.port.say(&format!("kill {} {signal}\n", self.id))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.finished.is_none() {
            // The machine may have ended, and the command with it.
            let _ = self.signal("KILL");
        }
    }
}
