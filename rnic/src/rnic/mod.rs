//! [`Rnic`]: protection domains, keys, queues and queue pairs, and the state of every RDMAP stream.
//!
//! [`Rnic`] is the upper layer of [`xwarp_tcp::stack::Stack`]: it places and delivers received ULPDUs and supplies
//! the ULPDUs to send. It has no sockets and no clock. [`crate::engine::Engine`] owns both and passes on which
//! connections the stack has to wake, resume or reset.
//!
//! | module | owns |
//! |---|---|
//! | `work`, `requests` | work requests and completions; their constructors |
//! | `attributes` | attributes of objects, limits, errors of verbs |
//! | `registry` | protection domains, keys, completion queues, shared receive queues, which engines may share; ids of queue pairs |
//! | `engine_set` | some engines, by number |
//! | `keys` | the objects that Steering Tags name |
//! | `grant` | the memory and the access rights of a valid tag; each engine's cache of these |
//! | `resources` | creating, querying and destroying queue pairs; posting |
//! | `completion` | the completion ring |
//! | `send_queue`, `receive_queue` | requests between posting and completion |
//! | `receive_pool` | the receives of a shared receive queue |
//! | `slots` | the memory of these queues |
//! | `qp`, `phase` | a queue pair's state and the ways it ends |
//! | `deferred` | work for the engine |
//! | `placement`, `delivery` | writing ULPDUs to memory; completing messages in order |
//! | `coverage` | the filled bytes of a message |
//! | `transmission` | building ULPDUs from requests and responses |
//! | `rdma_tcp` | the codec of a connection with RDMA/TCP |
//! | `blame` | the request that a peer's Terminate blames |
//! | `local_work` | requests that manage local memory |
//! | `connection` | connection events |
//! | `counters` | counters of RDMAP and DDP |

mod attributes;
mod blame;
mod completion;
mod connection;
mod counters;
mod coverage;
mod deferred;
mod delivery;
mod engine_set;
mod events;
mod grant;
mod keys;
mod local_work;
mod phase;
mod pieces;
mod placement;
mod qp;
mod rdma_tcp;
mod receive_pool;
mod receive_queue;
mod registry;
mod requests;
mod resources;
mod send_queue;
mod slots;
mod sync;
pub(crate) mod table;
mod transmission;
mod work;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use xwarp_tcp::{
    seq::StreamOffset,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
};

pub use self::{
    attributes::{
        CmError, FastRegistration, Limits, NoReceive, Object, PostError, QpAttributes, QpInfo, QpState,
        QueuePairOptions, Registration, ResourceError, SrqAttributes,
    },
    completion::{CompletionRing, Notify},
    counters::{DdpCounters, RdmapCounters, RnicCounters, TerminateCounters},
    engine_set::{EngineSet, MAX_ENGINES},
    events::{AsyncEvent, CmEvent, PeerDepths, QpFault, RequestId, StreamId},
    placement::Placed,
    receive_pool::ReceivePool,
    registry::Registry,
    resources::IdleQueuePair,
    work::{
        Access, Binding, CqId, Opcode, Operation, Payload, PdId, RecvRequest, Remote, SendFlags, Sge, SrqId,
        WcStatus, WorkCompletion, WorkRequest,
    },
};
use self::{
    completion::Overflow,
    connection::Connections,
    counters::{StreamCounters, TerminateCount},
    deferred::DeferredWork,
    events::Events,
    grant::Keys,
    keys::User,
    phase::{Closes, Phase},
    placement::{Refused, Segment, Undescribed},
    qp::{Ending, QueuePair},
    send_queue::Progress,
    table::{PartTable, id},
};
pub(crate) use self::{
    connection::{Attempt, Lacks},
    deferred::Deferred,
};
use crate::{
    ddp::DdpError,
    memory::{AccessError, Memory},
    rdmap::{AtomicRequest, RdmapError},
    segment::{Quote, SegmentWriter},
};

id! {
    /// A queue pair.
    QpId
}

/// State that all queue pairs of this RNIC share.
pub(crate) struct Shared {
    keys: Keys,
    /// The number of this engine.
    engine: u16,
    starved: Starved,
    events: Events,
    terminates: TerminateCount,
    /// Completion queues that lost an entry; their queue pairs must fail.
    overflowed: Vec<CqId>,
    deferred: DeferredWork,
    /// A completion notified a sleeping application.
    woke: bool,
}

