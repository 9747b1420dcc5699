//! Completion queues, and completions as C programs read them.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use nix::errno::Errno;
use xwarp_verbs::{CompletionQueue, CompletionQueueOptions, Opcode, WcStatus, WorkCompletion};

use super::{channel::CompChannel, context::Context, qp::granted};
use crate::{
    abi::queue::{WC_WITH_IMM, WC_WITH_INV, ibv_cq, ibv_cq_ex, ibv_wc, wc_opcode, wc_status},
    boundary::{CPart, Handle, Object as _, Out, object, zeroed},
    failure::{self, number, pointer},
    users::{Used, Users, usable},
    wait::{HeldLock, Unacknowledged},
};

/// A completion queue. Every one has the functions of `ibv_create_cq_ex`; programs that did not ask for them do not see them.
pub struct Cq {
    pub c: CPart<ibv_cq_ex>,
    pub cq: CompletionQueue,
    pub context: Arc<Context>,
    channel: Option<Used<CompChannel>>,
    /// Completion events and asynchronous events that the program has not acknowledged.
    pub unacknowledged: Unacknowledged,
    /// Held from `ibv_start_poll` to `ibv_end_poll`.
    pub polling: HeldLock,
    /// The completion that the functions of `ibv_cq_ex` read, of the thread that holds `polling`.
    pub current: CPart<ibv_wc>,
    users: Users,
}

object!(Cq: ibv_cq is cq of ibv_cq_ex);
usable!(Cq);

impl Cq {
    pub fn new(
        context: &Arc<Context>,
        entries: c_int,
        cq_context: *mut c_void,
        channel: Option<Arc<CompChannel>>,
        vector: c_int,
        polling: HeldLock,
    ) -> Result<Arc<Self>, Errno> {
        let capacity = u32::try_from(entries).ok().filter(|n| *n > 0).ok_or(Errno::EINVAL)?;
        if vector != 0 {
            return Err(Errno::EINVAL);
        }
        if channel.as_ref().is_some_and(|channel| !Arc::ptr_eq(&channel.context, context)) {
            return Err(Errno::EINVAL);
        }
        let capacity = granted(capacity, 1, context.card.device.attributes().limits.max_cqe);
        let notified = channel.as_ref().map(|channel| channel.channel.clone());
        let options = CompletionQueueOptions { capacity, channel: notified, ..Default::default() };
        let cq = context.card.device.create_cq_with(options).map_err(failure::resource)?;
        let mut c: ibv_cq_ex = zeroed();
        c.cq.context = context.c_ptr();
        c.cq.channel = channel.as_ref().map_or(std::ptr::null_mut(), |channel| channel.c_ptr());
        c.cq.cq_context = cq_context;
        c.cq.cqe = c_int::try_from(capacity).unwrap_or(entries);
        if let Some(channel) = &channel {
            channel.count(1);
        }
        let cq = Arc::new(Self {
            c: CPart::new(c),
            cq,
            context: Arc::clone(context),
            channel: channel.as_ref().map(Used::of),
            unacknowledged: Unacknowledged::default(),
            polling,
            current: CPart::new(ibv_wc::default()),
            users: Users::default(),
        });
        context.card.add_cq(&cq);
        Ok(cq)
    }

    /// The completion for the program. If the peer of a connection by queue pair number has left, the queue pair
    /// reports nothing, as in InfiniBand: its receives stay posted, and its sends fail because the peer does not
    /// answer.
    pub fn completion(&self, found: &WorkCompletion) -> Option<ibv_wc> {
        let mut wc = completion(found);
        if wc.status == wc_status::WR_FLUSH_ERR
            && self.context.card.qp_by_number(wc.qp_num).is_some_and(|qp| qp.was_left())
        {
            if wc.opcode & wc_opcode::RECV != 0 {
                return None;
            }
            wc.status = wc_status::RETRY_EXC_ERR;
        }
        Some(wc)
    }

    /// The program's own pointer.
    pub fn c_context(&self) -> *mut c_void {
        self.c.update(|c| c.cq.cq_context)
    }
}

pub extern "C" fn ibv_create_cq(
    context: Handle<Context>,
    entries: c_int,
    cq_context: *mut c_void,
    channel: Handle<CompChannel>,
    vector: c_int,
) -> Handle<Cq> {
    let make = || {
        let context = context.object()?;
        let channel = if channel.is_null() { None } else { Some(channel.object()?) };
        let polling = HeldLock::new(true);
        Ok(Handle::publish(Cq::new(&context, entries, cq_context, channel, vector, polling)?))
    };
    pointer(make())
}

/// Waits until the program has acknowledged the queue's events.
pub extern "C" fn ibv_destroy_cq(cq: Handle<Cq>) -> c_int {
    number(cq.retire_unused(|cq| {
        cq.context.card.remove_cq(cq);
        cq.cq.discard_notifications();
        cq.unacknowledged.drain();
        if let Some(channel) = &cq.channel {
            channel.count(-1);
            channel.release();
        }
    }))
}

