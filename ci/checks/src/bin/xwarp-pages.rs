//! Writes the manual pages and completions of `xwarpd` and `xwarp-perf` to a directory, for the Debian package. Those of `xwarp` it
//! writes itself.

use std::{env, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::CommandFactory as _;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;

fn main() -> Result<()> {
    let directory: PathBuf = env::args_os().nth(1).context("the directory for the pages")?.into();
    let mut daemon = xwarp_daemon::Options::command();
    let mut perf = xwarp_perf::options::Cli::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut daemon, "xwarpd", &directory)?;
        generate_to(shell, &mut perf, "xwarp-perf", &directory)?;
    }
    Man::new(daemon).section("8").generate_to(&directory)?;
    // Not the command from above, to which the completions have added pages of help.
    clap_mangen::generate_to(xwarp_perf::options::Cli::command(), &directory)?;
    Ok(())
}
