//! All connections of one engine: [`Stack`] finds the connection of a frame, runs its TCP and its MPA,
//! and pulls segments out of them while the link has room. The verbs engine calls it, with the upper
//! layer as an argument; it keeps no reference to anything.
//!
//! One call of each kind makes a turn: [`Stack::receive`] for each frame of a batch, [`Stack::transmit`],
//! [`Stack::on_timer`] when [`Stack::next_deadline`] has passed, and [`Stack::idle`] when a turn received
//! nothing.

mod closing;
mod counters;
mod error;
mod half_open;
mod listen;
mod paths;
mod timers;

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
};

use slab::Slab;

pub use self::{
    counters::StackCounters,
    error::{AcceptError, ConnectError, ListenError},
};
use self::{half_open::HalfOpens, listen::Listener, paths::Paths, timers::Timers};
use crate::{
    link::{FrameWriter, Link, RxFrame, Steer},
    mpa::{self, AcceptParams, MpaConfig, Session},
    secret::Secret,
    seq::StreamOffset,
    tcp::{self, Connection, Filled, IsnKey, Sent, Source, TcpConfig, Tuning},
    time::Instant,
    ulp::{CloseReason, ConnId, Event, ListenerId, Ulp},
    wire::{self, Flow, IcmpError, Inbound, Mac, Malformed, Path, Segment},
};

/// Segments that one connection may send before the next one has its turn.
const TURN_SEGMENTS: usize = 32;

/// See [`Stack::most_in_vain`].
const MOST_IN_VAIN: usize = 64;

/// What a receive frame holds at least of a peer that sends full segments: Ethernet's 1500 bytes less headers.
const FRAME_BYTES: usize = 1400;

/// Resets waiting for a frame; more are not answered (RFC 9293 section 3.10.7.1 asks for each, but
/// nobody may make us remember an unbounded number).
const MOST_RESETS: usize = 64;

/// Settings of a stack.
#[derive(Debug, Clone)]
pub struct StackConfig {
    /// What initial sequence numbers are drawn from.
    pub secret: Secret,
    /// What every connection starts with.
    pub tcp: TcpConfig,
    /// Connections at most, of all kinds; more are refused.
    pub most_connections: usize,
    /// SYNs that are answered and not confirmed, at most, over all listeners. For one more the oldest is forgotten: at
    /// `n` SYNs a second an honest peer has `most_half_open / n` seconds to confirm.
    pub most_half_open: usize,
    /// Connections in TIME-WAIT at most. For one more the oldest ends early.
    pub most_time_wait: usize,
    /// Bytes that all connections together may hold for FPDUs that cannot be placed or delivered yet; for one
    /// alone, [`MpaConfig::hold_bytes`] is the limit. Beyond it, what is not next in order counts as lost.
    pub most_held_bytes: usize,
}

impl Default for StackConfig {
    fn default() -> Self {
        Self {
            secret: Secret::from_number(0),
            tcp: TcpConfig::default(),
            most_connections: 32_768,
            most_half_open: 4096,
            most_time_wait: 4096,
            most_held_bytes: 64 << 20,
        }
    }
}

/// What an initiator asks for in its MPA Request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectParams {
    /// RDMA Reads that we can serve at once.
    pub ird: u16,
    /// RDMA Reads that we want to have outstanding.
    pub ord: u16,
    /// Bytes for the application of the peer.
    pub private_data: Vec<u8>,
}

/// One connection: its TCP, the MPA on it, and where it stands with the stack.
#[derive(Debug)]
struct Slot<P> {
    generation: u32,
    tcp: Connection,
    mpa: Session<P>,
    /// Its part of [`Stack::held_bytes`].
    held: usize,
    /// The listener it came to; counted in that listener's backlog until it is accepted or gone.
    pending_at: Option<ListenerId>,
    /// The timer entry that counts.
    scheduled: Option<Instant>,
    /// It is in the ready list.
    ready: bool,
    /// It is in the list of connections that may owe an ACK.
    owes_ack: bool,
    /// The peer's FIN was passed up.
    peer_closed: bool,
    /// [`Event::Closed`] was passed up: only TCP's TIME-WAIT keeps the slot.
    told_closed: bool,
}

