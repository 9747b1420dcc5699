//! Listeners that a program has just closed. perftest's server asks its client to connect, closes its listener and then
//! listens again at the same port; a faster client would be refused. Therefore a closed listener holds requests for a
//! short time: the next listener at its address takes it over with its requests, else it is closed.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use xwarp_verbs::cm::{CmId, EventChannel};

use super::id::{End, Id};
use crate::{
    verbs::card::Card,
    wait::{lock, spawn},
};

/// Time for which a closed listener holds requests.
const HOLD: Duration = Duration::from_secs(5);

struct Parked {
    card: Arc<Card>,
    address: SocketAddr,
    only_family: bool,
    cm: CmId,
    _events: EventChannel,
}

/// Parked listeners, each with the time at which it is closed, earliest first.
struct Lot<T> {
    parked: VecDeque<(Instant, T)>,
    /// The process in which a thread closes listeners: a child does not have its parent's threads.
    attended_in: Option<u32>,
}

static LOT: Mutex<Lot<Parked>> = Mutex::new(Lot::new());

impl<T> Lot<T> {
    const fn new() -> Self {
        Self { parked: VecDeque::new(), attended_in: None }
    }

    /// Parks a listener. Returns whether `process` needs a thread that closes listeners.
    fn park(&mut self, until: Instant, listener: T, process: u32) -> bool {
        self.parked.push_back((until, listener));
        self.attended_in.replace(process) != Some(process)
    }

    /// Removes the listeners whose time has passed. Also returns the time of the next one; the thread ends if there is
    /// none.
    fn expired(&mut self, now: Instant) -> (Vec<T>, Option<Instant>) {
        let due = self.parked.partition_point(|(until, _)| *until <= now);
        let gone = self.parked.drain(..due).map(|(_, listener)| listener).collect();
        let next = self.parked.front().map(|(until, _)| *until);
        if next.is_none() {
            self.attended_in = None;
        }
        (gone, next)
    }

    fn take(&mut self, wanted: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.parked.iter().position(|(_, listener)| wanted(listener))?;
        self.parked.remove(index).map(|(_, listener)| listener)
    }
}

/// Keeps a listener for the next one at its address.
pub fn park(end: End, only_family: bool) {
    let End { lane, mut cm } = end;
    // Only requests wait for the next listener.
    let (Some(address), Ok(events)) = (cm.local_address(), EventChannel::filtered(|_| false)) else {
        return;
    };
    cm.migrate(&events);
    let card = Arc::clone(&lane.context.card);
    let parked = Parked { card, address, only_family, cm, _events: events };
    let needs_thread = lock(&LOT).park(Instant::now() + HOLD, parked, std::process::id());
    if needs_thread && spawn("xwarp-parking", attend).is_err() {
        let mut lot = lock(&LOT);
        lot.attended_in = None;
        let all = std::mem::take(&mut lot.parked);
        drop(lot);
        drop(all);
    }
}

/// Closes listeners whose time has passed, until none is left.
fn attend() {
    loop {
        let now = Instant::now();
        let (gone, next) = lock(&LOT).expired(now);
        drop(gone);
        let Some(next) = next else { return };
        thread::sleep(next - now);
    }
}

/// The listener that was parked at the address of `end`, for `id` on the events of `end`.
pub fn take(end: &End, id: &Arc<Id>, only_family: bool) -> Option<CmId> {
    let address = end.cm.local_address()?;
    let here =
        |parked: &Parked| Arc::ptr_eq(&parked.card, &end.lane.context.card) && parked.address == address;
    let parked = lock(&LOT).take(here)?;
    // A listener for other families would receive requests of the new listener.
    if parked.only_family != only_family {
        return None;
    }
    let mut cm = parked.cm;
    // The held requests follow at once, so its identifier must be registered before.
    end.lane.add(cm.key(), id);
    cm.migrate(&end.lane.events);
    Some(cm)
}

/// Closes the listeners that were parked at single addresses with `port`: a new wildcard listener will cover them.
pub fn close_covered(card: &Arc<Card>, port: u16) {
    let covered = |parked: &Parked| {
        let address = parked.address;
        Arc::ptr_eq(&parked.card, card) && address.port() == port && !address.ip().is_unspecified()
    };
    loop {
        let found = lock(&LOT).take(covered);
        if found.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_closes_all_parked_listeners_and_ends_with_the_last() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lot = Lot::new();
        assert!(lot.park(at(5), 'a', 1), "the first one needs a thread");
        assert!(!lot.park(at(6), 'b', 1));
        assert!(!lot.park(at(8), 'c', 1));
        assert_eq!(lot.expired(at(4)), (vec![], Some(at(5))));
        assert_eq!(lot.take(|listener| *listener == 'b'), Some('b'));
        assert_eq!(lot.take(|listener| *listener == 'b'), None);
        assert_eq!(lot.expired(at(5)), (vec!['a'], Some(at(8))));
        assert!(lot.park(at(9), 'd', 2), "a child process has no thread of its parent's");
        assert_eq!(lot.expired(at(9)), (vec!['c', 'd'], None));
        assert!(lot.park(at(20), 'e', 2), "the thread has ended");
    }
}
