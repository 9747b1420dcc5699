//! The helper's socket: created here, or passed by systemd.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

use crate::options::Options;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// The listening socket, whose file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Listening {
    socket: OwnedFd,
    made: Option<PathBuf>,
}

impl Listening {
    /// Opens the socket that the options name.
    pub(crate) fn open(options: &Options) -> Result<Self> {
        let path = &options.socket;
        if path.as_os_str() == "-" {
            let socket = io::stdin().as_fd().try_clone_to_owned().context("standard input is closed")?;
            // A client may disconnect between its arrival and `accept`.
            ioctl_fionbio(&socket, true).context("standard input is no socket")?;
            return Ok(Self { socket, made: None });
        }
        remove_stale(path)?;
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
        }
        let socket = new_socket()?;
        let address = SocketAddrUnix::new(path.as_path())
            .with_context(|| format!("{} is too long for a socket", path.display()))?;
        bind(&socket, &address).with_context(|| format!("cannot bind {}", path.display()))?;
        let listening = Self { socket, made: Some(path.clone()) };
        // No client can connect before `listen`, so the permissions are in effect from the first connection on.
        if let Some(group) = &options.group {
            let group = group_number(group)?;
            chown(path, None, Some(group)).with_context(|| format!("group of {}", path.display()))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(options.mode))?;
        listen(&listening.socket, BACKLOG)?;
        Ok(listening)
    }

    /// A duplicate of the socket.
    pub(crate) fn socket(&self) -> Result<OwnedFd> {
        self.socket.try_clone().context("duplicating the socket")
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

fn new_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).context("opening a socket")
}

/// Removes the socket of a helper that was killed.
fn remove_stale(path: &Path) -> Result<()> {
    match connect(new_socket()?, &SocketAddrUnix::new(path)?) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(Errno::AGAIN) => bail!("another xwarpd listens on {}", path.display()),
        Err(errno) => Err(errno).with_context(|| format!("{}", path.display())),
    }
}

/// The number of a group that is named by its number, or by its name in /etc/group.
fn group_number(group: &str) -> Result<u32> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let file = fs::read_to_string("/etc/group").context("cannot read /etc/group")?;
    let number = file.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() == Some(group) { fields.nth(1)?.parse().ok() } else { None }
    });
    number.with_context(|| format!("there is no group {group}"))
}
