//! Event channels: the events of identifiers, behind a descriptor.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    ptr,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread::{self, ThreadId},
    time::Duration,
};

use nix::errno::Errno;
use rustix::event::{PollFd, PollFlags, poll};
use xwarp_verbs::{
    DeviceFailed,
    cm::{CmKey, Event, EventChannel},
};

use super::{
    event::{self, CmEvent},
    id::{Id, Reports},
};
use crate::{
    abi::cm::rdma_event_channel,
    boundary::{CPart, Handle, Out, object},
    failure::{self, minus_one},
    verbs::context::Context,
    wait::{BellQueue, Readable, lock},
};

/// Longest time that the end of a channel waits for the return of a thread that reads its events.
const RETURN: Duration = Duration::from_millis(100);

/// The threads in [`rdma_get_cm_event`].
#[derive(Default)]
struct Readers {
    inside: usize,
    /// The last thread that called.
    last: Option<ThreadId>,
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
    readers: Mutex<Readers>,
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
            readers: Mutex::default(),
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
        self.fd.add(&lane.events).map_err(|error| failure::io(&error))?;
        lanes.push(Arc::clone(&lane));
        Ok(lane)
    }

    /// Queues the `DISCONNECTED` event of `id`.
    pub fn push_ended(&self, id: &Arc<Id>) {
        self.ended.push(Arc::downgrade(id));
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

    /// Calls `read` as one of the readers.
    fn reading<T>(&self, read: impl FnOnce() -> T) -> T {
        {
            let mut readers = lock(&self.readers);
            readers.inside += 1;
            readers.last = Some(thread::current().id());
        }
        self.entered.notify_all();
        let result = read();
        lock(&self.readers).inside -= 1;
        result
    }

    /// Waits until the other thread that reads events waits for the next one. Programs destroy the channel while that
    /// thread is between two calls (rping), so that its next call would fail. With librdmacm the destruction takes
    /// longer, so the thread is in its call by then.
    fn await_reader(&self) {
        let returns = |readers: &mut Readers| {
            readers.inside == 0 && readers.last.is_some_and(|last| last != thread::current().id())
        };
        let readers = lock(&self.readers);
        let waited = self.entered.wait_timeout_while(readers, RETURN, returns);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Why no event can come: all devices of the channel's identifiers have failed, or are those of a parent.
    fn failure(&self) -> Option<DeviceFailed> {
        let lanes = lock(&self.lanes);
        let mut failures = lanes.iter().map(|lane| lane.context.card.device.failure());
        let first = failures.next()??;
        failures.all(|failure| failure.is_some()).then_some(first)
    }

    /// The next event; waits for it if `always` or if the program has not made the descriptor non-blocking.
    pub fn next(self: &Arc<Self>, always: bool) -> Result<Arc<CmEvent>, Errno> {
        loop {
            if let Some(event) = self.poll() {
                return Ok(event);
            }
            if let Some(failed) = self.failure() {
                return Err(failure::device(&failed));
            }
            if !always && self.fd.is_nonblocking() {
                return Err(Errno::EAGAIN);
            }
            let only = match &lock(&self.lanes)[..] {
                [lane] => Some(Arc::clone(&lane.context)),
                _ => None,
            };
            match only {
                // This thread runs the engine meanwhile.
                Some(context) => {
                    context.card.device.wait(&self.fd, None).map_err(|error| failure::io(&error))?;
                }
                None => {
                    let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None);
                }
            }
        }
    }
}

pub extern "C" fn rdma_create_event_channel() -> Handle<Channel> {
    failure::pointer(Channel::new().map(Handle::publish))
}

pub extern "C" fn rdma_destroy_event_channel(channel: Handle<Channel>) {
    if let Ok(found) = channel.object() {
        found.await_reader();
    }
    let _ = channel.withdraw();
}

pub extern "C" fn rdma_get_cm_event(
    channel: Handle<Channel>,
    out: Out<*mut crate::abi::cm::rdma_cm_event>,
) -> c_int {
    let get = || {
        if out.is_null() {
            return Err(Errno::EINVAL);
        }
        let channel = channel.object()?;
        let event = channel.reading(|| channel.next(false))?;
        let event = Handle::publish(event);
        out.write(event.as_ptr())
    };
    minus_one(get())
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
                channel.reading(|| ());
                thread::sleep(Duration::from_millis(20));
                channel.reading(|| receiver.recv().unwrap());
            })
        };
        while lock(&channel.readers).last.is_none() {
            thread::yield_now();
        }
        channel.await_reader();
        assert_eq!(lock(&channel.readers).inside, 1);
        sender.send(()).unwrap();
        reader.join().unwrap();
    }
}
