//! The drop-in libraries' devices beside the kernel's sockets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use rustix::process::Signal;
use xwarp_checks::{
    foreign,
    lab::{Family, HOP_INTERFACES, INTERFACE, Lab, LabOptions, Side},
    shared::SharedInterface,
    unmodified::{LIMIT, compiled, connect_by, run, start, start_replacing, start_shared},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const PORT: u16 = 7777;

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// A connection of the kernels' TCP to `server`, an address of side B, which closes it first and keeps it in TIME-WAIT.
fn connect_once(lab: &Lab, server: SocketAddr) {
    let listener = lab.within(Side::B, || TcpListener::bind(server)).unwrap().unwrap();
    let client = lab.within(Side::A, || TcpStream::connect_timeout(&server, LIMIT)).unwrap().unwrap();
    drop(listener.accept().unwrap());
    drop(listener);
    // The server's end has closed when its FIN is here.
    client.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(std::io::Read::read(&mut &client, &mut [0]).unwrap(), 0);
}

/// What a program that uses a port over TCP first and over RDMA then needs, as perftest and Ceph do.
#[test]
fn netns_compat_a_port_in_time_wait_can_be_bound() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    for (family, any) in [(Family::V4, "0.0.0.0"), (Family::V6, "::")] {
        let address = lab.address(Side::B, family);
        for host in [address.to_string(), any.to_owned()] {
            connect_once(&lab, (address, PORT).into());
            let said = run(&lab, Side::B, &format!("{life} bind {host} {PORT}")).unwrap();
            assert!(said.contains(&format!("listens at {host} {PORT}")), "{said}");
        }
    }
}

/// iWARP uses TCP ports, so a listener of the kernel's TCP excludes one of RDMA: the program learns who has the port.
#[test]
fn netns_compat_a_listener_of_the_kernel_keeps_its_port_and_is_named() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let listener = lab.within(Side::B, || TcpListener::bind((address, PORT))).unwrap().unwrap();
    let mut program = start(&lab, Side::B, &format!("{life} bind {address} {PORT}")).unwrap();
    assert_eq!(program.wait(LIMIT).unwrap().code(), Some(1));
    let said = program.output();
    assert!(said.contains("rdma_bind_addr: Address already in use"), "{said}");
    let holder = format!("{address}:{PORT} is in use by process {} (", std::process::id());
    assert!(said.contains(&holder) && said.contains("choose another port"), "{said}");
    // The kernel's connections are untouched by the attempt.
    lab.within(Side::A, || TcpStream::connect_timeout(&(address, PORT).into(), Duration::from_secs(10)))
        .unwrap()
        .unwrap();
    drop(listener);
}

/// A closed device leaves nothing behind, also after connections by queue pair number, which have a listener and a thread.
#[test]
fn netns_compat_a_device_is_opened_and_closed_again_and_again() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let said = run(&lab, Side::B, &format!("{life} reopen 20")).unwrap();
    assert!(said.contains("20 rounds") && !said.contains("xwarp:"), "{said}");
    // Behind the helper, a device that stays counts towards the user's limit.
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let said = start_shared(&lab, &shared, &format!("{life} reopen 20")).unwrap().finish(LIMIT).unwrap();
    assert!(said.contains("20 rounds") && !said.contains("xwarp:"), "{said}");
}

/// A child opens the interface that its parent has left, and learns what became of its parent's listener.
#[test]
fn netns_compat_a_daemon_opens_the_device_of_its_parent_anew() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    let listens = format!("listens at {address} {PORT}");
    for case in ["daemon", "inherit"] {
        let mut program = start(&lab, Side::B, &format!("{life} {case} {address} {PORT}")).unwrap();
        program.wait_for(&listens, LIMIT).unwrap();
        let said = program.output();
        assert!(!said.contains("another xwarp process"), "{said}");
        if case == "inherit" {
            assert!(said.contains("rdma_get_cm_event: No such device"), "{said}");
            assert!(said.contains("a parent of this process opened it (fork)"), "{said}");
        }
        // The interface is free when the daemon has ended.
        run(&lab, Side::B, &format!("{life} bind {address} {PORT}")).unwrap();
    }
}

/// The owner's death is awaited: its memory is freed, and its descriptors are closed, some time after the signal.
#[test]
fn netns_compat_the_device_of_a_killed_process_can_be_opened() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let address = lab.address(Side::B, Family::V4);
    for _ in 0..5 {
        let mut owner = start(&lab, Side::B, &format!("rping -s -a {address}")).unwrap();
        // It listens once it has the interface.
        let listens = || {
            lab.within(Side::A, || TcpStream::connect_timeout(&(address, 7174).into(), LIMIT).is_ok())
                .unwrap()
        };
        while !listens() {
            std::thread::sleep(Duration::from_millis(20));
        }
        owner.signal(Signal::KILL).unwrap();
        let said = run(&lab, Side::B, &format!("{life} bind {address} {PORT}")).unwrap();
        assert!(said.contains("listens at"), "{said}");
        owner.wait(LIMIT).unwrap();
    }
}

/// `localhost` stands for the first device, for both ends of a connection and for a server that others connect to.
#[test]
fn netns_compat_localhost_is_the_first_device() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    for (loopback, family) in [("127.0.0.1", Family::V4), ("::1", Family::V6)] {
        let address = lab.address(Side::B, family);
        let said = run(&lab, Side::B, &format!("{life} bind {loopback} {PORT}")).unwrap();
        assert!(said.contains(&format!("listens at {address} {PORT}")), "{said}");
    }
    let address = lab.address(Side::B, Family::V4);
    let line = |role: &str, host: &str| format!("rping {role} -a {host} -C 5 -S 64 -V");
    xwarp_checks::unmodified::pair(&lab, &line("-s", "127.0.0.1"), &line("-c", &address.to_string()))
        .unwrap();
}

