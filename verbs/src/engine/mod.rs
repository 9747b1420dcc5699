//! [`Engine`]: the whole card as plain data, sans-IO: TCP and MPA below, queue pairs above.
//!
//! It owns the [`Stack`] and the [`Rnic`], runs them, and carries between them what neither may do inside
//! a call of the other. Time, frames and memory come from the caller; results go to completion rings, and
//! to the two event queues. Whoever owns it calls [`turn`](Engine::turn) when frames may have come in or
//! [`next_deadline`](Engine::next_deadline) has passed, and [`transmit`](Engine::transmit) after verbs.

mod changes;
mod cm;

use std::{collections::HashSet, net::IpAddr, sync::Arc};

use xwarp_tcp::{
    link::{Link, RxFrame},
    mpa::MpaConfig,
    secret::Secret,
    stack::{Stack, StackConfig},
    tcp::TcpConfig,
    time::Instant,
};

pub use self::cm::ConnectParams;
use crate::{
    ddp::STag,
    rnic::{
        self, AsyncEvent, CmEvent, CompletionRing, CqId, FastRegistration, Limits, Notify, PdId, PostError,
        QpAttributes, QpId, QpInfo, RecvRequest, Registration, ResourceError, Rnic, SrqAttributes, SrqId,
        WorkRequest,
    },
};

/// Frames received in one turn, so that nobody waits long for what comes after it.
const BATCH: usize = 64;

/// Settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// What sequence numbers and the keys of memory are drawn from, apart from each other.
    pub secret: Secret,
    /// What every connection's TCP starts with.
    pub tcp: TcpConfig,
    /// What every connection's MPA starts with, unless a verb says otherwise.
    pub mpa: MpaConfig,
    /// Connections at most, of all kinds.
    pub most_connections: usize,
    /// Objects and queue sizes at most.
    pub limits: Limits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            secret: Secret::from_number(0),
            tcp: TcpConfig::default(),
            mpa: MpaConfig::default(),
            most_connections: StackConfig::default().most_connections,
            limits: Limits::default(),
        }
    }
}

/// One software RNIC.
#[derive(Debug)]
pub struct Engine {
    stack: Stack<Rnic>,
    rnic: Rnic,
    mpa: MpaConfig,
    /// Peers that refused markers.
    markerless: HashSet<IpAddr>,
    /// Frames of the turn; kept for its room.
    batch: Vec<RxFrame>,
}

impl Engine {
    /// An engine without objects or connections.
    pub fn new(config: EngineConfig) -> Self {
        let EngineConfig { secret, tcp, mpa, most_connections, limits } = config;
        let [sequence_numbers, keys] = secret.split();
        Self {
            stack: Stack::new(StackConfig {
                secret: sequence_numbers,
                tcp,
                most_connections,
                ..StackConfig::default()
            }),
            rnic: Rnic::new(limits, &keys),
            mpa,
            markerless: HashSet::new(),
            batch: Vec::with_capacity(BATCH),
        }
    }

    /// Tells `notify` whenever a connection event or an asynchronous event is there to be taken.
    pub fn on_event(&mut self, notify: Arc<dyn Notify>) {
        self.rnic.on_event(notify);
    }

