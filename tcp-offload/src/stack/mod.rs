//! All connections of one engine: [`Stack`] finds the connection of a frame, runs its TCP and its framing, and sends
//! segments while the link has room. The verbs engine calls it with the upper layer as an argument; the stack keeps no
//! reference to either.
//!
//! One call of each kind makes a turn: [`Stack::receive`] for each frame of a batch, [`Stack::transmit`],
//! [`Stack::on_timer`] when [`Stack::next_deadline`] has passed, and [`Stack::catch_up`] and [`Stack::idle`] when a turn
//! received nothing.

mod acks;
mod closing;
mod config;
mod counters;
mod error;
mod frames;
mod half_open;
mod holders;
mod holding;
mod icmp;
mod listen;
mod next_hops;
mod offload;
mod paths;
mod postponed;
mod receive;
mod recent;
mod run;
mod source;
mod strangers;
mod streaming;
#[cfg(test)]
mod testing;
mod timers;
mod turns;
#[cfg(test)]
mod twins;

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use rand::{RngCore, rngs::StdRng};
use slab::Slab;

use self::frames::Sweep;
pub use self::{
    acks::Polling,
    config::{ConnectParams, StackConfig},
    counters::{StackCounters, TableSizes},
    error::{AcceptError, ConnectError, ListenError},
    next_hops::{Lookup, NextHop},
};
use self::{
    closing::Reported,
    half_open::HalfOpens,
    holders::Holders,
    listen::{Listener, Pending},
    offload::ChecksumOffload,
    paths::Paths,
    recent::Recent,
    source::{FramingSource, Supply},
    timers::Timers,
    turns::{Turns, Work},
};
use crate::{
    framing::{AcceptParams, AnySession, FramingConfig, FramingCounters, either},
    keyed::{KeyedHash, KeyedMap},
    link::{Link, Steer},
    tcp::{Connection, IsnKey, Sent, TcpConfig, TcpCounters, Tuning, Wants},
    time::Instant,
    ulp::{CloseReason, ConnId, ListenerId, Ulp},
    wire::{self, Flow, Path, Segment},
};

/// Segments that one connection may send before the next one gets its turn.
const TURN_SEGMENTS: usize = 32;

/// Upper limit of [`Stack::most_starved`], in connections.
const MAX_STARVED: usize = 64;

/// Payload bytes that a receive chunk holds at least when the peer sends full segments: Ethernet's 1500 bytes less
/// headers, or a full chunk of a longer segment.
const FULL_CHUNK_BYTES: usize = 1400;

/// One connection: its TCP, its MPA session, and its state in the tables of the stack.
#[derive(Debug)]
struct ConnSlot<P> {
    /// Number of the connection in the stack's life; see [`ConnId::generation`].
    generation: u64,
    tcp: Connection,
    session: AnySession<P>,
    checksums: ChecksumOffload,
    supply: Supply,
    /// Share of this connection in [`Stack::held_bytes`].
    held: usize,
    /// Share of this connection in [`Stack::spilled_bytes`].
    spilled: usize,
    /// Place in the listener's backlog, until the request is answered or the connection has ended.
    pending: Option<Pending>,
    reported: Reported,
}

/// What may have changed a connection since its timer was armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Any,
    /// Predicted segments only. Before them, its timers were not due before `bound`.
    Predicted {
        bound: Option<Instant>,
    },
}

