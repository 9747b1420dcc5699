//! Opening and closing: privileges, exclusion, and cleanup when the owner dies.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::frame::Frame;
use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Uid, capabilities, set_capabilities, set_keep_capabilities,
    set_thread_res_uid,
};
use xwarp_driver::netlink::Netlink;
use xwarp_driver::netlink::features::takes_redirected;
use xwarp_driver::{DriverConfig, Interface, Mode, ModePreference, OpenError};
use xwarp_tcp::link::{Link, Steer};
use xwarp_tcp::wire::Flow;

fn error(lab: &Lab, name: &str, config: &DriverConfig) -> OpenError {
    lab.run(Side::A, || Interface::open(name, config).unwrap_err())
}

#[test]
fn netns_errors_say_what_to_do() {
    let lab = Lab::new();
    let config = DriverConfig::default();
    let missing = error(&lab, "nosuch0", &config);
    assert!(
        matches!(&missing, OpenError::NoSuchInterface { present, .. } if present.contains(&DEV.to_owned())),
        "{missing:?}"
    );
    assert_eq!(missing.to_string(), "no interface \"nosuch0\" in this network namespace; there are: lo, xw0");
    assert!(matches!(error(&lab, "lo", &config), OpenError::NotEthernet { .. }));

    let force = |mode| DriverConfig { mode: ModePreference::Force(mode), ..DriverConfig::default() };
    let refused = error(&lab, DEV, &force(Mode::ZeroCopy));
    let OpenError::ModeUnsupported { mode: Mode::ZeroCopy, source, .. } = &refused else {
        panic!("{refused:?}")
    };
    assert_eq!(source.raw_os_error(), Some(libc::EOPNOTSUPP));

    for wrong in [
        DriverConfig { ring_size: 1000, ..DriverConfig::default() },
        DriverConfig { receive_chunks: 0, ..DriverConfig::default() },
        DriverConfig { transmit_chunks: 0, ..DriverConfig::default() },
        DriverConfig { vlan: Some(0), ..DriverConfig::default() },
        DriverConfig { vlan: Some(4095), ..DriverConfig::default() },
    ] {
        assert!(matches!(error(&lab, DEV, &wrong), OpenError::Config(_)), "{wrong:?}");
    }
    // None of the failures left anything behind.
    drop(lab.open(Side::A));
}

/// Runs `f` on a thread that has all capabilities except `without`.
fn deprived<T: Send>(lab: &Lab, without: CapabilitySet, f: impl FnOnce() -> T + Send) -> T {
    lab.run(Side::A, || {
        let all = capabilities(None).unwrap();
        set_capabilities(None, CapabilitySets { effective: all.effective - without, ..all }).unwrap();
        f()
    })
}

#[test]
fn netns_without_rights_the_error_names_them() {
    let lab = Lab::new();
    let open = || Interface::open(DEV, &DriverConfig::default()).unwrap_err();
    let none = deprived(&lab, CapabilitySet::all(), open);
    assert!(matches!(none, OpenError::Permission { .. }), "{none:?}");
    assert!(none.to_string().contains("+net_admin"), "{none}");
    let loads = CapabilitySet::BPF | CapabilitySet::SYS_ADMIN;
    assert!(matches!(deprived(&lab, loads, open), OpenError::Permission { .. }));
    let sockets = deprived(&lab, CapabilitySet::NET_RAW, open);
    assert!(matches!(sockets, OpenError::Permission { .. }), "{sockets:?}");
    drop(lab.open(Side::A));
}

/// The capabilities that the error text names, taken from the text.
fn named_capabilities(lab: &Lab) -> CapabilitySet {
    let open = || Interface::open(DEV, &DriverConfig::default()).unwrap_err();
    let text = deprived(lab, CapabilitySet::all(), open).to_string().to_uppercase();
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter_map(|word| CapabilitySet::from_name(word.strip_prefix("CAP_").unwrap_or(word))).collect()
}

