//! [`Links`]: the test connections and their memory.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use xwarp_verbs::{
    Access, CloseReason, CompletionQueue, MemoryRegion, Payload, QpId, QueuePair, QueuePairOptions, Remote,
    STag, SharedReceiveQueue, WcStatus, WorkCompletion, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, Listener},
};

use super::{
    closing::close_reason,
    control::{CONNECT_LIMIT, Control},
    endpoint::Endpoint,
    plan::Plan,
};
use crate::{cpu, failure::PeerGone};

/// Maximum memory for the messages of one queue pair in one direction, in bytes. The larger messages are, the
/// fewer have their own slot.
const AREA_BYTES: u64 = 16 << 20;
/// Alignment of slots: a cache line.
const ALIGNMENT: u64 = 64;
/// Size of a queue pair's control words in front of its messages, in bytes: credits, and the Sends of rounds.
pub const WORDS_BYTES: usize = 64;
/// Time limit for a graceful close.
pub const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// Receives and sends beyond the test's depth, for credits and rounds.
const SPARE: u32 = 8;

/// The role of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The server: waits for connections.
    Server,
    /// The client: connects.
    Client,
}

impl Role {
    /// Identifies the sending end in patterns.
    pub fn number(self) -> u8 {
        match self {
            Self::Server => 0,
            Self::Client => 1,
        }
    }

    /// The opposite role.
    #[must_use]
    pub fn peer(self) -> Self {
        match self {
            Self::Server => Self::Client,
            Self::Client => Self::Server,
        }
    }
}

/// Layout of the messages of all queue pairs in a region; the same at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Messages with their own slot, on each queue pair.
    pub slots: u32,
    /// Distance between two slots, in bytes.
    stride: u64,
    /// Distance between the areas of two queue pairs, in bytes.
    part: u64,
    queue_pairs: u32,
}

impl Layout {
    /// Creates the layout for the largest message of the plan.
    pub fn of(plan: &Plan) -> Self {
        let stride = plan.largest().next_multiple_of(ALIGNMENT);
        // Only verified messages need their own slots. Otherwise one slot is enough, and stays in the cache.
        let wanted = if plan.verify { u64::from(plan.tx_depth.max(plan.rx_depth).min(512)) } else { 1 };
        let slots = wanted.min((AREA_BYTES / stride).max(1));
        let part = WORDS_BYTES as u64 + slots * stride;
        Self { slots: slots as u32, stride, part, queue_pairs: plan.queue_pairs }
    }

    /// Size of the whole region, in bytes.
    pub fn bytes(self) -> usize {
        (self.part * u64::from(self.queue_pairs)) as usize
    }

    /// Offset of a queue pair's control words.
    pub fn words(self, queue_pair: u32) -> usize {
        (self.part * u64::from(queue_pair)) as usize
    }

    /// Offset of a message's slot.
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
    /// The connections, in the order in which both ends number them.
    pub list: Vec<Link>,
    /// Index of each queue pair in `list`.
    pub numbers: BTreeMap<QpId, u32>,
    /// Completion queue of sends, writes and reads.
    pub send_cq: CompletionQueue,
    /// Completion queue of receives.
    pub recv_cq: CompletionQueue,
    /// The shared receive queue, with `--use-srq`.
    pub srq: Option<SharedReceiveQueue>,
    /// Source of sends, and destination of reads.
    pub source: MemoryRegion,
    /// Destination of receives, and the peer's target for writes and reads.
    pub sink: MemoryRegion,
    /// Layout of both regions, at both ends.
    pub layout: Layout,
    /// Start of the peer's sink.
    pub peer: Remote,
    /// Start of the peer's source.
    pub peer_source: Remote,
    /// By how many bytes the process's memory in RAM grew while the connections were made.
    pub grown: Option<u64>,
}

/// Resources that exist before the connections.
struct Parts {
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
    source: MemoryRegion,
    sink: MemoryRegion,
    layout: Layout,
    /// Bytes of the process's memory in RAM.
    resident: Option<u64>,
}

impl Links {
    /// The peer's slot for a message, to be written or read.
    pub fn remote(&self, queue_pair: u32, message: u64) -> Remote {
        let offset = self.layout.place(queue_pair, message) as u64;
        Remote { offset: self.peer.offset.wrapping_add(offset), ..self.peer }
    }

