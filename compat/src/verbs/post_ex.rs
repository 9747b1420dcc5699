//! `ibv_wr_*`: a work request is built by several calls, and requests are posted together.

use std::ffi::{c_int, c_void};

use nix::errno::Errno;
use xwarp_verbs::{Operation, Payload, STag, SendFlags, Sge, WorkRequest};

use super::{
    cq::immediate_octets,
    memory::{self, Mw},
    post::{MAX_PIECES, compare_swap, fetch_add, flags, remote, send_immediate, sge, when_connected},
    qp::Qp,
};
use crate::{
    abi::{
        device::{entry, ibv_mw_bind_info},
        queue::{ibv_data_buf, ibv_qp_ex, ibv_sge},
    },
    boundary::{Handle, INLINE_BYTES, In, append_bytes_to},
    failure,
};

/// The requests of a program between `wr_start` and `wr_complete`. They are posted together: all of them, or none.
///
/// The lists keep their memory for the next batch.
pub struct Draft {
    requests: Vec<Built>,
    /// The pieces of all requests, one after the other.
    pieces: Vec<Sge>,
    /// The inline data of all requests.
    data: Vec<u8>,
    /// Requests that the send queue has room for: more are not kept.
    most: u32,
    /// The first failure since `wr_start`.
    error: Option<Errno>,
}

/// A request that was built.
#[derive(Clone, Copy)]
struct Built {
    operation: Operation,
    /// Immediate data of a Send, whose operation depends on whether there is a payload.
    send_immediate: Option<u32>,
    wr_id: u64,
    flags: SendFlags,
    /// Places of its pieces and of its inline data in the draft's lists.
    first_piece: usize,
    pieces: usize,
    first_byte: usize,
    bytes: usize,
    is_inline: bool,
}

impl Draft {
    /// `most`: capacity of the send queue.
    pub fn new(most: u32) -> Self {
        Self { requests: Vec::new(), pieces: Vec::new(), data: Vec::new(), most, error: None }
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.pieces.clear();
        self.data.clear();
        self.error = None;
    }

    fn fail(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }

    fn begin(&mut self, operation: Operation, wr_id: u64, flags: SendFlags) -> Result<(), Errno> {
        if self.requests.len() >= self.most as usize {
            return Err(Errno::ENOMEM);
        }
        self.requests.push(Built {
            operation,
            send_immediate: None,
            wr_id,
            flags,
            first_piece: self.pieces.len(),
            pieces: 0,
            first_byte: self.data.len(),
            bytes: 0,
            is_inline: false,
        });
        Ok(())
    }

    /// The request that is being built, to which a setter applies.
    fn last(&mut self) -> Result<&mut Built, Errno> {
        self.requests.last_mut().ok_or(Errno::EINVAL)
    }

    fn add_piece(&mut self, piece: &ibv_sge) -> Result<(), Errno> {
        let request = self.last()?;
        if request.pieces >= MAX_PIECES {
            return Err(Errno::EINVAL);
        }
        request.pieces += 1;
        self.pieces.push(sge(piece));
        Ok(())
    }

    fn add_data(&mut self, address: u64, len: usize) -> Result<(), Errno> {
        let request = self.last()?;
        request.is_inline = true;
        if len > INLINE_BYTES - request.bytes {
            return Err(Errno::ENOMEM);
        }
        request.bytes += len;
        append_bytes_to(&mut self.data, address, len)
    }

    /// Replaces the operation of Sends with immediate data.
    fn finish(&mut self) {
        for request in &mut self.requests {
            if let Some(data) = request.send_immediate {
                let pieces = self.pieces.get(request.first_piece..).unwrap_or_default();
                let pieces = pieces.iter().take(request.pieces).map(|piece| piece.len as usize);
                request.operation = send_immediate(data, request.bytes + pieces.sum::<usize>());
            }
        }
    }

