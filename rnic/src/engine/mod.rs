//! [`Engine`]: the whole software RNIC, sans-IO: TCP and MPA below, queue pairs above.
//!
//! It owns the [`Stack`] and the [`Rnic`], runs them, and passes between them the work that neither may do inside a
//! call of the other. Time, frames and memory come from the caller; results go to completion rings and to the two
//! event queues. The caller invokes [`turn`](Engine::turn) when frames may have arrived or
//! [`next_deadline`](Engine::next_deadline) has passed, and [`transmit`](Engine::transmit) after verbs.

mod changes;
mod cm;
mod peers;
mod streaming;

use std::{collections::VecDeque, sync::Arc};

use xwarp_tcp::{
    framing::{FramingConfig, FramingCounters},
    link::{Batch, Link, RxFrame},
    secret::Secret,
    stack::{Polling, Stack, StackConfig},
    tcp::{self, TcpConfig},
    time::{Duration, Instant},
    ulp::ConnId,
};

pub use self::cm::ConnectParams;
use self::peers::Peers;
use crate::rnic::{
    AsyncEvent, CmEvent, DdpCounters, Deferred, Limits, Notify, QpId, RdmapCounters, Registry, ResourceError,
    Rnic,
};

/// Largest number of frames received in one turn, which bounds the time until the turn transmits.
const BATCH: usize = 64;

/// Longest life of a connection after its queue pair has ended: the time for the Terminate and the FIN to reach the
/// peer despite losses. It does not depend on what the peer sends. Equal to TCP's default user timeout.
const TEARDOWN_LIMIT: Duration = Duration::from_secs(30);

/// Longest orderly close. The peer can delay posted work without limit while it answers: an initiator by never sending
/// the first FPDU (RFC 5044 section 7.1.2), or any peer by never answering an RDMA Read.
const CLOSE_LIMIT: Duration = Duration::from_mins(5);

/// Settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Seed of sequence numbers and of memory keys, which are derived independently of each other.
    pub secret: Secret,
    /// TCP settings of new connections.
    pub tcp: TcpConfig,
    /// Framing of connections that have none of their own.
    pub framing: FramingConfig,
    /// Largest number of connections of all kinds.
    pub most_connections: usize,
    /// Limits of objects and queue sizes.
    pub limits: Limits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            secret: Secret::from_number(0),
            tcp: TcpConfig::default(),
            framing: FramingConfig::default(),
            most_connections: StackConfig::default().most_connections,
            limits: Limits::default(),
        }
    }
}

/// Statistics of one queue pair.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct QpStatistics {
    /// RDMAP's counters, since the queue pair was created.
    pub rdmap: RdmapCounters,
    /// DDP's counters, since the queue pair was created.
    pub ddp: DdpCounters,
    /// TCP's state of the connection: round-trip time, congestion window, retransmissions. `None` without one.
    pub tcp: Option<tcp::Info>,
    /// MPA's counters of the connection. `None` without one.
    pub framing: Option<FramingCounters>,
}

/// One software RNIC.
#[derive(Debug)]
pub struct Engine {
    stack: Stack<Rnic>,
    rnic: Rnic,
    framing: FramingConfig,
    peers: Peers,
    /// Connections whose queue pairs have ended, with the times at which they are reset if they still exist, in time
    /// order.
    teardowns: VecDeque<(Instant, ConnId)>,
    /// Connections in an orderly close, in the same form.
    closes: VecDeque<(Instant, ConnId)>,
    /// Received frames of the turn; kept to reuse the allocation.
    batch: Batch,
}

impl Engine {
    /// Creates an engine without objects or connections.
    pub fn new(config: EngineConfig) -> Self {
        let [_, keys] = config.secret.split();
        let registry = Arc::new(Registry::new(config.limits.clone(), &keys));
        Self::over(registry, config)
    }

    /// Creates an engine over the objects of `registry`, which engines share. The limits, and the secret of the keys, are the
    /// registry's.
    pub fn over(registry: Arc<Registry>, config: EngineConfig) -> Self {
        let EngineConfig { secret, tcp, framing, most_connections, limits: _ } = config;
        let [sequence_numbers, _] = secret.split();
        Self {
            stack: Stack::new(StackConfig {
                secret: sequence_numbers,
                tcp,
                most_connections,
                ..StackConfig::default()
            }),
            rnic: Rnic::new(registry),
            framing,
            peers: Peers::default(),
            teardowns: VecDeque::new(),
            closes: VecDeque::new(),
            batch: Batch::with_capacity(BATCH),
        }
    }

    /// Calls `notify` for each new connection event or asynchronous event.
    pub fn on_event(&mut self, notify: Arc<dyn Notify>) {
        self.rnic.on_event(notify);
    }

    /// Records how the application polls.
    pub fn set_polling(&mut self, polling: Polling) {
        self.stack.set_polling(polling);
    }

    /// Runs one turn: receives a batch of frames, runs due timers, and transmits as far as there is room. If no frame
    /// was received and no sleeping application was just woken, pending acknowledgements are sent. Returns whether a
    /// frame was received.
    pub fn turn(&mut self, now: Instant, link: &mut dyn Link) -> bool {
        let received = self.batch.fill(link, BATCH);
        while !self.batch.is_empty() {
            self.stack.receive_run(now, link, &mut self.batch, &mut self.rnic);
            self.run_deferred(now, link);
        }
        if !received {
            self.stack.catch_up(now, link, &mut self.rnic);
            self.run_deferred(now, link);
            // The application that the last turn woke will soon post a reply or poll again.
            if !self.rnic.just_woke() {
                self.stack.idle();
            }
        }
        if self.is_due(now) || self.wants_to_transmit() {
            self.transmit(now, link);
        } else {
            link.flush();
        }
        received
    }

