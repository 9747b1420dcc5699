//! `xwarpd`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    xwarp_daemon::main()
}
