//! `xwarp-perf` under a name of this package's, because cargo tells tests where the programs of their own
//! package are.

use std::process::ExitCode;

fn main() -> ExitCode {
    xwarp_perf::main()
}
