//! The kick: the system call that makes the kernel send the frames on a transmit ring. The call takes longer than all
//! other work on a frame and needs only the queue's socket, so a [`Kicker`] makes it without the owner of the rings:
//! other threads use the rings meanwhile.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use xwarp_tcp::link::{Kick, Kicked};

use crate::config::LinkCounters;
use crate::sys::Rings;

/// Descriptors that the kernel takes from a transmit ring in one kick.
const KICK_DESCRIPTORS: u32 = 32;
/// Largest number of system calls for one request.
const MAX_CALLS: usize = 64;
/// Largest number of requests that one thread serves before it leaves the next ones to others.
const MAX_REQUESTS: usize = 8;
/// Set in a queue's state while a thread kicks the queue. The other bits count the requested descriptors.
const BUSY: u32 = 1 << 31;

/// Kicks the queues of an [`Interface`](crate::Interface) from any thread. After the interface was dropped, it does
/// nothing.
#[derive(Debug, Clone)]
pub struct Kicker {
    requests: Arc<Requests>,
    sockets: Weak<Sockets>,
}

/// The kick requests of all queues, and the results of the kicks.
#[derive(Debug)]
struct Requests {
    queues: Vec<AtomicU32>,
    results: Results,
}

/// Duplicates of the queues' sockets, which stay valid while a thread is inside a kick.
type Sockets = Vec<OwnedFd>;

/// Counters of [`LinkCounters`] that kicks change, in any thread.
#[derive(Debug, Default)]
struct Results {
    kicks: AtomicU64,
    again: AtomicU64,
    lost: AtomicU64,
    no_buffers: AtomicU64,
    down: AtomicU64,
    failed: AtomicU64,
}

/// The interface's side of the kicks.
#[derive(Debug)]
pub(crate) struct Kicks {
    sockets: Arc<Sockets>,
    kicker: Kicker,
    /// The interface's user kicks; otherwise every request is served at once.
    handed_over: bool,
}

impl Kicks {
    /// Kicks of all queues of `rings`.
    pub(crate) fn new(rings: &Rings) -> io::Result<Self> {
        let sockets = (0..rings.queues()).filter_map(|queue| rings.socket(queue));
        let sockets = Arc::new(sockets.map(|socket| socket.try_clone_to_owned()).collect::<io::Result<_>>()?);
        let queues = (0..rings.queues()).map(|_| AtomicU32::new(0)).collect();
        let requests = Arc::new(Requests { queues, results: Results::default() });
        let kicker = Kicker { requests, sockets: Arc::downgrade(&sockets) };
        Ok(Self { sockets, kicker, handed_over: false })
    }

    /// The descriptors that are kicked.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(OwnedFd::as_fd)
    }

    /// Leaves the kicks to the caller from now on.
    pub(crate) fn hand_over(&mut self) -> Kicker {
        self.handed_over = true;
        self.kicker.clone()
    }

    /// Requests a kick for `descriptors` of a queue's ring. If none of them is `new`, a thread that is kicking the
    /// queue will send them anyway.
    pub(crate) fn request(&self, queue: u16, descriptors: u32, new: bool) {
        let Some(state) = self.kicker.requests.queues.get(usize::from(queue)) else { return };
        let merged = |old: u32| {
            let wanted = old & !BUSY;
            (new || old & BUSY == 0).then_some(old & BUSY | wanted.max(descriptors & !BUSY))
        };
        let _ = state.fetch_update(Ordering::Release, Ordering::Relaxed, merged);
    }

    /// Serves the requests and returns true, unless the kicks were handed over.
    pub(crate) fn serve(&self) -> bool {
        if !self.handed_over {
            self.kicker.requests.serve(&self.sockets);
        }
        !self.handed_over
    }

    /// Adds the results of all kicks to `counters`.
    pub(crate) fn count(&self, counters: &mut LinkCounters) {
        let results = &self.kicker.requests.results;
        counters.kicks += results.kicks.load(Ordering::Relaxed);
        counters.kick_again += results.again.load(Ordering::Relaxed);
        counters.kick_lost += results.lost.load(Ordering::Relaxed);
        counters.kick_no_buffers += results.no_buffers.load(Ordering::Relaxed);
        counters.kick_down += results.down.load(Ordering::Relaxed);
        counters.kick_failed += results.failed.load(Ordering::Relaxed);
    }
}

