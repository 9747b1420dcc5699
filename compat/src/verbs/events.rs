//! Asynchronous events.

use std::{
    collections::BTreeSet,
    ffi::c_int,
    ptr,
    sync::{Arc, Weak},
};

use nix::errno::Errno;
use xwarp_verbs::{AsyncEvent, CloseReason, CqId, QpFault, QpId, SrqId};

use super::{context::Context, cq::Cq, qp::Qp, srq::Srq};
use crate::{
    abi::device::{event, ibv_async_event},
    boundary::{Handle, In, Object as _, Out},
    sleep::{Attempt, Next, Sleepers, Wait, cancellable},
};

/// Layers of RFC 5040 figure 8.
const LAYER_RDMAP: u8 = 0;
const LAYER_DDP: u8 = 1;

/// The event of a queue pair that failed. A forbidden access of the peer, and an invalid message, have events of their
/// own: types 1 and 2 of the errors of both layers.
fn failure_of(fault: &QpFault) -> c_int {
    match fault {
        QpFault::Local(error) => match error.numbers() {
            (LAYER_RDMAP | LAYER_DDP, 1, _) => event::QP_ACCESS_ERR,
            (LAYER_RDMAP | LAYER_DDP, 2, _) => event::QP_REQ_ERR,
            _ => event::QP_FATAL,
        },
        _ => event::QP_FATAL,
    }
}

/// The objects of a context that have asynchronous events.
#[derive(Default)]
pub struct Owned {
    pub qps: BTreeSet<QpId>,
    pub cqs: BTreeSet<CqId>,
    pub srqs: BTreeSet<SrqId>,
    /// Those who wait at its completion channels.
    channels: Vec<Weak<Sleepers>>,
}

impl Owned {
    /// Adds a completion channel, whose waiters learn the end of the device.
    pub fn add_channel(&mut self, sleepers: &Arc<Sleepers>) {
        self.channels.retain(|channel| channel.strong_count() > 0);
        self.channels.push(Arc::downgrade(sleepers));
    }

    /// The device has ended: the calls that wait at completion channels return.
    pub fn device_ends(&self) {
        self.channels.iter().filter_map(Weak::upgrade).for_each(|sleepers| sleepers.wake());
    }

    /// Whether an event is the context's: of one of its objects, or of the device.
    pub fn concerns(&self, event: &AsyncEvent) -> bool {
        match event {
            // The peer's close, after requests that it should have answered: the connection manager reports it, and no more.
            AsyncEvent::QpFatal { fault: QpFault::Connection(CloseReason::Graceful), .. } => false,
            AsyncEvent::QpFatal { qp, .. } | AsyncEvent::LastWqeReached { qp } => self.qps.contains(qp),
            AsyncEvent::CqOverflow { cq } => self.cqs.contains(cq),
            AsyncEvent::SrqLimit { srq } => self.srqs.contains(srq),
            AsyncEvent::DeviceFatal
            | AsyncEvent::PortUp
            | AsyncEvent::PortDown
            | AsyncEvent::AddressAdded(_)
            | AsyncEvent::AddressRemoved(_) => true,
            // libibverbs has no event for them.
            _ => false,
        }
    }
}

/// An event as C programs know it, whose object counts it as unacknowledged; `None` if the object is destroyed meanwhile.
fn translate(context: &Context, from: &AsyncEvent) -> Option<ibv_async_event> {
    let card = &context.card;
    let qp = |qp: &QpId| Some(card.qp_of_event(*qp)?.c_ptr().cast());
    let port = || ptr::without_provenance_mut(1);
    let (event_type, element) = match from {
        AsyncEvent::QpFatal { qp: id, fault } => (failure_of(fault), qp(id)?),
        AsyncEvent::LastWqeReached { qp: id } => (event::QP_LAST_WQE_REACHED, qp(id)?),
        AsyncEvent::CqOverflow { cq } => (event::CQ_ERR, card.cq_of_event(*cq)?.c_ptr().cast()),
        AsyncEvent::SrqLimit { srq } => {
            let srq = card.srq_of_event(*srq)?;
            srq.limit_reached();
            (event::SRQ_LIMIT_REACHED, srq.c_ptr().cast())
        }
        AsyncEvent::DeviceFatal => (event::DEVICE_FATAL, port()),
        AsyncEvent::PortUp => (event::PORT_ACTIVE, port()),
        AsyncEvent::PortDown => (event::PORT_ERR, port()),
        AsyncEvent::AddressAdded(_) | AsyncEvent::AddressRemoved(_) => (event::GID_CHANGE, port()),
        // `Owned::concerns` has dropped all others.
        _ => return None,
    };
    Some(ibv_async_event { element, event_type })
}

/// The oldest waiting event.
fn poll(context: &Context) -> Option<ibv_async_event> {
    std::iter::from_fn(|| context.async_events.poll()).find_map(|found| translate(context, &found))
}

fn next(context: &Context) -> Result<Next<ibv_async_event>, Errno> {
    let fd = &context.async_fd;
    let poll = || poll(context);
    let attend = |limit| {
        let card = &context.card;
        card.attend(poll, || card.device.attend(fd, limit).map(|_| None))
    };
    Wait { fd: Some(fd), sleepers: &context.sleepers, poll, attend }.next()
}

pub extern "C-unwind" fn ibv_get_async_event(context: Handle<Context>, out: Out<ibv_async_event>) -> c_int {
    cancellable(|_| get_async_event(context, out))
}

extern "C" fn get_async_event(context: Handle<Context>, out: Out<ibv_async_event>) -> Attempt {
    let get = || match next(&*context.object()?)? {
        Next::Sleep(units) => Ok(Next::Sleep(units)),
        Next::Found(event) => out.write(event).map(Next::Found),
    };
    Attempt::of(get)
}

pub extern "C" fn ibv_ack_async_event(event: In<ibv_async_event>) {
    let Some(event) = event.read() else { return };
    let element = event.element;
    match event.event_type {
        event::QP_FATAL | event::QP_REQ_ERR | event::QP_ACCESS_ERR | event::QP_LAST_WQE_REACHED => {
            let qp = Handle::<Qp>::of(element.cast()).acknowledged();
            qp.inspect(|qp| qp.unacknowledged.acknowledged(1));
        }
        event::CQ_ERR => {
            let cq = Handle::<Cq>::of(element.cast()).acknowledged();
            cq.inspect(|cq| cq.unacknowledged.acknowledged(1));
        }
        event::SRQ_LIMIT_REACHED => {
            let srq = Handle::<Srq>::of(element.cast()).acknowledged();
            srq.inspect(|srq| srq.unacknowledged.acknowledged(1));
        }
        _ => {}
    }
}
