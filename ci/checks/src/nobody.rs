//! Programs that tests run without privileges behind `xwarpd`: hostile ones. Those that exchange messages are in
//! [`exchange`](crate::exchange).

use std::{
    fs::File,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use etherparse::PacketBuilder;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use xwarp_control::{Choice, Reason, Reply, Request, Sizes, Tagged, VERSION};
use xwarp_driver::{DriverConfig, Event, Interface, Origin, OriginPreference};
use xwarp_leg::message::send_message;
use xwarp_tcp::link::{Link as _, QueueId};

use crate::{
    exchange::{LIMIT, itself, serve, talk},
    granted::{self, SMALL, bytes_of, memory, open, opened, sealed},
    havoc,
    lab::INTERFACE,
    lasting, linger,
    raw::Raw,
};

/// Registrations of memory that a client requests at once.
const MANY_REGISTRATIONS: usize = 50;

/// Runs the program that `arguments` name.
pub fn run(arguments: &[String]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["messages"] => wrong_messages(),
        ["socket"] => granted::socket(),
        ["metadata", peer] => granted::metadata(peer.parse()?),
        ["keep"] => granted::keep(),
        ["deaths", seed, seconds] => havoc::deaths(seed.parse()?, seconds.parse()?),
        ["havoc", seed] => havoc::havoc(seed.parse()?),
        ["answers", seconds] => havoc::answers(seconds.parse()?),
        ["opens", beside] => granted::opens(beside.parse()?),
        ["frames", peer] => foreign_frames(peer.parse()?),
        ["ports", most] => too_many_ports(most.parse()?),
        ["flood", per_second] => flood(per_second.parse()?),
        ["crowd"] => crowd(),
        ["meanwhile", way, go] => linger::meanwhile(way, Path::new(go)),
        ["linger", way] => linger::run(way),
        ["hurry", per_second] => hurry(per_second.parse()?),
        ["churn"] => churn(),
        ["blast", peer] => blast(peer.parse()?),
        ["deaf"] => deaf(),
        ["watch"] => watch(),
        ["last", address] => lasting::last(address.parse()?),
        ["serve", address] => lasting::serve(address.parse()?),
        ["serve", address, connections] => serve(address.parse()?, connections.parse()?),
        ["talk", address, messages] => talk(address.parse()?, messages.parse()?),
        ["itself", address, messages] => itself(address.parse()?, messages.parse()?),
        _ => bail!("unknown program {arguments:?}"),
    }
}

