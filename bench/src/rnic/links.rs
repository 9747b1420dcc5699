//! [`Links`]: the test connections and the memory they use.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use xwarp_verbs::{
    Access, CompletionQueue, MemoryRegion, QpId, QueuePair, QueuePairOptions, Remote, STag,
    SharedReceiveQueue, WcStatus, WorkCompletion,
    cm::{AcceptOptions, ConnectOptions, Connection, Listener},
};

use super::{
    control::{CONNECT_LIMIT, Control},
    endpoint::Endpoint,
    plan::Plan,
};

/// Most memory for messages of one queue pair in one direction; fewer messages have a place of their own
/// when they are larger.
const AREA_BYTES: u64 = 16 << 20;
/// Places begin at multiples of this: a cache line.
const ALIGNMENT: u64 = 64;
/// Small words of each queue pair, in front of the messages: credits, and what the peer learns of rounds.
pub const WORDS_BYTES: usize = 64;
/// Closing in order may take so long.
pub const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// Receives and sends beyond the depths, for credits and rounds.
const SPARE: u32 = 8;

/// Who started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Waits for connections.
    Server,
    /// Connects.
    Client,
}

impl Role {
    /// For the patterns: which end made the bytes.
    pub fn number(self) -> u8 {
        match self {
            Self::Server => 0,
            Self::Client => 1,
        }
    }

    /// The other one.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::Server => Self::Client,
            Self::Client => Self::Server,
        }
    }
}

/// Where in a region the messages of a queue pair lie. The same at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Messages that have a place of their own, on each queue pair.
    pub slots: u32,
    /// From one place to the next.
    stride: u64,
    /// From one queue pair's part to the next.
    part: u64,
    queue_pairs: u32,
}

impl Layout {
    /// For the largest message of the plan.
    pub fn of(plan: &Plan) -> Self {
        let stride = plan.largest().next_multiple_of(ALIGNMENT);
        // Only verified messages need places of their own: otherwise one, which stays in the cache.
        let wanted = if plan.verify { u64::from(plan.tx_depth.max(plan.rx_depth).min(512)) } else { 1 };
        let slots = wanted.min((AREA_BYTES / stride).max(1));
        let part = WORDS_BYTES as u64 + slots * stride;
        Self { slots: slots as u32, stride, part, queue_pairs: plan.queue_pairs }
    }

    /// Bytes of the whole region.
    pub fn bytes(self) -> usize {
        (self.part * u64::from(self.queue_pairs)) as usize
    }

    /// Offset of the small words of a queue pair.
    pub fn words(self, queue_pair: u32) -> usize {
        (self.part * u64::from(queue_pair)) as usize
    }

    /// Offset of the place of a message.
    pub fn place(self, queue_pair: u32, message: u64) -> usize {
        let slot = message % u64::from(self.slots);
        self.words(queue_pair) + WORDS_BYTES + (slot * self.stride) as usize
    }
}

/// A test connection.
#[derive(Debug)]
pub struct Link {
    /// The queue pair.
    pub qp: QueuePair,
    /// Its connection.
    pub connection: Connection,
}

/// All test connections.
#[derive(Debug)]
pub struct Links {
    /// In the order in which both ends number them.
    pub list: Vec<Link>,
    /// Numbers by name.
    pub numbers: HashMap<QpId, u32>,
    /// Where sends, writes and reads complete.
    pub send_cq: CompletionQueue,
    /// Where receives complete.
    pub recv_cq: CompletionQueue,
    /// When asked for.
    pub srq: Option<SharedReceiveQueue>,
    /// What is sent from, and read into.
    pub source: MemoryRegion,
    /// What is received into, and what the peer writes and reads.
    pub sink: MemoryRegion,
    /// Places in both, here and at the peer.
    pub layout: Layout,
    /// The first byte of the peer's sink.
    pub peer: Remote,
    /// The first byte of the peer's source.
    pub peer_source: Remote,
}

/// What is needed before the connections stand.
struct Parts {
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
    source: MemoryRegion,
    sink: MemoryRegion,
    layout: Layout,
}

impl Links {
    /// The peer's place of a message, to be written or read.
    pub fn remote(&self, queue_pair: u32, message: u64) -> Remote {
        let offset = self.layout.place(queue_pair, message) as u64;
        Remote { offset: self.peer.offset.wrapping_add(offset), ..self.peer }
    }

    /// The peer's word for the credits that we give it.
    pub fn remote_credit(&self, queue_pair: u32) -> Remote {
        let offset = self.layout.words(queue_pair) as u64;
        Remote { offset: self.peer_source.offset.wrapping_add(offset), ..self.peer_source }
    }

    /// Number of the queue pair that a completion is of.
    pub fn number(&self, completion: &WorkCompletion) -> Result<u32> {
        ensure!(
            completion.status == WcStatus::Success,
            "{:?} on queue pair {}: {}",
            completion.opcode,
            self.numbers.get(&completion.qp).copied().unwrap_or(u32::MAX),
            completion.status
        );
        self.numbers.get(&completion.qp).copied().context("a completion of a foreign queue pair")
    }

    /// Closes all connections in order.
    pub fn close(self) -> Result<()> {
        for link in &self.list {
            link.connection.disconnect()?;
        }
        for link in &self.list {
            link.connection.wait_disconnected(CLOSE_LIMIT)?;
        }
        Ok(())
    }

