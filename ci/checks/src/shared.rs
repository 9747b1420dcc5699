//! [`SharedInterface`]: `xwarpd` in one namespace of a lab, and programs without privileges that use it.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

use crate::{
    lab::{INTERFACE, Lab, Side},
    process::Running,
    vm::built,
};

/// The user and group of programs without privileges.
pub const NOBODY: u32 = 65534;

/// Time limit for the helper to start.
const START: Duration = Duration::from_secs(30);

/// A helper that shares the interface of side A.
#[derive(Debug)]
pub struct SharedInterface {
    socket: PathBuf,
    /// Holds the network namespace of unprivileged programs, as one container does.
    container: Running,
    /// The helper itself.
    pub helper: Running,
}

/// A process in an empty network namespace.
fn container() -> Result<Running> {
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "echo there; exec sleep 100000"]);
    let mut container = Running::start(command)?;
    container.wait_for("there", START)?;
    Ok(container)
}

impl SharedInterface {
    /// Starts the helper `program` with more options, and waits until it is ready.
    pub fn start(lab: &Lab, program: &str, options: &[&str]) -> Result<Self> {
        Self::start_on(lab, program, &[&[INTERFACE], options].concat())
    }

    /// The same with a function that starts the helper, in whichever namespace, with a socket at `socket` and options that begin
    /// with the interfaces. Everybody may connect, unless the options name a group.
    pub fn start_by(
        socket: PathBuf,
        options: &[&str],
        start: impl FnOnce(&[&str]) -> Result<Running>,
    ) -> Result<Self> {
        let path = socket.to_str().context("a path of ASCII")?.to_owned();
        let everybody: &[&str] = if options.contains(&"--group") { &[] } else { &["--mode", "666"] };
        let mut helper = start(&[options, &["--socket", &path], everybody].concat())?;
        helper.wait_for("ready", START)?;
        Ok(Self { socket, container: container()?, helper })
    }

    /// Starts the helper with options that begin with the interfaces.
    pub fn start_on(lab: &Lab, program: &str, options: &[&str]) -> Result<Self> {
        Self::start_by(lab.file("xwarpd.sock"), options, |args| lab.start(Side::A, program, args))
    }

    /// Starts a helper that shares the interface of side B.
    pub fn start_beyond(lab: &Lab, program: &str) -> Result<Self> {
        Self::start_by(lab.file("xwarpd-b.sock"), &[INTERFACE], |args| lab.start(Side::B, program, args))
    }

    /// Starts the helper as systemd does, with a listening socket as its standard input.
    pub fn activated(lab: &Lab, program: &str) -> Result<Self> {
        let path = lab.file("activated.sock");
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        bind(&listener, &SocketAddrUnix::new(path.as_path())?)?;
        listen(&listener, 16)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        let mut command = lab.command(Side::A, program);
        command.args([INTERFACE, "--socket", "-"]);
        let mut helper = Running::start_with(command, listener.into())?;
        helper.wait_for("ready", START)?;
        Ok(Self { socket: path, container: container()?, helper })
    }

    /// The helper's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A command that runs `program` as user nobody: without any capability, with no memory that it may lock, and in a
    /// network namespace without any interface, which all these programs share. All that it has is the helper's socket.
    pub fn unprivileged(&self, program: &str) -> Command {
        self.unprivileged_as(NOBODY, program)
    }

    /// The same as another user.
    pub fn unprivileged_as(&self, uid: u32, program: &str) -> Command {
        self.unprivileged_in("--clear-groups", uid, program)
    }

    /// The same with a choice of supplementary groups, an option of setpriv.
    pub fn unprivileged_in(&self, groups: &str, uid: u32, program: &str) -> Command {
        self.without_rights(self.inside(), groups, uid, program)
    }

    /// A command that enters the network namespace of unprivileged programs.
    fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.container.id()));
        command
    }

    /// Runs `xwarp` as user nobody; returns its JSON and whether it succeeded.
    pub fn xwarp(&self, args: &[&str]) -> Result<(serde_json::Value, bool)> {
        let output = self.unprivileged(&built("xwarp")?.to_string_lossy()).args(args).output()?;
        let json = serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        Ok((json, output.status.success()))
    }

    /// The same in another container of the user.
    pub fn contained_as(&self, uid: u32, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command.arg("--net");
        self.without_rights(command, "--clear-groups", uid, program)
    }

    /// A command that runs `program` as a user without privileges that may lock the memory of a small device.
    pub fn locking_as(&self, uid: u32, program: &str) -> Command {
        let mut command = self.inside();
        command.args(["prlimit", "--memlock=4194304"]);
        self.dropping_rights(command, "--clear-groups", uid, program)
    }

    fn without_rights(&self, mut command: Command, groups: &str, uid: u32, program: &str) -> Command {
        command.args(["prlimit", "--memlock=0"]);
        self.dropping_rights(command, groups, uid, program)
    }

    fn dropping_rights(&self, mut command: Command, groups: &str, uid: u32, program: &str) -> Command {
        let user = format!("--reuid={uid}");
        command.args(["setpriv", &user, &format!("--regid={uid}")]);
        command.args([groups, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", program]);
        command.env("XWARP_HELPER", &self.socket);
        command
    }

    /// Starts the server of `nobodys` for `connections` connections, and waits until it listens.
    pub fn serve(&self, nobodys: &str, address: &str, connections: &str) -> Result<Running> {
        let mut server = self.start_unprivileged(nobodys, &["serve", address, connections])?;
        server.wait_for("listens", START)?;
        Ok(server)
    }

    /// Starts such a program.
    pub fn start_unprivileged(&self, program: &str, args: &[&str]) -> Result<Running> {
        let mut command = self.unprivileged(program);
        command.args(args);
        Running::start(command)
    }
}
