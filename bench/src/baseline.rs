//! The baseline: the same traffic over one kernel TCP connection, with the same clock and columns.
//!
//! The client opens one connection for each row of the table. A connection begins with an [`Order`] for the
//! server; an empty order ends the server.

mod bulk;
mod pingpong;

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    options::{MeetArgs, TcpArgs},
    order::{Order, Task},
    report::{Info, Report, Row, TestInfo},
};

/// Time without received bytes after which the peer is considered dead and the connection is closed.
const PATIENCE: Duration = Duration::from_secs(30);

/// The kind of baseline test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `tcp_bw`.
    Bandwidth,
    /// `tcp_lat`.
    Latency,
}

/// Runs `tcp_bw` or `tcp_lat`, as the server or the client.
pub fn run(kind: Kind, args: &TcpArgs) -> Result<()> {
    if let Some(cpu) = args.output.pin {
        crate::cpu::pin(cpu)?;
    }
    match &args.meet.server {
        None => serve(args),
        Some(server) => {
            let server = resolve(server, &args.meet)?;
            measure(kind, args, server)
        }
    }
}

/// The server's address; among several, the first one of the requested family.
pub fn resolve(server: &str, meet: &MeetArgs) -> Result<SocketAddr> {
    let found: Vec<SocketAddr> = (server, meet.port)
        .to_socket_addrs()
        .with_context(|| format!("cannot resolve '{server}'"))?
        .collect();
    found
        .iter()
        .find(|a| a.is_ipv6() == meet.ipv6)
        .or(found.first())
        .copied()
        .with_context(|| format!("'{server}' has no address"))
}

fn measure(kind: Kind, args: &TcpArgs, server: SocketAddr) -> Result<()> {
    let (title, default_size) = match kind {
        Kind::Bandwidth => ("Kernel TCP BW Test", 65536),
        Kind::Latency => ("Kernel TCP Latency Test", 2),
    };
    let polling = kind == Kind::Latency && !args.events;
    let test_info = TestInfo::Baseline { test: title.replace(' ', "_"), transport: "kernel TCP" };
    let info = Info::new(title, test_info)
        .line("Transport type", "kernel TCP")
        .line("Receive", if polling { "polling" } else { "sleeping" })
        .line("Congestion ctrl", args.congestion.clone().unwrap_or_else(congestion_control))
        .line("Server", server.to_string());
    let mut report = Report::begin(&args.output, info);
    for bytes in args.amount.sizes(default_size) {
        let task = if kind == Kind::Bandwidth { Task::Bulk } else { Task::Echo };
        let stream = connect(server, Order { task, polling, bytes })?;
        if let Some(name) = &args.congestion {
            rustix::net::sockopt::set_tcp_congestion(&stream, name)
                .with_context(|| format!("the kernel rejects the congestion control '{name}'"))?;
        }
        let row = match kind {
            Kind::Bandwidth => Row::Bandwidth(bulk::send(stream, bytes, args.amount.amount())?),
            Kind::Latency => pingpong::ask(stream, bytes, polling, args.amount.amount())?,
        };
        report.row(row);
    }
    connect(server, Order { task: Task::End, polling, bytes: 0 })?;
    report.end(serde_json::Map::new())
}

/// Name of the kernel's default congestion control, which has a large effect on a bulk result.
fn congestion_control() -> String {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}