/// The connections, listeners and timers of one engine.
pub struct Stack<U: Ulp> {
    config: StackConfig,
    /// What connections begin with: that of `config`, as far as the link allows.
    tcp: Arc<TcpConfig>,
    slots: Slab<Slot<U::Placed>>,
    next_generation: u32,
    flows: HashMap<Flow, u32>,
    listeners: Slab<Listener>,
    timers: Timers,
    paths: Paths,
    half_open: HalfOpens,
    /// Connections that entered TIME-WAIT, the oldest first.
    time_waiting: VecDeque<ConnId>,
    /// Connections that may have something to send, in turn.
    ready: VecDeque<u32>,
    /// Connections that received something since the last idle turn.
    owing: Vec<u32>,
    resets: VecDeque<Segment>,
    /// See [`Stack::held_bytes`].
    held: usize,
    isn: IsnKey,
    counters: StackCounters,
    /// Sums over connections that are gone.
    closed_tcp: tcp::Counters,
    closed_mpa: mpa::Counters,
}

impl<U: Ulp> fmt::Debug for Stack<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (connections, listeners) = (self.slots.len(), self.listeners.len());
        f.debug_struct("Stack")
            .field("connections", &connections)
            .field("listeners", &listeners)
            .finish_non_exhaustive()
    }
}

/// MPA over the upper layer as TCP sees it.
struct MpaSource<'a, U: Ulp> {
    now: Instant,
    emss: usize,
    mpa: &'a mut Session<U::Placed>,
    ulp: &'a mut U,
    conn: ConnId,
}

impl<U: Ulp> Source for MpaSource<'_, U> {
    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled {
        self.mpa.fill(self.now, self.ulp, self.conn, offset, self.emss, out)
    }
}

impl<U: Ulp> Stack<U> {
    /// A stack without connections.
    pub fn new(config: StackConfig) -> Self {
        Self {
            isn: IsnKey::new(&config.secret),
            tcp: Arc::new(config.tcp),
            config,
            slots: Slab::new(),
            next_generation: 0,
            flows: HashMap::new(),
            listeners: Slab::new(),
            timers: Timers::default(),
            paths: Paths::default(),
            half_open: HalfOpens::default(),
            time_waiting: VecDeque::new(),
            ready: VecDeque::new(),
            owing: Vec::new(),
            resets: VecDeque::new(),
            held: 0,
            counters: StackCounters::default(),
            closed_tcp: tcp::Counters::default(),
            closed_mpa: mpa::Counters::default(),
        }
    }

    /// Starts to open a connection; what becomes of it comes as events. `path.flow.local` names the
    /// port that the caller has reserved.
    pub fn connect(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        path: Path,
        mpa: MpaConfig,
        params: ConnectParams,
    ) -> Result<ConnId, ConnectError> {
        if self.flows.contains_key(&path.flow) {
            return Err(ConnectError::AddressInUse);
        }
        self.fit_window(link);
        self.make_room(link);
        if self.slots.len() >= self.config.most_connections {
            return Err(ConnectError::TooMany(self.config.most_connections));
        }
        let mpa = Session::initiator(now, mpa, params.private_data, params.ird, params.ord)?;
        link.steer(Steer::Flow(path.flow))?;
        let isn = self.isn.isn(now, &path.flow);
        let mut tcp = Connection::connect(now, &self.tcp, path, isn);
        self.adopt_path(now, &mut tcp);
        self.counters.active_opens += 1;
        Ok(self.insert(path.flow, tcp, mpa, None))
    }

    fn insert(
        &mut self,
        flow: Flow,
        tcp: Connection,
        mpa: Session<U::Placed>,
        pending_at: Option<ListenerId>,
    ) -> ConnId {
        let generation = self.next_generation;
        self.next_generation = generation.wrapping_add(1);
        let index = self.slots.insert(Slot {
            generation,
            tcp,
            mpa,
            held: 0,
            pending_at,
            scheduled: None,
            ready: false,
            owes_ack: false,
            peer_closed: false,
            told_closed: false,
        }) as u32;
        self.flows.insert(flow, index);
        self.make_ready(index);
        ConnId { index, generation }
    }

