//! A stack between honest hosts and a hostile one, for up to hours of virtual time. Whatever the hostile host does to
//! its own connections, the others are served, and neither the cost of a turn nor any table grows beyond its bound.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    net::IpAddr,
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use xwarp_tcp::{
    framing::AcceptParams,
    link::{Link, RxFrame},
    mpa::{Markers, MpaConfig},
    secret::Secret,
    seq::StreamOffset,
    sim::{self, HostileConfig, HostileHost, Node, Purpose, SimLink, Wire, WireConfig, run_for, run_seeds},
    stack::{ConnectParams, Stack, StackConfig},
    tcp::{Keepalive, State, TcpConfig},
    time::Instant,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
    wire::{Mac, Path},
};

const PORT: u16 = 18515;

/// Longest time that an honest host may wait for the answer to a question.
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest time that an honest host may need to connect.
const CONNECT_PATIENCE: Duration = Duration::from_mins(1);

/// Longest time that a connection may take from our close to FIN-WAIT-2, whatever its peer does.
const LINGER: Duration = Duration::from_mins(10);

/// Bytes of a question and of its answer.
const QUESTION: usize = 1000;

/// Shortest time between two actions of the victim on connections of the hostile host.
const MISDEED_INTERVAL: Duration = Duration::from_millis(100);

/// Answers queued at once for some new connections of the hostile host.
const DOWNLOAD: u64 = 300;

/// Largest number of answers that the victim's application queues for a connection of the hostile host at once.
const MUCH: u64 = 1000;

/// Largest number of turns at the same virtual time: more mean that a timer or a queue spins.
const MAX_TURNS: u32 = 500;

fn host_ip(number: u8) -> [u8; 4] {
    [10, 1, 0, number]
}

fn path_of((from, port): (u8, u16), to: u8) -> Path {
    let mac = |number| Mac([2, 0, 0, 0, 0, number]);
    let (source_mac, next_hop_mac) = (mac(from), mac(to));
    Path { source_mac, next_hop_mac, ..sim::path((host_ip(from), port), (host_ip(to), PORT)) }
}

/// The state of one connection in the upper layer.
#[derive(Debug, Default)]
struct Talk {
    /// ULPDUs to send.
    to_send: u64,
    honest: bool,
    established: bool,
    /// ULPDUs are currently withheld.
    withholds: bool,
    /// When we closed it.
    closed: Option<Instant>,
    /// When its stream broke or we rejected it, and reading stopped.
    unread: Option<Instant>,
}

/// An upper layer that asks and answers, and misbehaves only towards the hostile host.
#[derive(Debug, Default)]
struct Upper {
    now: Instant,
    /// The honest peer of this host.
    honest: Option<IpAddr>,
    talks: BTreeMap<(u32, u64), (ConnId, Talk)>,
    requested: Vec<ConnId>,
    established: Vec<ConnId>,
    /// Answers every ULPDU of an honest host.
    answers: bool,
    delivered: HashMap<ConnId, u64>,
    broken: Vec<String>,
}

impl Upper {
    fn begin(&mut self, conn: ConnId, path: &Path) {
        let talk = Talk { honest: self.honest == Some(path.flow.remote.ip()), ..Talk::default() };
        self.talks.entry((conn.index, conn.generation)).or_insert((conn, talk));
    }

    /// The talk on `conn`, unless the connection has ended.
    fn talk(&mut self, conn: ConnId) -> Option<&mut Talk> {
        self.talks.get_mut(&(conn.index, conn.generation)).map(|(_, talk)| talk)
    }

    /// The talk on `conn`, in a call of the stack, which must not happen after the connection's end.
    fn running(&mut self, conn: ConnId) -> &mut Talk {
        let now = self.now;
        self.talk(conn)
            .unwrap_or_else(|| panic!("a call for {conn:?} at {now:?}, which has ended or never began"))
    }
}

