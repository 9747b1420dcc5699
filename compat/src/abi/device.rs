//! Devices, contexts, ports and memory: the structures of `infiniband/verbs.h` as C programs read and write them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::MUTEX_WORDS;

/// An entry of `ibv_context_ops` or `verbs_context` that no inline function calls.
pub type Unused = *const c_void;

/// 128 bits that name an end of a connection.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ibv_gid {
    pub raw: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_gid_entry {
    pub gid: ibv_gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

pub const SYSFS_NAME_MAX: usize = 64;
pub const SYSFS_PATH_MAX: usize = 256;
pub const NODE_CA: c_int = 1;
pub const NODE_RNIC: c_int = 4;
pub const TRANSPORT_IB: c_int = 0;
pub const TRANSPORT_IWARP: c_int = 1;
pub const TRANSPORT_UNSPECIFIED: c_int = 4;

#[repr(C)]
pub struct ibv_device {
    pub ops: [Unused; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; SYSFS_NAME_MAX],
    pub dev_name: [c_char; SYSFS_NAME_MAX],
    pub dev_path: [c_char; SYSFS_PATH_MAX],
    pub ibdev_path: [c_char; SYSFS_PATH_MAX],
}

/// Bits of `device_cap_flags`.
pub mod cap {
    pub const SYS_IMAGE_GUID: u32 = 1 << 11;
    pub const SRQ_RESIZE: u32 = 1 << 13;
    pub const MEM_WINDOW: u32 = 1 << 17;
    pub const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
    pub const MEM_WINDOW_TYPE_2B: u32 = 1 << 24;
}

/// Bits of `port_cap_flags`.
pub mod port_cap {
    pub const CM_SUP: u32 = 1 << 16;
    pub const IP_BASED_GIDS: u32 = 1 << 26;
}

/// `ibv_gid_type`: of [`ibv_gid_entry`] and `ibv_query_gid_ex`.
pub const GID_TYPE_IB: u32 = 0;
pub const GID_TYPE_ROCE_V2: u32 = 2;
/// `ibv_gid_type_sysfs`: of the private `ibv_query_gid_type`, which perftest calls. InfiniBand and RoCE v1 share a number.
pub const GID_TYPE_SYSFS_IB_ROCE_V1: c_int = 0;
pub const GID_TYPE_SYSFS_ROCE_V2: c_int = 1;

pub const ATOMIC_HCA: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_query_device_ex_input {
    pub comp_mask: u32,
}

/// The attributes that `ibv_query_device_ex` adds. Those that an RC RNIC without offloads leaves 0 are not named.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr_ex {
    pub orig_attr: ibv_device_attr,
    pub comp_mask: u32,
    pub odp_caps: [u64; 3],
    pub completion_timestamp_mask: u64,
    pub hca_core_clock: u64,
    pub device_cap_flags_ex: u64,
    pub offload_caps: [u32; 20],
    pub cq_mod_caps: [u16; 2],
    pub max_dm_size: u64,
    pub pci_atomic_caps: [u16; 3],
    pub xrc_odp_caps: u32,
    pub phys_port_cnt_ex: u32,
}

pub const PORT_DOWN: c_int = 1;
pub const PORT_ACTIVE: c_int = 4;
pub const LINK_LAYER_ETHERNET: u8 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_port_attr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    /// Since rdma-core 54; 0 if `active_speed` has the speed.
    pub active_speed_ex: u32,
}

/// Bytes of `ibv_port_attr` before rdma-core 14, which the plain function `ibv_query_port` still writes.
pub const OLD_PORT_ATTR_BYTES: usize = 48;

