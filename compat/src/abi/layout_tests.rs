//! Compares sizes and offsets with those of the installed headers (packages libibverbs-dev and librdmacm-dev).

#![allow(clippy::wildcard_imports, reason = "lists of structures")]

use std::{
    fmt::Write as _,
    fs,
    mem::offset_of,
    os::unix::fs::symlink,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{cm::*, device::*, queue::*};

/// Rows of sizes and offsets as we have them, and a C program that prints the same rows.
#[derive(Default)]
struct Layouts {
    ours: String,
    program: String,
}

impl Layouts {
    fn add(&mut self, ours: usize, c: &str) {
        let _ = writeln!(self.ours, "{c} {ours}");
        let _ = writeln!(self.program, "printf(\"{c} %zu\\n\", (size_t)({c}));");
    }
}

/// Adds structures: each with its size, and fields by our path and the name in C.
macro_rules! structures {
    ($to:ident, $($name:ident { $($($field:ident).+ = $c:literal),* $(,)? })*) => {
        $(
            $to.add(size_of::<$name>(), concat!("sizeof(struct ", stringify!($name), ")"));
            $(
                $to.add(offset_of!($name, $($field).+), concat!("offsetof(struct ", stringify!($name), ", ", $c, ")"));
            )*
        )*
    };
}

fn devices_and_ports(to: &mut Layouts) {
    structures! { to,
        ibv_device {
            node_type = "node_type",
            transport_type = "transport_type",
            name = "name",
            dev_name = "dev_name",
            dev_path = "dev_path",
            ibdev_path = "ibdev_path",
        }
        ibv_gid_entry {
            gid = "gid",
            gid_index = "gid_index",
            port_num = "port_num",
            gid_type = "gid_type",
            ndev_ifindex = "ndev_ifindex",
        }
        ibv_device_attr {
            fw_ver = "fw_ver",
            node_guid = "node_guid",
            max_mr_size = "max_mr_size",
            vendor_id = "vendor_id",
            max_qp = "max_qp",
            device_cap_flags = "device_cap_flags",
            max_sge_rd = "max_sge_rd",
            max_cqe = "max_cqe",
            max_qp_rd_atom = "max_qp_rd_atom",
            atomic_cap = "atomic_cap",
            max_mw = "max_mw",
            max_srq = "max_srq",
            max_srq_sge = "max_srq_sge",
            max_pkeys = "max_pkeys",
            phys_port_cnt = "phys_port_cnt",
        }
        ibv_device_attr_ex {
            orig_attr = "orig_attr",
            comp_mask = "comp_mask",
            odp_caps = "odp_caps",
            completion_timestamp_mask = "completion_timestamp_mask",
            hca_core_clock = "hca_core_clock",
            device_cap_flags_ex = "device_cap_flags_ex",
            offload_caps = "tso_caps",
            cq_mod_caps = "cq_mod_caps",
            max_dm_size = "max_dm_size",
            pci_atomic_caps = "pci_atomic_caps",
            xrc_odp_caps = "xrc_odp_caps",
            phys_port_cnt_ex = "phys_port_cnt_ex",
        }
        ibv_port_attr {
            state = "state",
            active_mtu = "active_mtu",
            gid_tbl_len = "gid_tbl_len",
            max_msg_sz = "max_msg_sz",
            pkey_tbl_len = "pkey_tbl_len",
            lid = "lid",
            lmc = "lmc",
            active_width = "active_width",
            active_speed = "active_speed",
            phys_state = "phys_state",
            link_layer = "link_layer",
            flags = "flags",
            port_cap_flags2 = "port_cap_flags2",
        }
    }
}

fn contexts(to: &mut Layouts) {
    structures! { to,
        ibv_async_event {
            element = "element",
            event_type = "event_type",
        }
        ibv_comp_channel {
            context = "context",
            fd = "fd",
            refcnt = "refcnt",
        }
        ibv_context_ops {
            alloc_mw = "alloc_mw",
            bind_mw = "bind_mw",
            dealloc_mw = "dealloc_mw",
            poll_cq = "poll_cq",
            req_notify_cq = "req_notify_cq",
            post_srq_recv = "post_srq_recv",
            post_send = "post_send",
            post_recv = "post_recv",
        }
        ibv_context {
            device = "device",
            ops = "ops",
            cmd_fd = "cmd_fd",
            async_fd = "async_fd",
            num_comp_vectors = "num_comp_vectors",
            mutex = "mutex",
            abi_compat = "abi_compat",
        }
        ibv_values_ex {
            comp_mask = "comp_mask",
            raw_clock = "raw_clock",
        }
    }
}

/// The structure grows at its front, so members have a fixed distance from its end. A program looks at a member only if our `sz`
/// says that we have it.
fn verbs_contexts(to: &mut Layouts) {
    macro_rules! members {
        ($($field:ident = $c:literal),* $(,)?) => {
            $(
                to.add(
                    size_of::<verbs_context>() - offset_of!(verbs_context, $field),
                    concat!("sizeof(struct verbs_context) - offsetof(struct verbs_context, ", $c, ")"),
                );
            )*
        };
    }
    members! {
        query_port = "query_port",
        advise_mr = "advise_mr",
        modify_qp_rate_limit = "modify_qp_rate_limit",
        alloc_parent_domain = "alloc_parent_domain",
        dealloc_td = "dealloc_td",
        alloc_td = "alloc_td",
        modify_cq = "modify_cq",
        query_rt_values = "query_rt_values",
        create_cq_ex = "create_cq_ex",
        private = "priv",
        query_device_ex = "query_device_ex",
        open_qp = "open_qp",
        create_qp_ex = "create_qp_ex",
        get_srq_num = "get_srq_num",
        create_srq_ex = "create_srq_ex",
        open_xrcd = "open_xrcd",
        close_xrcd = "close_xrcd",
        size = "sz",
        context = "context",
    }
}

fn memory(to: &mut Layouts) {
    structures! { to,
        ibv_pd {
            context = "context",
            handle = "handle",
        }
        ibv_mr {
            context = "context",
            pd = "pd",
            addr = "addr",
            length = "length",
            lkey = "lkey",
            rkey = "rkey",
        }
        ibv_mw {
            context = "context",
            pd = "pd",
            rkey = "rkey",
            handle = "handle",
            kind = "type",
        }
        ibv_mw_bind_info {
            mr = "mr",
            addr = "addr",
            length = "length",
            mw_access_flags = "mw_access_flags",
        }
        ibv_mw_bind {
            wr_id = "wr_id",
            send_flags = "send_flags",
            bind_info = "bind_info",
        }
    }
}

fn completion_queues(to: &mut Layouts) {
    structures! { to,
        ibv_cq {
            context = "context",
            channel = "channel",
            cq_context = "cq_context",
            cqe = "cqe",
            sync.mutex = "mutex",
            sync.cond = "cond",
            comp_events_completed = "comp_events_completed",
            async_events_completed = "async_events_completed",
        }
        ibv_cq_ex {
            comp_mask = "comp_mask",
            status = "status",
            wr_id = "wr_id",
            start_poll = "start_poll",
            next_poll = "next_poll",
            end_poll = "end_poll",
            read_opcode = "read_opcode",
            read_vendor_err = "read_vendor_err",
            read_byte_len = "read_byte_len",
            read_imm_data = "read_imm_data",
            read_qp_num = "read_qp_num",
            read_src_qp = "read_src_qp",
            read_wc_flags = "read_wc_flags",
            read_slid = "read_slid",
            read_sl = "read_sl",
            read_dlid_path_bits = "read_dlid_path_bits",
            read_completion_ts = "read_completion_ts",
            read_tm_info = "read_tm_info",
            read_completion_wallclock_ns = "read_completion_wallclock_ns",
        }
        ibv_cq_init_attr_ex {
            cqe = "cqe",
            cq_context = "cq_context",
            channel = "channel",
            comp_vector = "comp_vector",
            wc_flags = "wc_flags",
            comp_mask = "comp_mask",
            flags = "flags",
            parent_domain = "parent_domain",
        }
        ibv_wc {
            wr_id = "wr_id",
            status = "status",
            opcode = "opcode",
            vendor_err = "vendor_err",
            byte_len = "byte_len",
            imm_data = "imm_data",
            qp_num = "qp_num",
            src_qp = "src_qp",
            wc_flags = "wc_flags",
            pkey_index = "pkey_index",
            slid = "slid",
            sl = "sl",
            dlid_path_bits = "dlid_path_bits",
        }
    }
}

fn queue_pairs(to: &mut Layouts) {
    structures! { to,
        ibv_qp_cap {
            max_send_wr = "max_send_wr",
            max_inline_data = "max_inline_data",
        }
        ibv_qp_init_attr {
            qp_context = "qp_context",
            send_cq = "send_cq",
            recv_cq = "recv_cq",
            srq = "srq",
            cap = "cap",
            qp_type = "qp_type",
            sq_sig_all = "sq_sig_all",
        }
        ibv_qp_init_attr_ex {
            comp_mask = "comp_mask",
            pd = "pd",
            xrcd = "xrcd",
            create_flags = "create_flags",
            max_tso_header = "max_tso_header",
            rwq_ind_tbl = "rwq_ind_tbl",
            rx_hash_conf = "rx_hash_conf",
            source_qpn = "source_qpn",
            send_ops_flags = "send_ops_flags",
        }
        ibv_qp {
            context = "context",
            qp_context = "qp_context",
            pd = "pd",
            send_cq = "send_cq",
            recv_cq = "recv_cq",
            srq = "srq",
            handle = "handle",
            qp_num = "qp_num",
            state = "state",
            qp_type = "qp_type",
            sync.mutex = "mutex",
            sync.cond = "cond",
            events_completed = "events_completed",
        }
    }
}

fn queue_pairs_of_the_new_interface(to: &mut Layouts) {
    structures! { to,
        ibv_qp_ex {
            comp_mask = "comp_mask",
            wr_id = "wr_id",
            wr_flags = "wr_flags",
            wr_atomic_cmp_swp = "wr_atomic_cmp_swp",
            wr_atomic_fetch_add = "wr_atomic_fetch_add",
            wr_bind_mw = "wr_bind_mw",
            wr_local_inv = "wr_local_inv",
            wr_rdma_read = "wr_rdma_read",
            wr_rdma_write = "wr_rdma_write",
            wr_rdma_write_imm = "wr_rdma_write_imm",
            wr_send = "wr_send",
            wr_send_imm = "wr_send_imm",
            wr_send_inv = "wr_send_inv",
            wr_send_tso = "wr_send_tso",
            wr_set_ud_addr = "wr_set_ud_addr",
            wr_set_xrc_srqn = "wr_set_xrc_srqn",
            wr_set_inline_data = "wr_set_inline_data",
            wr_set_inline_data_list = "wr_set_inline_data_list",
            wr_set_sge = "wr_set_sge",
            wr_set_sge_list = "wr_set_sge_list",
            wr_start = "wr_start",
            wr_complete = "wr_complete",
            wr_abort = "wr_abort",
            wr_atomic_write = "wr_atomic_write",
        }
    }
}

fn attributes_of_queue_pairs(to: &mut Layouts) {
    structures! { to,
        ibv_global_route {
            dgid = "dgid",
            flow_label = "flow_label",
            sgid_index = "sgid_index",
            traffic_class = "traffic_class",
        }
        ibv_ah_attr {
            grh = "grh",
            dlid = "dlid",
            sl = "sl",
            is_global = "is_global",
            port_num = "port_num",
        }
        ibv_qp_attr {
            qp_state = "qp_state",
            path_mtu = "path_mtu",
            dest_qp_num = "dest_qp_num",
            qp_access_flags = "qp_access_flags",
            cap = "cap",
            ah_attr = "ah_attr",
            alt_ah_attr = "alt_ah_attr",
            pkey_index = "pkey_index",
            max_rd_atomic = "max_rd_atomic",
            max_dest_rd_atomic = "max_dest_rd_atomic",
            port_num = "port_num",
            timeout = "timeout",
            rate_limit = "rate_limit",
        }
    }
}

fn shared_receive_queues(to: &mut Layouts) {
    structures! { to,
        ibv_srq {
            context = "context",
            srq_context = "srq_context",
            pd = "pd",
            sync.mutex = "mutex",
            sync.cond = "cond",
            events_completed = "events_completed",
        }
        ibv_srq_init_attr {
            srq_context = "srq_context",
            attr = "attr",
        }
        ibv_srq_init_attr_ex {
            attr = "attr",
            comp_mask = "comp_mask",
            srq_type = "srq_type",
            pd = "pd",
            cq = "cq",
            tm_cap = "tm_cap",
        }
    }
}

fn requests(to: &mut Layouts) {
    structures! { to,
        ibv_sge {
            addr = "addr",
            length = "length",
            lkey = "lkey",
        }
        ibv_data_buf {
            addr = "addr",
            length = "length",
        }
        ibv_send_wr {
            wr_id = "wr_id",
            next = "next",
            sg_list = "sg_list",
            num_sge = "num_sge",
            opcode = "opcode",
            send_flags = "send_flags",
            imm_data = "imm_data",
            wr.remote_addr = "wr.rdma.remote_addr",
            wr.second = "wr.rdma.rkey",
            wr.second = "wr.atomic.compare_add",
            wr.swap = "wr.atomic.swap",
            wr.atomic_rkey = "wr.atomic.rkey",
            bind_mw.mw = "bind_mw.mw",
            bind_mw.rkey = "bind_mw.rkey",
            bind_mw.bind_info = "bind_mw.bind_info",
        }
        ibv_recv_wr {
            wr_id = "wr_id",
            next = "next",
            sg_list = "sg_list",
            num_sge = "num_sge",
        }
    }
}

fn identifiers(to: &mut Layouts) {
    structures! { to,
        rdma_addr {
            src = "src_addr",
            dst = "dst_addr",
            ib = "addr",
        }
        rdma_route {
            addr = "addr",
            path_rec = "path_rec",
            num_paths = "num_paths",
        }
        rdma_event_channel {
            fd = "fd",
        }
        rdma_cm_id {
            verbs = "verbs",
            channel = "channel",
            context = "context",
            qp = "qp",
            route = "route",
            ps = "ps",
            port_num = "port_num",
            event = "event",
            send_cq_channel = "send_cq_channel",
            send_cq = "send_cq",
            recv_cq_channel = "recv_cq_channel",
            recv_cq = "recv_cq",
            srq = "srq",
            pd = "pd",
            qp_type = "qp_type",
        }
    }
}

fn events_and_addresses(to: &mut Layouts) {
    structures! { to,
        rdma_conn_param {
            private_data = "private_data",
            private_data_len = "private_data_len",
            responder_resources = "responder_resources",
            initiator_depth = "initiator_depth",
            flow_control = "flow_control",
            retry_count = "retry_count",
            rnr_retry_count = "rnr_retry_count",
            srq = "srq",
            qp_num = "qp_num",
        }
        rdma_ud_param {
            private_data = "private_data",
            private_data_len = "private_data_len",
            ah_attr = "ah_attr",
            qp_num = "qp_num",
            qkey = "qkey",
        }
        rdma_cm_event {
            id = "id",
            listen_id = "listen_id",
            event = "event",
            status = "status",
            param = "param",
        }
        rdma_addrinfo {
            ai_flags = "ai_flags",
            ai_family = "ai_family",
            ai_qp_type = "ai_qp_type",
            ai_port_space = "ai_port_space",
            ai_src_len = "ai_src_len",
            ai_dst_len = "ai_dst_len",
            ai_src_addr = "ai_src_addr",
            ai_dst_addr = "ai_dst_addr",
            ai_src_canonname = "ai_src_canonname",
            ai_dst_canonname = "ai_dst_canonname",
            ai_route_len = "ai_route_len",
            ai_route = "ai_route",
            ai_connect_len = "ai_connect_len",
            ai_connect = "ai_connect",
            ai_next = "ai_next",
        }
    }
}

/// Whether the rows are the size of a structure that got members at its end since, of which older programs know nothing. We write
/// one of them with the length that the program gives, and allocate the other.
fn is_older(ours: &str, theirs: &str) -> bool {
    ["sizeof(struct ibv_port_attr) ", "sizeof(struct ibv_qp_ex) "].iter().any(|name| {
        let size = |row: &str| row.strip_prefix(name)?.parse::<usize>().ok();
        size(theirs).zip(size(ours)).is_some_and(|(theirs, ours)| theirs <= ours)
    })
}

/// Numbers the directories of this process's comparisons.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Compares with the headers in `include`, or those of the system.
fn compare(include: Option<&Path>) {
    let mut layouts = Layouts::default();
    for add in [
        devices_and_ports,
        contexts,
        verbs_contexts,
        memory,
        completion_queues,
        queue_pairs,
        queue_pairs_of_the_new_interface,
        attributes_of_queue_pairs,
        shared_receive_queues,
        requests,
        identifiers,
        events_and_addresses,
    ] {
        add(&mut layouts);
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let directory = std::env::temp_dir().join(format!("xwarp-layout-{}-{number}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let [source, program] = ["layout.c", "layout"].map(|name| directory.join(name));
    let headers = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <stdio.h>\n#include <stddef.h>\n";
    fs::write(&source, format!("{headers}int main(void) {{\n{}return 0;\n}}\n", layouts.program)).unwrap();
    let mut compiler = Command::new("cc");
    if let Some(include) = include {
        // Only these two: the other headers have to match the compiler and its C library.
        for name in ["infiniband", "rdma"] {
            symlink(include.join(name), directory.join(name)).unwrap();
        }
        compiler.arg("-I").arg(&directory);
    }
    let compiled = compiler.arg(&source).arg("-o").arg(&program).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let said = Command::new(&program).output().unwrap();
    fs::remove_dir_all(&directory).unwrap();
    let theirs = String::from_utf8(said.stdout).unwrap();
    for (ours, theirs) in layouts.ours.lines().zip(theirs.lines()) {
        assert!(ours == theirs || is_older(ours, theirs), "ours: {ours}\ntheirs: {theirs}");
    }
    assert_eq!(layouts.ours.lines().count(), theirs.lines().count());
}

#[test]
fn structures_are_laid_out_as_in_the_installed_headers() {
    compare(None);
}

/// For root directories of other distributions: `XWARP_ROOTS=DIRECTORY:DIRECTORY`.
#[test]
fn structures_are_laid_out_as_in_the_headers_of_other_roots() {
    let roots = std::env::var_os("XWARP_ROOTS").unwrap_or_default();
    for root in std::env::split_paths(&roots) {
        eprintln!("headers of {}", root.display());
        compare(Some(&root.join("usr/include")));
    }
}
