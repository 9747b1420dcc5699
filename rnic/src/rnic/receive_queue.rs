//! The receives of one queue pair: posted to its own queue, or taken from a shared one.

use std::sync::Arc;

use super::{
    AsyncEvent, RecvRequest,
    attributes::PostError,
    events::Events,
    receive_pool::ReceivePool,
    slots::Slots,
    work::{Sge, SgeList},
};

/// Number of messages, from the next one on, for which one queue pair may bind receives of a shared queue. It limits
/// the receives that a peer can occupy by never filling its gaps (RFC 5042 section 6.4.3.1).
const MAX_AHEAD: u32 = 1024;

/// Places for receives that are allocated with the first one.
const MAX_AT_FIRST: u32 = 1024;

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
        check(request, max_sge)?;
        let mut receive = Self::unused();
        receive.set(request);
        Ok(receive)
    }

    fn unused() -> Self {
        Self { wr_id: 0, scatter: SgeList::new(), capacity: 0 }
    }

    #[inline]
    fn set(&mut self, request: &RecvRequest<'_>) {
        self.wr_id = request.wr_id;
        self.capacity = match request.scatter {
            [piece] => u64::from(piece.len),
            pieces => pieces.iter().map(|s| u64::from(s.len)).sum(),
        };
        self.scatter.set(request.scatter);
    }
}

fn check(request: &RecvRequest<'_>, max_sge: u32) -> Result<(), PostError> {
    if request.scatter.len() > max_sge as usize {
        return Err(PostError::TooManyPieces(max_sge));
    }
    if request.scatter.iter().any(Sge::is_too_long) {
        return Err(PostError::MessageTooLong);
    }
    Ok(())
}

/// The place of one message's receive.
#[derive(Debug)]
struct Place {
    receive: Receive,
    /// The receive is for the message. With a shared queue, none is until a segment of the message arrives.
    bound: bool,
}

impl Place {
    /// What a slot holds before its first receive.
    fn unused() -> Self {
        Self { receive: Receive::unused(), bound: false }
    }
}

/// The receives of one queue pair, in the order of their messages; the first is for the next message.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    /// By the number of the message.
    places: Slots<Place>,
    /// Number of the next message; wraps, like the messages' own.
    head: u32,
    /// Number of messages that have a place.
    len: u32,
    source: Source,
}

/// Where receives come from.
#[derive(Debug)]
enum Source {
    /// They are posted to the queue pair: at most `max_wr`, each of at most `max_sge` pieces.
    Own { max_wr: u32, max_sge: u32 },
    Shared {
        pool: Arc<ReceivePool>,
        /// Number of receives that are bound to messages after the next one.
        early: u32,
    },
}

impl ReceiveQueue {
    fn new(places: u32, source: Source) -> Self {
        Self { places: Slots::new(places), head: 0, len: 0, source }
    }

    pub(crate) fn own(max_wr: u32, max_sge: u32) -> Self {
        Self::new(max_wr.min(MAX_AT_FIRST), Source::Own { max_wr, max_sge })
    }

    pub(crate) fn shared(pool: Arc<ReceivePool>) -> Self {
        Self::new(1, Source::Shared { pool, early: 0 })
    }

    /// The shared queue from which receives are taken.
    pub(crate) fn pool(&self) -> Option<&ReceivePool> {
        match &self.source {
            Source::Own { .. } => None,
            Source::Shared { pool, .. } => Some(pool),
        }
    }

    /// Limits of receives and of pieces in each.
    fn limits(&self) -> Result<(u32, u32), PostError> {
        match self.source {
            Source::Own { max_wr, max_sge } => Ok((max_wr, max_sge)),
            Source::Shared { .. } => Err(PostError::Unknown),
        }
    }

    pub(crate) fn len(&self) -> usize {
        (0..self.len).filter(|ahead| self.bound(*ahead).is_some()).count()
    }

    /// Checks a request without regard to whether the queue is full.
    pub(crate) fn check(&self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (_, max_sge) = self.limits()?;
        check(request, max_sge)
    }

    pub(crate) fn post(&mut self, request: &RecvRequest<'_>) -> Result<(), PostError> {
        let (max_wr, max_sge) = self.limits()?;
        if self.len >= max_wr {
            return Err(PostError::QueueFull(max_wr));
        }
        check(request, max_sge)?;
        if let Some(place) = self.append() {
            place.receive.set(request);
            place.bound = true;
        }
        Ok(())
    }

