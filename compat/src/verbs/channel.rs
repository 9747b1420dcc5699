//! Completion channels: which queue has a completion, behind a descriptor.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

use nix::errno::Errno;
use xwarp_verbs::CompletionChannel;

use super::{context::Context, cq::Cq};
use crate::{
    abi::{device::ibv_comp_channel, queue::ibv_cq},
    boundary::{CPart, Handle, Object as _, Out, object},
    failure::{self, minus_one, number},
    wait::Readable,
};

/// A completion channel.
pub struct CompChannel {
    c: CPart<ibv_comp_channel>,
    pub channel: CompletionChannel,
    fd: Readable,
    context: Arc<Context>,
}

object!(CompChannel: ibv_comp_channel);

impl CompChannel {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, Errno> {
        let system = |error: std::io::Error| failure::io(&error);
        let channel = CompletionChannel::new().map_err(system)?;
        let fd = Readable::of(&channel).map_err(system)?;
        let c = CPart::new(ibv_comp_channel { context: context.c_ptr(), fd: fd.number(), refcnt: 0 });
        Ok(Arc::new(Self { c, channel, fd, context: Arc::clone(context) }))
    }

    /// Counts the queues that notify here.
    pub fn count(&self, change: c_int) {
        self.c.update(|c| c.refcnt += change);
    }

    /// The queue of the next notification, which counts as unacknowledged.
    fn next(&self) -> Result<Arc<Cq>, Errno> {
        loop {
            let mut notification = self.channel.poll();
            if notification.is_none() {
                if self.fd.is_nonblocking() {
                    return Err(Errno::EAGAIN);
                }
                let waited = self.context.card.device.wait_notification(&self.channel, None);
                notification = waited.map_err(|error| failure::io(&error))?;
            }
            // Notifications of a queue that is destroyed were removed from the channel.
            if let Some(cq) = notification.and_then(|found| self.context.card.cq_of_event(found.cq)) {
                return Ok(cq);
            }
        }
    }
}

pub extern "C" fn ibv_destroy_comp_channel(channel: Handle<CompChannel>) -> c_int {
    number(channel.withdraw_unused().map(drop))
}

pub extern "C" fn ibv_get_cq_event(
    channel: Handle<CompChannel>,
    cq: Out<*mut ibv_cq>,
    cq_context: Out<*mut c_void>,
) -> c_int {
    let get = || {
        let found = channel.object()?.next()?;
        cq.write(found.c_ptr())?;
        cq_context.write(found.c_context())
    };
    minus_one(get())
}

pub extern "C" fn ibv_ack_cq_events(cq: Handle<Cq>, number: c_uint) {
    if let Some(cq) = cq.acknowledged() {
        cq.unacknowledged.acknowledged(number.into());
    }
}
