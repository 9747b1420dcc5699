//! Copying between a leg, which is the library's end of a connection on the loopback, and a stream over SDP.
//!
//! Each direction has a thread. A direction that ends in order is closed after its data at the other side; a reset at
//! one side resets the other. One more thread of the process watches all legs for resets, since the threads of a
//! direction may be waiting for the peer, or have ended.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    net::{Shutdown, SocketAddr},
    ops::Range,
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll},
    io::Errno,
    net::{
        AddressFamily, SendFlags, SocketFlags, SocketType, acceptfrom_with, bind, connect, getsockname,
        listen, shutdown, socket_with, sockopt,
    },
};
use xwarp_sdp::{Received, SdpStream};
use xwarp_verbs::{Memory, Pages};

use crate::{
    direct::{self, Direct},
    incoming::Kernel,
    legs::{self, Names},
    locks::lock,
    numbers,
    outgoing::{ADVERTISED_BYTES, PIECE_BYTES},
    resets::{reset, wait_until_taken},
    sys,
};

/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 512 << 10;
/// Stack of a thread, in bytes.
const STACK_BYTES: usize = 128 << 10;
/// After a piece of this length, the leg may have more data.
const LONG_BYTES: usize = 16 << 10;
/// Interval at which a leg without data is checked at the end of the process: the kernel moves bytes from the program's
/// socket to the leg when the leg has room again.
const LAST_LOOKS: u32 = 3;
/// Time limit for the program's socket to connect to the leg.
const ARRIVAL: Duration = Duration::from_secs(2);
/// Time without progress of data that one side has sent before its reset, after which the reset is passed to the other.
const STANDSTILL: Duration = Duration::from_secs(5);
/// Interval at which a direction towards a program that does not read checks for a reset of the peer.
const LOOK: Duration = Duration::from_secs(1);
/// Time for a program to read a piece before the kernel gets it. Longer than the time below which a stream does not
/// advertise receives.
const TAKEN_WITHIN: Duration = Duration::from_millis(50);
/// Keepalive times of the leg, by which the kernel detects that the program's socket is gone: it drops closed sockets
/// after a minute, even if the peer has not closed its direction.
const PROBE_IDLE: Duration = Duration::from_secs(60);

/// The relays of a process.
#[derive(Debug, Default)]
pub struct Relays {
    /// Directions towards the network that have not ended.
    sending: Mutex<u64>,
    ended: Condvar,
    /// Bytes that were sent towards the network.
    moved: AtomicU64,
    /// Readable when the process ends.
    ending: OnceLock<OwnedFd>,
    /// `None` if it cannot be started: resets are then detected late.
    watch: OnceLock<Option<Arc<Watch>>>,
}

/// A leg and its stream.
#[derive(Debug)]
pub struct Joined {
    pub leg: OwnedFd,
    /// The addresses of the program's socket: its own, and the leg's.
    socket: Names,
    pub stream: SdpStream,
    /// Bytes that the relay has moved from the leg towards the network.
    pub moved: AtomicU64,
    /// The peer has received everything that the program has sent, or nothing more will be sent.
    sent: AtomicBool,
    pub direct: Direct,
}

impl Joined {
    /// Joins `leg` to `stream`. `socket` are the addresses of the program's socket.
    pub fn new(leg: OwnedFd, socket: Names, stream: SdpStream) -> Arc<Self> {
        let (moved, sent, direct) = (AtomicU64::new(0), AtomicBool::new(false), Direct::default());
        let joined = Arc::new(Self { leg, socket, stream, moved, sent, direct });
        direct::add(socket.1, &joined);
        joined
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        direct::remove(self.socket.1);
        legs::ended(self.socket);
    }
}

/// Finds legs that the program has reset.
#[derive(Debug)]
struct Watch {
    /// The legs of `joined`. A leg is removed when it is closed.
    legs: OwnedFd,
    joined: Mutex<Watched>,
}

#[derive(Debug, Default)]
struct Watched {
    joined: BTreeMap<u64, Weak<Joined>>,
    /// Number of entries at which those of ended connections are removed: twice the number that remained the last time,
    /// so that each entry is examined a constant number of times.
    most: usize,
}

