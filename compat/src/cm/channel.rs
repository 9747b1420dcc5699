//! Event channels: the events of identifiers, behind a descriptor.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    os::fd::RawFd,
    ptr,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread::{self, ThreadId},
    time::Duration,
};

use nix::errno::Errno;
use xwarp_verbs::{
    DeviceFailed,
    cm::{CmKey, Event, EventChannel},
};

use super::{
    event::{self, CmEvent},
    id::{Id, Reports},
};
use crate::{
    abi::cm::{rdma_cm_event, rdma_event_channel},
    boundary::{CPart, Handle, Out, object},
    failure,
    sleep::{Attempt, Next, Sleepers, Wait, cancellable},
    verbs::context::Context,
    wait::{BellQueue, Readable, lock},
};

/// Longest time that the end of a channel waits for the return of a thread that reads its events.
const RETURN: Duration = Duration::from_millis(100);

/// The last thread that called [`rdma_get_cm_event`], and whether it is still in its call.
#[derive(Default)]
struct Reader {
    last: Option<ThreadId>,
    inside: bool,
}

/// An event channel.
pub struct Channel {
    c: CPart<rdma_event_channel>,
    fd: Readable,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Identifiers whose connection ended with their queue pair, and whose `DISCONNECTED` event is due.
    ended: BellQueue<Weak<Id>>,
    /// Held from the taking of an event until it counts as unacknowledged. Otherwise another thread could take the
    /// identifier's next event and destroy the identifier, and the first event would be lost.
    taking: Mutex<()>,
    sleepers: Arc<Sleepers>,
    reader: Mutex<Reader>,
    entered: Condvar,
}

/// The identifiers of a lane.
type Ids = BTreeMap<CmKey, (Weak<Id>, Arc<Reports>)>;

/// The events of one device on a channel.
pub struct Lane {
    pub context: Arc<Context>,
    pub events: EventChannel,
    ids: Arc<Mutex<Ids>>,
}

object!(Channel: rdma_event_channel);

impl Lane {
    /// A lane whose descriptor is readable only for events that are reported to the program.
    fn new(context: &Arc<Context>) -> Result<Self, Errno> {
        let ids: Arc<Mutex<Ids>> = Arc::default();
        let known = Arc::clone(&ids);
        // The engine is locked. Therefore this does not upgrade the weak reference: the end of the identifier would need the lock.
        let wants = move |event: &Event| {
            lock(&known).get(&event.id).is_none_or(|(_, reports)| reports.wants(&event.kind))
        };
        let events = EventChannel::filtered(wants).map_err(|error| failure::io(&error))?;
        Ok(Self { context: Arc::clone(context), events, ids })
    }

    pub fn add(&self, key: CmKey, id: &Arc<Id>) {
        lock(&self.ids).insert(key, (Arc::downgrade(id), Arc::clone(&id.reports)));
    }

    pub fn remove(&self, key: CmKey) {
        lock(&self.ids).remove(&key);
    }

    pub fn id(&self, key: CmKey) -> Option<Arc<Id>> {
        lock(&self.ids).get(&key)?.0.upgrade()
    }
}

impl Channel {
    pub fn new() -> Result<Arc<Self>, Errno> {
        let system = |error: std::io::Error| failure::io(&error);
        let fd = Readable::new().map_err(system)?;
        let ended = BellQueue::new().map_err(system)?;
        fd.add(&ended).map_err(system)?;
        let c = CPart::new(rdma_event_channel { fd: fd.number() });
        Ok(Arc::new(Self {
            c,
            fd,
            lanes: Mutex::default(),
            ended,
            taking: Mutex::default(),
            sleepers: Sleepers::new()?,
            reader: Mutex::default(),
            entered: Condvar::new(),
        }))
    }

    /// The lane of a device.
    pub fn lane(&self, context: &Arc<Context>) -> Result<Arc<Lane>, Errno> {
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.iter().find(|lane| Arc::ptr_eq(&lane.context, context)) {
            return Ok(Arc::clone(lane));
        }
        let lane = Arc::new(Lane::new(context)?);
        let sleepers = Arc::clone(&self.sleepers);
        lane.events.set_hook(move || sleepers.wake());
        self.fd.add(&lane.events).map_err(|error| failure::io(&error))?;
        lanes.push(Arc::clone(&lane));
        Ok(lane)
    }

    /// Queues the `DISCONNECTED` event of `id`.
    pub fn push_ended(&self, id: &Arc<Id>) {
        self.ended.push(Arc::downgrade(id));
        self.sleepers.wake();
    }

    /// Removes the `DISCONNECTED` event of `id`, if it waits. Returns whether it did.
    pub fn forget_ended(&self, id: &Arc<Id>) -> bool {
        self.ended.remove_if(|ended| ptr::eq(ended.as_ptr(), Arc::as_ptr(id)))
    }

    fn next_ended(&self) -> Option<Arc<CmEvent>> {
        std::iter::from_fn(|| self.ended.pop()).find_map(|id| CmEvent::disconnected(&id.upgrade()?))
    }

