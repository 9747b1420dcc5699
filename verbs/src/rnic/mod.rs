//! The card: protection domains, keys, queues and queue pairs, and the state of every RDMAP stream.
//!
//! [`Rnic`] is the upper layer of [`xwarp_tcp::stack::Stack`]: it places and delivers what comes, and says
//! what to send. It knows no sockets and no time. [`crate::engine::Engine`] owns both, and passes on to the
//! stack what [`Rnic`] left to do: connections to wake, to resume, to reset.
//!
//! | module | owns |
//! |---|---|
//! | `work` | requests and completions, as they are posted and polled |
//! | `attributes` | what objects are made with, limits, errors of verbs |
//! | `resources` | making and destroying objects, posting |
//! | `keys` | which tag opens which memory to whom |
//! | `completion` | the completion ring |
//! | `send_queue`, `receive_queue` | requests between posting and completion |
//! | `qp` | a queue pair and the ways it ends |
//! | `placement`, `delivery` | ULPDUs into memory; messages, in order |
//! | `transmission` | requests and answers into ULPDUs |
//! | `local_work` | requests that are about our own memory alone |
//! | `connection` | what happens to connections |
//! | `counters` | how often |

mod attributes;
mod completion;
mod connection;
mod counters;
mod delivery;
mod events;
mod keys;
mod local_work;
mod pieces;
mod placement;
mod qp;
mod receive_queue;
mod resources;
mod send_queue;
pub(crate) mod table;
mod transmission;
mod work;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use xwarp_tcp::{
    secret::Secret,
    seq::StreamOffset,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
};

pub(crate) use self::connection::Attempt;
pub use self::{
    attributes::{
        CmError, FastRegistration, Limits, NoReceive, Object, PostError, QpAttributes, QpInfo, QpState,
        QueuePairOptions, Registration, ResourceError, SrqAttributes,
    },
    completion::{CompletionRing, Notify},
    counters::{Counters, DdpCounters, RdmapCounters, TerminateCounters},
    events::{AsyncEvent, CmEvent, PeerDepths, QpFault, RequestId},
    placement::Placed,
    work::{
        Access, Binding, CqId, Opcode, Operation, Payload, PdId, RecvRequest, Remote, SendFlags, Sge, SrqId,
        WcStatus, WorkCompletion, WorkRequest,
    },
};
use self::{
    connection::Connections,
    events::Events,
    keys::{KeyTable, User},
    placement::{Quote, Refused},
    qp::QueuePair,
    receive_queue::SharedReceiveQueue,
    send_queue::Progress,
    table::{Table, id},
};
use crate::{
    ddp::DdpError,
    memory::{AccessError, Memory},
    rdmap::{AtomicRequest, RdmapError},
};

id! {
    /// A queue pair.
    QpId
}

/// A protection domain: who uses it.
#[derive(Debug, Default)]
struct Domain {
    /// Regions and windows.
    keys: usize,
    srqs: usize,
    qps: usize,
}

/// A completion queue as the engine knows it.
#[derive(Debug)]
struct Cq {
    ring: Arc<CompletionRing>,
    users: usize,
}

/// What the queue pairs share.
pub(crate) struct Shared {
    domains: Table<PdId, Domain>,
    keys: KeyTable,
    srqs: Table<SrqId, SharedReceiveQueue>,
    events: Events,
    counters: Counters,
    /// Completion queues that lost an entry; their queue pairs have to end.
    overflowed: Vec<CqId>,
    /// Connections that have something to send, can take what they withheld, or must be reset.
    wakes: Vec<ConnId>,
    resumes: Vec<ConnId>,
    aborts: Vec<ConnId>,
    /// A completion woke somebody who slept.
    woke: bool,
}

impl Shared {
    /// Adds an entry to a completion queue.
    fn complete(&mut self, ring: &CompletionRing, cq: CqId, completion: WorkCompletion) {
        let Ok(woke) = ring.push(completion) else {
            tracing::error!(cq = cq.number(), "completion queue overflow");
            self.events.push_async(AsyncEvent::CqOverflow { cq });
            self.overflowed.push(cq);
            return;
        };
        self.woke |= woke;
    }

    fn wake(&mut self, conn: Option<ConnId>) {
        self.wakes.extend(conn);
    }

    fn abort(&mut self, conn: Option<ConnId>) {
        self.aborts.extend(conn);
    }

    /// Whether a domain has one queue pair only.
    fn is_alone(&self, pd: PdId) -> bool {
        self.domains.get(pd).is_some_and(|domain| domain.qps == 1)
    }

