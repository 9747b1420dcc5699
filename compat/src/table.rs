//! The ABI as one table: each symbol, its version node, and the function that it is. `versions.map` has the nodes.
//!
//! Each symbol is a jump to its function, in assembly: the directive that gives a symbol a version has to be in the same object file
//! as the symbol, and the compiler chooses the object file of a Rust function.

#![allow(unsafe_code)]

use std::arch::global_asm;

use crate::cm::{
    addrinfo, channel as cm_channel, connect, endpoint, event as cm_event, id, interfaces, names, options,
    refused as cm_refused, resolve, rsocket,
};
use crate::faults;
use crate::verbs::{
    buffer, channel, context, cq, device, events, memory, qp,
    refused::{self, minus_one, no_object, nothing, unsupported},
    srq, text,
};

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {target}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {target}"
    };
}

/// Symbols that are the default of their name: `"NODE" { name => function }`.
macro_rules! table {
    ($($version:literal { $($name:ident => $function:path),* $(,)? })*) => {
        $($(
            global_asm!(
                ".text",
                ".p2align 4",
                concat!(".globl xwarp_abi_", stringify!($name)),
                concat!(".type xwarp_abi_", stringify!($name), ",@function"),
                concat!("xwarp_abi_", stringify!($name), ":"),
                jump!(),
                concat!(".size xwarp_abi_", stringify!($name), ", . - xwarp_abi_", stringify!($name)),
                concat!(".symver xwarp_abi_", stringify!($name), ", ", stringify!($name), "@@@", $version),
                target = sym $function,
            );
        )*)*
    };
}

/// One alias of the symbol that is being defined, in one node: `@` beside the default of the name, `@@@` for the default itself.
macro_rules! alias {
    ($kind:literal, $tag:literal, $name:ident, $at:literal, $version:literal) => {
        concat!(
            ".globl xwarp_abi_",
            $tag,
            "_",
            stringify!($name),
            "\n",
            ".type xwarp_abi_",
            $tag,
            "_",
            stringify!($name),
            ",",
            $kind,
            "\n",
            "xwarp_abi_",
            $tag,
            "_",
            stringify!($name),
            ":\n",
            ".symver xwarp_abi_",
            $tag,
            "_",
            stringify!($name),
            ", ",
            stringify!($name),
            $at,
            $version,
            "\n",
        )
    };
}
mod private;

/// Symbols of a node whose names are the default of a later node.
macro_rules! former {
    ($version:literal { $($name:ident => $function:path),* $(,)? }) => {
        $(
            global_asm!(
                ".text",
                ".p2align 4",
                alias!("@function", "former", $name, "@", $version),
                jump!(),
                target = sym $function,
            );
        )*
    };
}