/// Connects and sends the order; retries for a while, because the server may still be starting.
fn connect(server: SocketAddr, order: Order) -> Result<TcpStream> {
    let begin = Instant::now();
    let mut stream = loop {
        match TcpStream::connect_timeout(&server, Duration::from_secs(5)) {
            Ok(stream) => break stream,
            Err(e)
                if e.kind() == ErrorKind::ConnectionRefused && begin.elapsed() < Duration::from_secs(3) =>
            {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(e) => return Err(e).with_context(|| format!("cannot connect to {server}")),
        }
    };
    limit(&stream)?;
    stream.write_all(&order.emit())?;
    Ok(stream)
}

fn limit(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(())
}

fn serve(args: &TcpArgs) -> Result<()> {
    let any = args.meet.source.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let listener = TcpListener::bind((any, args.meet.port))
        .with_context(|| format!("cannot listen on {any} port {}", args.meet.port))?;
    println!("Waiting for a client on port {} (kernel TCP)", args.meet.port);
    loop {
        let (mut stream, _) = listener.accept()?;
        limit(&stream)?;
        let mut order = [0; Order::LEN];
        if stream.read_exact(&mut order).is_err() {
            continue;
        }
        let Some(order) = Order::parse(order) else { bail!("the client is not xwarp-perf") };
        match order.task {
            Task::Bulk => bulk::receive(stream, order.bytes)?,
            Task::Echo => pingpong::answer(stream, order.bytes, order.polling)?,
            Task::End => return Ok(()),
        }
    }
}

/// Reads all of `buffer`, polling or sleeping. Returns `Ok(false)` when the stream ended before the first
/// byte.
fn read_message(stream: &mut TcpStream, buffer: &mut [u8], polling: bool) -> Result<bool> {
    let mut done = 0;
    let mut idle = 0_u32;
    let mut since = None;
    while done < buffer.len() {
        match stream.read(&mut buffer[done..]) {
            Ok(0) if done == 0 => return Ok(false),
            Ok(0) => bail!("the stream ended within a message"),
            Ok(n) => (done, idle, since) = (done + n, 0, None),
            Err(e) if e.kind() == ErrorKind::WouldBlock && polling => {
                idle += 1;
                // The clock is read rarely, because reading it costs time inside the measurement.
                if idle.is_multiple_of(1 << 16) && since.get_or_insert_with(Instant::now).elapsed() > PATIENCE
                {
                    bail!("received nothing for {} seconds", PATIENCE.as_secs());
                }
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("reading from the other end"),
        }
    }
    Ok(true)
}

/// Writes all of `buffer`; retries on a non-blocking socket whose send buffer is full.
fn write_message(stream: &mut TcpStream, mut buffer: &[u8]) -> Result<()> {
    let begin = Instant::now();
    while !buffer.is_empty() {
        match stream.write(buffer) {
            Ok(n) => buffer = &buffer[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock && begin.elapsed() < PATIENCE => {}
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context("writing to the other end"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::options::{Amount, Cli, Command};
    use clap::Parser as _;

    fn args(line: &str) -> TcpArgs {
        let cli = Cli::try_parse_from(std::iter::once("xwarp-perf").chain(line.split_whitespace())).unwrap();
        let (Command::TcpBw(args) | Command::TcpLat(args)) = cli.command else { panic!("not a baseline") };
        args
    }

    /// Runs one server and `client` against it on the loopback.
    fn with_server<T>(client: impl FnOnce(SocketAddr) -> T) -> T {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = args(&format!("tcp_lat -p {port} --bind_source_ip 127.0.0.1"));
        let server = thread::spawn(move || serve(&server));
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let out = client(address);
        connect(address, Order { task: Task::End, polling: false, bytes: 0 }).unwrap();
        server.join().unwrap().unwrap();
        out
    }

    #[test]
    fn bulk_counts_every_byte_and_both_ends_cpu_time() {
        let row = with_server(|server| {
            let stream = connect(server, Order { task: Task::Bulk, polling: false, bytes: 10_000 }).unwrap();
            bulk::send(stream, 10_000, Amount::Iterations(50)).unwrap()
        });
        assert_eq!((row.bytes, row.iterations), (10_000, 50));
        assert!(row.average > 0.0);
        assert!(row.cpu.unwrap().remote_seconds_per_gib.is_some());
    }

    #[test]
    fn ping_pong_works_polling_and_sleeping() {
        for polling in [true, false] {
            let row = with_server(|server| {
                let stream = connect(server, Order { task: Task::Echo, polling, bytes: 100 }).unwrap();
                pingpong::ask(stream, 100, polling, Amount::Iterations(20)).unwrap()
            });
            let Row::Latency(row) = row else { panic!("{row:?}") };
            assert_eq!((row.bytes, row.iterations), (100, 20));
            assert!(row.summary.min > 0.0 && row.summary.min <= row.summary.p999);
        }
    }

    #[test]
    fn a_timed_ping_pong_ends_in_time() {
        let begin = Instant::now();
        let row = with_server(|server| {
            let stream = connect(server, Order { task: Task::Echo, polling: false, bytes: 8 }).unwrap();
            pingpong::ask(stream, 8, false, Amount::Duration(Duration::from_millis(50))).unwrap()
        });
        let Row::Duration(row) = row else { panic!("{row:?}") };
        assert!(row.latency.iterations > 0 && row.transactions > 0.0);
        assert!(row.latency.summary.min <= row.latency.summary.p999);
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}
