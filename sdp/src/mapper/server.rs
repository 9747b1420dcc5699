//! The port mapper's server: answers questions about services.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    kept::Kept,
    packet::{Kind, PACKET_BYTES, Packet, PmTime},
};

/// Validity of an answer: 30 s.
const VALID: PmTime = PmTime(120);
/// Answers in one second.
const MAX_ANSWERS: u32 = 1000;
/// Largest number of answers to one source in one second.
const MAX_ANSWERS_TO_ONE: u32 = 50;
/// Time within which a thread of the server notices that the server was dropped.
const TICK: Duration = Duration::from_millis(200);
/// Number of consecutive receive failures that end the service of an address, and the pause after each.
const MAX_FAILURES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// Services that listen over SDP, and the limits of answers. Nothing is stored about a question.
#[derive(Debug, Default)]
pub(super) struct Services {
    /// The SDP ports of each conventional address, by owner: processes may share an address.
    ports: BTreeMap<SocketAddr, BTreeMap<usize, u16>>,
    /// The current second, and its answers by source.
    counted: Option<Instant>,
    answers: u32,
    answers_to: BTreeMap<IpAddr, u32>,
}

impl Services {
    /// Adds a service of the process `owner`: programs connect to `address`, whose IP address may be a wildcard, and it listens
    /// for SDP at `port`.
    pub fn add(&mut self, owner: usize, address: SocketAddr, port: u16) {
        self.ports.entry(address).or_default().insert(owner, port);
    }

    /// Removes a service of the process `owner`.
    pub fn remove(&mut self, owner: usize, address: SocketAddr) {
        if let Some(ports) = self.ports.get_mut(&address) {
            ports.remove(&owner);
            if ports.is_empty() {
                self.ports.remove(&address);
            }
        }
    }

    /// Removes all services of the process `owner`.
    pub(super) fn remove_all(&mut self, owner: usize) {
        self.ports.retain(|_, ports| {
            ports.remove(&owner);
            !ports.is_empty()
        });
    }

    fn find(&self, address: SocketAddr) -> Option<u16> {
        let any: SocketAddr = match address {
            SocketAddr::V4(_) => ([0; 4], address.port()).into(),
            SocketAddr::V6(_) => ([0; 16], address.port()).into(),
        };
        // A program that listens at the IPv6 wildcard also listens for IPv4, unless it sets `IPV6_V6ONLY`; in that case
        // the kernel's listener refuses connections that are accepted here.
        let six: SocketAddr = ([0; 16], address.port()).into();
        let ports = [address, any, six].iter().find_map(|address| self.ports.get(address))?;
        ports.values().next().copied()
    }

    /// The answer to a datagram from `source`, if any.
    pub fn answer(&mut self, now: Instant, source: IpAddr, datagram: &[u8]) -> Option<[u8; PACKET_BYTES]> {
        let request = Packet::parse(datagram).ok().filter(|packet| packet.kind == Kind::Request)?;
        if !self.may_answer(now, source) {
            return None;
        }
        let service = SocketAddr::new(request.service_ip, request.service_port);
        // A question with the address of a third host could cause that host to connect.
        let port = self.find(service).filter(|_| request.connecting_ip == source);
        let answer = match port {
            Some(port) => Packet { kind: Kind::Accept, valid: VALID, service_port: port, ..request },
            None => Packet { kind: Kind::Deny, valid: PmTime(0), ..request },
        };
        Some(answer.emit())
    }

    fn may_answer(&mut self, now: Instant, source: IpAddr) -> bool {
        if self.counted.is_none_or(|since| now >= since + Duration::from_secs(1)) {
            self.counted = Some(now);
            self.answers = 0;
            self.answers_to.clear();
        }
        let to_one = self.answers_to.get(&source).copied().unwrap_or(0);
        if self.answers >= MAX_ANSWERS || to_one >= MAX_ANSWERS_TO_ONE {
            return false;
        }
        self.answers += 1;
        self.answers_to.insert(source, to_one + 1);
        true
    }
}

