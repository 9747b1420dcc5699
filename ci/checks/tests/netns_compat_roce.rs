//! The drop-in libraries' devices with the face of a RoCE device, for programs that refuse iWARP or do less over it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use xwarp_checks::{
    lab::{Family, Lab, LabOptions, Side},
    process::Running,
    unmodified::{LIMIT, compiled, run, run_with, xwarp},
};

const ROCE: [(&str, &str); 1] = [("XWARP_AS", "roce")];

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// What a program reads of the device, by the functions that programs decide by.
#[test]
fn netns_compat_roce_identity() {
    let lab = lab();
    let said = run_with(&lab, Side::A, &ROCE, "ibv_devinfo -v").unwrap();
    for row in [
        "transport:			InfiniBand (0)",
        "state:			PORT_ACTIVE (4)",
        "link_layer:		Ethernet",
        "port_lid:		0",
        "port_cap_flags:		0x04010000",
        "GID[  0]:		::ffff:10.77.0.1, RoCE v2",
    ] {
        assert!(said.contains(row), "no {row:?} in\n{said}");
    }
    let gid = compiled(&lab, "gid", &["-libverbs"]).unwrap();
    for (variables, expected) in [
        (&ROCE[..], "gid type 2 state 0 receive refused datagrams refused"),
        (&[], "gid type 0 state 1 receive taken datagrams refused"),
    ] {
        assert_eq!(run_with(&lab, Side::A, variables, &gid).unwrap().trim_end(), expected);
    }
    let said = run(&lab, Side::A, "ibv_devinfo -v").unwrap();
    assert!(said.contains("port_cap_flags:		0x00000000"), "{said}");
}

/// Two ranks of Open MPI on two hosts. Over an iWARP device libfabric has no CQ data, and the first `MPI_Ssend` does not return.
#[test]
fn netns_compat_roce_mpi_ssend_returns() {
    let lab = lab();
    let program = lab.file("ssend");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compat/ssend.c");
    assert!(Command::new("mpicc").arg("-o").args([&program, &source]).status().unwrap().success());
    // In place of ssh: the first argument is the host, which is side B.
    let agent = lab.file("agent");
    let script = format!("#!/bin/sh\nshift\nexec ip netns exec {} sh -c \"$*\"\n", lab.namespace(Side::B));
    fs::write(&agent, script).unwrap();
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o755)).unwrap();
    let hosts = [Side::A, Side::B].map(|side| lab.address(side, Family::V4).to_string()).join(",");
    let mut command = lab.command(Side::A, "mpirun");
    command.args(["--allow-run-as-root", "-np", "2", "--host", &hosts]);
    command.args(["--mca", "pml", "cm", "--mca", "mtl", "ofi"]);
    command.args(["--mca", "mtl_ofi_provider_include", "verbs;ofi_rxm", "--mca", "plm_rsh_agent"]).arg(agent);
    command.arg(xwarp().unwrap()).args(["run", "--as", "roce"]).arg(program);
    // Ranks that poll share two processors with everything else.
    command.env("OMPI_MCA_mpi_yield_when_idle", "1");
    let said = Running::start(command).unwrap().finish(LIMIT).unwrap();
    for rank in ["rank 0: 200 rounds", "rank 1: 200 rounds"] {
        assert!(said.contains(rank), "no {rank:?} in {said}");
    }
}
