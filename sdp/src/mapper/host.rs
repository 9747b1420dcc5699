//! The port mapper of a host. UDP port 3935 exists once for each address, but several processes may listen over SDP: the first one
//! holds the port and answers for all, the others register their services with it over a UNIX socket.
//!
//! The socket's name is abstract, so it belongs to the network namespace, as the port does, and is free when its holder
//! has ended. When the holder ends, another process takes its place, and the rest register with that one. The end of a
//! process removes its services.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr},
    os::{
        fd::AsFd as _,
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::socket_peercred,
};

use super::{
    kept::Kept,
    listening::is_listening,
    packet::PORT,
    server::{Server, Services},
};

const NAME: &str = "xwarp-sdp-mapper";
/// Time within which a thread notices that its process leaves, and the pause before the next attempt to join.
const TICK: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(20);
/// Attempts to become the holder, or to find it. An ending holder keeps its port a little longer than its name.
const MAX_ATTEMPTS: u32 = 50;
/// Time limit for the holder's answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Largest number of registered processes, and of services of each.
const MAX_PROCESSES: usize = 256;
const MAX_SERVICES: usize = 1024;
/// Length of a record: operation, family, conventional port, SDP port, IP address.
const RECORD_BYTES: usize = 22;
/// Answers to a registration.
const TAKEN: u8 = 0;
const REFUSED: u8 = 1;

type Own = BTreeMap<SocketAddr, u16>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The registration of a service, or its removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Record {
    Add(SocketAddr, u16),
    Remove(SocketAddr),
}

impl Record {
    fn emit(self) -> [u8; RECORD_BYTES] {
        let (what, address, port) = match self {
            Self::Add(address, port) => (1, address, port),
            Self::Remove(address) => (2, address, 0),
        };
        let (family, ip) = match address.ip() {
            IpAddr::V4(ip) => (4, ip.to_ipv6_mapped()),
            IpAddr::V6(ip) => (6, ip),
        };
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = what;
        bytes[1] = family;
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        bytes[4..6].copy_from_slice(&port.to_be_bytes());
        bytes[6..].copy_from_slice(&ip.octets());
        bytes
    }

    fn parse(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let [what, family, s0, s1, p0, p1, ip @ ..] = *bytes;
        let ip = Ipv6Addr::from(ip);
        let ip = match family {
            4 => IpAddr::V4(ip.to_ipv4_mapped()?),
            6 => IpAddr::V6(ip),
            _ => return None,
        };
        let address = SocketAddr::new(ip, u16::from_be_bytes([s0, s1]));
        match what {
            1 => Some(Self::Add(address, u16::from_be_bytes([p0, p1]))),
            2 => Some(Self::Remove(address)),
            _ => None,
        }
    }
}

/// Addresses, port and socket name of a host's port mapper.
#[derive(Debug, Clone)]
struct Place {
    addresses: Vec<IpAddr>,
    port: u16,
    name: UnixAddr,
}

/// The role of this process in the port mapper of its host.
#[derive(Debug)]
enum Role {
    /// This process is the holder and answers for all processes.
    Holder(Server, Kept<UnixListener>),
    /// Another process does.
    Registered(Kept<UnixStream>),
}

#[derive(Debug)]
struct Shared {
    place: Place,
    /// The services of this process.
    own: Mutex<Own>,
    /// Where they are registered.
    to: Mutex<To>,
    ended: AtomicBool,
}

#[derive(Debug, Clone)]
enum To {
    Services(Arc<Mutex<Services>>),
    Holder(Arc<Kept<UnixStream>>),
    /// The holder has ended, and there is no new one yet.
    Nobody,
}

/// The port mapper's server of this host, in this process or in another one; the part of this process ends when it is dropped.
#[derive(Debug)]
pub struct Host {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Joins the port mapper of this host at `addresses`. Fails if another program has its port.
    pub fn start(addresses: &[IpAddr]) -> io::Result<Self> {
        let name = UnixAddr::from_abstract_name(NAME)?;
        Self::start_at(Place { addresses: addresses.to_vec(), port: PORT, name })
    }

