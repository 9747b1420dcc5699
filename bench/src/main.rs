//! `xwarp-perf`: see the library of this package.

use std::process::ExitCode;

fn main() -> ExitCode {
    xwarp_perf::main()
}
