//! Programs that exchange messages over a device that `xwarpd` shares, or that they own: a server, a client, both in one, and one that
//! forks.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use xwarp_driver::{Origin, OriginPreference};
use xwarp_verbs::{
    Access, CompletionQueue, Device, DeviceOptions, FramingConfig, MemoryRegion, MpaConfig, ProtectionDomain,
    QueuePair, QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, ListenOptions},
};

use crate::lab::INTERFACE;

/// Longer than it takes a server of a hundred on two cores to notice that its client was killed, and to accept the next.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn device(origin: Origin) -> Result<Device> {
    device_with(origin, 1)
}

fn device_with(origin: Origin, engines: u16) -> Result<Device> {
    let mpa = MpaConfig { startup_timeout: LIMIT, ..MpaConfig::default() };
    let mut options = DeviceOptions { engines, framing: FramingConfig::Mpa(mpa), ..DeviceOptions::default() };
    options.driver.origin = OriginPreference::Force(origin);
    options.driver.receive_chunks = 256;
    options.driver.transmit_chunks = 256;
    options.driver.ring_size = 256;
    let device = Device::open_with(INTERFACE, options)?;
    ensure!(device.attributes().interface.shared == (origin == Origin::Granted), "of another origin");
    Ok(device)
}

/// Byte `at` of message `number` in the direction of `from`.
fn pattern(from: u8, number: usize, at: usize) -> u8 {
    (number.wrapping_mul(31) ^ at.wrapping_mul(7) ^ (at >> 8)) as u8 ^ from
}

fn size(number: usize) -> usize {
    1 + number.wrapping_mul(7919) % MESSAGE
}

const MESSAGE: usize = 9000;

/// Messages between two reports of a client of how many it has exchanged.
pub const PART: usize = 20;

/// One end of a connection that exchanges messages in turn.
pub(crate) struct End {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    pub(crate) qp: QueuePair,
    memory: MemoryRegion,
}

impl End {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let pd = device.create_pd()?;
        let cq = device.create_cq(16)?;
        let qp = pd.create_qp(&cq, &cq, QueuePairOptions::default())?;
        let memory = pd.allocate(2 * MESSAGE, Access::LOCAL_WRITE)?;
        Ok(Self { pd, cq, qp, memory })
    }

    pub(crate) fn post_receive(&self) -> Result<()> {
        Ok(self.qp.post_recv(&RecvRequest::new(1, &[self.memory.sge(0, MESSAGE)]))?)
    }

    /// Sends the messages of these numbers, each after the answer to the one before.
    pub(crate) fn ask(&self, numbers: std::ops::Range<usize>) -> Result<()> {
        for number in numbers {
            self.post_receive()?;
            self.send(b'c', number)?;
            self.complete(1, b's', Some(number))?;
        }
        Ok(())
    }

    /// The same from message `next` to the one before `last`, and says how far it has come.
    fn ask_in_parts(&self, mut next: usize, last: usize) -> Result<()> {
        while next < last {
            let end = last.min((next / PART + 1) * PART);
            self.ask(next..end)?;
            println!("{end} messages");
            next = end;
        }
        Ok(())
    }

    /// Waits for the message of this number and answers it.
    pub(crate) fn answer(&self, number: usize) -> Result<()> {
        self.complete(0, b'c', Some(number))?;
        self.post_receive()?;
        self.send(b's', number)?;
        self.complete(1, b'c', None)
    }

    fn send(&self, from: u8, number: usize) -> Result<()> {
        let bytes: Vec<u8> = (0..size(number)).map(|at| pattern(from, number, at)).collect();
        self.memory.write(MESSAGE, &bytes)?;
        let piece = self.memory.sge(MESSAGE, bytes.len());
        Ok(self.qp.post_send(&WorkRequest::send(2, piece).signaled())?)
    }

    /// Waits for the completions of one send and one receive, and checks the received message.
    fn complete(&self, sends: usize, from: u8, number: Option<usize>) -> Result<()> {
        for _ in 0..sends + usize::from(number.is_some()) {
            let completion = self.cq.wait(LIMIT)?.context("no completion in time")?;
            completion.check()?;
            if completion.wr_id == 1 {
                let number = number.context("an unexpected message")?;
                let bytes = self.memory.to_vec(0, completion.byte_len as usize)?;
                ensure!(bytes.len() == size(number), "{} bytes of message {number}", bytes.len());
                let right = bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(from, number, at));
                ensure!(right, "message {number} is damaged");
            }
        }
        Ok(())
    }
}

/// Accepts `connections`, one after another, and answers every message of each with one of its own.
pub fn serve(address: SocketAddr, connections: usize) -> Result<()> {
    serve_with(&device(Origin::Granted)?, address, connections, || println!("listens"))
}