table! {
    "IBVERBS_1.0" {
        ibv_create_comp_channel => context::ibv_create_comp_channel,
        ibv_destroy_comp_channel => channel::ibv_destroy_comp_channel,
        ibv_get_sysfs_path => refused::ibv_get_sysfs_path,
        ibv_read_sysfs_file => refused::ibv_read_sysfs_file,
        ibv_copy_path_rec_from_kern => nothing,
        ibv_copy_path_rec_to_kern => nothing,
        ibv_copy_qp_attr_from_kern => nothing,
        ibv_rate_to_mult => text::ibv_rate_to_mult,
        mult_to_ibv_rate => text::mult_to_ibv_rate,
    }
    "IBVERBS_1.1" {
        ibv_ack_async_event => events::ibv_ack_async_event,
        ibv_ack_cq_events => channel::ibv_ack_cq_events,
        ibv_alloc_pd => context::ibv_alloc_pd,
        ibv_attach_mcast => refused::ibv_attach_mcast,
        ibv_close_device => context::ibv_close_device,
        ibv_copy_ah_attr_from_kern => nothing,
        ibv_create_ah => refused::ibv_create_ah,
        ibv_create_ah_from_wc => refused::ibv_create_ah_from_wc,
        ibv_create_cq => cq::ibv_create_cq,
        ibv_create_qp => qp::ibv_create_qp,
        ibv_create_srq => srq::ibv_create_srq,
        ibv_dealloc_pd => memory::ibv_dealloc_pd,
        ibv_dereg_mr => memory::ibv_dereg_mr,
        ibv_destroy_ah => refused::ibv_destroy_ah,
        ibv_destroy_cq => cq::ibv_destroy_cq,
        ibv_destroy_qp => qp::ibv_destroy_qp,
        ibv_destroy_srq => srq::ibv_destroy_srq,
        ibv_detach_mcast => refused::ibv_detach_mcast,
        ibv_dofork_range => refused::ibv_dofork_range,
        ibv_dontfork_range => refused::ibv_dontfork_range,
        ibv_event_type_str => text::ibv_event_type_str,
        ibv_fork_init => refused::ibv_fork_init,
        ibv_free_device_list => device::ibv_free_device_list,
        ibv_get_async_event => events::ibv_get_async_event,
        ibv_get_cq_event => channel::ibv_get_cq_event,
        ibv_get_device_guid => device::ibv_get_device_guid,
        ibv_get_device_list => device::ibv_get_device_list,
        ibv_get_device_name => device::ibv_get_device_name,
        ibv_init_ah_from_wc => refused::ibv_init_ah_from_wc,
        ibv_modify_qp => qp::ibv_modify_qp,
        ibv_modify_srq => srq::ibv_modify_srq,
        ibv_node_type_str => text::ibv_node_type_str,
        ibv_open_device => context::ibv_open_device,
        ibv_port_state_str => text::ibv_port_state_str,
        ibv_query_device => context::ibv_query_device,
        ibv_query_gid => context::ibv_query_gid,
        ibv_query_pkey => context::ibv_query_pkey,
        ibv_query_port => context::ibv_query_port,
        ibv_query_qp => qp::ibv_query_qp,
        ibv_query_srq => srq::ibv_query_srq,
        ibv_rate_to_mbps => text::ibv_rate_to_mbps,
        ibv_register_driver => refused::ibv_register_driver,
        ibv_reg_mr => memory::ibv_reg_mr,
        ibv_rereg_mr => memory::ibv_rereg_mr,
        ibv_resize_cq => cq::ibv_resize_cq,
        ibv_resolve_eth_l2_from_gid => refused::ibv_resolve_eth_l2_from_gid,
        ibv_wc_status_str => text::ibv_wc_status_str,
        mbps_to_ibv_rate => text::mbps_to_ibv_rate,
    }
    "IBVERBS_1.5" {
        ibv_get_pkey_index => context::ibv_get_pkey_index,
    }
    "IBVERBS_1.6" {
        ibv_qp_to_qp_ex => qp::ibv_qp_to_qp_ex,
    }
    "IBVERBS_1.7" {
        ibv_reg_mr_iova => memory::ibv_reg_mr_iova,
    }
    "IBVERBS_1.8" {
        ibv_reg_mr_iova2 => memory::ibv_reg_mr_iova2,
    }
    "IBVERBS_1.9" {
        ibv_get_device_index => device::ibv_get_device_index,
    }
    "IBVERBS_1.10" {
        ibv_import_device => refused::ibv_import_device,
        ibv_import_mr => refused::ibv_import_mr,
        ibv_import_pd => refused::ibv_import_pd,
        ibv_query_ece => refused::ibv_query_ece,
        ibv_set_ece => refused::ibv_set_ece,
        ibv_unimport_mr => refused::ibv_unimport_mr,
        ibv_unimport_pd => refused::ibv_unimport_pd,
    }
    "IBVERBS_1.11" {
        _ibv_query_gid_ex => context::_ibv_query_gid_ex,
        _ibv_query_gid_table => context::_ibv_query_gid_table,
    }
    "IBVERBS_1.12" {
        ibv_reg_dmabuf_mr => refused::ibv_reg_dmabuf_mr,
    }
    "IBVERBS_1.13" {
        ibv_import_dm => refused::ibv_import_dm,
        ibv_is_fork_initialized => refused::ibv_is_fork_initialized,
        ibv_unimport_dm => refused::ibv_unimport_dm,
    }
    "IBVERBS_1.14" {
        ibv_query_qp_data_in_order => qp::ibv_query_qp_data_in_order,
    }
    "IBVERBS_1.15" {
        ibv_alloc_dmah => no_object,
        ibv_dealloc_dmah => unsupported,
        ibv_reg_mr_ex => buffer::ibv_reg_mr_ex,
    }
    "IBVERBS_1.16" {
        ibv_dm_export_dmabuf_fd => minus_one,
        ibv_query_port_speed => unsupported,
    }
    "IBVERBS_1.17" {
        ibv_alloc_buf => buffer::ibv_alloc_buf,
        ibv_free_buf => buffer::ibv_free_buf,
        ibv_reg_buf_mr => buffer::ibv_reg_buf_mr,
    }
    "IBVERBS_1.18" {
        _ibv_query_comp_cntr_caps => unsupported,
        ibv_create_comp_cntr => no_object,
        ibv_destroy_comp_cntr => unsupported,
        ibv_export_buf_dmabuf_fd => buffer::ibv_export_buf_dmabuf_fd,
        ibv_inc_comp_cntr => unsupported,
        ibv_inc_err_comp_cntr => unsupported,
        ibv_qp_attach_comp_cntr => unsupported,
        ibv_read_comp_cntr => unsupported,
        ibv_read_err_comp_cntr => unsupported,
        ibv_set_comp_cntr => unsupported,
        ibv_set_err_comp_cntr => unsupported,
    }
    "RDMACM_1.0" {
        rdma_create_event_channel => cm_channel::rdma_create_event_channel,
        rdma_destroy_event_channel => cm_channel::rdma_destroy_event_channel,
        rdma_get_cm_event => cm_channel::rdma_get_cm_event,
        rdma_ack_cm_event => cm_event::rdma_ack_cm_event,
        rdma_event_str => cm_event::rdma_event_str,
        rdma_create_id => id::rdma_create_id,
        rdma_destroy_id => id::rdma_destroy_id,
        rdma_migrate_id => id::rdma_migrate_id,
        rdma_bind_addr => resolve::rdma_bind_addr,
        rdma_resolve_addr => resolve::rdma_resolve_addr,
        rdma_resolve_route => resolve::rdma_resolve_route,
        rdma_get_devices => resolve::rdma_get_devices,
        rdma_free_devices => resolve::rdma_free_devices,
        rdma_listen => connect::rdma_listen,
        rdma_connect => connect::rdma_connect,
        rdma_accept => connect::rdma_accept,
        rdma_reject => connect::rdma_reject,
        rdma_disconnect => connect::rdma_disconnect,
        rdma_notify => connect::rdma_notify,
        rdma_create_qp => endpoint::rdma_create_qp,
        rdma_create_qp_ex => endpoint::rdma_create_qp_ex,
        rdma_destroy_qp => endpoint::rdma_destroy_qp,
        rdma_create_srq => endpoint::rdma_create_srq,
        rdma_destroy_srq => endpoint::rdma_destroy_srq,
        rdma_create_ep => endpoint::rdma_create_ep,
        rdma_destroy_ep => endpoint::rdma_destroy_ep,
        rdma_get_request => endpoint::rdma_get_request,
        rdma_set_option => options::rdma_set_option,
        rdma_get_src_port => options::rdma_get_src_port,
        rdma_get_dst_port => options::rdma_get_dst_port,
        rdma_getaddrinfo => addrinfo::rdma_getaddrinfo,
        rdma_freeaddrinfo => addrinfo::rdma_freeaddrinfo,
        rdma_join_multicast => cm_refused::rdma_join_multicast,
        rdma_leave_multicast => cm_refused::rdma_leave_multicast,
        rdma_create_srq_ex => cm_refused::rdma_create_srq_ex,
        rpoll => rsocket::rpoll,
        raccept => rsocket::raccept,
        rbind => rsocket::rbind,
        rclose => rsocket::rclose,
        rconnect => rsocket::rconnect,
        rfcntl => rsocket::rfcntl,
        rgetpeername => rsocket::rgetpeername,
        rgetsockname => rsocket::rgetsockname,
        rgetsockopt => rsocket::rgetsockopt,
        riomap => rsocket::riomap,
        riounmap => rsocket::riounmap,
        riowrite => rsocket::riowrite,
        rlisten => rsocket::rlisten,
        rread => rsocket::rread,
        rreadv => rsocket::rreadv,
        rrecv => rsocket::rrecv,
        rrecvfrom => rsocket::rrecvfrom,
        rrecvmsg => rsocket::rrecvmsg,
        rselect => rsocket::rselect,
        rsend => rsocket::rsend,
        rsendmsg => rsocket::rsendmsg,
        rsendto => rsocket::rsendto,
        rsetsockopt => rsocket::rsetsockopt,
        rshutdown => rsocket::rshutdown,
        rsocket => rsocket::rsocket,
        rwrite => rsocket::rwrite,
        rwritev => rsocket::rwritev,
    }
    "RDMACM_1.1" {
        rdma_join_multicast_ex => cm_refused::rdma_join_multicast_ex,
    }
    "RDMACM_1.2" {
        rdma_establish => connect::rdma_establish,
        rdma_init_qp_attr => endpoint::rdma_init_qp_attr,
    }
    "RDMACM_1.3" {
        rdma_get_remote_ece => cm_refused::rdma_get_remote_ece,
        rdma_reject_ece => cm_refused::rdma_reject_ece,
        rdma_set_local_ece => cm_refused::rdma_set_local_ece,
    }
    "RDMACM_1.4" {
        rdma_query_addrinfo => minus_one,
        rdma_resolve_addrinfo => minus_one,
        rdma_write_cm_event => minus_one,
    }
    "RDMACM_1.5" {
        repoll_create => rsocket::repoll_create,
        repoll_ctl => rsocket::repoll_ctl,
        repoll_wait => rsocket::repoll_wait,
    }
}

