//! Asynchronous events.

use std::{ffi::c_int, ptr, sync::Arc};

use nix::errno::Errno;
use xwarp_verbs::AsyncEvent;

use super::{context::Context, cq::Cq, qp::Qp, srq::Srq};
use crate::{
    abi::device::{event, ibv_async_event},
    boundary::{Handle, In, Object as _, Out},
    failure::{self, minus_one},
};

/// The object of an event, for the acknowledgement.
enum Concerned {
    Port,
    Qp(Arc<Qp>),
    Cq(Arc<Cq>),
    Srq(Arc<Srq>),
}

/// An event as C programs know it; `None` for one that libibverbs has not, or whose object is gone.
fn translate(context: &Context, from: &AsyncEvent) -> Option<(c_int, Concerned)> {
    let card = &context.card;
    Some(match from {
        AsyncEvent::QpFatal { qp, .. } => (event::QP_FATAL, Concerned::Qp(card.qp(*qp)?)),
        AsyncEvent::LastWqeReached { qp } => (event::QP_LAST_WQE_REACHED, Concerned::Qp(card.qp(*qp)?)),
        AsyncEvent::CqOverflow { cq } => (event::CQ_ERR, Concerned::Cq(card.cq(*cq)?)),
        AsyncEvent::SrqLimit { srq } => {
            let srq = card.srq(*srq)?;
            srq.limit_reached();
            (event::SRQ_LIMIT_REACHED, Concerned::Srq(srq))
        }
        AsyncEvent::DeviceFatal => (event::DEVICE_FATAL, Concerned::Port),
        AsyncEvent::PortUp => (event::PORT_ACTIVE, Concerned::Port),
        AsyncEvent::PortDown => (event::PORT_ERR, Concerned::Port),
        AsyncEvent::AddressAdded(_) | AsyncEvent::AddressRemoved(_) => (event::GID_CHANGE, Concerned::Port),
        _ => return None,
    })
}

fn next(context: &Context) -> Result<ibv_async_event, Errno> {
    loop {
        while let Some(found) = context.async_events.poll() {
            let Some((event_type, concerned)) = translate(context, &found) else { continue };
            let element = match &concerned {
                Concerned::Port => ptr::without_provenance_mut(1),
                Concerned::Qp(qp) => {
                    qp.unacknowledged.returned();
                    qp.c_ptr().cast()
                }
                Concerned::Cq(cq) => {
                    cq.unacknowledged.returned();
                    cq.c_ptr().cast()
                }
                Concerned::Srq(srq) => {
                    srq.unacknowledged.returned();
                    srq.c_ptr().cast()
                }
            };
            return Ok(ibv_async_event { element, event_type });
        }
        if context.async_fd.is_nonblocking() {
            return Err(Errno::EAGAIN);
        }
        context.card.device.wait(&context.async_fd, None).map_err(|error| failure::io(&error))?;
    }
}

pub extern "C" fn ibv_get_async_event(context: Handle<Context>, out: Out<ibv_async_event>) -> c_int {
    let get = || out.write(next(&*context.object()?)?);
    minus_one(get())
}

pub extern "C" fn ibv_ack_async_event(event: In<ibv_async_event>) {
    let Some(event) = event.read() else { return };
    match event.event_type {
        event::QP_FATAL | event::QP_LAST_WQE_REACHED => {
            let _ =
                Handle::<Qp>::of(event.element.cast()).object().map(|qp| qp.unacknowledged.acknowledged(1));
        }
        event::CQ_ERR => {
            let _ =
                Handle::<Cq>::of(event.element.cast()).object().map(|cq| cq.unacknowledged.acknowledged(1));
        }
        event::SRQ_LIMIT_REACHED => {
            let _ = Handle::<Srq>::of(event.element.cast())
                .object()
                .map(|srq| srq.unacknowledged.acknowledged(1));
        }
        _ => {}
    }
}