impl Shared {
    /// Adds an entry to a completion queue.
    #[expect(clippy::inline_always, reason = "see `CompletionRing::push`")]
    #[inline(always)]
    fn complete(&mut self, ring: &CompletionRing, cq: CqId, completion: WorkCompletion) {
        match ring.push(completion) {
            Ok(woke) => self.woke |= woke,
            Err(overflow) => self.overflow(cq, overflow),
        }
    }

    /// Records that a completion queue lost an entry. Each engine detects this when it adds its next entry.
    #[cold]
    fn overflow(&mut self, cq: CqId, Overflow { first, flushed }: Overflow) {
        if first {
            tracing::error!(cq = cq.number(), "completion queue overflow");
            self.events.push_async(AsyncEvent::CqOverflow { cq });
        }
        if (first || !flushed) && !self.overflowed.contains(&cq) {
            self.overflowed.push(cq);
        }
    }

    #[inline]
    fn wake(&mut self, conn: Option<ConnId>) {
        if let Some(conn) = conn {
            self.deferred.wake(conn);
        }
    }

    fn abort(&mut self, conn: Option<ConnId>) {
        self.deferred.extend(conn.map(Deferred::Abort));
    }

    /// Checks that the word of an atomic request is accessible and aligned (RFC 7306 section 8.2).
    fn check_atomic(&self, user: User, request: &AtomicRequest) -> Result<(), RdmapError> {
        let (memory, offset) = self.open_word(user, request)?;
        memory.load_u64(offset).map(|_| ()).map_err(atomic_error)
    }

    fn open_word(&self, user: User, request: &AtomicRequest) -> Result<(&Memory, usize), RdmapError> {
        let word = self.keys.open(user, request.stag, Access::REMOTE_ATOMIC, request.to, 8)?;
        // A word that spans two pieces of memory is not aligned in either.
        word.in_one_piece().ok_or(RdmapError::StreamCatastrophic)
    }

    /// Executes an atomic operation; returns the word's former value.
    fn atomic(&self, user: User, request: &AtomicRequest) -> Result<u64, RdmapError> {
        let (memory, offset) = self.open_word(user, request)?;
        memory
            .update_u64(offset, |word| Some(request.operation.apply(word)).filter(|new| *new != word))
            .map_err(atomic_error)
    }
}

fn atomic_error(error: AccessError) -> RdmapError {
    match error {
        AccessError::Unaligned { .. } => RdmapError::StreamCatastrophic,
        AccessError::OutOfBounds { .. } => RdmapError::Bounds,
        AccessError::ReadOnly | AccessError::Fault(_) => RdmapError::AccessRights,
    }
}

/// The RDMA part of a software RNIC.
pub struct Rnic {
    shared: Shared,
    /// Boxed, so that no large value moves when the table grows, or leaves a hole in the heap.
    qps: PartTable<QpId, Box<QueuePair>>,
    /// Counters of queue pairs that were destroyed.
    destroyed: StreamCounters,
    connections: Connections,
}

impl std::fmt::Debug for Rnic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rnic({} queue pairs, {} regions)", self.qps.len(), self.registry().regions())
    }
}

impl Rnic {
    /// Creates an RNIC without queue pairs, over the objects of `registry`.
    pub fn new(registry: Arc<Registry>) -> Self {
        Self {
            shared: Shared {
                engine: registry.next_engine(),
                starved: Starved::default(),
                keys: Keys::new(registry),
                events: Events::default(),
                terminates: TerminateCount::default(),
                overflowed: Vec::new(),
                deferred: DeferredWork::default(),
                woke: false,
            },
            qps: PartTable::new(),
            destroyed: StreamCounters::default(),
            connections: Connections::default(),
        }
    }

    /// Fails the queue pairs of overflowed completion queues; other queue pairs are not affected (RFC 5042 section
    /// 6.4.6). Their flushed work may make another completion queue overflow, which is then handled too.
    fn end_overflowed(&mut self) {
        while let Some(cq) = self.shared.overflowed.pop() {
            for qp in self.qps.iter_mut().filter(|qp| qp.completes_to(cq)) {
                qp.overflowed(&mut self.shared);
            }
        }
    }