    /// The next event for the program, without waiting.
    fn poll(self: &Arc<Self>) -> Option<Arc<CmEvent>> {
        let _taking = lock(&self.taking);
        if let Some(event) = self.next_ended() {
            return Some(event);
        }
        let lanes = lock(&self.lanes).clone();
        lanes.iter().find_map(|lane| {
            std::iter::from_fn(|| lane.events.poll()).find_map(|found| event::translate(self, lane, found))
        })
    }

    /// Records that the calling thread is about to read events, or has finished.
    fn reads(&self, inside: bool) {
        let caller = Some(thread::current().id());
        let mut reader = lock(&self.reader);
        if inside || reader.last == caller {
            *reader = Reader { last: caller, inside };
        }
        drop(reader);
        self.entered.notify_all();
    }

    /// Waits until the other thread that reads events waits for the next one. Programs destroy the channel while that
    /// thread is between two calls (rping), so that its next call would fail. With librdmacm the destruction takes
    /// longer, so the thread is in its call by then.
    fn await_reader(&self) {
        let returns = |reader: &mut Reader| {
            !reader.inside && reader.last.is_some_and(|last| last != thread::current().id())
        };
        let waited = self.entered.wait_timeout_while(lock(&self.reader), RETURN, returns);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Why no event can come: all devices of the channel's identifiers have failed, or are those of a parent.
    fn failure(&self) -> Option<DeviceFailed> {
        let lanes = lock(&self.lanes);
        let mut failures = lanes.iter().map(|lane| lane.context.card.device.failure());
        let first = failures.next()??;
        failures.all(|failure| failure.is_some()).then_some(first)
    }

    /// The next event, or how to wait for it. The caller waits if `always` or if the program has not made the descriptor
    /// non-blocking.
    pub fn next(self: &Arc<Self>, always: bool) -> Result<Next<Arc<CmEvent>>, Errno> {
        if let Some(event) = self.poll() {
            return Ok(Next::Found(event));
        }
        if let Some(failed) = self.failure() {
            return Err(failure::device(&failed));
        }
        let attend = |limit| {
            let only = match &lock(&self.lanes)[..] {
                [lane] => Some(Arc::clone(&lane.context)),
                _ => None,
            };
            // This thread runs the engine meanwhile.
            only.map_or(Ok(false), |context| context.card.device.attend(&self.fd, limit)).map(|_| None)
        };
        let fd = (!always).then_some(&self.fd);
        Wait { fd, sleepers: &self.sleepers, poll: || self.poll(), attend }.next()
    }
}

pub extern "C" fn rdma_create_event_channel() -> Handle<Channel> {
    failure::pointer(Channel::new().map(Handle::publish))
}

pub extern "C" fn rdma_destroy_event_channel(channel: Handle<Channel>) {
    if let Ok(found) = channel.object() {
        found.await_reader();
        // A thread in its call sleeps on, as in a `read` of a descriptor that another thread closes: the descriptor on which it sleeps, or
        // is about to, stays open.
        if lock(&found.reader).inside {
            std::mem::forget(Arc::clone(&found.sleepers));
        }
    }
    let _ = channel.withdraw();
}

pub extern "C-unwind" fn rdma_get_cm_event(channel: Handle<Channel>, out: Out<*mut rdma_cm_event>) -> c_int {
    cancellable(|slept| get_cm_event(channel, out, slept))
}

/// `slept`: the descriptor on which this call has slept, or -1.
extern "C" fn get_cm_event(channel: Handle<Channel>, out: Out<*mut rdma_cm_event>, slept: RawFd) -> Attempt {
    let get = || {
        if out.is_null() {
            return Err(Errno::EINVAL);
        }
        let channel = match channel.object() {
            // The program has destroyed the channel during the call, which sleeps on.
            Err(_) if slept >= 0 => return Ok(Next::Sleep(slept)),
            found => found?,
        };
        channel.reads(true);
        let next = channel.next(false);
        if let Ok(Next::Found(event)) = &next {
            event.hold_back();
        }
        channel.reads(matches!(next, Ok(Next::Sleep(_))));
        match next? {
            Next::Sleep(units) => Ok(Next::Sleep(units)),
            Next::Found(event) => out.write(Handle::publish(event).as_ptr()).map(Next::Found),
        }
    };
    Attempt::of(get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_channel_waits_for_the_thread_that_reads_it() {
        let channel = Channel::new().unwrap();
        channel.await_reader();
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let reader = {
            let channel = Arc::clone(&channel);
            thread::spawn(move || {
                channel.reads(true);
                channel.reads(false);
                thread::sleep(Duration::from_millis(20));
                channel.reads(true);
                receiver.recv().unwrap();
            })
        };
        while lock(&channel.reader).last.is_none() {
            thread::yield_now();
        }
        channel.await_reader();
        assert!(lock(&channel.reader).inside);
        sender.send(()).unwrap();
        reader.join().unwrap();
    }
}