/// Two queue pairs of a process name each other by the address of their own host: on an interface of its own the card has a loop,
/// behind the helper the switch returns the frames.
#[test]
fn netns_compat_queue_pairs_of_one_host_connect_by_number() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let check = |said: &str| {
        assert!(said.contains("both directions"), "{said}");
        assert!(said.contains("with itself"), "{said}");
    };
    check(&run(&lab, Side::A, &format!("{life} own")).unwrap());
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    check(&start_shared(&lab, &shared, &format!("{life} own")).unwrap().finish(LIMIT).unwrap());
    // Two processes with the same address, each of which must accept.
    let line = "ibv_rc_pingpong -g 0 -n 100";
    let address = lab.address(Side::A, Family::V4);
    lab.run(Side::A, "ip", &["link", "set", "dev", "lo", "up"]).unwrap();
    let mut server = start_shared(&lab, &shared, line).unwrap();
    let client = format!("{line} {address}");
    let said = connect_by(&mut server, &client, || start_shared(&lab, &shared, &client)).unwrap();
    assert!(said.contains("100 iters"), "{said}");
    server.finish(LIMIT).unwrap();
}

/// Output of a program that has no device, and fails.
fn refusal(lab: &Lab, line: &str) -> String {
    let mut program = start(lab, Side::A, line).unwrap();
    assert!(!program.wait(LIMIT).unwrap().success(), "{}", program.output());
    program.output()
}

/// What the refusal of an interface with another owner's XDP program advises works when it is done, however the program is attached.
#[test]
fn netns_compat_advice_on_a_foreign_program_works_in_its_mode() {
    let lab = lab();
    let life = compiled(&lab, "life", &["-lrdmacm", "-libverbs"]).unwrap();
    let bind = format!("{life} bind {} {PORT}", lab.address(Side::A, Family::V4));
    for way in ["xdpdrv", "xdpgeneric", "link"] {
        // Of each attachment, one piece of advice is taken.
        let attach = || {
            let holder = (way == "link").then(|| foreign::attach_by_link(&lab).unwrap());
            holder.is_none().then(|| foreign::attach(&lab, way).unwrap());
            let said = refusal(&lab, &bind);
            assert!(said.contains("xw0 already runs XDP program"), "{way}: {said}");
            (holder, said)
        };
        let (holder, said) = attach();
        if let Some(holder) = &holder {
            assert!(said.contains(&format!("held by process {} (", holder.id())), "{said}");
        }
        let command = said.split_once("detach it (").unwrap().1.split_once(')').unwrap().0;
        lab.run(Side::A, "sh", &["-c", command]).unwrap_or_else(|error| panic!("{way}: {error:#}"));
        assert_eq!(foreign::attached(&lab).unwrap(), None, "{way}: {command} detaches nothing");
        assert!(run(&lab, Side::A, &bind).unwrap().contains("listens at"), "{way}");
        drop(holder);

        let (holder, said) = attach();
        assert!(said.contains("--replace-program of xwarp run"), "{said}");
        let said = start_replacing(&lab, Side::A, &bind).unwrap().finish(LIMIT).unwrap();
        assert!(said.contains("listens at"), "{way}: {said}");
        assert_eq!(foreign::attached(&lab).unwrap(), None, "{way}");
        drop(holder);
    }
}

/// The switch between the ends forgets the server's former Ethernet address, as when a virtual machine gets another one, and nothing
/// announces the new one: frames are lost until the client's kernel asks for it.
#[test]
fn netns_compat_a_peer_with_a_new_ethernet_address_keeps_its_connection() {
    let lab = Lab::up(LabOptions { hop: true, ..LabOptions::default() }).unwrap();
    let between = |program: &str, line: &str| {
        let output = lab.hop_command(program).args(line.split_whitespace()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {line}: {said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    between("ip", "link add switch type bridge mcast_snooping 0");
    for port in HOP_INTERFACES {
        between("ip", &format!("link set {port} master switch"));
        between("bridge", &format!("link set dev {port} flood off"));
    }
    between("ip", "link set switch up");

    let program = compiled(&lab, "neighbour", &["-lrdmacm", "-libverbs"]).unwrap();
    let mut server = start(&lab, Side::B, &program).unwrap();
    server.wait_for("listening", LIMIT).unwrap();
    let mut client =
        start(&lab, Side::A, &format!("{program} {}", lab.address(Side::B, Family::V4))).unwrap();
    client.wait_for("first", LIMIT).unwrap();
    lab.run(Side::B, "ip", &["link", "set", INTERFACE, "address", "02:00:00:00:77:02"]).unwrap();
    let [_, to_server] = HOP_INTERFACES;
    between("ip", &format!("link set {to_server} type bridge_slave fdb_flush"));
    client.signal(Signal::USR1).unwrap();
    for end in [client, server] {
        assert!(end.finish(LIMIT).unwrap().contains("done"));
    }
    let neighbours = lab.run(Side::A, "ip", &["neigh", "show", "dev", INTERFACE]).unwrap();
    assert!(neighbours.contains("02:00:00:00:77:02"), "{neighbours}");
}
