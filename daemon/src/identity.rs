//! What the kernel says about the process at the other end of a connection, beyond its user: whether it is root of this host
//! or of a container, and in which network namespace it is. A user's number alone does not say that.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

/// Bit of `CAP_NET_BIND_SERVICE` in a set of capabilities.
const NET_BIND_SERVICE: u64 = 1 << 10;

/// Identifies the network namespace of a process; `None` if it cannot be seen from here.
///
/// The link in /proc/PID/ns may be read only by those who may trace the process. Every network namespace has files of its
/// own below /proc/PID/net, whose inodes everybody may see.
pub(crate) fn network_namespace(pid: i32) -> Option<u64> {
    if pid <= 0 {
        return None;
    }
    fs::metadata(format!("/proc/{pid}/net/dev")).ok().map(|found| found.ino())
}

/// Whether a process of user 0 has root's right to privileged ports on this host: root of a container without that
/// capability, in a user namespace or in another PID namespace has not.
pub(crate) fn is_root_of_host(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    let own = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap_or_default();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !own.is_empty() && own == map && may_bind(&status)
}

/// Whether a process with this /proc/PID/status has the capability, and its PID namespace is that of the reader.
fn may_bind(status: &str) -> bool {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let effective = field("CapEff:").and_then(|set| u64::from_str_radix(set, 16).ok()).unwrap_or(0);
    let levels = field("NSpid:").map_or(0, |pids| pids.split_whitespace().count());
    effective & NET_BIND_SERVICE != 0 && levels == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attack_root_of_a_container_is_not_root_of_the_host() {
        assert!(may_bind("Uid:\t0\nNSpid:\t7\nCapEff:\t000001ffffffffff\n"));
        assert!(!may_bind("Uid:\t0\nNSpid:\t7\nCapEff:\t0000000000000000\n"), "no capability");
        assert!(!may_bind("Uid:\t0\nNSpid:\t7\t1\nCapEff:\t00000000a80425fb\n"), "a container");
        assert!(!may_bind(""));
    }

    #[test]
    fn processes_of_one_namespace_have_one_identity() {
        let own = network_namespace(std::process::id().cast_signed());
        assert!(own.is_some());
        assert_eq!(own, network_namespace(std::os::unix::process::parent_id().cast_signed()));
        assert_eq!(network_namespace(0), None);
    }
}
