//! Listeners that a program has just closed. perftest's server tells its client to connect, closes its listener and then listens
//! again at the same port; a client that is faster would be refused. Therefore a closed listener holds requests for a short
//! time: the next listener at its address takes it over with its requests, else it is closed.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::sys::signal::{SigSet, SigmaskHow};
use xwarp_verbs::cm::{CmId, EventChannel};

use super::id::{End, Id};
use crate::{verbs::card::Card, wait::lock};

/// How long a closed listener holds requests.
const HOLD: Duration = Duration::from_secs(5);

struct Parked {
    /// Which one, among those that were parked.
    number: u64,
    card: Arc<Card>,
    address: SocketAddr,
    cm: CmId,
    _events: EventChannel,
}

struct Lot {
    parked: Vec<Parked>,
    next: u64,
}

static LOT: Mutex<Lot> = Mutex::new(Lot { parked: Vec::new(), next: 0 });

/// Keeps a listener for the next one at its address.
pub fn park(end: End) {
    let End { lane, mut cm } = end;
    let (Some(address), Ok(events)) = (cm.local_address(), EventChannel::new()) else { return };
    cm.migrate(&events);
    let number = {
        let mut lot = lock(&LOT);
        lot.next += 1;
        let number = lot.next;
        let card = Arc::clone(&lane.context.card);
        lot.parked.push(Parked { number, card, address, cm, _events: events });
        number
    };
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let spawned = std::thread::Builder::new().name("xwarp-parking".into()).spawn(move || {
        std::thread::sleep(HOLD);
        tow(number);
    });
    if let Ok(mask) = mask {
        let _ = mask.thread_set_mask();
    }
    if spawned.is_err() {
        tow(number);
    }
}

/// Closes a listener that nobody has taken over.
fn tow(number: u64) {
    let mut lot = lock(&LOT);
    let index = lot.parked.iter().position(|parked| parked.number == number);
    let gone = index.map(|index| lot.parked.swap_remove(index));
    drop(lot);
    drop(gone);
}

/// The listener that was parked at the address of `end`, for `id` on the events of `end`.
pub fn take(end: &End, id: &Arc<Id>) -> Option<CmId> {
    let address = end.cm.local_address()?;
    let mut lot = lock(&LOT);
    let same =
        |parked: &Parked| Arc::ptr_eq(&parked.card, &end.lane.context.card) && parked.address == address;
    let index = lot.parked.iter().position(same)?;
    let mut cm = lot.parked.swap_remove(index).cm;
    // The requests that it has held follow at once, so its identifier must be known before.
    end.lane.add(cm.key(), id);
    cm.migrate(&end.lane.events);
    Some(cm)
}
