//! The helper's socket: created here, or passed by systemd.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use crate::names::Name;
use crate::options::Options;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Permissions of a directory that is made for the socket: clients of any user pass it.
const DIRECTORY_MODE: u32 = 0o755;

/// The listening socket, whose file is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Listening {
    socket: OwnedFd,
    made: Option<Made>,
}

/// The file of a socket that was created here.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// Device and inode: another helper may have bound the path since.
    file: (u64, u64),
}

impl Listening {
    /// Opens the socket that the options name. `former` is that of the former helper, with the identity of its file; `activated`
    /// that of the service manager.
    pub(crate) fn open(
        options: &Options,
        former: Option<(OwnedFd, (u64, u64))>,
        activated: Option<OwnedFd>,
    ) -> Result<Self> {
        let path = &options.socket;
        if let Some((socket, file)) = former
            && identity(path).is_ok_and(|found| found == file)
        {
            let listening = Self { socket, made: Some(Made { path: path.clone(), file }) };
            listening.permit(options)?;
            return Ok(listening);
        }
        if path.as_os_str() == "-" {
            let standard_input = || io::stdin().as_fd().try_clone_to_owned();
            let socket = activated.map_or_else(standard_input, Ok).context("standard input is closed")?;
            // A client may disconnect between its arrival and `accept`.
            ioctl_fionbio(&socket, true).context("the service manager has passed no socket")?;
            return Ok(Self { socket, made: None });
        }
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            make_directory(directory)?;
        }
        remove_stale(path)?;
        let socket = new_socket()?;
        let address = SocketAddrUnix::new(path.as_path())
            .with_context(|| format!("{} is too long for a socket", path.display()))?;
        bind(&socket, &address).with_context(|| format!("cannot bind {}", path.display()))?;
        let made = Made { path: path.clone(), file: identity(path)? };
        let listening = Self { socket, made: Some(made) };
        // No client can connect before `listen`, so the permissions are in effect from the first connection on.
        listening.permit(options)?;
        listen(&listening.socket, BACKLOG)?;
        Ok(listening)
    }

    /// Sets the group and the permissions of the file.
    fn permit(&self, options: &Options) -> Result<()> {
        let Some(Made { path, .. }) = &self.made else { return Ok(()) };
        if let Some(group) = &options.group {
            let group = group_number(group)?;
            chown(path, None, Some(group)).with_context(|| format!("group of {}", path.display()))?;
        }
        Ok(fs::set_permissions(path, fs::Permissions::from_mode(options.mode))?)
    }

    /// The name of the socket, if it was created here.
    pub(crate) fn name(&self) -> Option<Name> {
        let (device, inode) = self.made.as_ref()?.file;
        Some(Name::Listener { device, inode })
    }

    /// Leaves the file to the next helper.
    pub(crate) fn leave(mut self) {
        self.made = None;
    }

    /// A duplicate of the socket.
    pub(crate) fn socket(&self) -> Result<OwnedFd> {
        self.socket.try_clone().context("duplicating the socket")
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(Made { path, file }) = &self.made
            && identity(path).is_ok_and(|found| found == *file)
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// Device and inode of a file, without following a symbolic link.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Makes the directory of the socket, which everybody may enter whatever the umask is, and checks that nobody but its owner
/// can put another socket in the place of ours. Whoever could would be the helper of all clients.
fn make_directory(directory: &Path) -> Result<()> {
    let shown = directory.display();
    if !directory.exists() {
        if let Some(parent) = directory.parent() {
            fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        }
        fs::create_dir(directory).with_context(|| format!("cannot make {shown}"))?;
        fs::set_permissions(directory, fs::Permissions::from_mode(DIRECTORY_MODE))?;
    }
    let found = fs::metadata(directory).with_context(|| format!("cannot look at {shown}"))?;
    ensure!(found.is_dir(), "{shown} is no directory");
    // In a directory with the sticky bit, such as /tmp, files can be replaced by their owner only.
    let (mode, sticky) = (found.mode(), found.mode() & 0o1000 != 0);
    ensure!(
        mode & 0o022 == 0 || sticky,
        "{shown} has mode {:o}: others could put a socket of theirs in the place of this one (chmod go-w {shown})",
        mode & 0o7777
    );
    let owner = found.uid();
    ensure!(
        owner == 0 || owner == geteuid().as_raw(),
        "{shown} belongs to user {owner}, who could put another socket in the place of this one"
    );
    Ok(())
}

fn new_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).context("opening a socket")
}

/// Removes the socket of a helper that was killed, and nothing else.
fn remove_stale(path: &Path) -> Result<()> {
    let shown = path.display();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("{shown}")),
        Ok(found) => {
            ensure!(found.file_type().is_socket(), "{shown} exists, and is no socket: it was not removed");
        }
    }
    match connect(new_socket()?, &SocketAddrUnix::new(path)?) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => fs::remove_file(path).with_context(|| format!("cannot remove {shown}")),
        Ok(()) | Err(Errno::AGAIN) => bail!("another xwarpd listens on {shown}"),
        // A socket of another type.
        Err(errno) => Err(errno).with_context(|| format!("{shown}")),
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
