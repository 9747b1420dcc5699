//! The capabilities that the helper keeps.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, capabilities_secure_bits,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_capabilities_secure_bits, set_no_new_privs,
};

/// The capabilities that the helper needs while it serves: for pairs and XDP, AF_XDP sockets, maps, frame memory beyond
/// the limit on locked memory, and privileged ports for root.
const KEPT: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// The names of the kept capabilities, for the log.
pub(crate) const KEPT_NAMES: &str = "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK, CAP_NET_BIND_SERVICE, \
                                     and CAP_SYS_ADMIN of the thread that makes pairs";

/// Lowest limit on descriptors with which the helper starts.
const MIN_DESCRIPTORS: u64 = 1024;

/// Drops all other capabilities of the calling thread, and what would bring them back: the bounding set, the rights of user 0 at
/// `execve`, and those of programs.
pub(crate) fn drop_others() -> io::Result<()> {
    limit_to(KEPT)
}

/// The same for the thread that makes pairs, which needs one more for the network namespaces of clients.
pub(crate) fn drop_others_of_pairs() -> io::Result<()> {
    limit_to(KEPT | CapabilitySet::SYS_ADMIN)
}

/// Makes all capabilities of the calling thread ineffective. Programs that it starts have them again.
pub(crate) fn suspend() -> io::Result<()> {
    let has = capabilities(None)?;
    Ok(set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..has })?)
}

/// Drops all capabilities of the calling thread.
pub(crate) fn drop_all() -> io::Result<()> {
    limit_to(CapabilitySet::empty())
}

fn limit_to(set: CapabilitySet) -> io::Result<()> {
    let has = capabilities(None)?;
    if has.effective.contains(CapabilitySet::SETPCAP) {
        for dropped in CapabilitySet::all().difference(set).iter() {
            // Those that this kernel does not know are in no set.
            let _ = remove_capability_from_bounding_set(dropped);
        }
        let bits = CapabilitiesSecureBits::NO_ROOT | CapabilitiesSecureBits::NO_ROOT_LOCKED;
        set_capabilities_secure_bits(capabilities_secure_bits()? | bits)?;
    }
    clear_ambient_capability_set()?;
    let kept = has.permitted & set;
    let inheritable = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable })?;
    set_no_new_privs(true)?;
    Ok(())
}

/// Raises the limit on descriptors to its maximum, and returns it: each client takes five, and one for each port.
///
/// # Errors
/// So few descriptors that those of a message might not fit.
pub(crate) fn raise_descriptor_limit() -> anyhow::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the limit on descriptors is unchanged");
    }
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    anyhow::ensure!(
        limit >= MIN_DESCRIPTORS,
        "xwarpd may have {limit} descriptors, and needs {MIN_DESCRIPTORS} (LimitNOFILE of its service, ulimit -n)"
    );
    Ok(limit)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn attack_dropped_capabilities_are_gone_for_good() {
        // The sets belong to the thread.
        let status = thread::spawn(|| {
            drop_others().unwrap();
            std::fs::read_to_string("/proc/thread-self/status").unwrap()
        });
        let status = status.join().unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        assert_eq!(field("NoNewPrivs:"), 1);
        let sys_admin = CapabilitySet::SYS_ADMIN.bits();
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:", "CapBnd:"] {
            assert_eq!(field(set) & sys_admin, 0, "{set}\n{status}");
        }
    }
}
