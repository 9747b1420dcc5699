//! [`Control`]: the connection over which both ends agree and tell results, as perftest does it with
//! `-R`: a queue pair of its own, and short messages by Send in both directions.
//!
//! This is the only place that knows what such a message looks like. Ours are JSON text.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;
use xwarp_verbs::{
    Access, CloseReason, CompletionQueue, MemoryRegion, Opcode, QueuePair, QueuePairOptions, RecvRequest,
    WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ConnectionError, Listener},
};

use super::endpoint::{Endpoint, Idle, next_request};

/// Longest message.
pub const MESSAGE_BYTES: usize = 1024;
/// Receives posted: an end may be this many messages ahead of the other.
const RECEIVES: usize = 4;
/// The message to be sent lies behind the receives.
const SEND_AT: usize = RECEIVES * MESSAGE_BYTES;
/// Tells a send's completion from a receive's.
const SEND_ID: u64 = 1 << 32;

/// A connection must stand within this time.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// A client tries again for so long when nobody listens: the server may just be starting.
pub const REFUSED_LIMIT: Duration = Duration::from_secs(3);

/// One end of the control connection.
#[derive(Debug)]
pub struct Control {
    connection: Option<Connection>,
    qp: QueuePair,
    region: MemoryRegion,
    cq: CompletionQueue,
    /// A send is not complete yet, so its bytes must stay.
    sending: bool,
    /// Messages that came while something else was waited for.
    received: std::collections::VecDeque<Value>,
}

impl Control {
    fn new(endpoint: &Endpoint) -> Result<Self> {
        let cq = endpoint.completion_queue(4 * RECEIVES as u32)?;
        let options =
            QueuePairOptions { max_send_wr: 4, max_recv_wr: RECEIVES as u32, ..QueuePairOptions::default() };
        let qp = endpoint.pd.create_qp(&cq, &cq, options)?;
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

    /// The client's: connects.
    pub fn connect(endpoint: &Endpoint, server: SocketAddr) -> Result<Self> {
        let begin = Instant::now();
        loop {
            // A queue pair whose attempt failed is of no use any more.
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

    /// The server's: accepts the next connection, whenever it comes.
    pub fn accept(endpoint: &Endpoint, listener: &Listener) -> Result<Self> {
        let request = next_request(listener)?;
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

    /// The queue on which messages complete, to be slept on.
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
        ensure!(text.len() <= MESSAGE_BYTES, "a control message of {} bytes", text.len());
        self.region.write(SEND_AT, text.as_bytes())?;
        let place = self.region.sge(SEND_AT, text.len());
        self.qp.post_send(&WorkRequest::send(SEND_ID, &place).signaled()).context("control connection")?;
        self.sending = true;
        Ok(())
    }

    /// Waits for the next message.
    pub fn receive(&mut self, endpoint: &Endpoint) -> Result<Value> {
        self.until(endpoint, |control| !control.received.is_empty())?;
        let message = self.received.pop_front().context("a message was received")?;
        if let Some(words) = message["error"].as_str() {
            bail!("the other end: {words}");
        }
        Ok(message)
    }

    /// The next message, if it is here already.
    pub fn try_receive(&mut self) -> Result<Option<Value>> {
        self.poll()?;
        match self.received.pop_front() {
            Some(message) if !message["error"].is_null() => bail!("the other end: {}", message["error"]),
            message => Ok(message),
        }
    }

    /// Tells ours and hears theirs.
    pub fn exchange(&mut self, endpoint: &Endpoint, message: &Value) -> Result<Value> {
        self.send(endpoint, message)?;
        self.receive(endpoint)
    }

    /// Waits until everything that was sent has arrived.
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

    /// Takes one completion; whether there was one.
    fn poll(&mut self) -> Result<bool> {
        let Some(completion) = self.cq.poll_one() else { return Ok(false) };
        if completion.status == WcStatus::Flushed {
            bail!("the other end closed the control connection");
        }
        ensure!(completion.status == WcStatus::Success, "control connection: {}", completion.status);
        if completion.opcode == Opcode::Recv {
            let slot = completion.wr_id as usize;
            let bytes = self.region.to_vec(slot * MESSAGE_BYTES, completion.byte_len as usize)?;
            self.post_receive(slot)?;
            let message = serde_json::from_slice(&bytes)
                .context("what came on the control connection is no message")?;
            self.received.push_back(message);
        } else {
            self.sending = false;
        }
        Ok(true)
    }

    /// Closes in order and waits for the end.
    pub fn close(self) -> Result<()> {
        if let Some(connection) = &self.connection {
            connection.disconnect()?;
            connection.wait_disconnected(Duration::from_secs(2))?;
        }
        Ok(())
    }
}

/// Whether nobody listened.
pub fn is_refused(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::Failed(CloseReason::Refused))
}
