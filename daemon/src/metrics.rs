//! [`Metrics`]: an endpoint for monitors, in the text format of `OpenMetrics` over HTTP. A separate thread serves them,
//! so a slow monitor delays other monitors only; the server loop writes the text.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{EventfdFlags, eventfd};

/// Time for a monitor to send its request and to read the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Largest length of a request, in bytes.
const MOST_REQUEST_BYTES: usize = 8192;

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
        let (ask, questions) = sync_channel(1);
        let ring = Arc::clone(&bell);
        thread::Builder::new().name("xwarpd-metrics".into()).spawn(move || {
            loop {
                let Ok((stream, _)) = listener.accept() else {
                    // No descriptor is left for it.
                    thread::sleep(PATIENCE);
                    continue;
                };
                if let Err(error) = serve(stream, &ask, &ring) {
                    tracing::debug!(%error, "a monitor was not answered");
                }
            }
        })?;
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

/// Answers one request, with the same text for every path.
fn serve(mut stream: TcpStream, ask: &SyncSender<SyncSender<String>>, ring: &OwnedFd) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while !request.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        anyhow::ensure!(!left.is_zero() && request.len() < MOST_REQUEST_BYTES, "no request in time");
        stream.set_read_timeout(Some(left))?;
        let len = stream.read(&mut piece)?;
        anyhow::ensure!(len > 0, "the request is cut");
        request.extend(piece.iter().take(len));
    }
    let (answer, text) = sync_channel(1);
    ask.send(answer).context("the loop has ended")?;
    rustix::io::write(ring, &1u64.to_ne_bytes())?;
    let text = text.recv_timeout(PATIENCE).context("the loop does not answer")?;
    let head = if request.starts_with(b"GET ") { "200 OK" } else { "405 Method Not Allowed" };
    write!(
        stream,
        "HTTP/1.1 {head}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    )?;
    Ok(())
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