pub extern "C" fn ibv_resize_cq(cq: Handle<Cq>, entries: c_int) -> c_int {
    number(cq.object().and_then(|cq| {
        let capacity = u32::try_from(entries).ok().filter(|n| *n > 0).ok_or(Errno::EINVAL)?;
        let capacity = granted(capacity, 1, cq.context.card.device.attributes().limits.max_cqe);
        cq.cq.resize(capacity).map_err(failure::resource)?;
        cq.c.update(|c| c.cq.cqe = c_int::try_from(capacity).unwrap_or(entries));
        Ok(())
    }))
}

/// Moderation of notifications is not supported, so only "none" is accepted.
pub extern "C" fn modify_cq(cq: Handle<Cq>, _attributes: *mut c_void) -> c_int {
    number(cq.object().and(Err(Errno::EOPNOTSUPP)))
}

const fn status(status: WcStatus) -> c_int {
    match status {
        WcStatus::Success => wc_status::SUCCESS,
        WcStatus::LocalLength => wc_status::LOC_LEN_ERR,
        WcStatus::LocalQpOperation => wc_status::LOC_QP_OP_ERR,
        WcStatus::LocalProtection => wc_status::LOC_PROT_ERR,
        WcStatus::MemoryManagement => wc_status::MW_BIND_ERR,
        WcStatus::Flushed => wc_status::WR_FLUSH_ERR,
        WcStatus::BadResponse => wc_status::BAD_RESP_ERR,
        WcStatus::RemoteInvalidRequest => wc_status::REM_INV_REQ_ERR,
        WcStatus::RemoteAccess => wc_status::REM_ACCESS_ERR,
        WcStatus::RemoteOperation => wc_status::REM_OP_ERR,
        _ => wc_status::GENERAL_ERR,
    }
}

/// The eight octets of RFC 7306's Immediate Data for 32 bits of a C program: first the four octets as the program has them in memory, which is
/// network byte order, then three zeros, and 0 for a write or 1 for a send. `docs/compat.md` describes them.
pub fn immediate_octets(data: u32, is_send: bool) -> [u8; 8] {
    let [a, b, c, d] = data.to_ne_bytes();
    [a, b, c, d, 0, 0, 0, is_send.into()]
}

/// A completion in the form of C.
fn completion(from: &WorkCompletion) -> ibv_wc {
    let mut wc = ibv_wc {
        wr_id: from.wr_id,
        status: status(from.status),
        opcode: match from.opcode {
            Opcode::RdmaWrite => wc_opcode::RDMA_WRITE,
            Opcode::RdmaRead => wc_opcode::RDMA_READ,
            Opcode::FetchAdd => wc_opcode::FETCH_ADD,
            Opcode::CompareSwap => wc_opcode::COMP_SWAP,
            Opcode::LocalInvalidate => wc_opcode::LOCAL_INV,
            Opcode::BindWindow => wc_opcode::BIND_MW,
            Opcode::Recv => wc_opcode::RECV,
            Opcode::RecvImmediate => wc_opcode::RECV_RDMA_WITH_IMM,
            _ => wc_opcode::SEND,
        },
        byte_len: from.byte_len,
        qp_num: from.context as u32,
        ..ibv_wc::default()
    };
    // A Send with immediate data and a payload has zeros behind its four octets, and is of opcode `Recv` already.
    if let Some([a, b, c, d, .., is_send]) = from.immediate {
        wc.imm_data = u32::from_ne_bytes([a, b, c, d]);
        wc.wc_flags |= WC_WITH_IMM;
        if is_send == 1 {
            wc.opcode = wc_opcode::RECV;
        }
    } else if let Some(key) = from.invalidated {
        wc.imm_data = key.value();
        wc.wc_flags |= WC_WITH_INV;
    }
    wc
}

pub extern "C" fn poll_cq(cq: Handle<Cq>, most: c_int, out: Out<ibv_wc>) -> c_int {
    let Some(cq) = cq.alive() else { return -(Errno::EINVAL as c_int) };
    let Ok(most) = usize::try_from(most) else { return -(Errno::EINVAL as c_int) };
    if out.is_null() {
        return 0;
    }
    let mut index = 0;
    cq.cq.poll_each(most, |found| {
        if let Some(wc) = cq.completion(&found) {
            out.write_at(index, wc);
            index += 1;
        }
    });
    if index == 0 && cq.cq.overflowed() { -(Errno::EIO as c_int) } else { index as c_int }
}

pub extern "C" fn req_notify_cq(cq: Handle<Cq>, solicited_only: c_int) -> c_int {
    let Some(cq) = cq.alive() else { return Errno::EINVAL as c_int };
    cq.cq.arm(solicited_only != 0);
    0
}
