//! [`Exchange`]: perftest's control connection with `-R`. It has its own queue pair; each end has exactly one
//! receive posted, so the ends alternate, and the client sends first. The other messages of perftest 4.5 are
//! here too: versions, page and cache line sizes, MTU, keys, reports.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use xwarp_verbs::{
    Access, CompletionQueue, MemoryRegion, Opcode, QueuePair, QueuePairOptions, RecvRequest, Remote, STag,
    WcStatus, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, Listener},
};

use crate::{
    failure::PeerGone,
    rnic::{
        control::CONNECT_LIMIT,
        endpoint::{Endpoint, Idle, next_request},
        links::Role,
    },
};

/// The protocol version that perftest 4.5 reports.
const VERSION: &str = "6.06";
/// Bytes of the version message, padded with zeros.
const VERSION_BYTES: usize = 16;
/// The oldest version that perftest 4.5 accepts.
const OLDEST_VERSION: f64 = 5.7;
/// Buffers are at least one page, and messages advance through them by cache lines; both ends use the larger
/// value.
const PAGE_BYTES: u32 = 4096;
const CACHE_LINE_BYTES: u32 = 64;
/// InfiniBand's path MTU code of 1024 bytes. iWARP devices report it; it has no meaning for them.
const MTU_CODE: &[u8; 2] = b"3\0";

/// Limit on the silence of the control connection: the server of RDMA Writes and Reads receives nothing
/// during the test. A closed or reset connection is detected immediately.
const TEST_LIMIT: Duration = Duration::from_secs(3600);

/// Size of the longest message, the keys.
const MESSAGE_BYTES: usize = Keys::BYTES;
/// Offset of the message to send, behind the receive buffer.
const SEND_AT: usize = 64;
const REGION_BYTES: usize = 128;

/// One end of the control connection.
#[derive(Debug)]
pub struct Exchange {
    role: Role,
    connection: Option<Connection>,
    qp: QueuePair,
    cq: CompletionQueue,
    region: MemoryRegion,
    sent: usize,
    received: Option<Vec<u8>>,
}

impl Exchange {
    fn new(endpoint: &Endpoint, role: Role) -> Result<Self> {
        let cq = endpoint.completion_queue(8)?;
        let options = QueuePairOptions { max_send_wr: 2, max_recv_wr: 2, ..QueuePairOptions::default() };
        let qp = endpoint.pd.create_qp(&cq, &cq, options)?;
        let region = endpoint.pd.allocate(REGION_BYTES, Access::LOCAL_WRITE)?;
        let exchange = Self { role, connection: None, qp, cq, region, sent: 0, received: None };
        exchange.post_receive()?;
        Ok(exchange)
    }

    /// Connects, as the client.
    pub fn connect(endpoint: &Endpoint, server: SocketAddr) -> Result<Self> {
        let mut exchange = Self::new(endpoint, Role::Client)?;
        let options = ConnectOptions { ird: 0, ord: 0, ..ConnectOptions::default() };
        let connection = endpoint
            .device
            .connect(&exchange.qp, server, options, CONNECT_LIMIT)
            .with_context(|| format!("cannot connect to {server}"))?;
        exchange.connection = Some(connection);
        Ok(exchange)
    }

    /// Accepts the next connection, as the server, without a time limit.
    pub fn accept(endpoint: &Endpoint, listener: &Listener) -> Result<Self> {
        let mut request = next_request(listener)?;
        let mut exchange = Self::new(endpoint, Role::Server)?;
        let options = AcceptOptions { ird: 0, ord: 0, ..AcceptOptions::default() };
        exchange.connection = Some(request.accept(&exchange.qp, options, CONNECT_LIMIT)?);
        Ok(exchange)
    }

