//! The speed of unmodified programs over SDP: see `--help`.

fn main() -> anyhow::Result<()> {
    xwarp_checks::sdp_speed::main()
}
