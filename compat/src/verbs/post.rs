//! Posting: from the lists of C programs straight into the engine, without allocation.

use std::ffi::c_int;

use nix::errno::Errno;
use xwarp_verbs::{Operation, Payload, PostError, RecvRequest, Remote, STag, SendFlags, Sge, WorkRequest};

use super::{cq::immediate_octets, memory, qp::Qp, srq::Srq};
use crate::{
    abi::queue::{ibv_recv_wr, ibv_send_wr, ibv_sge, send, wr},
    boundary::{Handle, In, InlineBuffer, Out, append_bytes},
    failure,
};

/// Largest number of pieces of a work request: the devices' limit.
pub const MAX_PIECES: usize = 32;

pub const fn sge(piece: &ibv_sge) -> Sge {
    Sge { key: STag::new(piece.lkey), offset: piece.addr, len: piece.length }
}

/// The pieces of a work request.
pub struct Pieces {
    list: [Sge; MAX_PIECES],
    len: usize,
}

impl Pieces {
    pub fn of(list: &[ibv_sge]) -> Result<Self, Errno> {
        let mut pieces = Self { list: [Sge::default(); MAX_PIECES], len: 0 };
        for piece in list {
            pieces.add(piece)?;
        }
        Ok(pieces)
    }

    fn add(&mut self, piece: &ibv_sge) -> Result<(), Errno> {
        *self.list.get_mut(self.len).ok_or(Errno::EINVAL)? = sge(piece);
        self.len += 1;
        Ok(())
    }

    pub fn as_slice(&self) -> &[Sge] {
        self.list.get(..self.len).unwrap_or_default()
    }

    /// The one piece of an RDMA Read or an atomic.
    pub fn payload(&self) -> Payload<'_> {
        match self.as_slice() {
            [piece] => Payload::Piece(*piece),
            pieces => Payload::Gather(pieces),
        }
    }
}

pub fn remote(address: u64, rkey: u32) -> Remote {
    Remote { key: STag::new(rkey), offset: address }
}

/// Converts the C flags to ours.
pub fn flags(from: u32) -> SendFlags {
    let mut flags = SendFlags::empty();
    flags.set(SendFlags::FENCE, from & send::FENCE != 0);
    flags.set(SendFlags::SIGNALED, from & send::SIGNALED != 0);
    flags.set(SendFlags::SOLICITED, from & send::SOLICITED != 0);
    flags
}

/// A Send with immediate data and `bytes` of payload. Without a payload it is RFC 7306's, which more peers have.
pub fn send_immediate(data: u32, bytes: usize) -> Operation {
    if bytes > 0 {
        Operation::SendImmediate { data: data.to_ne_bytes() }
    } else {
        Operation::Immediate { data: immediate_octets(data, true) }
    }
}

/// The operation of a work request with the payload `list`.
fn operation(from: &ibv_send_wr, list: &[ibv_sge]) -> Result<Operation, Errno> {
    let bytes = || list.iter().map(|piece| piece.length as usize).sum();
    let place = || remote(from.wr.remote_addr, from.wr.rkey());
    let word = || remote(from.wr.remote_addr, from.wr.atomic_rkey);
    Ok(match from.opcode {
        wr::SEND => Operation::Send { invalidate: None },
        wr::SEND_WITH_INV => Operation::Send { invalidate: Some(STag::new(from.imm_data)) },
        wr::SEND_WITH_IMM => send_immediate(from.imm_data, bytes()),
        wr::RDMA_WRITE => Operation::Write { remote: place() },
        wr::RDMA_WRITE_WITH_IMM => {
            Operation::WriteImmediate { remote: place(), data: immediate_octets(from.imm_data, false) }
        }
        wr::RDMA_READ => Operation::Read { remote: place(), invalidate: false },
        wr::ATOMIC_FETCH_AND_ADD => fetch_add(word(), from.wr.second),
        wr::ATOMIC_CMP_AND_SWP => compare_swap(word(), from.wr.second, from.wr.swap),
        wr::LOCAL_INV => Operation::LocalInvalidate { key: STag::new(from.imm_data) },
        wr::BIND_MW => {
            let bind = &from.bind_mw;
            let (window, binding) = memory::binding(Handle::of(bind.mw), bind.rkey, &bind.bind_info)?;
            Operation::BindWindow { window, binding }
        }
        wr::TSO | wr::DRIVER1 | wr::FLUSH | wr::ATOMIC_WRITE => return Err(Errno::EOPNOTSUPP),
        _ => return Err(Errno::EINVAL),
    })
}

pub fn fetch_add(remote: Remote, add: u64) -> Operation {
    Operation::FetchAdd { remote, add, mask: 0 }
}

pub fn compare_swap(remote: Remote, compare: u64, swap: u64) -> Operation {
    Operation::CompareSwap { remote, compare, compare_mask: u64::MAX, swap, swap_mask: u64::MAX }
}

