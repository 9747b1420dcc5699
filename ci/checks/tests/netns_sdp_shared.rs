//! Unmodified programs over SDP without privileges, on an interface that `xwarpd` shares.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, LabOptions, Side},
    process::Running,
    recorded::Recorded,
    shared::{NOBODY, SharedInterface},
};
use xwarp_sdp::{
    Sdp, SdpOptions, SdpStream,
    mapper::{Asked, Question},
};
use xwarp_verbs::{Device, DeviceOptions};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const OWNER: &str = env!("CARGO_BIN_EXE_xwarp-sdp-owner");
const PORT: u16 = 4800;
const LIMIT: Duration = Duration::from_secs(20);

/// A lab in which the programs of side A are not root and use a helper, and a program of side B owns the interface.
struct Shared {
    lab: Recorded,
    helper: SharedInterface,
    library: PathBuf,
}

impl Shared {
    fn start() -> Self {
        let lab = Recorded::up(LabOptions::default()).unwrap();
        let helper = SharedInterface::start(&lab, HELPER, &[]).unwrap();
        // The user must be able to read it.
        let library = lab.file("libxwarp-sdp.so");
        let built = env::current_exe().unwrap().with_file_name("libxwarp_sdp_preload.so");
        fs::copy(built, &library).unwrap();
        Self { lab, helper, library }
    }

    /// Starts a shell command over SDP.
    fn shell(&self, side: Side, script: &str) -> Running {
        let id = NOBODY.to_string();
        let mut command = self.lab.command(side, "setpriv");
        if side == Side::A {
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--no-new-privs"]);
            command.args(["--inh-caps=-all", "--bounding-set=-all"]);
            command.env("XWARP_HELPER", self.helper.socket());
        }
        command.args(["sh", "-c", script]).env("LD_PRELOAD", &self.library);
        command.env("XWARP_SDP_STATISTICS", "1").env("XWARP_SDP_CAPTURE", self.lab.captures());
        Running::start(command).unwrap()
    }

    /// Waits until the port mapper of `side` knows the service that `serving` has at `port`.
    fn wait_for_service(&self, side: Side, port: u16, serving: &mut Running) {
        let from = SocketAddr::new(self.lab.address(side.peer(), Family::V4), 1);
        let target = SocketAddr::new(self.lab.address(side, Family::V4), port);
        let question = || Question::new(from, target).ask(1).unwrap();
        let end = Instant::now() + LIMIT;
        while !matches!(self.lab.within(side.peer(), question).unwrap(), Asked::Accepted(..)) {
            let ended = serving.wait(Duration::from_millis(20));
            assert!(ended.is_err() && Instant::now() < end, "{ended:?}\n{}", serving.output());
        }
    }

    /// Sends a line from `side` to the service at `port` of the other side; both bytes of it and of the answer go over SDP.
    fn ask(&self, side: Side, port: u16, line: &str, answer: &str) {
        let address = self.lab.address(side.peer(), Family::V4);
        let output =
            self.shell(side, &format!("echo {line} | nc -N {address} {port}")).finish(LIMIT).unwrap();
        assert!(output.contains(answer), "{output}");
        let counts = format!("sent {} bytes, received {} bytes", line.len() + 1, answer.len() + 1);
        assert!(output.contains(&counts), "{output}");
    }
}

/// A program that is not root, behind xwarpd at A, and one that owns the interface at B, each as the server once.
#[test]
fn netns_sdp_a_program_without_privileges_uses_the_helper() {
    for server in [Side::A, Side::B] {
        let shared = Shared::start();
        let address = shared.lab.address(server, Family::V4);
        let mut serving = shared.shell(server, &format!("echo from the server | nc -N -l {address} {PORT}"));
        shared.wait_for_service(server, PORT, &mut serving);
        shared.ask(server.peer(), PORT, "from the client", "from the server");
        let served = serving.finish(LIMIT).unwrap();
        assert!(served.contains("from the client"), "{served}");
        assert!(served.contains("sent 16 bytes, received 16 bytes"), "{served}");
    }
}

/// Answers each connection with its name and what it has received. With a third argument it forks a child first that outlives it.
const SERVER: &str = r"
import os, socket, sys, time
name, port = sys.argv[1], int(sys.argv[2])
listener = socket.create_server(('', port))
if len(sys.argv) > 3 and os.fork() == 0:
    listener.close()
    os.close(1)
    os.close(2)
    while os.path.exists(sys.argv[0]):
        time.sleep(0.1)
    os._exit(0)
while True:
    connection, _ = listener.accept()
    received = b''
    while data := connection.recv(100):
        received += data
    connection.sendall(name.encode() + b' has ' + received)
    connection.close()
