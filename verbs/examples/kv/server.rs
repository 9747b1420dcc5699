// The server: owns the table. Clients read it by RDMA Read, without the server's help, and ask for changes by messages.

use std::{
    error::Error,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use xwarp_verbs::{
    Access, CompletionQueue, Device, MemoryRegion, Payload, ProtectionDomain, QueuePair, QueuePairOptions,
    RecvRequest, WorkRequest,
    cm::{AcceptOptions, Connection, Listener},
};

use super::slot;

const LIMIT: Duration = Duration::from_secs(10);
const MESSAGE: u64 = 1;
const ANSWER: u64 = 2;

/// Serves so many clients, each by a thread, until they have left.
pub fn serve(device: &Device, listener: &Listener, clients: usize) -> Result<(), Box<dyn Error>> {
    let pd = device.create_pd()?;
    // Peers may read the table, and only the server writes it.
    let table = pd.allocate(slot::SLOTS * slot::SLOT_BYTES, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let table = &Mutex::new(table);
    thread::scope(|scope| {
        for _ in 0..clients {
            let client = Client::accept(&pd, listener, table)?;
            scope.spawn(move || {
                if let Err(error) = client.serve(table) {
                    eprintln!("a client is lost: {error}");
                }
            });
        }
        Ok(())
    })
}

struct Client {
    // Posts and completions of this client only.
    cq: CompletionQueue,
    qp: QueuePair,
    inbox: MemoryRegion,
    // Ends with this value.
    _connection: Connection,
}

impl Client {
    fn accept(
        pd: &ProtectionDomain,
        listener: &Listener,
        table: &Mutex<MemoryRegion>,
    ) -> Result<Self, Box<dyn Error>> {
        let cq = pd.device().create_cq(16)?;
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
        let inbox = pd.allocate(slot::SLOT_BYTES, Access::LOCAL_WRITE)?;
        // Before the connection: the first message may come with it.
        qp.post_recv(&RecvRequest::new(MESSAGE, &[inbox.sge(0, inbox.len())]))?;
        let at = table.lock().unwrap_or_else(PoisonError::into_inner).remote(0);
        let options = AcceptOptions { private_data: at.to_bytes().to_vec(), ..Default::default() };
        let connection = listener.accept(LIMIT)?.accept(&qp, options, LIMIT)?;
        Ok(Self { cq, qp, inbox, _connection: connection })
    }

    fn serve(&self, table: &Mutex<MemoryRegion>) -> Result<(), Box<dyn Error>> {
        loop {
            // A client may be silent for as long as it likes: TCP notices when it has died.
            let Some(completion) = self.cq.wait(LIMIT)? else { continue };
            // When the client leaves, the receive that waits is flushed.
            let Ok(completion) = completion.check() else { return Ok(()) };
            if completion.wr_id == ANSWER {
                continue;
            }
            let message = self.inbox.to_vec(0, completion.byte_len as usize)?;
            // The next message needs a receive before the answer, which makes the client send it.
            self.qp.post_recv(&RecvRequest::new(MESSAGE, &[self.inbox.sge(0, self.inbox.len())]))?;
            let stored = store(table, &message)?;
            self.qp.post_send(&WorkRequest::send(ANSWER, Payload::Inline(&[u8::from(stored)])).signaled())?;
        }
    }
}

/// Puts what a message says into the table: the key's length, the key, the value. False if that is no message of ours.
fn store(table: &Mutex<MemoryRegion>, message: &[u8]) -> Result<bool, Box<dyn Error>> {
    let parts = message.split_first().and_then(|(len, rest)| rest.split_at_checked(usize::from(*len)));
    let Some((key, value)) = parts else { return Ok(false) };
    let Some(bytes) = slot::encode(key, value) else { return Ok(false) };
    table.lock().unwrap_or_else(PoisonError::into_inner).write(slot::offset(key), &bytes)?;
    Ok(true)
}
