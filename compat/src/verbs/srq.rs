//! Shared receive queues.

use std::{
    ffi::c_int,
    sync::{Arc, Mutex},
};

use nix::errno::Errno;
use xwarp_verbs::SharedReceiveQueue;

use super::{
    context::Context,
    memory::Pd,
    qp::{LEAST_SGE, granted},
};
use crate::{
    abi::queue::{
        SRQ_INIT_PD, SRQ_INIT_TYPE, SRQ_LIMIT, SRQ_MAX_WR, SRQ_TYPE_BASIC, ibv_srq, ibv_srq_attr,
        ibv_srq_init_attr, ibv_srq_init_attr_ex,
    },
    boundary::{CPart, Handle, In, Object as _, Out, object, zeroed},
    failure::{self, number, pointer},
    users::{Used, Users, usable},
    wait::{Unacknowledged, lock},
};

/// A shared receive queue.
pub struct Srq {
    c: CPart<ibv_srq>,
    pub srq: SharedReceiveQueue,
    pd: Used<Pd>,
    attributes: Mutex<ibv_srq_attr>,
    pub unacknowledged: Unacknowledged,
    users: Users,
}

object!(Srq: ibv_srq);
usable!(Srq);

fn create(pd: &Arc<Pd>, init: &ibv_srq_init_attr) -> Result<Arc<Srq>, Errno> {
    let ibv_srq_attr { max_wr, max_sge, .. } = init.attr;
    let limits = pd.context.card.device.attributes().limits;
    let max_wr = granted(max_wr, 1, limits.max_srq_wr);
    let max_sge = max_sge.max(LEAST_SGE.min(limits.max_sge));
    let srq = pd.pd.create_srq(max_wr, max_sge).map_err(failure::resource)?;
    let mut c: ibv_srq = zeroed();
    c.context = pd.context.c_ptr();
    c.srq_context = init.srq_context;
    c.pd = pd.c_ptr();
    let attributes = Mutex::new(ibv_srq_attr { max_wr, max_sge, srq_limit: 0 });
    let srq = Arc::new(Srq {
        c: CPart::new(c),
        srq,
        pd: Used::of(pd),
        attributes,
        unacknowledged: Unacknowledged::default(),
        users: Users::default(),
    });
    pd.context.card.add_srq(&srq);
    Handle::publish(Arc::clone(&srq));
    Ok(srq)
}

pub extern "C" fn ibv_create_srq(pd: Handle<Pd>, init: Out<ibv_srq_init_attr>) -> Handle<Srq> {
    let make = || {
        let mut attributes = init.read().ok_or(Errno::EINVAL)?;
        let srq = create(&pd.object()?, &attributes)?;
        let ibv_srq_attr { max_wr, max_sge, .. } = *lock(&srq.attributes);
        (attributes.attr.max_wr, attributes.attr.max_sge) = (max_wr, max_sge);
        init.write(attributes)?;
        Ok(Handle::of(srq.c_ptr()))
    };
    pointer(make())
}

pub extern "C" fn create_srq_ex(_context: Handle<Context>, init: Out<ibv_srq_init_attr_ex>) -> Handle<Srq> {
    let make = || {
        let out = init;
        let mut init = out.read().ok_or(Errno::EINVAL)?;
        let is_basic = init.comp_mask & SRQ_INIT_TYPE == 0 || init.srq_type == SRQ_TYPE_BASIC;
        if !is_basic || init.comp_mask & !(SRQ_INIT_TYPE | SRQ_INIT_PD) != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let pd = Handle::<Pd>::of(init.pd).object()?;
        let srq = create(&pd, &ibv_srq_init_attr { srq_context: init.srq_context, attr: init.attr })?;
        let ibv_srq_attr { max_wr, max_sge, .. } = *lock(&srq.attributes);
        (init.attr.max_wr, init.attr.max_sge) = (max_wr, max_sge);
        out.write(init)?;
        Ok(Handle::of(srq.c_ptr()))
    };
    pointer(make())
}

pub extern "C" fn ibv_modify_srq(srq: Handle<Srq>, attributes: In<ibv_srq_attr>, mask: c_int) -> c_int {
    number(srq.object().and_then(|srq| {
        let attributes = attributes.read().ok_or(Errno::EINVAL)?;
        if mask & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
            return Err(Errno::EINVAL);
        }
        let mut own = lock(&srq.attributes);
        if mask & SRQ_MAX_WR != 0 {
            let limits = srq.pd.context.card.device.attributes().limits;
            let max_wr = granted(attributes.max_wr, 0, limits.max_srq_wr);
            srq.srq.resize(max_wr).map_err(failure::resource)?;
            own.max_wr = max_wr;
        }
        if mask & SRQ_LIMIT != 0 {
            if attributes.srq_limit > own.max_wr {
                return Err(Errno::EINVAL);
            }
            srq.srq.arm_limit(attributes.srq_limit).map_err(failure::resource)?;
            own.srq_limit = attributes.srq_limit;
        }
        Ok(())
    }))
}

pub extern "C" fn ibv_query_srq(srq: Handle<Srq>, out: Out<ibv_srq_attr>) -> c_int {
    number(srq.object().and_then(|srq| out.write(*lock(&srq.attributes))))
}

/// Waits until the program has acknowledged the queue's events.
pub extern "C" fn ibv_destroy_srq(srq: Handle<Srq>) -> c_int {
    number(srq.retire_unused(|srq| {
        srq.pd.context.card.remove_srq(srq);
        srq.unacknowledged.drain();
        srq.pd.release();
    }))
}

impl Srq {
    /// The context that it was created in.
    pub fn context(&self) -> &Arc<Context> {
        &self.pd.context
    }

    /// The limit event was raised, so no limit is armed now.
    pub fn limit_reached(&self) {
        lock(&self.attributes).srq_limit = 0;
    }
}
