//! Two devices on a fabric in memory: a test of an RDMA program without root, interfaces or kernel features.
//!
//!     cargo run -p xwarp-verbs --no-default-features --example fabric

use std::{error::Error, thread, time::Duration};

use xwarp_verbs::{
    Access, Device, DeviceOptions, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
    sim::{self, WireConfig},
};

const LIMIT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let (a, b) = sim::pair(WireConfig::default(), 1500)?;
    let server = Device::over(Box::new(a), DeviceOptions::default())?;
    let client = Device::over(Box::new(b), DeviceOptions::default())?;
    let listener = server.listen((sim::ipv4(1), 4791).into(), ListenOptions::default())?;
    thread::scope(|scope| {
        let received = scope.spawn(|| receive(&server, &listener).map_err(|error| error.to_string()));
        send(&client, b"over a cable that is not there")?;
        let text = received.join().map_err(|_| "the server panicked")??;
        assert_eq!(text, b"over a cable that is not there");
        println!("received {} bytes", text.len());
        Ok(())
    })
}

/// Accepts a connection and returns its first message.
fn receive(device: &Device, listener: &xwarp_verbs::cm::Listener) -> Result<Vec<u8>, Box<dyn Error>> {
    let cq = device.create_cq(16)?;
    let pd = device.create_pd()?;
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    let inbox = pd.allocate(4096, Access::LOCAL_WRITE)?;
    qp.post_recv(&RecvRequest::new(1, &[inbox.sge(0, inbox.len())]))?;
    let connection = listener.accept(LIMIT)?.accept(&qp, AcceptOptions::default(), LIMIT)?;
    let message = cq.spin(LIMIT).ok_or("no message came")?.check()?;
    connection.wait_disconnected(LIMIT)?;
    Ok(inbox.to_vec(0, message.byte_len as usize)?)
}

/// Connects to the server and sends one message.
fn send(device: &Device, text: &[u8]) -> Result<(), Box<dyn Error>> {
    let cq = device.create_cq(16)?;
    let pd = device.create_pd()?;
    let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
    let outbox = pd.allocate(text.len(), Access::empty())?;
    outbox.write(0, text)?;
    let server = (sim::ipv4(1), 4791).into();
    let connection = device.connect(&qp, server, ConnectOptions::default(), LIMIT)?;
    qp.post_send(&WorkRequest::send(1, outbox.sge(0, text.len())).signaled())?;
    cq.spin(LIMIT).ok_or("the message was not acknowledged")?.check()?;
    Ok(connection.disconnect()?)
}