impl Ulp for Upper {
    type Placed = ();

    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, _: Arrival) -> Result<(), Refusal> {
        if self.running(conn).honest {
            assert_eq!(ulpdu.len(), QUESTION);
        }
        Ok(())
    }

    fn deliver(&mut self, conn: ConnId, (): ()) -> Result<(), Refusal> {
        let answers = self.answers;
        let talk = self.running(conn);
        if talk.withholds {
            return Err(Refusal::Withhold);
        }
        talk.to_send += u64::from(answers);
        *self.delivered.entry(conn).or_default() += 1;
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        let talk = self.running(conn);
        if talk.closed.is_some() {
            return Pulled::Finish;
        }
        let len = QUESTION.min(out.mulpdu());
        if talk.to_send == 0 || out.room() < len {
            return Pulled::Nothing;
        }
        out.fill(len, |_, bytes| bytes.fill(0xa5));
        talk.to_send -= 1;
        Pulled::Ulpdu
    }

    fn acked(&mut self, _: ConnId, _: StreamOffset) {}

    fn event(&mut self, conn: ConnId, event: Event) {
        let now = self.now;
        match event {
            Event::Requested { path, .. } => {
                self.begin(conn, &path);
                self.requested.push(conn);
            }
            Event::Established { path, .. } => {
                self.begin(conn, &path);
                self.running(conn).established = true;
                self.established.push(conn);
            }
            Event::PeerClosed | Event::StreamError(_) | Event::Rejected { .. } => {
                if let Some(talk) = self.talk(conn) {
                    talk.closed.get_or_insert(now);
                    if matches!(event, Event::StreamError(_)) {
                        talk.unread.get_or_insert(now);
                    }
                }
            }
            Event::Streaming { .. } | Event::StreamReadable | Event::Disagreed(_) | Event::SoftError(_) => {}
            Event::Closed(reason) => {
                let talk = self.talks.remove(&(conn.index, conn.generation));
                self.delivered.remove(&conn);
                if talk.is_some_and(|(_, talk)| talk.honest && talk.established) {
                    self.broken.push(format!("{conn:?}: {reason:?} at {now:?}"));
                }
            }
        }
    }
}

struct Host {
    stack: Stack<Upper>,
    upper: Upper,
    link: SimLink,
    batch: Vec<RxFrame>,
    /// The victim's random source, for its actions on its own connections.
    dice: Option<SmallRng>,
    /// When the victim may misbehave again.
    next_misdeed: Instant,
    config: StackConfig,
    turns: (Instant, u32),
}

impl Host {
    fn new(link: SimLink, config: StackConfig) -> Self {
        let stack = Stack::new(config.clone());
        let turns = (Instant::ZERO, 0);
        let (upper, next_misdeed) = (Upper::default(), Instant::ZERO);
        Self { stack, upper, link, batch: Vec::new(), dice: None, next_misdeed, config, turns }
    }

    fn close(&mut self, conn: ConnId, now: Instant) {
        if let Some(talk) = self.upper.talk(conn) {
            talk.closed.get_or_insert(now);
            self.stack.close_when_sent(conn);
        }
    }

    /// An action of the victim's application on connections of the hostile host.
    fn misbehave(&mut self, now: Instant) {
        let Some(dice) = self.dice.as_mut().filter(|_| self.next_misdeed <= now) else { return };
        self.next_misdeed = now + MISDEED_INTERVAL;
        let others: Vec<ConnId> =
            self.upper.talks.values().filter(|(_, talk)| !talk.honest).map(|(conn, _)| *conn).collect();
        let Some(&conn) = others.get(dice.random_range(0..others.len().max(1))) else { return };
        match dice.random_range(0..50) {
            // Much data for all connections, which an exhaustion campaign needs to occupy all transmit frames.
            0..2 => {
                for conn in others {
                    let talk = self.upper.running(conn);
                    talk.to_send = talk.to_send.max(MUCH);
                    self.stack.wake(conn);
                }
            }
            2..30 => {
                let more = 1 << dice.random_range(0..10);
                let talk = self.upper.running(conn);
                talk.to_send = talk.to_send.max(MUCH.min(talk.to_send + more));
                self.stack.wake(conn);
            }
            30..36 => self.upper.running(conn).withholds = true,
            36..46 => {
                self.upper.running(conn).withholds = false;
                self.stack.resume(now, &mut self.link, conn, &mut self.upper);
            }
            46..48 => self.close(conn, now),
            _ => {
                self.close(conn, now);
                self.stack.abort(conn);
            }
        }
    }