/// Opens the interface and exchanges a frame on a thread of user 65534 (nobody) that has `rights` alone.
fn open_as_nobody(lab: &Lab, rights: CapabilitySet) -> Result<(), OpenError> {
    let mut peer = lab.open(Side::B);
    lab.run(Side::A, || {
        set_keep_capabilities(true).unwrap();
        let nobody = Uid::from_raw(65534);
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let only =
            CapabilitySets { effective: rights, permitted: rights, inheritable: CapabilitySet::empty() };
        set_capabilities(None, only).unwrap();
        let mut link = Interface::open(DEV, &DriverConfig::default())?;
        let (local, remote) = (at(A4, 1), at(B4, 2));
        link.steer(Steer::Flow(Flow { local, remote })).unwrap();
        let bytes = Frame::tcp(peer.attributes().mac, link.attributes().mac, remote, local).build();
        send_bytes(&mut peer, 0, &bytes);
        assert_eq!(receive_bytes(&mut link), bytes);
        Ok(())
    })
}

#[test]
fn netns_the_named_capabilities_are_enough_and_none_is_superfluous() {
    let lab = Lab::new();
    let rights = named_capabilities(&lab);
    assert_eq!(rights.iter().count(), xwarp_driver::CAPABILITIES.len());
    open_as_nobody(&lab, rights).unwrap();
    for one in rights.iter().filter(|one| *one != CapabilitySet::IPC_LOCK) {
        let refused = open_as_nobody(&lab, rights - one).unwrap_err();
        assert!(matches!(refused, OpenError::Permission { .. }), "without {one:?}: {refused:?}");
    }
}

#[test]
fn netns_too_little_lockable_memory_is_named_and_enough_is_used() {
    let lab = Lab::new();
    // The limit is the process's, but the other tests' threads may exceed it (CAP_IPC_LOCK).
    let before = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..before }).unwrap();
    let config = DriverConfig::default();
    let wanted = u64::from(config.receive_chunks + config.transmit_chunks) * 4096;
    let limited = deprived(&lab, CapabilitySet::IPC_LOCK, || Interface::open(DEV, &config).unwrap_err());
    // Room for one attempt to open the interface, of several.
    setrlimit(Resource::Memlock, Rlimit { current: Some(wanted), ..before }).unwrap();
    let open = deprived(&lab, CapabilitySet::IPC_LOCK, || Interface::open(DEV, &config).map(drop));
    setrlimit(Resource::Memlock, before).unwrap();
    assert!(open.is_ok(), "{open:?}");
    assert!(matches!(limited, OpenError::LockedMemory { bytes } if bytes == wanted), "{limited:?}");
}

#[test]
fn netns_a_second_owner_is_refused_and_the_first_one_named() {
    let lab = Lab::new();
    let first = lab.open(Side::A);
    let refused = lab.open_with(Side::A, &DriverConfig::default()).unwrap_err();
    let OpenError::InUse { holder: Some(holder), .. } = &refused else { panic!("{refused:?}") };
    assert_eq!(holder.pid, std::process::id());
    assert!(refused.to_string().contains("open in this process already"), "{refused}");

    // Replacing the program does not free the queue, which its owner still holds.
    let config = DriverConfig {
        replace_program: true,
        busy_retry: Duration::from_millis(20),
        ..DriverConfig::default()
    };
    let busy = lab.open_with(Side::A, &config).unwrap_err();
    let OpenError::QueueInUse { queue: 0, users, .. } = &busy else { panic!("{busy:?}") };
    assert!(users.iter().any(|user| user.pid == std::process::id()), "{users:?}");
    assert!(busy.to_string().contains("this process"), "{busy}");
    drop(first);
    drop(lab.open(Side::A));
}

/// A queue stays busy for some milliseconds after its socket closed: opening waits for it.
#[test]
fn netns_an_interface_opens_again_at_once() {
    let lab = Lab::with(1500, 2);
    for _ in 0..5 {
        let link = lab.open(Side::A);
        assert_eq!(link.attributes().queues, 2);
    }
}

/// Not a test of its own: the process that `netns_a_crash_leaves_nothing_behind` kills.
#[test]
#[ignore = "run as a process of its own by another test"]
fn child_opens_and_waits() {
    let _link = Interface::open(DEV, &DriverConfig::default()).unwrap();
    println!("opened");
    std::thread::sleep(Duration::from_mins(1));
}