/// The connections, listeners and timers of one engine.
pub struct Stack<U: Ulp> {
    config: StackConfig,
    /// TCP settings of new connections: those of `config`, with the receive window limited by the link's frames.
    tcp: Arc<TcpConfig>,
    /// Boxed, so that no large value moves when the table grows, or leaves a hole in the heap.
    slots: Slab<Box<ConnSlot<U::Placed>>>,
    next_generation: u64,
    flows: KeyedMap<Flow, u32>,
    recent: Recent,
    listeners: BTreeMap<ListenerId, Listener>,
    next_listener: u64,
    timers: Timers,
    paths: Paths,
    /// Connections whose next hop must be looked up.
    lookups: next_hops::Lookups,
    half_open: HalfOpens,
    /// Connections that entered TIME-WAIT, oldest first.
    time_waiting: VecDeque<ConnId>,
    /// The next work of each connection.
    turns: Turns,
    polling: Polling,
    /// The connection with [postponed work](Stack::catch_up).
    postponed: Option<ConnId>,
    /// Free transmit chunks when they last were too few for a connection.
    free_at_shortage: usize,
    resets: VecDeque<Segment>,
    /// See [`Stack::held_bytes`].
    held: usize,
    holders: Holders,
    /// See [`Stack::spilled_bytes`].
    spilled: usize,
    sweep: Sweep,
    isn: IsnKey,
    /// Connection IDs and first message numbers of RDMA/TCP.
    random: StdRng,
    counters: StackCounters,
    /// Sums over connections that have been removed.
    closed_tcp: TcpCounters,
    closed_framing: FramingCounters,
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

impl<P: Copy + fmt::Debug> ConnSlot<P> {
    /// A time before which no timer of this connection is due, of TCP or of the framing. A connection that
    /// [allows the fast path](Self::allows_fast_path) (`fast`) has none of the framing.
    #[inline]
    fn deadline_bound(&self, fast: bool) -> Option<Instant> {
        let tcp = self.tcp.deadline_bound();
        debug_assert!(!fast || either!(&self.session => deadline()).is_none());
        if fast { tcp } else { earlier(tcp, either!(&self.session => deadline())) }
    }

    /// Whether nothing has to be reported, freed or accounted: the connection is open, has no waiting request, and uses
    /// no memory that connections share in either direction.
    #[inline]
    fn allows_fast_path(&self) -> bool {
        self.tcp.allows_fast_path()
            && self.pending.is_none()
            && self.reported == Reported::Nothing
            && (self.held | self.spilled) == 0
            && either!(&self.session => allows_fast_path())
    }
}

impl<P: Copy + fmt::Debug> ConnSlot<P> {
    /// The next work of the connection, unless it waits for free frames. Whether it [allows the fast path](Self::allows_fast_path)
    /// is known.
    fn next_work<U: Ulp<Placed = P>>(&self, fast: bool, polling: Polling, ulp: &U, conn: ConnId) -> Work {
        let sends = match self.tcp.wants_to_transmit() {
            Wants::Yes => true,
            Wants::NewData => {
                !(fast && self.supply == Supply::Dry) && either!(&self.session => has_data(ulp, conn))
            }
            Wants::Nothing => false,
        };
        if sends { Work::Send } else { self.next_ack(polling) }
    }
}

impl<U: Ulp> Stack<U> {
    /// A stack without connections. Settings of TCP that are out of range are [clamped](TcpConfig::clamped).
    pub fn new(config: StackConfig) -> Self {
        let config = StackConfig { tcp: config.tcp.clamped(), ..config };
        // The first secret is not used: it begins with the bytes that key the initial sequence numbers.
        let [_, flow_secret, half_open_secret, framing_secret] = config.secret.split();
        Self {
            isn: IsnKey::new(&config.secret),
            tcp: Arc::new(config.tcp),
            flows: KeyedMap::with_hasher(KeyedHash::new(&flow_secret)),
            recent: Recent::default(),
            half_open: HalfOpens::new(&half_open_secret),
            random: framing_secret.rng(),
            config,
            slots: Slab::new(),
            next_generation: 0,
            listeners: BTreeMap::new(),
            next_listener: 0,
            timers: Timers::default(),
            paths: Paths::default(),
            lookups: next_hops::Lookups::new(),
            time_waiting: VecDeque::new(),
            turns: Turns::default(),
            polling: Polling::No,
            postponed: None,
            free_at_shortage: 0,
            resets: VecDeque::new(),
            held: 0,
            holders: Holders::default(),
            spilled: 0,
            sweep: Sweep::default(),
            counters: StackCounters::default(),
            closed_tcp: TcpCounters::default(),
            closed_framing: FramingCounters::default(),
        }
    }