    fn answer_requests(&mut self, now: Instant) {
        for conn in std::mem::take(&mut self.upper.requested) {
            // The connection may have ended already.
            let Some(&mut Talk { honest, .. }) = self.upper.talk(conn) else { continue };
            let reject = !honest && self.dice.as_mut().is_some_and(|dice| dice.random_bool(0.1));
            let params = AcceptParams { ird: 4, ord: 4, private_data: Vec::new() };
            let answer = if reject {
                let talk = self.upper.running(conn);
                (talk.closed, talk.unread) = (Some(now), Some(now));
                self.stack.reject(now, conn, &[])
            } else {
                self.stack.accept(conn, params, &mut self.upper)
            };
            assert!(answer.is_ok(), "{conn:?}: {answer:?}");
        }
    }

    fn check(&mut self, now: Instant, before: usize, looks: u64) {
        let turns = if self.turns.0 == now { self.turns.1 + 1 } else { 0 };
        self.turns = (now, turns);
        assert!(turns < MAX_TURNS, "{turns} turns at {now:?}");
        let sizes = self.stack.table_sizes();
        let connections = sizes.connections;
        let most = connections.max(before);
        assert!(looks <= most as u64, "{looks} looks at {most} connections in a turn");
        let deadline = self.stack.next_deadline();
        assert!(deadline.is_none_or(|deadline| deadline > now), "a timer at {deadline:?}, and it is {now:?}");
        assert!(sizes.timers <= connections, "{sizes:?}");
        assert!(sizes.half_open <= self.config.most_half_open && sizes.resets <= 64, "{sizes:?}");
        assert!(sizes.time_waiting <= self.config.most_time_wait + connections, "{sizes:?}");
        assert!(sizes.ready.max(sizes.owing) <= 2 * connections + 64, "{sizes:?}");
        // Beyond the limit, each connection may hold enough to complete the longest FPDU.
        let held = self.stack.held_bytes();
        assert!(held <= self.config.most_held_bytes + (70_000 * connections), "{held} bytes held");
        let spilled = self.stack.spilled_bytes();
        assert!(spilled <= self.config.most_spilled_bytes, "{spilled} bytes spilled");
        for (conn, talk) in self.upper.talks.values() {
            let Some(info) = self.stack.info(*conn) else { panic!("{conn:?} has ended without an event") };
            let age = |since: Option<Instant>| since.map_or(Duration::ZERO, |since| now.since(since));
            let (closed, unread) = (age(talk.closed), age(talk.unread));
            // A peer whose data is read may keep FIN-WAIT-2 as long as it likes.
            let lingers = closed >= LINGER && info.state != State::FinWait2;
            assert!(!lingers, "{conn:?} was closed {closed:?} ago: {info:?}");
            assert!(
                unread <= self.config.tcp.fin_wait_2,
                "{conn:?} has been unread for {unread:?}: {info:?}"
            );
        }
        assert_eq!(self.upper.broken, Vec::<String>::new(), "honest connections ended");
    }
}

impl Node for Host {
    fn turn(&mut self, now: Instant) -> bool {
        self.upper.now = now;
        let looks = self.stack.counters().timer_looks;
        let before = self.stack.connections();
        let received = self.link.receive(&mut self.batch, 64);
        for frame in self.batch.drain(..) {
            self.stack.receive(now, &mut self.link, frame, &mut self.upper);
        }
        self.answer_requests(now);
        if received > 0 {
            self.misbehave(now);
        }
        if self.stack.next_deadline().is_some_and(|d| d <= now) {
            self.stack.on_timer(now, &mut self.link, &mut self.upper);
        }
        if received == 0 {
            self.stack.idle();
        }
        for conn in std::mem::take(&mut self.upper.established) {
            if let Some(dice) = &mut self.dice
                && let Some(talk) = self.upper.talk(conn)
                && !talk.honest
                && dice.random_bool(0.5)
            {
                talk.to_send = DOWNLOAD;
            }
            self.stack.wake(conn);
        }
        self.stack.transmit(now, &mut self.link, &mut self.upper);
        self.check(now, before, self.stack.counters().timer_looks - looks);
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }
}

