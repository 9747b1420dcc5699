//! The program that runs over both transports: verified requests and answers, each after the one before.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use xwarp_driver::{Origin, OriginPreference};
use xwarp_verbs::{
    Access, CompletionQueue, Device, DeviceOptions, MemoryRegion, ProtectionDomain, QueuePair,
    QueuePairOptions, RecvRequest, WorkRequest,
    cm::{AcceptOptions, ConnectOptions, Connection, ListenOptions},
};

use super::outcome::Outcome;
use crate::lab::INTERFACE;

/// Sizes of a request, in bytes: one that fits into a segment, and each tenth one.
const SIZES: [usize; 2] = [64, 65536];

/// Pause after an answer.
const PAUSE: Duration = Duration::from_millis(5);

/// Time limit of a connection attempt after the operation.
const ATTEMPT: Duration = Duration::from_secs(10);

/// An answer that is due at the end of the traffic is waited for as long.
const GRACE: Duration = Duration::from_secs(3);

/// One that ends a server's wait; no operation takes as long.
const EVER: Duration = Duration::from_mins(10);

const TCP_PORT: u16 = 4790;
const OUR_PORT: u16 = 4791;

/// A connection that carries messages. A message that does not arrive in time is `None`.
trait Messages {
    fn send(&mut self, message: &[u8]) -> Result<()>;
    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>>;
}

/// Kernel TCP: each message follows its length.
struct Tcp(TcpStream);

impl Messages for Tcp {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let mut bytes = (message.len() as u32).to_be_bytes().to_vec();
        bytes.extend_from_slice(message);
        Ok(self.0.write_all(&bytes)?)
    }

    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>> {
        let end = Instant::now() + limit;
        let Some(length) = self.read(4, end)? else { return Ok(None) };
        let length = u32::from_be_bytes(length.try_into().map_err(|_| anyhow!("four octets"))?) as usize;
        ensure!(length <= SIZES[1], "a message of {length} bytes");
        self.read(length, end)
    }
}

impl Tcp {
    fn read(&mut self, length: usize, end: Instant) -> Result<Option<Vec<u8>>> {
        let (mut bytes, mut done) = (vec![0; length], 0);
        while done < length {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.0.set_read_timeout(Some(left))?;
            match self.0.read(&mut bytes[done..]) {
                Ok(0) => return Err(anyhow!("end of file")),
                Ok(count) => done += count,
                // A receive with a time limit is interrupted when the process is stopped and goes on.
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Some(bytes))
    }
}

/// A queue pair of ours. The fields are dropped in this order.
struct Ours {
    connection: Option<Connection>,
    qp: QueuePair,
    sends: CompletionQueue,
    receives: CompletionQueue,
    memory: MemoryRegion,
    _pd: ProtectionDomain,
}

impl Ours {
    fn new(device: &Device) -> Result<Self> {
        let pd = device.create_pd()?;
        let (sends, receives) = (device.create_cq(16)?, device.create_cq(16)?);
        let qp = pd.create_qp(&sends, &receives, QueuePairOptions::default())?;
        let memory = pd.allocate(2 * SIZES[1], Access::LOCAL_WRITE)?;
        let new = Self { connection: None, qp, sends, receives, memory, _pd: pd };
        new.post_receive()?;
        Ok(new)
    }

    fn post_receive(&self) -> Result<()> {
        Ok(self.qp.post_recv(&RecvRequest::new(1, &[self.memory.sge(0, SIZES[1])]))?)
    }
}

impl Messages for Ours {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.memory.write(SIZES[1], message)?;
        self.qp.post_send(&WorkRequest::send(2, self.memory.sge(SIZES[1], message.len())).signaled())?;
        self.sends.wait(EVER)?.context("a Send that never completes")?.check()?;
        Ok(())
    }

    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>> {
        let Some(completion) = self.receives.wait(limit)? else { return Ok(None) };
        completion.check()?;
        let message = self.memory.to_vec(0, completion.byte_len as usize)?;
        self.post_receive()?;
        Ok(Some(message))
    }
}

/// The device of this end's interface: its own, or one that the helper grants at this socket.
fn open(socket: Option<PathBuf>) -> Result<Device> {
    let mut options = DeviceOptions::default();
    options.driver.origin =
        OriginPreference::Force(if socket.is_some() { Origin::Granted } else { Origin::Owned });
    options.driver.helper = socket;
    Ok(Device::open_with(INTERFACE, options)?)
}

/// The port of a transport in one family. Each family has its own, because a wildcard listener of TCP in IPv6 is one of IPv4, too.
fn port(base: u16, address: IpAddr) -> u16 {
    base + if address.is_ipv6() { 2 } else { 0 }
}

