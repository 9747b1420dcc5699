//! From zero to a verified RDMA Write: the client writes into the server's memory, reads it back and compares.
//!
//!     cargo run -p xwarp-verbs --no-default-features --features sim --example verified_write
//!
//! `docs/guide/first-write.md` explains it line by line.

use std::{error::Error, net::SocketAddr, thread, time::Duration};

use xwarp_verbs::{
    Access, Device, DeviceOptions, QueuePairOptions, Remote, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions, Listener},
    sim::{self, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(10);

// client: shown in README
fn write_and_read_back(device: &Device, server: SocketAddr, text: &[u8]) -> Result<Vec<u8>, Box<dyn Error>> {
    let (pd, cq) = (device.create_pd()?, device.create_cq(16)?);
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    let outbox = pd.allocate(text.len(), Access::empty())?; // registered memory; no peer can reach it
    outbox.write(0, text)?;
    let copy = pd.allocate(text.len(), Access::LOCAL_WRITE)?;

    let connection = device.connect(&qp, server, ConnectOptions::default(), LIMIT)?;
    let board = Remote::from_bytes(connection.private_data()).ok_or("the server offers no memory")?;
    qp.post_send_list(&[
        WorkRequest::write(1, outbox.sge(0, text.len()), board),
        WorkRequest::read(2, copy.sge(0, text.len()), board).signaled(), // sees what was written before it
    ])?;
    cq.wait(LIMIT)?.ok_or("the server does not answer")?.check()?;
    connection.disconnect()?;
    Ok(copy.to_vec(0, text.len())?)
}
// end

// server
fn offer_memory(device: &Device, listener: &Listener) -> Result<Vec<u8>, Box<dyn Error>> {
    let (pd, cq) = (device.create_pd()?, device.create_cq(16)?);
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    let board = pd.allocate(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)?;
    let private_data = board.remote(0).to_bytes().to_vec();
    let options = AcceptOptions { private_data, ..Default::default() };
    let connection = listener.accept(LIMIT)?.accept(&qp, options, LIMIT)?;
    connection.wait_disconnected(LIMIT)?;
    Ok(board.to_vec(0, 4096)?)
}
// end

fn main() -> Result<(), Box<dyn Error>> {
    run()
}

// both ends
/// Runs a server and a client.
pub fn run() -> Result<(), Box<dyn Error>> {
    let (a, b) = sim::pair(WireConfig::default(), 1500)?;
    let server = Device::over(Box::new(a), DeviceOptions::default())?;
    let client = Device::over(Box::new(b), DeviceOptions::default())?;
    let address = SocketAddr::from((sim::ipv4(1), 4791));
    let listener = server.listen(address, ListenOptions::default())?;
    let text = b"written by RDMA";
    thread::scope(|scope| {
        let serving = scope.spawn(|| offer_memory(&server, &listener).map_err(|error| error.to_string()));
        let read = write_and_read_back(&client, address, text)?;
        let board = serving.join().map_err(|_| "the server panicked")??;
        assert_eq!(read, text);
        assert_eq!(&board[..text.len()], text);
        println!("{} bytes written, read back and found equal", read.len());
        Ok(())
    })
}
// end