impl Kick for Kicker {
    /// Leaves a queue that another thread is kicking to that thread, which serves the new request too.
    fn kick(&self) -> Kicked {
        // Most calls find no request, and an atomic read is cheaper than the upgrade.
        if self.requests.queues.iter().all(|state| !is_open(state.load(Ordering::Relaxed))) {
            return Kicked::Nothing;
        }
        self.sockets.upgrade().map_or(Kicked::Nothing, |sockets| self.requests.serve(&sockets))
    }
}

/// Whether a queue has requests that no thread serves.
fn is_open(state: u32) -> bool {
    state != 0 && state & BUSY == 0
}

impl Requests {
    fn serve(&self, sockets: &Sockets) -> Kicked {
        let queues = self.queues.iter().zip(sockets);
        queues
            .map(|(state, socket)| serve_queue(state, |descriptors| self.results.send(socket, descriptors)))
            .fold(Kicked::Nothing, both)
    }
}

/// The outcome of two kicks together.
fn both(one: Kicked, other: Kicked) -> Kicked {
    match (one, other) {
        (Kicked::Nothing, kicked) | (kicked, Kicked::Nothing) => kicked,
        (Kicked::Done(one), Kicked::Done(other)) => Kicked::Done(one.saturating_add(other)),
        (Kicked::Done(one) | Kicked::More(one), Kicked::Done(other) | Kicked::More(other)) => {
            Kicked::More(one.saturating_add(other))
        }
    }
}

/// Serves the requests of one queue until none is left. One thread does so at a time; requests that others add
/// meanwhile are found by the exchange that would end its turn.
fn serve_queue(state: &AtomicU32, send: impl Fn(u32) -> bool) -> Kicked {
    let taken = state.fetch_update(Ordering::Acquire, Ordering::Relaxed, |old| is_open(old).then_some(BUSY));
    let Ok(mut descriptors) = taken else { return Kicked::Nothing };
    let mut served = 0_u32;
    for request in 1.. {
        let sent = send(descriptors);
        served = served.saturating_add(descriptors);
        if state.compare_exchange(BUSY, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return if sent { Kicked::Done(served) } else { Kicked::More(served) };
        }
        if request == MAX_REQUESTS {
            break;
        }
        descriptors = state.swap(BUSY, Ordering::AcqRel) & !BUSY;
    }
    state.fetch_and(!BUSY, Ordering::Release);
    Kicked::More(served)
}