/// Answers each request with itself, on all addresses, until it is killed.
pub(super) fn serve(socket: Option<PathBuf>) -> Result<()> {
    let device = open(socket)?;
    let anywhere = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)];
    thread::scope(|scope| {
        for address in anywhere {
            let kernel = TcpListener::bind((address, port(TCP_PORT, address)))?;
            scope.spawn(move || {
                for stream in kernel.incoming().flatten() {
                    thread::spawn(move || answer(&mut Tcp(stream)));
                }
            });
            let address = SocketAddr::new(address, port(OUR_PORT, address));
            let listener = device.listen(address, ListenOptions::default())?;
            let device = &device;
            scope.spawn(move || {
                loop {
                    match listener.accept(EVER) {
                        Ok(mut request) => {
                            scope.spawn(move || -> Result<()> {
                                let mut end = Ours::new(device)?;
                                end.connection =
                                    Some(request.accept(&end.qp, AcceptOptions::default(), ATTEMPT)?);
                                answer(&mut end)
                            });
                        }
                        Err(error) => return eprintln!("no more connections: {error}"),
                    }
                }
            });
        }
        println!("listens");
        Ok(())
    })
}

fn answer(end: &mut dyn Messages) -> Result<()> {
    while let Some(request) = end.receive(EVER)? {
        end.send(&request)?;
    }
    Ok(())
}

/// Exchanges messages for this time with each of `servers` over both transports at once, then connects anew; prints an [`Outcome`] for each.
pub(super) fn talk(socket: Option<PathBuf>, time: Duration, servers: &[IpAddr]) -> Result<()> {
    let device = open(socket)?;
    let connected = Barrier::new(2 * servers.len() + 1);
    thread::scope(|scope| {
        for &server in servers {
            let (connected, device) = (&connected, &device);
            scope.spawn(move || report(server, "kernel", time, connected, &|| kernel(server)));
            scope.spawn(move || report(server, "xwarp", time, connected, &|| ours(device, server)));
        }
        connected.wait();
        println!("talks");
    });
    Ok(())
}

fn kernel(server: IpAddr) -> Result<Box<dyn Messages>> {
    let stream = TcpStream::connect_timeout(&SocketAddr::new(server, port(TCP_PORT, server)), ATTEMPT)?;
    stream.set_nodelay(true)?;
    Ok(Box::new(Tcp(stream)))
}

fn ours(device: &Device, server: IpAddr) -> Result<Box<dyn Messages>> {
    let mut end = Ours::new(device)?;
    let to = SocketAddr::new(server, port(OUR_PORT, server));
    end.connection = Some(device.connect(&end.qp, to, ConnectOptions::default(), ATTEMPT)?);
    Ok(Box::new(end))
}

fn report(
    server: IpAddr,
    transport: &'static str,
    time: Duration,
    connected: &Barrier,
    connect: &dyn Fn() -> Result<Box<dyn Messages>>,
) {
    let first = connect();
    connected.wait();
    let mut outcome = match first {
        Ok(mut end) => exchange(&mut *end, time),
        Err(error) => Outcome { ended: Some(format!("never connected: {error:#}")), ..Outcome::default() },
    };
    let before = Instant::now();
    outcome.anew = connect()
        .and_then(|mut end| once(&mut *end))
        .map(|()| before.elapsed())
        .map_err(|it| format!("{it:#}"));
    let outcome = Outcome { transport: transport.to_owned(), server: Some(server), ..outcome };
    println!("{}", outcome.to_line());
}

/// One request over a new connection.
fn once(end: &mut dyn Messages) -> Result<()> {
    end.send(&[7; SIZES[0]])?;
    ensure!(end.receive(ATTEMPT)?.context("no answer")? == [7; SIZES[0]], "a wrong answer");
    Ok(())
}

/// Exchanges messages until the time is over, or the connection.
fn exchange(end: &mut dyn Messages, time: Duration) -> Outcome {
    let start = Instant::now();
    let mut outcome = Outcome::default();
    for number in 0_u32.. {
        let left = time.saturating_sub(start.elapsed());
        if left.is_zero() {
            break;
        }
        let request = message(number);
        let asked = Instant::now();
        let answer = end.send(&request).and_then(|()| end.receive(left.max(GRACE)));
        let gap = asked.elapsed();
        if gap > outcome.gap {
            (outcome.gap, outcome.gap_at) = (gap, asked - start);
        }
        match answer {
            Ok(Some(answer)) => {
                outcome.exchanges += 1;
                outcome.wrong += u64::from(answer != request);
            }
            Ok(None) => {
                outcome.ended = Some("no answer".to_owned());
                break;
            }
            Err(error) => {
                outcome.ended = Some(format!("{error:#}"));
                break;
            }
        }
        thread::sleep(PAUSE);
    }
    outcome
}

fn message(number: u32) -> Vec<u8> {
    let length = SIZES[usize::from(number.is_multiple_of(10))];
    (0..length as u32).map(|at| (number.wrapping_mul(31) ^ at.wrapping_mul(7) ^ (at >> 8)) as u8).collect()
}
