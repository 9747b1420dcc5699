//! [`Observer`]: answers queries of a device by other processes (see [`crate::observe`]), on a thread of its own, so
//! that neither the application nor the progress thread waits for a client.

use std::{
    fmt::Write as _,
    fs::{self, DirBuilder, Permissions},
    io::{self, BufRead as _, BufReader, Read as _, Write},
    net::Shutdown,
    os::{
        fd::AsFd as _,
        unix::{
            fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread::JoinHandle,
    time::Duration,
};

use rustix::{net::sockopt::socket_peercred, process::geteuid};
use xwarp_rnic::rnic::{QpId, QpInfo};

use super::{counters::Counters, engines::attributes, shared::SharedEngine};
use crate::{
    observe::{VERSION, directory, remove_abandoned},
    system::{self, Doorbell, wait_readable},
    tap::Recording,
};

/// Longest time that a client may take to write its line, or to read a part of the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Longest line of a client.
const MAX_LINE_BYTES: u64 = 64;
/// Queue pairs that are read under one hold of the engine's lock.
const QPS_PER_LOCK: usize = 64;
/// Pieces of a capture that wait for its client, each at most the tap's buffer: 16 MiB.
const MAX_PIECES: usize = 64;
/// Longest time that a recorded frame waits for the next one before it is sent to the client.
const FLUSH_EVERY: Duration = Duration::from_millis(100);

/// Number of devices of this process so far, for names.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A listening socket and its thread, until it is dropped.
pub(super) struct Observer {
    path: PathBuf,
    shared: Arc<Stop>,
    recording: Arc<Recording>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread ends.
    ended: Receiver<()>,
}

struct Stop {
    stopping: AtomicBool,
    bell: Doorbell,
    clients: Mutex<Clients>,
}

/// The clients whose requests are being answered.
#[derive(Default)]
struct Clients {
    asking: Option<UnixStream>,
    capturing: Option<UnixStream>,
    hung_up: bool,
}

impl Stop {
    /// Changes the clients; closes the sockets of those to disconnect.
    fn clients(&self, change: impl FnOnce(&mut Clients)) {
        // Each value is replaced as a whole.
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut clients);
        if clients.hung_up {
            for client in [&clients.asking, &clients.capturing].into_iter().flatten() {
                let _ = client.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Observer {
    /// Starts to answer.
    pub(super) fn start(
        engines: Vec<Arc<SharedEngine>>,
        recording: Arc<Recording>,
        interface: &str,
    ) -> io::Result<Self> {
        let directory = directory()
            .ok_or_else(|| io::Error::other("no directory for its socket: set XDG_RUNTIME_DIR"))?;
        make_private(&directory)?;
        remove_abandoned(&directory);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("{}-{interface}-{number}", std::process::id()));
        // A dead process of this id may have left its file.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let stop =
            Stop { stopping: AtomicBool::new(false), bell: Doorbell::new()?, clients: Mutex::default() };
        let stop = Arc::new(stop);
        let service =
            Service { engines, recording: Arc::clone(&recording), stop: Arc::clone(&stop), capture: None };
        let (alive, ended) = mpsc::channel();
        let serve = move || {
            let _alive: mpsc::Sender<()> = alive;
            service.serve(&listener);
        };
        let thread = Some(system::spawn(format!("xwarp-see-{interface}"), serve)?);
        Ok(Self { path, shared: stop, recording, thread, ended })
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.bell.ring();
        self.recording.stop_live();
        // A capture is sent to its end, but the application does not wait for a client that reads or writes slowly.
        if self.ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            self.shared.clients(|clients| clients.hung_up = true);
        }
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported.
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.path);
    }
}

/// Makes a directory that only this user can enter, or checks that it is one.
fn make_private(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(directory)?;
    let private = found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o777 == 0o700;
    if private {
        Ok(())
    } else {
        Err(io::Error::other(format!("{} is not a private directory of this user", directory.display())))
    }
}

struct Service {
    /// All engines of the device, by number.
    engines: Vec<Arc<SharedEngine>>,
    recording: Arc<Recording>,
    stop: Arc<Stop>,
    /// The thread that sends a capture.
    capture: Option<JoinHandle<()>>,
}

impl Service {
    fn serve(mut self, listener: &UnixListener) {
        while !self.stop.stopping.load(Ordering::Acquire) {
            let woken = wait_readable([listener.as_fd(), self.stop.bell.as_fd()], None);
            let accepted = woken.and_then(|_| listener.accept());
            match accepted {
                // An error of one client affects only that client.
                Ok((client, _)) => {
                    let _ = self.answer(client);
                    self.stop.clients(|clients| clients.asking = None);
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::warn!(%error, "the device can no longer be observed");
                    break;
                }
            }
        }
        if let Some(capture) = self.capture.take() {
            let _ = capture.join();
        }
    }

    fn answer(&mut self, mut client: UnixStream) -> io::Result<()> {
        let peer = socket_peercred(&client)?.uid;
        if !peer.is_root() && peer != geteuid() {
            return Ok(());
        }
        client.set_nonblocking(false)?;
        let same = client.try_clone()?;
        self.stop.clients(|clients| clients.asking = Some(same));
        client.set_read_timeout(Some(PATIENCE))?;
        client.set_write_timeout(Some(PATIENCE))?;
        let mut line = String::new();
        BufReader::new((&client).take(MAX_LINE_BYTES)).read_line(&mut line)?;
        match line.trim_end() {
            "stat" => client.write_all(self.describe().as_bytes()),
            "capture" => self.capture(client),
            _ => client.write_all(b"unknown request\n"),
        }
    }

    /// The answer to `stat`.
    fn describe(&self) -> String {
        let Some(first) = self.engines.first() else { return String::new() };
        let interface = attributes(&self.engines, first);
        let process = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let addresses: Vec<_> = interface.addresses.iter().map(ToString::to_string).collect();
        let mut out = format!("xwarp {VERSION}\n");
        let facts: [(&str, &dyn std::fmt::Display); 11] = [
            ("pid", &std::process::id()),
            ("process", &process.trim_end()),
            ("interface", &interface.name),
            ("shared", &interface.shared),
            ("mode", &interface.mode),
            ("mtu", &interface.mtu),
            ("up", &interface.up),
            ("queues", &interface.queues),
            ("engines", &self.engines.len()),
            ("addresses", &addresses.join(" ")),
            ("nanoseconds", &first.clock().now().as_nanos()),
        ];
        for (name, value) in facts {
            let _ = writeln!(out, "{name} {value}");
        }
        let counters = Counters::of_device(&self.engines);
        for (name, value) in counters.iter().filter(|(_, value)| *value > 0) {
            let _ = writeln!(out, "{name} {value}");
        }
        for engine in &self.engines {
            describe_qps(&mut out, engine);
        }
        out.push_str("end\n");
        out
    }

    /// Sends all frames from now on, on a thread of its own.
    fn capture(&mut self, mut client: UnixStream) -> io::Result<()> {
        if self.capture.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return client.write_all(b"another capture is running\n");
        }
        let (sender, pieces) = mpsc::sync_channel(MAX_PIECES);
        if let Err(error) = self.recording.start_live(Box::new(Pieces(sender))) {
            return writeln!(client, "{error}");
        }
        let recording = Arc::clone(&self.recording);
        let (stop, same) = (Arc::clone(&self.stop), client.try_clone()?);
        stop.clients(|clients| clients.capturing = Some(same));
        let thread = system::spawn("xwarp-capture".into(), move || {
            let sent = client.write_all(b"ok\n").and_then(|()| send_capture(client, &pieces, &recording));
            if let Err(error) = sent {
                tracing::debug!(%error, "a capture from outside ends");
            }
            stop.clients(|clients| clients.capturing = None);
            recording.stop_live();
        });
        match thread {
            Ok(thread) => self.capture = Some(thread),
            Err(_) => self.recording.stop_live(),
        }
        Ok(())
    }
}

fn describe_qp(out: &mut String, id: QpId, qp: &QpInfo, tcp: Option<&xwarp_tcp::tcp::Info>) {
    let state = format!("{:?}", qp.state).to_lowercase();
    let _ = write!(
        out,
        "qp number={} state={state} send_outstanding={} recv_outstanding={} ird={} ord={}",
        id.number(),
        qp.send_outstanding,
        qp.recv_outstanding,
        qp.ird,
        qp.ord
    );
    if let Some((local, peer)) = qp.addresses {
        let _ = write!(out, " local={local} peer={peer}");
    }
    if let Some(tcp) = tcp {
        let nanoseconds = |time: Option<Duration>| time.map_or(0, |time| time.as_nanos());
        let _ = write!(
            out,
            " congestion={} srtt_ns={} min_rtt_ns={} rto_ns={} cwnd={} in_flight={} snd_wnd={} rcv_wnd={} path_mtu={}",
            tcp.congestion,
            nanoseconds(tcp.srtt),
            nanoseconds(tcp.min_rtt),
            tcp.rto.as_nanos(),
            tcp.cwnd,
            tcp.in_flight,
            tcp.snd_wnd,
            tcp.rcv_wnd,
            tcp.path_mtu
        );
        for (name, value) in tcp.counters.iter() {
            let _ = write!(out, " {}={value}", name.trim_start_matches("tcp."));
        }
    }
    out.push('\n');
}

/// Takes recorded frames from the tap, without waiting.
struct Pieces(SyncSender<Vec<u8>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.try_send(bytes.to_vec()) {
            Ok(()) => Ok(bytes.len()),
            Err(TrySendError::Full(_)) => Err(io::Error::other("the client is too slow")),
            Err(TrySendError::Disconnected(_)) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line for each queue pair of an engine.
fn describe_qps(out: &mut String, engine: &SharedEngine) {
    let qps = engine.look(|state| state.engine.rnic().qps()).unwrap_or_default();
    for part in qps.chunks(QPS_PER_LOCK) {
        let _ = engine.look(|state| {
            for &id in part {
                // It may have been destroyed, or moved to another engine, meanwhile.
                if let Ok(qp) = state.engine.rnic().query_qp(id) {
                    let tcp = state.engine.connection_info(id).map(|(tcp, _)| tcp);
                    describe_qp(out, id, &qp, tcp.as_ref());
                }
            }
        });
    }
}

/// Sends pieces until the client closes its direction, is too slow, or the device closes. What was recorded until then is sent,
/// so that the file ends with a whole frame.
fn send_capture(mut client: UnixStream, pieces: &Receiver<Vec<u8>>, recording: &Recording) -> io::Result<()> {
    loop {
        match pieces.recv_timeout(FLUSH_EVERY) {
            Ok(piece) => client.write_all(&piece)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => recording.flush(),
        }
        // A client writes nothing after its line, so readable means closed.
        if wait_readable([client.as_fd()], Some(Duration::ZERO))? {
            break;
        }
    }
    recording.stop_live();
    pieces.iter().try_for_each(|piece| client.write_all(&piece))
}
