//! [`User`]: an ordinary user without any capability, whose programs run over the fabric. Neither namespaces nor root are needed; as
//! root, the programs become `nobody` first.

use std::env;
use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::process::Running;
use crate::shared::NOBODY;
use crate::unmodified::{REFUSALS, xwarp};

/// Time limit of one program.
pub const LIMIT: Duration = Duration::from_secs(90);
/// Interval between two attempts of a client.
const RETRY: Duration = Duration::from_millis(100);

/// A user with a directory of its own, whose fabric ends with it.
#[derive(Debug)]
pub struct User {
    directory: PathBuf,
    is_root: bool,
}

impl User {
    /// A user, whose directory is named after a test.
    pub fn new(name: &str) -> Self {
        let directory = env::temp_dir().join(format!("xwarp-fabric-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::DirBuilder::new().mode(0o700).create(&directory).expect("a directory can be made");
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            chown(&directory, Some(NOBODY), Some(NOBODY)).expect("root may give a directory away");
        }
        Self { directory, is_root }
    }

    /// The user's directory, which is also `XDG_RUNTIME_DIR`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A program of the user.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command;
        if self.is_root {
            command = Command::new("setpriv");
            command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")]);
            command.args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
            command.arg(program);
        } else {
            command = Command::new(program);
        }
        command.env_clear().env("PATH", env::var_os("PATH").unwrap_or_default());
        command.env("XDG_RUNTIME_DIR", &self.directory).env("HOME", &self.directory);
        command.current_dir(&self.directory);
        command
    }

    /// `xwarp` with these arguments.
    pub fn xwarp(&self, arguments: &str) -> Command {
        let mut command = self.command(xwarp().expect("xwarp is built"));
        command.args(arguments.split_whitespace());
        command
    }

    /// Starts `xwarp` with these arguments.
    pub fn start(&self, arguments: &str) -> Running {
        Running::start(self.xwarp(arguments)).expect("xwarp starts")
    }

    /// Runs `xwarp` to its end within [`LIMIT`], and returns whether it succeeded, and what it said.
    pub fn outcome(&self, arguments: &str) -> (bool, String) {
        finish(self.start(arguments))
    }

    /// Runs `xwarp` to its successful end, and returns what was said.
    pub fn run(&self, arguments: &str) -> String {
        let (success, said) = self.outcome(arguments);
        assert!(success, "{arguments}: {said}");
        said
    }

    /// Runs a server and then a client to their successful ends; a client that comes too early is started again. Returns what the
    /// client said.
    pub fn pair(&self, server: &str, client: &str) -> String {
        let mut serving = self.start(server);
        let said = self.client(&mut serving, client);
        let (success, served) = finish(serving);
        assert!(success, "{server}: {served}\nthe client said: {said}");
        said
    }

    /// The same between `xwarp run --fabric` with these options and programs.
    pub fn programs(&self, server: &str, client: &str) -> String {
        self.pair(&format!("run --fabric {server}"), &format!("run --fabric {client}"))
    }

    fn client(&self, server: &mut Running, client: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let (success, said) = self.outcome(client);
            if success {
                return said;
            }
            let early = is_early(&said) && Instant::now() < end;
            assert!(early, "{client}: {said}\nthe server said: {}", server.arrived().join("\n"));
            thread::sleep(RETRY);
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.xwarp("fabric stop").output();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Whether a client said that no server listens yet.
pub fn is_early(said: &str) -> bool {
    REFUSALS.iter().any(|words| said.contains(words))
}

/// Whether a program ended with success, and what it said.
pub fn finish(mut running: Running) -> (bool, String) {
    let status = running.wait(LIMIT).expect("it ends");
    (status.success(), running.output())
}
