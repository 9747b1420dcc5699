//! Several connections from hosts of their own to one host, through one line: what the flows do to each other.

use std::{net::SocketAddr, sync::Arc};

use super::{Stream, path, unhashed};
use crate::{
    link::Link,
    sim::{Faults, SimLink, Wire, WireConfig},
    tcp::{Connection, Info, TcpConfig},
    time::Instant,
    wire::{Flow, Inbound, Mac, Path, parse},
};

/// A connection and its sender's link.
struct Sending {
    link: SimLink,
    conn: Connection,
    source: Stream,
    starts: Instant,
}

/// The flows of one direction through a shared line.
pub(crate) struct Shared {
    wire: Wire,
    pub now: Instant,
    senders: Vec<Sending>,
    host: SimLink,
    receivers: Vec<Option<Connection>>,
    config: Arc<TcpConfig>,
}

/// The path of flow `n`, or the host's view of it.
fn path_of(n: usize, here: bool) -> Path {
    let base = path(here);
    let sender: SocketAddr = format!("10.0.0.1:{}", 4791 + n).parse().unwrap();
    let (sender_mac, host_mac) = (Mac([2, 0, 0, 0, 1, n as u8]), Mac([2, 0, 0, 0, 0, 2]));
    let Flow { local, remote } = base.flow;
    let flow = if here { Flow { local: sender, remote } } else { Flow { local, remote: sender } };
    let (source_mac, next_hop_mac) = if here { (sender_mac, host_mac) } else { (host_mac, sender_mac) };
    Path { flow, source_mac, next_hop_mac, next_hop: Some(flow.remote.ip()), ..base }
}

impl Shared {
    /// One flow for each of `configs`, which starts at its time. The `line` leads to the host; the way back only has its
    /// delay.
    pub(crate) fn new(configs: &[(TcpConfig, Instant)], line: &Faults, seed: u64) -> Self {
        let back = Faults { delay: line.delay, ..Faults::default() };
        let faults: Vec<_> = configs.iter().map(|_| back).chain([*line]).collect();
        let config = WireConfig { seed, tx_chunks: 8192, rx_chunks: 8192, ..WireConfig::default() };
        let (wire, mut links) = Wire::switch(&config, &faults);
        let host = links.pop().expect("the host's link");
        let now = Instant::from_nanos(1_000_000);
        let sender = |(n, (link, (config, starts))): (usize, (SimLink, &(TcpConfig, Instant)))| Sending {
            link,
            conn: Connection::connect(now, &Arc::new(*config), path_of(n, true), unhashed(n as u32 * 7919)),
            source: Stream::new(u64::MAX / 2, 0, false),
            starts: *starts,
        };
        let senders: Vec<_> = links.into_iter().zip(configs).enumerate().map(sender).collect();
        let receivers = senders.iter().map(|_| None).collect();
        let (config, _) = configs.first().expect("a flow");
        Self { wire, now, senders, host, receivers, config: Arc::new(*config) }
    }

    /// Bytes of flow `n` that have arrived in order.
    pub(crate) fn taken(&self, n: usize) -> u64 {
        self.receivers[n].as_ref().map_or(0, Connection::contiguous)
    }

    /// The sender of flow `n`.
    pub(crate) fn info(&self, n: usize) -> Info {
        self.senders[n].conn.info()
    }

    fn turn_of_sender(&mut self, n: usize) -> bool {
        let (now, sender) = (self.now, &mut self.senders[n]);
        let mut batch = Vec::new();
        sender.link.receive(&mut batch, 64);
        let mut any = !batch.is_empty();
        for frame in batch {
            if now >= sender.starts
                && let Ok(Inbound::Tcp(segment)) = parse(&sender.link, &frame)
            {
                sender.conn.receive_one(now, &mut sender.link, &segment);
            }
            sender.link.recycle(frame);
        }
        if now < sender.starts {
            return any;
        }
        if sender.conn.deadline().is_some_and(|at| at <= now) {
            sender.conn.on_timer(now);
        }
        any |= sender.conn.transmit(now, &mut sender.link, &mut sender.source, 64).frames > 0;
        sender.link.flush();
        any
    }

    fn turn_of_host(&mut self) -> bool {
        let now = self.now;
        let mut batch = Vec::new();
        self.host.receive(&mut batch, 64);
        let any = !batch.is_empty();
        for frame in batch {
            if let Ok(Inbound::Tcp(segment)) = parse(&self.host, &frame) {
                let n = usize::from(segment.flow.remote.port() - 4791);
                let receiver = self.receivers[n].get_or_insert_with(|| {
                    Connection::accept(now, &self.config, path_of(n, false), &segment, unhashed(n as u32))
                });
                let receipt = receiver.receive_one(now, &mut self.host, &segment);
                if let Some(arrival) = receipt.arrival {
                    receiver.payload_taken(now, &arrival);
                }
            }
            self.host.recycle(frame);
        }
        for receiver in self.receivers.iter_mut().flatten() {
            if receiver.deadline().is_some_and(|at| at <= now) {
                receiver.on_timer(now);
            }
            if !any {
                receiver.flush_ack();
            }
            receiver.transmit(now, &mut self.host, &mut Stream::new(0, 0, false), 64);
        }
        self.host.flush();
        any
    }

    /// Runs until `end`.
    pub(crate) fn run_until(&mut self, end: Instant) {
        loop {
            self.wire.advance(self.now);
            let mut any = true;
            while any {
                any = self.turn_of_host();
                for n in 0..self.senders.len() {
                    any |= self.turn_of_sender(n);
                }
            }
            let now = self.now;
            let sending = |s: &Sending| if now < s.starts { Some(s.starts) } else { s.conn.deadline() };
            let senders = self.senders.iter().filter_map(sending);
            let receivers = self.receivers.iter().flatten().filter_map(Connection::deadline);
            let next = senders.chain(receivers).chain(self.wire.next_arrival()).min();
            match next.filter(|next| *next <= end) {
                Some(next) => {
                    assert!(next > self.now, "what was due was not served: {:?}", self.now);
                    self.now = next;
                }
                None => return,
            }
        }
    }
}
