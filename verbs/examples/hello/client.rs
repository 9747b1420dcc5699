// The client: writes a text straight into the server's memory, says how long it is, and waits for the answer.

use std::{error::Error, net::SocketAddr, time::Duration};

use xwarp_verbs::{
    Access, Device, Payload, QueuePairOptions, RecvRequest, Remote, WorkRequest, cm::ConnectOptions,
};

const LIMIT: Duration = Duration::from_secs(10);

/// Writes `text` into the memory of the server at `address`; returns its answer, which is as long.
pub fn ask(device: &Device, address: SocketAddr, text: &str) -> Result<String, Box<dyn Error>> {
    let cq = device.create_cq(16)?;
    let pd = device.create_pd()?;
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    // A text may be empty, a region not.
    let outbox = pd.allocate(text.len().max(1), Access::empty())?;
    outbox.write(0, text.as_bytes())?;
    let inbox = pd.allocate(text.len().max(1), Access::LOCAL_WRITE)?;
    // Posted before the server can possibly answer.
    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, inbox.len())]))?;

    let connection = device.connect(&qp, address, ConnectOptions::default(), LIMIT)?;
    // The server's MPA Reply carries the key and offset of its board as private data.
    let board = Remote::from_bytes(connection.private_data()).ok_or("no board")?;

    // Both in one call: the write is placed before the message is delivered.
    let length = (text.len() as u64).to_be_bytes();
    qp.post_send_list(&[
        WorkRequest::write(2, outbox.sge(0, text.len()), board),
        WorkRequest::send(3, Payload::Inline(&length)).signaled(),
    ])?;

    // The message's own completion and the answer, in any order. This queue is polled, not slept on.
    let mut answer = None;
    for _ in 0..2 {
        let completion = cq.spin(LIMIT).ok_or("no answer came")?.check()?;
        if completion.wr_id == 1 {
            answer = Some(inbox.to_vec(0, completion.byte_len as usize)?);
        }
    }
    connection.disconnect()?;
    Ok(String::from_utf8(answer.ok_or("no answer")?)?)
}
