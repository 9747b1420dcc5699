//! The command line of the hop.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use std::time::Duration;

use clap::{Parser, ValueEnum};
pub use xwarp_tcp::sim::words::{chance, rate, time};
use xwarp_tcp::{
    sim::{
        Blackout, Faults, Gilbert, PathMtu, Recut,
        words::{blackout, bursts},
    },
    time::Instant,
};

/// A wire with faults: forwards every frame between two interfaces according to the simulator's model.
///
/// Exits on an interrupt and prints a report as JSON. Both directions have the same faults unless --only is
/// given. The offloads of the interfaces at both ends must be off, so that frames are as on a cable: 'ci/lab
/// up --hop' ensures that.
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-hop")]
pub struct HopArgs {
    /// The interface that leads to A
    pub a: String,
    /// The interface that leads to B
    pub b: String,
    /// Line rate of each direction in bits per second, including the Ethernet header: 100M, 1G [default:
    /// none]
    #[arg(long, value_name = "BITS", value_parser = rate)]
    pub rate: Option<u64>,
    /// Length of the line's queue in frames; further frames are dropped at the tail
    #[arg(long, value_name = "FRAMES", default_value_t = 1000)]
    pub queue: usize,
    /// Mark ECN-capable frames with Congestion Experienced when this many frames are queued [default: none]
    #[arg(long, value_name = "FRAMES")]
    pub mark: Option<usize>,
    /// Delay added to a round trip, half of it in each direction: 50ms, 10us
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "0us")]
    pub rtt: Duration,
    /// Maximum additional random delay, without reordering
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "0us")]
    pub jitter: Duration,
    /// Probability of independent loss: 1% or 0.01
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub loss: f64,
    /// Bursty loss in addition: probabilities to enter and to leave the bad state per frame, and of loss in
    /// it
    #[arg(long, value_name = "ENTER,LEAVE,LOSS", value_parser = bursts)]
    pub bursts: Option<Gilbert>,
    /// Probability that a frame is delayed, so that later ones overtake it
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub reorder: f64,
    /// ... by a random time up to this
    #[arg(long = "reorder-by", value_name = "TIME", value_parser = time, default_value = "1ms")]
    pub reorder_by: Duration,
    /// ... and at most until a random number of frames up to this has overtaken it
    #[arg(long, value_name = "FRAMES", default_value_t = u32::MAX)]
    pub depth: u32,
    /// Probability that a frame is duplicated
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub duplicate: f64,
    /// Probability that one bit of a frame is flipped
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub corrupt: f64,
    /// Share of these frames whose TCP checksum is repaired, so that only MPA's CRC detects the error
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub repair: f64,
    /// Blackouts, in which no frame passes: start of the first, length, and period
    #[arg(long, value_name = "FROM,LENGTH,EVERY", value_parser = blackout)]
    pub blackout: Option<Blackout>,
    /// Drop larger IP packets and report it to their senders
    #[arg(long = "path-mtu", value_name = "BYTES")]
    pub path_mtu: Option<u16>,
    /// ... beginning at this time after the start of the hop
    #[arg(long = "path-mtu-from", value_name = "TIME", value_parser = time, default_value = "0us")]
    pub path_mtu_from: Duration,
    /// ... without reporting it to their senders
    #[arg(long = "filter-icmp")]
    pub filter_icmp: bool,
    /// Probability that a TCP segment is split
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub split: f64,
    /// Apply all faults but line, queue and delay only to frames from this end
    #[arg(long, value_name = "END")]
    pub only: Option<End>,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Never sleep: precise timing at the cost of one CPU
    #[arg(long)]
    pub spin: bool,
}

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum End {
    /// The first.
    A,
    /// The second.
    B,
}

impl HopArgs {
    /// The faults from A to B, and back.
    pub fn faults(&self) -> [Faults; 2] {
        let line = Faults {
            rate_bytes: self.rate.map(|bits| bits / 8),
            queue_frames: self.queue,
            delay: self.rtt / 2,
            jitter: self.jitter,
            mark_frames: self.mark.unwrap_or(usize::MAX),
            ..Faults::default()
        };
        let from = Instant::ZERO + self.path_mtu_from;
        let mtu = self.path_mtu.map(|bytes| PathMtu { from, bytes, icmp: !self.filter_icmp });
        // Joining requires segments that are not full, which bulk data lacks.
        let recut = Recut { split: self.split, join: 0.0, wait: Duration::ZERO, most_bytes: 0 };
        let all = Faults {
            loss: self.loss,
            bursts: self.bursts,
            reorder: self.reorder,
            reorder_by: self.reorder_by,
            reorder_depth: self.depth,
            duplicate: self.duplicate,
            corrupt: self.corrupt,
            repair_checksum: self.repair,
            blackout: self.blackout,
            mtu,
            recut: (self.split > 0.0).then_some(recut),
            ..line
        };
        [End::A, End::B].map(|end| if self.only.is_none_or(|only| only == end) { all } else { line })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(line: &str) -> Result<HopArgs, clap::Error> {
        HopArgs::try_parse_from(["xwarp-hop", "xa", "xb"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn the_command_line_is_consistent() {
        HopArgs::command().debug_assert();
    }

    #[test]
    fn a_line_becomes_the_faults_of_both_directions() {
        let args =
            parse("--rate 100M --rtt 50ms --loss 0.1% --bursts 1%,0.5,1 --reorder 5% --depth 3 --queue 10")
                .unwrap();
        let [there, back] = args.faults();
        assert_eq!(there, back);
        assert_eq!(there.rate_bytes, Some(12_500_000));
        assert_eq!((there.delay, there.queue_frames), (Duration::from_millis(25), 10));
        assert!((there.loss - 0.001).abs() < 1e-12);
        assert_eq!(there.bursts, Some(Gilbert { enter: 0.01, leave: 0.5, loss: 1.0 }));
        assert_eq!(there.reorder_depth, 3);
        assert_eq!(
            (there.mtu, there.recut, there.blackout, there.mark_frames),
            (None, None, None, usize::MAX)
        );
    }

    #[test]
    fn options_of_the_path_become_faults() {
        let line =
            "--mark 9 --blackout 1s,20ms,300ms --path-mtu 1300 --path-mtu-from 5ms --filter-icmp --split 10%";
        let [there, _] = parse(line).unwrap().faults();
        assert_eq!(there.mark_frames, 9);
        let from = Instant::ZERO + Duration::from_millis(5);
        assert_eq!(there.mtu, Some(PathMtu { from, bytes: 1300, icmp: false }));
        let dark = there.blackout.unwrap();
        assert_eq!((dark.length, dark.every), (Duration::from_millis(20), Some(Duration::from_millis(300))));
        let recut = there.recut.unwrap();
        assert!((recut.split - 0.1).abs() < 1e-12, "{recut:?}");
    }

    #[test]
    fn only_limits_faults_but_not_the_line_to_one_end() {
        let [there, back] = parse("--rate 1G --loss 1 --corrupt 1% --only b").unwrap().faults();
        assert_eq!(there, Faults { loss: 0.0, corrupt: 0.0, reorder_by: Duration::ZERO, ..back });
        assert_eq!(there.rate_bytes, Some(125_000_000));
    }

    #[test]
    fn invalid_options_are_rejected() {
        for line in [
            "--loss 101%",
            "--loss x",
            "--rtt 5",
            "--rate 5T",
            "--rate 0",
            "--bursts 1,1",
            "--only c",
            "--blackout 1s,1s",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
