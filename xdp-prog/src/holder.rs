//! [`Holder`]: the process that keeps an XDP program attached, found in /proc.

use std::fmt;
use std::fs;
use std::path::Path;

/// A process that holds a BPF program or its link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: u32,
    /// Its name as in `ps`, at most 15 characters; empty if unknown.
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        if self.command.is_empty() { Ok(()) } else { write!(f, " ({})", self.command) }
    }
}

/// The first process that has a descriptor of the program with this id, or of a link to it. Processes of other
/// users are visible to a privileged caller only.
pub(crate) fn of_program(id: u32) -> Option<Holder> {
    let pids = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| holds(*pid, id)).map(|pid| Holder { pid, command: command(pid) }).next()
}

fn holds(pid: u32, program: u32) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors.flatten().any(|descriptor| {
        let is_bpf = fs::read_link(descriptor.path()).is_ok_and(|target| {
            matches!(target.to_str(), Some("anon_inode:bpf_link" | "anon_inode:bpf-prog"))
        });
        let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(descriptor.file_name());
        is_bpf && fs::read_to_string(info).is_ok_and(|info| program_of(&info) == Some(program))
    })
}

/// The program's id in the fdinfo of a program or a link (`bpf_prog_show_fdinfo`, `bpf_link_show_fdinfo`).
pub(crate) fn program_of(fdinfo: &str) -> Option<u32> {
    fdinfo.lines().find_map(|line| line.strip_prefix("prog_id:")?.trim().parse().ok())
}

fn command(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}
