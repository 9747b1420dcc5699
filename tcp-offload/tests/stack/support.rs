//! Support: stacks with an upper layer that sends ULPDUs of the largest size.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use xwarp_tcp::{
    framing::AcceptParams,
    link::{Link, RxFrame},
    mpa::MpaConfig,
    secret::Secret,
    seq::StreamOffset,
    sim::{Blackout, Faults, Node, Outcome, PathMtu, SimLink, Wire, WireConfig, path, run},
    stack::{ConnectParams, Stack, StackConfig},
    tcp::TcpConfig,
    time::Instant,
    ulp::{Arrival, CloseReason, ConnId, Event, ListenerId, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
    wire::Segment,
};

use crate::raw::Mailbox;

pub const PORT: u16 = 4791;

/// An upper layer that accepts all requests, sends as many bytes as a test requests, and counts received bytes.
#[derive(Debug, Default)]
pub struct Upper {
    /// Requests that wait for an answer, if `deaf` is set.
    pub requested: Vec<ConnId>,
    /// The listeners that accepted the requests' connections.
    pub requested_at: Vec<ListenerId>,
    /// Leaves requests without an answer.
    pub deaf: bool,
    /// Connections to close once everything is sent.
    pub finishing: HashSet<ConnId>,
    pub established: Vec<ConnId>,
    /// Bytes that each connection still wants to send.
    pub to_send: HashMap<ConnId, usize>,
    pub sent: u64,
    /// Times that the stack has asked whether there is something to send.
    pub asked: Cell<u64>,
    pub delivered: u64,
    pub closed: BTreeMap<u32, CloseReason>,
    pub errors: Vec<String>,
}

impl Ulp for Upper {
    type Placed = usize;

    fn place(&mut self, _conn: ConnId, ulpdu: &Ulpdu<'_>, _arrival: Arrival) -> Result<usize, Refusal> {
        ulpdu.for_each(0, |_, bytes| assert!(bytes.iter().all(|b| *b == 0xa5)));
        Ok(ulpdu.len())
    }

    fn deliver(&mut self, _conn: ConnId, len: usize) -> Result<(), Refusal> {
        self.delivered += len as u64;
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        self.asked.set(self.asked.get() + 1);
        true
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        let Some(left) = self.to_send.get_mut(&conn).filter(|left| **left > 0) else {
            return if self.finishing.contains(&conn) { Pulled::Finish } else { Pulled::Nothing };
        };
        let len = (*left).min(out.mulpdu());
        if out.room() < len {
            return Pulled::Nothing;
        }
        out.fill(len, |_, bytes| bytes.fill(0xa5));
        *left -= len;
        self.sent += len as u64;
        if *left > 0 || self.finishing.contains(&conn) { Pulled::Ulpdu } else { Pulled::LastUlpdu }
    }

    fn acked(&mut self, _conn: ConnId, _offset: StreamOffset) {}

    fn event(&mut self, conn: ConnId, event: Event) {
        match event {
            Event::Requested { listener, .. } => {
                self.requested.push(conn);
                self.requested_at.push(listener);
            }
            Event::Established { .. } => self.established.push(conn),
            Event::PeerClosed => {
                self.finishing.insert(conn);
            }
            Event::SoftError(_) => {}
            Event::Closed(reason) => {
                self.closed.insert(conn.index, reason);
            }
            other => self.errors.push(format!("{other:?}")),
        }
    }
}

/// One end: a stack, its upper layer and its link.
pub struct End {
    pub stack: Stack<Upper>,
    pub upper: Upper,
    pub link: SimLink,
    batch: Vec<RxFrame>,
}

impl End {
    fn new(link: SimLink, config: StackConfig) -> Self {
        Self { stack: Stack::new(config), upper: Upper::default(), link, batch: Vec::new() }
    }

    /// Sends `bytes` on a connection.
    pub fn send(&mut self, conn: ConnId, bytes: usize) {
        *self.upper.to_send.entry(conn).or_default() += bytes;
        self.stack.wake(conn);
    }

    /// Closes a connection in order.
    pub fn finish(&mut self, conn: ConnId) {
        self.upper.finishing.insert(conn);
        self.stack.wake(conn);
    }

    pub fn assert_nothing_leaked(&self) {
        let census = self.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "frames leaked");
    }
}

impl Node for End {
    fn turn(&mut self, now: Instant) -> bool {
        let received = self.link.receive(&mut self.batch, 64);
        for frame in self.batch.drain(..) {
            self.stack.receive(now, &mut self.link, frame, &mut self.upper);
        }
        let accepted = if self.upper.deaf { Vec::new() } else { std::mem::take(&mut self.upper.requested) };
        for conn in accepted {
            let params = AcceptParams { ird: 0, ord: 0, private_data: Vec::new() };
            self.stack.accept(conn, params, &mut self.upper).unwrap();
        }
        if self.stack.next_deadline().is_some_and(|d| d <= now) {
            self.stack.on_timer(now, &mut self.link, &mut self.upper);
        }
        if received == 0 {
            self.stack.idle();
        }
        self.stack.transmit(now, &mut self.link, &mut self.upper);
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }
}

