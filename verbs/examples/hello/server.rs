// The server: offers a region, waits until a client has written to it, and sends the text back in capitals (of ASCII, so that the
// answer is as long as the text).

use std::{error::Error, net::SocketAddr, time::Duration};

use xwarp_verbs::{
    Access, CompletionChannel, Device, Payload, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ListenOptions},
};

const LIMIT: Duration = Duration::from_secs(10);
/// The longest text, in bytes. Its RNIC refuses a longer one: the client's write ends with an error.
const LONGEST: usize = 1 << 20;

/// Serves one client. `ready` receives the server's address.
pub fn serve(
    device: &Device,
    address: SocketAddr,
    ready: impl FnOnce(SocketAddr),
) -> Result<String, Box<dyn Error>> {
    let listener = device.listen(address, ListenOptions::default())?;
    ready(listener.local_address().ok_or("not bound")?);

    // A channel lets us sleep until something completes.
    let channel = CompletionChannel::new()?;
    let cq = device.create_cq_with_channel(16, &channel)?;
    let pd = device.create_pd()?;
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    // The client will write here; no other queue pair can.
    let board = pd.allocate(LONGEST, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    // Its message says how many bytes.
    let inbox = pd.allocate(8, Access::LOCAL_WRITE)?;
    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, 8)]))?;

    let mut request = listener.accept(LIMIT)?;
    let private_data = board.remote(0).to_bytes().to_vec();
    let connection = request.accept(&qp, AcceptOptions { private_data, ..Default::default() }, LIMIT)?;

    let message = cq.wait(LIMIT)?.ok_or("no message came")?.check()?;
    let mut length = [0; 8];
    inbox.read(0, length.get_mut(..message.byte_len as usize).ok_or("too long")?)?;
    let length = usize::try_from(u64::from_be_bytes(length))?;
    let text = String::from_utf8(board.to_vec(0, length)?)?;

    board.write(0, text.to_ascii_uppercase().as_bytes())?;
    qp.post_send(&WorkRequest::send(2, Payload::Piece(board.sge(0, length))).signaled())?;
    // Completed means: the client's end has acknowledged it. Then it may even leave first.
    cq.wait(LIMIT)?.ok_or("the answer was not acknowledged")?.check()?;
    connection.wait_disconnected(LIMIT)?;
    Ok(text)
}
