//! Operations of hosts and networks under kernel TCP and xwarp: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::operations::main()
}