#[test]
fn netns_a_crash_leaves_nothing_behind() {
    let lab = Lab::new();
    let program = std::env::current_exe().unwrap();
    let mut child = Command::new("ip")
        .args(["netns", "exec", lab.name(Side::A)])
        .arg(program)
        .args(["--exact", "child_opens_and_waits", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().contains("opened")), "the child says that it is ready");
    let shows_xdp = || lab.sh(Side::A, &format!("ip link show dev {DEV}")).contains("prog/xdp");
    assert!(shows_xdp());
    let refused = lab.open_with(Side::A, &DriverConfig::default()).unwrap_err();
    let OpenError::InUse { holder: Some(holder), .. } = &refused else { panic!("{refused:?}") };
    assert_eq!(holder.pid, child.id());
    // SIGKILL: nothing of the child's runs any more.
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the program is gone", || !shows_xdp());

    let (mut a, mut b) = (lab.open(Side::A), lab.open(Side::B));
    let (local, remote) = (at(A4, 1), at(B4, 2));
    b.steer(Steer::Flow(Flow { local: remote, remote: local })).unwrap();
    let bytes = Frame::tcp(a.attributes().mac, b.attributes().mac, local, remote).build();
    send_bytes(&mut a, 0, &bytes);
    assert_eq!(receive_bytes(&mut b), bytes);
}

/// Dropped with frames everywhere, an interface takes its program along.
#[test]
fn netns_closing_detaches() {
    let lab = Lab::new();
    let link = lab.open(Side::A);
    let shows_xdp = || lab.sh(Side::A, &format!("ip link show dev {DEV}")).contains("prog/xdp");
    assert!(shows_xdp());
    drop(link);
    assert!(!shows_xdp());
}

/// The interface disappears under us: nothing hangs, kicks are counted, frames can be given back.
#[test]
fn netns_a_removed_interface_is_no_disaster() {
    let lab = Lab::new();
    let mut a = lab.open(Side::A);
    let bytes = Frame::tcp(a.attributes().mac, a.attributes().mac, at(A4, 1), at(B4, 2)).build();
    sh(&format!("ip -n {} link del {DEV}", lab.name(Side::A)));
    send_bytes(&mut a, 0, &bytes);
    a.flush();
    assert!(a.counters().kick_down + a.counters().kick_failed > 0, "{:?}", a.counters());
    let mut events = Vec::new();
    a.events(|event| events.push(event)).unwrap();
    assert!(events.contains(&xwarp_driver::Event::LinkRemoved), "{events:?}");
    let census = a.frame_census();
    assert!(census.nothing_out(), "{census:?}");
}

#[test]
fn netns_an_interface_is_opened_by_its_address() {
    let lab = Lab::new();
    lab.run(Side::A, || {
        for address in [A4, A6] {
            let interface = Interface::open(address, &DriverConfig::default()).unwrap();
            assert_eq!(interface.attributes().name, DEV);
            assert!(interface.addresses().contains(&address.parse().unwrap()));
        }
    });
    let elsewhere = error(&lab, "192.0.2.77", &DriverConfig::default());
    assert!(matches!(elsewhere, OpenError::NoSuchInterface { .. }), "{elsewhere:?}");
}

/// The query of `xwarpd` before it redirects frames natively: a veth sends them only while its other end has GRO or an
/// XDP program.
#[test]
fn netns_a_driver_says_whether_it_takes_redirected_frames() {
    let lab = Lab::new();
    let takes = |chains| {
        lab.run(Side::A, || {
            takes_redirected(Netlink::open().unwrap().index_of(DEV).unwrap(), chains).unwrap()
        })
    };
    assert!(!takes(false) && !takes(true));
    lab.sh(Side::B, &format!("ethtool -K {DEV} gro on"));
    assert!(takes(false) && takes(true));
    lab.sh(Side::B, &format!("ethtool -K {DEV} gro off"));
    assert!(!takes(false));
}