    /// Handles one received frame, for callers that receive frames themselves; [`Self::turn`] does this for others.
    pub fn receive(&mut self, now: Instant, link: &mut dyn Link, frame: RxFrame) {
        self.stack.receive(now, link, frame, &mut self.rnic);
        self.run_deferred(now, link);
    }

    /// Runs the timers that are due and transmits as far as the link has room. Kicks the link.
    pub fn transmit(&mut self, now: Instant, link: &mut dyn Link) {
        if self.is_due(now) {
            self.run_timers(now, link);
        }
        if let Some(conn) = self.rnic.take_only_wake() {
            self.stack.transmit_woken(now, link, conn, &mut self.rnic);
        } else {
            self.run_deferred(now, link);
            self.stack.transmit(now, link, &mut self.rnic);
        }
        self.run_deferred(now, link);
    }

    #[inline(never)]
    fn run_timers(&mut self, now: Instant, link: &mut dyn Link) {
        self.stack.on_timer(now, link, &mut self.rnic);
        self.reset_overdue(now);
    }

    /// Latest time for the next call of [`Self::turn`].
    pub fn next_deadline(&self) -> Option<Instant> {
        // No thread may sleep before the next turn catches up.
        if self.stack.has_postponed() {
            return Some(Instant::ZERO);
        }
        let mut next = self.stack.next_deadline();
        for list in [&self.teardowns, &self.closes] {
            if let Some((at, _)) = list.front() {
                next = Some(next.map_or(*at, |next| next.min(*at)));
            }
        }
        next
    }

    /// Whether a timer is due.
    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        let overdue = |list: &VecDeque<(Instant, ConnId)>| list.front().is_some_and(|(at, _)| *at <= now);
        self.stack.is_due(now) || overdue(&self.teardowns) || overdue(&self.closes)
    }

    /// Resets the connections that still exist [`TEARDOWN_LIMIT`] after their queue pairs ended, or [`CLOSE_LIMIT`] after
    /// an orderly close began, and drops entries of closed ones.
    fn reset_overdue(&mut self, now: Instant) {
        for list in [&mut self.teardowns, &mut self.closes] {
            while let Some((at, conn)) = list.front().copied() {
                if at <= now {
                    self.stack.abort(conn);
                } else if self.stack.info(conn).is_some() {
                    break;
                }
                list.pop_front();
            }
        }
    }

    /// Whether [`Self::transmit`] has work: verbs left some since its last call, or the link had no room for all of
    /// it.
    pub fn wants_to_transmit(&self) -> bool {
        self.rnic.has_deferred() || self.stack.wants_to_transmit()
    }

    /// The TCP stack, for its connections and counters.
    pub fn stack(&self) -> &Stack<Rnic> {
        &self.stack
    }

    /// The RNIC, for the verbs that read its objects.
    pub fn rnic(&self) -> &Rnic {
        &self.rnic
    }

    /// The RNIC, for the verbs that concern it alone: creating and destroying objects, posting.
    pub fn rnic_mut(&mut self) -> &mut Rnic {
        &mut self.rnic
    }

    /// Statistics of one queue pair: its own counters, and those of its connection while it has one.
    pub fn qp_statistics(&self, qp: QpId) -> Result<QpStatistics, ResourceError> {
        let (stream, conn) = self.rnic.stream_counters(qp)?;
        let tcp = conn.and_then(|conn| self.stack.info(conn));
        let framing = conn.and_then(|conn| self.stack.framing_counters_of(conn));
        Ok(QpStatistics { rdmap: stream.rdmap, ddp: stream.ddp, tcp, framing })
    }

    /// Executes the work that the RNIC deferred to the engine. Most calls find none.
    #[inline]
    fn run_deferred(&mut self, now: Instant, link: &mut dyn Link) {
        if self.rnic.has_deferred() {
            self.execute_all(now, link);
        }
    }

    #[inline(never)]
    fn execute_all(&mut self, now: Instant, link: &mut dyn Link) {
        while let Some(work) = self.rnic.next_deferred() {
            self.execute(now, link, work);
        }
    }

    fn execute(&mut self, now: Instant, link: &mut dyn Link, work: Deferred) {
        match work {
            Deferred::Wake(conn) => self.stack.wake(conn),
            Deferred::Ended(conn) => self.teardowns.push_back((now + TEARDOWN_LIMIT, conn)),
            Deferred::Abort(conn) => self.stack.abort(conn),
            Deferred::Close(conn) => {
                self.stack.close_when_sent(conn);
                self.closes.push_back((now + CLOSE_LIMIT, conn));
            }
            Deferred::Resume(conn) => self.stack.resume(now, link, conn, &mut self.rnic),
            Deferred::Refilled(srq) => {
                while let Some(conn) = self.rnic.next_starved(srq) {
                    self.stack.resume(now, link, conn, &mut self.rnic);
                }
            }
            Deferred::Retry(qp) => self.retry(now, link, qp),
            Deferred::Learned(peer, lacks) => self.peers.remember(now, peer, lacks),
        }
    }

    /// Whether [`Self::next_cm_event`] or [`Self::next_async_event`] has an event.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.rnic.has_events()
    }

    /// The next event of a connection.
    pub fn next_cm_event(&mut self) -> Option<CmEvent> {
        self.rnic.next_cm_event()
    }

    /// The next asynchronous event.
    pub fn next_async_event(&mut self) -> Option<AsyncEvent> {
        self.rnic.next_async_event()
    }
}
