//! Goodput of xwarp beside kernel TCP through the impairment hop: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::goodput::main()
}
