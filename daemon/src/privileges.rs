//! The capabilities that the helper keeps.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// The capabilities that the helper needs while it serves: for pairs and XDP, AF_XDP sockets, maps, frame memory beyond
/// the limit on locked memory, and privileged ports for root.
const KEPT: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// The names of the kept capabilities, for the log.
pub(crate) const KEPT_NAMES: &str = "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK, CAP_NET_BIND_SERVICE";

/// Drops all other capabilities of the calling thread permanently.
pub(crate) fn drop_others() -> io::Result<()> {
    let has = capabilities(None)?;
    let kept = has.permitted & KEPT;
    set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() },
    )?;
    Ok(())
}

/// Raises the limit on descriptors to its maximum: each client takes five, and one for each port.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, "the limit on descriptors is unchanged");
    }
}
