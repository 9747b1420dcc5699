//! Completion channels: which queue has a completion, behind a descriptor.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

use nix::errno::Errno;
use xwarp_verbs::{CompletionChannel, CqNotification};

use super::{context::Context, cq::Cq};
use crate::{
    abi::{device::ibv_comp_channel, queue::ibv_cq},
    boundary::{CPart, Handle, Object as _, Out, object},
    failure::{self, number},
    sleep::{Attempt, Next, Sleepers, Wait, cancellable},
    users::{Users, usable},
    wait::{Readable, lock},
};

/// A completion channel.
pub struct CompChannel {
    c: CPart<ibv_comp_channel>,
    pub channel: CompletionChannel,
    fd: Readable,
    sleepers: Arc<Sleepers>,
    pub context: Arc<Context>,
    users: Users,
}

object!(CompChannel: ibv_comp_channel);
usable!(CompChannel);

impl CompChannel {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, Errno> {
        let system = |error: std::io::Error| failure::io(&error);
        let channel = CompletionChannel::new().map_err(system)?;
        let fd = Readable::of(&channel).map_err(system)?;
        let sleepers = Sleepers::new()?;
        let awake = Arc::clone(&sleepers);
        channel.set_hook(move || awake.wake());
        lock(&context.owned).add_channel(&sleepers);
        let c = CPart::new(ibv_comp_channel { context: context.c_ptr(), fd: fd.number(), refcnt: 0 });
        let users = Users::default();
        Ok(Arc::new(Self { c, channel, fd, sleepers, context: Arc::clone(context), users }))
    }

    /// Counts the queues that notify here.
    pub fn count(&self, change: c_int) {
        self.c.update(|c| c.refcnt += change);
    }

    /// The queue of the next notification, which counts as unacknowledged, or how to wait for it.
    fn next(&self) -> Result<Next<Arc<Cq>>, Errno> {
        let card = &self.context.card;
        // Notifications of a queue that is destroyed were removed from the channel.
        let queue = |found: CqNotification| card.cq_of_event(found.cq);
        let poll = || std::iter::from_fn(|| self.channel.poll()).find_map(queue);
        let attend = |limit| {
            card.attend(poll, || Ok(card.device.attend_notification(&self.channel, limit)?.and_then(queue)))
        };
        Wait { fd: Some(&self.fd), sleepers: &self.sleepers, poll, attend }.next()
    }
}

pub extern "C" fn ibv_destroy_comp_channel(channel: Handle<CompChannel>) -> c_int {
    number(channel.withdraw_unused().map(drop))
}

pub extern "C-unwind" fn ibv_get_cq_event(
    channel: Handle<CompChannel>,
    cq: Out<*mut ibv_cq>,
    cq_context: Out<*mut c_void>,
) -> c_int {
    cancellable(|_| get_cq_event(channel, cq, cq_context))
}

extern "C" fn get_cq_event(
    channel: Handle<CompChannel>,
    cq: Out<*mut ibv_cq>,
    cq_context: Out<*mut c_void>,
) -> Attempt {
    let get = || match channel.object()?.next()? {
        Next::Sleep(units) => Ok(Next::Sleep(units)),
        Next::Found(found) => {
            cq.write(found.c_ptr())?;
            cq_context.write(found.c_context()).map(Next::Found)
        }
    };
    Attempt::of(get)
}

pub extern "C" fn ibv_ack_cq_events(cq: Handle<Cq>, number: c_uint) {
    if let Some(cq) = cq.acknowledged() {
        cq.unacknowledged.acknowledged(number.into());
    }
}
