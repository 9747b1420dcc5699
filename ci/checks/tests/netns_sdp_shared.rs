//! Unmodified programs over SDP without privileges, on an interface that `xwarpd` shares.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::libc;
use rustix::process::Signal;
use xwarp_checks::{
    lab::{Family, INTERFACE, LabOptions, Side},
    process::Running,
    recorded::Recorded,
    shared::{NOBODY, SharedInterface},
};
use xwarp_sdp::{
    Sdp, SdpListener, SdpOptions, SdpStream,
    mapper::{Asked, Question},
};
use xwarp_verbs::{Device, DeviceOptions};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const OWNER: &str = env!("CARGO_BIN_EXE_xwarp-sdp-owner");
const PORT: u16 = 4800;
const LIMIT: Duration = Duration::from_secs(20);
/// Time limit for a program to notice that its device is gone.
const NOTICED: Duration = Duration::from_secs(5);

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

    /// Waits until the port mapper of `side` knows the service that `serving` has at `port`; returns its address over SDP.
    fn wait_for_service(&self, side: Side, port: u16, serving: &mut Running) -> SocketAddr {
        let from = SocketAddr::new(self.lab.address(side.peer(), Family::V4), 1);
        let target = SocketAddr::new(self.lab.address(side, Family::V4), port);
        let question = || Question::new(from, target).ask(1).unwrap();
        let end = Instant::now() + LIMIT;
        loop {
            if let Asked::Accepted(address, _) = self.lab.within(side.peer(), question).unwrap() {
                return address;
            }
            let ended = serving.wait(Duration::from_millis(20));
            assert!(ended.is_err() && Instant::now() < end, "{ended:?}\n{}", serving.output());
        }
    }

    /// SDP of this process at `side`, on an interface of its own or behind a helper.
    fn open(&self, side: Side, helper: Option<&SharedInterface>) -> Sdp {
        static OPENED: AtomicU32 = AtomicU32::new(0);
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let capture = Some(self.lab.captures().join(format!("{side:?}-{number}.pcapng")));
        let mut options = DeviceOptions { capture, ..DeviceOptions::default() };
        options.driver.helper = helper.map(|helper| helper.socket().to_owned());
        let open =
            || Sdp::new(&Device::open_with(INTERFACE, options).unwrap(), SdpOptions::default()).unwrap();
        self.lab.within(side, open).unwrap()
    }

    /// Connects this process from `side` to a service.
    fn connect(&self, side: Side, sdp: &Sdp, service: SocketAddr) -> SdpStream {
        self.lab.within(side, || SdpStream::connect_timeout(sdp, service, LIMIT).unwrap()).unwrap()
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
const SERVER: &str = include_str!("python/named_server.py");

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

/// The place of the peer whose connection moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// It owns the other interface.
    Owner,
    /// Behind a helper of the other interface.
    OtherHelper,
    /// Behind the same helper as the processes between which the connection moves.
    SameHelper,
}

const PEERS: [Peer; 3] = [Peer::Owner, Peer::OtherHelper, Peer::SameHelper];