    /// Starts to open a connection; events report its progress. `path.flow.local` names the port that the caller has
    /// reserved.
    pub fn connect(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        path: Path,
        framing: impl Into<FramingConfig>,
        params: ConnectParams,
    ) -> Result<ConnId, ConnectError> {
        if self.has_connection(&path.flow) {
            return Err(ConnectError::AddressInUse);
        }
        if is_mapped(path.flow.local.ip()) || is_mapped(path.flow.remote.ip()) {
            return Err(ConnectError::MappedAddress);
        }
        self.fit_window(link);
        self.make_room(link);
        if self.slots.len() >= self.config.most_connections {
            return Err(ConnectError::TooMany(self.config.most_connections));
        }
        let isn = self.isn.isn(now, &path.flow);
        let mut tcp = Connection::connect(now, &self.tcp, path, isn);
        if !tcp.carries_segments() {
            return Err(ConnectError::SmallMtu(path.mtu));
        }
        let (framing, random) = (framing.into(), self.random());
        let ConnectParams { ird, ord, private_data } = params;
        let session = AnySession::initiator(framing, random, private_data, ird, ord)?;
        link.steer(Steer::Flow(path.flow))?;
        // A SYN of the same four-tuple, perhaps forged, must not prevent the application from connecting. The
        // steering rule of the half-open connection serves the new one.
        self.half_open.remove(&path.flow);
        self.adopt_path(now, &mut tcp);
        self.counters.active_opens += 1;
        Ok(self.insert(path.flow, tcp, session, None))
    }

    /// Whether a connection has this four-tuple, be it in TIME-WAIT.
    pub fn has_connection(&self, flow: &Flow) -> bool {
        self.flows.contains_key(flow)
    }

    fn insert(
        &mut self,
        flow: Flow,
        tcp: Connection,
        session: AnySession<U::Placed>,
        pending: Option<Pending>,
    ) -> ConnId {
        let generation = self.next_generation;
        self.next_generation += 1;
        let index = self.slots.insert(Box::new(ConnSlot {
            generation,
            tcp,
            session,
            checksums: ChecksumOffload::default(),
            supply: Supply::Unknown,
            held: 0,
            spilled: 0,
            pending,
            reported: Reported::Nothing,
        })) as u32;
        self.flows.insert(flow, index);
        // The path comes from a frame, or from a look-up that did not know the local port.
        self.lookups.insert(index, false);
        self.make_ready(index);
        ConnId { index, generation }
    }

    /// 128 unpredictable bits.
    fn random(&mut self) -> u128 {
        u128::from(self.random.next_u64()) << 64 | u128::from(self.random.next_u64())
    }

    fn slot(&mut self, conn: ConnId) -> Option<&mut ConnSlot<U::Placed>> {
        let slot = &mut **self.slots.get_mut(conn.index as usize)?;
        (slot.generation == conn.generation && slot.reported != Reported::Closed).then_some(slot)
    }

    /// Accepts a connection request: the MPA Reply is sent with the next [`Stack::transmit`], and
    /// [`Event::Established`](crate::ulp::Event::Established) is reported before this returns.
    pub fn accept(&mut self, conn: ConnId, params: AcceptParams, ulp: &mut U) -> Result<(), AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        let path = *slot.tcp.path();
        either!(&mut slot.session => accept(ulp, conn, &path, params))?;
        self.leave_backlog(conn.index);
        self.make_ready(conn.index);
        Ok(())
    }

