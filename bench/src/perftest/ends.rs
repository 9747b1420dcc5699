//! [`Ends`]: the test connections, and the memory of perftest's messages.

use std::{
    collections::HashMap,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use xwarp_verbs::{
    Access, CompletionQueue, MemoryRegion, QpId, QueuePair, QueuePairOptions, RecvRequest, Remote, WcStatus,
    WorkCompletion,
    cm::{AcceptOptions, ConnectOptions, Connection, Listener},
};

use super::exchange::{Exchange, Keys};
use crate::rnic::{
    Kind, Plan, Verb,
    control::{CONNECT_LIMIT, REFUSED_LIMIT, is_refused},
    endpoint::Endpoint,
    links::{CLOSE_LIMIT, Role},
};

/// Bytes of a credit: a 32-bit counter in the machine's byte order, as in perftest.
const CREDIT_BYTES: usize = 4;
/// Time for perftest's client to fill its memory before it connects, on a slow machine.
const FILL_LIMIT: Duration = Duration::from_secs(60);
/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(50);
/// Queue pair numbers of ibverbs have 24 bits, and perftest prints them as such; it uses them for nothing else over iWARP.
const QP_NUMBER_MASK: u64 = 0xff_ffff;
/// Requests beyond the depths of the queues, for credits.
const SPARE: u32 = 8;

/// A test connection.
#[derive(Debug)]
pub struct End {
    /// The queue pair.
    pub qp: QueuePair,
    /// Its connection.
    pub connection: Connection,
    /// The peer's buffer, or its memory word for our credits.
    pub remote: Remote,
}

/// All test connections.
#[derive(Debug)]
pub struct Ends {
    /// The connections, in the order in which both ends number them.
    pub list: Vec<End>,
    /// Completion queue of sends, writes and reads.
    pub send_cq: CompletionQueue,
    /// Completion queue of receives.
    pub recv_cq: CompletionQueue,
    /// Source of sends, and destination of reads.
    pub source: MemoryRegion,
    /// Destination of receives, and the peer's target for writes and reads.
    pub sink: MemoryRegion,
    /// Credits that the peer wrote: one word for each queue pair.
    credits: MemoryRegion,
    /// Bytes of each queue pair's part of the sink.
    part: usize,
    numbers: HashMap<QpId, usize>,
    keys: Vec<Keys>,
}

impl Ends {
    /// Connects or accepts, and exchanges keys. `smallest` is the minimum size of each buffer, in bytes.
    pub fn new(
        endpoint: &Endpoint,
        exchange: &mut Exchange,
        plan: &Plan,
        smallest: u32,
        meet: Meet<'_>,
    ) -> Result<Self> {
        let count = plan.queue_pairs as usize;
        let part = (plan.largest() as usize).max(smallest as usize);
        let remote = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mut ends = Self {
            list: Vec::with_capacity(count),
            send_cq: endpoint.completion_queue(plan.queue_pairs * (plan.tx_depth + SPARE))?,
            recv_cq: endpoint.completion_queue(plan.queue_pairs * (plan.rx_depth + SPARE))?,
            source: endpoint.pd.allocate(part, Access::LOCAL_WRITE)?,
            sink: endpoint.pd.allocate(part * count, remote | Access::REMOTE_READ)?,
            credits: endpoint.pd.allocate(CREDIT_BYTES * count, remote)?,
            part,
            numbers: HashMap::new(),
            keys: Vec::with_capacity(count),
        };
        exchange.shake_hands(endpoint, &Keys::default())?;
        for number in 0..count {
            let (qp, connection) = ends.join_patiently(endpoint, plan, &meet)?;
            ends.numbers.insert(qp.id(), number);
            ends.keys.push(ends.own_keys(plan, number, &qp));
            ends.list.push(End { qp, connection, remote: Remote::default() });
        }
        exchange.shake_hands(endpoint, &Keys::default())?;
        Ok(ends)
    }

    /// Retries to connect: perftest's server announces that it is ready before it listens for the test
    /// connections.
    fn join_patiently(
        &self,
        endpoint: &Endpoint,
        plan: &Plan,
        meet: &Meet<'_>,
    ) -> Result<(QueuePair, Connection)> {
        let begin = Instant::now();
        loop {
            match self.join(endpoint, plan, meet) {
                Err(error)
                    if error.downcast_ref().is_some_and(is_refused) && begin.elapsed() < REFUSED_LIMIT =>
                {
                    thread::sleep(AGAIN);
                }
                joined => return joined,
            }
        }
    }

    fn join(&self, endpoint: &Endpoint, plan: &Plan, meet: &Meet<'_>) -> Result<(QueuePair, Connection)> {
        let options = QueuePairOptions {
            max_send_wr: plan.tx_depth + SPARE,
            max_recv_wr: plan.rx_depth + SPARE,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QueuePairOptions::default()
        };
        let qp = endpoint.pd.create_qp(&self.send_cq, &self.recv_cq, options)?;
        let reads = plan.reads;
        let connection = match meet {
            Meet::Server(server) => {
                let options = ConnectOptions { ird: reads, ord: reads, ..ConnectOptions::default() };
                endpoint.device.connect(&qp, *server, options, CONNECT_LIMIT)?
            }
            Meet::Listener(listener) => {
                let mut request = listener.accept(FILL_LIMIT).context("no test connection arrived")?;
                let options = AcceptOptions { ird: reads, ord: reads, ..AcceptOptions::default() };
                request.accept(&qp, options, CONNECT_LIMIT)?
            }
        };
        Ok((qp, connection))
    }

    fn own_keys(&self, plan: &Plan, number: usize, qp: &QueuePair) -> Keys {
        let remote = if has_credits(plan) {
            self.credits.remote(CREDIT_BYTES * number)
        } else {
            self.sink.remote(self.part * number)
        };
        Keys { reads: plan.reads.into(), qp: (qp.id().number() & QP_NUMBER_MASK) as u32, remote }
    }

    /// Exchanges the keys of all queue pairs; perftest does it twice, the second time to print them.
    pub fn swap_keys(&mut self, endpoint: &Endpoint, exchange: &mut Exchange) -> Result<()> {
        for (end, keys) in self.list.iter_mut().zip(&self.keys) {
            end.remote = exchange.shake_hands(endpoint, keys)?.remote;
        }
        Ok(())
    }

    /// Synchronizes with the other end.
    pub fn meet(&self, endpoint: &Endpoint, exchange: &mut Exchange) -> Result<()> {
        let keys = self.keys.first().copied().unwrap_or_default();
        exchange.shake_hands(endpoint, &keys).map(drop)
    }

    /// Posts a receive for a message of up to `size` bytes.
    pub fn post_receive(&self, number: usize, size: u64) -> Result<()> {
        let place = [self.sink.sge(self.part * number, size as usize)];
        self.list[number].qp.post_recv(&RecvRequest::new(0, &place)).context("posting a receive")
    }

    /// Number of messages that the peer reported as received on a queue pair.
    pub fn credit(&self, number: usize) -> Result<u32> {
        Ok(self.credits.memory().load_u32(CREDIT_BYTES * number)?)
    }

    /// Resets the peer's credits at the beginning of a row.
    pub fn forget_credits(&self) -> Result<()> {
        Ok(self.credits.memory().fill(0, self.credits.len(), 0)?)
    }

    /// Number of the queue pair of a completion; an error if the completion is not a success.
    pub fn number(&self, completion: &WorkCompletion) -> Result<usize> {
        let number =
            self.numbers.get(&completion.qp).copied().context("a completion of an unknown queue pair")?;
        ensure!(
            completion.status == WcStatus::Success,
            "{:?} on queue pair {number}: {}",
            completion.opcode,
            completion.status
        );
        Ok(number)
    }

    /// Waits until the peer has closed the test connections, for each at most for `limit`.
    pub fn await_departure(&self, limit: Duration) -> Result<()> {
        for end in &self.list {
            end.connection.wait_disconnected(limit)?;
        }
        Ok(())
    }

    /// Closes all connections gracefully.
    pub fn close(self) -> Result<()> {
        for end in &self.list {
            end.connection.disconnect()?;
        }
        self.await_departure(CLOSE_LIMIT)
    }
}

/// Source of the test connections.
#[derive(Debug)]
pub enum Meet<'a> {
    /// We are the client.
    Server(SocketAddr),
    /// We are the server.
    Listener(&'a Listener),
}

impl Meet<'_> {
    /// Our role.
    pub fn role(&self) -> Role {
        match self {
            Self::Server(_) => Role::Client,
            Self::Listener(_) => Role::Server,
        }
    }
}

/// Whether receivers report their progress to senders. On InfiniBand the adapters do it; over iWARP perftest
/// writes counters to the sender's memory.
pub fn has_credits(plan: &Plan) -> bool {
    (plan.test.verb, plan.test.kind) == (Verb::Send, Kind::Bandwidth)
}
