//! Queue pairs and shared receive queues of identifiers, and `rdma_create_ep`.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::Arc,
};

use nix::errno::Errno;

use super::{
    id::{self, Id, QpTemplate, Stage},
    resolve,
};
use crate::{
    abi::{
        cm::{rai, rdma_addrinfo, rdma_cm_id},
        queue::{ibv_qp_attr, ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_srq_init_attr, qp_mask, qp_state},
    },
    boundary::{Handle, In, Object as _, Out},
    failure::minus_one,
    sleep::{Attempt, Next, cancellable, uncancelled},
    verbs::{
        channel::{CompChannel, ibv_destroy_comp_channel},
        context::Context,
        cq::{Cq, ibv_destroy_cq},
        memory::Pd,
        qp::{self, Qp},
        srq::{Srq, ibv_create_srq, ibv_destroy_srq},
    },
    wait::{HeldLock, lock},
};

/// Access rights of connection manager's queue pairs: all remote ones.
const REMOTE_ACCESS: u32 = 0xe;
const RESOLVE_MS: c_int = 2000;

/// The domain for an identifier's queue pair: the program's, else the identifier's.
fn domain(id: &Id, pd: Handle<Pd>) -> Result<Arc<Pd>, Errno> {
    let pd = if pd.is_null() { Handle::of(id.c.update(|c| c.pd)) } else { pd };
    pd.object()
}

/// Creates the completion queue that the program left to the connection manager, with a channel of its own.
fn own_cq(
    id: &Arc<Id>,
    context: &Arc<Context>,
    entries: u32,
) -> Result<(Handle<CompChannel>, Handle<Cq>), Errno> {
    let channel = CompChannel::new(context)?;
    let entries = c_int::try_from(entries.max(1)).map_err(|_| Errno::EINVAL)?;
    let polling = HeldLock::new(true);
    let cq = Cq::new(context, entries, id.c_ptr().cast::<c_void>(), Some(Arc::clone(&channel)), 0, polling)?;
    Ok((Handle::publish(channel), Handle::publish(cq)))
}

/// Creates the identifier's completion queues that are missing in `init`.
fn add_cqs(id: &Arc<Id>, context: &Arc<Context>, init: &mut ibv_qp_init_attr) -> Result<(), Errno> {
    if init.recv_cq.is_null() {
        let (channel, cq) = own_cq(id, context, init.cap.max_recv_wr)?;
        id.c.update(|c| (c.recv_cq_channel, c.recv_cq) = (channel.as_ptr(), cq.as_ptr()));
        init.recv_cq = cq.as_ptr();
    }
    if init.send_cq.is_null() {
        let (channel, cq) = own_cq(id, context, init.cap.max_send_wr)?;
        id.c.update(|c| (c.send_cq_channel, c.send_cq) = (channel.as_ptr(), cq.as_ptr()));
        init.send_cq = cq.as_ptr();
    }
    Ok(())
}

fn drop_cqs(id: &Id) {
    let (channels, cqs) = id.c.update(|c| {
        let own = ([c.send_cq_channel, c.recv_cq_channel], [c.send_cq, c.recv_cq]);
        (c.send_cq_channel, c.recv_cq_channel) = (ptr::null_mut(), ptr::null_mut());
        (c.send_cq, c.recv_cq) = (ptr::null_mut(), ptr::null_mut());
        own
    });
    for cq in cqs.into_iter().filter(|cq| !cq.is_null()) {
        ibv_destroy_cq(Handle::of(cq));
    }
    for channel in channels.into_iter().filter(|channel| !channel.is_null()) {
        ibv_destroy_comp_channel(Handle::of(channel));
    }
}

