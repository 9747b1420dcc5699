//! [`Control`]: the connection over which both ends agree on the plan and exchange results, like perftest's
//! with `-R`: its own queue pair, and short messages by Send in both directions.
//!
//! It also detects the death of the other end: a receive is posted at all times, TCP probes a silent peer
//! (`--keepalive`), and every loop of a test calls [`Control::check`].
//!
//! This is the only place that knows the format of its messages, which is JSON text.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;
use xwarp_verbs::{
    Access, CloseReason, CompletionQueue, MemoryRegion, Opcode, QueuePair, QueuePairOptions, RecvRequest,
    WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ConnectionError, ConnectionRequest},
};

use super::{
    closing::close_reason,
    endpoint::{Endpoint, Idle},
};
use crate::failure::PeerGone;

/// Size of the longest message, in bytes.
pub const MESSAGE_BYTES: usize = 1024;
/// Receives posted: an end may be this many messages ahead of the other.
const RECEIVES: usize = 4;
/// Offset of the outgoing message, behind the receive buffers.
const SEND_AT: usize = RECEIVES * MESSAGE_BYTES;
/// `wr_id` of sends; receives have smaller IDs.
const SEND_ID: u64 = 1 << 32;

/// Time limit for establishing a connection.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Time for which a client retries when its connection is refused, because the server may still be starting.
pub const REFUSED_LIMIT: Duration = Duration::from_secs(3);

/// One end of the control connection.
#[derive(Debug)]
pub struct Control {
    connection: Option<Connection>,
    qp: QueuePair,
    region: MemoryRegion,
    cq: CompletionQueue,
    /// Whether a send is in flight, so that its buffer must not change.
    sending: bool,
    /// Messages that arrived during a wait for something else.
    received: std::collections::VecDeque<Value>,
}

impl Control {
    fn new(endpoint: &Endpoint) -> Result<Self> {
        let cq = endpoint.completion_queue(4 * RECEIVES as u32)?;
        let options =
            QueuePairOptions { max_send_wr: 4, max_recv_wr: RECEIVES as u32, ..QueuePairOptions::default() };
        let qp = endpoint.own(endpoint.pd.create_qp(&cq, &cq, options)?)?;
        let region = endpoint.pd.allocate(SEND_AT + MESSAGE_BYTES, Access::LOCAL_WRITE)?;
        let control = Self {
            connection: None,
            qp,
            region,
            cq,
            sending: false,
            received: std::collections::VecDeque::new(),
        };
        for slot in 0..RECEIVES {
            control.post_receive(slot)?;
        }
        Ok(control)
    }

    /// Connects to the server.
    pub fn connect(endpoint: &Endpoint, server: SocketAddr) -> Result<Self> {
        let begin = Instant::now();
        loop {
            // A queue pair cannot be reused after a failed attempt.
            let mut control = Self::new(endpoint)?;
            let options = ConnectOptions { ird: 0, ord: 0, ..ConnectOptions::default() };
            match endpoint.device.connect(&control.qp, server, options, CONNECT_LIMIT) {
                Ok(connection) => {
                    control.connection = Some(connection);
                    return Ok(control);
                }
                Err(error) if is_refused(&error) && begin.elapsed() < REFUSED_LIMIT => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(error) => {
                    return Err(anyhow!(error)).with_context(|| format!("cannot connect to {server}"));
                }
            }
        }
    }

    /// Accepts a client.
    pub fn accept(endpoint: &Endpoint, mut request: ConnectionRequest) -> Result<Self> {
        let mut control = Self::new(endpoint)?;
        let options = AcceptOptions { ird: 0, ord: 0, ..AcceptOptions::default() };
        control.connection = Some(request.accept(&control.qp, options, CONNECT_LIMIT)?);
        Ok(control)
    }