    fn start_at(place: Place) -> io::Result<Self> {
        let (own, to) = (Mutex::default(), Mutex::new(To::Nobody));
        let shared = Arc::new(Shared { place, own, to, ended: AtomicBool::new(false) });
        let mut role = Some(shared.join()?);
        let runs = Arc::clone(&shared);
        let run = move || {
            while !runs.ended.load(Ordering::Acquire) {
                match role.take().map_or_else(|| runs.join(), Ok) {
                    Ok(role) => runs.run(role),
                    Err(error) => {
                        tracing::warn!(%error, "no port mapper on this host");
                        thread::sleep(TICK);
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("xwarp-mapper-host".into()).spawn(run)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Adds a service: programs connect to `address`, whose IP address may be a wildcard, and it listens for SDP at `port`.
    pub fn add(&self, address: SocketAddr, port: u16) -> io::Result<()> {
        lock(&self.shared.own).insert(address, port);
        self.shared.register(Record::Add(address, port))
    }

    /// Removes a service.
    pub fn remove(&self, address: SocketAddr) {
        lock(&self.shared.own).remove(&address);
        // A holder that does not answer has ended, and its services with it.
        let _ = self.shared.register(Record::Remove(address));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Becomes the holder, or registers with it.
    fn join(&self) -> io::Result<Role> {
        let mut last = io::ErrorKind::AddrInUse.into();
        for _ in 0..MAX_ATTEMPTS {
            match self.try_join() {
                Ok(role) => return Ok(role),
                Err(error) => last = error,
            }
            thread::sleep(PAUSE);
        }
        Err(last)
    }

    fn try_join(&self) -> io::Result<Role> {
        let Place { addresses, port, name } = &self.place;
        // While the lock is held, the program neither adds nor removes services.
        let own = lock(&self.own);
        match Kept::open(|| UnixListener::bind_addr(name)) {
            Ok(listener) => {
                let server = Server::start_at(addresses, *port)?;
                for (address, port) in &*own {
                    server.services().add(OURS, *address, *port);
                }
                *lock(&self.to) = To::Services(server.shared());
                Ok(Role::Holder(server, listener))
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let holder = Kept::open(|| UnixStream::connect_addr(name))?;
                holder.set_read_timeout(Some(ANSWER))?;
                for (address, port) in &*own {
                    exchange(&holder, Record::Add(*address, *port))?;
                }
                *lock(&self.to) = To::Holder(Arc::new(Kept::open(|| holder.try_clone())?));
                Ok(Role::Registered(holder))
            }
            Err(error) => Err(error),
        }
    }

    fn register(&self, record: Record) -> io::Result<()> {
        // One exchange at a time.
        let to = lock(&self.to);
        match (&*to, record) {
            (To::Services(services), Record::Add(address, port)) => lock(services).add(OURS, address, port),
            (To::Services(services), Record::Remove(address)) => lock(services).remove(OURS, address),
            (To::Holder(holder), record) => return exchange(holder, record),
            // All services are registered with the next holder.
            (To::Nobody, _) => {}
        }
        Ok(())
    }

    /// Serves as the holder, or waits for its end.
    fn run(&self, role: Role) {
        match role {
            Role::Holder(server, listener) => self.hold(&server, &listener),
            Role::Registered(holder) => {
                // The holder sends only answers, which are received under the lock of `to`.
                while !self.ended.load(Ordering::Acquire) {
                    let limit: Option<Timespec> = TICK.try_into().ok();
                    let mut waits = [PollFd::new(&*holder, PollFlags::RDHUP)];
                    let waited = poll(&mut waits, limit.as_ref());
                    if waited.is_err() || !waits[0].revents().is_empty() {
                        break;
                    }
                }
                *lock(&self.to) = To::Nobody;
            }
        }
    }
}

impl Shared {
    /// Accepts registrations until this process leaves.
    fn hold(&self, server: &Server, listener: &UnixListener) {
        let processes: Arc<Mutex<BTreeMap<usize, Kept<UnixStream>>>> = Arc::default();
        let mut next_owner = OURS;
        while !self.ended.load(Ordering::Acquire) {
            if !is_readable(listener) {
                continue;
            }
            let Ok(process) = Kept::open(|| listener.accept().map(|(process, _)| process)) else {
                thread::sleep(PAUSE);
                continue;
            };
            next_owner += 1;
            let owner = next_owner;
            let Ok(handle) = Kept::open(|| process.try_clone()) else { continue };
            let mut all = lock(&processes);
            if all.len() >= MAX_PROCESSES {
                continue;
            }
            all.insert(owner, handle);
            drop(all);
            let (services, registered) = (server.shared(), Arc::clone(&processes));
            let serve = move || {
                take_records(&process, owner, &services);
                lock(&services).remove_all(owner);
                lock(&registered).remove(&owner);
            };
            if thread::Builder::new().name("xwarp-mapper-one".into()).spawn(serve).is_err() {
                lock(&processes).remove(&owner);
            }
        }
        for process in lock(&processes).values() {
            // The processes join again.
            let _ = process.shutdown(Shutdown::Both);
        }
    }
}

/// The owner of the services of the holder's own process.
const OURS: usize = 0;

fn is_readable(listener: &UnixListener) -> bool {
    let limit: Option<Timespec> = TICK.try_into().ok();
    poll(&mut [PollFd::new(listener, PollFlags::IN)], limit.as_ref()).is_ok_and(|ready| ready > 0)
}

/// Sends a record to the holder, and waits for the answer.
fn exchange(mut holder: &UnixStream, record: Record) -> io::Result<()> {
    let mut answer = [REFUSED];
    let exchanged = holder.write_all(&record.emit()).and_then(|()| holder.read_exact(&mut answer));
    if exchanged.is_err() {
        // A late answer must not be mistaken for that of the next record, so this process joins again.
        let _ = holder.shutdown(Shutdown::Both);
    }
    exchanged?;
    if answer == [TAKEN] { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
}

/// Accepts the registrations of a process until it ends.
fn take_records(mut process: &UnixStream, owner: usize, services: &Mutex<Services>) {
    let Ok(user) = socket_peercred(process.as_fd()).map(|peer| peer.uid.as_raw()) else { return };
    let mut bytes = [0; RECORD_BYTES];
    let mut known = BTreeMap::new();
    while process.read_exact(&mut bytes).is_ok() {
        let answer = match Record::parse(&bytes) {
            Some(Record::Add(address, port)) if known.len() < MAX_SERVICES && may_add(user, address) => {
                known.insert(address, port);
                lock(services).add(owner, address, port);
                TAKEN
            }
            Some(Record::Remove(address)) => {
                known.remove(&address);
                lock(services).remove(owner, address);
                TAKEN
            }
            _ => REFUSED,
        };
        if process.write_all(&[answer]).is_err() {
            return;
        }
    }
}

/// Whether a user may announce a service at `address`: root, and a user whose kernel socket listens there. Otherwise users could
/// take the connections of each other's services.
fn may_add(user: u32, address: SocketAddr) -> bool {
    user == 0 || is_listening(address, Some(user)).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;
    use crate::mapper::{Asked, Question};

    const LIMIT: Duration = Duration::from_secs(20);

    /// A loopback address with a port that no other test uses.
    fn place() -> Place {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let name =
            UnixAddr::from_abstract_name(format!("{NAME}-test-{}-{port}", std::process::id())).unwrap();
        Place { addresses: vec![[127, 0, 0, 1].into()], port, name }
    }

    fn ask(place: &Place, service: u16) -> Asked {
        let question = Question::new("127.0.0.1:9".parse().unwrap(), ([127, 0, 0, 1], service).into());
        question.ask_at(place.port, 3).unwrap()
    }

    fn finds(place: &Place, service: u16, port: u16) -> bool {
        matches!(ask(place, service), Asked::Accepted(at, _) if at.port() == port)
    }

    fn eventually(what: &str, mut done: impl FnMut() -> bool) {
        let end = std::time::Instant::now() + LIMIT;
        while !done() {
            assert!(std::time::Instant::now() < end, "{what}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn service(port: u16) -> SocketAddr {
        ([0; 4], port).into()
    }

    #[test]
    fn sdp_s7_one_process_answers_for_all_of_a_host() {
        let place = place();
        let first = Host::start_at(place.clone()).unwrap();
        first.add(service(80), 5080).unwrap();
        let second = Host::start_at(place.clone()).unwrap();
        second.add(service(81), 5081).unwrap();
        assert!(finds(&place, 80, 5080) && finds(&place, 81, 5081));
        second.remove(service(81));
        assert_eq!(ask(&place, 81), Asked::Denied);
        second.add(service(82), 5082).unwrap();
        // The end of a process removes its services.
        drop(second);
        eventually("the service of an ended process stays", || ask(&place, 82) == Asked::Denied);
        assert!(finds(&place, 80, 5080));
    }

    #[test]
    fn sdp_s7_another_process_takes_the_place_of_a_holder_that_ends() {
        let place = place();
        let first = Host::start_at(place.clone()).unwrap();
        let others = [81, 82, 83].map(|port| {
            let host = Host::start_at(place.clone()).unwrap();
            host.add(service(port), 5000 + port).unwrap();
            host
        });
        first.add(service(80), 5080).unwrap();
        drop(first);
        for port in [81, 82, 83] {
            eventually("a service is lost with the holder", || finds(&place, port, 5000 + port));
        }
        assert_eq!(ask(&place, 80), Asked::Denied);
        drop(others);
    }

    #[test]
    fn two_processes_with_the_same_service_are_independent() {
        let place = place();
        let first = Host::start_at(place.clone()).unwrap();
        let second = Host::start_at(place.clone()).unwrap();
        second.add(service(80), 5001).unwrap();
        first.add(service(80), 5000).unwrap();
        assert!(matches!(ask(&place, 80), Asked::Accepted(..)));
        first.remove(service(80));
        assert!(finds(&place, 80, 5001));
    }

    #[test]
    fn sdp_s16_users_announce_only_what_they_listen_at() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let us = rustix::process::getuid().as_raw();
        assert!(may_add(us, address));
        assert!(!may_add(us ^ 0x4000_0000, address), "another user listens there");
        drop(listener);
        assert!(!may_add(0x4000_0000, address), "nobody listens there");
        assert!(may_add(0, address), "root may");
    }

    #[test]
    fn registrations_are_bounded_and_malformed_ones_refused() {
        let place = place();
        let _host = Host::start_at(place.clone()).unwrap();
        let process = UnixStream::connect_addr(&place.name).unwrap();
        process.set_read_timeout(Some(LIMIT)).unwrap();
        let send = |bytes: &[u8]| {
            (&process).write_all(bytes).unwrap();
            let mut answer = [9];
            (&process).read_exact(&mut answer).unwrap();
            answer[0]
        };
        assert_eq!(send(&[7; RECORD_BYTES]), REFUSED);
        if rustix::process::getuid().is_root() {
            for port in 1..=MAX_SERVICES as u16 {
                assert_eq!(send(&Record::Add(service(port), 9).emit()), TAKEN);
            }
            assert_eq!(send(&Record::Add(service(9000), 9).emit()), REFUSED);
        }
        for record in [Record::Add("[fd77::1]:80".parse().unwrap(), 7), Record::Remove(service(5))] {
            assert_eq!(Record::parse(&record.emit()), Some(record));
        }
    }

    #[test]
    fn a_port_that_something_else_holds_is_an_error() {
        let place = place();
        let _other = UdpSocket::bind(("127.0.0.1", place.port)).unwrap();
        let error = Host::start_at(place.clone()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