/// Messages that no driver would send.
fn wrong_messages() -> Result<()> {
    let garbage: [&[u8]; 4] = [b"x", &[0xff; 64], &[0; 4096], &[1, 0, 0, 0, 99]];
    for bytes in garbage {
        let raw = Raw::connect()?;
        send_message(raw.socket().as_fd(), bytes, &[])?;
        ensure!(raw.receive()?.0.is_empty(), "the helper answers {} bytes of garbage", bytes.len());
    }
    let raw = Raw::connect()?;
    raw.refused(Request::Reserve { address: None, port: 0 }, None, Reason::State)?;
    raw.refused(Request::Hello { version: VERSION + 1 }, None, Reason::Version)?;
    let raw = Raw::greeted()?;
    raw.refused(Request::Resolve { destination: [10, 77, 0, 2].into(), source: None }, None, Reason::State)?;
    let elsewhere = Request::Open { interface: Choice::Name("lo".into()), sizes: SMALL };
    raw.refused(elsewhere, None, Reason::NotServed)?;
    for sizes in [
        Sizes { ring: 100, ..SMALL },
        Sizes { ring: 0, ..SMALL },
        Sizes { receive_chunks: 0, ..SMALL },
        Sizes { receive_chunks: u32::MAX, ..SMALL },
        Sizes { transmit_chunks: u32::MAX, ring: 1 << 31, ..SMALL },
    ] {
        raw.refused(open(sizes), None, Reason::Limit)?;
    }
    // The connection still works, and has one device at most.
    raw.refused(Request::Register, Some(sealed(bytes_of(SMALL), true)?.as_fd()), Reason::State)?;
    let _opened = opened(&raw)?;
    raw.refused(open(SMALL), None, Reason::State)?;
    // Memory that is shorter than announced, not all there, not sealed, or no memory.
    let short = sealed(bytes_of(SMALL) / 2, true)?;
    let absent = sealed(bytes_of(SMALL), false)?;
    let unsealed = memory(bytes_of(SMALL))?;
    let pipe = rustix::pipe::pipe()?.0;
    let file: OwnedFd = File::open("/proc/self/exe")?.into();
    raw.refused(Request::Register, None, Reason::Memory)?;
    for wrong in [&short, &absent, &unsealed, &pipe, &file, raw.socket()] {
        raw.refused(Request::Register, Some(wrong.as_fd()), Reason::Memory)?;
    }
    // Of many at once, one waits: each holds descriptors of the helper.
    for _ in 0..MANY_REGISTRATIONS {
        raw.send(Request::Register, Some(absent.as_fd()))?;
    }
    let mut refused = 0;
    for _ in 0..MANY_REGISTRATIONS {
        match Tagged::<Reply>::decode(&raw.receive()?.0)?.body {
            Reply::Refused(refusal) if refusal.reason == Reason::State => refused += 1,
            Reply::Refused(refusal) if refusal.reason == Reason::Memory => {}
            other => bail!("{other:?}"),
        }
    }
    ensure!(refused > 0, "{MANY_REGISTRATIONS} registrations waited at once");
    let right = sealed(bytes_of(SMALL), true)?;
    ensure!(matches!(raw.ask(Request::Register, Some(right.as_fd()))?.0, Reply::Registered));
    raw.refused(Request::Register, Some(right.as_fd()), Reason::Memory)?;
    raw.refused(Request::Reserve { address: None, port: 80 }, None, Reason::Permission)?;
    for address in [[10, 77, 0, 2], [127, 0, 0, 1]] {
        let address = Some(address.into());
        raw.refused(Request::Reserve { address, port: 0 }, None, Reason::NotOurAddress)?;
    }
    raw.refused(Request::Resolve { destination: [224, 0, 0, 1].into(), source: None }, None, Reason::Route)?;
    // Ports of others are not released, and descriptors without a request are closed.
    let file = memory(4096)?;
    for port in 0..100 {
        let descriptor = (port % 10 == 0).then_some(file.as_fd());
        raw.send(Request::Release { address: None, port }, descriptor)?;
    }
    ensure!(matches!(raw.ask(Request::Reserve { address: None, port: 0 }, None)?.0, Reply::Reserved { .. }));
    Ok(())
}

/// Sends frames from ports, addresses and stations that are not this client's, between two that are. The caller counts what
/// arrives.
fn foreign_frames(peer: IpAddr) -> Result<()> {
    let config = DriverConfig { origin: OriginPreference::Force(Origin::Granted), ..DriverConfig::default() };
    let mut interface = Interface::open(INTERFACE, &config)?;
    let resolver = interface.resolver()?;
    let route = resolver.route(peer, None)?;
    let port = resolver.reserve_port(Some(route.source), 0)?;
    let flow = xwarp_tcp::wire::Flow {
        local: SocketAddr::new(route.source, port.port()),
        remote: SocketAddr::new(peer, 9),
    };
    let path = resolver.resolve(flow, LIMIT)?;
    let (IpAddr::V4(ours), IpAddr::V4(theirs)) = (route.source, peer) else { bail!("IPv4 only") };
    let (station, next) = (path.source_mac.0, path.next_hop_mac.0);
    let build = |from: [u8; 6], to: [u8; 6], source: [u8; 4], port: u16| -> Result<Vec<u8>> {
        let mut frame = Vec::new();
        let builder = PacketBuilder::ethernet2(from, to).ipv4(source, theirs.octets(), 64);
        builder.tcp(port, 9, 1, 1000).ack(1).write(&mut frame, b"payload")?;
        Ok(frame)
    };
    let own = build(station, next, ours.octets(), port.port())?;
    let mut udp = Vec::new();
    let builder = PacketBuilder::ethernet2(station, next).ipv4(ours.octets(), theirs.octets(), 64);
    builder.udp(port.port(), 9).write(&mut udp, b"payload")?;
    let frames = [
        own.clone(),
        build(station, next, ours.octets(), port.port() ^ 1)?,
        build(station, next, [10, 77, 0, 99], port.port())?,
        build(station, next, theirs.octets(), port.port())?,
        build([2, 0, 0, 0, 0, 9], next, ours.octets(), port.port())?,
        build(station, [0xff; 6], ours.octets(), port.port())?,
        udp,
        own.get(..30).context("the frame has fewer than 30 bytes")?.to_vec(),
        own,
    ];
    for frame in &frames {
        let mut token = interface.alloc(frame.len()).context("a free frame")?;
        let chunks = interface.tx_chunks(&mut token).context("its memory")?;
        let chunk = chunks.into_iter().next().context("a chunk")?;
        chunk.get_mut(..frame.len()).context("room")?.copy_from_slice(frame);
        interface.submit(QueueId(0), &mut token, frame.len())?;
        interface.release(token);
        interface.flush();
    }
    println!("sent {}", frames.len());
    thread::sleep(Duration::from_millis(300));
    Ok(())
}

