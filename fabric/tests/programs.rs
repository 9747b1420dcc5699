//! The distribution's RDMA programs under `xwarp run --fabric`, as a user without any capability. They need no namespace, no interface
//! and no root; as root, the tests become `nobody` first.
//!
//! `cargo build --workspace` makes `xwarp` and its library, which are found beside this test.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::env;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(90);
const NOBODY: u32 = 65534;
/// What a client prints when no server listens yet.
const REFUSALS: [&str; 4] = ["REJECTED", "event bl blka 8", "refused", "Couldn't connect"];

/// A user with a directory of its own, whose fabric ends with it.
struct User {
    directory: PathBuf,
    is_root: bool,
}

/// A program that runs, and what it has said.
struct Running {
    child: Child,
    said: Arc<Mutex<String>>,
    readers: Vec<thread::JoinHandle<()>>,
}

fn xwarp() -> PathBuf {
    let executable = env::current_exe().unwrap();
    let directory = executable.ancestors().nth(2).unwrap();
    for file in ["xwarp", "libxwarp_compat.so"] {
        assert!(directory.join(file).exists(), "{file} is not built: cargo build --workspace");
    }
    directory.join("xwarp")
}

impl User {
    fn new(name: &str) -> Self {
        let directory = env::temp_dir().join(format!("xwarp-fabric-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            chown(&directory, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        Self { directory, is_root }
    }

    /// `xwarp` with these arguments.
    fn xwarp(&self, arguments: &str) -> Command {
        let mut command;
        if self.is_root {
            command = Command::new("setpriv");
            command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]);
            command.args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
            command.arg(xwarp());
        } else {
            command = Command::new(xwarp());
        }
        command.args(arguments.split_whitespace()).env_clear().env("PATH", env::var_os("PATH").unwrap());
        command.env("XDG_RUNTIME_DIR", &self.directory).env("HOME", &self.directory);
        command
    }

    fn start(&self, arguments: &str) -> Running {
        Running::start(self.xwarp(arguments))
    }

    /// Runs to the successful end, and returns what was said.
    fn run(&self, arguments: &str) -> String {
        let (success, said) = self.start(arguments).finish();
        assert!(success, "{arguments}: {said}");
        said
    }

    /// Runs a server and then a client to their successful ends; a client that comes too early is started again. Returns what the
    /// client said.
    fn pair(&self, server: &str, client: &str) -> String {
        let serving = self.start(server);
        let said = self.client(&serving, client);
        let (success, served) = serving.finish();
        assert!(success, "{server}: {served}\nthe client said: {said}");
        said
    }

    fn client(&self, server: &Running, client: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let (success, said) = self.start(client).finish();
            if success {
                return said;
            }
            let early = REFUSALS.iter().any(|words| said.contains(words)) && Instant::now() < end;
            assert!(early, "{client}: {said}\nthe server said: {}", server.said());
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.xwarp("fabric stop").output();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Running {
    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let outputs: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        let readers = outputs.map(|mut output| {
            let said = Arc::clone(&said);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(len @ 1..) = output.read(&mut bytes) {
                    said.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..len]));
                }
            })
        });
        Self { child, said, readers: readers.into() }
    }

    fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    fn wait_for(&self, text: &str) {
        let end = Instant::now() + LIMIT;
        while !self.said().contains(text) {
            assert!(Instant::now() < end, "no {text:?} in: {}", self.said());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether it ended with success, and what it said.
    fn finish(mut self) -> (bool, String) {
        let end = Instant::now() + LIMIT;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
                None => panic!("it still runs: {}", self.said()),
            }
        };
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        (status.success(), self.said())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Names of directories and users that programs of this test see.
fn is_private(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(directory).is_ok_and(|found| found.mode().trailing_zeros() >= 6)
}

#[test]
fn fabric_rping_runs_without_privileges() {
    let user = User::new("rping");
    assert!(user.run("fabric show").contains("does not run"));
    let client = "run --fabric rping -c -a 127.0.0.1 -C 5 -V -v";
    let said = user.pair("run --fabric rping -s -C 5 -V", client);
    assert_eq!(said.matches("rdma-ping-").count(), 5, "{said}");
    user.pair("run --fabric rping -s -a ::1 -C 3 -V -S 4001", "run --fabric rping -c -a ::1 -C 3 -V -S 4001");
    let shown = user.run("fabric show");
    assert!(shown.contains("localhost") && shown.contains("fabric.carried"), "{shown}");
    assert!(is_private(&user.directory.join("xwarp")), "others may enter");
    let devices = user.run("run --fabric ibv_devinfo -v");
    assert!(devices.contains("fabric") && devices.contains("PORT_ACTIVE"), "{devices}");
    // It ends when it is told to, and starts again.
    user.run("fabric stop");
    assert!(user.run("fabric show").contains("does not run"));
    user.run("fabric start");
    user.run("fabric start");
    assert!(user.run("fabric show").contains("localhost"));
}

#[test]
fn fabric_perftest_measures_by_the_manager_and_by_number() {
    let user = User::new("perftest");
    for (program, options) in [
        ("ib_write_bw", "-R -F -n 50 -s 65536"),
        ("ib_send_bw", "-R -F -n 50 -s 4096"),
        ("ib_read_bw", "-R -F -n 50 -s 65536"),
        ("ib_send_lat", "-R -F -n 50 -s 64 -e"),
        ("ib_write_lat", "-F -n 50 -x 0"),
        ("ib_atomic_bw", "-F -n 50 -x 0"),
    ] {
        let line = format!("run --fabric {program} {options}");
        let said = user.pair(&line, &format!("{line} localhost"));
        assert!(
            said.lines().any(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit())),
            "{said}"
        );
    }
    user.pair("run --fabric ibv_rc_pingpong -g 0 -n 50", "run --fabric ibv_rc_pingpong -g 0 -n 50 localhost");
}

