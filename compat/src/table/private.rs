//! The functions of libibverbs that only drivers of hardware call: libmlx5, to which programs such as perftest are linked, does not
//! load without them.
//!
//! rdma-core names their node anew whenever one of them changes: 34 in the versions 34 to 56, 57 in 57 and 58, 59 in 59 to 63, 64,
//! 65. Each node has all of them here, so a node of the future is one line in [`alias`]'s callers and one in `versions.map`.
//! A driver finds no device here, so apart from its registration no function of it runs; what it could call fails with EOPNOTSUPP.

use std::arch::global_asm;

use crate::verbs::{
    context,
    refused::{self, minus_one, no_object, nothing, unsupported},
    text,
};

/// Symbols in all private nodes.
macro_rules! private {
    ($kind:literal, $name:ident, $($body:tt)*) => {
        global_asm!(
            alias!($kind, "p34", $name, "@", "IBVERBS_PRIVATE_34"),
            alias!($kind, "p57", $name, "@", "IBVERBS_PRIVATE_57"),
            alias!($kind, "p59", $name, "@", "IBVERBS_PRIVATE_59"),
            alias!($kind, "p64", $name, "@", "IBVERBS_PRIVATE_64"),
            alias!($kind, "p65", $name, "@@@", "IBVERBS_PRIVATE_65"),
            $($body)*
        );
    };
}

macro_rules! functions {
    ($($name:ident => $function:path),* $(,)?) => {
        $(private!("@function", $name, jump!(), target = sym $function);)*
    };
}

functions! {
    __ioctl_final_num_attrs => nothing,
    __verbs_log => refused::verbs_log,
    _verbs_init_and_alloc_context => no_object,
    execute_ioctl => unsupported,
    ibv_cmd_advise_mr => unsupported,
    ibv_cmd_alloc_dm => unsupported,
    ibv_cmd_alloc_dmah => unsupported,
    ibv_cmd_alloc_mw => unsupported,
    ibv_cmd_alloc_pd => unsupported,
    ibv_cmd_attach_mcast => unsupported,
    ibv_cmd_close_xrcd => unsupported,
    ibv_cmd_create_ah => unsupported,
    ibv_cmd_create_comp_cntr => unsupported,
    ibv_cmd_create_counters => unsupported,
    ibv_cmd_create_cq => unsupported,
    ibv_cmd_create_cq_ex => unsupported,
    ibv_cmd_create_cq_ex2 => unsupported,
    ibv_cmd_create_flow => unsupported,
    ibv_cmd_create_flow_action_esp => unsupported,
    ibv_cmd_create_qp => unsupported,
    ibv_cmd_create_qp_ex => unsupported,
    ibv_cmd_create_qp_ex2 => unsupported,
    ibv_cmd_create_rwq_ind_table => unsupported,
    ibv_cmd_create_srq => unsupported,
    ibv_cmd_create_srq_ex => unsupported,
    ibv_cmd_create_wq => unsupported,
    ibv_cmd_dealloc_mw => unsupported,
    ibv_cmd_dealloc_pd => unsupported,
    ibv_cmd_dereg_mr => unsupported,
    ibv_cmd_destroy_ah => unsupported,
    ibv_cmd_destroy_comp_cntr => unsupported,
    ibv_cmd_destroy_counters => unsupported,
    ibv_cmd_destroy_cq => unsupported,
    ibv_cmd_destroy_flow => unsupported,
    ibv_cmd_destroy_flow_action => unsupported,
    ibv_cmd_destroy_qp => unsupported,
    ibv_cmd_destroy_rwq_ind_table => unsupported,
    ibv_cmd_destroy_srq => unsupported,
    ibv_cmd_destroy_wq => unsupported,
    ibv_cmd_detach_mcast => unsupported,
    ibv_cmd_export_dmabuf_fd => minus_one,
    ibv_cmd_free_dm => unsupported,
    ibv_cmd_free_dmah => unsupported,
    ibv_cmd_get_context => unsupported,
    ibv_cmd_inc_comp_cntr => unsupported,
    ibv_cmd_inc_err_comp_cntr => unsupported,
    ibv_cmd_modify_cq => unsupported,
    ibv_cmd_modify_flow_action_esp => unsupported,
    ibv_cmd_modify_qp => unsupported,
    ibv_cmd_modify_qp_ex => unsupported,
    ibv_cmd_modify_srq => unsupported,
    ibv_cmd_modify_wq => unsupported,
    ibv_cmd_open_qp => unsupported,
    ibv_cmd_open_xrcd => unsupported,
    ibv_cmd_poll_cq => unsupported,
    ibv_cmd_post_recv => unsupported,
    ibv_cmd_post_send => unsupported,
    ibv_cmd_post_srq_recv => unsupported,
    ibv_cmd_qp_attach_comp_cntr => unsupported,
    ibv_cmd_query_comp_cntr_caps => unsupported,
    ibv_cmd_query_context => unsupported,
    ibv_cmd_query_device => unsupported,
    ibv_cmd_query_device_any => unsupported,
    ibv_cmd_query_mr => unsupported,
    ibv_cmd_query_port => unsupported,
    ibv_cmd_query_port_speed => unsupported,
    ibv_cmd_query_qp => unsupported,
    ibv_cmd_query_srq => unsupported,
    ibv_cmd_read_comp_cntr => unsupported,
    ibv_cmd_read_counters => unsupported,
    ibv_cmd_read_err_comp_cntr => unsupported,
    ibv_cmd_reg_dm_mr => unsupported,
    ibv_cmd_reg_dmabuf_mr => unsupported,
    ibv_cmd_reg_mr => unsupported,
    ibv_cmd_reg_mr_ex => unsupported,
    ibv_cmd_req_notify_cq => unsupported,
    ibv_cmd_rereg_mr => unsupported,
    ibv_cmd_resize_cq => unsupported,
    ibv_cmd_set_comp_cntr => unsupported,
    ibv_cmd_set_err_comp_cntr => unsupported,
    ibv_dmabuf_heap_alloc => no_object,
    ibv_dmabuf_heap_cc_shared_init => no_object,
    ibv_dmabuf_heap_destroy => nothing,
    ibv_dmabuf_heap_free => nothing,
    ibv_query_gid_type => context::ibv_query_gid_type,
    ibv_read_ibdev_sysfs_file => minus_one,
    ibv_wr_opcode_str => text::ibv_wr_opcode_str,
    verbs_init_cq => nothing,
    verbs_open_device => no_object,
    verbs_set_ops => nothing,
    verbs_uninit_context => nothing,
}

/// The function by which a driver registers itself, whose name has the node's number.
macro_rules! registration {
    ($($name:ident in $version:literal),* $(,)?) => {
        $(
            global_asm!(
                alias!("@function", "driver", $name, "@@@", $version),
                jump!(),
                target = sym refused::verbs_register_driver,
            );
        )*
    };
}

registration! {
    verbs_register_driver_34 in "IBVERBS_PRIVATE_34",
    verbs_register_driver_57 in "IBVERBS_PRIVATE_57",
    verbs_register_driver_59 in "IBVERBS_PRIVATE_59",
    verbs_register_driver_64 in "IBVERBS_PRIVATE_64",
    verbs_register_driver_65 in "IBVERBS_PRIVATE_65",
}

// A variable of type `bool` that drivers read.
global_asm!(".pushsection .bss.xwarp_abi, \"aw\", @nobits");
private!("@object", verbs_allow_disassociate_destroy, ".zero 8", ".popsection");
