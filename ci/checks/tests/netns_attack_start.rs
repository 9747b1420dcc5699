//! What surrounds `xwarpd` when it starts and ends: files at the path of its socket, the umask, a log that cannot be written, a
//! terminal that closes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink},
        net::UnixListener,
        process::CommandExt as _,
    },
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
    process::{Pid, Signal, kill_process},
};
use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    process::Running,
    shared::{NOBODY, SharedInterface},
};

const HELPER: &str = env!("CARGO_BIN_EXE_xwarp-helper");
const NOBODYS: &str = env!("CARGO_BIN_EXE_xwarp-nobody");
const LIMIT: Duration = Duration::from_secs(60);

fn lab() -> Lab {
    Lab::up(LabOptions::default()).unwrap()
}

/// A helper without the output of [`Running`], until it is dropped.
struct Helper(Child);

impl Helper {
    /// Starts it by a shell, which sets up what surrounds it.
    fn start(lab: &Lab, socket: &Path, shell: &str, errors: Stdio) -> Self {
        let mut command = lab.command(Side::A, "sh");
        command.args([
            "-c",
            &format!("{shell} exec \"$@\""),
            "sh",
            HELPER,
            INTERFACE,
            "--mode",
            "666",
            "--socket",
        ]);
        command.arg(socket).stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).process_group(0);
        Self(command.spawn().unwrap())
    }

    /// Waits until it accepts connections.
    fn ready(&mut self, socket: &Path) -> &mut Self {
        let connects = || {
            let own = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            connect(own.unwrap(), &SocketAddrUnix::new(socket).unwrap()).is_ok()
        };
        let end = Instant::now() + LIMIT;
        while !connects() {
            assert_eq!(self.0.try_wait().unwrap(), None, "the helper has ended");
            assert!(Instant::now() < end, "the helper does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        self
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.0.id().cast_signed()).unwrap(), signal).unwrap();
    }

    /// Waits for its end, and returns whether it was successful.
    fn ended(&mut self) -> bool {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < end, "the helper runs");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two clients of the helper at `socket` exchange messages.
fn serves(lab: &Lab, socket: &Path) {
    let address = format!("{}:7000", lab.address(Side::A, Family::V4));
    let start = |args: &[&str]| {
        let user = NOBODY.to_string();
        let mut command = Command::new("unshare");
        command.args(["--net", "setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"]);
        command.args(["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", NOBODYS]).args(args);
        command.env("XWARP_HELPER", socket);
        Running::start(command).unwrap()
    };
    let mut server = start(&["serve", &address, "1"]);
    server.wait_for("listens", LIMIT).unwrap();
    start(&["talk", &address, "5"]).finish(LIMIT).unwrap();
    server.finish(LIMIT).unwrap();
}

/// What is no socket is neither removed nor replaced, and a socket of another helper at the same path stays.
#[test]
fn netns_attack_only_the_own_socket_is_removed() {
    let lab = lab();
    let refused = |path: &Path| {
        let mut helper =
            lab.start(Side::A, HELPER, &[INTERFACE, "--socket", path.to_str().unwrap()]).unwrap();
        assert!(!helper.wait(LIMIT).unwrap().success(), "{}", path.display());
        assert!(helper.output().contains("no socket"), "{}", helper.output());
    };
    let file = lab.file("conf");
    fs::write(&file, "settings").unwrap();
    refused(&file);
    assert_eq!(fs::read_to_string(&file).unwrap(), "settings");
    let link = lab.file("link");
    symlink(&file, &link).unwrap();
    refused(&link);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let fifo = lab.file("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    refused(&fifo);
    assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());

    let socket = lab.file("taken.sock");
    let mut helper = Helper::start(&lab, &socket, "", Stdio::null());
    helper.ready(&socket);
    fs::remove_file(&socket).unwrap();
    let other = UnixListener::bind(&socket).unwrap();
    helper.signal(Signal::TERM);
    assert!(helper.ended());
    assert!(socket.exists(), "the helper has removed the socket of another program");
    drop(other);
}

/// Clients of other users pass the directory under any umask, and nobody else can put a socket there.
#[test]
fn netns_attack_the_directory_of_the_socket_has_its_own_permissions() {
    let lab = lab();
    for umask in ["077", "000"] {
        let directory = lab.file(umask);
        let socket = directory.join("xwarpd.sock");
        let mut helper = Helper::start(&lab, &socket, &format!("umask {umask};"), Stdio::null());
        helper.ready(&socket);
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o7777, 0o755, "umask {umask}");
        assert_eq!(fs::metadata(&socket).unwrap().mode() & 0o777, 0o666, "umask {umask}");
        serves(&lab, &socket);
    }
    let open = lab.file("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let socket = open.join("xwarpd.sock");
    let mut helper = lab.start(Side::A, HELPER, &[INTERFACE, "--socket", socket.to_str().unwrap()]).unwrap();
    assert!(!helper.wait(LIMIT).unwrap().success());
    assert!(helper.output().contains("others could put a socket"), "{}", helper.output());
}

