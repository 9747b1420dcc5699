//! The machine and the privileges of this process.

use std::{fs, io};

use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};
use xwarp_driver::{
    CAPABILITIES, OpenError,
    inspect::{MULTI_BUFFER_KERNEL, OLDEST_KERNEL, kernel_release, probe_af_xdp},
};

use super::Finding;

/// The privileges of this process.
pub(super) struct Rights {
    /// Capabilities that opening an interface needs and this process lacks.
    missing: Vec<&'static str>,
    /// Limit on locked memory in bytes; `None` without a limit.
    memory_limit: Option<u64>,
}

impl Rights {
    pub(super) fn of_this_process() -> Self {
        let has = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let is_missing = |name: &&'static str| {
            let bit = CapabilitySet::from_name(name.trim_start_matches("CAP_"));
            bit.is_none_or(|bit| !has.contains(bit))
        };
        Self {
            missing: CAPABILITIES.into_iter().filter(is_missing).collect(),
            memory_limit: getrlimit(Resource::Memlock).current,
        }
    }

    /// Whether other processes' XDP programs, and the processes that hold them, are visible.
    pub(super) fn are_complete(&self) -> bool {
        self.missing.is_empty()
    }

    /// The finding about an interface whose frames take this many bytes of locked memory.
    pub(super) fn memory(&self, bytes: u64) -> Finding {
        let needs = format!("frames take {} KiB of locked memory", bytes / 1024);
        if !self.missing.contains(&"CAP_IPC_LOCK") {
            return Finding::ok("memory", format!("{needs}; CAP_IPC_LOCK lifts the limit"));
        }
        match self.memory_limit {
            Some(limit) if limit < bytes => {
                let error = OpenError::LockedMemory { bytes };
                Finding::problem("memory", format!("{needs}, and the limit is {} KiB", limit / 1024))
                    .advice(error.to_string())
            }
            Some(limit) => {
                let limit = limit / 1024;
                Finding::ok("memory", format!("{needs}; this user may lock {limit} KiB in all"))
            }
            None => Finding::ok("memory", format!("{needs}; there is no limit")),
        }
    }

    fn finding(&self) -> Finding {
        // The capability for locked memory is judged together with the limit.
        let missing: Vec<_> = self.missing.iter().copied().filter(|name| *name != "CAP_IPC_LOCK").collect();
        if missing.is_empty() {
            let finding = Finding::ok("rights", format!("this process has {}", CAPABILITIES.join(", ")));
            return if self.missing.is_empty() {
                finding
            } else {
                Finding::ok("rights", "this process has all capabilities but CAP_IPC_LOCK, see memory")
            };
        }
        let error = OpenError::Permission { doing: "opening an interface" };
        Finding::problem("rights", format!("this process lacks {}", missing.join(", ")))
            .advice(error.to_string())
    }
}

pub(super) fn examine(rights: &Rights) -> Vec<Finding> {
    let mut findings = vec![kernel(), rights.finding()];
    findings.extend(user_namespace());
    findings.push(af_xdp());
    findings.extend(jit());
    findings
}

pub(super) fn kernel() -> Finding {
    let Some((release, version)) = kernel_release() else {
        return Finding::warning("kernel", "its version is not readable");
    };
    let (major, minor) = OLDEST_KERNEL;
    let (jumbo_major, jumbo_minor) = MULTI_BUFFER_KERNEL;
    if version < OLDEST_KERNEL {
        let needs = format!("install Linux {major}.{minor} or newer");
        return Finding::problem("kernel", format!("Linux {release} is too old")).advice(needs);
    }
    if version < MULTI_BUFFER_KERNEL {
        let jumbo = format!("path MTUs above 3506 need Linux {jumbo_major}.{jumbo_minor}");
        return Finding::note("kernel", format!("Linux {release}; {jumbo}"));
    }
    Finding::ok("kernel", format!("Linux {release}"))
}

/// Capabilities of a user namespace other than the first do not count for BPF.
fn user_namespace() -> Option<Finding> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let fields: Vec<_> = map.split_ascii_whitespace().collect();
    (fields != ["0", "0", "4294967295"]).then(|| {
        Finding::problem(
            "namespace",
            "this process is in a user namespace of its own, where CAP_BPF does not count",
        )
        .advice(
            "start it with the host's user namespace (podman: --userns=host as root; docker: --userns=host)",
        )
    })
}

fn af_xdp() -> Finding {
    match probe_af_xdp() {
        Ok(()) => Finding::ok("af_xdp", "the kernel has AF_XDP sockets"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Finding::note("af_xdp", "not known, because CAP_NET_RAW is missing")
        }
        Err(error) => Finding::problem("af_xdp", format!("no AF_XDP sockets: {error}"))
            .advice("run a kernel with CONFIG_XDP_SOCKETS and CONFIG_BPF_SYSCALL"),
    }
}

fn jit() -> Option<Finding> {
    let enabled = fs::read_to_string("/proc/sys/net/core/bpf_jit_enable").ok()?;
    (enabled.trim() == "0").then(|| {
        Finding::warning("jit", "BPF programs are interpreted, which is slow")
            .advice("sysctl -w net.core.bpf_jit_enable=1")
    })
}
