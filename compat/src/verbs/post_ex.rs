//! `ibv_wr_*`: a work request is built by several calls, and requests are posted together.

use std::ffi::{c_int, c_void};

use nix::errno::Errno;
use xwarp_verbs::{Device, Operation, Payload, PostBatch, STag, SendFlags, WorkRequest};

use super::{
    cq::immediate_octets,
    memory::{self, Mw},
    post::{Pieces, compare_swap, fetch_add, flags, remote, send_immediate, when_connected},
    qp::Qp,
};
use crate::{
    abi::{
        device::{entry, ibv_mw_bind_info},
        queue::{ibv_data_buf, ibv_qp_ex, ibv_sge},
    },
    boundary::{Handle, In, InlineBuffer, append_bytes},
    failure,
};

/// The request that is being built. It is posted when the next one begins, or at the end.
pub struct Draft {
    /// `None`: no request is being built.
    operation: Option<Operation>,
    /// Immediate data of a Send, which becomes the operation once it is known that there is no payload.
    send_immediate: Option<u32>,
    wr_id: u64,
    flags: SendFlags,
    pieces: Pieces,
    data: InlineBuffer,
    is_inline: bool,
    /// The first failure since `wr_start`.
    error: Option<Errno>,
    /// Requests that were posted since `wr_start`. They are sent together when this is dropped.
    batch: Option<PostBatch<Device>>,
}

impl Draft {
    pub fn new() -> Self {
        Self {
            operation: None,
            send_immediate: None,
            wr_id: 0,
            flags: SendFlags::empty(),
            pieces: Pieces::new(),
            data: InlineBuffer::new(),
            is_inline: false,
            error: None,
            batch: None,
        }
    }

    fn begin(&mut self) {
        self.operation = None;
        self.send_immediate = None;
        self.pieces.clear();
        self.data.clear();
        self.is_inline = false;
    }

    fn fail(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }

    /// Posts the request that was built. `last`: no other follows, so it is sent at once.
    fn post(&mut self, qp: &Qp, last: bool) {
        let Some(operation) = self.operation.take() else { return };
        if self.error.is_some() {
            return;
        }
        let bytes = if self.is_inline { self.data.filled().len() } else { self.pieces.bytes() };
        let operation = match self.send_immediate {
            Some(data) => send_immediate(data, bytes),
            None => Ok(operation),
        };
        let posted = operation.and_then(|operation| {
            let payload = match operation {
                Operation::Immediate { .. }
                | Operation::LocalInvalidate { .. }
                | Operation::BindWindow { .. } => Payload::EMPTY,
                _ if self.is_inline => Payload::Inline(self.data.filled()),
                _ => self.pieces.payload(),
            };
            let request = WorkRequest { wr_id: self.wr_id, operation, payload, flags: self.flags };
            let posted = if last && self.batch.is_none() {
                when_connected(qp, || qp.qp.post_send(&request))
            } else {
                let batch = self.batch.get_or_insert_with(|| qp.qp.device().clone().into_batch());
                when_connected(qp, || batch.post_send(&qp.qp, &request))
            };
            posted.map_err(failure::post)
        });
        if let Err(error) = posted {
            self.fail(error);
        }
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

/// Begins a request: the one before it is posted.
fn begin(qp: Handle<Qp>, operation: impl FnOnce() -> Result<Operation, Errno>) {
    let Some(qp) = qp.alive() else { return };
    let (wr_id, wr_flags) = qp.c.update(|c| (c.wr_id, c.wr_flags));
    qp.draft.update(|draft| {
        draft.post(qp, false);
        draft.begin();
        draft.wr_id = wr_id;
        draft.flags = flags(wr_flags);
        match operation() {
            Ok(operation) => draft.operation = Some(operation),
            Err(error) => draft.fail(error),
        }
    });
}

fn change(qp: Handle<Qp>, f: impl FnOnce(&mut Draft) -> Result<(), Errno>) {
    if let Some(qp) = qp.alive() {
        qp.draft.update(|draft| {
            if let Err(error) = f(draft) {
                draft.fail(error);
            }
        });
    }
}

extern "C" fn wr_start(qp: Handle<Qp>) {
    change(qp, |draft| {
        draft.begin();
        (draft.error, draft.batch) = (None, None);
        Ok(())
    });
}

extern "C" fn wr_complete(qp: Handle<Qp>) -> c_int {
    let Some(qp) = qp.alive() else { return Errno::EINVAL as c_int };
    qp.draft.update(|draft| {
        draft.post(qp, true);
        // Requests before a failed one are sent too.
        draft.batch = None;
        draft.error.take().map_or(0, |error| error as c_int)
    })
}

/// Discards the request that is being built. Earlier ones have been posted, and are sent.
extern "C" fn wr_abort(qp: Handle<Qp>) {
    wr_start(qp);
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
        draft.send_immediate = Some(data);
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
    change(qp, |draft| draft.pieces.add(&ibv_sge { addr, length, lkey }));
}

extern "C" fn wr_set_sge_list(qp: Handle<Qp>, number: usize, list: In<ibv_sge>) {
    let number = c_int::try_from(number).unwrap_or(-1);
    change(qp, |draft| list.list(number)?.iter().try_for_each(|piece| draft.pieces.add(piece)));
}

extern "C" fn wr_set_inline_data(qp: Handle<Qp>, address: *const c_void, len: usize) {
    change(qp, |draft| {
        draft.is_inline = true;
        append_bytes(&mut draft.data, address.expose_provenance() as u64, len)
    });
}

extern "C" fn wr_set_inline_data_list(qp: Handle<Qp>, number: usize, list: In<ibv_data_buf>) {
    let number = c_int::try_from(number).unwrap_or(-1);
    change(qp, |draft| {
        draft.is_inline = true;
        let mut pieces = list.list(number)?.iter();
        pieces.try_for_each(|piece| {
            append_bytes(&mut draft.data, piece.addr.expose_provenance() as u64, piece.length)
        })
    });
}