/// A directory that a user may not enter is said, instead of an interface that does not exist.
#[test]
fn netns_attack_a_closed_directory_is_not_taken_for_no_helper() {
    let lab = lab();
    let shared = SharedInterface::start(&lab, HELPER, &[]).unwrap();
    let closed = lab.file("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o700)).unwrap();
    for (socket, text) in
        [(closed.join("xwarpd.sock"), "may not use xwarpd"), (lab.file("stale"), "no answer from")]
    {
        drop(UnixListener::bind(&socket).unwrap());
        fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
        let mut command = shared.unprivileged(NOBODYS);
        command.args(["talk", "10.77.0.1:7000", "1"]).env("XWARP_HELPER", &socket);
        let mut client = Running::start(command).unwrap();
        assert!(!client.wait(LIMIT).unwrap().success());
        assert!(client.output().contains(text), "{}", client.output());
    }
}

/// A full disk and a closed pipe lose lines of the log, and nothing else.
#[test]
fn netns_attack_a_log_that_cannot_be_written_ends_nothing() {
    let lab = lab();
    for way in ["2>/dev/full", "2>&-", "| true"] {
        let socket = lab.file("full.sock");
        let (shell, errors) = match way {
            "| true" => {
                let (reader, writer) = std::io::pipe().unwrap();
                drop(reader);
                (String::new(), writer.into())
            }
            _ => (format!("exec {way};"), Stdio::null()),
        };
        let mut helper = Helper::start(&lab, &socket, &shell, errors);
        helper.ready(&socket);
        serves(&lab, &socket);
        assert_eq!(helper.0.try_wait().unwrap(), None, "{way}: the helper has ended");
        helper.signal(Signal::TERM);
        assert!(helper.ended(), "{way}");
    }
}

/// A reader of the log that has stopped does not stop the helper.
#[test]
fn netns_attack_a_log_that_nobody_reads_delays_no_client() {
    let lab = lab();
    let socket = lab.file("stopped.sock");
    let (reader, writer) = std::io::pipe().unwrap();
    // Full before the first line.
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[b'\n'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    let mut helper = Helper::start(&lab, &socket, "", writer.into());
    helper.ready(&socket);
    serves(&lab, &socket);
    helper.signal(Signal::TERM);
    assert!(helper.ended());
    drop(reader);
}

/// Under nohup the helper survives the end of its terminal; otherwise it ends.
#[test]
fn netns_attack_an_ignored_hangup_stays_ignored() {
    let lab = lab();
    let socket = lab.file("nohup.sock");
    let mut helper = Helper::start(&lab, &socket, "trap '' HUP;", Stdio::null());
    helper.ready(&socket).signal(Signal::HUP);
    serves(&lab, &socket);
    assert_eq!(helper.0.try_wait().unwrap(), None, "the helper has ended");
    drop(helper);
    let mut helper = Helper::start(&lab, &socket, "", Stdio::null());
    helper.ready(&socket).signal(Signal::HUP);
    assert!(helper.ended());
}

/// A file gets no colours, the journal priorities, and a user who only connects no line.
#[test]
fn netns_attack_the_log_has_neither_colours_nor_a_line_for_each_connection() {
    let lab = lab();
    for journal in [false, true] {
        let (socket, path) = (lab.file("log.sock"), lab.file("log"));
        let log = File::create(&path).unwrap();
        let metadata = log.metadata().unwrap();
        let stream = format!("{}:{}", metadata.dev(), metadata.ino());
        let shell = if journal { format!("export JOURNAL_STREAM={stream};") } else { String::new() };
        let mut helper = Helper::start(&lab, &socket, &shell, log.into());
        helper.ready(&socket);
        for _ in 0..300 {
            let own = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            connect(own.unwrap(), &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        }
        serves(&lab, &socket);
        helper.signal(Signal::TERM);
        assert!(helper.ended());
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains('\x1b'), "{text}");
        assert!(text.contains("opened a device") && text.lines().count() < 30, "{text}");
        assert_eq!(text.lines().all(|line| line.starts_with("<6>")), journal, "{text}");
    }
}