#[test]
fn fabric_hosts_find_each_other_by_name() {
    let user = User::new("hosts");
    // The numbers of hosts are in the order in which they come.
    for host in ["a", "b"] {
        user.run(&format!("run --fabric --host {host} true"));
    }
    let rping = |host: &str, rest: &str| format!("run --fabric --host {host} rping {rest}");
    user.pair(&rping("a", "-s -C 3 -V"), &rping("b", "-c -a a -C 3 -V"));
    user.pair(&rping("a", "-s -a fd77:7761:7270::1 -C 3 -V"), &rping("b", "-c -a fd77:7761:7270::1 -C 3 -V"));
    // A host reaches itself by its name and as localhost.
    for address in ["a", "localhost"] {
        user.pair(&rping("a", "-s -C 3 -V"), &rping("a", &format!("-c -a {address} -C 3 -V")));
    }
    // By numbers that are exchanged over the kernel's TCP.
    let write = "ib_write_lat -F -n 20 -x 0";
    user.pair(
        &format!("run --fabric --host a {write}"),
        &format!("run --fabric --host b {write} 127.77.0.1"),
    );
    // By the connection manager's own look-up.
    user.pair("run --fabric --host a rdma_server", "run --fabric --host b rdma_client -s a");
    let shown = user.run("fabric show");
    assert!(shown.contains("127.77.0.2") && shown.contains("fd77:7761:7270::2"), "{shown}");
    // localhost is no part of the others' network.
    let (success, said) = user.start("run --fabric rping -c -a a -C 1").finish();
    assert!(!success, "{said}");
}

#[test]
fn fabric_a_killed_program_leaves_nothing() {
    let user = User::new("killed");
    let mut serving = user.start("run --fabric stdbuf -oL rping -s -a 127.0.0.1 -C 100000 -v");
    let client = user.start("run --fabric stdbuf -oL rping -c -a 127.0.0.1 -C 100000 -v");
    // Both are in the middle of it, or the client came too early.
    let end = Instant::now() + LIMIT;
    let mut client = Some(client);
    while !serving.said().contains("rdma-ping-10:") {
        assert!(Instant::now() < end, "{}", serving.said());
        if client.as_mut().is_some_and(|client| client.child.try_wait().unwrap().is_some()) {
            client = Some(user.start("run --fabric stdbuf -oL rping -c -a 127.0.0.1 -C 100000 -v"));
        }
        thread::sleep(Duration::from_millis(20));
    }
    serving.child.kill().unwrap();
    serving.child.wait().unwrap();
    let begin = Instant::now();
    let (_, said) = client.unwrap().finish();
    assert!(said.contains("DISCONNECT"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(15), "it was not told: {:?}", begin.elapsed());
    // The port is free.
    user.pair("run --fabric rping -s -a 127.0.0.1 -C 2", "run --fabric rping -c -a 127.0.0.1 -C 2");
}

/// Faults between hosts while programs run: TCP and MPA mend them, a cut stops the bytes, and its end lets them go on.
#[test]
fn fabric_faults_are_mended_and_cuts_heal() {
    let user = User::new("faults");
    for host in ["a", "b"] {
        user.run(&format!("run --fabric --host {host} true"));
    }
    let (success, said) = user.start("fabric set a c --loss 1%").finish();
    assert!(!success && said.contains("no host"), "{said}");
    let (success, said) = user.start("fabric set a b --loss 200%").finish();
    assert!(!success && said.contains("probability"), "{said}");
    user.run("fabric set a b --loss 3% --reorder 5% --reorder-by 1ms --duplicate 2% --corrupt 1% --delay 1ms --seed 7");
    user.pair(
        "run --fabric --host a rping -s -C 100 -S 2000 -V",
        "run --fabric --host b rping -c -a a -C 100 -S 2000 -V",
    );
    let shown = user.run("fabric show");
    assert!(shown.contains("fabric.faulty"), "{shown}");
    // A cut in the middle: with this delay it takes seconds.
    user.run("fabric set a b --clear --delay 1ms");
    let line = "stdbuf -oL rping -v -C 600 -S 100";
    let serving = user.start(&format!("run --fabric --host a {line} -s"));
    let mut client = user.start(&format!("run --fabric --host b {line} -c -a a"));
    let end = Instant::now() + LIMIT;
    while !serving.said().contains("rdma-ping-20:") {
        assert!(Instant::now() < end, "{}", serving.said());
        if client.child.try_wait().unwrap().is_some() {
            client = user.start(&format!("run --fabric --host b {line} -c -a a"));
        }
        thread::sleep(Duration::from_millis(5));
    }
    user.run("fabric cut a b");
    // Nothing is on its way any more.
    let mut before = serving.said().len();
    loop {
        thread::sleep(Duration::from_millis(300));
        let now = serving.said().len();
        if now == before {
            break;
        }
        before = now;
    }
    assert!(!serving.said().contains("rdma-ping-599"), "it has ended before the cut");
    user.run("fabric heal a b");
    serving.wait_for("rdma-ping-599");
    let (success, said) = client.finish();
    assert!(success, "{said}");
}

#[test]
fn fabric_programs_end_with_it() {
    let user = User::new("ends");
    let serving = user.start("run --fabric rping -s -a 127.0.0.1 -C 2");
    let end = Instant::now() + LIMIT;
    while !user.run("fabric show").contains("1 devices") {
        assert!(Instant::now() < end, "{}", serving.said());
        thread::sleep(Duration::from_millis(20));
    }
    user.run("fabric stop");
    serving.wait_for("the device fabric has ended");
}