// The C library's functions that programs call here first, in its node for the first release on a processor.
#[cfg(target_arch = "x86_64")]
table! {
    "GLIBC_2.2.5" {
        sigaction => faults::sigaction,
        signal => faults::signal,
        getaddrinfo => names::getaddrinfo,
    }
    "GLIBC_2.3" {
        getifaddrs => interfaces::getifaddrs,
    }
}
#[cfg(target_arch = "aarch64")]
table! {
    "GLIBC_2.17" {
        sigaction => faults::sigaction,
        signal => faults::signal,
        getaddrinfo => names::getaddrinfo,
        getifaddrs => interfaces::getifaddrs,
    }
}

// libibverbs before 1.1 (2007) had other structures behind the same names. Programs of that time do not run here, and load.
former! {
    "IBVERBS_1.0" {
        ibv_ack_async_event => nothing,
        ibv_ack_cq_events => nothing,
        ibv_alloc_pd => no_object,
        ibv_attach_mcast => unsupported,
        ibv_close_device => unsupported,
        ibv_create_ah => no_object,
        ibv_create_cq => no_object,
        ibv_create_qp => no_object,
        ibv_create_srq => no_object,
        ibv_dealloc_pd => unsupported,
        ibv_dereg_mr => unsupported,
        ibv_destroy_ah => unsupported,
        ibv_destroy_cq => unsupported,
        ibv_destroy_qp => unsupported,
        ibv_destroy_srq => unsupported,
        ibv_detach_mcast => unsupported,
        ibv_free_device_list => nothing,
        ibv_get_async_event => minus_one,
        ibv_get_cq_event => minus_one,
        ibv_get_device_guid => nothing,
        ibv_get_device_list => no_object,
        ibv_get_device_name => no_object,
        ibv_modify_qp => unsupported,
        ibv_modify_srq => unsupported,
        ibv_open_device => no_object,
        ibv_query_device => unsupported,
        ibv_query_gid => unsupported,
        ibv_query_pkey => unsupported,
        ibv_query_port => unsupported,
        ibv_query_qp => unsupported,
        ibv_query_srq => unsupported,
        ibv_reg_mr => no_object,
        ibv_resize_cq => unsupported,
    }
}
