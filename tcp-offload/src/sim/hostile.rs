//! [`HostileHost`]: a host that speaks TCP and MPA well enough to open connections, and then misbehaves.
//!
//! Each of its connections has a lasting behavior: which windows it advertises, which data it acknowledges, whether it
//! answers. The next action, its connection and the pause before it are drawn from a seed. Some actions belong to a
//! campaign of many actions.

use std::{net::SocketAddr, ops::Range, time::Duration};

use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::{Node, RawPeer, RawSegment, SimLink, fpdu};
use crate::{
    link::{Link, RxFrame},
    mpa::{Enhanced, MpaReply, MpaRequest},
    time::Instant,
    wire::{self, Flags, Inbound, Path, Segment},
};

/// Largest payload of a segment, in bytes.
const SEGMENT: usize = 1400;

/// Largest number of answers to received frames between two actions.
const MAX_ANSWERS: u32 = 100;

/// Parameters of a hostile host.
pub struct HostileConfig {
    /// Seed of all its choices.
    pub seed: u64,
    /// The path to the victim's port; local ports are chosen from its local port on.
    pub path: Path,
    /// Largest number of simultaneous connections.
    pub connections: usize,
    /// Number of actions after which the host falls silent.
    pub actions: u32,
    /// Pauses between actions.
    pub pauses: Range<Duration>,
    /// Whether the victim uses markers with a peer that asks for them.
    pub markers: bool,
    /// Where the host acknowledges all data, it does so with its own data, as an application that answers does.
    pub converses: bool,
    /// Builds the ULPDUs that the host sends. The number is the state of the connection, initially 0.
    pub ulpdu: fn(&mut SmallRng, &mut u64, Purpose) -> Vec<u8>,
}

/// The purpose of a ULPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It may have any length and any error.
    Any,
    /// It is valid and as short as possible, and the victim answers it.
    Request,
}

#[derive(Debug, Clone, Copy)]
enum Window {
    Open,
    Zero,
    Shrunk(u16),
    Random,
}

#[derive(Debug, Clone, Copy)]
enum Acks {
    All,
    Old,
    Partial,
    Future,
    Nonsense,
}

#[derive(Debug, Clone, Copy)]
struct Behavior {
    window: Window,
    acks: Acks,
    /// Percentage of the other end's segments that are answered.
    answers: u32,
}

impl Behavior {
    const CALM: Self = Self { window: Window::Open, acks: Acks::All, answers: 100 };
    const SILENT: Self = Self { window: Window::Open, acks: Acks::Old, answers: 0 };
    const CLOSED_WINDOW: Self = Self { window: Window::Zero, acks: Acks::Old, answers: 100 };
}

/// An attack that consists of many actions in order.
#[derive(Debug, Clone, Copy)]
enum Campaign {
    /// Sends byte by byte with long pauses on the connection from `port`, for `left` actions.
    Trickle { port: u16, left: u32 },
    /// All connections request and receive data. Then they fall silent one after the other, `step` actions apart, so
    /// that each holds a part of the remaining transmit frames. At the end all adopt the behavior `end` while data is in
    /// flight, and new connections claim the frames that become free.
    FrameExhaustion { left: u32, step: u32, end: Behavior },
}

impl Campaign {
    /// Actions of a frame exhaustion, and the number left when connections begin to fall silent and when they adopt their
    /// last behavior.
    const EXHAUSTION: u32 = 76;
    const SILENT_FROM: u32 = 64;
    const ENDS_FROM: u32 = 40;

    /// Connections that have received fewer bytes than this keep their window open to the end of a frame exhaustion.
    const FEW_BYTES: u32 = 7000;

    /// Smallest number of connections of a frame exhaustion: fewer could not hold most of the transmit frames.
    const LEAST_CONNECTIONS: usize = 8;

    /// Bytes of requests that each connection of a frame exhaustion sends with an action.
    const REQUEST_BYTES: usize = 1000;

    /// Fraction of the actions that begin a campaign.
    const PROBABILITY: f64 = 0.03;

    /// The pauses between its actions.
    fn pauses(self) -> Range<Duration> {
        match self {
            Self::Trickle { .. } => Duration::from_secs(1)..Duration::from_secs(30),
            Self::FrameExhaustion { left, .. } if left > Self::ENDS_FROM => {
                Duration::from_millis(1)..Duration::from_millis(50)
            }
            Self::FrameExhaustion { .. } => Duration::from_millis(100)..Duration::from_secs(1),
        }
    }
}

