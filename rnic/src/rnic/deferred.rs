//! [`Deferred`]: work that the RNIC leaves to the engine.

use std::{collections::VecDeque, net::SocketAddr};

use xwarp_tcp::ulp::ConnId;

use super::{QpId, connection::Lacks, work::SrqId};

/// Work that the RNIC defers to the engine, because neither may call the stack inside one of the stack's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deferred {
    /// The connection may have data to send.
    Wake(ConnId),
    /// The connection is closed when its data is sent.
    Close(ConnId),
    /// The connection can retry the delivery of a withheld message.
    Resume(ConnId),
    /// The connection is reset.
    Abort(ConnId),
    /// The connection's queue pair ended; the engine resets the connection if it stays too long.
    Ended(ConnId),
    /// The shared receive queue got a receive while queue pairs of this engine may wait for one.
    Refilled(SrqId),
    /// The queue pair's peer refused a part of MPA: the connection attempt is repeated without it.
    Retry(QpId),
    /// The peer has answered a repeated attempt, which left out these parts.
    Learned(SocketAddr, Lacks),
}

/// All deferred work, in the order in which it became due.
#[derive(Debug, Default)]
pub(super) struct DeferredWork {
    /// The connection to wake before the rest is done.
    woken: Option<ConnId>,
    rest: VecDeque<Deferred>,
}

impl DeferredWork {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.woken.is_none() && self.rest.is_empty()
    }

    pub(super) fn push(&mut self, work: Deferred) {
        self.rest.push_back(work);
    }

    /// Adds a wake. Many posts before the engine runs wake the same connection.
    #[inline]
    pub(super) fn wake(&mut self, conn: ConnId) {
        if self.rest.is_empty() && self.woken.is_none_or(|woken| woken == conn) {
            self.woken = Some(conn);
        } else {
            self.wake_late(Deferred::Wake(conn));
        }
    }

    #[inline(never)]
    fn wake_late(&mut self, wake: Deferred) {
        if self.rest.back() != Some(&wake) {
            self.rest.push_back(wake);
        }
    }

    /// The connection to wake, if that is all work, as after most posts.
    #[inline]
    pub(super) fn take_only_wake(&mut self) -> Option<ConnId> {
        let conn = self.woken.filter(|_| self.rest.is_empty())?;
        self.woken = None;
        Some(conn)
    }

    pub(super) fn next(&mut self) -> Option<Deferred> {
        self.woken.take().map(Deferred::Wake).or_else(|| self.rest.pop_front())
    }
}

impl Extend<Deferred> for DeferredWork {
    fn extend<I: IntoIterator<Item = Deferred>>(&mut self, work: I) {
        self.rest.extend(work);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A deque is the oracle.
        #[test]
        fn prop_work_is_done_in_its_order(steps in prop::collection::vec((0u32..4, 0u32..3), 0..60)) {
            let (mut deferred, mut oracle) = (DeferredWork::default(), VecDeque::new());
            for (step, index) in steps {
                let conn = ConnId { index, generation: 1 };
                match step {
                    0 => {
                        deferred.wake(conn);
                        if oracle.back() != Some(&Deferred::Wake(conn)) {
                            oracle.push_back(Deferred::Wake(conn));
                        }
                    }
                    1 => {
                        deferred.push(Deferred::Abort(conn));
                        oracle.push_back(Deferred::Abort(conn));
                    }
                    2 => prop_assert_eq!(deferred.next(), oracle.pop_front()),
                    _ => {
                        let only_wake = match oracle.front() {
                            Some(Deferred::Wake(conn)) if oracle.len() == 1 => Some(*conn),
                            _ => None,
                        };
                        // A wake behind other work is not the first work, and stays in the queue.
                        if let Some(conn) = deferred.take_only_wake() {
                            prop_assert_eq!(Some(conn), only_wake);
                            oracle.pop_front();
                        }
                    }
                }
                prop_assert_eq!(deferred.is_empty(), oracle.is_empty());
            }
        }
    }
}
