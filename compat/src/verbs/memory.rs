//! Protection domains, memory regions and memory windows.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::{Arc, Mutex},
};

use nix::errno::Errno;
use xwarp_verbs::{
    Access, Binding, Memory, MemoryRegion, MemoryWindow, ProtectionDomain, RegionOptions, ResourceError, STag,
};

use super::{context::Context, qp::Qp};
use crate::{
    abi::device::{MW_TYPE_1, MW_TYPE_2, access, ibv_mr, ibv_mw, ibv_mw_bind_info, ibv_pd, ibv_td, rereg},
    abi::queue::ibv_mw_bind,
    boundary::{self, CPart, Handle, In, Object as _, object},
    failure::{self, number, pointer},
    faults,
    users::{Used, Users, usable},
    wait::lock,
};

/// A protection domain.
pub struct Pd {
    c: CPart<ibv_pd>,
    pub pd: ProtectionDomain,
    pub context: Arc<Context>,
    /// For a parent domain: the domain that it stands for.
    parent: Option<Used<Pd>>,
    /// The thread domain of a parent domain.
    td: Option<Used<Td>>,
    users: Users,
}

object!(Pd: ibv_pd);
usable!(Pd);

impl Pd {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, Errno> {
        let pd = context.card.device.create_pd().map_err(failure::resource)?;
        Ok(Self::publish(context, pd, None, None))
    }

    fn publish(
        context: &Arc<Context>,
        pd: ProtectionDomain,
        parent: Option<Used<Self>>,
        td: Option<Used<Td>>,
    ) -> Arc<Self> {
        let c = CPart::new(ibv_pd { context: context.c_ptr(), handle: 0 });
        let context = Arc::clone(context);
        let pd = Arc::new(Self { c, pd, context, parent, td, users: Users::default() });
        Handle::publish(Arc::clone(&pd));
        pd
    }

    /// Whether the program uses the domain's objects from one thread at a time.
    pub fn is_of_one_thread(&self) -> bool {
        self.td.is_some()
    }
}