impl Watched {
    fn insert(&mut self, id: u64, joined: Weak<Joined>) {
        if self.joined.len() >= self.most {
            self.joined.retain(|_, joined| joined.strong_count() > 0);
            self.most = (2 * self.joined.len()).max(64);
        }
        self.joined.insert(id, joined);
    }
}

/// A listening socket on the loopback for one connection.
#[derive(Debug)]
pub struct Gate {
    socket: OwnedFd,
    pub address: SocketAddr,
}

fn loopback(six: bool) -> SocketAddr {
    if six { ([0, 0, 0, 0, 0, 0, 0, 1], 0).into() } else { ([127, 0, 0, 1], 0).into() }
}

fn tcp_socket(six: bool) -> io::Result<OwnedFd> {
    let family = if six { AddressFamily::INET6 } else { AddressFamily::INET };
    Ok(socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
}

fn local_address(socket: &OwnedFd) -> io::Result<SocketAddr> {
    getsockname(socket)?.try_into().map_err(|_| io::ErrorKind::AddrNotAvailable.into())
}

impl Gate {
    /// Opens a gate of the family of the program's socket.
    pub fn open(six: bool) -> io::Result<Self> {
        let socket = tcp_socket(six)?;
        bind(&socket, &loopback(six))?;
        listen(&socket, 4)?;
        Ok(Self { address: local_address(&socket)?, socket })
    }

    /// The leg: the connection from `program`. Other connections, which any process on this host may open, are closed.
    pub fn pass(&self, program: SocketAddr) -> io::Result<OwnedFd> {
        let end = Instant::now() + ARRIVAL;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout: Timespec = left.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let (leg, from) = acceptfrom_with(&self.socket, SocketFlags::CLOEXEC)?;
            if from.and_then(|from| SocketAddr::try_from(from).ok()) == Some(program) {
                return Ok(numbers::out_of_the_way(leg));
            }
        }
    }
}

/// A leg that will be connected to the program's listening socket at `service`, and its address.
pub fn leg(service: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let leg = numbers::out_of_the_way(tcp_socket(service.is_ipv6())?);
    bind(&leg, &SocketAddr::new(service.ip(), 0))?;
    let own = local_address(&leg)?;
    Ok((leg, own))
}

impl Joined {
    /// Where the program's bytes go in the kernel.
    pub fn kernel(&self) -> Kernel<'_> {
        Kernel { leg: &self.leg, forwarded: &self.direct.forwarded }
    }

    /// Wakes the threads that sleep in a direct read: the kernel serves them.
    pub fn wake_reader(&self) {
        if self.direct.is_slept_in() {
            self.stream.end_sleep();
        }
    }

    /// Connects the leg to the program's listening socket at `service`.
    pub fn call(&self, service: SocketAddr) -> io::Result<()> {
        Ok(connect(&self.leg, &service)?)
    }
}

fn thread(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.into()).stack_size(STACK_BYTES)
}

impl Watch {
    fn start() -> io::Result<Arc<Self>> {
        let legs = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = Arc::new(Self { legs, joined: Mutex::default() });
        let runs = Arc::clone(&watch);
        thread("xwarp-sdp-watch").spawn(move || runs.run())?;
        Ok(watch)
    }