/// A port mapper's server at some addresses of this host; it ends when it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    services: Arc<Mutex<Services>>,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts a server at each of `addresses`, so that an answer comes from the address that was asked. An error when none
    /// can be served.
    pub(super) fn start_at(addresses: &[IpAddr], port: u16) -> io::Result<Self> {
        let services = Arc::new(Mutex::new(Services::default()));
        let mut server = Self { services, ended: Arc::default(), threads: Vec::new() };
        let mut failed = None;
        for ip in addresses {
            let served = Kept::open(|| UdpSocket::bind((*ip, port))).and_then(|socket| server.serve(socket));
            if let Err(error) = served {
                tracing::warn!(%ip, %error, "the port mapper does not serve this address");
                failed = Some(error);
            }
        }
        match failed {
            Some(error) if server.threads.is_empty() => Err(error),
            _ => Ok(server),
        }
    }

    fn serve(&mut self, socket: Kept<UdpSocket>) -> io::Result<()> {
        socket.set_read_timeout(Some(TICK))?;
        let (services, ended) = (Arc::clone(&self.services), Arc::clone(&self.ended));
        let run = move || {
            let served = answer_all(
                &services,
                &ended,
                |datagram| socket.recv_from(datagram),
                |answer, to| {
                    // The client repeats its question if the answer is lost.
                    let _ = socket.send_to(answer, to);
                },
            );
            if let Err(error) = served {
                tracing::warn!(%error, "the port mapper no longer serves an address");
            }
        };
        self.threads.push(thread::Builder::new().name("xwarp-mapper".into()).spawn(run)?);
        Ok(())
    }

    /// The registered services.
    pub(super) fn services(&self) -> std::sync::MutexGuard<'_, Services> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn shared(&self) -> Arc<Mutex<Services>> {
        Arc::clone(&self.services)
    }
}