struct Conversation {
    peer: RawPeer,
    behavior: Behavior,
    /// Bytes of the stream that follow the last byte sent.
    stream: Vec<u8>,
    /// Length of the FPDUs built so far, in bytes.
    made: u64,
    /// See [`HostileConfig::ulpdu`].
    state: u64,
    markers: bool,
    /// The last bytes sent, from which retransmissions are taken.
    last: Vec<u8>,
}

/// See the module documentation.
pub struct HostileHost {
    link: SimLink,
    config: HostileConfig,
    rng: SmallRng,
    conversations: Vec<Conversation>,
    campaign: Option<Campaign>,
    next_port: u16,
    next: Instant,
    answers: u32,
    batch: Vec<RxFrame>,
}

impl HostileHost {
    /// A hostile host at `link`.
    pub fn new(link: SimLink, config: HostileConfig) -> Self {
        Self {
            link,
            rng: SmallRng::seed_from_u64(config.seed),
            conversations: Vec::new(),
            campaign: None,
            next_port: config.path.flow.local.port(),
            next: Instant::ZERO,
            answers: 0,
            batch: Vec::new(),
            config,
        }
    }

    /// Whether the host has done all its actions.
    pub fn is_done(&self) -> bool {
        self.config.actions == 0
    }

    fn pause(&mut self) -> Duration {
        let pauses = self.config.pauses.clone();
        let Range { start, end } = self.campaign.map_or(pauses, Campaign::pauses);
        let (least, most) = (start.as_secs_f64().max(1e-9).ln(), end.as_secs_f64().ln());
        Duration::from_secs_f64(self.rng.random_range(least..most).exp())
    }

    fn draw_behavior(rng: &mut SmallRng) -> Behavior {
        let window = match rng.random_range(0..8) {
            0..3 => Window::Open,
            3..6 => Window::Zero,
            6 => Window::Shrunk(rng.random_range(0..200)),
            _ => Window::Random,
        };
        let acks = match rng.random_range(0..8) {
            0..3 => Acks::All,
            3 | 4 => Acks::Old,
            5 => Acks::Partial,
            6 => Acks::Future,
            _ => Acks::Nonsense,
        };
        let answers = [0, 20, 100, 100][rng.random_range(0..4)];
        Behavior { window, acks, answers }
    }

    /// Opens a connection from a new port, or from the last port again.
    fn open(&mut self) {
        let most = match self.campaign {
            Some(Campaign::FrameExhaustion { .. }) => {
                self.config.connections.max(Campaign::LEAST_CONNECTIONS)
            }
            _ => self.config.connections,
        };
        while self.conversations.len() >= most {
            let at = self.rng.random_range(0..self.conversations.len());
            self.conversations.swap_remove(at);
        }
        if self.rng.random_bool(0.8) {
            self.next_port = self.next_port.wrapping_add(1).max(1024);
        }
        let mut path = self.config.path;
        path.flow.local.set_port(self.next_port);
        if self.conversations.iter().any(|c| c.peer.path().flow == path.flow) {
            return;
        }
        self.add_conversation(path);
        let Some(conversation) = self.conversations.last() else { return };
        let syn = conversation.peer.syn();
        self.link.inject(&syn);
    }

    fn add_conversation(&mut self, path: Path) {
        let rng = &mut self.rng;
        let peer = RawPeer::new(path, rng.random(), rng.random_bool(0.7));
        let behavior = Self::draw_behavior(rng);
        let behavior = if rng.random_bool(0.5) { Behavior::CALM } else { behavior };
        // Sometimes one end sends markers that the other did not request, or leaves them out.
        let markers = rng.random_bool(0.5) && (self.config.markers || rng.random_bool(0.1));
        self.conversations.push(Conversation {
            peer,
            behavior,
            stream: Vec::new(),
            made: 0,
            state: 0,
            markers,
            last: Vec::new(),
        });
    }

    /// Puts this end's start-up frame at the beginning of the stream.
    fn start_up(conversation: &mut Conversation, initiator: bool) {
        let enhanced = Some(Enhanced { ird: 4, ord: 4, peer_to_peer: None });
        let (revision, markers, crc) = (2, conversation.markers, true);
        let frame = if initiator {
            MpaRequest { revision, markers, crc, enhanced, ..MpaRequest::default() }.emit()
        } else {
            MpaReply { revision, markers, crc, enhanced, ..MpaReply::default() }.emit()
        };
        conversation.stream = frame;
    }

