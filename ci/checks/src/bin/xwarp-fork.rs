//! A process that forks while it has a device, for tests: see `xwarp_checks::exchange::forking`.

use std::process::ExitCode;

use nix::unistd::{ForkResult, fork};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let fork = || {
        // SAFETY: the child runs only code that the test is about: calls of xwarp that must be safe in a child of a process
        // with threads, and the exit with all destructors.
        match unsafe { fork() }? {
            ForkResult::Child => Ok(None),
            ForkResult::Parent { child } => Ok(Some(child.as_raw())),
        }
    };
    match xwarp_checks::exchange::forking(&arguments, fork) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