    /// Flushes the work of all queue pairs and notifies the owners of all completion queues, because the engine will
    /// not run again. Its queue pairs no longer count in the registry, which other engines may use. Connections are not
    /// touched.
    pub(crate) fn fail_all(&mut self) {
        for qp in self.qps.iter_mut() {
            qp.end(Ending::Finished, None, &mut self.shared);
        }
        for (id, qp) in self.qps.ids().zip(self.qps.iter()) {
            self.registry().remove_qp(id, &qp.attributes);
        }
        self.registry().fire_all();
    }

    /// Counters of RDMAP and DDP over all queue pairs, including destroyed ones.
    pub fn counters(&self) -> RnicCounters {
        let mut sum = self.destroyed;
        for qp in self.qps.iter() {
            sum += qp.counters;
        }
        let TerminateCount { sent, received } = self.shared.terminates;
        RnicCounters { rdmap: sum.rdmap, ddp: sum.ddp, terminates_sent: sent, terminates_received: received }
    }

    /// Counters of one queue pair, and its connection if it has one.
    pub(crate) fn stream_counters(
        &self,
        qp: QpId,
    ) -> Result<(StreamCounters, Option<ConnId>), ResourceError> {
        let qp = self.qps.get(qp).ok_or(ResourceError::Unknown(Object::QueuePair))?;
        Ok((qp.counters, qp.conn))
    }

    fn qp_of(&mut self, conn: ConnId) -> Option<(&mut QueuePair, &mut Shared)> {
        let qp = self.connections.qp(conn)?;
        self.shared.keys.update();
        Some((self.qps.get_mut(qp)?, &mut self.shared))
    }
}

impl Ulp for Rnic {
    type Placed = Placed;

    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<Placed, Refusal> {
        let (qp, shared) = self.qp_of(conn).ok_or(Refusal::Stop)?;
        if !matches!(qp.phase, Phase::Open(Closes { peer: false, .. })) {
            return qp.refuse_data(shared);
        }
        match qp.read_and_place(shared, ulpdu, arrival) {
            Ok(segment) => {
                qp.counters.placed(&segment, arrival);
                // The completion of a Send that has overtaken others may have overflowed its queue.
                if !shared.overflowed.is_empty() {
                    self.end_overflowed();
                }
                Ok(Placed(segment))
            }
            Err(_) if arrival == Arrival::Early => {
                qp.counters.ddp.early_refused += 1;
                Err(Refusal::Withhold)
            }
            Err(refused) => {
                let refusal = qp.refuse(refused, shared);
                self.end_overflowed();
                Err(refusal)
            }
        }
    }

    #[inline]
    fn take(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>) -> Result<(), Refusal> {
        let (qp, shared) = self.qp_of(conn).ok_or(Refusal::Stop)?;
        if !matches!(qp.phase, Phase::Open(Closes { peer: false, .. })) {
            return qp.refuse_data(shared);
        }
        let taken = match qp.take_first(shared, ulpdu) {
            Ok(()) => Ok(()),
            Err(Undescribed) => qp.take_any(shared, ulpdu),
        };
        if !self.shared.overflowed.is_empty() {
            self.end_overflowed();
        }
        taken
    }

    fn deliver(&mut self, conn: ConnId, placed: Placed) -> Result<(), Refusal> {
        let (qp, shared) = self.qp_of(conn).ok_or(Refusal::Stop)?;
        if !matches!(qp.phase, Phase::Open(_)) {
            return Err(Refusal::Stop);
        }
        let delivered = qp.deliver(shared, placed.0).map_err(|refused| qp.refuse(refused, shared));
        if !self.shared.overflowed.is_empty() {
            self.end_overflowed();
        }
        delivered
    }

    fn has_data(&self, conn: ConnId) -> bool {
        let qp = self.connections.qp(conn).and_then(|qp| self.qps.get(qp));
        qp.is_none_or(|qp| qp.has_data())
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        // A connection without a queue pair sends nothing more.
        let Some((qp, shared)) = self.qp_of(conn) else { return Pulled::Finish };
        let pulled = match qp.pull(shared, SegmentWriter::new(qp.codec(), out)) {
            Pulled::Ulpdu if !qp.has_data() => Pulled::LastUlpdu,
            pulled => pulled,
        };
        if !self.shared.overflowed.is_empty() {
            self.end_overflowed();
        }
        pulled
    }

