//! Receives: the own queue of a queue pair, and queues that several share.

use std::collections::VecDeque;

use super::{
    AsyncEvent, QpId, RecvRequest, SrqAttributes, SrqId,
    attributes::PostError,
    events::Events,
    work::{PdId, SgeList},
};

/// How far ahead of the message that is due a shared receive queue gives a receive to one queue pair: it
/// bounds what one peer can take that never fills its gaps (RFC 5042 section 6.4.3.1).
const MOST_AHEAD: usize = 1024;

/// A posted receive.
#[derive(Debug, Clone)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) scatter: SgeList,
    /// Bytes that fit.
    pub(crate) capacity: u64,
}

impl Receive {
    fn new(request: &RecvRequest<'_>, max_sge: u32) -> Result<Self, PostError> {
        if request.scatter.len() > max_sge as usize {
            return Err(PostError::TooManyPieces(max_sge));
        }
        Ok(Self {
            wr_id: request.wr_id,
            scatter: SgeList::from_slice(request.scatter),
            capacity: request.scatter.iter().map(|s| u64::from(s.len)).sum(),
        })
    }
}

/// The receives of one queue pair, in the order of the messages that take them; the first is for the
/// message that is due.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    /// With a shared queue, those that messages were bound to; `None` for messages of which nothing has come.
    receives: VecDeque<Option<Receive>>,
    /// Most receives, and pieces of each; `None` with a shared queue.
    own: Option<(u32, u32)>,
}

impl ReceiveQueue {
    pub(crate) fn own(max_wr: u32, max_sge: u32) -> Self {
        Self { receives: VecDeque::with_capacity(max_wr.min(1024) as usize), own: Some((max_wr, max_sge)) }
    }

    pub(crate) fn shared() -> Self {
        Self { receives: VecDeque::new(), own: None }
    }

    pub(crate) fn len(&self) -> usize {
        self.receives.iter().flatten().count()
    }

    pub(crate) fn post(&mut self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (max_wr, max_sge) = self.own.ok_or(PostError::Unknown)?;
        if self.receives.len() >= max_wr as usize {
            return Err(PostError::QueueFull(max_wr));
        }
        self.receives.push_back(Some(Receive::new(request, max_sge)?));
        Ok(())
    }

    /// The receive for the message that is `ahead` messages after the one that is due. A shared queue gives
    /// its oldest receive to a message when the first bytes of it come.
    pub(crate) fn bind(
        &mut self,
        ahead: usize,
        shared: Option<&mut SharedReceiveQueue>,
        events: &mut Events,
    ) -> Option<&Receive> {
        if let Some(shared) = shared
            && ahead < MOST_AHEAD
        {
            while self.receives.len() <= ahead {
                self.receives.push_back(None);
            }
            let entry = self.receives.get_mut(ahead)?;
            if entry.is_none() {
                *entry = shared.take(events);
            }
        }
        self.receives.get(ahead)?.as_ref()
    }

    /// The receive of the message that was due; the next one is due now.
    pub(crate) fn complete(&mut self) -> Option<Receive> {
        self.receives.pop_front().flatten()
    }

    /// Takes out the first that is left, whatever message it was for.
    pub(crate) fn pop_flushed(&mut self) -> Option<Receive> {
        while let Some(receive) = self.receives.pop_front() {
            if receive.is_some() {
                return receive;
            }
        }
        None
    }
}

/// A queue of receives for several queue pairs.
#[derive(Debug)]
pub(crate) struct SharedReceiveQueue {
    pub(crate) id: SrqId,
    pub(crate) pd: PdId,
    receives: VecDeque<Receive>,
    max_wr: u32,
    max_sge: u32,
    limit: u32,
    /// Queue pairs that use it.
    pub(crate) users: usize,
    /// Queue pairs that hold a message back for want of a receive.
    pub(crate) waiting: Vec<QpId>,
}

impl SharedReceiveQueue {
    pub(crate) fn new(id: SrqId, attributes: &SrqAttributes) -> Self {
        Self {
            id,
            pd: attributes.pd,
            receives: VecDeque::with_capacity(attributes.max_wr.min(1024) as usize),
            max_wr: attributes.max_wr,
            max_sge: attributes.max_sge,
            limit: attributes.limit,
            users: 0,
            waiting: Vec::new(),
        }
    }

    pub(crate) fn attributes(&self) -> SrqAttributes {
        SrqAttributes { pd: self.pd, max_wr: self.max_wr, max_sge: self.max_sge, limit: self.limit }
    }

    pub(crate) fn len(&self) -> usize {
        self.receives.len()
    }

    /// Changes the size, which must hold what is posted.
    pub(crate) fn resize(&mut self, max_wr: u32) -> Result<(), usize> {
        if self.receives.len() > max_wr as usize {
            return Err(self.receives.len());
        }
        self.max_wr = max_wr;
        Ok(())
    }

    /// Arms the limit event; it comes at once when fewer receives are there.
    pub(crate) fn arm_limit(&mut self, limit: u32, events: &mut Events) {
        self.limit = limit;
        self.check_limit(events);
    }

    pub(crate) fn post(&mut self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        if self.receives.len() >= self.max_wr as usize {
            return Err(PostError::QueueFull(self.max_wr));
        }
        self.receives.push_back(Receive::new(request, self.max_sge)?);
        Ok(())
    }

    fn take(&mut self, events: &mut Events) -> Option<Receive> {
        let receive = self.receives.pop_front();
        self.check_limit(events);
        receive
    }

    fn check_limit(&mut self, events: &mut Events) {
        if self.receives.len() < self.limit as usize {
            self.limit = 0;
            events.push_async(AsyncEvent::SrqLimit { srq: self.id });
        }
    }
}
