//! [`ReceivePool`]: the receives of a shared receive queue, from which the queue pairs of all engines of a device take.

use std::collections::VecDeque;

use parking_lot::Mutex;

use super::{EngineSet, PostError, RecvRequest, SrqAttributes, SrqId, receive_queue::Receive, work::PdId};

/// The receives of a shared receive queue. Any thread may post; engines take while they hold their own locks.
#[derive(Debug)]
pub struct ReceivePool {
    id: SrqId,
    pd: PdId,
    max_sge: u32,
    pool: Mutex<Pool>,
}

#[derive(Debug)]
struct Pool {
    receives: VecDeque<Receive>,
    max_wr: u32,
    /// The limit event is raised when fewer receives are left; 0: not armed.
    limit: u32,
    /// Number of queue pairs that use the pool.
    users: usize,
    /// Engines in which queue pairs wait for a receive.
    waiting: EngineSet,
}

impl ReceivePool {
    pub(crate) fn new(id: SrqId, attributes: &SrqAttributes) -> Self {
        let &SrqAttributes { pd, max_wr, max_sge, limit } = attributes;
        let receives = VecDeque::with_capacity(max_wr.min(1024) as usize);
        let pool = Pool { receives, max_wr, limit, users: 0, waiting: EngineSet::default() };
        Self { id, pd, max_sge, pool: Mutex::new(pool) }
    }

    /// The identifier of the queue.
    pub fn id(&self) -> SrqId {
        self.id
    }

    /// The current attributes.
    pub fn attributes(&self) -> SrqAttributes {
        let Pool { max_wr, limit, .. } = *self.pool.lock();
        SrqAttributes { pd: self.pd, max_wr, max_sge: self.max_sge, limit }
    }

    /// Number of receives that are posted and not taken.
    pub fn len(&self) -> usize {
        self.pool.lock().receives.len()
    }

    /// Whether no receive is posted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Posts a receive. The caller tells each of the returned engines that the queue was [refilled](super::Rnic::srq_refilled),
    /// because queue pairs wait there.
    pub fn post(&self, request: &RecvRequest<'_>) -> Result<EngineSet, PostError> {
        let receive = Receive::new(request, self.max_sge)?;
        let mut pool = self.pool.lock();
        if pool.receives.len() >= pool.max_wr as usize {
            return Err(PostError::QueueFull(pool.max_wr));
        }
        pool.receives.push_back(receive);
        Ok(std::mem::take(&mut pool.waiting))
    }

    /// Changes the size. The error is the number of posted receives when `max_wr` is too small for them.
    pub(crate) fn resize(&self, max_wr: u32) -> Result<(), usize> {
        let mut pool = self.pool.lock();
        if pool.receives.len() > max_wr as usize {
            return Err(pool.receives.len());
        }
        pool.max_wr = max_wr;
        Ok(())
    }

    /// Arms the limit event. Returns whether the caller must raise it, because fewer receives are left already.
    pub(crate) fn arm_limit(&self, limit: u32) -> bool {
        let mut pool = self.pool.lock();
        pool.limit = limit;
        pool.falls_below_limit()
    }

    /// The oldest receive, for a message that is due; with `early`, for a queue pair that holds so many receives for messages
    /// that are not due, and wants another one of these. Also returns whether the caller must raise the limit event.
    pub(super) fn take(&self, early: Option<usize>) -> (Option<Receive>, bool) {
        let mut pool = self.pool.lock();
        if early.is_some_and(|early| early >= pool.early_share(early)) {
            return (None, false);
        }
        let receive = pool.receives.pop_front();
        (receive, pool.falls_below_limit())
    }

    /// Whether a receive is posted. If none is, the next post returns `engine`.
    pub(crate) fn has_receive_for(&self, engine: u16) -> bool {
        let mut pool = self.pool.lock();
        let has = !pool.receives.is_empty();
        if !has {
            pool.waiting.insert(engine);
        }
        has
    }

    pub(crate) fn pd(&self) -> PdId {
        self.pd
    }

    /// Number of queue pairs that use the pool.
    pub(crate) fn users(&self) -> usize {
        self.pool.lock().users
    }

    /// Counts a queue pair that begins to use the pool.
    pub(crate) fn add_user(&self) {
        self.pool.lock().users += 1;
    }

    /// Counts a queue pair that ends.
    pub(crate) fn remove_user(&self) {
        self.pool.lock().users -= 1;
    }
}

impl Pool {
    /// Largest number of receives that one queue pair may hold for messages that are not due, when it now holds
    /// `early` of them.
    ///
    /// All queue pairs together get at most about half of the posted receives, so that peers which leave gaps on
    /// purpose do not occupy the receives for messages of other peers that are due (RFC 5042 section 6.4.3.1).
    fn early_share(&self, early: usize) -> usize {
        (self.receives.len() + early) / (2 * self.users.max(1))
    }

    /// Whether fewer receives are left than the armed limit, which this disarms.
    fn falls_below_limit(&mut self) -> bool {
        let below = self.receives.len() < self.limit as usize;
        if below {
            self.limit = 0;
        }
        below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rnic::table::Id;

    const RECEIVE: RecvRequest<'_> = RecvRequest { wr_id: 1, scatter: &[] };

    #[test]
    fn a_post_names_the_engines_that_wait_once() {
        let attributes = SrqAttributes { pd: PdId::from_raw(0), max_wr: 4, max_sge: 1, limit: 0 };
        let pool = ReceivePool::new(SrqId::from_raw(0), &attributes);
        assert!(pool.post(&RECEIVE).unwrap().is_empty());
        assert!(pool.has_receive_for(3), "and does not wait");
        assert!(pool.take(None).0.is_some());
        assert!(!pool.has_receive_for(3) && !pool.has_receive_for(63));
        assert_eq!(pool.post(&RECEIVE).unwrap().iter().collect::<Vec<_>>(), [3, 63]);
        assert!(pool.post(&RECEIVE).unwrap().is_empty());
    }
}