/// Creates the identifier's queue pair with `make`, and completion queues where `init` has none.
fn create_qp(
    id: &Arc<Id>,
    pd: &Arc<Pd>,
    init: &mut ibv_qp_init_attr,
    make: impl FnOnce(&mut ibv_qp_init_attr) -> Result<Arc<Qp>, Errno>,
) -> Result<(), Errno> {
    let is_ours = id.c.update(|c| c.verbs) == pd.context.c_ptr();
    if id.qp().is_some() || !is_ours {
        return Err(Errno::EINVAL);
    }
    let srq = id.c.update(|c| c.srq);
    if init.srq.is_null() {
        init.srq = srq;
    }
    add_cqs(id, &pd.context, init)?;
    let made = make(init);
    let Ok(qp) = made else {
        drop_cqs(id);
        return made.map(drop);
    };
    qp.set_state(qp_state::INIT);
    lock(&id.inner).qp = Arc::downgrade(&qp);
    id.c.update(|c| {
        c.qp = qp.c_ptr();
        c.pd = pd.c_ptr();
    });
    Ok(())
}

/// Creates the identifier's queue pair in the domain `pd`, or in the identifier's.
fn create_plain_qp(id: &Arc<Id>, pd: Handle<Pd>, init: &mut ibv_qp_init_attr) -> Result<(), Errno> {
    let pd = domain(id, pd)?;
    create_qp(id, &pd, init, |init| Qp::new(&pd, init))
}

pub extern "C" fn rdma_create_qp(id: Handle<Id>, pd: Handle<Pd>, init: Out<ibv_qp_init_attr>) -> c_int {
    let create = || {
        let id = id.object()?;
        let mut attributes = init.read().ok_or(Errno::EINVAL)?;
        create_plain_qp(&id, pd, &mut attributes)?;
        init.write(attributes)
    };
    minus_one(create())
}

pub extern "C" fn rdma_create_qp_ex(id: Handle<Id>, init: Out<ibv_qp_init_attr_ex>) -> c_int {
    let create = || {
        let id = id.object()?;
        let mut attributes = init.read().ok_or(Errno::EINVAL)?;
        let own = domain(&id, Handle::of(qp::domain_of(&attributes)))?;
        let mut base = attributes.base();
        create_qp(&id, &own, &mut base, |base| {
            (attributes.send_cq, attributes.recv_cq, attributes.srq) = (base.send_cq, base.recv_cq, base.srq);
            qp::create_ex(&own, &mut attributes)
        })?;
        init.write(attributes)
    };
    minus_one(create())
}

pub extern "C" fn rdma_destroy_qp(id: Handle<Id>) {
    if let Ok(id) = id.object() {
        let qp = id.c.update(|c| std::mem::replace(&mut c.qp, ptr::null_mut()));
        if qp::destroy(Handle::of(qp)).is_ok() {
            id.queue_pair_gone();
            drop_cqs(&id);
        }
    }
}

pub extern "C" fn rdma_create_srq(id: Handle<Id>, pd: Handle<Pd>, init: Out<ibv_srq_init_attr>) -> c_int {
    let create = || {
        let id = id.object()?;
        let pd = domain(&id, pd)?;
        let srq: Handle<Srq> = ibv_create_srq(Handle::of(pd.c_ptr()), init);
        if srq.is_null() {
            return Err(Errno::last());
        }
        id.c.update(|c| c.srq = srq.as_ptr());
        Ok(())
    };
    minus_one(create())
}

pub extern "C" fn rdma_destroy_srq(id: Handle<Id>) {
    if let Ok(id) = id.object() {
        let srq = id.c.update(|c| std::mem::replace(&mut c.srq, ptr::null_mut()));
        ibv_destroy_srq(Handle::of(srq));
    }
}