/// An honest host, which asks a question on each of its connections from time to time and must get the answers.
struct Asker {
    host: Host,
    conns: Vec<ConnId>,
    mpa: MpaConfig,
    next_port: u16,
    every: Duration,
    next: Instant,
    asked: u64,
    /// Numbers and times of the questions that are not yet answered on all connections.
    open: VecDeque<(u64, Instant)>,
}

impl Asker {
    fn new(link: SimLink, mpa: MpaConfig, every: Duration, seed: u64) -> Self {
        let stack = StackConfig { secret: Secret::from_number(seed), ..StackConfig::default() };
        let (conns, open) = (Vec::new(), VecDeque::new());
        let next = Instant::ZERO + Duration::from_secs(1);
        let mut host = Host::new(link, stack);
        host.upper.honest = Some(IpAddr::from(host_ip(1)));
        Self { host, conns, mpa, next_port: 40_000, every, next, asked: 0, open }
    }

    fn connect(&mut self, now: Instant) -> ConnId {
        let path = path_of((2, self.next_port), 1);
        self.next_port += 1;
        let Host { stack, upper, link, .. } = &mut self.host;
        let conn = stack.connect(now, link, path, self.mpa.clone(), ConnectParams::default()).unwrap();
        upper.begin(conn, &path);
        conn
    }

    /// Whether all connections are established. Failed attempts are repeated: the SYNs of the hostile host may evict an
    /// entry from the victim's small table of half-open connections before the handshake completes.
    fn is_connected(&mut self, now: Instant) -> bool {
        for at in 0..self.conns.len() {
            if self.host.upper.talk(self.conns[at]).is_none() {
                self.conns[at] = self.connect(now);
            }
        }
        let upper = &mut self.host.upper;
        self.conns.iter().all(|conn| upper.running(*conn).established)
    }

    fn ask(&mut self, now: Instant) {
        if self.asked == 0 && !self.is_connected(now) {
            assert!(now.since(Instant::ZERO) < CONNECT_PATIENCE, "not connected at {now:?}");
            self.next = now + Duration::from_secs(1);
            return;
        }
        self.next = now + self.every;
        self.asked += 1;
        self.open.push_back((self.asked, now));
        for conn in &self.conns {
            self.host.upper.running(*conn).to_send += 1;
            self.host.stack.wake(*conn);
        }
    }
}

impl Node for Asker {
    fn turn(&mut self, now: Instant) -> bool {
        if self.next <= now {
            self.ask(now);
        }
        let received = self.host.turn(now);
        let delivered = &self.host.upper.delivered;
        let answered = self.conns.iter().map(|conn| delivered.get(conn).copied().unwrap_or(0)).min();
        while self.open.front().is_some_and(|(number, _)| answered.is_none_or(|n| n >= *number)) {
            self.open.pop_front();
        }
        if let Some((number, asked)) = self.open.front() {
            assert!(
                now.since(*asked) < PATIENCE,
                "question {number} of {asked:?} was not answered at {now:?}"
            );
        }
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        let next = Some(self.next);
        self.host.next_deadline().into_iter().chain(next).min()
    }
}

fn victim_config(dice: &mut SmallRng, seed: u64) -> StackConfig {
    let keepalive = Keepalive { idle: Duration::from_mins(5), interval: Duration::from_secs(5), probes: 3 };
    let tcp = TcpConfig {
        receive_window: 1 << dice.random_range(13..=20),
        keepalive: dice.random_bool(0.5).then_some(keepalive),
        ..TcpConfig::default()
    };
    let most_held_bytes = 1 << dice.random_range(16..=22);
    let (most_half_open, most_time_wait) = (dice.random_range(2..64), dice.random_range(1..16));
    StackConfig {
        secret: Secret::from_number(seed),
        tcp,
        most_held_bytes,
        most_half_open,
        most_time_wait,
        most_spilled_bytes: 1 << dice.random_range(14..=22),
        stall_limit: Duration::from_secs(dice.random_range(1..5)),
        ..StackConfig::default()
    }
}