    /// Rejects a connection request with private data for the peer's application, and closes the connection.
    pub fn reject(&mut self, now: Instant, conn: ConnId, private_data: &[u8]) -> Result<(), AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        either!(&mut slot.session => reject(private_data))?;
        slot.tcp.stop_reading(now);
        self.leave_backlog(conn.index);
        self.make_ready(conn.index);
        Ok(())
    }

    /// Changes settings of one open connection.
    pub fn tune(&mut self, now: Instant, conn: ConnId, tuning: &Tuning) {
        if let Some(slot) = self.slot(conn) {
            slot.tcp.tune(now, tuning);
            self.make_ready(conn.index);
        }
    }

    /// The part of the defaults that a new connection copies and [`Stack::tune`] changes.
    pub fn tuning_defaults(&self) -> Tuning {
        self.tcp.tuning()
    }

    /// Limits the receive window to what the link's receive chunks can hold.
    fn fit_window(&mut self, link: &dyn Link) {
        let bytes = FULL_CHUNK_BYTES.min(link.chunk_bytes());
        let most = u32::try_from(link.rx_capacity().saturating_mul(bytes)).unwrap_or(u32::MAX);
        if self.tcp.receive_window > most {
            Arc::make_mut(&mut self.tcp).receive_window = most;
        }
    }

    /// Records that the upper layer has something to send on this connection.
    pub fn wake(&mut self, conn: ConnId) {
        if let Some(slot) = self.slot(conn) {
            slot.supply = Supply::Announced;
            self.make_ready(conn.index);
        }
    }

    /// Offers withheld FPDUs to the upper layer again, after a receive was posted.
    pub fn resume(&mut self, now: Instant, link: &mut dyn Link, conn: ConnId, ulp: &mut U) {
        let Some(slot) = self.slot(conn) else { return };
        either!(&mut slot.session => resume(now, ulp, conn, link));
        slot.tcp.withheld(either!(&slot.session => window_bytes()));
        self.after_change(now, link, conn.index, None, ulp);
    }

    /// Aborts the connection with a reset; the next [`Stack::transmit`] reports
    /// [`Event::Closed`](crate::ulp::Event::Closed).
    pub fn abort(&mut self, conn: ConnId) {
        if let Some(slot) = self.slot(conn) {
            slot.tcp.abort();
            self.make_ready(conn.index);
        }
    }

    /// Sends everything that is pending and allowed while the link has room, then flushes the link.
    pub fn transmit(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        if self.wants_to_transmit() {
            self.transmit_resets(link);
            self.retry_waiting(link);
            self.transmit_ready(now, link, ulp);
        }
        link.flush();
    }

    /// Sends what is due on the connections that are ready, in turn.
    fn transmit_ready(&mut self, now: Instant, link: &mut dyn Link, ulp: &mut U) {
        let mut starved_in_a_row = 0;
        while let Some(index) = self.turns.next_send() {
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            let conn = ConnId { index, generation: slot.generation };
            let announced = slot.supply == Supply::Announced;
            if announced && self.send_fast(now, link, conn, ulp) {
                starved_in_a_row = 0;
                continue;
            }
            let Some(slot) = self.slots.get_mut(index as usize) else { continue };
            slot.tcp.allow_spill(self.config.most_spilled_bytes.saturating_sub(self.spilled));
            let emss = slot.tcp.emss();
            let mut source = FramingSource { now, emss, session: &mut slot.session, announced, ulp, conn };
            let sent = slot.tcp.transmit(now, link, &mut source, TURN_SEGMENTS);
            // The next turn sets the timer and the next work of the connection, when it catches up.
            if sent.is_all() && slot.tcp.has_postponed() {
                (slot.supply, starved_in_a_row) = (Supply::Dry, 0);
                continue;
            }
            match self.after_sending(now, link, index, sent, starved_in_a_row, ulp) {
                Some(starved) => starved_in_a_row = starved,
                None => break,
            }
        }
    }

    /// Updates the tables after a connection has sent. Returns the number of connections in a row that had no room, or `None` when
    /// the turn ends, because the link is full.
    #[inline(never)]
    fn after_sending(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        sent: Sent,
        mut starved_in_a_row: usize,
        ulp: &mut U,
    ) -> Option<usize> {
        if sent.short_of_frames {
            self.sweep.request(now);
        }
        let Some(slot) = self.slots.get_mut(index as usize) else { return Some(starved_in_a_row) };
        let fast = sent.closed.is_none() && slot.allows_fast_path();
        slot.supply = if sent.dry && fast { Supply::Dry } else { Supply::Unknown };
        if !fast {
            self.report_and_free(link, index, sent.closed, ulp);
        }
        let Some(slot) = self.slots.get_mut(index as usize) else { return Some(starved_in_a_row) };
        self.timers.arm(index, slot.deadline_bound(fast));
        let owes_ack = slot.has_idle_ack(self.polling);
        if sent.starved && sent.short_of_frames {
            self.free_at_shortage = link.tx_available();
            self.turns.set(index, Work::Frames);
        } else if sent.more || sent.starved {
            self.make_ready(index);
        } else if owes_ack && self.turns.work(index) == Work::Nothing {
            self.turns.set(index, Work::Ack);
        }
        // A full link is flushed once, which collects completions. When the flush frees nothing, the rest must wait
        // for a later turn.
        starved_in_a_row = match sent {
            Sent { starved: false, .. } => 0,
            Sent { frames: 0, .. } => starved_in_a_row + 1,
            Sent { .. } => 1,
        };
        match starved_in_a_row {
            0 => {}
            1 => {
                link.flush();
                if link.tx_available() > self.free_at_shortage {
                    self.retry_waiting(link);
                }
            }
            _ if starved_in_a_row > self.most_starved(sent.short_of_frames) => {
                self.counters.starved += 1;
                return None;
            }
            _ => {}
        }
        Some(starved_in_a_row)
    }

    /// Largest number of consecutive connections without room before the turn ends. When frames are too scarce for
    /// data, the reserve still serves the ACKs of other connections; a full ring accepts no frame at all.
    fn most_starved(&self, short_of_frames: bool) -> usize {
        if short_of_frames { self.turns.sends().min(MAX_STARVED) } else { 1 }
    }

    fn transmit_resets(&mut self, link: &mut dyn Link) {
        while let Some(segment) = self.resets.pop_front() {
            if !wire::send_reset(link, &segment, self.tcp.dscp, self.tcp.hop_limit) {
                self.resets.push_front(segment);
                break;
            }
            self.counters.resets_sent += 1;
        }
    }

    /// Whether [`Stack::transmit`] has work, for instance because the link had no room for all of it.
    pub fn wants_to_transmit(&self) -> bool {
        self.turns.sends() + self.turns.waiting() > 0 || !self.resets.is_empty()
    }

    fn make_ready(&mut self, index: u32) {
        self.turns.set(index, Work::Send);
    }

    /// Updates the tables after a connection may have changed: reports its end and frees it, or else arms its timer and
    /// records its next work.
    fn after_change(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        closed: Option<CloseReason>,
        ulp: &mut U,
    ) {
        let fast =
            closed.is_none() && self.slots.get(index as usize).is_some_and(|slot| slot.allows_fast_path());
        if !fast {
            self.settle(now, link, index, closed, ulp);
        }
        self.schedule(index, fast, Change::Any, ulp);
    }

    /// [`Self::after_change`] for a connection that [allows the fast path](ConnSlot::allows_fast_path) and has received predicted
    /// segments only. Before them, its timers were not due before `bound`.
    #[expect(clippy::inline_always, reason = "each of its two callers knows some of the arguments")]
    #[inline(always)]
    fn after_predicted(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        bound: Option<Instant>,
        ulp: &mut U,
    ) {
        if self.slots.get(index as usize).is_some_and(|slot| slot.tcp.has_mtu_news()) {
            return self.after_change(now, link, index, None, ulp);
        }
        self.schedule(index, true, Change::Predicted { bound }, ulp);
    }

    /// Arms the timer of a connection, and records its next work, unless it is known to have something to send. `fast`: whether it
    /// [allows the fast path](ConnSlot::allows_fast_path).
    #[expect(clippy::inline_always, reason = "each of its two callers knows some of the arguments")]
    #[inline(always)]
    fn schedule(&mut self, index: u32, fast: bool, change: Change, ulp: &U) {
        let Some(slot) = self.slots.get(index as usize) else { return };
        debug_assert!(!fast || slot.allows_fast_path());
        let bound = slot.deadline_bound(fast);
        if change != (Change::Predicted { bound }) {
            self.timers.arm(index, bound);
        }
        let conn = ConnId { index, generation: slot.generation };
        let work = match self.turns.work(index) {
            Work::Send => return,
            Work::Nothing | Work::Ack if change != Change::Any && slot.only_acknowledges() => {
                let work = slot.next_ack(self.polling);
                debug_assert_eq!(work, slot.next_work(fast, self.polling, ulp, conn));
                work
            }
            _ => slot.next_work(fast, self.polling, ulp, conn),
        };
        self.turns.set(index, work);
    }

    /// The part of [`Self::after_change`] for a connection that does not allow the fast path.
    fn settle(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        index: u32,
        closed: Option<CloseReason>,
        ulp: &mut U,
    ) {
        let rare = |s: &ConnSlot<_>| {
            s.tcp.has_mtu_news() || s.pending.is_some() || either!(&s.session => awaits_report())
        };
        if self.slots.get(index as usize).is_some_and(|slot| rare(slot)) {
            self.share_path(now, index);
            self.report_streaming(now, index, ulp);
            self.note_request(index);
        }
        self.report_and_free(link, index, closed, ulp);
        if let Some(slot) = self.slots.get_mut(index as usize)
            && !either!(&slot.session => is_reading())
        {
            slot.tcp.stop_reading(now);
        }
    }
}

/// Whether `ip` is an IPv4-mapped IPv6 address, which no packet may carry (RFC 4291 section 2.5.5.2).
fn is_mapped(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some())
}

#[inline]
fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (one, other) => one.or(other),
    }
}
