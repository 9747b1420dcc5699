//! Contexts: opened devices, their attributes, ports and GIDs.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    sync::{Arc, Mutex},
};

use nix::errno::Errno;
use xwarp_verbs::{AsyncEvent, AsyncEvents};

use super::{
    card, card::Card, channel, cq, cq_ex, device::Port, events::Owned, memory, memory::Pd, post, qp, srq,
};
use crate::{
    abi::device::{
        ATOMIC_HCA, GID_TYPE_IB, GID_TYPE_ROCE_V2, GID_TYPE_SYSFS_IB_ROCE_V1, GID_TYPE_SYSFS_ROCE_V2,
        LINK_LAYER_ETHERNET, OLD_PORT_ATTR_BYTES, PORT_ACTIVE, PORT_DOWN, cap, entry, ibv_context,
        ibv_device_attr, ibv_device_attr_ex, ibv_gid, ibv_gid_entry, ibv_port_attr,
        ibv_query_device_ex_input, ibv_values_ex, port_cap, verbs_context,
    },
    boundary::{CPart, Handle, In, Object as _, Out, object, zeroed},
    config::{Face, config},
    failure::{self, minus_one, number, pointer},
    sleep::{Sleepers, uncancelled},
    wait::{Readable, lock},
};

/// Partition key of every port: the default one, with full membership.
const PKEY: u16 = 0xffff;
/// `ibv_mtu` of 4096 bytes.
const MTU_4096: c_int = 5;
/// "4X" and "QDR": numbers that stand for 40 Gbit/s.
const WIDTH_4X: u8 = 2;
const SPEED_10G: u8 = 4;
/// The physical state "link up", and "disabled".
const LINK_UP: u8 = 5;
const LINK_DISABLED: u8 = 3;

/// An opened device.
pub struct Context {
    c: CPart<verbs_context>,
    pub card: Arc<Card>,
    pub async_events: AsyncEvents,
    pub async_fd: Readable,
    /// Threads that wait for an asynchronous event.
    pub sleepers: Arc<Sleepers>,
    /// Its objects that have asynchronous events.
    pub owned: Arc<Mutex<Owned>>,
    /// The protection domain of the connection manager's identifiers without one.
    pub default_pd: Mutex<Option<Arc<Pd>>>,
}

object!(Context: ibv_context is context of verbs_context);

impl Context {
    pub fn open(port: &Arc<Port>) -> Result<Arc<Self>, Errno> {
        let card = card::open(port)?;
        let owned: Arc<Mutex<Owned>> = Arc::default();
        let wanted = {
            let owned = Arc::clone(&owned);
            let end = Arc::clone(&card.end);
            move |event: &AsyncEvent| {
                if *event == AsyncEvent::DeviceFatal {
                    end.come();
                    lock(&owned).device_ends();
                }
                lock(&owned).concerns(event)
            }
        };
        let async_events = card.device.subscribe_async_events(wanted).map_err(|error| failure::io(&error))?;
        let async_fd = Readable::of(&async_events).map_err(|error| failure::io(&error))?;
        let sleepers = Sleepers::new()?;
        let awake = Arc::clone(&sleepers);
        async_events.set_hook(move || awake.wake());
        let mut c: verbs_context = zeroed();
        c.query_port = entry!(query_port);
        c.alloc_parent_domain = entry!(memory::alloc_parent_domain);
        c.alloc_td = entry!(memory::alloc_td);
        c.dealloc_td = entry!(memory::dealloc_td);
        c.modify_cq = entry!(cq::modify_cq);
        c.query_rt_values = entry!(query_rt_values);
        c.create_cq_ex = entry!(cq_ex::create_cq_ex);
        c.query_device_ex = entry!(query_device_ex);
        c.create_qp_ex = entry!(qp::create_qp_ex);
        c.create_srq_ex = entry!(srq::create_srq_ex);
        c.size = size_of::<verbs_context>();
        c.context.device = port.c_ptr();
        c.context.cmd_fd = -1;
        c.context.async_fd = async_fd.number();
        c.context.num_comp_vectors = 1;
        c.context.abi_compat = ptr::without_provenance_mut::<c_void>(usize::MAX);
        c.context.ops.alloc_mw = entry!(memory::alloc_mw);
        c.context.ops.bind_mw = entry!(memory::bind_mw);
        c.context.ops.dealloc_mw = entry!(memory::dealloc_mw);
        c.context.ops.poll_cq = entry!(cq::poll_cq);
        c.context.ops.req_notify_cq = entry!(cq::req_notify_cq);
        c.context.ops.post_srq_recv = entry!(post::post_srq_recv);
        c.context.ops.post_send = entry!(post::post_send);
        c.context.ops.post_recv = entry!(post::post_recv);
        let default_pd = Mutex::default();
        let c = CPart::new(c);
        let context = Arc::new(Self { c, card, async_events, async_fd, sleepers, owned, default_pd });
        Handle::publish(Arc::clone(&context));
        Ok(context)
    }

    /// Discards the asynchronous events of objects that have left [`Self::owned`].
    pub fn discard_events(&self) {
        self.async_events.discard(|event| !lock(&self.owned).concerns(event));
    }

