//! Devices of `xwarp-verbs` on a fabric, in processes of their own: what `cargo test` of a program does that uses them.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../../verbs/examples/hello/client.rs"]
mod client;
#[path = "../../verbs/examples/hello/server.rs"]
mod server;

use std::env;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use xwarp_fabric::{Attempt, Options, Place, Server};
use xwarp_leg::LegSizes;
use xwarp_leg::fabric::Fabric;
use xwarp_leg::hosts;
use xwarp_verbs::cm::{ConnectOptions, ListenOptions};
use xwarp_verbs::{AsyncEvent, Device, DeviceOptions};

const LIMIT: Duration = Duration::from_secs(30);
/// What a child process is told: the fabric, its host, and the address of the server, if it is a client.
const FABRIC: &str = "XWARP_TEST_FABRIC";
const HOST: &str = "XWARP_TEST_HOST";
const PEER: &str = "XWARP_TEST_PEER";

/// A fabric that this process serves until it is idle.
struct OfTest(Place);

impl OfTest {
    fn serve(name: &str) -> Self {
        let place = Place::of(Some(&format!("test-{name}-{}", std::process::id()))).unwrap();
        let Attempt::Serving(server) = Server::begin(&place, Options { idle: Some(LIMIT) }).unwrap() else {
            panic!("another process serves {place:?}");
        };
        thread::spawn(move || server.serve(None));
        Self(place)
    }

    fn options(&self) -> DeviceOptions {
        DeviceOptions { fabric: Some(self.0.name().into()), ..DeviceOptions::default() }
    }

    /// Runs the test `process` as a process of its own.
    fn process(&self, host: &str, peer: Option<SocketAddr>) -> Child {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "process", "--ignored", "--nocapture"]);
        command.env(FABRIC, self.0.name()).env(HOST, host).stdout(Stdio::piped());
        if let Some(peer) = peer {
            command.env(PEER, peer.to_string());
        }
        command.spawn().unwrap()
    }
}