/// Answers what `receive` returns until `ended` is set. Fails when receiving has failed [`MAX_FAILURES`] times in a row, each
/// followed by a pause: the socket is then broken for good, for instance because its network namespace was removed.
fn answer_all(
    services: &Mutex<Services>,
    ended: &AtomicBool,
    mut receive: impl FnMut(&mut [u8]) -> io::Result<(usize, SocketAddr)>,
    mut send: impl FnMut(&[u8], SocketAddr),
) -> io::Result<()> {
    let mut datagram = [0; 512];
    let mut failures = 0;
    while !ended.load(Ordering::Acquire) {
        let (len, source) = match receive(&mut datagram) {
            Ok(received) => received,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                failures = 0;
                continue;
            }
            Err(error) => {
                failures += 1;
                if failures == MAX_FAILURES {
                    return Err(error);
                }
                thread::sleep(PAUSE);
                continue;
            }
        };
        failures = 0;
        let datagram = datagram.get(..len).unwrap_or_default();
        let answer = {
            let mut services = services.lock().unwrap_or_else(PoisonError::into_inner);
            services.answer(Instant::now(), source.ip(), datagram)
        };
        if let Some(answer) = answer {
            send(&answer, source);
        }
    }
    Ok(())
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));

    fn request(port: u16) -> Packet {
        Packet {
            kind: Kind::Request,
            valid: PmTime(0),
            service_port: port,
            connecting_port: 40000,
            handle: 77,
            connecting_ip: SOURCE,
            service_ip: [10, 0, 0, 2].into(),
        }
    }

    fn ask(services: &mut Services, now: Instant, packet: &Packet) -> Option<Packet> {
        services.answer(now, SOURCE, &packet.emit()).map(|bytes| Packet::parse(&bytes).unwrap())
    }

    #[test]
    fn sdp_s7_services_are_accepted_and_others_denied() {
        let (mut services, now) = (Services::default(), Instant::now());
        services.add(0, ([0, 0, 0, 0], 80).into(), 5000);
        services.add(0, ([10, 0, 0, 9], 81).into(), 5001);
        let accept = ask(&mut services, now, &request(80)).unwrap();
        assert_eq!(accept, Packet { kind: Kind::Accept, valid: VALID, service_port: 5000, ..request(80) });
        assert_eq!(ask(&mut services, now, &request(80)), Some(accept), "a repeated question");
        let deny = ask(&mut services, now, &request(81)).unwrap();
        assert_eq!(deny, Packet { kind: Kind::Deny, ..request(81) }, "it listens at another address");
        services.remove(0, ([0, 0, 0, 0], 80).into());
        assert_eq!(ask(&mut services, now, &request(80)).unwrap().kind, Kind::Deny);
    }

    #[test]
    fn sdp_s7_only_requests_for_the_senders_own_address_are_answered() {
        let (mut services, now) = (Services::default(), Instant::now());
        services.add(0, ([0, 0, 0, 0], 80).into(), 5000);
        for kind in [Kind::Accept, Kind::Acknowledge, Kind::Deny] {
            assert_eq!(ask(&mut services, now, &Packet { kind, ..request(80) }), None);
        }
        let other = Packet { connecting_ip: [10, 0, 0, 3].into(), ..request(80) };
        assert_eq!(ask(&mut services, now, &other).unwrap().kind, Kind::Deny);
        assert_eq!(services.answer(now, SOURCE, &[4; 20]), None);
    }

    #[test]
    fn a_socket_that_fails_permanently_ends_its_thread() {
        let (services, ended) = (Mutex::default(), AtomicBool::new(false));
        let mut calls = 0;
        let outcome = answer_all(
            &services,
            &ended,
            |_| {
                calls += 1;
                assert!(calls <= 100, "the thread spins");
                Err(io::ErrorKind::NotConnected.into())
            },
            |_, _| {},
        );
        assert_eq!(outcome.unwrap_err().kind(), io::ErrorKind::NotConnected);
        assert_eq!(calls, MAX_FAILURES);
    }

    #[test]
    fn a_failure_to_receive_that_passes_does_not_end_the_service() {
        let (services, ended) = (Mutex::default(), AtomicBool::new(false));
        let (mut calls, mut answers) = (0, Vec::new());
        let outcome = answer_all(
            &services,
            &ended,
            |out| {
                calls += 1;
                match calls {
                    10 => {
                        out[..PACKET_BYTES].copy_from_slice(&request(80).emit());
                        Ok((PACKET_BYTES, (SOURCE, 999).into()))
                    }
                    1..20 => Err(io::ErrorKind::NotConnected.into()),
                    _ => {
                        ended.store(true, Ordering::Release);
                        Err(io::ErrorKind::WouldBlock.into())
                    }
                }
            },
            |answer, to| answers.push((Packet::parse(answer).unwrap().kind, to)),
        );
        outcome.unwrap();
        assert_eq!(answers, [(Kind::Deny, (SOURCE, 999).into())]);
    }

    #[test]
    fn sdp_s7_a_service_of_ipv6_is_found_over_both_families() {
        let (mut services, now) = (Services::default(), Instant::now());
        let six: [IpAddr; 2] = ["fd77::1".parse().unwrap(), "fd77::2".parse().unwrap()];
        let asks = |services: &mut Services, port| {
            let packet = Packet { connecting_ip: six[0], service_ip: six[1], ..request(port) };
            let answer = services.answer(now, six[0], &packet.emit()).unwrap();
            Packet::parse(&answer).unwrap()
        };
        services.add(0, "[::]:80".parse().unwrap(), 5000);
        services.add(0, "[fd77::2]:81".parse().unwrap(), 5001);
        services.add(0, "0.0.0.0:82".parse().unwrap(), 5002);
        let accepted = [80, 81].map(|port| asks(&mut services, port));
        assert_eq!(
            accepted.map(|p| (p.kind, p.service_port, p.service_ip)),
            [5000, 5001].map(|port| (Kind::Accept, port, six[1]))
        );
        assert_eq!(asks(&mut services, 82).kind, Kind::Deny, "it listens over IPv4 only");
        assert_eq!(ask(&mut services, now, &request(80)).unwrap().kind, Kind::Accept);
        assert_eq!(ask(&mut services, now, &request(81)).unwrap().kind, Kind::Deny, "its address is of IPv6");
    }

    #[test]
    fn sdp_s16_answers_are_limited_per_source_and_in_all() {
        let (mut services, now) = (Services::default(), Instant::now());
        services.add(0, ([0, 0, 0, 0], 80).into(), 5000);
        let answered = (0..100).filter(|_| ask(&mut services, now, &request(80)).is_some()).count();
        assert_eq!(answered, 50);
        let mut answer = |host: u32| {
            let source = IpAddr::from(std::net::Ipv4Addr::from(host));
            services.answer(now, source, &request(80).emit()).is_some()
        };
        assert_eq!((1..2000).filter(|host| answer(*host)).count(), 950);
        assert!(ask(&mut services, now + Duration::from_secs(1), &request(80)).is_some());
    }
}
