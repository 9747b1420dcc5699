//! The system calls that the helper may make while it serves (seccomp). The list is in `syscalls.json`, for x86-64.
//!
//! All others fail with ENOSYS, among them those that start programs and processes, trace, mount, load modules, change users, or make
//! other sockets than the helper needs. ENOSYS because the C library then makes a thread by `clone`, whose flags a filter sees, instead
//! of `clone3`, whose flags it does not.

use anyhow::{Context as _, Result};
use seccompiler::{BpfProgram, TargetArch, apply_filter_all_threads, compile_from_json};

/// The name of the list.
const SERVING: &str = "serving";

fn program() -> Result<BpfProgram> {
    let list = include_bytes!("syscalls.json");
    let mut programs = compile_from_json(&list[..], TargetArch::x86_64).context("compiling the list")?;
    programs.remove(SERVING).context("the list has no such name")
}

/// Restricts all threads of this process, also those that start later, for good.
///
/// # Errors
/// The kernel has no seccomp, or this architecture has no list.
pub(crate) fn restrict() -> Result<()> {
    anyhow::ensure!(cfg!(target_arch = "x86_64"), "there is no list of system calls for this architecture");
    apply_filter_all_threads(&program()?).context("seccomp")
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;

    use nix::errno::Errno;
    use nix::sched::{CloneFlags, unshare};
    use rustix::net::{AddressFamily, SocketType, socket};

    use super::*;

    /// A thread of a serving helper starts no program, enters no namespace but one of the network, and opens no packet socket,
    /// whatever its capabilities are. It starts threads.
    #[test]
    fn attack_system_calls_that_serving_does_not_need_fail() {
        let restricted = thread::spawn(|| {
            seccompiler::apply_filter(&program().unwrap()).unwrap();
            let started = Command::new("/bin/true").spawn().map(drop);
            assert_eq!(started.unwrap_err().raw_os_error(), Some(Errno::ENOSYS as i32));
            for flags in [CloneFlags::CLONE_NEWUSER, CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET] {
                assert_eq!(unshare(flags), Err(Errno::ENOSYS), "{flags:?}");
            }
            let packets = socket(AddressFamily::PACKET, SocketType::RAW, None).map(drop);
            assert_eq!(packets, Err(rustix::io::Errno::NOSYS));
            socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            thread::spawn(|| ()).join().unwrap();
        });
        restricted.join().unwrap();
    }
}