/// The same with an open device; calls `listens` when clients may connect.
pub fn serve_with(
    device: &Device,
    address: SocketAddr,
    connections: usize,
    listens: impl FnOnce(),
) -> Result<()> {
    let listener = device.listen(address, ListenOptions::default())?;
    listens();
    for _ in 0..connections {
        let mut request = listener.accept(Duration::from_secs(120))?;
        let end = End::new(device)?;
        end.post_receive()?;
        let connection = request.accept(&end.qp, AcceptOptions::default(), LIMIT)?;
        // The client ends when it has enough, or is killed.
        let ended = (0..).try_for_each(|number| end.answer(number));
        println!("{ended:?}");
        drop(connection);
    }
    Ok(())
}

/// Connects and exchanges `messages`; 0: without end.
pub fn talk(address: SocketAddr, messages: usize) -> Result<()> {
    let device = device(Origin::Granted)?;
    let end = End::new(&device)?;
    let connection = device.connect(&end.qp, address, ConnectOptions::default(), LIMIT)?;
    println!("connected");
    end.ask(0..1)?;
    println!("talks");
    if let Err(error) = end.ask_in_parts(1, if messages == 0 { usize::MAX } else { messages }) {
        // The reason of the device's end, if the device has ended.
        if let Err(reason) = device.listen(address, ListenOptions::default()) {
            println!("{:#}", anyhow::Error::from(reason));
        }
        return Err(error);
    }
    connection.disconnect()?;
    println!("done");
    Ok(())
}

/// Connects to `address`, where the same device listens on all addresses, and exchanges `messages` between the two ends.
pub fn itself(address: SocketAddr, messages: usize) -> Result<()> {
    let device = device(Origin::Granted)?;
    let all: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let listener = device.listen(SocketAddr::new(all, address.port()), ListenOptions::default())?;
    let [asks, answers] = [End::new(&device)?, End::new(&device)?];
    answers.post_receive()?;
    thread::scope(|scope| {
        let accepts = scope.spawn(|| -> Result<()> {
            let mut request = listener.accept(LIMIT)?;
            let _connection = request.accept(&answers.qp, AcceptOptions::default(), LIMIT)?;
            (0..messages).try_for_each(|number| answers.answer(number))
        });
        let connection = device.connect(&asks.qp, address, ConnectOptions::default(), LIMIT)?;
        asks.ask(0..messages)?;
        let accepted = accepts.join();
        accepted.map_err(|_| anyhow::anyhow!("the accepting thread panicked"))??;
        connection.disconnect()?;
        println!("done");
        Ok(())
    })
}

/// Connects, exchanges messages, forks, and exchanges messages again after the child has tried everything and has ended.
/// `arguments`: `owned`, `granted`, or `engines` for an owned device with two engines, and the server's address. `fork` returns the child's process id in the parent.
pub fn forking(arguments: &[String], fork: impl FnOnce() -> Result<Option<i32>>) -> Result<()> {
    let [origin, address] = arguments else { bail!("two arguments") };
    let address: SocketAddr = address.parse()?;
    let device = match origin.as_str() {
        "granted" => device(Origin::Granted)?,
        "engines" => device_with(Origin::Owned, 2)?,
        _ => device(Origin::Owned)?,
    };
    let end = End::new(&device)?;
    let connection = device.connect(&end.qp, address, ConnectOptions::default(), LIMIT)?;
    end.ask(0..10)?;
    let Some(child) = fork()? else {
        return in_child(&device, &end, address);
    };
    let child = rustix::process::Pid::from_raw(child).context("a process id")?;
    // The parent continues to work while the child runs.
    end.ask(10..20)?;
    let (_, status) =
        rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())?.context("a child")?;
    ensure!(status.exit_status() == Some(0), "the child: {status:?}");
    end.ask(20..40)?;
    let second = end.pd.create_qp(&end.cq, &end.cq, QueuePairOptions::default())?;
    drop(second);
    connection.disconnect()?;
    println!("done");
    Ok(())
}

/// A child may not use a device of its parent: each call fails with that error.
fn in_child(device: &Device, end: &End, address: SocketAddr) -> Result<()> {
    let failure = device.failure().context("the device works in a child")?.to_string();
    ensure!(failure.contains("fork"), "{failure}");
    ensure!(device.create_cq(16).is_err(), "create_cq works in a child");
    ensure!(
        end.pd.create_qp(&end.cq, &end.cq, QueuePairOptions::default()).is_err(),
        "create_qp works in a child"
    );
    ensure!(end.post_receive().is_err() && end.send(b'c', 0).is_err(), "posting works in a child");
    ensure!(end.cq.wait(Duration::from_secs(1)).is_err(), "waiting works in a child");
    let connected = device.connect(&end.qp, address, ConnectOptions::default(), Duration::from_secs(1));
    ensure!(connected.is_err(), "connecting works in a child");
    ensure!(device.listen(address, ListenOptions::default()).is_err(), "listening works in a child");
    device.progress();
    if device.attributes().interface.shared {
        self::device(Origin::Granted).context("a device of the child's own")?;
    }
    Ok(())
}
