//! The lab itself, which the other network tests depend on.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::Duration,
};

use xwarp_checks::lab::{Family, INTERFACE, Lab, LabOptions, Side};

fn exists(namespace: &str) -> bool {
    Path::new("/run/netns").join(namespace).exists()
}

#[test]
fn netns_lab_carries_both_families_and_is_removed() {
    let lab = Lab::up(LabOptions { mtu: 3506, queues: 2, ..LabOptions::default() }).unwrap();
    let names = [Side::A, Side::B].map(|side| lab.namespace(side));
    for family in [Family::V4, Family::V6] {
        let address = lab.address(Side::B, family).to_string();
        // 3506 bytes including the headers of IPv6 and ICMPv6: full frames pass.
        let ping =
            lab.run(Side::A, "ping", &["-c", "1", "-W", "2", "-M", "do", "-s", "3450", &address]).unwrap();
        assert!(ping.contains("1 received"), "{ping}");
    }
    let link = lab.run(Side::B, "ip", &["-d", "link", "show", INTERFACE]).unwrap();
    assert!(link.contains("mtu 3506") && link.contains("numrxqueues 2"), "{link}");
    drop(lab);
    assert!(names.iter().all(|name| !exists(name)), "a namespace was left behind");
}

#[test]
fn netns_lab_threads_run_in_their_namespace() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let server = lab.address(Side::B, Family::V6);
    let listener = lab.within(Side::B, || TcpListener::bind((server, 7)).unwrap()).unwrap();
    let answer = thread::scope(|scope| {
        let client = lab
            .enter(scope, Side::A, || {
                let mut stream =
                    TcpStream::connect_timeout(&(server, 7).into(), Duration::from_secs(5)).unwrap();
                stream.write_all(b"over the veth").unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
            })
            .unwrap();
        let (mut stream, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), lab.address(Side::A, Family::V6));
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        client.join().unwrap();
        text
    });
    assert_eq!(answer, "over the veth");
}

#[test]
fn netns_lab_is_removed_after_a_panic() {
    let result = thread::spawn(|| {
        let lab = Lab::up(LabOptions::default()).unwrap();
        let name = lab.namespace(Side::A);
        assert!(exists(&name));
        panic!("{name}");
    })
    .join();
    let name = result.unwrap_err().downcast::<String>().unwrap();
    assert!(!exists(&name), "{name} was left behind");
    let scratch = std::env::temp_dir().join(name.trim_end_matches("-a"));
    assert!(scratch.is_dir(), "files of a failed test are kept");
    std::fs::remove_dir_all(scratch).unwrap();
}