/// Runs the scenario of a seed; returns the trace's hash.
fn hostile(seed: u64) -> u64 {
    let mut dice = SmallRng::seed_from_u64(seed);
    let (tx_chunks, rx_chunks) = (1 << dice.random_range(5..=10), 1 << dice.random_range(8..=10));
    let faults =
        sim::Faults { delay: Duration::from_micros(dice.random_range(1..500)), ..Default::default() };
    let config = WireConfig { seed, tx_chunks, rx_chunks, ..WireConfig::default() };
    let (wire, links) = Wire::switch(&config, &[faults; 3]);
    let Ok([mut victim, mut asker, mut hostile]) = <[SimLink; 3]>::try_from(links) else {
        panic!("three links")
    };
    for (link, number) in [(&mut victim, 1), (&mut asker, 2), (&mut hostile, 3)] {
        // A broadcast frame, from which the switch learns the port of this host.
        link.inject(&[&[0xff; 6][..], &[2, 0, 0, 0, 0, number], &[0x88, 0xb5]].concat());
    }
    let mut victim = Host::new(victim, victim_config(&mut dice, seed));
    let markers = if dice.random_bool(0.7) { Markers::Prefer } else { Markers::Off };
    let mpa = MpaConfig { markers, ..MpaConfig::default() };
    let backlog = dice.random_range(8..64);
    victim.upper.answers = true;
    victim.stack.listen(&mut victim.link, None, PORT, backlog, 1500, mpa.clone()).unwrap();
    victim.dice = Some(SmallRng::seed_from_u64(seed ^ 0xd1ce));

    victim.upper.honest = Some(IpAddr::from(host_ip(2)));
    let mut asker = Asker::new(asker, mpa, Duration::from_millis(dice.random_range(1000..15_000)), seed + 1);
    let honest = dice.random_range(1..4);
    for _ in 0..honest {
        let conn = asker.connect(Instant::ZERO);
        asker.conns.push(conn);
    }
    let mut hostile = HostileHost::new(
        hostile,
        HostileConfig {
            seed,
            path: path_of((3, 1000), 1),
            connections: dice.random_range(1..16),
            actions: dice.random_range(100..600),
            pauses: Duration::from_micros(1)..Duration::from_secs(dice.random_range(1..120)),
            markers: markers == Markers::Prefer,
            converses: false,
            ulpdu: |rng, _, purpose| {
                let most = if purpose == Purpose::Request { 1 } else { 1 << rng.random_range(1..17) };
                vec![0x5a; rng.random_range(0..most).min(60_000)]
            },
        },
    );
    let mut now = Instant::ZERO;
    let mut pass = |time: Duration, victim: &mut Host, hostile: &mut HostileHost| {
        run_for(&wire, &mut [victim, &mut asker, hostile], &mut now, time);
        now
    };
    while !hostile.is_done() {
        pass(Duration::from_mins(5), &mut victim, &mut hostile);
    }
    // The hostile host is silent now. The victim closes its connections.
    let conns: Vec<ConnId> =
        victim.upper.talks.values().filter(|(_, t)| !t.honest).map(|(c, _)| *c).collect();
    let at = pass(Duration::from_secs(1), &mut victim, &mut hostile);
    for conn in conns {
        victim.close(conn, at);
    }
    pass(LINGER, &mut victim, &mut hostile);
    assert_eq!(victim.stack.connections(), honest, "{:?}", victim.upper.talks);
    let census = victim.link.census();
    assert_eq!((census.tx_out, census.rx_out), (0, 0), "frames leaked");
    wire.trace_hash()
}

/// 64 seeds by default; `XWARP_SEEDS` runs more. The test must detect a missing defence. Of the first 64 seeds, this
/// many failed with one defence removed:
///
/// | removed defence | seeds |
/// |---|---|
/// | one notion of progress for user timeout and retransmission, and the least time of a timer | 60 |
/// | the sweep that moves payloads of slow peers to the heap | 26 |
/// | the reset of the most stalled connection, when the heap's share is full | 10 |
/// | `Connection::stop_reading` | 53 |
/// | one entry of the timer heap for each connection | 64 |
/// | the report of every end before a SYN may replace the connection | 35 |
///
/// The last one has two parts (`Stack::report` asks TCP for a reason, `replace_time_wait` waits until it was reported).
/// Either alone suffices.
#[test]
fn sim_a_hostile_host_does_not_affect_other_hosts() {
    run_seeds(hostile);
}
