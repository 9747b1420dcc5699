//! [`Legs`]: frames from leg to leg.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use xwarp_leg::Lie;
use xwarp_leg::far::{Delivered, Frame, Sink, Source};
use xwarp_leg::hosts;
use xwarp_tcp::wire::Flow;

use crate::header::{self, HEAD_BYTES, Header};
use crate::hosts::Hosts;
use crate::paths::{Paths, Way};
use crate::ports::Ports;

/// Frames of one leg that are carried before other legs get a turn.
const MAX_BATCH: usize = 32;
/// Connections that are remembered. With more, the fabric forgets all, and learns them again from their next frames.
const MAX_FLOWS: usize = 16_384;
/// Answers of the fabric itself that may wait.
const MAX_ANSWERS: usize = 1024;
/// Frames whose way has ended that are delivered before legs get a turn.
const MAX_ARRIVALS: usize = 256;

xwarp_tcp::counters! {
    /// What became of frames.
    pub struct SwitchCounters in "fabric" {
        /// Frames carried from one leg to another.
        carried,
        /// Their bytes.
        carried_bytes,
        /// Frames dropped because their receiver had no memory for them.
        receiver_full,
        /// Frames that are no TCP segments in one piece: dropped.
        not_tcp,
        /// Frames from a port or an address that is not their sender's: dropped.
        not_its_port,
        /// Segments to a port of nobody, which a reset answers.
        to_nobody,
        /// Frames to an address of no host: dropped.
        no_host,
        /// Frames that took a way with faults.
        faulty,
        /// Frames lost because their way is cut, or too many were on it.
        cut,
        /// Legs that ended because their client has lied.
        lies,
    }
}

/// The leg of a client.
#[derive(Debug)]
struct Leg {
    host: u16,
    source: Option<Source>,
    sink: Sink,
    /// It has frames, or may have: it is in the queue of legs that get a turn.
    is_active: bool,
    /// Frames were delivered since it was woken last.
    is_touched: bool,
}

/// What the fabric knows of a connection: enough to reset one end when the other is gone.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// The client at the end whose segments these are.
    from: usize,
    to: usize,
    /// The next sequence number that this end expects.
    expects: u32,
}

/// Where a frame comes from: the leg of a client, or a way with faults.
#[derive(Debug, Clone, Copy)]
enum Whence<'a> {
    Leg(usize, &'a Frame<'a>),
    Way(&'a [u8]),
}

/// A frame that the fabric itself sends.
#[derive(Debug)]
struct Answer {
    to: usize,
    bytes: Vec<u8>,
}

/// The legs of all clients, and what passes from one to another.
#[derive(Debug, Default)]
pub(crate) struct Legs {
    by_client: Vec<Option<Leg>>,
    /// Legs that get a turn, in order.
    active: VecDeque<usize>,
    /// Legs to which frames were delivered.
    touched: Vec<usize>,
    /// By host of the sender, and its addresses.
    flows: HashMap<(u16, Flow), Known>,
    answers: VecDeque<Answer>,
    /// Clients whose legs have ended, and why.
    ended: Vec<(usize, String)>,
    paths: Paths,
    counters: SwitchCounters,
}

/// The tables that say where a frame goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables<'a> {
    pub hosts: &'a Hosts,
    pub ports: &'a Ports,
}

impl Legs {
    pub(crate) fn counters(&self) -> SwitchCounters {
        self.counters
    }

    /// The ways between hosts.
    pub(crate) fn paths(&mut self) -> &mut Paths {
        &mut self.paths
    }

    /// Time until a frame arrives that is on its way.
    pub(crate) fn next_due(&self) -> Option<Duration> {
        self.paths.next_due()
    }

    pub(crate) fn add(&mut self, client: usize, host: u16, source: Source, sink: Sink) {
        if self.by_client.len() <= client {
            self.by_client.resize_with(client + 1, || None);
        }
        if let Some(place) = self.by_client.get_mut(client) {
            *place = Some(Leg { host, source: Some(source), sink, is_active: false, is_touched: false });
        }
        self.activate(client);
    }