impl Results {
    /// Makes the kernel send `descriptors` of `socket`'s ring. Returns false if frames may be left on the ring that a
    /// later kick can send (EAGAIN, ENOBUFS). TCP retransmits a frame that the kernel drops (EBUSY).
    fn send(&self, socket: &OwnedFd, descriptors: u32) -> bool {
        let mut left = descriptors;
        for _ in 0..MAX_CALLS {
            let kicked = send(socket.as_fd(), &[], SendFlags::DONTWAIT);
            self.kicks.fetch_add(1, Ordering::Relaxed);
            let (counter, outcome) = match kicked {
                // The kernel has emptied the ring.
                Ok(_) => return true,
                // The kernel took its maximum for one call, or had no room for more.
                Err(Errno::AGAIN) => {
                    left = left.saturating_sub(KICK_DESCRIPTORS);
                    (&self.again, (left == 0).then_some(false))
                }
                // One frame was lost, and the kernel did not read the later ones.
                Err(Errno::BUSY) => (&self.lost, None),
                Err(Errno::INTR) => continue,
                Err(Errno::NOBUFS) => (&self.no_buffers, Some(false)),
                // The time when the interface comes back is unknown; the next flush requests a kick again.
                Err(Errno::NETDOWN | Errno::NXIO) => (&self.down, Some(true)),
                Err(_) => (&self.failed, Some(true)),
            };
            counter.fetch_add(1, Ordering::Relaxed);
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    fn requests() -> Arc<Requests> {
        Arc::new(Requests { queues: vec![AtomicU32::new(0)], results: Results::default() })
    }

    /// The interface's side of one queue without a socket.
    fn kicks() -> Kicks {
        let sockets = Arc::new(Vec::new());
        let kicker = Kicker { requests: requests(), sockets: Arc::downgrade(&sockets) };
        Kicks { sockets, kicker, handed_over: true }
    }

    fn send_all(sent: &Cell<u32>, descriptors: u32) -> bool {
        sent.set(descriptors);
        true
    }

    #[test]
    fn one_thread_serves_what_others_request_meanwhile() {
        let kicks = kicks();
        let requests = &kicks.kicker.requests;
        let state = &requests.queues[0];
        assert_eq!(serve_queue(state, |_| unreachable!("nothing was requested")), Kicked::Nothing);
        kicks.request(0, 3, true);
        let sent = RefCell::new(Vec::new());
        let served = serve_queue(state, |descriptors| {
            sent.borrow_mut().push(descriptors);
            if sent.borrow().len() == 1 {
                // Another thread: its request is served here, and frames that this kick sends are not requested again.
                kicks.request(0, 5, true);
                kicks.request(0, 7, false);
                assert_eq!(serve_queue(state, |_| unreachable!("one thread")), Kicked::Nothing);
            }
            true
        });
        assert_eq!((served, sent.into_inner()), (Kicked::Done(8), vec![3, 5]));
        assert_eq!(state.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn frames_that_stayed_on_the_ring_are_requested_again() {
        let kicks = kicks();
        let requests = &kicks.kicker.requests;
        kicks.request(0, 2, false);
        let sent = Cell::new(0);
        assert_eq!(serve_queue(&requests.queues[0], |_| false), Kicked::More(2));
        // The next flush finds them.
        kicks.request(0, 2, false);
        assert_eq!(serve_queue(&requests.queues[0], |n| send_all(&sent, n)), Kicked::Done(2));
        assert_eq!(sent.get(), 2);
    }

    #[test]
    fn a_thread_does_not_serve_others_without_end() {
        let kicks = kicks();
        let requests = &kicks.kicker.requests;
        let state = &requests.queues[0];
        kicks.request(0, 1, true);
        let calls = Cell::new(0);
        let served = serve_queue(state, |_| {
            calls.set(calls.get() + 1);
            kicks.request(0, 9, true);
            true
        });
        assert_eq!((served, calls.get()), (Kicked::More(1 + 9 * (MAX_REQUESTS as u32 - 1)), MAX_REQUESTS));
        assert_eq!(state.load(Ordering::Relaxed), 9, "the last request is still there");
        let sent = Cell::new(0);
        assert_eq!(serve_queue(state, |n| send_all(&sent, n)), Kicked::Done(9));
        assert_eq!(sent.get(), 9);
    }

    #[test]
    fn the_outcome_of_all_queues_is_their_sum() {
        let outcomes = [Kicked::Nothing, Kicked::Done(2), Kicked::More(3), Kicked::Done(4), Kicked::Nothing];
        assert_eq!(outcomes.into_iter().fold(Kicked::Nothing, both), Kicked::More(9));
        assert_eq!(outcomes[..2].iter().copied().fold(Kicked::Nothing, both), Kicked::Done(2));
    }

    #[test]
    fn a_kicker_outlives_its_interface() {
        let kicks = kicks();
        let kicker = kicks.kicker.clone();
        kicks.request(0, 1, true);
        drop(kicks);
        assert_eq!(kicker.kick(), Kicked::Nothing);
    }
}
