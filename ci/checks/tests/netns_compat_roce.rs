//! The drop-in libraries' devices with the face of a RoCE device, for programs that refuse iWARP or do less over it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use xwarp_checks::{
    lab::{Lab, LabOptions, Side},
    unmodified::{compiled, run, run_with},
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