    fn add(&self, joined: &Arc<Joined>) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        lock(&self.joined).insert(id, Arc::downgrade(joined));
        // Only errors are requested, and these are always reported.
        epoll::add(&self.legs, &joined.leg, epoll::EventData::new_u64(id), epoll::EventFlags::ET)?;
        Ok(())
    }

    fn run(&self) {
        let standstill: Option<Timespec> = STANDSTILL.try_into().ok();
        // Legs that were reset while their data was in transit, and the number of bytes moved so far.
        let mut reset: BTreeMap<u64, u64> = BTreeMap::new();
        let mut events = Vec::with_capacity(64);
        loop {
            let limit = standstill.as_ref().filter(|_| !reset.is_empty());
            let found = match epoll::wait(&self.legs, rustix::buffer::spare_capacity(&mut events), limit) {
                Ok(found) => found,
                Err(Errno::INTR) => continue,
                Err(error) => return tracing::warn!(%error, "resets of programs are no longer detected"),
            };
            for epoll::Event { flags, data } in events.drain(..) {
                let id = data.u64();
                if flags.contains(epoll::EventFlags::ERR)
                    && let Some(joined) = self.find(id)
                    && joined.stands(None)
                {
                    reset.insert(id, joined.moved.load(Ordering::Relaxed));
                }
            }
            if found == 0 {
                reset.retain(|id, before| {
                    let Some(joined) = self.find(*id) else { return false };
                    let moved = std::mem::replace(before, joined.moved.load(Ordering::Relaxed));
                    joined.stands(Some(moved))
                });
            }
        }
    }

    fn find(&self, id: u64) -> Option<Arc<Joined>> {
        lock(&self.joined).joined.get(&id).and_then(Weak::upgrade)
    }
}

impl Joined {
    /// Resets the stream of a leg that was reset, if all data of the program is sent, or if no more than the earlier
    /// `moved` bytes were sent. Returns whether the stream was kept.
    fn stands(&self, moved: Option<u64>) -> bool {
        let over = self.sent.load(Ordering::Acquire) || moved == Some(self.moved.load(Ordering::Relaxed));
        if over {
            self.stream.abort();
        }
        !over
    }
}

impl Relays {
    /// Starts to copy. If that fails, the connections of both sides are reset.
    pub fn start(self: &Arc<Self>, joined: &Arc<Joined>) -> io::Result<()> {
        self.start_threads(joined).inspect_err(|_| {
            // A direction that was started ends by this.
            joined.stream.abort();
            reset(&joined.leg);
        })
    }

    fn start_threads(self: &Arc<Self>, joined: &Arc<Joined>) -> io::Result<()> {
        // Nagle's algorithm must not delay small messages to the program.
        sockopt::set_tcp_nodelay(&joined.leg, true)?;
        // Reads of the leg then end before an urgent byte, which the next read returns.
        sockopt::set_socket_oobinline(&joined.leg, true)?;
        sockopt::set_socket_keepalive(&joined.leg, true)?;
        sockopt::set_tcp_keepidle(&joined.leg, PROBE_IDLE)?;
        if self.ending.get().is_none() {
            let _ = self.ending.set(eventfd(0, EventfdFlags::CLOEXEC)?);
        }
        let watch = || {
            Watch::start()
                .inspect_err(|error| tracing::warn!(%error, "resets of programs are detected late"))
                .ok()
        };
        if let Some(watch) = self.watch.get_or_init(watch) {
            watch.add(joined)?;
        }
        let sends = Arc::clone(joined);
        let relays = Arc::clone(self);
        *lock(&self.sending) += 1;
        let send = move || {
            if relays.send_all(&sends).is_err() {
                sends.stream.abort();
            }
            sends.direct.give_up();
            sends.sent.store(true, Ordering::Release);
            drop(sends);
            *lock(&relays.sending) -= 1;
            relays.ended.notify_all();
        };
        if let Err(error) = thread("xwarp-sdp-send").spawn(send) {
            *lock(&self.sending) -= 1;
            return Err(error);
        }
        let receives = Arc::clone(joined);
        let receive = move || {
            let joined = receives;
            let Joined { leg, stream, .. } = &*joined;
            joined.direct.relayed_here();
            // A reset may come after the end of the peer's data, while the program still sends.
            let received = receive_all(&joined);
            // A stream that ended in order is never cut off. Otherwise a program that does not read must notice the reset.
            let patience = received.is_err().then_some(STANDSTILL);
            if received.and_then(|()| stream.wait_closed()).is_err() {
                // Earlier data stays readable.
                let _ = forward_piece(&joined, Duration::ZERO);
                stream.abort();
                wait_until_taken(leg, patience);
                reset(leg);
                joined.wake_reader();
            }
        };
        thread("xwarp-sdp-recv").spawn(receive).map(drop)
    }

