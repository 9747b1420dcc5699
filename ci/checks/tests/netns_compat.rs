//! The distribution's programs over the drop-in libraries: devices, and the connection manager.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side, distribution},
    process::Running,
    tshark,
    unmodified::{LIMIT, await_listener, compiled, connect, connect_by, pair, run, start, start_with},
    vm::built,
};

/// Port of `ucmatose` and `cmtime`.
const PORT: u16 = 7471;

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

#[test]
fn netns_compat_devices_are_listed_with_their_attributes() {
    let lab = lab();
    let said = run(&lab, Side::A, "ibv_devices").unwrap();
    assert!(said.lines().any(|line| line.split_whitespace().next() == Some(INTERFACE)), "{said}");

    let said = run(&lab, Side::A, "ibv_devinfo -v").unwrap();
    for row in [
        "hca_id:	xw0",
        "transport:			iWARP (1)",
        "state:			PORT_ACTIVE (4)",
        "link_layer:		Ethernet",
        "0000:0000:0000:0000:0000:ffff:0a4d:0001",
        "fd77:0000:0000:0000:0000:0000:0000:0001",
        "ATOMIC_HCA (1)",
        "max_sge_rd:			1",
    ] {
        assert!(said.contains(row), "no {row:?} in\n{said}");
    }
}

#[test]
fn netns_compat_rping_exchanges_and_verifies_data() {
    let lab = lab();
    for (family, options) in [
        (Family::V4, "-C 20 -S 64 -V -v"),
        (Family::V6, "-C 10 -S 4001 -V"),
        (Family::V4, "-C 5 -S 65535 -V -p 7200"),
    ] {
        let address = lab.address(Side::B, family);
        let server = format!("rping -s -a {address} {options}");
        let client = format!("rping -c -a {address} {options}");
        let [_, said] = pair(&lab, &server, &client).unwrap();
        if options.contains("-v") {
            assert_eq!(said.matches("ping data:").count(), 20, "{said}");
        }
    }
}

#[test]
fn netns_compat_librdmacms_own_examples_run() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    for (server, client) in [
        ("rdma_server".to_owned(), format!("rdma_client -s {address}")),
        ("rdma_xserver".to_owned(), format!("rdma_xclient -s {address}")),
        (format!("ucmatose -b {address}"), format!("ucmatose -s {address}")),
    ] {
        pair(&lab, &server, &client).unwrap();
    }
    let mut server = start(&lab, Side::B, &format!("ucmatose -b {address} -c 4 -C 50 -S 4096")).unwrap();
    await_listener(&lab, (address, PORT).into()).unwrap();
    connect(&lab, &mut server, &format!("ucmatose -s {address} -c 4 -C 50 -S 4096")).unwrap();
    server.finish(LIMIT).unwrap();
}

/// Newer releases have another `cmtime` (`docs/compat.md`).
#[test]
fn netns_compat_cmtime_of_debian_12_runs() {
    let lab =
        Lab::up(LabOptions { distribution: distribution("bookworm"), ..LabOptions::default() }).unwrap();
    let address = lab.address(Side::B, Family::V4);
    // Its server runs until it is stopped.
    let mut server = start(&lab, Side::B, &format!("cmtime -b {address} -c 20")).unwrap();
    await_listener(&lab, (address, PORT).into()).unwrap();
    let said = connect(&lab, &mut server, &format!("cmtime -s {address} -c 20")).unwrap();
    assert!(said.contains("disconnect"), "{said}");
}

/// The names of the threads of process `id`, one line each.
fn threads(id: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).unwrap();
    tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok()).collect()
}

