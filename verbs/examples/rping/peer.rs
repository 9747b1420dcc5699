//! One end's queue pair and the messages that both ends exchange: sixteen bytes that name a buffer.

use std::{collections::VecDeque, time::Duration};

use xwarp_verbs::{
    Access, CompletionChannel, CompletionQueue, Device, MemoryRegion, Payload, ProtectionDomain, QueuePair,
    QueuePairOptions, RecvRequest, Remote, STag, WcStatus, WorkCompletion, WorkRequest,
};

use crate::Failure;

/// Bytes of an advertisement: address, key and length, most significant byte first.
const ADVERT_BYTES: usize = 16;
/// Receives that are always posted; their work request IDs are below this.
const RECEIVES: u64 = 4;
/// Work request ID of everything on the send queue.
const SENT: u64 = RECEIVES;

/// A buffer of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Advert {
    pub remote: Remote,
    pub len: u32,
}

impl Advert {
    fn to_bytes(self) -> [u8; ADVERT_BYTES] {
        let mut bytes = [0; ADVERT_BYTES];
        bytes[..8].copy_from_slice(&self.remote.offset.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.remote.key.value().to_be_bytes());
        bytes[12..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; ADVERT_BYTES]) -> Self {
        let (offset, rest) = bytes.split_first_chunk().expect("sixteen bytes");
        let (key, rest) = rest.split_first_chunk().expect("eight bytes");
        let len = rest.first_chunk().expect("four bytes");
        let key = STag::new(u32::from_be_bytes(*key));
        Self { remote: Remote { key, offset: u64::from_be_bytes(*offset) }, len: u32::from_be_bytes(*len) }
    }
}

/// The objects of one connection.
pub struct Peer {
    pub pd: ProtectionDomain,
    pub qp: QueuePair,
    cq: CompletionQueue,
    inbox: MemoryRegion,
    limit: Duration,
    received: VecDeque<Advert>,
    sent: usize,
    gone: bool,
}

impl Peer {
    /// Waits for its peer at most for `limit`.
    pub fn new(device: &Device, limit: Duration) -> Result<Self, Failure> {
        let channel = CompletionChannel::new()?;
        let cq = device.create_cq_with_channel(64, &channel)?;
        let pd = device.create_pd()?;
        let options = QueuePairOptions { signal_all: true, ..QueuePairOptions::default() };
        let qp = pd.create_qp(&cq, &cq, options)?;
        let inbox = pd.allocate(ADVERT_BYTES * RECEIVES as usize, Access::LOCAL_WRITE)?;
        let peer = Self { pd, qp, cq, inbox, limit, received: VecDeque::new(), sent: 0, gone: false };
        for slot in 0..RECEIVES {
            peer.post(slot)?;
        }
        Ok(peer)
    }

    fn post(&self, slot: u64) -> Result<(), Failure> {
        let at = ADVERT_BYTES * slot as usize;
        Ok(self.qp.post_recv(&RecvRequest::new(slot, &[self.inbox.sge(at, ADVERT_BYTES)]))?)
    }

    /// Sends an advertisement; a server's has no meaning but "go on".
    pub fn send(&mut self, advert: Advert) -> Result<(), Failure> {
        self.perform(&WorkRequest::send(SENT, Payload::Inline(&advert.to_bytes())))
    }

    /// Advertises one of our regions to the peer.
    pub fn advertise(&mut self, region: &MemoryRegion) -> Result<(), Failure> {
        self.send(Advert { remote: region.remote(0), len: region.len() as u32 })
    }

    /// Reads the peer's buffer into `region`.
    pub fn read(&mut self, region: &MemoryRegion, from: Advert) -> Result<(), Failure> {
        self.perform(&WorkRequest::read(SENT, region.sge(0, region.len()), from.remote))
    }

    /// Writes `region` to the peer's buffer.
    pub fn write(&mut self, region: &MemoryRegion, to: Advert) -> Result<(), Failure> {
        self.perform(&WorkRequest::write(SENT, region.sge(0, region.len()), to.remote))
    }

    /// Posts a request and waits until it is done.
    fn perform(&mut self, request: &WorkRequest<'_>) -> Result<(), Failure> {
        let before = self.sent;
        self.qp.post_send(request)?;
        while self.sent == before {
            if self.gone {
                return Err("the peer disconnected".into());
            }
            self.turn()?;
        }
        Ok(())
    }

    /// The peer's next advertisement; `None` when it has disconnected.
    pub fn receive(&mut self) -> Result<Option<Advert>, Failure> {
        loop {
            if let Some(advert) = self.received.pop_front() {
                return Ok(Some(advert));
            }
            if self.gone {
                return Ok(None);
            }
            self.turn()?;
        }
    }

    fn turn(&mut self) -> Result<(), Failure> {
        let completion = self.cq.wait(self.limit)?.ok_or("nothing came from the peer")?;
        match completion.status {
            WcStatus::Success => self.done(completion),
            WcStatus::Flushed => {
                self.gone = true;
                Ok(())
            }
            status => Err(format!("{:?}: {status}", completion.opcode).into()),
        }
    }

    fn done(&mut self, completion: WorkCompletion) -> Result<(), Failure> {
        if completion.wr_id == SENT {
            self.sent += 1;
            return Ok(());
        }
        if completion.byte_len as usize != ADVERT_BYTES {
            return Err(format!("a message of {} bytes", completion.byte_len).into());
        }
        let mut bytes = [0; ADVERT_BYTES];
        self.inbox.read(ADVERT_BYTES * completion.wr_id as usize, &mut bytes)?;
        self.received.push_back(Advert::from_bytes(bytes));
        self.post(completion.wr_id)
    }
}

/// The text of a round: its number, then letters that go on from round to round, and a zero.
pub fn text(round: u32, size: usize) -> Vec<u8> {
    const LETTERS: usize = (b'z' - b'A') as usize + 1;
    let mut text = format!("rdma-ping-{round}: ").into_bytes();
    let letter = |i: usize| b'A' + ((round as usize + i) % LETTERS) as u8;
    let have = text.len();
    text.extend((0..size.saturating_sub(have + 1)).map(letter));
    text.push(0);
    text
}

/// A text as it is printed.
pub fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(text.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}