    /// Our address and the peer's.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let connection = self.connection.as_ref();
        (connection.and_then(Connection::local_address), connection.and_then(Connection::peer_address))
    }

    fn post_receive(&self) -> Result<()> {
        let place = [self.region.sge(0, MESSAGE_BYTES)];
        self.qp.post_recv(&RecvRequest::new(0, &place)).context("control connection")
    }

    /// Waits until `ready` returns true.
    fn wait(&mut self, endpoint: &Endpoint, what: &str, ready: impl Fn(&Self) -> bool) -> Result<()> {
        let cq = self.cq.clone();
        let queues = [&cq];
        let mut idle = Idle::new(endpoint, &queues);
        let begin = Instant::now();
        while !ready(self) {
            let Some(completion) = cq.poll_one() else {
                if let Err(error) = idle.wait(what) {
                    ensure!(begin.elapsed() < TEST_LIMIT, error);
                    idle.over();
                }
                continue;
            };
            idle.over();
            match (completion.status, completion.opcode) {
                (WcStatus::Success, Opcode::Recv) => {
                    self.received = Some(self.region.to_vec(0, completion.byte_len as usize)?);
                    // Post it before our reply can trigger the next message.
                    self.post_receive()?;
                }
                (WcStatus::Success, _) => self.sent += 1,
                (WcStatus::Flushed, _) => {
                    let gone = PeerGone("its program closed the control connection".into());
                    return Err(gone).context(what.to_owned());
                }
                (status, opcode) => bail!("{what}: {opcode:?}: {status}"),
            }
        }
        Ok(())
    }

    fn send(&mut self, endpoint: &Endpoint, bytes: &[u8], what: &str) -> Result<()> {
        self.region.write(SEND_AT, bytes)?;
        let before = self.sent;
        let place = self.region.sge(SEND_AT, bytes.len());
        self.qp.post_send(&WorkRequest::send(1, place).signaled()).context("control connection")?;
        self.wait(endpoint, what, |exchange| exchange.sent > before)
    }

    fn receive(&mut self, endpoint: &Endpoint, what: &str) -> Result<Vec<u8>> {
        self.wait(endpoint, what, |exchange| exchange.received.is_some())?;
        self.received.take().context("a message")
    }

    /// Exchanges `bytes` for a message of the same length; the client sends first.
    pub fn swap<const N: usize>(
        &mut self,
        endpoint: &Endpoint,
        bytes: &[u8; N],
        what: &str,
    ) -> Result<[u8; N]> {
        let heard = match self.role {
            Role::Client => {
                self.send(endpoint, bytes, what)?;
                self.receive(endpoint, what)?
            }
            Role::Server => {
                let heard = self.receive(endpoint, what)?;
                self.send(endpoint, bytes, what)?;
                heard
            }
        };
        let len = heard.len();
        heard.try_into().ok().with_context(|| format!("{what}: received {len} bytes instead of {N}"))
    }

    /// Exchanges perftest's first messages. Returns the minimum size of every buffer, in bytes.
    pub fn greet(&mut self, endpoint: &Endpoint) -> Result<u32> {
        let mut version = [0; VERSION_BYTES];
        version.iter_mut().zip(VERSION.bytes()).for_each(|(to, from)| *to = from);
        let theirs = self.swap(endpoint, &version, "versions")?;
        let text: String = theirs.iter().take_while(|b| **b != 0).map(|b| char::from(*b)).collect();
        ensure!(
            text.parse::<f64>().is_ok_and(|version| version >= OLDEST_VERSION),
            "the other end's version is '{text}': perftest from {OLDEST_VERSION} on is understood"
        );
        let page = self.swap(endpoint, &PAGE_BYTES.to_be_bytes(), "page sizes")?;
        self.swap(endpoint, &CACHE_LINE_BYTES.to_be_bytes(), "cache line sizes")?;
        self.swap(endpoint, MTU_CODE, "MTUs")?;
        Ok(PAGE_BYTES.max(u32::from_be_bytes(page)))
    }

    /// Exchanges keys; perftest also uses this to synchronize the two ends.
    pub fn shake_hands(&mut self, endpoint: &Endpoint, keys: &Keys) -> Result<Keys> {
        self.swap(endpoint, &keys.to_bytes(), "keys").map(|theirs| Keys::from_bytes(&theirs))
    }

    /// Exchanges the measurements, one number at a time.
    pub fn swap_reports(&mut self, endpoint: &Endpoint, mine: &Measured) -> Result<Measured> {
        let mut next = |number: [u8; 8]| self.swap(endpoint, &number, "reports");
        Ok(Measured {
            bytes: u64::from_be_bytes(next(mine.bytes.to_be_bytes())?),
            iterations: u64::from_be_bytes(next(mine.iterations.to_be_bytes())?),
            peak: f64::from_be_bytes(next(mine.peak.to_be_bytes())?),
            average: f64::from_be_bytes(next(mine.average.to_be_bytes())?),
            message_rate: f64::from_be_bytes(next(mine.message_rate.to_be_bytes())?),
        })
    }
}

/// Perftest's description of a queue pair. Most of its fields have no meaning for iWARP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Keys {
    /// RDMA Reads in flight.
    pub reads: u32,
    /// The queue pair's number.
    pub qp: u32,
    /// The data buffer, or in a bandwidth test of Sends the memory word for credits.
    pub remote: Remote,
}

impl Keys {
    /// Size of the C structure: four words (LID, reads, QP, PSN), key, padding, address, GID, two words.
    const BYTES: usize = 56;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[4..8].copy_from_slice(&self.reads.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.qp.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.remote.key.value().to_be_bytes());
        bytes[24..32].copy_from_slice(&self.remote.offset.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| bytes[at..at + 4].iter().fold(0, |word, b| word << 8 | u32::from(*b));
        let offset = u64::from(word(24)) << 32 | u64::from(word(28));
        Self { reads: word(4), qp: word(8), remote: Remote { key: STag::new(word(16)), offset } }
    }
}

/// The measurements of one end, in perftest's units.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Measured {
    /// Size of a message.
    pub bytes: u64,
    /// Number of messages.
    pub iterations: u64,
    /// MiB a second.
    pub peak: f64,
    /// MiB a second.
    pub average: f64,
    /// Millions of messages a second.
    pub message_rate: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_lie_as_in_perftests_structure() {
        let keys = Keys {
            reads: 0x0102_0304,
            qp: 0x0506_0708,
            remote: Remote { key: STag::new(0x0a0b_0c0d), offset: 0x1112_1314_1516_1718 },
        };
        let bytes = keys.to_bytes();
        assert_eq!(bytes[..12], [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[12..24], [0, 0, 0, 0, 0xa, 0xb, 0xc, 0xd, 0, 0, 0, 0]);
        assert_eq!(bytes[24..32], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(Keys::from_bytes(&bytes), keys);
    }
}