/// Sends full frames to `peer` from a port of its own, as fast as the rings take them, until it is killed.
fn blast(peer: SocketAddr) -> Result<()> {
    let config = DriverConfig { origin: OriginPreference::Force(Origin::Granted), ..DriverConfig::default() };
    let mut interface = Interface::open(INTERFACE, &config)?;
    let resolver = interface.resolver()?;
    let route = resolver.route(peer.ip(), None)?;
    let port = resolver.reserve_port(Some(route.source), 0)?;
    let local = SocketAddr::new(route.source, port.port());
    let path = resolver.resolve(xwarp_tcp::wire::Flow { local, remote: peer }, LIMIT)?;
    let (IpAddr::V4(ours), IpAddr::V4(theirs)) = (route.source, peer.ip()) else { bail!("IPv4 only") };
    let mut bytes = Vec::new();
    let builder = PacketBuilder::ethernet2(path.source_mac.0, path.next_hop_mac.0);
    let builder = builder.ipv4(ours.octets(), theirs.octets(), 64).tcp(local.port(), peer.port(), 1, 1000);
    builder.ack(1).write(&mut bytes, &[0x55; 1400])?;
    let mut sent = 0u64;
    loop {
        if let Some(mut token) = interface.alloc(bytes.len()) {
            let chunks = interface.tx_chunks(&mut token).context("its memory")?;
            let chunk = chunks.into_iter().next().context("a chunk")?;
            chunk.get_mut(..bytes.len()).context("room")?.copy_from_slice(&bytes);
            sent += u64::from(interface.submit(QueueId(0), &mut token, bytes.len()).is_ok());
            interface.release(token);
        }
        interface.flush();
        if sent == 1000 {
            println!("blasts");
        }
    }
}

/// Opens a device and reads no events.
fn deaf() -> Result<()> {
    let raw = Raw::greeted()?;
    let _opened = opened(&raw)?;
    println!("deaf");
    // The helper hangs up.
    poll(&mut [PollFd::new(raw.socket(), PollFlags::IN)], None)?;
    ensure!(raw.receive()?.0.is_empty(), "the helper says something");
    println!("hung up");
    Ok(())
}

/// Prints the changes of the interface until it is removed.
fn watch() -> Result<()> {
    let config = DriverConfig { origin: OriginPreference::Force(Origin::Granted), ..DriverConfig::default() };
    let mut interface = Interface::open(INTERFACE, &config)?;
    println!("watches");
    let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
    while interface.attributes().up || !interface.addresses().is_empty() {
        let event = PollFd::from_borrowed_fd(interface.event_fd(), PollFlags::IN);
        ensure!(poll(&mut [event], Some(&limit))? == 1, "no event");
        let mut removed = false;
        interface.events(|event| {
            removed |= event == Event::LinkRemoved;
            println!("{event:?}");
        })?;
        if removed {
            return Ok(());
        }
    }
    Ok(())
}

