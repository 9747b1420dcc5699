// The client: gets by RDMA Read of one slot, puts by a message and its answer.

use std::{error::Error, net::SocketAddr, time::Duration};

use xwarp_verbs::{
    Access, CompletionQueue, Device, MemoryRegion, QueuePair, QueuePairOptions, RecvRequest, Remote,
    WorkRequest,
    cm::{ConnectOptions, Connection},
};

use super::slot::{self, Found};

const LIMIT: Duration = Duration::from_secs(10);
const GET: u64 = 1;
const PUT: u64 = 2;
const ANSWER: u64 = 3;
/// How often a slot is read again that was being written.
const MAX_READS: usize = 100;

/// A connection to a store.
pub struct Store {
    cq: CompletionQueue,
    qp: QueuePair,
    connection: Connection,
    /// Where the server's table begins.
    table: Remote,
    slot: MemoryRegion,
    outbox: MemoryRegion,
    inbox: MemoryRegion,
}

impl Store {
    pub fn connect(device: &Device, server: SocketAddr) -> Result<Self, Box<dyn Error>> {
        let (pd, cq) = (device.create_pd()?, device.create_cq(16)?);
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
        let slot = pd.allocate(slot::SLOT_BYTES, Access::LOCAL_WRITE)?;
        let outbox = pd.allocate(slot::SLOT_BYTES, Access::empty())?;
        let inbox = pd.allocate(1, Access::LOCAL_WRITE)?;
        let connection = device.connect(&qp, server, ConnectOptions::default(), LIMIT)?;
        let table = Remote::from_bytes(connection.private_data()).ok_or("this is no store")?;
        Ok(Self { cq, qp, connection, table, slot, outbox, inbox })
    }

    /// The value of a key. The server's processor takes no part.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        let from = Remote { offset: self.table.offset + slot::offset(key) as u64, ..self.table };
        for _ in 0..MAX_READS {
            let piece = self.slot.sge(0, slot::SLOT_BYTES);
            self.qp.post_send(&WorkRequest::read(GET, piece, from).signaled())?;
            self.completed(&[GET])?;
            let mut bytes = [0; slot::SLOT_BYTES];
            self.slot.read(0, &mut bytes)?;
            match slot::decode(&bytes, key) {
                Found::Value(value) => return Ok(Some(value)),
                Found::Nothing => return Ok(None),
                Found::Torn => {}
            }
        }
        Err("the slot is written all the time".into())
    }

    /// Stores a value; false if the server refuses it because key or value is too long.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<bool, Box<dyn Error>> {
        let message = [&[u8::try_from(key.len())?], key, value].concat();
        self.outbox.write(0, &message)?;
        // Posted before the server can possibly answer.
        self.qp.post_recv(&RecvRequest::new(ANSWER, &[self.inbox.sge(0, 1)]))?;
        self.qp.post_send(&WorkRequest::send(PUT, self.outbox.sge(0, message.len())).signaled())?;
        // The message's own completion and the answer, in any order.
        self.completed(&[PUT, ANSWER])?;
        Ok(self.inbox.to_vec(0, 1)? == [1])
    }

    pub fn close(self) -> Result<(), Box<dyn Error>> {
        Ok(self.connection.disconnect()?)
    }

    /// Waits until all of these requests have completed.
    fn completed(&self, requests: &[u64]) -> Result<(), Box<dyn Error>> {
        let mut left = requests.to_vec();
        while !left.is_empty() {
            let completion = self.cq.wait(LIMIT)?.ok_or("the store does not answer")?.check()?;
            left.retain(|request| *request != completion.wr_id);
        }
        Ok(())
    }
}