/// A process at A gives its connection with this one to another process and ends. This one does not notice. `first`: whether the first
/// process listens for this one or connects to it.
fn moves(first: &str, peer: Peer) {
    let shared = Shared::start();
    let lab = &shared.lab;
    let beyond = (peer == Peer::OtherHelper).then(|| SharedInterface::start_beyond(lab, HELPER).unwrap());
    let side = if peer == Peer::SameHelper { Side::A } else { Side::B };
    let helper = if side == Side::A { Some(&shared.helper) } else { beyond.as_ref() };
    let sdp = shared.open(side, helper);
    // More than the buffers of both ends take.
    let sent: Vec<u8> = (0..1_000_000_usize).map(|i| (i * 31 + (i >> 8)) as u8).collect();
    let start = |role: &str, address: SocketAddr| {
        let mut command: Command = lab.command(Side::A, OWNER);
        command.args([role, INTERFACE, &address.to_string()]).arg(lab.file("socket")).arg(lab.file(role));
        command
            .arg(lab.captures().join(format!("{role}.pcapng")))
            .env("XWARP_HELPER", shared.helper.socket());
        let mut owner = Running::start(command).unwrap();
        owner.wait_for("ready", LIMIT).unwrap();
        owner
    };
    let [owners, ours] = [Side::A, side].map(|side| lab.address(side, Family::V4));
    let second = start("second", SocketAddr::new(owners, 0));
    let (first_process, stream) = if first == "listens" {
        let address = SocketAddr::new(owners, PORT);
        let process = start(first, address);
        (process, shared.connect(side, &sdp, address))
    } else {
        let address = SocketAddr::new(ours, PORT);
        // The connection keeps its port when the listener is closed.
        let listener = lab.within(side, || SdpListener::bind(&sdp, address).unwrap()).unwrap();
        let process = start(first, address);
        (process, listener.accept().unwrap().0)
    };
    let addresses = || (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let before = addresses();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    (&stream).write_all(&sent).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    (&stream).read_to_string(&mut answer).unwrap();
    assert_eq!((answer.as_str(), addresses()), ("first, second", before), "{peer:?}");
    first_process.finish(LIMIT).unwrap();
    let output = second.finish(LIMIT).unwrap();
    assert!(output.contains(&format!("has the connection of {}", before.1)), "{peer:?}: {output}");
    let received = [first, "second"].map(|role| fs::read(lab.file(role)).unwrap());
    assert_eq!(received[0].len(), 100_000);
    assert!(received.concat() == sent, "{} of {} bytes, or others", received.concat().len(), sent.len());
}

#[test]
fn netns_sdp_shared_a_connection_moves_to_another_process() {
    for peer in PEERS {
        moves("listens", peer);
    }
}

/// The peer has accepted the connection, and connects again from the port of its listener.
#[test]
fn netns_sdp_shared_a_connection_that_was_accepted_moves_to_another_process() {
    for peer in PEERS {
        moves("connects", peer);
    }
}

/// Both ends are processes behind one helper; one moves the connection to another service of its device.
#[test]
fn netns_sdp_shared_a_stream_is_handed_over_between_two_processes_of_a_helper() {
    let shared = Shared::start();
    let [theirs, ours] = [(); 2].map(|()| shared.open(Side::A, Some(&shared.helper)));
    let address = SocketAddr::new(shared.lab.address(Side::A, Family::V4), PORT);
    let listener = shared.lab.within(Side::A, || SdpListener::bind(&theirs, address).unwrap()).unwrap();
    let stream = shared.connect(Side::A, &ours, address);
    let (peer, _) = listener.accept().unwrap();
    for stream in [&stream, &peer] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
    }
    (&stream).write_all(b"before").unwrap();
    (&peer).write_all(b"unread").unwrap();
    stream.wait_readable().unwrap();
    let moved = shared.lab.within(Side::A, || {
        let other = Sdp::new(ours.device(), SdpOptions::default()).unwrap();
        stream.hand_over(&other).unwrap()
    });
    let mut moved = moved.unwrap();
    moved.set_read_timeout(Some(LIMIT)).unwrap();
    moved.write_all(b", after").unwrap();
    moved.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    (&peer).read_to_string(&mut text).unwrap();
    assert_eq!(text, "before, after");
    peer.shutdown(Shutdown::Write).unwrap();
    text.clear();
    moved.read_to_string(&mut text).unwrap();
    assert_eq!(text, "unread");
    assert_eq!(stream.peer_addr().unwrap(), moved.peer_addr().unwrap());
    moved.wait_closed().unwrap();
    peer.wait_closed().unwrap();
}

/// Prints what each read of its connection has returned, until the end of the stream or an error. The message `limit` sets a time limit
/// for further reads, and `endless` removes it.
const READER: &str = r"
import errno, socket, struct, sys, time
listener = socket.create_server(('', int(sys.argv[1])))
connection, _ = listener.accept()

def set_limit(ms):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('@ll', 0, ms * 1000))

limits, data = 0, b'x'
while data:
    begun = time.monotonic()
    try:
        data = connection.recv(100)
        print(data.decode() or 'the end', flush=True)
        if data == b'limit':
            set_limit(200)
        elif data == b'endless':
            set_limit(0)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            print(errno.errorcode[error.errno], flush=True)
            break
        limits += 1
        assert 0.199 < time.monotonic() - begun < 10, time.monotonic() - begun
        print('limit', limits, 'has passed', flush=True)
";

/// A process that runs [`READER`], whose peer is this test.
struct Reader {
    program: Running,
    peer: SdpStream,
    messages: u32,
}

impl Shared {
    /// Starts the reader at `side`, and connects to it from the other side.
    fn read(&self, side: Side, sdp: &Sdp) -> Reader {
        let path = self.lab.file("reader.py");
        fs::write(&path, READER).unwrap();
        let mut program = self.shell(side, &format!("exec /usr/bin/python3 {} {PORT}", path.display()));
        let service = self.wait_for_service(side, PORT, &mut program);
        let peer = self.connect(side.peer(), sdp, service);
        let mut reader = Reader { program, peer, messages: 0 };
        reader.exchange();
        reader
    }
}

