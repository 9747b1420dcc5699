//! `xwarpd` as a program of this package, because cargo gives tests only the paths of their own package's programs.

use std::process::ExitCode;

fn main() -> ExitCode {
    xwarp_daemon::main()
}
