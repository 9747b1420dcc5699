//! `rdma_client` and `rdma_server` of rdmacm-utils over xwarp: each end can talk to the other program. The
//! client sends sixteen bytes, the server sends sixteen bytes back.
//!
//!     echo INTERFACE -s PORT          the server, for one client
//!     echo INTERFACE -c ADDRESS:PORT
//!
//! The port of `rdma_server` is 7471. Needs the rights to load an XDP program.

use std::{env, error::Error, net::SocketAddr, process::ExitCode, time::Duration};

use xwarp_verbs::{
    Access, CompletionChannel, CompletionQueue, Device, MemoryRegion, Payload, ProtectionDomain, QueuePair,
    QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
};

type Failure = Box<dyn Error>;

const MESSAGE_BYTES: usize = 16;
/// Longest wait for anything of the peer's.
const LIMIT: Duration = Duration::from_secs(60);

/// A queue pair with a receive posted.
struct End {
    qp: QueuePair,
    cq: CompletionQueue,
    inbox: MemoryRegion,
    _pd: ProtectionDomain,
}

impl End {
    fn new(device: &Device) -> Result<Self, Failure> {
        let cq = device.create_cq_with_channel(4, &CompletionChannel::new()?)?;
        let pd = device.create_pd()?;
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
        let inbox = pd.allocate(MESSAGE_BYTES, Access::LOCAL_WRITE)?;
        qp.post_recv(&RecvRequest::new(0, &[inbox.sge(0, MESSAGE_BYTES)]))?;
        Ok(Self { qp, cq, inbox, _pd: pd })
    }

    fn send(&self, message: &[u8; MESSAGE_BYTES]) -> Result<(), Failure> {
        Ok(self.qp.post_send(&WorkRequest::send(1, Payload::Inline(message)).signaled())?)
    }

    fn message(&self) -> Result<[u8; MESSAGE_BYTES], Failure> {
        let mut message = [0; MESSAGE_BYTES];
        self.inbox.read(0, &mut message)?;
        Ok(message)
    }

    /// Waits until something has completed.
    fn completed(&self) -> Result<(), Failure> {
        self.cq.wait(LIMIT)?.ok_or("nothing came from the peer")?.check()?;
        Ok(())
    }
}

fn serve(device: &Device, port: u16) -> Result<(), Failure> {
    let listener = device.listen(SocketAddr::from(([0, 0, 0, 0], port)), ListenOptions::default())?;
    println!("listening at port {port}");
    let mut request = listener.accept(LIMIT)?;
    let end = End::new(device)?;
    let connection = request.accept(&end.qp, AcceptOptions::default(), LIMIT)?;
    // The first completion is the client's message: nothing else is posted.
    end.completed()?;
    end.send(&end.message()?)?;
    end.completed()?;
    // The client leaves first.
    connection.wait_disconnected(LIMIT)?;
    Ok(())
}

fn ask(device: &Device, server: SocketAddr) -> Result<(), Failure> {
    let end = End::new(device)?;
    let connection = device.connect(&end.qp, server, ConnectOptions::default(), LIMIT)?;
    end.send(b"who answers me?\0")?;
    // The answer and the acknowledgement of ours, whichever is first.
    end.completed()?;
    end.completed()?;
    println!("answered {:?}", String::from_utf8_lossy(&end.message()?));
    connection.disconnect()?;
    connection.wait_disconnected(LIMIT)?;
    Ok(())
}

fn run(words: &[String]) -> Result<(), Failure> {
    match words {
        [interface, role, port] if role == "-s" => serve(&Device::open(interface)?, port.parse()?),
        [interface, role, server] if role == "-c" => ask(&Device::open(interface)?, server.parse()?),
        _ => Err("usage: echo INTERFACE -s PORT | -c ADDRESS:PORT".into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("echo: {why}");
            ExitCode::FAILURE
        }
    }
}
