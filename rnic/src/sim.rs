//! [`Station`]: an engine on a link of a virtual wire, to be run in virtual time by [`xwarp_tcp::sim::run`].

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use xwarp_tcp::{
    framing::AcceptParams,
    link::Link,
    sim::{self, Node, SimLink},
    time::Instant,
    wire::{Mac, Path},
};

use crate::{
    engine::{Engine, EngineConfig},
    rnic::{CmEvent, QpId},
};

/// An engine and its link. It answers connection requests as configured.
#[derive(Debug)]
pub struct Station {
    /// The engine.
    pub engine: Engine,
    /// Its end of the wire.
    pub link: SimLink,
    /// The queue pair for the request of each expected peer; requests of other peers are rejected.
    pub expected: BTreeMap<IpAddr, QpId>,
    /// Parameters for accepting requests.
    pub accept: AcceptParams,
    /// Connection events so far.
    pub events: Vec<CmEvent>,
}

impl Station {
    /// A new engine on `link`.
    pub fn new(link: SimLink, config: EngineConfig) -> Self {
        Self {
            engine: Engine::new(config),
            link,
            expected: BTreeMap::new(),
            accept: AcceptParams::default(),
            events: Vec::new(),
        }
    }

    /// Passes one frame that has arrived to the engine. Returns the frame's bytes, for tests that inspect the wire;
    /// call it until it returns `None`, before [`Node::turn`].
    pub fn receive_one(&mut self, now: Instant) -> Option<Vec<u8>> {
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 1);
        let frame = batch.pop()?;
        let bytes = self.link.rx_chunks(&frame).concat();
        self.engine.receive(now, &mut self.link, frame);
        Some(bytes)
    }

    /// Stores new events and answers requests.
    fn take_events(&mut self, now: Instant) {
        while let Some(event) = self.engine.next_cm_event() {
            if let CmEvent::ConnectRequest { request, remote, .. } = &event {
                // A request may end before it is answered; an event reports that.
                let _ = match self.expected.remove(&remote.ip()) {
                    Some(qp) => self.engine.accept(*request, qp, self.accept.clone()),
                    None => self.engine.reject(now, *request, &[]),
                };
            }
            self.events.push(event);
        }
    }
}

impl Node for Station {
    fn turn(&mut self, now: Instant) -> bool {
        let received = self.engine.turn(now, &mut self.link);
        self.take_events(now);
        if self.engine.wants_to_transmit() {
            self.engine.transmit(now, &mut self.link);
        }
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.engine.next_deadline()
    }
}

/// The IPv4 address of the first (1), second (2) ... end.
pub fn ipv4(end: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, end).into()
}

/// The IPv6 address of the first (1), second (2) ... end.
pub fn ipv6(end: u8) -> IpAddr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, end.into()).into()
}

/// The Ethernet address of the first (1), second (2) ... end.
pub fn mac(end: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, end])
}

/// The path from one end (1, 2 ...) and port to another, over IPv4 or IPv6.
pub fn path([from, to]: [(u8, u16); 2], v6: bool, mtu: u16) -> Path {
    let ip = if v6 { ipv6 } else { ipv4 };
    Path {
        source_mac: mac(from.0),
        next_hop_mac: mac(to.0),
        mtu,
        ..sim::path((ip(from.0), from.1), (ip(to.0), to.1))
    }
}
