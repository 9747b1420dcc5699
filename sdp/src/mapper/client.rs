//! The port mapper's client: one question, and the cache of answers.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use super::packet::{Kind, PACKET_BYTES, PORT, Packet, PmTime};

/// Wait for the answer to the first sending of a question; doubled for each further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Time for which a host without port mapper is not asked again.
const SILENT: Duration = Duration::from_secs(60);
/// Time for which a service is not asked for again after a denial.
const DENIED: Duration = Duration::from_secs(10);
/// Longest time for which an answer is used, whatever its own limit.
const LONGEST: Duration = Duration::from_secs(3600);
/// Answers that are remembered.
const MAX_ANSWERS: usize = 4096;

/// A cached answer about a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It listens for SDP at this address.
    At(SocketAddr),
    /// It does not speak SDP, or its host has no port mapper.
    No,
}

/// How a question ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// An Accept: the address, and how long it is valid.
    Accepted(SocketAddr, PmTime),
    /// A Deny.
    Denied,
    /// No port mapper answers.
    Silent,
}

/// A question: where is `target`'s SDP listener?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    request: Packet,
}

impl Question {
    /// `from` is the address and the port from which the connection will be made.
    pub fn new(from: SocketAddr, target: SocketAddr) -> Self {
        // Keyed at random by the standard library, so an off-path attacker cannot guess it.
        let handle = RandomState::new().hash_one((from.port(), target.port()));
        let request = Packet {
            kind: Kind::Request,
            valid: PmTime(0),
            service_port: target.port(),
            connecting_port: from.port(),
            handle,
            connecting_ip: from.ip(),
            service_ip: target.ip(),
        };
        Self { request }
    }

    /// The message to send.
    pub fn request(&self) -> [u8; PACKET_BYTES] {
        self.request.emit()
    }

    /// Parses an answer, and builds the acknowledgement of an Accept. `None`: not an answer to this question.
    pub fn take(&self, datagram: &[u8]) -> Option<(Asked, Option<[u8; PACKET_BYTES]>)> {
        let answer = Packet::parse(datagram).ok()?;
        let asked = |p: &Packet| (p.handle, p.connecting_port, p.connecting_ip);
        if asked(&answer) != asked(&self.request) {
            return None;
        }
        match answer.kind {
            Kind::Accept => {
                let at = SocketAddr::new(answer.service_ip, answer.service_port);
                let acknowledge = Packet { kind: Kind::Acknowledge, valid: PmTime(0), ..answer };
                Some((Asked::Accepted(at, answer.valid), Some(acknowledge.emit())))
            }
            Kind::Deny => Some((Asked::Denied, None)),
            Kind::Request | Kind::Acknowledge => None,
        }
    }

    /// Asks the target's host, with `sends` messages at most.
    pub fn ask(&self, sends: u32) -> io::Result<Asked> {
        self.ask_at(PORT, sends)
    }

    pub(super) fn ask_at(&self, port: u16, sends: u32) -> io::Result<Asked> {
        let socket = UdpSocket::bind((self.request.connecting_ip, 0))?;
        // Only datagrams of this address and port are received, and an unreachable port is an error.
        socket.connect((self.request.service_ip, port))?;
        let mut datagram = [0; 512];
        for attempt in 0..sends {
            if socket.send(&self.request()).is_err() {
                return Ok(Asked::Silent);
            }
            let end = Instant::now() + FIRST_WAIT * (1 << attempt.min(8));
            loop {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                socket.set_read_timeout(Some(left))?;
                let len = match socket.recv(&mut datagram) {
                    Ok(len) => len,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        return Ok(Asked::Silent);
                    }
                    Err(_) => continue,
                };
                if let Some((asked, acknowledge)) = self.take(datagram.get(..len).unwrap_or_default()) {
                    if let Some(acknowledge) = acknowledge {
                        // The server keeps no state for the acknowledgement.
                        let _ = socket.send(&acknowledge);
                    }
                    return Ok(asked);
                }
            }
        }
        Ok(Asked::Silent)
    }
}