    fn receive(&mut self, segment: &Segment) {
        let flow = segment.flow;
        let index = self.conversations.iter().position(|c| c.peer.path().flow == flow);
        let index = match index {
            Some(index) => index,
            // The victim connects to this host.
            None if segment.flags.is_plain_syn() && self.conversations.len() < self.config.connections => {
                self.add_conversation(Path { flow, ..self.config.path });
                self.conversations.len() - 1
            }
            None => return,
        };
        let Some(conversation) = self.conversations.get_mut(index) else { return };
        let synchronized = conversation.peer.has_peer_syn();
        conversation.peer.receive(segment);
        if !synchronized && conversation.peer.has_peer_syn() {
            Self::start_up(conversation, segment.flags.ack);
            let first = if segment.flags.ack {
                let stream = std::mem::take(&mut conversation.stream);
                conversation.peer.data(&stream)
            } else {
                conversation.peer.syn()
            };
            self.link.inject(&first);
            return;
        }
        if !segment.flags.ack && segment.flags.syn {
            let syn = conversation.peer.syn();
            self.link.inject(&syn);
        } else if segment.flags.fin && self.config.actions > 0 && self.rng.random_bool(0.2) {
            let ack = conversation.peer.segment(&RawSegment { window: u16::MAX, ..RawSegment::ack() });
            self.link.inject(&ack);
            self.replace(index);
        } else if conversation.peer.has_peer_syn()
            && self.answers < MAX_ANSWERS
            && !segment.flags.rst
            && self.rng.random_range(0..100) < conversation.behavior.answers
        {
            // Only segments with data, a FIN, or a window probe are answered: answers to answers would never end.
            let sequence_len = segment.payload_len + usize::from(segment.flags.fin);
            let probe = sequence_len > 0 || matches!(conversation.behavior.window, Window::Zero);
            if probe && self.config.actions > 0 {
                self.answers += 1;
                if self.config.converses && matches!(conversation.behavior.acks, Acks::All) {
                    self.send_rest(index, 1, Purpose::Any);
                } else {
                    self.acknowledge(index);
                }
            }
        }
    }

    /// Sends a segment without payload, according to the connection's behavior.
    fn acknowledge(&mut self, index: usize) {
        let Self { rng, conversations, link, .. } = self;
        let Some(Conversation { peer, behavior, .. }) = conversations.get_mut(index) else { return };
        let window = match behavior.window {
            Window::Open => u16::MAX,
            Window::Zero => 0,
            Window::Shrunk(window) => window,
            Window::Random => rng.random(),
        };
        let waiting = peer.received.saturating_sub(peer.acknowledged).cast_signed();
        let mut sack = Vec::new();
        let ack = match behavior.acks {
            Acks::All => 0,
            Acks::Old => -waiting,
            Acks::Partial => -rng.random_range(0..=waiting.max(0)),
            Acks::Future => rng.random_range(1..100_000),
            Acks::Nonsense => {
                let mut edge = || rng.random_range(-100_000..100_000);
                sack.extend((0..3).map(|_| (edge(), edge())));
                -waiting
            }
        };
        if ack <= 0 {
            peer.acknowledged = peer.acknowledged.max(peer.received.saturating_add_signed(ack));
        }
        let frame = peer.segment(&RawSegment { ack, window, sack: &sack, ..RawSegment::ack() });
        link.inject(&frame);
    }

    /// Builds FPDUs for `purpose` until at least `len` bytes of the stream are waiting to be sent.
    fn build_stream(&mut self, index: usize, len: usize, purpose: Purpose) {
        let (rng, make) = (&mut self.rng, self.config.ulpdu);
        let Some(conversation) = self.conversations.get_mut(index) else { return };
        while conversation.stream.len() < len {
            let bytes =
                fpdu(conversation.made, conversation.markers, &make(rng, &mut conversation.state, purpose));
            conversation.made += bytes.len() as u64;
            conversation.stream.extend_from_slice(&bytes);
        }
    }

    /// Sends the next `len` bytes of the stream in segments of at most `cut` bytes.
    fn send(&mut self, index: usize, len: usize, cut: usize) {
        self.build_stream(index, len, Purpose::Any);
        let Self { conversations, link, .. } = self;
        let Some(conversation) = conversations.get_mut(index) else { return };
        conversation.last = conversation.stream.drain(..len).collect();
        for payload in conversation.last.chunks(cut) {
            link.inject(&conversation.peer.data(payload));
        }
    }

