//! [`Holder`]: the process that keeps an XDP program attached or has AF_XDP sockets, found in /proc.

use std::fmt;
use std::fs;
use std::path::Path;

/// A process that holds a BPF program, its link, or sockets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: u32,
    /// Its name as in `ps`, at most 15 characters; empty if unknown.
    pub command: String,
}

/// Flag of a process that has begun to exit (`PF_EXITING` of `linux/sched.h`).
const EXITING: u32 = 0x4;

impl Holder {
    /// Whether the process has begun to exit, or is gone. What it holds is released soon.
    pub fn is_ending(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        flags_of(&stat).is_none_or(|flags| flags & EXITING != 0)
    }
}

/// The flags in a line of /proc/PID/stat: the seventh field behind the name, which may contain anything.
fn flags_of(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(6)?.parse().ok()
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
    processes().find(|pid| holds(*pid, id)).map(holder)
}

/// The processes that have AF_XDP sockets with rings. Only socket diagnostics, which many kernels lack
/// (`CONFIG_XDP_SOCKETS_DIAG`), report the queue to which each is bound. Processes of other users are visible to a
/// privileged caller only.
pub fn af_xdp_users() -> Vec<Holder> {
    let maps = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    processes().filter(|pid| maps(pid).lines().any(is_fill_ring)).map(holder).collect()
}

/// Whether a line of /proc/PID/maps is the fill ring of an AF_XDP socket: the mapping of a socket at an offset that no other
/// socket has (`XDP_UMEM_PGOFF_FILL_RING`).
fn is_fill_ring(line: &str) -> bool {
    let mut fields = line.split_ascii_whitespace().skip(2);
    fields.next() == Some("100000000") && fields.nth(2).is_some_and(|path| path.starts_with("socket:["))
}

/// The first process that has a descriptor of the socket with this inode. Processes of other users are visible to a privileged
/// caller only.
pub fn socket_user(inode: u32) -> Option<Holder> {
    let name = format!("socket:[{inode}]");
    let is_it =
        |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|target| target == Path::new(&name));
    let has = |pid: &u32| {
        fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|descriptors| descriptors.flatten().any(is_it))
    };
    processes().find(has).map(holder)
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn holder(pid: u32) -> Holder {
    Holder { pid, command: command(pid) }
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
    // Any user may name a process, and the name is printed on the terminals of others.
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_not_ending_and_one_that_is_gone_is() {
        assert_eq!(flags_of("7 (a) b) S 1 7 7 0 -1 4194560 100 0"), Some(4_194_560));
        assert_eq!(flags_of(""), None);
        assert!(!holder(std::process::id()).is_ending());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = holder(child.id());
        child.wait().unwrap();
        assert!(gone.is_ending());
    }

    #[test]
    fn fill_rings_are_distinguished_from_other_mappings() {
        let line =
            |offset: &str, path: &str| format!("7f1c00000000-7f1c00004000 rw-s {offset} 00:08 12345 {path}");
        assert!(is_fill_ring(&line("100000000", "socket:[12345]")));
        // A receive ring, or a ring of a packet socket; and a large file.
        assert!(!is_fill_ring(&line("00000000", "socket:[12345]")));
        assert!(!is_fill_ring(&line("100000000", "/var/lib/data")));
        assert!(!is_fill_ring("") && !is_fill_ring("7f1c00000000-7f1c00004000 rw-p 00000000 00:00 0"));
    }
}