/// The address that the kernel's routes choose for packets to `target`.
pub fn source_of(target: SocketAddr) -> io::Result<IpAddr> {
    let any: SocketAddr = if target.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
    let socket = UdpSocket::bind(any)?;
    // Nothing is sent.
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// The cache of answers, at most [`MAX_ANSWERS`] of each kind.
#[derive(Debug, Default)]
pub struct Cache {
    services: BTreeMap<SocketAddr, (Answer, Instant)>,
    silent: BTreeMap<IpAddr, Instant>,
}

impl Cache {
    /// The cached answer about `target` at this time.
    pub fn look(&mut self, now: Instant, target: SocketAddr) -> Option<Answer> {
        if self.silent.get(&target.ip()).is_some_and(|until| now < *until) {
            return Some(Answer::No);
        }
        self.services.get(&target).filter(|(_, until)| now < *until).map(|(answer, _)| *answer)
    }

    /// Stores the outcome of a question for `target`, and returns its consequence for the connection.
    pub fn learn(&mut self, now: Instant, target: SocketAddr, asked: Asked) -> Answer {
        match asked {
            Asked::Accepted(at, valid) => {
                let valid = valid.duration().map_or(LONGEST, |valid| valid.min(LONGEST));
                self.remember(now, target, Answer::At(at), valid);
                Answer::At(at)
            }
            Asked::Denied => {
                self.deny(now, target);
                Answer::No
            }
            Asked::Silent => {
                if self.silent.len() >= MAX_ANSWERS {
                    self.silent.retain(|_, until| now < *until);
                }
                if self.silent.len() < MAX_ANSWERS {
                    self.silent.insert(target.ip(), now + SILENT);
                }
                Answer::No
            }
        }
    }

    /// The connection to `target` failed at its SDP address: that counts as a denial.
    pub fn deny(&mut self, now: Instant, target: SocketAddr) {
        self.remember(now, target, Answer::No, DENIED);
    }

    fn remember(&mut self, now: Instant, target: SocketAddr, answer: Answer, valid: Duration) {
        if self.services.len() >= MAX_ANSWERS {
            self.services.retain(|_, (_, until)| now < *until);
        }
        if self.services.len() < MAX_ANSWERS || self.services.contains_key(&target) {
            self.services.insert(target, (answer, now + valid));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> SocketAddr {
        ([10, 0, 0, 2], 80).into()
    }

    fn question() -> Question {
        Question::new(([10, 0, 0, 1], 40000).into(), target())
    }

    fn accept(question: &Question) -> Packet {
        let request = Packet::parse(&question.request()).unwrap();
        Packet { kind: Kind::Accept, valid: PmTime(4), service_port: 5000, ..request }
    }

    #[test]
    fn sdp_s7_an_accept_is_acknowledged_with_its_values() {
        let question = question();
        let accept = accept(&question);
        let (asked, acknowledge) = question.take(&accept.emit()).unwrap();
        assert_eq!(asked, Asked::Accepted(([10, 0, 0, 2], 5000).into(), PmTime(4)));
        let acknowledge = Packet::parse(&acknowledge.unwrap()).unwrap();
        assert_eq!(acknowledge, Packet { kind: Kind::Acknowledge, valid: PmTime(0), ..accept });
        let deny = Packet { kind: Kind::Deny, ..accept };
        assert_eq!(question.take(&deny.emit()), Some((Asked::Denied, None)));
    }

    #[test]
    fn sdp_s7_a_question_without_answer_is_repeated_with_the_same_values() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let here: IpAddr = [127, 0, 0, 1].into();
        let question = Question::new((here, 9).into(), (here, 80).into());
        let serve = std::thread::spawn(move || {
            server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let receive = || {
                let mut bytes = [0; PACKET_BYTES];
                let (len, from) = server.recv_from(&mut bytes).unwrap();
                assert_eq!(len, PACKET_BYTES);
                (bytes, from)
            };
            let ((first, _), (second, from)) = (receive(), receive());
            assert_eq!(first, second);
            let accept = Packet { kind: Kind::Accept, valid: PmTime(4), ..Packet::parse(&second).unwrap() };
            server.send_to(&accept.emit(), from).unwrap();
            Packet::parse(&receive().0).unwrap().kind
        });
        let asked = question.ask_at(port, 8).unwrap();
        assert_eq!(asked, Asked::Accepted((here, 80).into(), PmTime(4)));
        assert_eq!(serve.join().unwrap(), Kind::Acknowledge);
    }

    #[test]
    fn sdp_s7_answers_to_other_questions_are_dropped() {
        let question = question();
        let accept = accept(&question);
        for other in [
            Packet { handle: accept.handle.wrapping_add(1), ..accept },
            Packet { connecting_port: 40001, ..accept },
            Packet { connecting_ip: [10, 0, 0, 3].into(), ..accept },
            Packet { kind: Kind::Request, ..accept },
        ] {
            assert_eq!(question.take(&other.emit()), None);
        }
        assert_ne!(question.request(), self::question().request(), "handles are random");
    }

    #[test]
    fn sdp_s7_answers_are_used_for_their_time() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        let at: SocketAddr = ([10, 0, 0, 2], 5000).into();
        assert_eq!(cache.look(now, target()), None);
        // A single use.
        assert_eq!(cache.learn(now, target(), Asked::Accepted(at, PmTime(0))), Answer::At(at));
        assert_eq!(cache.look(now, target()), None);
        cache.learn(now, target(), Asked::Accepted(at, PmTime(4)));
        assert_eq!(cache.look(now, target()), Some(Answer::At(at)));
        assert_eq!(cache.look(now + Duration::from_secs(1), target()), None);
        cache.deny(now, target());
        assert_eq!(cache.look(now, target()), Some(Answer::No));
        assert_eq!(cache.look(now + DENIED, target()), None);
        cache.learn(now, target(), Asked::Silent);
        let other: SocketAddr = ([10, 0, 0, 2], 81).into();
        assert_eq!(cache.look(now, other), Some(Answer::No), "the whole host");
        assert_eq!(cache.look(now + SILENT, other), None);
    }

    #[test]
    fn sdp_s16_the_cache_is_bounded() {
        let (mut cache, now) = (Cache::default(), Instant::now());
        for host in 0..10_000_u32 {
            let target = SocketAddr::new(std::net::Ipv4Addr::from(host).into(), 80);
            cache.deny(now, target);
            cache.learn(now, target, Asked::Silent);
        }
        assert!(cache.services.len() <= MAX_ANSWERS && cache.silent.len() <= MAX_ANSWERS);
        cache.deny(now + Duration::from_secs(11), target());
        assert_eq!(cache.services.len(), 1, "expired entries make room");
    }
}
