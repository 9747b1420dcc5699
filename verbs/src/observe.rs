//! Where an [observable](crate::DeviceOptions::observe) device can be asked from outside of its process, and the form of
//! its answers.
//!
//! The device listens on a socket in [`directory`], in a file with the name `PID-INTERFACE-NUMBER`. The directory and the file
//! belong to the user of the process, and only this user and root may use them. A client writes one line and reads the
//! answer until its end:
//!
//! | line | answer |
//! |---|---|
//! | `stat` | lines `NAME VALUE` about the device, a line `qp FIELD=VALUE ...` for each queue pair, and the line `end` |
//! | `capture` | the line `ok`, then a pcapng file of all frames from now on, until the client closes its end or falls too far behind; or one line that says why not |

use std::path::PathBuf;

/// Environment variable that makes every device of a process observable, unless it is empty or `0`.
pub const OBSERVE_VARIABLE: &str = "XWARP_OBSERVE";

/// Environment variable that names another directory than the usual one.
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