    /// The domain of identifiers without one, created at first use.
    pub fn default_pd(self: &Arc<Self>) -> Result<Arc<Pd>, Errno> {
        let mut pd = lock(&self.default_pd);
        if let Some(pd) = &*pd {
            return Ok(Arc::clone(pd));
        }
        let made = Pd::new(self)?;
        *pd = Some(Arc::clone(&made));
        Ok(made)
    }

    fn attributes(&self) -> ibv_device_attr {
        let limits = self.card.device.attributes().limits;
        let int = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        let guid = self.card.port.guid();
        let mut attributes = ibv_device_attr {
            node_guid: guid,
            sys_image_guid: guid,
            max_mr_size: u64::MAX >> 1,
            page_size_cap: 0xffff_f000,
            vendor_id: config().vendor,
            max_qp: int(limits.max_qp),
            max_qp_wr: int(limits.max_qp_wr),
            device_cap_flags: cap::SRQ_RESIZE
                | cap::MEM_WINDOW
                | cap::MEM_WINDOW_TYPE_2B
                | cap::MEM_MGT_EXTENSIONS
                | cap::SYS_IMAGE_GUID,
            max_sge: int(limits.max_sge),
            max_sge_rd: 1,
            max_cq: int(limits.max_cq),
            max_cqe: int(limits.max_cqe),
            max_mr: int(limits.max_mr),
            max_pd: int(limits.max_pd),
            max_qp_rd_atom: limits.max_ird.into(),
            max_res_rd_atom: c_int::from(limits.max_ird).saturating_mul(int(limits.max_qp)),
            max_qp_init_rd_atom: limits.max_ord.into(),
            atomic_cap: ATOMIC_HCA,
            max_mw: int(limits.max_mw),
            max_srq: int(limits.max_srq),
            max_srq_wr: int(limits.max_srq_wr),
            max_srq_sge: int(limits.max_sge),
            max_pkeys: 1,
            phys_port_cnt: 1,
            ..zeroed()
        };
        for (to, from) in attributes.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
            *to = from as c_char;
        }
        attributes
    }

    fn port(&self, port: c_int) -> Result<ibv_port_attr, Errno> {
        if port != 1 {
            return Err(Errno::EINVAL);
        }
        let interface = self.card.device.attributes().interface;
        let steps = [4096, 2048, 1024, 512].iter().position(|size| interface.mtu >= *size);
        Ok(ibv_port_attr {
            state: if interface.up { PORT_ACTIVE } else { PORT_DOWN },
            max_mtu: MTU_4096,
            active_mtu: MTU_4096 - steps.and_then(|steps| c_int::try_from(steps).ok()).unwrap_or(4),
            gid_tbl_len: c_int::try_from(interface.addresses.len()).unwrap_or(c_int::MAX),
            max_msg_sz: u32::MAX,
            port_cap_flags: if config().face == Face::Roce {
                port_cap::CM_SUP | port_cap::IP_BASED_GIDS
            } else {
                0
            },
            pkey_tbl_len: 1,
            max_vl_num: 1,
            active_width: WIDTH_4X,
            active_speed: SPEED_10G,
            phys_state: if interface.up { LINK_UP } else { LINK_DISABLED },
            link_layer: LINK_LAYER_ETHERNET,
            ..zeroed()
        })
    }

    /// The GID at `index` of the table.
    pub fn gid(&self, port: c_int, index: c_int) -> Result<ibv_gid, Errno> {
        let index = usize::try_from(index).map_err(|_| Errno::EINVAL)?;
        let address = *self.card.addresses().get(index).filter(|_| port == 1).ok_or(Errno::EINVAL)?;
        Ok(card::gid(address))
    }
}

pub extern "C" fn ibv_open_device(device: Handle<Port>) -> Handle<Context> {
    let opened = uncancelled(|| Context::open(&device.object()?));
    pointer(opened.map(|context| Handle::of(context.c_ptr())))
}

pub extern "C" fn ibv_close_device(context: Handle<Context>) -> c_int {
    number(uncancelled(|| context.withdraw().map(drop)))
}

pub extern "C" fn ibv_query_device(context: Handle<Context>, out: Out<ibv_device_attr>) -> c_int {
    number(context.object().and_then(|context| out.write(context.attributes())))
}

pub extern "C" fn query_device_ex(
    context: Handle<Context>,
    input: In<ibv_query_device_ex_input>,
    out: Out<ibv_device_attr_ex>,
    size: usize,
) -> c_int {
    let asked = input.get().is_some_and(|input| input.comp_mask != 0);
    number(context.object().and_then(|context| {
        if asked || size < size_of::<ibv_device_attr>() {
            return Err(Errno::EINVAL);
        }
        let orig_attr = context.attributes();
        let attributes = ibv_device_attr_ex {
            device_cap_flags_ex: orig_attr.device_cap_flags.into(),
            completion_timestamp_mask: u64::MAX,
            hca_core_clock: 1_000_000,
            phys_port_cnt_ex: 1,
            orig_attr,
            ..zeroed()
        };
        out.write_sized(&attributes, size)
    }))
}