/// `XWARP_ENGINES` gives the devices of a program several engines, which share its connections.
#[test]
fn netns_compat_programs_run_on_several_engines() {
    let lab = Lab::up(LabOptions { queues: 2, ..LabOptions::default() }).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let two = [("XWARP_ENGINES", "2")];
    for (server, client) in [
        (format!("rping -s -P -a {address}"), format!("rping -c -a {address} -C 20 -S 4001 -V")),
        (
            format!("ucmatose -b {address} -c 8 -C 50 -S 4096"),
            format!("ucmatose -s {address} -c 8 -C 50 -S 4096"),
        ),
        (
            "ib_write_bw -F -R -n 200 -s 4096 -q 8".to_owned(),
            format!("ib_write_bw -F -R -n 200 -s 4096 -q 8 {address}"),
        ),
    ] {
        let mut served = start_with(&lab, Side::B, &two, &server).unwrap();
        if server.starts_with("ucmatose") {
            await_listener(&lab, (address, PORT).into()).unwrap();
        }
        connect_by(&mut served, &client, || start_with(&lab, Side::A, &two, &client)).unwrap();
        if server.starts_with("rping") {
            // This server runs until it is stopped.
            let names = threads(served.id());
            assert!(
                ["xwarp-xw0", "xwarp-xw0-1"].iter().all(|name| names.lines().any(|n| n == *name)),
                "{names}"
            );
            served.signal(Signal::TERM).unwrap();
        } else {
            served.finish(LIMIT).unwrap_or_else(|error| panic!("{server}: {error:#}"));
        }
    }
}

#[test]
fn netns_compat_pingpong_connects_by_queue_pair_number() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    for line in [
        "ibv_rc_pingpong -g 0 -n 200 -c",
        "ibv_rc_pingpong -g 0 -n 200 -e",
        "ibv_rc_pingpong -g 0 -n 200 -t",
        "ibv_rc_pingpong -g 0 -n 200 -N",
        "ibv_srq_pingpong -g 0 -n 200 -q 1",
    ] {
        let [_, said] =
            pair(&lab, line, &format!("{line} {address}")).unwrap_or_else(|e| panic!("{line}: {e:#}"));
        assert!(said.contains("200 iters"), "{line}: {said}");
    }
}

#[test]
fn netns_compat_qperf_measures() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(&lab, Side::B, "qperf").unwrap();
    for test in
        ["rc_bw", "rc_lat", "rc_rdma_write_bw", "rc_rdma_write_lat", "rc_rdma_read_bw", "rc_rdma_read_lat"]
    {
        let said = run(&lab, Side::A, &format!("qperf -t 1 -cm 1 --wait_server 10 {address} {test}"));
        let said = said.unwrap_or_else(|error| panic!("{test}: {error:#}\n{}", server.output()));
        assert!(said.contains(" = "), "{test}: {said}");
    }
    server.signal(Signal::KILL).unwrap();
    server.wait(LIMIT).unwrap();
}

#[test]
fn netns_compat_wrong_calls_get_the_errors_of_rdma_core() {
    let lab = lab();
    let program = compiled(&lab, "local", &["-libverbs", "-lrdmacm"]).unwrap();
    let said = run(&lab, Side::A, &program).unwrap();
    assert!(said.contains("0 failures"), "{said}");
}

#[test]
fn netns_compat_libraries_are_found_by_dlopen() {
    let lab = lab();
    let program = compiled(&lab, "dynamic", &["-ldl"]).unwrap();
    assert_eq!(run(&lab, Side::A, &program).unwrap(), format!("device {INTERFACE}"));
}