    /// Slot of the place of the message that is `ahead` messages after the next one.
    #[inline]
    fn slot(&self, ahead: u32) -> u64 {
        self.head.wrapping_add(ahead).into()
    }

    /// The place of the first message that had none.
    #[inline]
    fn append(&mut self) -> Option<&mut Place> {
        if u64::from(self.len) >= self.places.most() {
            self.make_places();
        }
        let slot = self.slot(self.len);
        self.len += 1;
        self.places.claim(slot, Place::unused)
    }

    #[cold]
    fn make_places(&mut self) {
        let Self { head, len, .. } = *self;
        let held = (0..len).map(|ahead| head.wrapping_add(ahead).into());
        self.places.resize(len.saturating_add(1), held, Place::unused);
    }

    /// The receive that is bound to the message that is `ahead` messages after the next one.
    #[inline]
    fn bound(&self, ahead: u32) -> Option<&Receive> {
        if ahead >= self.len {
            return None;
        }
        self.places.get(self.slot(ahead)).filter(|place| place.bound).map(|place| &place.receive)
    }

    /// The receive for the message that is `ahead` messages after the next one. A shared queue binds its oldest receive
    /// to a message when its first segment arrives. It does so for a message that is not due only while this queue
    /// pair's early receives are within its share.
    #[expect(clippy::inline_always, reason = "each segment of a message calls it once")]
    #[inline(always)]
    pub(crate) fn bind(&mut self, ahead: u32, events: &mut Events) -> Option<&Receive> {
        if self.bound(ahead).is_none() {
            self.bind_shared(ahead, events)?;
        }
        self.places.get(self.slot(ahead)).map(|place| &place.receive)
    }

    #[inline(never)]
    fn bind_shared(&mut self, ahead: u32, events: &mut Events) -> Option<()> {
        let Source::Shared { pool, early } = &mut self.source else { return None };
        if ahead >= MAX_AHEAD {
            return None;
        }
        let (receive, below_limit) = pool.take((ahead > 0).then_some(*early as usize));
        if below_limit {
            events.push_async(AsyncEvent::SrqLimit { srq: pool.id() });
        }
        let receive = receive?;
        *early += u32::from(ahead > 0);
        while self.len <= ahead {
            self.append()?.bound = false;
        }
        *self.places.get_mut(self.slot(ahead))? = Place { receive, bound: true };
        Some(())
    }

    /// The identifier of the receive of the next message, if it has one.
    #[inline]
    pub(crate) fn first(&self) -> Option<u64> {
        self.bound(0).map(|receive| receive.wr_id)
    }

    /// Removes the receive of the next message, if it has one, and advances to the message after it.
    #[inline]
    pub(crate) fn remove_first(&mut self) {
        self.advance();
        if matches!(self.source, Source::Shared { early: 1.., .. }) {
            self.next_is_due();
        }
    }

    /// Records that the receive of the message that is now the next one, if it has one, is no longer early.
    #[cold]
    fn next_is_due(&mut self) {
        let bound = self.bound(0).is_some();
        if let Source::Shared { early, .. } = &mut self.source {
            *early -= u32::from(bound);
        }
    }

    #[inline]
    fn advance(&mut self) {
        if self.len > 0 {
            self.head = self.head.wrapping_add(1);
            self.len -= 1;
        }
    }

    /// Removes the first remaining receive, to be flushed. Returns its identifier.
    pub(crate) fn pop_flushed(&mut self) -> Option<u64> {
        if let Source::Shared { early, .. } = &mut self.source {
            *early = 0;
        }
        while self.len > 0 {
            let flushed = self.first();
            self.advance();
            if flushed.is_some() {
                return flushed;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_keep_their_order_when_the_number_of_the_next_message_wraps_and_places_are_added() {
        let (mut queue, mut events) = (ReceiveQueue::own(1500, 1), Events::default());
        queue.head = u32::MAX - 700;
        for wr_id in 0..1500 {
            queue.post(&RecvRequest { wr_id, scatter: &[] }).unwrap();
        }
        assert_eq!(
            (queue.len(), queue.post(&RecvRequest { wr_id: 0, scatter: &[] })),
            (1500, Err(PostError::QueueFull(1500)))
        );
        for wr_id in 0..1500 {
            let last = queue.bind(1499 - wr_id as u32, &mut events).map(|receive| receive.wr_id);
            assert_eq!((last, queue.first()), (Some(1499), Some(wr_id)));
            queue.remove_first();
        }
        assert_eq!((queue.len(), queue.first()), (0, None));
    }
}
