//! The receives of one queue pair: posted to its own queue, or taken from a shared one.

use std::{collections::VecDeque, sync::Arc};

use super::{
    AsyncEvent, RecvRequest,
    attributes::PostError,
    events::Events,
    receive_pool::ReceivePool,
    work::{SgeList, sge_list},
};

/// Number of messages, from the next one on, for which one queue pair may bind receives of a shared queue. It limits
/// the receives that a peer can occupy by never filling its gaps (RFC 5042 section 6.4.3.1).
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
    pub(super) fn new(request: &RecvRequest<'_>, max_sge: u32) -> Result<Self, PostError> {
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

/// The receives of one queue pair, in the order of their messages; the first is for the next message.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    /// With a shared queue: the receives that are bound to messages; `None` for messages of which no segment has
    /// arrived.
    receives: VecDeque<Option<Receive>>,
    source: Source,
    /// Number of shared receives that are bound to messages after the next one.
    early: usize,
}

/// Where receives come from.
#[derive(Debug)]
enum Source {
    /// They are posted to the queue pair: at most `max_wr`, each of at most `max_sge` pieces.
    Own {
        max_wr: u32,
        max_sge: u32,
    },
    Shared(Arc<ReceivePool>),
}

impl ReceiveQueue {
    pub(crate) fn own(max_wr: u32, max_sge: u32) -> Self {
        Self { receives: VecDeque::new(), source: Source::Own { max_wr, max_sge }, early: 0 }
    }

    pub(crate) fn shared(pool: Arc<ReceivePool>) -> Self {
        Self { receives: VecDeque::new(), source: Source::Shared(pool), early: 0 }
    }

    /// The shared queue from which receives are taken.
    pub(crate) fn pool(&self) -> Option<&ReceivePool> {
        match &self.source {
            Source::Own { .. } => None,
            Source::Shared(pool) => Some(pool),
        }
    }

    /// Limits of receives and of pieces in each.
    fn limits(&self) -> Result<(u32, u32), PostError> {
        match self.source {
            Source::Own { max_wr, max_sge } => Ok((max_wr, max_sge)),
            Source::Shared(_) => Err(PostError::Unknown),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.receives.iter().flatten().count()
    }

    /// Checks a request without regard to whether the queue is full.
    pub(crate) fn check(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (_, max_sge) = self.limits()?;
        Receive::new(request, max_sge).map(|_| ())
    }

    pub(crate) fn post(&mut self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (max_wr, max_sge) = self.limits()?;
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

    /// The receive for the message that is `ahead` messages after the next one. A shared queue binds its oldest receive
    /// to a message when its first segment arrives. It does so for a message that is not due only while this queue
    /// pair's early receives are within its share.
    #[inline]
    pub(crate) fn bind(&mut self, ahead: usize, events: &mut Events) -> Option<&Receive> {
        if let Source::Shared(shared) = &self.source
            && self.receives.get(ahead).is_none_or(Option::is_none)
        {
            let early = ahead > 0;
            if early && ahead >= MOST_AHEAD {
                return None;
            }
            let (receive, below_limit) = shared.take(early.then_some(self.early));
            if below_limit {
                events.push_async(AsyncEvent::SrqLimit { srq: shared.id() });
            }
            let receive = receive?;
            while self.receives.len() <= ahead {
                self.receives.push_back(None);
            }
            *self.receives.get_mut(ahead)? = Some(receive);
            self.early += usize::from(early);
        }
        self.receives.get(ahead)?.as_ref()
    }

    /// Removes and returns the receive of the next message, and advances to the message after it.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<Receive> {
        let receive = self.receives.pop_front().flatten();
        if self.early > 0 && matches!(self.receives.front(), Some(Some(_))) {
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
