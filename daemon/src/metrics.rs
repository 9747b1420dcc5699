//! [`Metrics`]: an endpoint for monitors, in the text format of `OpenMetrics` over HTTP. Each monitor has a thread for a limited
//! time, so a slow one delays nobody; the server loop writes the text.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{EventfdFlags, eventfd};

/// Time for a monitor to send its request and to read the answer, altogether.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest length of a request, in bytes.
const MAX_REQUEST_BYTES: usize = 8192;
/// Largest number of monitors at a time; the one that has been there for the longest time gives way to a new one.
const MAX_MONITORS: usize = 64;
/// Pause before monitors are accepted again when no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of stack of a monitor's thread.
const STACK_BYTES: usize = 128 << 10;

/// The handle to the thread.
pub(crate) struct Metrics {
    questions: Receiver<SyncSender<String>>,
    bell: Arc<OwnedFd>,
}

impl Metrics {
    /// Listens on `address`, and starts the thread.
    pub(crate) fn start(address: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        tracing::info!(address = %listener.local_addr()?, "serves metrics");
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (ask, questions) = sync_channel(MAX_MONITORS);
        let ring = Arc::clone(&bell);
        thread::Builder::new().name("xwarpd-metrics".into()).spawn(move || accept(&listener, &ask, &ring))?;
        Ok(Self { questions, bell })
    }

    /// Readable when [`next`](Self::next) has a request.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The next monitor that waits for the metrics. Call it until it returns `None`.
    pub(crate) fn next(&self) -> Option<SyncSender<String>> {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.questions.try_recv().ok()
    }
}

/// Accepts monitors, each with a thread of its own.
fn accept(listener: &TcpListener, ask: &SyncSender<SyncSender<String>>, ring: &Arc<OwnedFd>) {
    let mut served: VecDeque<(TcpStream, thread::JoinHandle<()>)> = VecDeque::new();
    loop {
        let accepted = listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream)));
        served.retain(|(_, thread)| !thread.is_finished());
        let Ok((same, stream)) = accepted else {
            // No descriptor is left for it.
            thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        if served.len() >= MAX_MONITORS
            && let Some((oldest, _)) = served.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
        let (ask, ring) = (ask.clone(), Arc::clone(ring));
        let serve = move || {
            if let Err(error) = serve(&stream, &ask, &ring) {
                tracing::debug!(%error, "a monitor was not answered");
            }
            // Its duplicate remains until the next monitor comes.
            let _ = stream.shutdown(Shutdown::Both);
        };
        match thread::Builder::new().name("xwarpd-monitor".into()).stack_size(STACK_BYTES).spawn(serve) {
            Ok(thread) => served.push_back((same, thread)),
            Err(error) => tracing::debug!(%error, "no thread answers a monitor"),
        }
    }
}

/// Writes `bytes` before `end`, however slowly the monitor reads.
fn write_before(mut stream: &TcpStream, mut bytes: &[u8], end: Instant) -> Result<()> {
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        anyhow::ensure!(!left.is_zero(), "the answer is not read in time");
        stream.set_write_timeout(Some(left))?;
        let written = stream.write(bytes)?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// Answers one request, with the same text for every path.
fn serve(mut stream: &TcpStream, ask: &SyncSender<SyncSender<String>>, ring: &OwnedFd) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        anyhow::ensure!(!left.is_zero() && request.len() < MAX_REQUEST_BYTES, "no request in time");
        stream.set_read_timeout(Some(left))?;
        let len = stream.read(&mut piece)?;
        anyhow::ensure!(len > 0, "the request is cut");
        request.extend(piece.iter().take(len));
    }
    let (answer, text) = sync_channel(1);
    ask.try_send(answer).context("the loop does not answer")?;
    rustix::io::write(ring, &1u64.to_ne_bytes())?;
    let text = text.recv_timeout(PATIENCE).context("the loop does not answer")?;
    let head = if request.starts_with(b"GET ") { "200 OK" } else { "405 Method Not Allowed" };
    let answer = format!(
        "HTTP/1.1 {head}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
    write_before(stream, answer.as_bytes(), end)
}

/// The text of metrics while it is written.
#[derive(Default)]
pub(crate) struct Text(String);

impl Text {
    /// Begins a family: its name, its type, and what it counts. Samples of the family follow.
    pub(crate) fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# TYPE {name} {kind}\n# HELP {name} {help}");
    }

    /// Adds a sample. `name` is the family's, of a counter with the ending `_total`. Values of labels are names of interfaces
    /// and our own words.
    pub(crate) fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: u64) {
        self.0.push_str(name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let text = text.replace('\\', "\\\\").replace('"', "\\\"");
            let _ = write!(self.0, "{}{label}=\"{text}\"", if at == 0 { '{' } else { ',' });
        }
        let _ = writeln!(self.0, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    /// The whole text.
    pub(crate) fn done(self) -> String {
        self.0 + "# EOF\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_and_samples_have_the_form_of_openmetrics() {
        let mut text = Text::default();
        text.family("xwarpd_frames", "counter", "Frames.");
        text.sample("xwarpd_frames_total", &[("interface", "e\"0"), ("outcome", "to_wire")], 7);
        text.family("xwarpd_connections", "gauge", "Connections.");
        text.sample("xwarpd_connections", &[], 2);
        let expected = "# TYPE xwarpd_frames counter\n# HELP xwarpd_frames Frames.\n\
                        xwarpd_frames_total{interface=\"e\\\"0\",outcome=\"to_wire\"} 7\n\
                        # TYPE xwarpd_connections gauge\n# HELP xwarpd_connections Connections.\n\
                        xwarpd_connections 2\n# EOF\n";
        assert_eq!(text.done(), expected);
    }
}