/// Reserves ports until the helper refuses, which must be after `most`.
fn too_many_ports(most: usize) -> Result<()> {
    let raw = Raw::greeted()?;
    let _opened = opened(&raw)?;
    for _ in 0..most {
        let reply = raw.ask(Request::Reserve { address: None, port: 0 }, None)?.0;
        ensure!(matches!(reply, Reply::Reserved { .. }), "{reply:?}");
    }
    raw.refused(Request::Reserve { address: None, port: 0 }, None, Reason::Limit)
}

/// Sends requests as fast as possible for three seconds, of which only those within the rate are answered, and none is refused;
/// then does not read the answers.
fn flood(per_second: usize) -> Result<()> {
    let raw = Raw::greeted()?;
    let begin = Instant::now();
    let mut answered = 0;
    while begin.elapsed() < Duration::from_secs(3) {
        let reply = raw.ask(Request::Hello { version: VERSION }, None)?.0;
        ensure!(matches!(reply, Reply::Hello { .. }), "{reply:?}");
        answered += 1;
    }
    // A burst of two seconds, and one more for this program's last request.
    ensure!(answered <= 6 * per_second, "{answered} requests were answered at once");
    // A client that reads no answers is disconnected.
    let file = memory(4096)?;
    let mut sent = 0;
    while begin.elapsed() < Duration::from_secs(10) {
        match raw.send(Request::Hello { version: VERSION }, Some(file.as_fd())) {
            Ok(()) => sent += 1,
            Err(Errno::AGAIN | Errno::TOOMANYREFS) => thread::sleep(Duration::from_millis(1)),
            Err(Errno::PIPE | Errno::CONNRESET) => {
                println!("{answered} answered, hung up after {sent}");
                return Ok(());
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    bail!("the helper still listens after {sent} requests without a read answer")
}

/// Sends requests on one connection after another, each with one request, beyond the rate: a new connection brings no new
/// requests, and the requests wait instead of being refused.
fn hurry(per_second: u32) -> Result<()> {
    let begin = Instant::now();
    // A burst of two seconds is free.
    for _ in 0..5 * per_second {
        let raw = Raw::connect()?;
        let reply = raw.ask(Request::Hello { version: VERSION }, None)?.0;
        ensure!(reply == Reply::Hello { version: VERSION }, "{reply:?}");
    }
    ensure!(begin.elapsed() > Duration::from_secs(2), "the rate was not kept: {:?}", begin.elapsed());
    println!("waited {:?}", begin.elapsed());
    Ok(())
}

/// Connects more often than a user may: the reason comes in the place of the first answer.
fn crowd() -> Result<()> {
    let mut held = Vec::new();
    for _ in 0..4096 {
        let raw = Raw::connect()?;
        // Perhaps it has been closed already.
        let _ = raw.send(Request::Hello { version: VERSION }, None);
        match Tagged::<Reply>::decode(&raw.receive()?.0)?.body {
            Reply::Hello { .. } => held.push(raw),
            Reply::Refused(refusal) => {
                println!("refused after {}: {refusal}", held.len());
                return Ok(());
            }
            other => bail!("{other:?}"),
        }
    }
    bail!("{} connections", held.len())
}

/// Opens devices and disconnects before they exist, until this is refused.
fn churn() -> Result<()> {
    let begin = Instant::now();
    let mut abandoned = 0;
    while begin.elapsed() < Duration::from_secs(10) {
        // The helper hangs up when there are too many connections.
        let Ok(raw) = Raw::greeted() else { continue };
        raw.send(open(SMALL), None)?;
        // An answer to another request shows that this one was taken.
        match raw.ask(Request::Hello { version: VERSION }, None)?.0 {
            Reply::Refused(refusal) if refusal.text.contains("still being removed") => {
                println!("refused after {abandoned}: {refusal}");
                return Ok(());
            }
            _ => abandoned += 1,
        }
    }
    bail!("{abandoned} devices were opened without a refusal")
}
