//! A wire with faults between two interfaces: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::hop::main()
}
