//! `ibv_create_cq_ex`: a completion is read field by field.

use std::{
    ffi::{c_int, c_uint},
    sync::Arc,
};

use nix::errno::Errno;
use rustix::time::{ClockId, clock_gettime};

use super::{channel::CompChannel, context::Context, cq::Cq, memory::Pd};
use crate::{
    abi::{
        device::entry,
        queue::{cq_wc, ibv_cq_init_attr_ex, ibv_wc},
    },
    boundary::{Handle, In},
    failure::pointer,
    wait::HeldLock,
};

/// Known bits of `comp_mask` (flags, parent domain) and of `flags` (single-threaded, ignore overrun).
const COMP_MASK: u32 = 3;
const FLAGS: u32 = 3;
const HAS_FLAGS: u32 = 1;
const HAS_PARENT: u32 = 2;
const SINGLE_THREADED: u32 = 1;
const READABLE: u64 = cq_wc::STANDARD | cq_wc::COMPLETION_TIMESTAMP | cq_wc::COMPLETION_TIMESTAMP_WALLCLOCK;

pub extern "C" fn create_cq_ex(context: Handle<Context>, attributes: In<ibv_cq_init_attr_ex>) -> Handle<Cq> {
    let make = || {
        let context = context.object()?;
        let attributes = attributes.read().ok_or(Errno::EINVAL)?;
        if attributes.comp_mask & !COMP_MASK != 0
            || attributes.comp_mask & HAS_FLAGS != 0 && attributes.flags & !FLAGS != 0
            || attributes.wc_flags & !READABLE != 0
        {
            return Err(Errno::EOPNOTSUPP);
        }
        let channel = Handle::<CompChannel>::of(attributes.channel);
        let channel = if channel.is_null() { None } else { Some(channel.object()?) };
        let [entries, vector] =
            [attributes.cqe, attributes.comp_vector].map(|n| c_int::try_from(n).unwrap_or(-1));
        let mut of_one_thread =
            attributes.comp_mask & HAS_FLAGS != 0 && attributes.flags & SINGLE_THREADED != 0;
        if attributes.comp_mask & HAS_PARENT != 0 {
            of_one_thread |= Handle::<Pd>::of(attributes.parent_domain).object()?.is_of_one_thread();
        }
        let polling = HeldLock::new(!of_one_thread);
        let cq = Cq::new(&context, entries, attributes.cq_context, channel, vector, polling)?;
        show_functions(&cq);
        Ok(Handle::publish(cq))
    };
    pointer(make())
}

fn show_functions(cq: &Arc<Cq>) {
    cq.c.update(|c| {
        c.start_poll = entry!(start_poll);
        c.next_poll = entry!(next_poll);
        c.end_poll = entry!(end_poll);
        c.read_opcode = entry!(read_opcode);
        c.read_vendor_err = entry!(read_vendor_err);
        c.read_byte_len = entry!(read_byte_len);
        c.read_imm_data = entry!(read_imm_data);
        c.read_qp_num = entry!(read_qp_num);
        c.read_src_qp = entry!(read_src_qp);
        c.read_wc_flags = entry!(read_wc_flags);
        c.read_slid = entry!(read_slid);
        c.read_sl = entry!(read_sl);
        c.read_dlid_path_bits = entry!(read_dlid_path_bits);
        c.read_completion_ts = entry!(read_completion_ts);
        c.read_completion_wallclock_ns = entry!(read_completion_wallclock_ns);
    });
}

/// `comp_mask` of `ibv_poll_cq_attr`, its only member, has no bits.
extern "C" fn start_poll(cq: Handle<Cq>, attributes: In<u32>) -> c_int {
    if attributes.read().is_some_and(|comp_mask| comp_mask != 0) {
        return Errno::EINVAL as c_int;
    }
    let Some(own) = cq.alive() else { return Errno::EINVAL as c_int };
    own.polling.acquire();
    let found = next_poll(cq);
    if found != 0 {
        // The program does not end a poll that found nothing.
        own.polling.release();
    }
    found
}

extern "C" fn next_poll(cq: Handle<Cq>) -> c_int {
    let Some(cq) = cq.alive() else { return Errno::EINVAL as c_int };
    let mut next = None;
    // Completions that are hidden from the program are skipped.
    while next.is_none() && cq.cq.poll_each(1, |found| next = cq.completion(&found)) > 0 {}
    let Some(wc) = next else {
        return if cq.cq.overflowed() { Errno::EIO } else { Errno::ENOENT } as c_int;
    };
    cq.c.update(|c| (c.wr_id, c.status) = (wc.wr_id, wc.status));
    cq.current.update(|current| *current = wc);
    0
}

extern "C" fn end_poll(cq: Handle<Cq>) {
    if let Some(cq) = cq.alive() {
        cq.polling.release();
    }
}

/// A field of the current completion.
fn read<T>(cq: Handle<Cq>, field: impl FnOnce(&ibv_wc) -> T, none: T) -> T {
    match cq.alive() {
        Some(cq) => cq.current.update(|current| field(current)),
        None => none,
    }
}

extern "C" fn read_opcode(cq: Handle<Cq>) -> c_int {
    read(cq, |wc| wc.opcode, 0)
}

extern "C" fn read_vendor_err(cq: Handle<Cq>) -> u32 {
    read(cq, |wc| wc.vendor_err, 0)
}

extern "C" fn read_byte_len(cq: Handle<Cq>) -> u32 {
    read(cq, |wc| wc.byte_len, 0)
}

extern "C" fn read_imm_data(cq: Handle<Cq>) -> u32 {
    read(cq, |wc| wc.imm_data, 0)
}

extern "C" fn read_qp_num(cq: Handle<Cq>) -> u32 {
    read(cq, |wc| wc.qp_num, 0)
}

extern "C" fn read_src_qp(cq: Handle<Cq>) -> u32 {
    read(cq, |wc| wc.src_qp, 0)
}

extern "C" fn read_wc_flags(cq: Handle<Cq>) -> c_uint {
    read(cq, |wc| wc.wc_flags, 0)
}

/// An iWARP port has no LID.
extern "C" fn read_slid(_cq: Handle<Cq>) -> u32 {
    0
}

extern "C" fn read_sl(_cq: Handle<Cq>) -> u8 {
    0
}

extern "C" fn read_dlid_path_bits(_cq: Handle<Cq>) -> u8 {
    0
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// The time at which the program reads the completion, in nanoseconds: the engine does not stamp completions.
extern "C" fn read_completion_ts(_cq: Handle<Cq>) -> u64 {
    nanoseconds(ClockId::Monotonic)
}

extern "C" fn read_completion_wallclock_ns(_cq: Handle<Cq>) -> u64 {
    nanoseconds(ClockId::Realtime)
}