pub extern "C" fn query_port(
    context: Handle<Context>,
    port: u8,
    out: Out<ibv_port_attr>,
    size: usize,
) -> c_int {
    number(context.object().and_then(|context| {
        let attributes = context.port(port.into())?;
        out.write_sized(&attributes, size)
    }))
}

/// The function that programs from before rdma-core 14 call; today's header has [`query_port`].
pub extern "C" fn ibv_query_port(context: Handle<Context>, port: u8, out: Out<ibv_port_attr>) -> c_int {
    query_port(context, port, out, OLD_PORT_ATTR_BYTES)
}

/// The clock of completion timestamps is the system's monotonic one.
extern "C" fn query_rt_values(context: Handle<Context>, out: Out<ibv_values_ex>) -> c_int {
    const RAW_CLOCK: u32 = 1;
    number(context.object().and_then(|_| {
        let values = out.read().filter(|values| values.comp_mask & !RAW_CLOCK == 0).ok_or(Errno::EINVAL)?;
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        out.write(ibv_values_ex { raw_clock: [now.tv_sec, now.tv_nsec], ..values })
    }))
}

pub extern "C" fn ibv_query_gid(
    context: Handle<Context>,
    port: u8,
    index: c_int,
    out: Out<ibv_gid>,
) -> c_int {
    let gid = context.object().and_then(|context| context.gid(port.into(), index));
    minus_one(gid.and_then(|gid| out.write(gid)))
}

/// The types of a GID as the two enumerations of libibverbs number them. iWARP has no types: all are of the first one.
fn gid_types() -> (u32, c_int) {
    match config().face {
        Face::Iwarp | Face::Unspecified => (GID_TYPE_IB, GID_TYPE_SYSFS_IB_ROCE_V1),
        Face::Roce => (GID_TYPE_ROCE_V2, GID_TYPE_SYSFS_ROCE_V2),
    }
}

pub extern "C" fn ibv_query_gid_type(
    context: Handle<Context>,
    port: u8,
    index: u32,
    out: Out<c_int>,
) -> c_int {
    let gid = context.object().and_then(|context| context.gid(port.into(), index as c_int));
    minus_one(gid.and_then(|_| out.write(gid_types().1)))
}

fn gid_entry(context: &Context, index: u32) -> Result<ibv_gid_entry, Errno> {
    let gid = context.gid(1, index as c_int).map_err(|_| Errno::ENODATA)?;
    Ok(ibv_gid_entry {
        gid,
        gid_index: index,
        port_num: 1,
        gid_type: gid_types().0,
        ndev_ifindex: context.card.port.index,
    })
}

pub extern "C" fn _ibv_query_gid_ex(
    context: Handle<Context>,
    port: u32,
    index: u32,
    out: Out<ibv_gid_entry>,
    flags: u32,
    size: usize,
) -> c_int {
    number(context.object().and_then(|context| {
        if flags != 0 || port != 1 {
            return Err(Errno::EINVAL);
        }
        let entry = gid_entry(&context, index)?;
        out.write_sized(&entry, size)
    }))
}

pub extern "C" fn _ibv_query_gid_table(
    context: Handle<Context>,
    out: Out<ibv_gid_entry>,
    most: usize,
    flags: u32,
    size: usize,
) -> isize {
    let fill = || {
        let context = context.object()?;
        if flags != 0 || out.is_null() || size != size_of::<ibv_gid_entry>() {
            return Err(Errno::EINVAL);
        }
        let mut found = 0;
        while found < most
            && let Ok(entry) = gid_entry(&context, found as u32)
        {
            out.write_at(found, entry);
            found += 1;
        }
        // As the kernel: a table that does not fit is an error.
        if most == 0 || gid_entry(&context, found as u32).is_ok() {
            return Err(Errno::EINVAL);
        }
        Ok(found as isize)
    };
    // Unlike others, this function returns the negative error number.
    fill().unwrap_or_else(|error: Errno| -(error as isize))
}

pub extern "C" fn ibv_query_pkey(context: Handle<Context>, port: u8, index: c_int, out: Out<u16>) -> c_int {
    let valid = context.object().is_ok() && port == 1 && index == 0;
    minus_one(if valid { out.write(PKEY) } else { Err(Errno::EINVAL) })
}

pub extern "C" fn ibv_get_pkey_index(context: Handle<Context>, port: u8, pkey: u16) -> c_int {
    // rdma-core looks for the index in files, and there is none with another key.
    minus_one(context.object().and(if port == 1 && pkey == PKEY { Ok(()) } else { Err(Errno::ENOENT) }))
}

pub extern "C" fn ibv_create_comp_channel(context: Handle<Context>) -> Handle<channel::CompChannel> {
    pointer(context.object().and_then(|context| channel::CompChannel::new(&context)).map(Handle::publish))
}

pub extern "C" fn ibv_alloc_pd(context: Handle<Context>) -> Handle<Pd> {
    pointer(context.object().and_then(|context| Pd::new(&context)).map(|pd| Handle::of(pd.c_ptr())))
}