";

/// Three processes without privileges are on one interface at the same time, each with a device of its own: two services, which
/// one port mapper announces, and a client.
#[test]
fn netns_sdp_shared_several_programs_use_one_interface() {
    let shared = Shared::start();
    let program = shared.lab.file("server.py");
    fs::write(&program, SERVER).unwrap();
    let serve = |name: &str, port: u16| {
        let script = format!("exec /usr/bin/python3 {} {name} {port}", program.display());
        let mut serving = shared.shell(Side::A, &script);
        shared.wait_for_service(Side::A, port, &mut serving);
        serving
    };
    let (mut first, mut second) = (serve("first", PORT), serve("second", PORT + 1));
    for _ in 0..2 {
        shared.ask(Side::B, PORT, "a call", "first has a call");
        shared.ask(Side::B, PORT + 1, "a call", "second has a call");
    }
    let address = shared.lab.address(Side::B, Family::V4);
    let mut beyond = shared.shell(Side::B, &format!("echo from beyond | nc -N -l {address} {PORT}"));
    shared.wait_for_service(Side::B, PORT, &mut beyond);
    shared.ask(Side::A, PORT, "a call", "from beyond");
    beyond.finish(LIMIT).unwrap();
    // The first one holds the port mapper of the host.
    first.signal(Signal::KILL).unwrap();
    let _ = first.wait(LIMIT).unwrap();
    shared.wait_for_service(Side::A, PORT + 1, &mut second);
    shared.ask(Side::B, PORT + 1, "a call", "second has a call");
}

/// A child of the process that holds the host's port mapper lives on after its parent was killed.
#[test]
fn netns_sdp_shared_a_forked_child_does_not_keep_the_port_mapper() {
    let shared = Shared::start();
    let program = shared.lab.file("server.py");
    fs::write(&program, SERVER).unwrap();
    let start = |arguments: &str| {
        shared.shell(Side::A, &format!("exec /usr/bin/python3 {} {arguments}", program.display()))
    };
    let mut holder = start(&format!("holder {PORT} fork"));
    shared.wait_for_service(Side::A, PORT, &mut holder);
    let mut registered = start(&format!("registered {}", PORT + 1));
    shared.wait_for_service(Side::A, PORT + 1, &mut registered);
    holder.signal(Signal::KILL).unwrap();
    let _ = holder.wait(LIMIT).unwrap();
    shared.wait_for_service(Side::A, PORT + 1, &mut registered);
    shared.ask(Side::B, PORT + 1, "a call", "registered has a call");
    let mut late = start(&format!("late {}", PORT + 2));
    shared.wait_for_service(Side::A, PORT + 2, &mut late);
    shared.ask(Side::B, PORT + 2, "a call", "late has a call");
}

/// A process gives its connection to another one and ends. The peer does not notice.
#[test]
fn netns_sdp_shared_a_connection_moves_to_another_process() {
    let shared = Shared::start();
    let lab = &shared.lab;
    let address = SocketAddr::new(lab.address(Side::A, Family::V4), PORT);
    // More than the buffers of both ends take.
    let sent: Vec<u8> = (0..1_000_000_usize).map(|i| (i * 31 + (i >> 8)) as u8).collect();
    let start = |role: &str| {
        let mut command: Command = lab.command(Side::A, OWNER);
        command.args([role, INTERFACE, &address.to_string()]).arg(lab.file("socket")).arg(lab.file(role));
        command
            .arg(lab.captures().join(format!("{role}.pcapng")))
            .env("XWARP_HELPER", shared.helper.socket());
        let mut owner = Running::start(command).unwrap();
        owner.wait_for("ready", LIMIT).unwrap();
        owner
    };
    let [second, first] = ["second", "first"].map(start);
    lab.within(Side::B, || {
        let capture = Some(lab.captures().join("peer.pcapng"));
        let options = DeviceOptions { capture, ..DeviceOptions::default() };
        let sdp = Sdp::new(&Device::open_with(INTERFACE, options).unwrap(), SdpOptions::default()).unwrap();
        let stream = SdpStream::connect_timeout(&sdp, address, LIMIT).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        (&stream).write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        (&stream).read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "first, second");
        assert_eq!(stream.peer_addr().unwrap(), address);
    })
    .unwrap();
    first.finish(LIMIT).unwrap();
    let output = second.finish(LIMIT).unwrap();
    assert!(output.contains(&format!("has the connection of {address}")), "{output}");
    let received = ["first", "second"].map(|role| fs::read(lab.file(role)).unwrap());
    assert_eq!(received[0].len(), 100_000);
    assert!(received.concat() == sent, "{} of {} bytes, or others", received.concat().len(), sent.len());
}