    /// What a client rings.
    pub(crate) fn bell(&self, client: usize) -> Option<BorrowedFd<'_>> {
        let leg = self.by_client.get(client)?.as_ref()?;
        leg.source.as_ref().map(Source::bell)
    }

    /// Removes the leg of a client that is gone, and resets the peers of its connections.
    pub(crate) fn remove(&mut self, client: usize) {
        let Some(leg) = self.by_client.get_mut(client).and_then(Option::take) else { return };
        let peers: Vec<_> =
            self.flows.iter().filter(|(_, known)| known.to == client && known.from != client).collect();
        let mut resets = Vec::new();
        for ((host, flow), known) in peers {
            let back = Flow { local: flow.remote, remote: flow.local };
            let bytes = header::reset(back, (known.expects, None), leg.host, *host);
            resets.push(Answer { to: known.from, bytes });
        }
        self.answers.extend(resets);
        self.flows.retain(|_, known| known.from != client && known.to != client);
        self.answer();
        self.wake();
    }

    /// The next client whose leg has ended, and why.
    pub(crate) fn next_ended(&mut self) -> Option<(usize, String)> {
        self.ended.pop()
    }

    /// Gives a leg a turn, whose client has rung.
    pub(crate) fn activate(&mut self, client: usize) {
        if let Some(Some(leg)) = self.by_client.get_mut(client)
            && !std::mem::replace(&mut leg.is_active, true)
        {
            self.active.push_back(client);
        }
    }

    /// Carries frames until no leg has any, at most `turns` turns; returns whether all legs sleep.
    pub(crate) fn run(&mut self, turns: usize, tables: Tables<'_>) -> bool {
        for _ in 0..turns {
            let Some(client) = self.active.pop_front() else { break };
            self.turn(client, tables);
            self.answer();
            self.wake();
        }
        self.arrive(tables);
        self.active.is_empty()
    }

    /// Delivers the frames whose way has ended.
    fn arrive(&mut self, tables: Tables<'_>) {
        for _ in 0..MAX_ARRIVALS {
            let Some((from, to, bytes)) = self.paths.next() else { break };
            // A frame may have been changed on its way.
            let Some(header) = Header::parse(&bytes, bytes.len()) else { continue };
            self.deliver(from, to, &header, Whence::Way(&bytes), tables);
        }
        self.answer();
        self.wake();
    }

    fn turn(&mut self, client: usize, tables: Tables<'_>) {
        let Some(Some(leg)) = self.by_client.get_mut(client) else { return };
        let Some(mut source) = leg.source.take() else { return };
        let host = leg.host;
        source.sleep(false);
        let taken = self.take(client, host, &mut source, tables);
        source.give_back();
        let more = match taken {
            Ok(MAX_BATCH) => true,
            Ok(_) => {
                // A client that did not ring because this end was awake is seen here.
                source.sleep(true);
                source.has_frames()
            }
            Err(lie) => {
                self.lied(client, lie);
                false
            }
        };
        if let Some(Some(leg)) = self.by_client.get_mut(client) {
            leg.source = Some(source);
            leg.is_active = more;
            if more {
                self.active.push_back(client);
            }
        }
    }

    /// Takes a batch of frames; returns how many.
    fn take(
        &mut self,
        client: usize,
        host: u16,
        source: &mut Source,
        tables: Tables<'_>,
    ) -> Result<usize, Lie> {
        let mut head = [0; HEAD_BYTES];
        for taken in 0..MAX_BATCH {
            if !source.next(&mut head, |frame| self.carry(client, host, frame, tables))? {
                return Ok(taken);
            }
        }
        Ok(MAX_BATCH)
    }

    fn lied(&mut self, client: usize, lie: Lie) {
        self.counters.lies += 1;
        self.ended.push((client, lie.to_string()));
    }

    /// Carries a frame that a client has sent.
    fn carry(&mut self, client: usize, host: u16, frame: &Frame<'_>, tables: Tables<'_>) {
        let Some(header) = Header::parse(frame.head(), frame.len()) else {
            self.counters.not_tcp += 1;
            return;
        };
        let Header { source, destination, .. } = header;
        if !is_its_own(client, host, source, tables) {
            self.counters.not_its_port += 1;
            return;
        }
        let Some(there) = tables.hosts.at(host, destination.ip()) else {
            self.counters.no_host += 1;
            return;
        };
        if !self.paths.have_no_faults() {
            match self.paths.send(host, there, || frame.to_vec()) {
                Way::Faultless => {}
                Way::Cut => {
                    self.counters.cut += 1;
                    return;
                }
                Way::Faulty => {
                    self.counters.faulty += 1;
                    // What arrives may be changed; whose connection it is is known here.
                    let owner = tables.ports.owner(there, destination.ip(), destination.port());
                    if let Some(to) = owner {
                        self.remember(client, to, host, &header);
                    }
                    return;
                }
            }
        }
        self.deliver(host, there, &header, Whence::Leg(client, frame), tables);
    }

    /// Delivers a frame from one host to the owner of its port on another, or answers it for nobody.
    fn deliver(&mut self, host: u16, there: u16, header: &Header, whence: Whence<'_>, tables: Tables<'_>) {
        let Header { source, destination, .. } = *header;
        let owner = tables.ports.owner(there, destination.ip(), destination.port());
        let to = owner.and_then(|to| Some((to, self.by_client.get_mut(to)?.as_mut()?)));
        let Some((to, leg)) = to else {
            self.counters.to_nobody += 1;
            let sender = match whence {
                Whence::Leg(client, _) => Some(client),
                Whence::Way(_) => tables.ports.owner(host, source.ip(), source.port()),
            };
            if let (Some(to), Some(bytes)) = (sender, header.reset(there, host)) {
                self.push_answer(Answer { to, bytes });
            }
            return;
        };
        let (delivered, len) = match whence {
            Whence::Leg(_, frame) => (leg.sink.deliver(frame), frame.len()),
            Whence::Way(bytes) => (leg.sink.deliver_bytes(bytes), bytes.len()),
        };
        match delivered {
            Ok(Delivered::Yes) => {
                self.counters.carried += 1;
                self.counters.carried_bytes += len as u64;
                self.touch(to);
                if let Whence::Leg(from, _) = whence {
                    self.remember(from, to, host, header);
                }
            }
            Ok(Delivered::Full) => self.counters.receiver_full += 1,
            Err(lie) => self.lied(to, lie),
        }
    }

    fn remember(&mut self, from: usize, to: usize, host: u16, header: &Header) {
        let key = (host, Flow { local: header.source, remote: header.destination });
        if header.is_reset() {
            self.flows.remove(&key);
        } else if let Some(expects) = header.acknowledges() {
            if self.flows.len() >= MAX_FLOWS && !self.flows.contains_key(&key) {
                self.flows.clear();
            }
            self.flows.insert(key, Known { from, to, expects });
        }
    }

    fn push_answer(&mut self, answer: Answer) {
        if self.answers.len() < MAX_ANSWERS {
            self.answers.push_back(answer);
        }
    }

    /// Delivers the fabric's own answers.
    fn answer(&mut self) {
        while let Some(Answer { to, bytes }) = self.answers.pop_front() {
            let Some(Some(leg)) = self.by_client.get_mut(to) else { continue };
            match leg.sink.deliver_bytes(&bytes) {
                Ok(_) => self.touch(to),
                Err(lie) => self.lied(to, lie),
            }
        }
    }

    fn touch(&mut self, client: usize) {
        if let Some(Some(leg)) = self.by_client.get_mut(client)
            && !std::mem::replace(&mut leg.is_touched, true)
        {
            self.touched.push(client);
        }
    }

    /// Wakes the clients to which frames were delivered, if they sleep.
    fn wake(&mut self) {
        for client in std::mem::take(&mut self.touched) {
            if let Some(Some(leg)) = self.by_client.get_mut(client) {
                leg.is_touched = false;
                leg.sink.wake();
            }
        }
    }
}

/// Whether a client may send from this address and port.
fn is_its_own(client: usize, host: u16, source: SocketAddr, tables: Tables<'_>) -> bool {
    let own = hosts::addresses(host).contains(&source.ip()) || hosts::addresses(0).contains(&source.ip());
    own && tables.ports.owner(host, source.ip(), source.port()) == Some(client)
}
