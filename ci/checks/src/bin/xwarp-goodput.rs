//! Goodput through the impairment hop, ours beside the kernel's: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::goodput::main()
}