/// The attributes for the states that a program sets itself: on iWARP, only those of INIT.
pub extern "C" fn rdma_init_qp_attr(id: Handle<Id>, attributes: Out<ibv_qp_attr>, mask: Out<c_int>) -> c_int {
    let init = || {
        id.object()?;
        let mut given = attributes.read().ok_or(Errno::EINVAL)?;
        if !(qp_state::RESET..=qp_state::ERR).contains(&given.qp_state) {
            return Err(Errno::EINVAL);
        }
        given.qp_access_flags = REMOTE_ACCESS;
        given.port_num = 1;
        attributes.write(given)?;
        let is_rts = given.qp_state == qp_state::RTS;
        mask.write(if is_rts { qp_mask::STATE } else { qp_mask::STATE | qp_mask::ACCESS_FLAGS })
    };
    minus_one(init())
}

pub extern "C" fn rdma_create_ep(
    out: Out<*mut rdma_cm_id>,
    info: In<rdma_addrinfo>,
    pd: Handle<Pd>,
    init: Out<ibv_qp_init_attr>,
) -> c_int {
    let create = || {
        let info = info.read().ok_or(Errno::EINVAL)?;
        let id = id::create(Handle::NULL, ptr::null_mut(), info.ai_port_space)?;
        let handle = Handle::of(id.c_ptr());
        let made = prepare(&id, handle, &info, pd, init).and_then(|()| out.write(handle.as_ptr()));
        if made.is_err() {
            let _ = id::destroy(handle);
        }
        made
    };
    minus_one(uncancelled(create))
}

/// A passive endpoint is bound; an active one is resolved and has a queue pair.
fn prepare(
    id: &Arc<Id>,
    handle: Handle<Id>,
    info: &rdma_addrinfo,
    pd: Handle<Pd>,
    init: Out<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let source = In::of(info.ai_src_addr.cast_const());
    if info.ai_flags & rai::PASSIVE != 0 {
        resolve::bind(handle, source)?;
        id.template.update(|template| {
            let typed = |init| ibv_qp_init_attr { qp_type: info.ai_qp_type, ..init };
            *template = init.read().map(|init| QpTemplate(pd, typed(init)));
        });
        return Ok(());
    }
    resolve::resolve_address(id, source, In::of(info.ai_dst_addr.cast_const()), RESOLVE_MS)?;
    id.complete()?;
    resolve::resolve_route(id)?;
    id.complete()?;
    if let Some(mut attributes) = init.read() {
        attributes.qp_type = info.ai_qp_type;
        create_plain_qp(id, pd, &mut attributes)?;
        init.write(attributes)?;
    }
    Ok(())
}

pub extern "C" fn rdma_destroy_ep(id: Handle<Id>) {
    if let Ok(object) = id.object() {
        if !object.c.update(|c| c.qp).is_null() {
            rdma_destroy_qp(id);
        }
        if !object.c.update(|c| c.srq).is_null() {
            rdma_destroy_srq(id);
        }
    }
    let _ = id::destroy(id);
}

/// Waits for a request at a synchronous listener; the new identifier is synchronous too.
pub extern "C-unwind" fn rdma_get_request(listener: Handle<Id>, out: Out<*mut rdma_cm_id>) -> c_int {
    cancellable(|_| get_request(listener, out))
}

extern "C" fn get_request(listener: Handle<Id>, out: Out<*mut rdma_cm_id>) -> Attempt {
    let get = || {
        let listener = listener.object()?;
        if lock(&listener.inner).stage != Stage::Listening {
            return Err(Errno::EINVAL);
        }
        let found = match listener.next_event(false)?.ok_or(Errno::EINVAL)? {
            Next::Found(found) => found,
            Next::Sleep(units) => return Ok(Next::Sleep(units)),
        };
        if found.kind() != crate::abi::cm::event::CONNECT_REQUEST {
            return Err(Errno::EINVAL);
        }
        let request = found.id();
        let id = request.object()?;
        if let Some(QpTemplate(pd, mut init)) = listener.template.update(|template| *template) {
            create_plain_qp(&id, pd, &mut init)?;
        }
        id::rdma_migrate_id(request, Handle::NULL);
        id.take_event(&listener);
        out.write(id.c_ptr()).map(Next::Found)
    };
    Attempt::of(get)
}