    /// Called at the end of the process. Waits until the peers have received all data, as long as bytes move within
    /// each `patience`.
    pub fn finish(&self, patience: Duration) {
        let Some(ending) = self.ending.get() else { return };
        // Readable from now on.
        let _ = rustix::io::write(ending, &1u64.to_ne_bytes());
        let mut sending = lock(&self.sending);
        while *sending > 0 {
            let before = self.moved.load(Ordering::Relaxed);
            let (after, waited) =
                self.ended.wait_timeout(sending, patience).unwrap_or_else(PoisonError::into_inner);
            sending = after;
            if waited.timed_out() && self.moved.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }

    /// Forwards the program's data. Long pieces are advertised, so that the peer's relay reads them by RDMA while the
    /// next one is read from the leg.
    fn send_all(&self, joined: &Joined) -> io::Result<()> {
        let Joined { leg, stream, moved, direct, .. } = joined;
        let mut bytes = Vec::new();
        let mut last_looks = LAST_LOOKS;
        loop {
            let ends = self.wait_readable(leg)?;
            let mut outgoing = lock(&direct.outgoing);
            if !outgoing.has_room(stream) {
                // The program's socket stays full meanwhile.
                let oldest = outgoing.oldest();
                drop(outgoing);
                if let Some((sending, memory)) = oldest {
                    stream.finish_send_memory(sending)?;
                    lock(&direct.outgoing).give_back(memory);
                }
                continue;
            }
            let memory = outgoing.memory(stream).ok_or(io::ErrorKind::OutOfMemory)?;
            let taken = take(leg, &memory);
            if !matches!(taken, Ok((ADVERTISED_BYTES.., _))) {
                outgoing.give_back(memory.clone());
            }
            let (len, urgent) = match taken {
                Ok(taken) => taken,
                Err(Errno::AGAIN) if ends && last_looks > 0 => {
                    last_looks -= 1;
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(Errno::AGAIN) if ends => (0, false),
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if len == 0 {
                direct.give_up();
                while let Some((sending, _)) = outgoing.oldest() {
                    stream.finish_send_memory(sending)?;
                }
                stream.shutdown(Shutdown::Write)?;
                return stream.wait_sent(None);
            }
            last_looks = LAST_LOOKS;
            direct.loopback.shorten(leg, outgoing.is_for_long_writes(0));
            if len < ADVERTISED_BYTES {
                bytes.resize(len, 0);
                memory.read(0, &mut bytes).map_err(io::Error::other)?;
                if let (true, [byte]) = (urgent, &*bytes) {
                    stream.send_oob(*byte)?;
                } else {
                    let mut stream = stream;
                    stream.write_all(&bytes)?;
                }
            } else {
                outgoing.start(stream, memory, len)?;
            }
            self.moved.fetch_add(len as u64, Ordering::Relaxed);
            let before = moved.fetch_add(len as u64, Ordering::SeqCst);
            direct.has_moved(before + len as u64);
        }
    }

    /// Waits until the leg is readable, or the process ends; returns whether the process ends. A blocking read of the
    /// leg would keep the kernel from resetting it.
    fn wait_readable(&self, leg: &OwnedFd) -> io::Result<bool> {
        let Some(ending) = self.ending.get() else { return Ok(false) };
        let mut waits = [leg, ending].map(|fd| PollFd::new(fd, PollFlags::IN));
        loop {
            match poll(&mut waits, None) {
                Ok(_) => return Ok(!waits[1].revents().is_empty()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Memory for bytes in transit.
fn chunk() -> io::Result<Memory> {
    Memory::anonymous(CHUNK_BYTES, Pages::Normal)
}

/// Reads the waiting bytes of the leg up to an urgent byte, or that byte. Returns the number of bytes, and whether it
/// was the urgent byte.
fn take(leg: &OwnedFd, memory: &Memory) -> Result<(usize, bool), Errno> {
    let mut len = 0;
    loop {
        let urgent = sys::is_at_mark(leg);
        if urgent && len > 0 {
            return Ok((len, false));
        }
        let room = if urgent { 1 } else { PIECE_BYTES - len };
        match sys::receive(leg, memory, len, room) {
            Ok(n) => {
                len += n;
                // After a short piece, the leg is probably empty.
                if n < LONG_BYTES || len == PIECE_BYTES {
                    return Ok((len, urgent));
                }
            }
            // The next call will return the same error.
            Err(_) if len > 0 => return Ok((len, false)),
            Err(error) => return Err(error),
        }
    }
}

/// What the peer sends.
fn receive_all(joined: &Joined) -> io::Result<()> {
    let Joined { leg, stream, direct, .. } = joined;
    let mut memory = None;
    let mut len = 0;
    loop {
        direct.wait_while_polled(stream);
        // Memory is advertised to the peer only while long pieces arrive, because direct reads cannot take data that
        // arrives in it.
        if len < ADVERTISED_BYTES {
            // A program that polls must not wake this thread for each message.
            stream.wait_readable_or(|| direct.is_polled())?;
        }
        let _receiving = direct.receiving.relay(len < ADVERTISED_BYTES);
        // A direct read may have been faster.
        if direct.is_polled() || (len < ADVERTISED_BYTES && !stream.is_readable()) {
            continue;
        }
        let into = memory.take().map_or_else(chunk, Ok)?;
        // The program may wait for more than the first bytes of the piece.
        stream.set_read_timeout(direct.incoming.is_left().then_some(TAKEN_WITHIN))?;
        let received = stream.recv_memory_or_oob(&into, 0..CHUNK_BYTES);
        stream.set_read_timeout(None)?;
        let is_late = matches!(&received, Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        forward_piece(joined, if is_late { Duration::ZERO } else { TAKEN_WITHIN })?;
        let into = memory.insert(into);
        match received {
            Err(_) if is_late => {}
            Err(error) => return Err(error),
            Ok(Received::Bytes(0)) => {
                // The program may have closed its socket already.
                let _ = shutdown(leg, rustix::net::Shutdown::Write);
                joined.wake_reader();
                return Ok(());
            }
            Ok(Received::Bytes(received)) => {
                len = received;
                if len >= ADVERTISED_BYTES && direct.takes_pieces() {
                    let beginning = direct.incoming.leave(&direct.forwarded, &mut memory, len);
                    if let Some((memory, part)) = beginning {
                        forward(joined, &memory, part, SendFlags::empty())?;
                    }
                } else {
                    direct.forwarded.fetch_add(len as u64, Ordering::SeqCst);
                    forward(joined, into, 0..len, SendFlags::empty())?;
                }
            }
            Ok(Received::OutOfBand(byte)) => {
                direct.leave_reads_to_kernel();
                into.write(0, &[byte]).map_err(io::Error::other)?;
                forward(joined, into, 0..1, SendFlags::OOB)?;
            }
        }
    }
}

/// Writes the piece that was left for reads of the program to the kernel, if they do not take it within `patience`.
fn forward_piece(joined: &Joined, patience: Duration) -> io::Result<()> {
    let Some((memory, rest)) = joined.direct.incoming.wait_taken(patience) else { return Ok(()) };
    joined.direct.incoming.want(false);
    joined.direct.forwarded.fetch_add(rest.len() as u64, Ordering::SeqCst);
    forward(joined, &memory, rest, SendFlags::empty())
}

/// Writes a part of `memory` to the program's socket.
fn forward(joined: &Joined, memory: &Memory, part: Range<usize>, flags: SendFlags) -> io::Result<()> {
    let Joined { leg, stream, .. } = joined;
    let Range { start: mut at, end } = part;
    while at < end {
        match sys::send(leg, memory, at, end - at, flags | SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(sent) => {
                at += sent;
                joined.wake_reader();
            }
            Err(Errno::AGAIN) => wait_writable(leg, stream)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until the program reads. Fails if the stream was reset meanwhile.
fn wait_writable(leg: &OwnedFd, stream: &SdpStream) -> io::Result<()> {
    let look: Option<Timespec> = LOOK.try_into().ok();
    match poll(&mut [PollFd::new(leg, PollFlags::OUT)], look.as_ref()) {
        Ok(0) => stream.take_error()?.map_or(Ok(()), Err),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