/// Runs a case of `tests/compat/pair.c` at both ends. Returns what the client says.
fn pair_of(case: &str) -> String {
    let lab = lab();
    let program = compiled(&lab, "pair", &["-libverbs", "-lrdmacm", "-pthread"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(&lab, Side::B, &format!("{program} server {case}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = run(&lab, Side::A, &format!("{program} client {case} {address}"));
    let client = client.unwrap_or_else(|error| panic!("{error:#}\nthe server said: {}", server.output()));
    assert!(client.contains("done"), "{client}");
    assert!(server.finish(LIMIT).unwrap().contains("done"));
    client
}

#[test]
fn netns_compat_a_batch_is_posted_whole_or_not_at_all() {
    pair_of("batch");
}

#[test]
fn netns_compat_the_limit_of_a_shared_receive_queue_raises_an_event() {
    pair_of("limit");
}

#[test]
fn netns_compat_extended_completions_have_all_fields() {
    pair_of("fields");
}

#[test]
fn netns_compat_memory_windows_are_bound_and_invalidated() {
    pair_of("window");
}

#[test]
fn netns_compat_posting_and_polling_allocate_nothing() {
    pair_of("allocations");
}

#[test]
fn netns_compat_threads_post_and_poll_at_the_same_time() {
    pair_of("threads");
}

#[test]
fn netns_compat_regions_may_be_larger_than_four_gigabytes() {
    pair_of("huge");
}

#[test]
fn netns_compat_the_state_sqd_closes_the_connection() {
    pair_of("draining");
}

#[test]
fn netns_compat_requests_that_cannot_be_are_refused() {
    pair_of("refusals");
}

/// Runs `tests/compat/immediate.c` at both ends, the client with these variables. Returns what the client says.
fn immediate(lab: &Lab, case: &str, variables: &[(&str, &str)]) -> String {
    let program = compiled(lab, "immediate", &["-libverbs", "-lrdmacm"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let mut server = start(lab, Side::B, &format!("{program} server - {case}")).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let client = start_with(lab, Side::A, variables, &format!("{program} client {address} {case}")).unwrap();
    let client = client.finish(LIMIT);
    let client = client.unwrap_or_else(|error| panic!("{error:#}\nthe server said: {}", server.output()));
    assert!(server.finish(LIMIT).unwrap().contains("done"));
    client
}

#[test]
fn netns_compat_sends_carry_immediate_data_and_a_payload() {
    let lab = lab();
    for case in ["own", "srq"] {
        assert!(immediate(&lab, case, &[]).contains("done"));
    }
    let capture = lab.file("immediate.pcapng");
    let recorded = [("XWARP_MARKERS", "off"), ("XWARP_CAPTURE", capture.to_str().unwrap())];
    assert!(immediate(&lab, "own", &recorded).contains("done"));
    let found = tshark::immediate_sends(&capture).unwrap();
    assert_eq!((found.offered, found.agreed), (1, 1));
    let data = [0x0102_0304, 0xa0b0_c0d0, u32::MAX, 0x7f, 0x8000_0000, 0x0a0b_0c0d];
    assert_eq!(found.messages, data.map(|data| (data, data == 0x0a0b_0c0d)));
}

/// Revision 1 of MPA stands for a peer without the extension.
#[test]
fn netns_compat_sends_with_immediate_data_are_refused_once_without_the_peers_agreement() {
    let said = immediate(&lab(), "refused", &[("XWARP_MPA_REVISION", "1")]);
    assert_eq!(said.matches("xwarp: a Send with immediate data and a payload").count(), 1, "{said}");
}

#[test]
fn netns_compat_random_calls_end_as_modelled() {
    let lab = lab();
    let program = compiled(&lab, "model", &["-libverbs", "-pthread"]).unwrap();
    for seed in 1..=12 {
        // In some of the runs, a second thread looks on, or makes such calls too.
        let watched = match seed {
            1..=6 => "",
            7..=9 => "watched",
            _ => "two",
        };
        let said = run(&lab, Side::A, &format!("{program} {seed} 5000 {watched}"));
        assert!(said.unwrap().contains("5000 calls as modelled"), "seed {seed}");
    }
}

/// rsockets are the distribution's own code, over our verbs.
#[test]
fn netns_compat_rsockets_carry_streams() {
    let lab = lab();
    for (program, options, family) in [
        ("rstream", "-S 4096 -C 100 -T v", Family::V4),
        ("rstream", "-S 65536 -C 20 -T b -T v", Family::V4),
        ("rstream", "-S 4096 -C 100 -T n -T v", Family::V6),
        ("riostream", "-S 4096 -C 100 -T v", Family::V4),
        ("riostream", "-S 65536 -C 20 -T b", Family::V4),
    ] {
        let (line, address) = (format!("{program} {options}"), lab.address(Side::B, family));
        let [_, said] = pair(&lab, &format!("{line} -b {address}"), &format!("{line} -s {address}"))
            .unwrap_or_else(|error| panic!("{line}: {error:#}"));
        assert!(said.contains("custom "), "{line}: {said}");
    }
}

#[test]
fn netns_compat_rcopy_copies_a_file() {
    let lab = lab();
    let (from, to) = (lab.file("from"), lab.file("to"));
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| (number * 7 / 5) as u8).collect();
    std::fs::write(&from, &bytes).unwrap();
    // Its server runs until it is stopped.
    let mut server = start(&lab, Side::B, "rcopy").unwrap();
    let address = lab.address(Side::B, Family::V4);
    connect(&lab, &mut server, &format!("rcopy {} {address}:{}", from.display(), to.display())).unwrap();
    assert!(std::fs::read(&to).unwrap() == bytes, "the copy differs");
}

#[test]
fn netns_compat_programs_may_exit_in_a_signal_handler() {
    let lab = lab();
    let program = compiled(&lab, "handler", &["-libverbs"]).unwrap();
    for _ in 0..5 {
        run(&lab, Side::A, &program).unwrap();
    }
}

#[test]
fn netns_compat_rping_sets_the_states_of_its_queue_pair() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    let options = format!("-q -a {address} -C 10 -V");
    pair(&lab, &format!("rping -s {options}"), &format!("rping -c {options}")).unwrap();
}

#[test]
fn netns_compat_libfabric_verifies_data() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    // Its server asks for the device of `localhost`.
    for options in ["-p verbs -e msg -I 50 -c", "-p verbs;ofi_rxm -e rdm -I 50 -c"] {
        let server = format!("fi_pingpong {options}");
        let [_, said] = pair(&lab, &server, &format!("{server} {address}")).unwrap();
        assert!(said.lines().any(|line| line.starts_with("1m ")), "{said}");
    }
    let said = run(&lab, Side::A, "fi_info -p verbs").unwrap();
    assert!(said.contains("FI_PROTO_IWARP"), "{said}");
}

#[test]
fn netns_compat_the_port_raises_events() {
    let lab = lab();
    let mut watch = start(&lab, Side::A, "stdbuf -oL ibv_asyncwatch").unwrap();
    watch.wait_for("async event FD", LIMIT).unwrap();
    for (state, event) in [("down", "IBV_EVENT_PORT_ERR"), ("up", "IBV_EVENT_PORT_ACTIVE")] {
        lab.run(Side::B, "ip", &["link", "set", INTERFACE, state]).unwrap();
        watch.wait_for(event, LIMIT).unwrap();
    }
}

#[test]
fn netns_compat_the_library_is_preloaded() {
    let lab = lab();
    let mut command = lab.command(Side::A, "ibv_devices");
    command.env("LD_PRELOAD", built("libxwarp_compat.so").unwrap()).env("XWARP_DEVICES", INTERFACE);
    let said = Running::start(command).unwrap().finish(LIMIT).unwrap();
    assert!(said.lines().any(|line| line.split_whitespace().next() == Some(INTERFACE)), "{said}");
}

#[test]
fn netns_compat_a_killed_server_fails_its_client_and_leaves_nothing() {
    let lab = lab();
    let address = lab.address(Side::B, Family::V4);
    let line = "ib_write_bw -F -R -D 100 -s 4096";
    let server = start(&lab, Side::B, line).unwrap();
    let mut client = loop {
        let mut client = start(&lab, Side::A, &format!("stdbuf -oL {line} {address}")).unwrap();
        // Before the server listens, the client ends.
        if client.wait_for("#bytes", LIMIT).is_ok() {
            break client;
        }
    };
    server.signal(Signal::KILL).unwrap();
    assert!(!client.wait(LIMIT).unwrap().success(), "{}", client.output());
    drop(server);
    for side in [Side::A, Side::B] {
        let link = lab.run(side, "ip", &["link", "show", INTERFACE]).unwrap();
        assert!(!link.contains("xdp"), "{link}");
    }
    // The port is free.
    let line = "ib_write_bw -F -R -n 100 -s 4096";
    pair(&lab, line, &format!("{line} {address}")).unwrap();
}
