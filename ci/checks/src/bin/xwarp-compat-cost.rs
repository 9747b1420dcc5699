//! The cost of the drop-in libraries: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::compat_cost::main()
}