pub extern "C" fn ibv_dealloc_pd(pd: Handle<Pd>) -> c_int {
    let end = |pd: Arc<Pd>| {
        pd.parent.iter().for_each(Used::release);
        pd.td.iter().for_each(Used::release);
    };
    number(pd.withdraw_unused().map(end))
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ParentDomainAttributes {
    pd: Handle<Pd>,
    td: Handle<Td>,
    comp_mask: u32,
}

/// A thread domain: the program's promise to use the objects of its parent domains from one thread at a time.
pub struct Td {
    c: CPart<ibv_td>,
    context: Arc<Context>,
    users: Users,
}

object!(Td: ibv_td);
usable!(Td);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ThreadDomainAttributes {
    comp_mask: u32,
}

pub extern "C" fn alloc_td(context: Handle<Context>, attributes: In<ThreadDomainAttributes>) -> Handle<Td> {
    let make = || {
        let context = context.object()?;
        if attributes.read().ok_or(Errno::EINVAL)?.comp_mask != 0 {
            return Err(Errno::EINVAL);
        }
        let c = CPart::new(ibv_td { context: context.c_ptr() });
        Ok(Handle::publish(Arc::new(Td { c, context, users: Users::default() })))
    };
    pointer(make())
}

pub extern "C" fn dealloc_td(td: Handle<Td>) -> c_int {
    number(td.withdraw_unused().map(drop))
}

/// A parent domain is its domain under another pointer. With a thread domain, the locks of `ibv_wr_start` and `ibv_start_poll` are
/// switched off.
pub extern "C" fn alloc_parent_domain(
    context: Handle<Context>,
    attributes: In<ParentDomainAttributes>,
) -> Handle<Pd> {
    let make = || {
        let context = context.object()?;
        let attributes = attributes.read().ok_or(Errno::EINVAL)?;
        if attributes.comp_mask != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let parent = attributes.pd.object()?;
        let td = if attributes.td.is_null() { None } else { Some(Used::of(&attributes.td.object()?)) };
        let is_foreign = |of: &Arc<Context>| !Arc::ptr_eq(of, &context);
        if is_foreign(&parent.context) || td.as_ref().is_some_and(|td| is_foreign(&td.context)) {
            return Err(Errno::EINVAL);
        }
        let pd = parent.pd.clone();
        Ok(Handle::of(Pd::publish(&context, pd, Some(Used::of(&parent)), td).c_ptr()))
    };
    pointer(make())
}

/// A registered region.
pub struct Mr {
    c: CPart<ibv_mr>,
    state: Mutex<MrState>,
}

struct MrState {
    /// `None` once it is deregistered.
    region: Option<MemoryRegion>,
    pd: Used<Pd>,
    access: u32,
    /// Tagged offset of the first byte.
    iova: u64,
}

object!(Mr: ibv_mr);

/// Access rights as ours. Optional bits of C programs are ignored.
fn rights(flags: u32) -> Result<Access, Errno> {
    let known = access::LOCAL_WRITE
        | access::REMOTE_WRITE
        | access::REMOTE_READ
        | access::REMOTE_ATOMIC
        | access::MW_BIND
        | access::ZERO_BASED
        | access::HUGETLB;
    if flags & access::ON_DEMAND != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if flags & !(known | access::OPTIONAL) != 0 {
        return Err(Errno::EINVAL);
    }
    // As in the kernel: peers may write only if the owner may write.
    if flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0 && flags & access::LOCAL_WRITE == 0 {
        return Err(Errno::EINVAL);
    }
    Ok(Access::from_bits_truncate(flags & 0x1f))
}

/// The memory and rights of a registration, checked.
fn prepare(address: *mut c_void, len: usize, flags: u32) -> Result<(Memory, Access), Errno> {
    let rights = rights(flags)?;
    let writable = rights.contains(Access::LOCAL_WRITE);
    // Neither an empty region nor one that wraps around.
    address.addr().checked_add(len).filter(|_| len > 0).ok_or(Errno::EINVAL)?;
    let memory = boundary::memory(address, len, writable).ok_or(Errno::EFAULT)?;
    boundary::populate(address, len, writable)?;
    faults::catch();
    Ok((memory, rights))
}

fn options(iova: u64) -> RegionOptions {
    RegionOptions { base: iova, ..RegionOptions::default() }
}

fn base(address: *mut c_void, flags: u32) -> u64 {
    if flags & access::ZERO_BASED != 0 { 0 } else { address.addr() as u64 }
}

pub extern "C" fn ibv_reg_mr_iova2(
    pd: Handle<Pd>,
    address: *mut c_void,
    len: usize,
    iova: u64,
    flags: c_uint,
) -> Handle<Mr> {
    let make = || {
        let pd = pd.object()?;
        let (memory, rights) = prepare(address, len, flags)?;
        let region = pd.pd.register_with(memory, rights, options(iova)).map_err(failure::resource)?;
        let key = region.key().value();
        let c = ibv_mr {
            context: pd.context.c_ptr(),
            pd: pd.c_ptr(),
            addr: address,
            length: len,
            handle: 0,
            lkey: key,
            rkey: key,
        };
        let state = MrState { region: Some(region), pd: Used::of(&pd), access: flags, iova };
        Ok(Handle::publish(Arc::new(Mr { c: CPart::new(c), state: Mutex::new(state) })))
    };
    pointer(make())
}

pub extern "C" fn ibv_reg_mr(pd: Handle<Pd>, address: *mut c_void, len: usize, flags: c_int) -> Handle<Mr> {
    let flags = flags as u32;
    ibv_reg_mr_iova2(pd, address, len, base(address, flags), flags)
}

pub extern "C" fn ibv_reg_mr_iova(
    pd: Handle<Pd>,
    address: *mut c_void,
    len: usize,
    iova: u64,
    flags: c_int,
) -> Handle<Mr> {
    ibv_reg_mr_iova2(pd, address, len, iova, flags as u32)
}

pub extern "C" fn ibv_dereg_mr(mr: Handle<Mr>) -> c_int {
    let end = || {
        let object = mr.object()?;
        let mut state = lock(&object.state);
        let region = state.region.take().ok_or(Errno::EINVAL)?;
        match region.deregister() {
            // Nobody accesses the memory of a device that has failed, and a program frees what it has.
            Ok(()) | Err((_, ResourceError::DeviceFailed)) => mr.withdraw().map(|_| state.pd.release()),
            Err((region, error)) => {
                state.region = Some(region);
                Err(failure::resource(error))
            }
        }
    };
    number(end())
}

impl Mr {
    /// Registers the region again, with the parameters that are `Some`. Its key stays, as with mlx4 and mlx5: programs have told it
    /// to their peers. A failure changes nothing.
    fn register_again(
        &self,
        pd: Option<Arc<Pd>>,
        access: Option<u32>,
        place: Option<(*mut c_void, usize)>,
    ) -> Result<(), Errno> {
        let mut state = lock(&self.state);
        let before = self.c.update(|c| *c);
        let pd = Used::of(pd.as_ref().unwrap_or(&state.pd));
        if pd.context.c_ptr() != before.context {
            return Err(Errno::EINVAL);
        }
        let access = access.unwrap_or(state.access);
        let (addr, length, iova) = match place {
            Some((address, len)) => (address, len, base(address, access)),
            None => (before.addr, before.length, state.iova),
        };
        let (memory, rights) = prepare(addr, length, access)?;
        let region = state.region.as_mut().ok_or(Errno::EINVAL)?;
        // Fails while windows are bound to the region.
        region.reregister(&pd.pd, memory, rights, options(iova)).map_err(failure::resource)?;
        self.c.update(|c| *c = ibv_mr { pd: pd.c_ptr(), addr, length, ..before });
        (state.pd, state.access, state.iova) = (pd, access, iova);
        Ok(())
    }
}

pub extern "C" fn ibv_rereg_mr(
    mr: Handle<Mr>,
    flags: c_int,
    pd: Handle<Pd>,
    address: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    /// `IBV_REREG_MR_ERR_INPUT`, and `IBV_REREG_MR_ERR_CMD`. Both leave the region as it was.
    const WRONG_INPUT: c_int = -1;
    const REFUSED: c_int = -4;
    let fail = |result: c_int, error: Errno| {
        error.set();
        result
    };
    let [place, other_pd, other_access] =
        [rereg::TRANSLATION, rereg::PD, rereg::ACCESS].map(|flag| flags & flag != 0);
    if flags & !(rereg::TRANSLATION | rereg::PD | rereg::ACCESS) != 0
        || place && (len == 0 || address.is_null())
        || access != 0 && !other_access
    {
        return fail(WRONG_INPUT, Errno::EINVAL);
    }
    let Ok(mr) = mr.object() else { return fail(WRONG_INPUT, Errno::EINVAL) };
    let change = || {
        if flags == 0 {
            return Err(Errno::EINVAL);
        }
        let pd = if other_pd { Some(pd.object()?) } else { None };
        mr.register_again(pd, other_access.then_some(access as u32), place.then_some((address, len)))
    };
    change().map_or_else(|error| fail(REFUSED, error), |()| 0)
}

/// A memory window of type 2.
pub struct Mw {
    c: CPart<ibv_mw>,
    window: MemoryWindow,
    pd: Used<Pd>,
}

object!(Mw: ibv_mw);

pub extern "C" fn alloc_mw(pd: Handle<Pd>, kind: c_int) -> Handle<Mw> {
    let make = || {
        let pd = pd.object()?;
        match kind {
            MW_TYPE_2 => {}
            // Bound by a verb of its own, which iWARP's windows do not need.
            MW_TYPE_1 => return Err(Errno::EOPNOTSUPP),
            _ => return Err(Errno::EINVAL),
        }
        let window = pd.pd.alloc_window().map_err(failure::resource)?;
        let rkey = window.key().value();
        let c = ibv_mw { context: pd.context.c_ptr(), pd: pd.c_ptr(), rkey, handle: 0, kind };
        Ok(Handle::publish(Arc::new(Mw { c: CPart::new(c), window, pd: Used::of(&pd) })))
    };
    pointer(make())
}

pub extern "C" fn dealloc_mw(mw: Handle<Mw>) -> c_int {
    number(mw.withdraw().map(|mw| mw.pd.release()))
}

/// Binds a window of type 1: there are none.
pub extern "C" fn bind_mw(_qp: Handle<Qp>, _mw: Handle<Mw>, _bind: In<ibv_mw_bind>) -> c_int {
    number(Err(Errno::EOPNOTSUPP))
}

/// The window's key and binding of a work request. The window gets the key, as providers do when the request is posted.
pub fn binding(mw: Handle<Mw>, rkey: u32, info: &ibv_mw_bind_info) -> Result<(STag, Binding), Errno> {
    let mw = mw.object()?;
    let mr = Handle::<Mr>::of(info.mr).object()?;
    let state = lock(&mr.state);
    let region = state.region.as_ref().ok_or(Errno::EINVAL)?;
    let access = Access::from_bits_truncate(info.mw_access_flags & access::REMOTE);
    let base = if info.mw_access_flags & access::ZERO_BASED != 0 { 0 } else { info.addr };
    let binding = Binding { region: region.key(), offset: info.addr, len: info.length, base, access };
    // The index is the window's; only the last byte is the program's.
    if rkey >> 8 != mw.window.key().value() >> 8 {
        return Err(Errno::EINVAL);
    }
    mw.c.update(|c| c.rkey = rkey);
    Ok((STag::new(rkey), binding))
}