    /// Whether the word of an atomic request is there, granted, and aligned (RFC 7306 section 8.2).
    fn check_atomic(&self, user: User, request: &AtomicRequest) -> Result<(), RdmapError> {
        let (memory, offset) = self.open_word(user, request)?;
        memory.load_u64(offset).map(|_| ()).map_err(atomic_error)
    }

    fn open_word(&self, user: User, request: &AtomicRequest) -> Result<(&Memory, usize), RdmapError> {
        let word = self.keys.open(user, request.stag, Access::REMOTE_ATOMIC, request.to, 8)?;
        // A word that lies in two pieces is aligned in neither.
        word.in_one_piece().ok_or(RdmapError::StreamCatastrophic)
    }

    /// Does an atomic operation; returns the word before.
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
        AccessError::ReadOnly => RdmapError::AccessRights,
    }
}

/// The card.
pub struct Rnic {
    limits: Limits,
    shared: Shared,
    cqs: Table<CqId, Cq>,
    qps: Table<QpId, QueuePair>,
    connections: Connections,
}

impl std::fmt::Debug for Rnic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rnic({} queue pairs, {} regions)", self.qps.len(), self.shared.keys.regions())
    }
}

impl Rnic {
    /// A card without objects. `secret` decides which keys its regions get.
    pub fn new(limits: Limits, secret: &Secret) -> Self {
        Self {
            shared: Shared {
                domains: Table::new(limits.max_pd),
                keys: KeyTable::new(&limits, secret),
                srqs: Table::new(limits.max_srq),
                events: Events::default(),
                counters: Counters::default(),
                overflowed: Vec::new(),
                wakes: Vec::new(),
                resumes: Vec::new(),
                aborts: Vec::new(),
                woke: false,
            },
            cqs: Table::new(limits.max_cq),
            qps: Table::new(limits.max_qp),
            connections: Connections::default(),
            limits,
        }
    }

    /// Ends the queue pairs of completion queues that overflowed; others are not touched (RFC 5042 section
    /// 6.4.6). Their own entries go to the other completion queue, which may overflow in turn.
    fn end_overflowed(&mut self) {
        while let Some(cq) = self.shared.overflowed.pop() {
            for qp in self.qps.iter_mut().filter(|qp| qp.completes_to(cq)) {
                qp.overflowed(&mut self.shared);
            }
        }
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    fn qp_of(&mut self, conn: ConnId) -> Option<(&mut QueuePair, &mut Shared)> {
        let qp = self.connections.qp(conn)?;
        Some((self.qps.get_mut(qp)?, &mut self.shared))
    }
}

impl Ulp for Rnic {
    type Placed = Placed;

    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<Placed, Refusal> {
        let (qp, shared) = self.qp_of(conn).ok_or(Refusal::Stop)?;
        if qp.rx.stopped {
            return Err(Refusal::Stop);
        }
        match qp.place(shared, ulpdu, arrival) {
            Ok(segment) => {
                shared.counters.placed(&segment, arrival);
                Ok(Placed(segment))
            }
            Err(_) if arrival == Arrival::Early => {
                shared.counters.ddp.early_refused += 1;
                Err(Refusal::Withhold)
            }
            Err(refused) => {
                let refusal = qp.refuse(refused, shared);
                self.end_overflowed();
                Err(refusal)
            }
        }
    }

    fn deliver(&mut self, conn: ConnId, placed: Placed) -> Result<(), Refusal> {
        let (qp, shared) = self.qp_of(conn).ok_or(Refusal::Stop)?;
        if qp.rx.stopped {
            return Err(Refusal::Stop);
        }
        let delivered = qp.deliver(shared, placed.0).map_err(|refused| qp.refuse(refused, shared));
        if !self.shared.overflowed.is_empty() {
            self.end_overflowed();
        }
        delivered
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        // A connection that lost its queue pair has nothing more to say.
        let Some((qp, shared)) = self.qp_of(conn) else { return Pulled::Finish };
        let pulled = qp.pull(shared, out);
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
    /// Draws the consequences of a ULPDU that was refused in order.
    fn refuse(&mut self, refused: Refused, shared: &mut Shared) -> Refusal {
        match refused {
            Refused::NoReceive(quote) => {
                shared.counters.rdmap.no_receive += 1;
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
        self.rx.withheld = Some(quote);
        if let Some(srq) = self.attributes.srq.and_then(|id| shared.srqs.get_mut(id))
            && !srq.waiting.contains(&self.id)
        {
            srq.waiting.push(self.id);
        }
    }
}