    fn request(&self, built: &Built) -> WorkRequest<'_> {
        let pieces = self.pieces.get(built.first_piece..built.first_piece + built.pieces).unwrap_or_default();
        let data = self.data.get(built.first_byte..built.first_byte + built.bytes).unwrap_or_default();
        let payload = match (&built.operation, pieces) {
            (
                Operation::Immediate { .. }
                | Operation::LocalInvalidate { .. }
                | Operation::BindWindow { .. },
                _,
            ) => Payload::EMPTY,
            _ if built.is_inline => Payload::Inline(data),
            (_, [piece]) => Payload::Piece(*piece),
            (_, pieces) => Payload::Gather(pieces),
        };
        WorkRequest { wr_id: built.wr_id, operation: built.operation, payload, flags: built.flags }
    }

    /// Posts all requests, or none.
    fn post(&mut self, qp: &Qp) -> Result<(), Errno> {
        if let Some(error) = self.error {
            return Err(error);
        }
        self.finish();
        let posted = match self.requests.as_slice() {
            [] => Ok(()),
            [only] => {
                let request = self.request(only);
                when_connected(qp, || qp.sender().post_send(&request))
            }
            all => when_connected(qp, || {
                let requests = all.iter().map(|built| self.request(built));
                qp.sender().post_send_all(requests).map_err(|error| error.source)
            }),
        };
        posted.map_err(failure::post)
    }
}

pub fn show_functions(c: &mut ibv_qp_ex) {
    c.wr_atomic_cmp_swp = entry!(wr_atomic_cmp_swp);
    c.wr_atomic_fetch_add = entry!(wr_atomic_fetch_add);
    c.wr_bind_mw = entry!(wr_bind_mw);
    c.wr_local_inv = entry!(wr_local_inv);
    c.wr_rdma_read = entry!(wr_rdma_read);
    c.wr_rdma_write = entry!(wr_rdma_write);
    c.wr_rdma_write_imm = entry!(wr_rdma_write_imm);
    c.wr_send = entry!(wr_send);
    c.wr_send_imm = entry!(wr_send_imm);
    c.wr_send_inv = entry!(wr_send_inv);
    c.wr_set_inline_data = entry!(wr_set_inline_data);
    c.wr_set_inline_data_list = entry!(wr_set_inline_data_list);
    c.wr_set_sge = entry!(wr_set_sge);
    c.wr_set_sge_list = entry!(wr_set_sge_list);
    c.wr_start = entry!(wr_start);
    c.wr_complete = entry!(wr_complete);
    c.wr_abort = entry!(wr_abort);
}

/// Begins a request. The program holds the lock since `wr_start`; without that it is not understood.
fn begin(qp: Handle<Qp>, operation: impl FnOnce() -> Result<Operation, Errno>) {
    let Some(own) = qp.alive() else { return };
    let (wr_id, wr_flags) = own.c.update(|c| (c.wr_id, c.wr_flags));
    change(qp, |draft| draft.begin(operation()?, wr_id, flags(wr_flags)));
}

fn change(qp: Handle<Qp>, f: impl FnOnce(&mut Draft) -> Result<(), Errno>) {
    if let Some(qp) = qp.alive().filter(|qp| qp.drafting.is_held()) {
        qp.draft.update(|draft| {
            // After a failure nothing will be posted, and a setter has no request to apply to.
            if draft.error.is_none()
                && let Err(error) = f(draft)
            {
                draft.fail(error);
            }
        });
    }
}

extern "C" fn wr_start(qp: Handle<Qp>) {
    if let Some(qp) = qp.alive() {
        qp.drafting.acquire();
        qp.draft.update(Draft::clear);
    }
}

extern "C" fn wr_complete(qp: Handle<Qp>) -> c_int {
    let Some(qp) = qp.alive().filter(|qp| qp.drafting.is_held()) else { return Errno::EINVAL as c_int };
    qp.drafting.leave();
    let posted = qp.draft.update(|draft| draft.post(qp));
    qp.drafting.release();
    // The peer may have answered, and another thread may have destroyed the queue pair for that.
    posted.map_or_else(|error| error as c_int, |()| 0)
}