    fn slot(&mut self, conn: ConnId) -> Option<&mut Slot<U::Placed>> {
        self.slots.get_mut(conn.index as usize).filter(|s| s.generation == conn.generation && !s.told_closed)
    }

    /// Answers a request: the MPA Reply goes out, and [`Event::Established`] comes before this returns.
    pub fn accept(
        &mut self,
        now: Instant,
        conn: ConnId,
        params: AcceptParams,
        ulp: &mut U,
    ) -> Result<(), AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        let path = *slot.tcp.path();
        slot.mpa.accept(now, ulp, conn, &path, params)?;
        self.no_longer_pending(conn.index);
        self.make_ready(conn.index);
        Ok(())
    }

    /// Refuses a request with bytes for the peer's application, and closes.
    pub fn reject(&mut self, now: Instant, conn: ConnId, private_data: &[u8]) -> Result<(), AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        slot.mpa.reject(now, private_data)?;
        self.no_longer_pending(conn.index);
        self.make_ready(conn.index);
        Ok(())
    }

    /// Changes settings of one connection, from now on.
    pub fn tune(&mut self, now: Instant, conn: ConnId, tuning: &Tuning) {
        if let Some(slot) = self.slot(conn) {
            slot.tcp.tune(now, tuning);
            self.make_ready(conn.index);
        }
    }

    /// What every connection begins with of that.
    pub fn tuning_defaults(&self) -> Tuning {
        self.tcp.tuning()
    }

    /// No window is larger than what the link can receive: of all frames, each holds a segment at most.
    fn fit_window(&mut self, link: &dyn Link) {
        let most = u32::try_from(link.rx_frames().saturating_mul(FRAME_BYTES)).unwrap_or(u32::MAX);
        if self.tcp.receive_window > most {
            Arc::make_mut(&mut self.tcp).receive_window = most;
        }
    }

    /// The upper layer has something to pull.
    pub fn wake(&mut self, conn: ConnId) {
        if self.slot(conn).is_some() {
            self.make_ready(conn.index);
        }
    }

    /// A receive was posted: what was withheld is offered again.
    pub fn resume(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) {
        let Some(slot) = self.slot(conn) else { return };
        slot.mpa.resume(now, ulp, conn, link);
        slot.tcp.withheld(slot.mpa.held_bytes());
        self.settle(now, link, conn.index, None, ulp);
    }

    /// Closes at once with a reset; [`Event::Closed`] follows from [`Stack::transmit`].
    pub fn abort(&mut self, conn: ConnId) {
        if let Some(slot) = self.slot(conn) {
            slot.tcp.abort();
            self.make_ready(conn.index);
        }
    }

    /// Takes a frame that came in.
    pub fn receive(&mut self, now: Instant, link: &mut dyn Link, frame: RxFrame, ulp: &mut U) {
        self.counters.frames_in += 1;
        match wire::parse(link, &frame) {
            Ok(Inbound::Tcp(segment)) => self.receive_segment(now, link, &segment, frame, ulp),
            Ok(Inbound::Icmp(error)) => {
                link.recycle(frame);
                self.receive_icmp(now, link, error, ulp);
            }
            Ok(Inbound::Other) => {
                self.counters.foreign += 1;
                link.recycle(frame);
            }
            Err(reason) => {
                self.counters.malformed += 1;
                self.counters.bad_checksum +=
                    u64::from(matches!(reason, Malformed::Checksum | Malformed::IpChecksum));
                link.recycle(frame);
            }
        }
    }

    fn receive_segment(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        segment: &Segment,
        frame: RxFrame,
        ulp: &mut U,
    ) {
        self.counters.partial_checksum += u64::from(segment.partial_checksum);
        self.make_way_for_syn(link, segment);
        let known = self.flows.get(&segment.flow).copied();
        let Some(index) = known.or_else(|| self.receive_stranger(now, link, segment)) else {
            return link.recycle(frame);
        };
        let Some(slot) = self.slots.get_mut(index as usize) else { return link.recycle(frame) };
        let conn = ConnId { index, generation: slot.generation };
        slot.tcp.follow_queue(segment.queue);
        let receipt = slot.tcp.receive(now, link, segment);
        if let Some(acked) = receipt.acked {
            ulp.acked(conn, acked);
        }
        match receipt.arrival {
            Some(arrival) => {
                let path = *slot.tcp.path();
                let spare = self.config.most_held_bytes.saturating_sub(self.held);
                if slot.mpa.take(now, ulp, conn, &path, link, arrival, frame, spare) {
                    slot.tcp.take(now, &arrival);
                } else {
                    self.counters.refused_payloads += 1;
                }
                slot.tcp.withheld(slot.mpa.held_bytes());
            }
            None => link.recycle(frame),
        }
        if !std::mem::replace(&mut slot.owes_ack, true) {
            self.owing.push(index);
        }
        self.settle(now, link, index, receipt.closed, ulp);
    }

    /// A segment of no connection. Returns the connection that it has made, if so.
    fn receive_stranger(&mut self, now: Instant, link: &mut dyn Link, segment: &Segment) -> Option<u32> {
        if self.half_open.holds(&segment.flow) {
            self.receive_half(now, link, segment);
        } else {
            self.receive_unknown(now, link, segment);
        }
        self.flows.get(&segment.flow).copied()
    }

    fn receive_icmp(&mut self, now: Instant, link: &mut dyn Link, error: IcmpError, ulp: &mut U) {
        let Some(&index) = self.flows.get(&error.flow) else { return };
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        self.counters.icmp_errors += 1;
        let closed = slot.tcp.icmp(now, &error);
        let conn = ConnId { index, generation: slot.generation };
        tell_soft_error(conn, &mut slot.tcp, ulp);
        self.settle(now, link, index, closed, ulp);
    }

    /// Runs what is due.
    pub fn on_timer(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        self.half_open_timer(now, link);
        while let Some((at, index)) = self.timers.due(now) {
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            if slot.scheduled != Some(at) {
                continue;
            }
            slot.scheduled = None;
            self.counters.timer_looks += 1;
            let conn = ConnId { index, generation: slot.generation };
            let due = slot.tcp.deadline().is_some_and(|d| d <= now);
            let closed = if due { slot.tcp.on_timer(now) } else { None };
            tell_soft_error(conn, &mut slot.tcp, ulp);
            if slot.mpa.deadline().is_some_and(|d| d <= now) {
                slot.mpa.on_timer(now, ulp, conn);
            }
            self.settle(now, link, index, closed, ulp);
        }
    }

    /// A turn received nothing: acknowledgements that waited for company go out with the next
    /// [`Stack::transmit`].
    pub fn idle(&mut self) {
        while let Some(index) = self.owing.pop() {
            if let Some(slot) = self.slots.get_mut(index as usize)
                && std::mem::take(&mut slot.owes_ack)
                && slot.tcp.flush_ack()
            {
                self.make_ready(index);
            }
        }
    }

    /// Sends all that is due and allowed, as far as the link has room; then kicks the link.
    pub fn transmit(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        self.transmit_resets(link);
        let mut in_vain = 0;
        while let Some(index) = self.ready.pop_front() {
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            slot.ready = false;
            let conn = ConnId { index, generation: slot.generation };
            let emss = slot.tcp.emss();
            let mut source = MpaSource { now, emss, mpa: &mut slot.mpa, ulp, conn };
            let sent = slot.tcp.transmit(now, link, &mut source, TURN_SEGMENTS);
            self.conclude(link, index, sent.closed, ulp);
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            self.timers.arm(index, earlier(slot.tcp.deadline(), slot.mpa.deadline()), &mut slot.scheduled);
            if sent.more || sent.starved {
                self.make_ready(index);
            }
            // A link that is full gets one flush, which takes completions; when that frees nothing, only
            // time helps.
            in_vain = match sent {
                Sent { starved: false, .. } => 0,
                Sent { frames: 0, .. } => in_vain + 1,
                Sent { .. } => 1,
            };
            match in_vain {
                0 => {}
                1 => link.flush(),
                _ if in_vain > self.most_in_vain(link) => {
                    self.counters.starved += 1;
                    break;
                }
                _ => {}
            }
        }
        link.flush();
    }

    /// Connections in a row that may find no room before a turn ends. Where frames are too few for data, there are still
    /// enough for the ACKs of others; a ring that is full takes nobody's.
    fn most_in_vain(&self, link: &dyn Link) -> usize {
        let scarce = link.tx_available() <= self.config.tcp.reserve_frames as usize;
        if scarce { self.ready.len().min(MOST_IN_VAIN) } else { 1 }
    }

    fn transmit_resets(&mut self, link: &mut dyn Link) {
        while let Some(segment) = self.resets.pop_front() {
            if !wire::send_reset(link, &segment) {
                self.resets.push_front(segment);
                break;
            }
            self.counters.resets_sent += 1;
        }
    }

    /// When [`Stack::on_timer`] must be called next, if ever. A time that has passed means: now.
    pub fn next_deadline(&self) -> Option<Instant> {
        earlier(self.timers.next(), self.half_open.next())
    }

    /// Whether [`Stack::transmit`] has work, for instance because the link had no room for all of it.
    pub fn wants_to_transmit(&self) -> bool {
        !self.ready.is_empty() || !self.resets.is_empty()
    }

    /// Whether acknowledgements wait for [`Stack::idle`].
    pub fn owes_acks(&self) -> bool {
        !self.owing.is_empty()
    }

    fn make_ready(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && !slot.ready
        {
            slot.ready = true;
            self.ready.push_back(index);
        }
    }

    /// After anything that can change a connection: passes up what it came to, frees it when it is over,
    /// else sees to its timer and its turn to send.
    fn settle(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        closed: Option<CloseReason>,
        ulp: &mut U,
    ) {
        self.share_path(now, index);
        self.conclude(link, index, closed, ulp);
        if let Some(slot) = self.slots.get_mut(index as usize) {
            self.timers.arm(index, earlier(slot.tcp.deadline(), slot.mpa.deadline()), &mut slot.scheduled);
            self.make_ready(index);
        }
    }

    /// Passes the peer's FIN and the end of the connection up, each once. `closed` is what TCP just said.
    fn conclude(&mut self, link: &mut dyn Link, index: u32, closed: Option<CloseReason>, ulp: &mut U) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let conn = ConnId { index, generation: slot.generation };
        if !slot.peer_closed && slot.tcp.peer_closed() && !slot.mpa.holds_undelivered() {
            slot.peer_closed = true;
            slot.mpa.peer_closed(ulp, conn);
        }
        if let Some(error) = slot.mpa.failed()
            && !slot.told_closed
        {
            // A start-up that failed leaves nothing to say that the peer would understand.
            slot.tcp.abort_with(CloseReason::Startup(error));
        }
        if let Some(reason) = closed {
            slot.told_closed = true;
            slot.mpa.release(link);
            let waits = slot.tcp.state() == tcp::State::TimeWait;
            self.no_longer_pending(index);
            ulp.event(conn, Event::Closed(reason));
            if waits {
                self.time_waiting.push_back(conn);
                self.bound_time_wait(link, self.config.most_time_wait);
            }
        }
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let held = slot.mpa.held_bytes();
        self.held = self.held + held - std::mem::replace(&mut slot.held, held);
        if slot.tcp.is_closed() && slot.told_closed {
            self.remove(link, index);
        }
    }

    fn remove(&mut self, link: &mut dyn Link, index: u32) {
        let Some(mut slot) = self.slots.try_remove(index as usize) else { return };
        slot.tcp.release(link);
        slot.mpa.release(link);
        self.held -= slot.held;
        self.closed_tcp += slot.tcp.counters();
        self.closed_mpa += slot.mpa.counters();
        let flow = slot.tcp.flow();
        self.flows.remove(&flow);
        link.unsteer(Steer::Flow(flow));
    }

    /// The interface's next hop `old` has a new hardware address.
    pub fn next_hop_changed(&mut self, old: Mac, new: Mac) {
        for (_, slot) in &mut self.slots {
            if slot.tcp.path().next_hop_mac == old {
                slot.tcp.redirect(new);
            }
        }
    }
}

fn tell_soft_error<U: Ulp>(conn: ConnId, tcp: &mut Connection, ulp: &mut U) {
    if let Some(error) = tcp.take_soft_error() {
        ulp.event(conn, Event::SoftError(error));
    }
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