    /// The peer's word for our credits.
    pub fn remote_credit(&self, queue_pair: u32) -> Remote {
        let offset = self.layout.words(queue_pair) as u64;
        Remote { offset: self.peer_source.offset.wrapping_add(offset), ..self.peer_source }
    }

    /// Number of a completion's queue pair. Fails if the completion is not a success.
    pub fn number(&self, completion: &WorkCompletion) -> Result<u32> {
        let number =
            self.numbers.get(&completion.qp).copied().context("a completion of an unknown queue pair")?;
        if completion.status == WcStatus::Flushed {
            return Err(self.ended(number));
        }
        ensure!(
            completion.status == WcStatus::Success,
            "{:?} on queue pair {number}: {}",
            completion.opcode,
            completion.status
        );
        Ok(number)
    }

    /// Explains why a queue pair's requests were flushed.
    fn ended(&self, number: u32) -> anyhow::Error {
        match close_reason(&self.list[number as usize].connection) {
            Some(CloseReason::Reset) => {
                PeerGone(format!("its program was killed (queue pair {number} was reset)")).into()
            }
            Some(CloseReason::TimedOut) => {
                PeerGone(format!("it does not answer (queue pair {number} timed out)")).into()
            }
            Some(reason) => PeerGone(format!("queue pair {number} was {reason}")).into(),
            None => anyhow::anyhow!("queue pair {number}: requests were flushed"),
        }
    }

    /// Closes all connections gracefully.
    pub fn close(self) -> Result<()> {
        for link in &self.list {
            link.connection.disconnect()?;
        }
        for link in &self.list {
            link.connection.wait_disconnected(CLOSE_LIMIT)?;
        }
        Ok(())
    }

    /// Connects all queue pairs one after another, as the client.
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
        let links = parts.swap_keys(endpoint, control, list)?;
        if plan.reversed {
            links.release_server()?;
        }
        Ok(links)
    }

    /// Sends an empty RDMA Write on each queue pair: the server may send only after the client's first FPDU (RFC 5044
    /// section 7.1.2).
    fn release_server(&self) -> Result<()> {
        for link in &self.list {
            let request = WorkRequest::write(u64::MAX, Payload::Inline(&[]), self.peer);
            link.qp.post_send(&request).context("posting the client's first message")?;
        }
        Ok(())
    }

    /// Accepts the plan's number of connections, as the server.
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
            let mut request = listener
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
            sink: memory(Access::LOCAL_WRITE | Access::REMOTE)?,
            layout,
            resident: cpu::resident_bytes(),
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
        endpoint.own(match &self.srq {
            Some(srq) => endpoint.pd.create_qp_with_srq(&self.send_cq, &self.recv_cq, srq, options)?,
            None => endpoint.pd.create_qp(&self.send_cq, &self.recv_cq, options)?,
        })
    }

    fn swap_keys(self, endpoint: &Endpoint, control: &mut Control, list: Vec<Link>) -> Result<Links> {
        let grown = cpu::resident_bytes().zip(self.resident).map(|(now, before)| now.saturating_sub(before));
        let [sink, source] = [&self.sink, &self.source].map(|region| {
            let Remote { key, offset } = region.remote(0);
            json!({ "key": key.value(), "offset": offset })
        });
        let theirs = control.exchange(endpoint, &json!({ "sink": sink, "source": source }))?;
        let peer = parse_remote(&theirs["sink"])?;
        let peer_source = parse_remote(&theirs["source"])?;
        let numbers = (0..).zip(&list).map(|(number, link)| (link.qp.id(), number)).collect();
        let Self { send_cq, recv_cq, srq, source, sink, layout, .. } = self;
        Ok(Links { list, numbers, send_cq, recv_cq, srq, source, sink, layout, peer, peer_source, grown })
    }
}

fn parse_remote(value: &Value) -> Result<Remote> {
    let number = |name: &str| value[name].as_u64().context("the other end sent no keys");
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
            infinite: false,
            recv_post_list: 1,
            reversed: false,
            test: Test { verb: Verb::Send, kind: Kind::Bandwidth },
            sizes: sizes.to_vec(),
            amount: Amount::Iterations(1),
            queue_pairs,
            engines: 1,
            tx_depth: 128,
            rx_depth: 512,
            cq_mod: 1,
            post_list: 1,
            reads: 1,
            bidirectional: false,
            verify,
            shared_receive_queue: false,
            inline: 0,
            rate_limit: None,
            latency_gap: Duration::ZERO,
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