/// A line of 100 Mbit/s.
fn wide() -> Faults {
    let (delay, rate_bytes) = (Duration::from_micros(50), Some(12_500_000));
    Faults { delay, rate_bytes, ..Default::default() }
}

/// Client, server and a stranger, connected by a switch; the server listens.
pub struct Lab {
    pub wire: Wire,
    pub now: Instant,
    pub client: End,
    pub server: End,
    /// The link of a host that never answers.
    pub stranger: SimLink,
    /// Segments that arrived at the stranger, when its link delivers them.
    pub inbox: Vec<(Segment, Vec<u8>)>,
    mpa: MpaConfig,
    pub listener: ListenerId,
    /// The local port of the client's last connection.
    pub port: u16,
    next_host: u8,
}

impl Lab {
    pub fn new(tcp: TcpConfig, backlog: usize) -> Self {
        Self::limited(tcp, backlog, |_| {})
    }

    /// A lab in which `limit` changes the settings of both stacks.
    pub fn limited(tcp: TcpConfig, backlog: usize, limit: impl Fn(&mut StackConfig)) -> Self {
        let config = WireConfig { tx_chunks: 4096, rx_chunks: 4096, ..Default::default() };
        Self::over(&config, tcp, MpaConfig::default(), backlog, limit)
    }

    /// A lab with other links.
    pub fn over(
        links: &WireConfig,
        tcp: TcpConfig,
        mpa: MpaConfig,
        backlog: usize,
        limit: impl Fn(&mut StackConfig),
    ) -> Self {
        let deaf = Blackout { from: Instant::ZERO, length: Duration::MAX, every: None };
        let deaf = Faults { blackout: Some(deaf), ..Default::default() };
        let (wire, links) = Wire::switch(links, &[wide(), wide(), deaf]);
        let Ok([client, server, stranger]) = <[SimLink; 3]>::try_from(links) else { panic!("three links") };
        let stack = |seed| {
            let mut config = StackConfig { secret: Secret::from_number(seed), tcp, ..Default::default() };
            limit(&mut config);
            config
        };
        let (client, mut server) = (End::new(client, stack(1)), End::new(server, stack(2)));
        let listener = server.stack.listen(&mut server.link, None, PORT, backlog, 1500, mpa.clone()).unwrap();
        Self {
            wire,
            now: Instant::ZERO,
            client,
            server,
            stranger,
            inbox: Vec::new(),
            mpa,
            listener,
            port: 10_000,
            next_host: 1,
        }
    }

    /// Opens a connection from the client, from another port each time.
    pub fn connect(&mut self) -> ConnId {
        self.port += 1;
        if self.port > 60_000 {
            (self.port, self.next_host) = (10_001, self.next_host + 1);
        }
        let path = path(([10, 1, 0, self.next_host], self.port), ([10, 1, 1, 1], PORT));
        let (mpa, params) = (self.mpa.clone(), ConnectParams::default());
        self.client.stack.connect(self.now, &mut self.client.link, path, mpa, params).unwrap()
    }

    /// Drops IP packets of more than `bytes` bytes without an ICMP error from now on. `None` ends this.
    pub fn narrow(&mut self, bytes: Option<u16>) {
        let mtu = bytes.map(|bytes| PathMtu { from: self.now, bytes, icmp: false });
        for end in 0..2 {
            self.wire.set_faults(end, Faults { mtu, ..wide() });
        }
    }

    /// Delivers frames for the stranger from now on.
    pub fn hear_stranger(&mut self) {
        self.wire.set_faults(2, wide());
    }

    /// Loses the client's frames for `length`, starting 20 us from now, after its SYN was sent.
    pub fn lose_until(&mut self, length: Duration) {
        let from = self.now + Duration::from_micros(20);
        let blackout = Some(Blackout { from, length, every: None });
        self.wire.set_faults(1, Faults { blackout, ..wide() });
    }

    /// Runs until `done`, for at most `limit`.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut() -> bool) -> Outcome {
        let start = self.now;
        let mut last = start;
        let mut mailbox = Mailbox { link: &mut self.stranger, inbox: &mut self.inbox };
        let nodes: &mut [&mut dyn Node] = &mut [&mut self.client, &mut self.server, &mut mailbox];
        let outcome = run(&self.wire, nodes, start, limit, |now, _| {
            last = now;
            done()
        });
        self.now = match outcome {
            Outcome::TimeLimit => start + limit,
            Outcome::Done(_) | Outcome::Stalled(_) => last,
        };
        outcome
    }

    /// Advances virtual time by `time`.
    pub fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        self.run(time, || false);
        self.now = until;
    }

    pub fn assert_no_errors(&self) {
        for end in [&self.client, &self.server] {
            assert_eq!(end.upper.errors, Vec::<String>::new());
        }
    }
}