    /// One turn: takes a batch of frames that came in, does what is due, and sends what there is room for. When
    /// nothing came in and no sleeping application was just woken, acknowledgements that waited for data to ride on go.
    /// Whether anything came in.
    pub fn turn(&mut self, now: Instant, link: &mut dyn Link) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        let received = link.receive(&mut batch, BATCH) > 0;
        for frame in batch.drain(..) {
            self.receive(now, link, frame);
        }
        self.batch = batch;
        if !received {
            self.settle(now, link);
            // Whoever was woken by the last turn answers in a moment, or polls again.
            if !self.rnic.just_woke() {
                self.stack.idle();
            }
        }
        self.transmit(now, link);
        received
    }

    /// Takes a frame that came in, for those who look at each of them; otherwise [`Self::turn`] does.
    pub fn receive(&mut self, now: Instant, link: &mut dyn Link, frame: RxFrame) {
        self.stack.receive(now, link, frame, &mut self.rnic);
        self.settle(now, link);
    }

    /// Does what is due by now, and sends what there is to send and room for. Kicks the link.
    pub fn transmit(&mut self, now: Instant, link: &mut dyn Link) {
        if self.next_deadline().is_some_and(|at| at <= now) {
            self.stack.on_timer(now, link, &mut self.rnic);
        }
        self.settle(now, link);
        self.stack.transmit(now, link, &mut self.rnic);
        self.settle(now, link);
    }

    /// When to call [`Self::turn`] or [`Self::transmit`], at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }

    /// Whether [`Self::transmit`] has work: something was posted since its last call, or the link had no room for all.
    pub fn wants_to_transmit(&self) -> bool {
        self.rnic.has_errands() || self.stack.wants_to_transmit()
    }

    /// The stack's own view: connections and counters.
    pub fn stack(&self) -> &Stack<Rnic> {
        &self.stack
    }

    /// What the card counted: RDMAP and DDP.
    pub fn counters(&self) -> &rnic::Counters {
        self.rnic.counters()
    }

    /// Does what the card left to do, until nothing is left.
    fn settle(&mut self, now: Instant, link: &mut dyn Link) {
        while self.rnic.has_errands() {
            while let Some(conn) = self.rnic.next_abort() {
                self.stack.abort(conn);
            }
            while let Some(conn) = self.rnic.next_resume() {
                self.stack.resume(now, link, conn, &mut self.rnic);
            }
            while let Some(conn) = self.rnic.next_wake() {
                self.stack.wake(conn);
            }
            self.retry_without_markers(now, link);
        }
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

/// Verbs that concern the card alone. What they refuse is said at [`Rnic`]'s methods of the same names.
#[expect(missing_docs, reason = "documented where they are done")]
impl Engine {
    pub fn limits(&self) -> &Limits {
        self.rnic.limits()
    }

    pub fn alloc_pd(&mut self) -> Result<PdId, ResourceError> {
        self.rnic.alloc_pd()
    }

    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), ResourceError> {
        self.rnic.dealloc_pd(pd)
    }

    pub fn register(&mut self, registration: Registration) -> Result<STag, ResourceError> {
        self.rnic.register(registration)
    }

    pub fn alloc_fast_region(&mut self, registration: FastRegistration) -> Result<STag, ResourceError> {
        self.rnic.alloc_fast_region(registration)
    }

    pub fn alloc_window(&mut self, pd: PdId) -> Result<STag, ResourceError> {
        self.rnic.alloc_window(pd)
    }

    pub fn dealloc_window(&mut self, key: STag) -> Result<(), ResourceError> {
        self.rnic.dealloc_window(key)
    }

    pub fn revoke(&mut self, key: STag) -> Result<(), ResourceError> {
        self.rnic.revoke(key)
    }

    pub fn deregister(&mut self, key: STag) -> Result<(), ResourceError> {
        self.rnic.deregister(key)
    }

    pub fn create_cq(
        &mut self,
        capacity: u32,
        notify: Option<Arc<dyn Notify>>,
    ) -> Result<(CqId, Arc<CompletionRing>), ResourceError> {
        self.rnic.create_cq(capacity, notify)
    }

    pub fn resize_cq(&mut self, cq: CqId, capacity: u32) -> Result<(), ResourceError> {
        self.rnic.resize_cq(cq, capacity)
    }

    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), ResourceError> {
        self.rnic.destroy_cq(cq)
    }

    pub fn create_srq(&mut self, attributes: &SrqAttributes) -> Result<SrqId, ResourceError> {
        self.rnic.create_srq(attributes)
    }

    pub fn query_srq(&self, srq: SrqId) -> Result<(SrqAttributes, usize), ResourceError> {
        self.rnic.query_srq(srq)
    }

    pub fn resize_srq(&mut self, srq: SrqId, max_wr: u32) -> Result<(), ResourceError> {
        self.rnic.resize_srq(srq, max_wr)
    }

    pub fn arm_srq_limit(&mut self, srq: SrqId, limit: u32) -> Result<(), ResourceError> {
        self.rnic.arm_srq_limit(srq, limit)
    }

    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), ResourceError> {
        self.rnic.destroy_srq(srq)
    }

    pub fn create_qp(&mut self, attributes: QpAttributes) -> Result<QpId, ResourceError> {
        self.rnic.create_qp(attributes)
    }

    pub fn query_qp(&self, qp: QpId) -> Result<QpInfo, ResourceError> {
        self.rnic.query_qp(qp)
    }

    pub fn reset_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        self.rnic.reset_qp(qp)
    }

    pub fn fail_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        self.rnic.fail_qp(qp)
    }

    pub fn destroy_qp(&mut self, qp: QpId) -> Result<(), ResourceError> {
        self.rnic.destroy_qp(qp)
    }

    pub fn post_send(&mut self, qp: QpId, request: &WorkRequest<'_>) -> Result<(), PostError> {
        self.rnic.post_send(qp, request)
    }

    pub fn post_recv(&mut self, qp: QpId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.rnic.post_recv(qp, request)
    }

    pub fn post_srq_recv(&mut self, srq: SrqId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        self.rnic.post_srq_recv(srq, request)
    }
}
