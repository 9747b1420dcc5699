//! libfabric's `tcp` provider, measured with `fi_pingpong`: a ping-pong of one message at a time, in which both ends
//! spin.

use std::{env, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};

use super::samples::Outcome;

/// The program that is run as server and as client.
pub(super) const PROGRAM: &str = "fi_pingpong";

/// The TCP port at which a server of [`PROGRAM`] waits for its client.
pub(super) const CONTROL_PORT: u16 = 47592;

/// Message sizes, of which each is a run of the program.
pub(super) const SIZES: [u64; 8] = [2, 64, 256, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 8 << 20];

/// Estimate of a half round trip in nanoseconds, which only chooses how many there are: for each message and for each byte.
const MESSAGE_NS: f64 = 10_000.0;
const BYTE_NS: f64 = 0.7;

/// Whether the program is in a directory of `PATH`.
pub(super) fn is_installed() -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(PROGRAM).is_file()))
}

/// Options of both ends for messages of `bytes` during about `duration`.
pub(super) fn options(bytes: u64, duration: Duration, server: IpAddr) -> Vec<String> {
    let round_trip = 2.0 * (MESSAGE_NS + bytes as f64 * BYTE_NS);
    let count = (duration.as_nanos() as f64 / round_trip).max(10.0) as u64;
    let options = format!("-p tcp -e msg -S {bytes} -I {count}");
    let family = if server.is_ipv6() { " -6" } else { "" };
    (options + family).split(' ').map(str::to_owned).collect()
}

/// Reads the client's output about messages of `bytes`.
pub(super) fn parse(text: &str, bytes: u64) -> Result<Outcome> {
    let read = || {
        let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let head = lines.find(|words| words.first() == Some(&"bytes"))?;
        let row = lines.find(|words| words.len() == head.len())?;
        let number = |name: &str| -> Option<f64> {
            let at = head.iter().position(|word| *word == name)?;
            row.get(at)?.parse().ok().filter(|value| *value > 0.0)
        };
        Some((number("usec/xfer")?, number("MB/sec")))
    };
    let (latency, megabytes) =
        read().with_context(|| format!("no figures in its output: {}", text.trim()))?;
    let bandwidth = megabytes.map(|megabytes| megabytes * 8.0 / 1000.0);
    Ok(Outcome { bytes, latency: Some(latency), bandwidth, ..Outcome::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of version 1.17.
    const LARGE: &str = "\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
8m      20      =20      320m        0.29s   1149.92    7294.95       0.00
";
    /// Two bytes are too few for its megabytes.
    const TINY: &str = "\
libfabric:4711:1700000000::core:core:fi_getinfo_():1352<warn> a provider was skipped
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
2       20      =20      80          0.00s      0.00      28.45       0.04
";

    #[test]
    fn the_programs_output_is_read_by_the_names_of_its_columns() {
        let large = parse(LARGE, 8 << 20).unwrap();
        assert_eq!((large.bytes, large.latency), (8 << 20, Some(7294.95)));
        assert!((large.bandwidth.unwrap() - 9.199_36).abs() < 1e-9, "{large:?}");
        let tiny = parse(TINY, 2).unwrap();
        assert_eq!((tiny.latency, tiny.bandwidth), (Some(28.45), None));
        let moved = "bytes usec/xfer\n64 9.12\n";
        assert_eq!(parse(moved, 64).unwrap().latency, Some(9.12));
    }

    #[test]
    fn output_without_figures_is_an_error_that_quotes_it() {
        let refused = "[error] util/pingpong.c:408 : failed to connect: Connection refused\n";
        for text in [
            refused,
            "",
            LARGE.lines().next().unwrap(),
            "bytes usec/xfer\n64 nan?\n",
            "bytes usec/xfer\n64\n",
        ] {
            let error = parse(text, 64).unwrap_err().to_string();
            assert!(error.contains(text.trim()), "{error}");
        }
    }

    #[test]
    fn a_run_takes_about_the_duration() {
        let options = |bytes| options(bytes, Duration::from_secs(1), IpAddr::from([10, 0, 0, 1])).join(" ");
        assert_eq!(options(2), "-p tcp -e msg -S 2 -I 49993");
        assert_eq!(options(8 << 20), "-p tcp -e msg -S 8388608 -I 85");
        let short = super::options(8 << 20, Duration::ZERO, "fe80::1".parse().unwrap());
        assert_eq!(short.join(" "), "-p tcp -e msg -S 8388608 -I 10 -6");
    }
}
