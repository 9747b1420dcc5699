//! What a client of `xwarpd` without privileges can do with the AF_XDP socket that it was granted, beside sending and receiving.

use std::{
    io::{BufRead as _, stdin},
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use etherparse::PacketBuilder;
use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create},
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt,
        xdp::{SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem},
    },
};
use xwarp_control::{Choice, Device, Neighbour, Reply, Request, Sizes};

use crate::{exchange::LIMIT, lab::INTERFACE, raw::Raw};

/// Small sizes, so that a hundred processes fit a machine.
pub(crate) const SMALL: Sizes = Sizes { receive_chunks: 128, transmit_chunks: 128, ring: 128 };

/// Openings that are measured.
const MEASURED: usize = 50;

pub(crate) fn open(sizes: Sizes) -> Request {
    Request::Open { interface: Choice::Name(INTERFACE.into()), sizes }
}

/// A descriptor of the kind that clients may pass, though no request takes one.
pub(crate) fn memory(bytes: u64) -> Result<OwnedFd> {
    let file = memfd_create("hostile", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

pub(crate) fn bytes_of(sizes: Sizes) -> u64 {
    xwarp_driver::shared::memory_bytes(sizes)
}

/// Memory of a size that never changes, with all pages or with none.
pub(crate) fn sealed(bytes: u64, present: bool) -> Result<OwnedFd> {
    let file = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    if present {
        fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    }
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// What the helper grants for a device.
pub(crate) struct Opened {
    pub socket: OwnedFd,
    events: OwnedFd,
    pub device: Device,
}

impl Opened {
    /// The socket of events.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

/// Opens a small device.
pub(crate) fn opened(raw: &Raw) -> Result<Opened> {
    let (reply, descriptors) = raw.ask(open(SMALL), None)?;
    let Reply::Opened(device) = reply else { bail!("{reply:?}") };
    let [socket, events] = <[OwnedFd; 2]>::try_from(descriptors).ok().context("two descriptors")?;
    Ok(Opened { socket, events, device })
}

fn script(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/shared", name].iter().collect()
}

/// Checks that an unbound socket gives nothing beyond the client's own pair.
pub(crate) fn socket() -> Result<()> {
    let raw = Raw::greeted()?;
    let granted = opened(&raw)?;
    let (socket, far) = (&granted.socket, granted.device.socket_index);
    let second = Raw::greeted()?;
    let others = opened(&second)?;
    let (others, others_far) = (&others.socket, others.device.socket_index);
    let fails = |what: String, result: Result<(), Errno>| {
        ensure!(result.is_err(), "{what} is possible");
        println!("{what}: {result:?}");
        Ok(())
    };
    let status = Command::new("python3")
        .arg(script("socket_holder.py"))
        .stdin(Stdio::from(socket.try_clone()?))
        .status()?;
    ensure!(status.success(), "the holder of a socket has more than its pair");
    let memory = sealed(bytes_of(SMALL), true)?;
    let reply = raw.ask(Request::Register, Some(memory.as_fd()))?.0;
    ensure!(reply == Reply::Registered, "{reply:?}");
    sockopt::set_xdp_umem_fill_ring_size(socket, 64)?;
    sockopt::set_xdp_umem_completion_ring_size(socket, 64)?;
    sockopt::set_xdp_rx_ring_size(socket, 64)?;
    sockopt::set_xdp_tx_ring_size(socket, 64)?;
    let bound = |socket: &OwnedFd, index, queue| {
        bind(socket, &SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, index, queue))
    };
    for index in (2..64).chain([others_far, far + 2, far - 2]) {
        fails(format!("bind to interface {index}"), bound(socket, index, 0))?;
    }
    fails("bind to another queue".into(), bound(socket, far, 1))?;
    bound(socket, far, 0)?;
    fails("bind again".into(), bound(socket, far, 0))?;
    fails("another transmit ring".into(), sockopt::set_xdp_tx_ring_size(socket, 64))?;
    fails("another fill ring".into(), sockopt::set_xdp_umem_fill_ring_size(socket, 64))?;
    fails("memory of another device".into(), {
        let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, others_far, 0);
        let shared = SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: socket.as_fd() };
        sockopt::set_xdp_rx_ring_size(others, 64)?;
        bind(others, &shared)
    })?;
    let own = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
    fails("a socket of its own".into(), own.map(drop))?;
    let packets = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None);
    fails("a packet socket".into(), packets.map(drop))
}