impl Reader {
    /// Sends a message and waits until the program has read it.
    fn send(&mut self, message: &str) {
        (&self.peer).write_all(message.as_bytes()).unwrap();
        self.program.wait_for(message, LIMIT).unwrap();
    }

    fn exchange(&mut self) {
        self.messages += 1;
        self.send(&format!("message {}.", self.messages));
    }

    /// Waits until the program's read sleeps for frames of its device. If another thread has prevented that, the read sleeps in the
    /// kernel's call, and a message ends it.
    fn fall_asleep(&mut self) {
        let end = Instant::now() + LIMIT;
        loop {
            match self.call() {
                Some(libc::SYS_epoll_wait | libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2) => return,
                Some(libc::SYS_recvfrom) => self.exchange(),
                _ => thread::sleep(Duration::from_millis(1)),
            }
            assert!(Instant::now() < end, "{:?}: {}", self.call(), self.program.output());
        }
    }

    /// The system call in which the program's main thread is.
    fn call(&self) -> Option<i64> {
        let call = fs::read_to_string(format!("/proc/{}/syscall", self.program.id())).unwrap();
        call.split(' ').next()?.parse().ok()
    }

    /// Waits for the end of the read that sleeps, and of the program.
    fn ends_by(mut self, what: &str) -> String {
        let begin = Instant::now();
        self.program.wait_for(what, LIMIT).unwrap();
        assert!(begin.elapsed() < NOTICED, "after {:?}", begin.elapsed());
        // Nobody answers the end of the stream.
        self.peer.abort();
        self.program.finish(LIMIT).unwrap()
    }
}

/// Data, a time limit, the end of the stream and a reset, each while a read sleeps.
#[test]
fn netns_sdp_shared_a_sleeping_read_ends_as_on_an_own_interface() {
    const ROUNDS: u32 = 50;
    for side in [Side::A, Side::B] {
        let shared = Shared::start();
        let sdp = shared.open(side.peer(), (side == Side::B).then_some(&shared.helper));
        let mut reader = shared.read(side, &sdp);
        for _ in 0..ROUNDS {
            reader.fall_asleep();
            reader.exchange();
        }
        reader.send("limit");
        reader.program.wait_for("limit 1 has passed", LIMIT).unwrap();
        reader.fall_asleep();
        reader.program.wait_for("limit 3 has passed", LIMIT).unwrap();
        reader.send("endless");
        reader.fall_asleep();
        reader.peer.shutdown(Shutdown::Write).unwrap();
        let messages = reader.messages;
        let output = reader.ends_by("the end");
        let direct = output
            .lines()
            .find_map(|line| line.split_once("; ")?.1.strip_suffix(" bytes passed the loopback by"));
        let direct: u32 = direct.unwrap().parse().unwrap();
        // Another thread may be faster than a read, but not always.
        assert!(direct > 11 * ROUNDS / 2, "{direct} bytes of {messages} messages: {output}");
        let mut reader = shared.read(side, &sdp);
        reader.fall_asleep();
        reader.peer.abort();
        reader.ends_by("ECONNRESET");
    }
}

#[test]
fn netns_sdp_shared_a_sleeping_read_ends_with_the_helper() {
    let mut shared = Shared::start();
    let sdp = shared.open(Side::B, None);
    for signal in [Signal::TERM, Signal::KILL] {
        let mut reader = shared.read(Side::A, &sdp);
        reader.fall_asleep();
        shared.helper.helper.signal(signal).unwrap();
        reader.ends_by("ECONNRESET");
        shared.helper.helper.wait(LIMIT).unwrap();
        shared.helper = SharedInterface::start(&shared.lab, HELPER, &[]).unwrap();
    }
}

/// Behind the helper, and in the process that owns the interface.
#[test]
fn netns_sdp_shared_a_sleeping_read_ends_with_the_interface() {
    for side in [Side::A, Side::B] {
        let shared = Shared::start();
        let sdp = shared.open(side.peer(), (side == Side::B).then_some(&shared.helper));
        let mut reader = shared.read(side, &sdp);
        reader.fall_asleep();
        shared.lab.run(side, "ip", &["link", "delete", INTERFACE]).unwrap();
        reader.ends_by("ECONNRESET");
    }
}