    /// Our address, and the peer's.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let connection = self.connection.as_ref();
        (connection.and_then(Connection::local_address), connection.and_then(Connection::peer_address))
    }

    /// The completion queue of the messages, for callers that sleep until something completes.
    pub fn cq(&self) -> &CompletionQueue {
        &self.cq
    }

    fn post_receive(&self, slot: usize) -> Result<()> {
        let place = [self.region.sge(slot * MESSAGE_BYTES, MESSAGE_BYTES)];
        self.qp.post_recv(&RecvRequest::new(slot as u64, &place)).context("control connection")
    }

    /// Sends a message.
    pub fn send(&mut self, endpoint: &Endpoint, message: &Value) -> Result<()> {
        self.until(endpoint, |control| !control.sending)?;
        let text = message.to_string();
        ensure!(text.len() <= MESSAGE_BYTES, "a control message of {} bytes is too long", text.len());
        self.region.write(SEND_AT, text.as_bytes())?;
        let place = self.region.sge(SEND_AT, text.len());
        self.qp.post_send(&WorkRequest::send(SEND_ID, place).signaled()).context("control connection")?;
        self.sending = true;
        Ok(())
    }

    /// Waits for the next message.
    pub fn receive(&mut self, endpoint: &Endpoint) -> Result<Value> {
        self.until(endpoint, |control| !control.received.is_empty())?;
        let message = self.received.pop_front().context("no message was received")?;
        if let Some(words) = message["error"].as_str() {
            bail!("the other end: {words}");
        }
        Ok(message)
    }

    /// Fails when the other end is gone; queues the messages that arrived.
    pub fn check(&mut self) -> Result<()> {
        while self.poll()? {}
        Ok(())
    }

    /// Returns the next message, if it has arrived.
    pub fn try_receive(&mut self) -> Result<Option<Value>> {
        self.check()?;
        match self.received.pop_front() {
            Some(message) if !message["error"].is_null() => {
                bail!("the other end: {}", message["error"].as_str().unwrap_or("unknown error"))
            }
            message => Ok(message),
        }
    }

    /// Sends a message and waits for one from the other end.
    pub fn exchange(&mut self, endpoint: &Endpoint, message: &Value) -> Result<Value> {
        self.send(endpoint, message)?;
        self.receive(endpoint)
    }

    /// Waits until all sent messages have been acknowledged.
    pub fn flush(&mut self, endpoint: &Endpoint) -> Result<()> {
        self.until(endpoint, |control| !control.sending)
    }

    fn until(&mut self, endpoint: &Endpoint, done: impl Fn(&Self) -> bool) -> Result<()> {
        let cq = self.cq.clone();
        let queues = [&cq];
        let mut idle = Idle::new(endpoint, &queues);
        while !done(self) {
            if self.poll()? {
                idle.over();
            } else {
                idle.wait("control connection")?;
            }
        }
        Ok(())
    }

    /// Explains why the connection has ended.
    fn gone(&self) -> PeerGone {
        let reason = self.connection.as_ref().and_then(close_reason);
        PeerGone(match reason {
            None | Some(CloseReason::Graceful) => "its program closed the control connection".into(),
            Some(CloseReason::Reset) => "its program was killed (the control connection was reset)".into(),
            Some(CloseReason::TimedOut) => "it does not answer (the control connection timed out)".into(),
            Some(reason) => format!("the control connection was {reason}"),
        })
    }

    /// Processes one completion, if there is one.
    fn poll(&mut self) -> Result<bool> {
        let Some(completion) = self.cq.poll_one() else { return Ok(false) };
        if completion.status == WcStatus::Flushed {
            return Err(self.gone().into());
        }
        ensure!(completion.status == WcStatus::Success, "control connection: {}", completion.status);
        if completion.opcode == Opcode::Recv {
            let slot = completion.wr_id as usize;
            let bytes = self.region.to_vec(slot * MESSAGE_BYTES, completion.byte_len as usize)?;
            self.post_receive(slot)?;
            let message = serde_json::from_slice(&bytes).context("a control message is not JSON")?;
            self.received.push_back(message);
        } else {
            self.sending = false;
        }
        Ok(true)
    }

    /// Closes the connection gracefully and waits for its end.
    pub fn close(self) -> Result<()> {
        if let Some(connection) = &self.connection {
            connection.disconnect()?;
            connection.wait_disconnected(Duration::from_secs(2))?;
        }
        Ok(())
    }
}

/// Whether nothing listens at the peer's port.
pub fn is_refused(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::Failed(CloseReason::Refused))
}
