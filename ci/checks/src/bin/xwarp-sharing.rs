//! The cost of sharing an interface by `xwarpd`: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::sharing::main()
}
