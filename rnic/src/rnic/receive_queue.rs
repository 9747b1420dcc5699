//! Receive queues: the queue pair's own, and shared ones.

use std::collections::VecDeque;

use super::{
    AsyncEvent, QpId, RecvRequest, SrqAttributes, SrqId,
    attributes::PostError,
    events::Events,
    work::{PdId, SgeList, sge_list},
};

/// Number of messages, from the one that is due, for which one queue pair may bind receives of a shared queue. It
/// limits the receives that a peer can occupy by never filling its gaps (RFC 5042 section 6.4.3.1).
const MOST_AHEAD: usize = 1024;

/// A posted receive.
#[derive(Debug, Clone)]
pub(crate) struct Receive {
    pub(crate) wr_id: u64,
    pub(crate) scatter: SgeList,
    /// Bytes of the largest message that fits.
    pub(crate) capacity: u64,
}

impl Receive {
    fn new(request: &RecvRequest<'_>, max_sge: u32) -> Result<Self, PostError> {
        if request.scatter.len() > max_sge as usize {
            return Err(PostError::TooManyPieces(max_sge));
        }
        Ok(Self {
            wr_id: request.wr_id,
            scatter: sge_list(request.scatter),
            capacity: request.scatter.iter().map(|s| u64::from(s.len)).sum(),
        })
    }
}

/// The receives of one queue pair, in the order of their messages; the first is for the message that is due.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    /// With a shared queue: the receives that are bound to messages; `None` for messages of which no segment has
    /// arrived.
    receives: VecDeque<Option<Receive>>,
    /// Limits of receives and of pieces in each; `None` with a shared queue.
    own: Option<(u32, u32)>,
    /// Number of shared receives that are bound to messages after the one that is due.
    early: usize,
}

impl ReceiveQueue {
    pub(crate) fn own(max_wr: u32, max_sge: u32) -> Self {
        Self { receives: VecDeque::new(), own: Some((max_wr, max_sge)), early: 0 }
    }

    pub(crate) fn shared() -> Self {
        Self { receives: VecDeque::new(), own: None, early: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.receives.iter().flatten().count()
    }

    /// Checks a request without regard to whether the queue is full.
    pub(crate) fn check(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (_, max_sge) = self.own.ok_or(PostError::Unknown)?;
        Receive::new(request, max_sge).map(|_| ())
    }

    pub(crate) fn post(&mut self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (max_wr, max_sge) = self.own.ok_or(PostError::Unknown)?;
        if self.receives.len() >= max_wr as usize {
            return Err(PostError::QueueFull(max_wr));
        }
        let receive = Receive::new(request, max_sge)?;
        if self.receives.capacity() == 0 {
            // With the first receive, because most queue pairs of many are idle.
            self.receives.reserve_exact(max_wr.min(1024) as usize);
        }
        self.receives.push_back(Some(receive));
        Ok(())
    }

    /// The receive for the message that is `ahead` messages after the one that is due. A shared queue binds its
    /// oldest receive to a message when its first segment arrives. It does so for a message that is not due only
    /// while this queue pair's early receives are within its share.
    #[inline]
    pub(crate) fn bind(
        &mut self,
        ahead: usize,
        shared: Option<&mut SharedReceiveQueue>,
        events: &mut Events,
    ) -> Option<&Receive> {
        if let Some(shared) = shared
            && self.receives.get(ahead).is_none_or(Option::is_none)
        {
            let early = ahead > 0;
            if early && (ahead >= MOST_AHEAD || self.early >= shared.early_share(self.early)) {
                return None;
            }
            let receive = shared.take(events)?;
            while self.receives.len() <= ahead {
                self.receives.push_back(None);
            }
            *self.receives.get_mut(ahead)? = Some(receive);
            self.early += usize::from(early);
        }
        self.receives.get(ahead)?.as_ref()
    }

    /// Removes and returns the receive of the message that was due; the next message becomes due.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<Receive> {
        let receive = self.receives.pop_front().flatten();
        if self.own.is_none() && matches!(self.receives.front(), Some(Some(_))) {
            self.early -= 1;
        }
        receive
    }

    /// Removes and returns the first remaining receive, to be flushed.
    pub(crate) fn pop_flushed(&mut self) -> Option<Receive> {
        self.early = 0;
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
    /// Number of queue pairs that use the queue.
    pub(crate) users: usize,
    /// Queue pairs with a message that waits for a receive, in the order in which they get one.
    pub(crate) waiting: VecDeque<QpId>,
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
            waiting: VecDeque::new(),
        }
    }

    pub(crate) fn attributes(&self) -> SrqAttributes {
        SrqAttributes { pd: self.pd, max_wr: self.max_wr, max_sge: self.max_sge, limit: self.limit }
    }

    pub(crate) fn len(&self) -> usize {
        self.receives.len()
    }

    /// Changes the size. The error is the number of posted receives when `max_wr` is too small for them.
    pub(crate) fn resize(&mut self, max_wr: u32) -> Result<(), usize> {
        if self.receives.len() > max_wr as usize {
            return Err(self.receives.len());
        }
        self.max_wr = max_wr;
        Ok(())
    }

    /// Arms the limit event, which is raised at once if the queue already has fewer receives.
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

    /// Largest number of receives that one queue pair may hold for messages that are not due, when it now holds
    /// `early` of them.
    ///
    /// All queue pairs together get at most about half of the posted receives, so that peers which leave gaps on
    /// purpose do not occupy the receives for messages of other peers that are due (RFC 5042 section 6.4.3.1).
    fn early_share(&self, early: usize) -> usize {
        (self.receives.len() + early) / (2 * self.users.max(1))
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
