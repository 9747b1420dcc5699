//! The socket through which other processes query an [observable](crate::DeviceOptions::observe) device, and the form
//! of its answers.
//!
//! The device listens on a socket in [`directory`], in a file with the name `PID-INTERFACE-NUMBER`. The directory and the file
//! belong to the user of the process, and only this user and root may use them. A process that ends without closing its device
//! leaves the file, which the next device and [`sockets`] remove. A client writes one line and reads the answer until its end:
//!
//! | line | answer |
//! |---|---|
//! | `stat` | lines `NAME VALUE` about the device, a line `qp FIELD=VALUE ...` for each queue pair, and the line `end` |
//! | `capture` | the line `ok`, then a pcapng file of all frames from now on, until the client closes its end or falls too far behind; or one line that says why not |

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

/// Environment variable that makes every device of a process observable, unless it is empty or `0`.
pub const OBSERVE_VARIABLE: &str = "XWARP_OBSERVE";

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

/// The socket of an observable device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Socket {
    /// The device's process.
    pub pid: u32,
    /// The device's interface.
    pub interface: String,
    /// The file.
    pub path: PathBuf,
}

impl Socket {
    fn of(path: PathBuf) -> Option<Self> {
        let (pid, rest) = path.file_name()?.to_str()?.split_once('-')?;
        let (interface, _number) = rest.rsplit_once('-')?;
        Some(Self { pid: pid.parse().ok()?, interface: interface.to_owned(), path })
    }

    /// Whether the device has been closed. The process ID alone does not show that: it may have been reused, or belong
    /// to another namespace.
    fn is_left(&self) -> bool {
        let is_old = || {
            let age =
                fs::symlink_metadata(&self.path).and_then(|file| file.modified()).map(|made| made.elapsed());
            matches!(age, Ok(Ok(age)) if age >= LEAST_AGE)
        };
        let runs = || Path::new("/proc").join(self.pid.to_string()).exists();
        is_refused(&self.path) && (is_old() || !runs())
    }
}

/// Whether a socket has no listener. Does not wait for a process that accepts no connections.
fn is_refused(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| connect(&socket, &SocketAddrUnix::new(path)?));
    connected == Err(Errno::CONNREFUSED)
}

/// The sockets of devices in `directory`. Files that ended processes have left are removed.
pub fn sockets(directory: &Path) -> Vec<Socket> {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = files.filter_map(|file| Socket::of(file.path())).collect();
    found.retain(|socket| {
        let is_left = socket.is_left();
        if is_left {
            // Another process may have removed it.
            let _ = fs::remove_file(&socket.path);
        }
        !is_left
    });
    found
}