extern "C" fn wr_abort(qp: Handle<Qp>) {
    if let Some(qp) = qp.alive().filter(|qp| qp.drafting.is_held()) {
        qp.drafting.release();
    }
}

extern "C" fn wr_send(qp: Handle<Qp>) {
    begin(qp, || Ok(Operation::Send { invalidate: None }));
}

extern "C" fn wr_send_inv(qp: Handle<Qp>, key: u32) {
    begin(qp, || Ok(Operation::Send { invalidate: Some(STag::new(key)) }));
}

extern "C" fn wr_send_imm(qp: Handle<Qp>, data: u32) {
    begin(qp, || Ok(Operation::Send { invalidate: None }));
    change(qp, |draft| {
        draft.last()?.send_immediate = Some(data);
        Ok(())
    });
}

extern "C" fn wr_rdma_write(qp: Handle<Qp>, rkey: u32, address: u64) {
    begin(qp, || Ok(Operation::Write { remote: remote(address, rkey) }));
}

extern "C" fn wr_rdma_write_imm(qp: Handle<Qp>, rkey: u32, address: u64, data: u32) {
    let data = immediate_octets(data, false);
    begin(qp, || Ok(Operation::WriteImmediate { remote: remote(address, rkey), data }));
}

extern "C" fn wr_rdma_read(qp: Handle<Qp>, rkey: u32, address: u64) {
    begin(qp, || Ok(Operation::Read { remote: remote(address, rkey), invalidate: false }));
}

extern "C" fn wr_atomic_fetch_add(qp: Handle<Qp>, rkey: u32, address: u64, add: u64) {
    begin(qp, || Ok(fetch_add(remote(address, rkey), add)));
}

extern "C" fn wr_atomic_cmp_swp(qp: Handle<Qp>, rkey: u32, address: u64, compare: u64, swap: u64) {
    begin(qp, || Ok(compare_swap(remote(address, rkey), compare, swap)));
}

extern "C" fn wr_local_inv(qp: Handle<Qp>, key: u32) {
    begin(qp, || Ok(Operation::LocalInvalidate { key: STag::new(key) }));
}

extern "C" fn wr_bind_mw(qp: Handle<Qp>, mw: Handle<Mw>, rkey: u32, info: In<ibv_mw_bind_info>) {
    begin(qp, || {
        let (window, binding) = memory::binding(mw, rkey, info.get().ok_or(Errno::EINVAL)?)?;
        Ok(Operation::BindWindow { window, binding })
    });
}

extern "C" fn wr_set_sge(qp: Handle<Qp>, lkey: u32, addr: u64, length: u32) {
    change(qp, |draft| draft.add_piece(&ibv_sge { addr, length, lkey }));
}

extern "C" fn wr_set_sge_list(qp: Handle<Qp>, number: usize, list: In<ibv_sge>) {
    let number = c_int::try_from(number).unwrap_or(-1);
    change(qp, |draft| list.list(number)?.iter().try_for_each(|piece| draft.add_piece(piece)));
}

extern "C" fn wr_set_inline_data(qp: Handle<Qp>, address: *const c_void, len: usize) {
    change(qp, |draft| draft.add_data(address.expose_provenance() as u64, len));
}

extern "C" fn wr_set_inline_data_list(qp: Handle<Qp>, number: usize, list: In<ibv_data_buf>) {
    let number = c_int::try_from(number).unwrap_or(-1);
    change(qp, |draft| {
        draft.last()?.is_inline = true;
        let mut pieces = list.list(number)?.iter();
        pieces.try_for_each(|piece| draft.add_data(piece.addr.expose_provenance() as u64, piece.length))
    });
}