    fn acked(&mut self, conn: ConnId, offset: StreamOffset) {
        let Some((qp, shared)) = self.qp_of(conn) else { return };
        qp.tx.acked = offset;
        qp.complete_sends(shared);
        if !self.shared.overflowed.is_empty() {
            self.end_overflowed();
        }
    }

    fn event(&mut self, conn: ConnId, event: Event) {
        self.connection_event(conn, event);
        self.end_overflowed();
    }
}

impl QueuePair {
    /// Rejects a ULPDU because the queue pair takes none in its state.
    #[cold]
    fn refuse_data<T>(&mut self, shared: &mut Shared) -> Result<T, Refusal> {
        if matches!(self.phase, Phase::Open(_)) {
            self.data_after_close(shared);
        }
        Err(Refusal::Stop)
    }

    fn read_and_place(
        &mut self,
        shared: &mut Shared,
        ulpdu: &Ulpdu<'_>,
        arrival: Arrival,
    ) -> Result<Segment, Refused> {
        let received = self.codec().read(ulpdu)?;
        self.place(shared, received, arrival)
    }

    /// Places a segment of any kind in order and delivers it.
    #[inline(never)]
    fn take_any(&mut self, shared: &mut Shared, ulpdu: &Ulpdu<'_>) -> Result<(), Refusal> {
        let arrival = Arrival::InOrder;
        let taken = self.read_and_place(shared, ulpdu, arrival).and_then(|segment| {
            self.counters.placed(&segment, arrival);
            self.deliver(shared, segment)
        });
        taken.map_err(|refused| self.refuse(refused, shared))
    }

    /// Handles a ULPDU that was rejected in order: withholds it, or fails the stream.
    #[cold]
    fn refuse(&mut self, refused: Refused, shared: &mut Shared) -> Refusal {
        match refused {
            Refused::NoReceive(quote) => {
                self.counters.rdmap.no_receive += 1;
                match self.attributes.options.no_receive {
                    NoReceive::Withhold => {
                        self.wait_for_receive(quote, shared);
                        return Refusal::Withhold;
                    }
                    NoReceive::Terminate => self.fail(DdpError::NoBuffer.into(), quote, shared),
                }
            }
            Refused::Stream(error, quote) => self.fail(error, quote, shared),
            Refused::Receive(status, error, quote) => {
                self.fail_receive(status, shared);
                self.fail(error.into(), quote, shared);
            }
            Refused::Answer(status, error, quote) => {
                let position = self.rx.asked.front().and_then(|asked| asked.position);
                if let Some(entry) = position.and_then(|p| self.sq.get_mut(p)) {
                    entry.progress = Progress::Done(status);
                }
                self.fail(error, quote, shared);
            }
        }
        Refusal::Stop
    }

    fn wait_for_receive(&mut self, quote: Quote, shared: &mut Shared) {
        let waits_already = self.rx.withheld.replace(quote).is_some();
        if let Some(srq) = self.rq.pool()
            && !waits_already
        {
            shared.starved.push(srq.id(), self.id);
            if srq.has_receive_for(shared.engine) {
                // Posted after this queue pair found none.
                shared.deferred.push(Deferred::Refilled(srq.id()));
            }
        }
    }

    /// Stops waiting for a receive.
    pub(crate) fn stop_waiting(&mut self, shared: &mut Shared) {
        if self.rx.withheld.take().is_some()
            && let Some(srq) = self.rq.pool()
        {
            shared.starved.remove(srq.id(), self.id);
        }
    }
}

/// Queue pairs of one engine with a message that waits for a receive of a shared queue, in the order in which they get one.
#[derive(Default)]
struct Starved(BTreeMap<SrqId, VecDeque<QpId>>);

impl Starved {
    fn push(&mut self, srq: SrqId, qp: QpId) {
        self.0.entry(srq).or_default().push_back(qp);
    }

    fn first(&self, srq: SrqId) -> Option<QpId> {
        self.0.get(&srq)?.front().copied()
    }

    fn remove(&mut self, srq: SrqId, qp: QpId) {
        let Some(waiting) = self.0.get_mut(&srq) else { return };
        if waiting.front() == Some(&qp) {
            waiting.pop_front();
        } else {
            waiting.retain(|other| *other != qp);
        }
        if waiting.is_empty() {
            self.0.remove(&srq);
        }
    }
}