    /// Sends what is left of the stream, at least `least` bytes, with FPDUs for `purpose`.
    fn send_rest(&mut self, index: usize, least: usize, purpose: Purpose) {
        self.build_stream(index, least, purpose);
        let len = self.conversations.get(index).map_or(0, |c| c.stream.len());
        self.send(index, len, SEGMENT);
    }

    /// Sends bytes of the stream out of order: beyond a gap, or a retransmission with other boundaries.
    fn send_out_of_order(&mut self, index: usize, beyond: bool) {
        let distance = 1 << self.rng.random_range(0..18);
        let len = self.rng.random_range(1..=SEGMENT);
        self.build_stream(index, if beyond { distance + len } else { 0 }, Purpose::Any);
        let Self { rng, conversations, link, .. } = self;
        let Some(Conversation { peer, stream, last, .. }) = conversations.get_mut(index) else { return };
        let (seq, mut payload) = if beyond {
            (distance as i32, stream.get(distance..distance + len).unwrap_or_default().to_vec())
        } else {
            let from = rng.random_range(0..=last.len());
            let to = (from + len).min(last.len());
            (from as i32 - last.len() as i32, last.get(from..to).unwrap_or_default().to_vec())
        };
        // A retransmission may continue with new bytes, and some bytes are changed.
        if !beyond {
            payload.extend(stream.iter().take(rng.random_range(0..100)));
        }
        if rng.random_bool(0.1) {
            for byte in &mut payload {
                *byte = byte.wrapping_add(1);
            }
        }
        link.inject(&peer.segment(&RawSegment {
            seq,
            window: u16::MAX,
            payload: &payload,
            ..RawSegment::ack()
        }));
    }

    /// Sends RST, SYN or FIN with valid or invalid numbers.
    fn control(&mut self, index: usize) {
        let Self { rng, conversations, link, .. } = self;
        let Some(Conversation { peer, .. }) = conversations.get_mut(index) else { return };
        let near = if rng.random_bool(0.5) { 0 } else { rng.random_range(-70_000..70_000) };
        let with =
            |flags: Flags, seq: i32| RawSegment { flags, seq, window: u16::MAX, ..RawSegment::default() };
        let flags = Flags { ack: true, ..Flags::default() };
        match rng.random_range(0..10) {
            0 => link.inject(&peer.segment(&with(Flags { rst: true, ..Flags::default() }, near))),
            1 | 2 => {
                let ack = rng.random_bool(0.3);
                let seq = if rng.random_bool(0.5) { near } else { rng.random() };
                link.inject(&peer.segment(&with(Flags { syn: true, ack, ..Flags::default() }, seq)));
            }
            3..6 => {
                link.inject(&peer.segment(&with(Flags { fin: true, ..flags }, 0)));
                peer.sent = peer.sent.wrapping_add(1);
            }
            6..8 => {
                self.replace(index);
            }
            _ => link.inject(&peer.segment(&with(Flags { fin: true, ..flags }, near))),
        }
    }

    /// Sends the last data with a FIN, and the SYN of a new connection of the same four-tuple in the same batch.
    fn replace(&mut self, index: usize) {
        let Self { rng, conversations, link, .. } = self;
        let Some(Conversation { peer, stream, made, state, .. }) = conversations.get_mut(index) else {
            return;
        };
        let flags = Flags { fin: true, ack: true, ..Flags::default() };
        let last = RawSegment { flags, window: u16::MAX, payload: &[0; 100], ..RawSegment::default() };
        link.inject(&peer.segment(&last));
        let mut successor = RawPeer::new(*peer.path(), rng.random(), true);
        successor.clock = peer.clock.wrapping_add(1);
        link.inject(&successor.syn());
        *peer = successor;
        stream.clear();
        (*made, *state) = (0, 0);
    }

    fn begin_campaign(&mut self) {
        let index = self.rng.random_range(0..self.conversations.len().max(1));
        self.campaign = if self.rng.random_bool(0.5) {
            let step = self.rng.random_range(0..4);
            let end = if self.rng.random_bool(0.5) { Behavior::CLOSED_WINDOW } else { Behavior::SILENT };
            self.campaign = Some(Campaign::FrameExhaustion { left: Campaign::EXHAUSTION, step, end });
            // Earlier segments may have broken the old connections.
            self.conversations.clear();
            while self.conversations.len() < self.config.connections.max(Campaign::LEAST_CONNECTIONS) {
                self.open();
            }
            self.campaign
        } else if let Some(conversation) = self.conversations.get_mut(index) {
            conversation.behavior = Behavior::CALM;
            let port = conversation.peer.path().flow.local.port();
            Some(Campaign::Trickle { port, left: self.rng.random_range(10..60) })
        } else {
            None
        };
    }

