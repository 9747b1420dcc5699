//! The socket through which other processes query an [observable](crate::DeviceOptions::observe) device, and the form
//! of its answers.
//!
//! The device listens on a socket in [`directory`], in a file with the name `PID-INTERFACE-NUMBER`. The directory and the file
//! belong to the user of the process, and only this user and root may use them. A process that ends without closing its device
//! leaves the file, which the next device of the user removes. A client writes one line and reads the answer until its end:
//!
//! | line | answer |
//! |---|---|
//! | `stat` | lines `NAME VALUE` about the device, a line `qp FIELD=VALUE ...` for each queue pair, and the line `end` |
//! | `capture` | the line `ok`, then a pcapng file of all frames from now on, until the client closes its end or falls too far behind; or one line that says why not |

use std::{
    ffi::CStr,
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, open, openat, unlinkat},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

/// Environment variable that makes every device of a process observable, unless it is empty or `0`.
pub const OBSERVE_VARIABLE: &str = "XWARP_OBSERVE";

/// Whether [`OBSERVE_VARIABLE`] asks for it.
pub(crate) fn is_asked_for() -> bool {
    std::env::var_os(OBSERVE_VARIABLE).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Environment variable that overrides the directory.
pub const DIRECTORY_VARIABLE: &str = "XWARP_OBSERVE_DIR";

/// The directory for observable devices of root.
pub const DIRECTORY_OF_ROOT: &str = "/run/xwarp-devices";

/// Name of the directory of other users, in `$XDG_RUNTIME_DIR` (`/run/user/UID`).
pub const DIRECTORY_OF_USERS: &str = "xwarp-devices";

/// Version of the answers, their first line: `xwarp 1`.
pub const VERSION: u32 = 1;

/// The directory for observable devices of this user; `None` when a user other than root has no `$XDG_RUNTIME_DIR`.
pub fn directory() -> Option<PathBuf> {
    if let Some(directory) = std::env::var_os(DIRECTORY_VARIABLE).filter(|directory| !directory.is_empty()) {
        return Some(directory.into());
    }
    if rustix::process::geteuid().is_root() {
        return Some(DIRECTORY_OF_ROOT.into());
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty())?;
    Some(PathBuf::from(runtime).join(DIRECTORY_OF_USERS))
}

/// Age from which the file of a socket without a listener counts as abandoned: a device begins to listen just after it
/// has created the file.
const LEAST_AGE: Duration = Duration::from_secs(10);

/// Largest number of sockets of one directory that are looked at.
const MAX_SOCKETS: usize = 1024;

/// The socket of an observable device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Socket {
    /// The device's process.
    pub pid: u32,
    /// The device's interface.
    pub interface: String,
    /// The file.
    pub path: PathBuf,
    /// The user of the process.
    pub owner: u32,
}

impl Socket {
    fn of(directory: &Path, name: &CStr, owner: u32) -> Option<Self> {
        let name = name.to_str().ok()?;
        let (pid, rest) = name.split_once('-')?;
        let (interface, _number) = rest.rsplit_once('-')?;
        if interface.chars().any(char::is_control) {
            return None;
        }
        Some(Self {
            pid: pid.parse().ok()?,
            interface: interface.to_owned(),
            path: directory.join(name),
            owner,
        })
    }

    /// Connects to the device, without waiting. The stream is non-blocking.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if the process accepts no connection at the moment; no device listens
    /// there any more; the file is no socket of its user.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let (Some(directory), Some(name)) = (self.path.parent(), self.path.file_name()) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let directory = open_directory(directory, self.owner)?;
        let (file, _) = open_socket(directory.as_fd(), name, self.owner)?;
        Ok(connect_to(&file)?)
    }
}

/// Opens a directory that belongs to `owner` and that nobody else may change. A symbolic link is refused: `owner` may
/// have put it there to lead a reader with more rights elsewhere.
fn open_directory(path: &Path, owner: u32) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(path, flags, Mode::empty())?;
    let found = fstat(&directory)?;
    if found.st_uid == owner && found.st_mode & 0o022 == 0 {
        Ok(directory)
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// Opens the file of a socket that belongs to `owner`, without following a symbolic link and without connecting.
fn open_socket(
    directory: BorrowedFd<'_>,
    name: impl rustix::path::Arg,
    owner: u32,
) -> io::Result<(OwnedFd, Stat)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(directory, name, flags, Mode::empty())?;
    let found = fstat(&file)?;
    if found.st_uid == owner && FileType::from_raw_mode(found.st_mode) == FileType::Socket {
        Ok((file, found))
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// Connects to the socket that is this file, whatever its path leads to meanwhile.
fn connect_to(file: &OwnedFd) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?)?;
    Ok(socket.into())
}

/// Whether the device of a socket has been closed: it has no listener, and is old or has no process. The process ID alone
/// does not show that: it may have been reused, or belong to another namespace.
fn is_abandoned(file: &OwnedFd, found: &Stat, pid: u32) -> bool {
    let is_old = || {
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(found.st_mtime).unwrap_or(0));
        made.elapsed().is_ok_and(|age| age >= LEAST_AGE)
    };
    let runs = || Path::new("/proc").join(pid.to_string()).exists();
    connect_to(file).err() == Some(Errno::CONNREFUSED) && (is_old() || !runs())
}

/// Visits the sockets in an open directory of `owner`, and whether each is abandoned.
fn visit(path: &Path, directory: &OwnedFd, owner: u32, mut seen: impl FnMut(Socket, &CStr, bool)) {
    let Ok(files) = Dir::read_from(directory) else { return };
    for file in files.flatten().take(MAX_SOCKETS) {
        if let Some(socket) = Socket::of(path, file.file_name(), owner)
            && let Ok((opened, found)) = open_socket(directory.as_fd(), file.file_name(), owner)
        {
            let abandoned = is_abandoned(&opened, &found, socket.pid);
            seen(socket, file.file_name(), abandoned);
        }
    }
}

/// The sockets of devices in `directory`, which belongs to the user `owner`: only those of this user, and none if the
/// directory is a symbolic link, or others may change it. Changes nothing.
pub fn sockets(directory: &Path, owner: u32) -> Vec<Socket> {
    let mut found = Vec::new();
    if let Ok(opened) = open_directory(directory, owner) {
        visit(directory, &opened, owner, |socket, _, abandoned| {
            if !abandoned {
                found.push(socket);
            }
        });
    }
    found
}

/// Removes the sockets that ended processes of this user have left in its own directory.
pub(crate) fn remove_abandoned(directory: &Path) {
    let owner = rustix::process::geteuid().as_raw();
    if let Ok(opened) = open_directory(directory, owner) {
        visit(directory, &opened, owner, |_, name, abandoned| {
            if abandoned {
                // Another process may have removed it.
                let _ = unlinkat(&opened, name, AtFlags::empty());
            }
        });
    }
}