/// Access rights of `ibv_reg_mr`.
pub mod access {
    pub const LOCAL_WRITE: u32 = 1;
    pub const REMOTE_WRITE: u32 = 1 << 1;
    pub const REMOTE_READ: u32 = 1 << 2;
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// The remote rights: the only ones that a window of type 2 takes.
    pub const REMOTE: u32 = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
    pub const MW_BIND: u32 = 1 << 4;
    pub const ZERO_BASED: u32 = 1 << 5;
    pub const ON_DEMAND: u32 = 1 << 6;
    pub const HUGETLB: u32 = 1 << 7;
    /// Bits 20 to 29 may be ignored by devices that do not know them.
    pub const OPTIONAL: u32 = 0x3ff0_0000;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// Which members of [`ibv_mr_init_attr`] count.
pub mod mr_init {
    pub const IOVA: u64 = 1;
    pub const ADDR: u64 = 1 << 1;
    pub const FD: u64 = 1 << 2;
    pub const FD_OFFSET: u64 = 1 << 3;
    pub const DMAH: u64 = 1 << 4;
    pub const BUF: u64 = 1 << 5;
}

/// Parameters of `ibv_reg_mr_ex` (rdma-core 59).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mr_init_attr {
    pub length: usize,
    pub access: c_int,
    pub comp_mask: u64,
    pub iova: u64,
    pub addr: *mut c_void,
    pub fd: c_int,
    pub fd_offset: u64,
    pub dmah: Unused,
}

/// What follows [`ibv_mr_init_attr`] in programs that were compiled with rdma-core 64 or newer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mr_init_attr_since_64 {
    pub buf: *mut ibv_buf,
}

/// A buffer of `ibv_alloc_buf`. Its content is private.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_buf {
    pub unused: u64,
}

/// Flags of `ibv_rereg_mr`.
pub mod rereg {
    pub const TRANSLATION: i32 = 1;
    pub const PD: i32 = 1 << 1;
    pub const ACCESS: i32 = 1 << 2;
}

pub const MW_TYPE_1: c_int = 1;
pub const MW_TYPE_2: c_int = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mw {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_mw_bind_info {
    pub mr: *mut ibv_mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub handle: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_async_event {
    pub element: *mut c_void,
    pub event_type: c_int,
}

/// Types of asynchronous events.
pub mod event {
    use std::ffi::c_int;

    pub const CQ_ERR: c_int = 0;
    pub const QP_FATAL: c_int = 1;
    pub const QP_REQ_ERR: c_int = 2;
    pub const QP_ACCESS_ERR: c_int = 3;
    pub const DEVICE_FATAL: c_int = 8;
    pub const PORT_ACTIVE: c_int = 9;
    pub const PORT_ERR: c_int = 10;
    pub const SRQ_LIMIT_REACHED: c_int = 15;
    pub const QP_LAST_WQE_REACHED: c_int = 16;
    pub const GID_CHANGE: c_int = 18;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// The functions that inline functions of the header call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context_ops {
    pub unused_0: [Unused; 7],
    pub alloc_mw: Unused,
    pub bind_mw: Unused,
    pub dealloc_mw: Unused,
    pub unused_1: Unused,
    pub poll_cq: Unused,
    pub req_notify_cq: Unused,
    pub unused_2: [Unused; 7],
    pub post_srq_recv: Unused,
    pub unused_3: [Unused; 4],
    pub post_send: Unused,
    pub post_recv: Unused,
    pub unused_4: [Unused; 5],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: [u64; MUTEX_WORDS],
    pub abi_compat: *mut c_void,
}

/// The structure before an `ibv_context` whose `abi_compat` is `UINTPTR_MAX`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct verbs_context {
    pub query_port: Unused,
    pub advise_mr: Unused,
    pub unused_0: [Unused; 11],
    pub modify_qp_rate_limit: Unused,
    pub alloc_parent_domain: Unused,
    pub dealloc_td: Unused,
    pub alloc_td: Unused,
    pub modify_cq: Unused,
    pub unused_2: [Unused; 6],
    pub query_rt_values: Unused,
    pub create_cq_ex: Unused,
    pub private: Unused,
    pub query_device_ex: Unused,
    pub unused_3: [Unused; 4],
    pub open_qp: Unused,
    pub create_qp_ex: Unused,
    pub get_srq_num: Unused,
    pub create_srq_ex: Unused,
    pub open_xrcd: Unused,
    pub close_xrcd: Unused,
    pub placeholder: u64,
    pub size: usize,
    pub context: ibv_context,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_values_ex {
    pub comp_mask: u32,
    pub raw_clock: [i64; 2],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_td {
    pub context: *mut ibv_context,
}

/// Pointers to functions in the form of the tables.
macro_rules! entry {
    ($function:path) => {
        $function as *const std::ffi::c_void
    };
}
pub(crate) use entry;