    /// The next action of a campaign.
    fn continue_campaign(&mut self, campaign: Campaign) {
        self.campaign = match campaign {
            Campaign::Trickle { port, left } => {
                let index = self.conversations.iter().position(|c| c.peer.path().flow.local.port() == port);
                if let Some(index) = index {
                    self.send(index, 1, 1);
                    self.acknowledge(index);
                }
                index.filter(|_| left > 0).map(|_| Campaign::Trickle { port, left: left - 1 })
            }
            Campaign::FrameExhaustion { left, step, end } => {
                self.exhaust_frames(left, step, end);
                (left > 0).then(|| Campaign::FrameExhaustion { left: left - 1, step, end })
            }
        };
    }

    fn exhaust_frames(&mut self, left: u32, step: u32, end: Behavior) {
        // New connections claim the frames that older ones released.
        if left < Campaign::ENDS_FROM {
            self.open();
        }
        for index in 0..self.conversations.len() {
            let Some(conversation) = self.conversations.get_mut(index) else { continue };
            let few = conversation.peer.received < Campaign::FEW_BYTES;
            conversation.behavior = match left {
                0..Campaign::ENDS_FROM if few => Behavior::SILENT,
                0..Campaign::ENDS_FROM => end,
                _ if left + step * (index as u32) < Campaign::SILENT_FROM => Behavior::SILENT,
                _ => Behavior::CALM,
            };
            // After the victim's start-up frame.
            let requests = conversation.made == 0 || matches!(conversation.behavior.acks, Acks::All);
            if requests && conversation.peer.received > 0 {
                self.send_rest(index, Campaign::REQUEST_BYTES, Purpose::Request);
            } else {
                self.acknowledge(index);
            }
        }
    }

    fn act(&mut self) {
        self.config.actions -= 1;
        self.answers = 0;
        if self.campaign.is_none() && self.rng.random_bool(Campaign::PROBABILITY) {
            self.begin_campaign();
        }
        if let Some(campaign) = self.campaign {
            return self.continue_campaign(campaign);
        }
        let count = self.conversations.len();
        let index = if count == 0 { 0 } else { self.rng.random_range(0..count) };
        let synchronized = self.conversations.get(index).is_some_and(|c| c.peer.has_peer_syn());
        if let Some(conversation) = self.conversations.get_mut(index) {
            conversation.peer.clock = conversation.peer.clock.wrapping_add(1);
        }
        match self.rng.random_range(0..100) {
            0..15 => self.open(),
            _ if !synchronized => self.open(),
            15..25 => {
                let behavior = Self::draw_behavior(&mut self.rng);
                if let Some(conversation) = self.conversations.get_mut(index) {
                    conversation.behavior = behavior;
                }
                self.acknowledge(index);
            }
            25..45 => self.acknowledge(index),
            45..55 => {
                let len = self.rng.random_range(1..8);
                self.send(index, len, 1);
            }
            55..72 => {
                let len = 1 << self.rng.random_range(0..15);
                let cut = self.rng.random_range(8..=SEGMENT);
                self.send(index, len, cut);
            }
            72..84 => self.send_out_of_order(index, true),
            84..92 => self.send_out_of_order(index, false),
            _ => self.control(index),
        }
    }

    /// The address of this host.
    pub fn address(&self) -> SocketAddr {
        self.config.path.flow.local
    }
}

impl Node for HostileHost {
    fn turn(&mut self, now: Instant) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        let received = self.link.receive(&mut batch, 64);
        for frame in batch.drain(..) {
            if let Ok(Inbound::Tcp(segment)) = wire::parse(&self.link, &frame) {
                self.receive(&segment);
            }
            self.link.recycle(frame);
        }
        self.batch = batch;
        while self.config.actions > 0 && self.next <= now {
            self.act();
            self.next = now + self.pause();
        }
        received > 0
    }

    fn next_deadline(&self) -> Option<Instant> {
        (self.config.actions > 0).then_some(self.next)
    }
}