/// Posts. For a queue pair that is connected by number, posts again when its peer has connected.
pub fn when_connected(qp: &Qp, post: impl Fn() -> Result<(), PostError>) -> Result<(), PostError> {
    match post() {
        Err(PostError::NotConnected) if qp.awaits_peer() => post(),
        posted => posted,
    }
}

/// The list of a work request. No device takes one that is longer than [`MAX_PIECES`], which is refused before it is read.
fn pieces<'a>(list: *mut ibv_sge, len: c_int) -> Result<&'a [ibv_sge], Errno> {
    if usize::try_from(len).is_ok_and(|len| len > MAX_PIECES) {
        return Err(Errno::EINVAL);
    }
    In::of(list.cast_const()).list(len)
}

/// Posts one request by `post`.
fn post_one(
    from: &ibv_send_wr,
    post: impl FnOnce(&WorkRequest<'_>) -> Result<(), PostError>,
) -> Result<(), Errno> {
    let list = pieces(from.sg_list, from.num_sge)?;
    let operation = operation(from, list)?;
    let (wr_id, flags) = (from.wr_id, flags(from.send_flags));
    let posted = if matches!(
        operation,
        Operation::Immediate { .. } | Operation::LocalInvalidate { .. } | Operation::BindWindow { .. }
    ) {
        post(&WorkRequest { wr_id, operation, payload: Payload::EMPTY, flags })
    } else if from.send_flags & send::INLINE != 0 {
        let mut data = InlineBuffer::new();
        for piece in list {
            append_bytes(&mut data, piece.addr, piece.length as usize)?;
        }
        post(&WorkRequest { wr_id, operation, payload: Payload::Inline(data.filled()), flags })
    } else if let [piece] = list {
        // Most requests: no room for a long list is prepared.
        post(&WorkRequest { wr_id, operation, payload: Payload::Piece(sge(piece)), flags })
    } else {
        let pieces = Pieces::of(list)?;
        post(&WorkRequest { wr_id, operation, payload: pieces.payload(), flags })
    };
    posted.map_err(failure::post)
}

pub extern "C" fn post_send(qp: Handle<Qp>, list: In<ibv_send_wr>, bad: Out<*mut ibv_send_wr>) -> c_int {
    let Some(qp) = qp.alive() else { return Errno::EINVAL as c_int };
    let mut next = list;
    let fail = |at: In<ibv_send_wr>, error: Errno| {
        bad.write_if_wanted(at.as_ptr().cast_mut());
        error as c_int
    };
    if let Some(only) = next.get()
        && only.next.is_null()
    {
        return match post_one(only, |request| when_connected(qp, || qp.sender().post_send(request))) {
            Ok(()) => 0,
            Err(error) => fail(next, error),
        };
    }
    // Its own handle, because the queue pair may not exist any more when the batch is sent.
    let batch = qp.qp.device().clone().into_batch();
    while let Some(request) = next.get() {
        if let Err(error) =
            post_one(request, |request| when_connected(qp, || batch.post_send(qp.sender(), request)))
        {
            return fail(next, error);
        }
        next = In::of(request.next.cast_const());
    }
    0
}

/// Posts receives by `post`.
fn post_receives(
    list: In<ibv_recv_wr>,
    bad: Out<*mut ibv_recv_wr>,
    post: impl Fn(&RecvRequest<'_>) -> Result<(), PostError>,
) -> c_int {
    let mut next = list;
    while let Some(request) = next.get() {
        let list = pieces(request.sg_list, request.num_sge);
        let post =
            |scatter: &[Sge]| post(&RecvRequest { wr_id: request.wr_id, scatter }).map_err(failure::post);
        let posted = list.and_then(|list| match list {
            [piece] => post(&[sge(piece)]),
            _ => post(Pieces::of(list)?.as_slice()),
        });
        if let Err(error) = posted {
            bad.write_if_wanted(next.as_ptr().cast_mut());
            return error as c_int;
        }
        next = In::of(request.next.cast_const());
    }
    0
}

pub extern "C" fn post_recv(qp: Handle<Qp>, list: In<ibv_recv_wr>, bad: Out<*mut ibv_recv_wr>) -> c_int {
    let Some(qp) = qp.alive() else { return Errno::EINVAL as c_int };
    if qp.is_reset() {
        bad.write_if_wanted(list.as_ptr().cast_mut());
        return Errno::EINVAL as c_int;
    }
    post_receives(list, bad, |request| qp.qp.post_recv(request))
}

pub extern "C" fn post_srq_recv(
    srq: Handle<Srq>,
    list: In<ibv_recv_wr>,
    bad: Out<*mut ibv_recv_wr>,
) -> c_int {
    let Some(srq) = srq.alive() else { return Errno::EINVAL as c_int };
    post_receives(list, bad, |request| srq.srq.post_recv(request))
}