impl Drop for OfTest {
    fn drop(&mut self) {
        for file in [self.0.socket(), self.0.lock()] {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// The line of a child's output that begins with `start`, without it.
fn line_of(child: &mut Child, start: &str) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let found =
        lines.map(Result::unwrap).find_map(|line| line.split_once(start).map(|(_, rest)| rest.to_owned()));
    found.unwrap_or_else(|| panic!("no line with {start:?}"))
}

#[test]
#[ignore = "run as a process of its own by another test"]
fn process() {
    let host = env::var(HOST).unwrap();
    let options = DeviceOptions { fabric: env::var(FABRIC).ok(), ..DeviceOptions::default() };
    let device = Device::open_with(&format!("fabric:{host}"), options).unwrap();
    if let Ok(peer) = env::var(PEER) {
        let answer = client::ask(&device, peer.parse().unwrap(), "over shared memory").unwrap();
        println!("answer {answer}");
    } else {
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        println!("text {}", server::serve(&device, any, |at| println!("port {}", at.port())).unwrap());
    }
}

/// A server and a client of the documentation, unchanged, on one host and on two, over IPv4 and IPv6.
#[test]
fn fabric_two_processes_exchange_messages() {
    let fabric = OfTest::serve("processes");
    let numbers = ["", "a", "b"].map(|name| {
        let fabric = Fabric::connect(&fabric.0).unwrap();
        fabric.host(name, true).unwrap().number
    });
    assert_eq!(numbers, [0, 1, 2]);
    for (server, client, family) in [("", "", 0), ("", "", 1), ("a", "b", 0), ("a", "b", 1), ("b", "b", 0)] {
        let mut serving = fabric.process(server, None);
        let port: u16 = line_of(&mut serving, "port ").parse().unwrap();
        let number = ["", "a", "b"].iter().position(|name| *name == server).unwrap();
        let peer = SocketAddr::new(hosts::addresses(number as u16)[family], port);
        let mut asking = fabric.process(client, Some(peer));
        assert_eq!(line_of(&mut asking, "answer "), "OVER SHARED MEMORY", "{server} {client} {peer}");
        assert!(asking.wait().unwrap().success());
        assert_eq!(line_of(&mut serving, "text "), "over shared memory");
        assert!(serving.wait().unwrap().success());
    }
}

/// Two devices of one process, and a device to itself.
#[test]
fn fabric_one_process_reaches_itself() {
    let fabric = OfTest::serve("itself");
    let device = Device::open_with("fabric:", fabric.options()).unwrap();
    let other = Device::open_with("fabric:", fabric.options()).unwrap();
    for client in [&device, &other] {
        thread::scope(|scope| {
            let (ready, listening) = std::sync::mpsc::channel();
            let serving = &device;
            let served = scope.spawn(move || {
                let any = SocketAddr::from(([127, 0, 0, 1], 0));
                server::serve(serving, any, |at| ready.send(at).unwrap()).map_err(|error| error.to_string())
            });
            let address = listening.recv().unwrap();
            assert_eq!(client::ask(client, address, "itself").unwrap(), "ITSELF");
            assert_eq!(served.join().unwrap().unwrap(), "itself");
        });
    }
    // An address of nobody, and one of another host.
    let pd = device.create_pd().unwrap();
    let cq = device.create_cq(4).unwrap();
    let qp = pd.create_qp(&cq, &cq, xwarp_verbs::QueuePairOptions::default()).unwrap();
    for (peer, text) in [("10.0.0.1:1", "no host"), ("127.77.0.1:1", "no host"), ("127.0.0.1:1", "refused")] {
        let refused =
            device.connect(&qp, peer.parse().unwrap(), ConnectOptions::default(), LIMIT).unwrap_err();
        let refused = format!("{refused:?} {refused}").to_lowercase();
        assert!(refused.contains(text), "{peer}: {refused}");
    }
}

/// A process that is killed leaves neither ports nor connections: its peer is told at once, and others have its port.
#[test]
fn fabric_a_killed_process_leaves_nothing() {
    let fabric = OfTest::serve("killed");
    let mut serving = fabric.process("", None);
    let port: u16 = line_of(&mut serving, "port ").parse().unwrap();
    let device = Device::open_with("fabric:", fabric.options()).unwrap();
    let (pd, cq) = (device.create_pd().unwrap(), device.create_cq(4).unwrap());
    let qp = pd.create_qp(&cq, &cq, xwarp_verbs::QueuePairOptions::default()).unwrap();
    let server = SocketAddr::from(([127, 0, 0, 1], port));
    let connection = device.connect(&qp, server, ConnectOptions::default(), LIMIT).unwrap();
    let taken = device.listen(server, ListenOptions::default()).map(drop).unwrap_err();
    assert!(format!("{taken:?}").contains("AddrInUse"), "{taken:?}");
    let begin = Instant::now();
    serving.kill().unwrap();
    serving.wait().unwrap();
    // Without a word of the fabric, a silent peer is noticed by keepalive after many seconds.
    connection.wait_disconnected(LIMIT).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    let end = Instant::now() + LIMIT;
    while let Err(error) = device.listen(server, ListenOptions::default()).map(drop) {
        assert!(Instant::now() < end, "{error:?}");
    }
}

/// When the fabric ends, its devices end with the reason, and a later one starts anew.
#[test]
fn fabric_devices_end_with_it() {
    let place = Place::of(Some(&format!("test-end-{}", std::process::id()))).unwrap();
    let serve = |idle| match Server::begin(&place, Options { idle: Some(idle) }).unwrap() {
        Attempt::Serving(server) => server,
        Attempt::Elsewhere => panic!("another process serves"),
    };
    let server = serve(LIMIT);
    assert!(matches!(Server::begin(&place, Options::default()).unwrap(), Attempt::Elsewhere), "it is served");
    let (stop, stopped) = std::os::unix::net::UnixStream::pair().unwrap();
    let serving = thread::spawn(move || server.serve(Some(std::os::fd::AsFd::as_fd(&stopped))));
    let options = DeviceOptions { fabric: Some(place.name().into()), ..DeviceOptions::default() };
    let device = Device::open_with("fabric:a", options).unwrap();
    let events = device.async_events();
    drop(stop);
    serving.join().unwrap().unwrap();
    let end = Instant::now() + LIMIT;
    while !matches!(events.poll(), Some(AsyncEvent::DeviceFatal)) {
        assert!(Instant::now() < end);
        device.progress();
        thread::sleep(Duration::from_millis(1));
    }
    let refused =
        device.listen(SocketAddr::from(([0, 0, 0, 0], 0)), ListenOptions::default()).map(drop).unwrap_err();
    assert!(format!("{refused:?}").contains("the fabric was stopped"), "{refused:?}");
    assert!(!place.socket().exists(), "a socket is left");
    // It ends at once without a client.
    serve(Duration::ZERO).serve(None).unwrap();
    assert!(!place.socket().exists(), "a socket is left");
    let _ = std::fs::remove_file(place.lock());
}

/// The limits of one client, and requests in the wrong state.
#[test]
fn attack_requests_in_the_wrong_state_are_refused() {
    use xwarp_control::{Choice, Reason, Request, Sizes};

    let fabric = OfTest::serve("requests");
    let connect = || Fabric::connect(&fabric.0).unwrap();
    let without = connect();
    assert_eq!(without.reserve(None, 0).unwrap_err().reason(), Some(Reason::State));
    assert_eq!(without.host("nobody", false).unwrap_err().reason(), Some(Reason::NotServed));
    for name in ["a b", "0123456789abcdef"] {
        assert_eq!(without.host(name, true).unwrap_err().reason(), Some(Reason::NotServed), "{name}");
    }
    for sizes in [(u32::MAX, 1), (1, u32::MAX), (1 << 14, 1 << 14)] {
        let sizes = Sizes { receive_chunks: sizes.0, transmit_chunks: sizes.1, ring: 1 };
        let request = Request::Open { interface: Choice::Name(String::new()), sizes };
        assert_eq!(without.call(request).unwrap_err().reason(), Some(Reason::Limit));
    }
    let client = connect();
    let opened = client.open("a", LegSizes::default()).unwrap();
    assert_eq!(client.open("a", LegSizes::default()).unwrap_err().reason(), Some(Reason::State));
    let [own, _] = hosts::addresses(1);
    assert_eq!(client.reserve(Some(own), 7).unwrap(), 7);
    assert_eq!(client.reserve(None, 7).unwrap_err().reason(), Some(Reason::PortInUse));
    assert_eq!(
        client.reserve(Some([10, 0, 0, 1].into()), 7).unwrap_err().reason(),
        Some(Reason::NotOurAddress)
    );
    assert_eq!(client.resolve([10, 0, 0, 1].into(), None).unwrap_err().reason(), Some(Reason::Route));
    client.release(Some(own), 7);
    assert_eq!(client.reserve(None, 7).unwrap(), 7);
    let mut ports = 1;
    let limit = loop {
        match client.reserve(None, 0) {
            Ok(_) => ports += 1,
            Err(error) => break error.reason(),
        }
    };
    assert_eq!((limit, ports), (Some(Reason::Limit), 8192));
    drop((client, opened));
    // The next one finds them free.
    let client = connect();
    let _opened = client.open("a", LegSizes::default()).unwrap();
    let end = Instant::now() + LIMIT;
    while client.reserve(None, 7).is_err() {
        assert!(Instant::now() < end);
    }
}