    /// The client's: connects them, one after the other.
    pub fn connect(
        endpoint: &Endpoint,
        control: &mut Control,
        plan: &Plan,
        server: SocketAddr,
    ) -> Result<Self> {
        let parts = Parts::new(endpoint, plan)?;
        let mut list = Vec::new();
        for number in 0..plan.queue_pairs {
            let qp = parts.queue_pair(endpoint, plan)?;
            let options = ConnectOptions { ird: plan.reads, ord: plan.reads, ..ConnectOptions::default() };
            let connection = endpoint
                .device
                .connect(&qp, server, options, CONNECT_LIMIT)
                .with_context(|| format!("cannot connect queue pair {number} to {server}"))?;
            list.push(Link { qp, connection });
        }
        parts.swap_keys(endpoint, control, list)
    }

    /// The server's: accepts as many as the plan says.
    pub fn accept(
        endpoint: &Endpoint,
        control: &mut Control,
        plan: &Plan,
        listener: &Listener,
    ) -> Result<Self> {
        let parts = Parts::new(endpoint, plan)?;
        let mut list = Vec::new();
        for number in 0..plan.queue_pairs {
            let qp = parts.queue_pair(endpoint, plan)?;
            let request = listener
                .accept(CONNECT_LIMIT)
                .with_context(|| format!("queue pair {number} of the client"))?;
            let options = AcceptOptions { ird: plan.reads, ord: plan.reads, ..AcceptOptions::default() };
            let connection = request.accept(&qp, options, CONNECT_LIMIT)?;
            list.push(Link { qp, connection });
        }
        parts.swap_keys(endpoint, control, list)
    }
}

impl Parts {
    fn new(endpoint: &Endpoint, plan: &Plan) -> Result<Self> {
        let layout = Layout::of(plan);
        let sends = plan.queue_pairs * (plan.tx_depth + SPARE);
        let receives = plan.queue_pairs * (plan.rx_depth + SPARE);
        let srq = plan.shared_receive_queue.then(|| endpoint.pd.create_srq(receives, 1)).transpose()?;
        let memory = |access| endpoint.pd.allocate(layout.bytes(), access);
        Ok(Self {
            send_cq: endpoint.completion_queue(sends)?,
            recv_cq: endpoint.completion_queue(receives)?,
            srq,
            // The peer writes credits into the source's words.
            source: memory(Access::LOCAL_WRITE | Access::REMOTE_WRITE)?,
            sink: memory(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)?,
            layout,
        })
    }

    fn queue_pair(&self, endpoint: &Endpoint, plan: &Plan) -> Result<QueuePair> {
        let options = QueuePairOptions {
            max_send_wr: plan.tx_depth + SPARE,
            max_recv_wr: plan.rx_depth + SPARE,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: plan.inline.max(WORDS_BYTES as u32),
            ..QueuePairOptions::default()
        };
        Ok(match &self.srq {
            Some(srq) => endpoint.pd.create_qp_with_srq(&self.send_cq, &self.recv_cq, srq, options)?,
            None => endpoint.pd.create_qp(&self.send_cq, &self.recv_cq, options)?,
        })
    }

    fn swap_keys(self, endpoint: &Endpoint, control: &mut Control, list: Vec<Link>) -> Result<Links> {
        let [sink, source] = [&self.sink, &self.source].map(|region| {
            let Remote { key, offset } = region.remote(0);
            json!({ "key": key.value(), "offset": offset })
        });
        let theirs = control.exchange(endpoint, &json!({ "sink": sink, "source": source }))?;
        let peer = parse_remote(&theirs["sink"])?;
        let peer_source = parse_remote(&theirs["source"])?;
        let numbers = (0..).zip(&list).map(|(number, link)| (link.qp.id(), number)).collect();
        let Self { send_cq, recv_cq, srq, source, sink, layout } = self;
        Ok(Links { list, numbers, send_cq, recv_cq, srq, source, sink, layout, peer, peer_source })
    }
}

fn parse_remote(value: &Value) -> Result<Remote> {
    let number = |name: &str| value[name].as_u64().context("the other end told no keys");
    Ok(Remote { key: STag::new(u32::try_from(number("key")?)?), offset: number("offset")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        options::Amount,
        rnic::plan::{Kind, Test, Verb},
    };

    fn plan(sizes: &[u64], queue_pairs: u32, verify: bool) -> Plan {
        Plan {
            test: Test { verb: Verb::Send, kind: Kind::Bandwidth },
            sizes: sizes.to_vec(),
            amount: Amount::Iterations(1),
            queue_pairs,
            tx_depth: 128,
            rx_depth: 512,
            cq_mod: 1,
            post_list: 1,
            reads: 1,
            bidirectional: false,
            verify,
            shared_receive_queue: false,
            inline: 0,
        }
    }

    #[test]
    fn places_do_not_overlap_and_lie_inside() {
        for (sizes, queue_pairs, verify) in
            [(&[1_u64][..], 64, true), (&[8 << 20], 3, true), (&[100, 65536], 2, true), (&[1000], 5, false)]
        {
            let plan = plan(sizes, queue_pairs, verify);
            let layout = Layout::of(&plan);
            let mut places: Vec<(usize, usize)> = Vec::new();
            for number in 0..queue_pairs {
                places.push((layout.words(number), WORDS_BYTES));
                for message in 0..u64::from(layout.slots) {
                    places.push((layout.place(number, message), plan.largest() as usize));
                }
            }
            places.sort_unstable();
            for pair in places.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{plan:?}: {pair:?}");
            }
            let (last, len) = *places.last().unwrap();
            assert!(last + len <= layout.bytes());
        }
        assert_eq!(Layout::of(&plan(&[64 << 20], 1, true)).slots, 1);
        assert_eq!(Layout::of(&plan(&[64], 1, false)).slots, 1);
        assert_eq!(Layout::of(&plan(&[64], 1, true)).slots, 512);
    }
}