/// Sends two segments to `peer`. The kernel shall write a checksum over the source port of the second one.
pub(crate) fn metadata(peer: Ipv4Addr) -> Result<()> {
    let raw = Raw::greeted()?;
    let granted = opened(&raw)?;
    let reply = raw.ask(Request::Reserve { address: None, port: 0 }, None)?.0;
    let Reply::Reserved { port } = reply else { bail!("{reply:?}") };
    let limit = Instant::now() + LIMIT;
    let (source, next) = loop {
        let reply = raw.ask(Request::Resolve { destination: peer.into(), source: None }, None)?.0;
        match reply {
            Reply::Resolved { source: IpAddr::V4(source), neighbour: Neighbour::Known(next), .. } => {
                break (source, next);
            }
            Reply::Resolved { .. } if Instant::now() < limit => thread::sleep(Duration::from_millis(10)),
            other => bail!("{other:?}"),
        }
    };
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2(granted.device.mac.0, next.0);
    let builder = builder.ipv4(source.octets(), peer.octets(), 64).tcp(port, 9, 1, 1000);
    builder.ack(1).write(&mut frame, b"payload")?;
    let frame = frame.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
    let mut sender = Command::new("python3");
    sender.arg(script("metadata_sender.py")).args([&granted.device.socket_index.to_string(), &frame]);
    let status = sender.stdin(Stdio::from(granted.socket)).status()?;
    ensure!(status.success(), "the sender of frames with metadata failed");
    Ok(())
}

/// Opens devices and hangs up, but keeps their sockets with registered memory, until this is refused. Then closes them and opens
/// another one.
pub(crate) fn keep() -> Result<()> {
    let mut kept = Vec::new();
    let refused = loop {
        let raw = Raw::greeted()?;
        match raw.ask(open(SMALL), None)? {
            (Reply::Opened(_), mut descriptors) => {
                let memory = sealed(bytes_of(SMALL), true)?;
                let reply = raw.ask(Request::Register, Some(memory.as_fd()))?.0;
                ensure!(reply == Reply::Registered, "{reply:?}");
                descriptors.truncate(1);
                kept.append(&mut descriptors);
            }
            (Reply::Refused(refusal), _) => break refusal,
            (other, _) => bail!("{other:?}"),
        }
        ensure!(kept.len() < 100, "{} sockets with memory are kept", kept.len());
    };
    // Time does not help, only closing them.
    thread::sleep(Duration::from_secs(1));
    let raw = Raw::greeted()?;
    let (Reply::Refused(_), _) = raw.ask(open(SMALL), None)? else { bail!("kept sockets cost nothing") };
    println!("refused after {}: {refused}", kept.len());
    kept.clear();
    let limit = Instant::now() + LIMIT;
    while let (Reply::Refused(refusal), _) = raw.ask(open(SMALL), None)? {
        ensure!(Instant::now() < limit, "still refused: {refusal}");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Measures how long opening a device takes with `beside` open ones: alone, and while as many others as are measured are removed.
pub(crate) fn opens(beside: usize) -> Result<()> {
    let mut there = Vec::new();
    let begin = Instant::now();
    for _ in 0..beside + MEASURED {
        let raw = Raw::greeted()?;
        let granted = opened(&raw)?;
        there.push((raw, granted));
    }
    println!("{} devices in {:?}", there.len(), begin.elapsed());
    println!("opened");
    stdin().lock().read_line(&mut String::new())?;
    for (what, removed) in [("alone", false), ("while others are removed", true)] {
        let mut times = Vec::new();
        let mut measured = Vec::new();
        for _ in 0..MEASURED {
            if removed {
                there.pop();
            }
            let raw = Raw::greeted()?;
            let begin = Instant::now();
            let granted = opened(&raw)?;
            times.push(begin.elapsed());
            measured.push((raw, granted));
        }
        times.sort();
        let at = |percent| times.get((times.len() - 1) * percent / 100).copied().unwrap_or_default();
        println!("{what}: median {:?}, 90 % {:?}, most {:?}", at(50), at(90), at(100));
    }
    Ok(())
}
