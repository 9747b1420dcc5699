//! The command line of the hop.
#![allow(clippy::doc_markdown, reason = "these comments are the help text, where backticks would be printed")]

use std::time::Duration;

use clap::{Parser, ValueEnum};
use xwarp_tcp::{
    sim::{Blackout, Faults, Gilbert, PathMtu, Recut},
    time::Instant,
};

/// A wire with faults: carries every frame between two interfaces, as the simulator's model of a wire says.
///
/// Ends on an interrupt and tells what it did, as JSON. Both directions have the same faults unless --only is given.
/// The offloads of the interfaces at both ends must be off, so that frames are what would be on a cable:
/// 'ci/lab up --hop' sees to that.
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarp-hop")]
pub struct HopArgs {
    /// The interface towards A
    pub a: String,
    /// The interface towards B
    pub b: String,
    /// Line rate of each direction in bits per second, counted from the Ethernet header on: 100M, 1G [default: none]
    #[arg(long, value_name = "BITS", value_parser = rate)]
    pub rate: Option<u64>,
    /// Frames that may wait for the line; more are dropped at the tail
    #[arg(long, value_name = "FRAMES", default_value_t = 1000)]
    pub queue: usize,
    /// So many frames waiting make the next one carry Congestion Experienced, if it is ECN-capable [default: none]
    #[arg(long, value_name = "FRAMES")]
    pub mark: Option<usize>,
    /// Time that the hop adds to a round trip, half of it in each direction: 50ms, 10us
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "0us")]
    pub rtt: Duration,
    /// Additional random delay, at most; order is kept
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "0us")]
    pub jitter: Duration,
    /// Independent loss: 1% or 0.01
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub loss: f64,
    /// Bursty loss, on top: the chances to enter and to leave the bad state per frame, and of loss in it
    #[arg(long, value_name = "ENTER,LEAVE,LOSS", value_parser = bursts)]
    pub bursts: Option<Gilbert>,
    /// A frame is held back, so that later ones overtake it
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub reorder: f64,
    /// ... for a random time up to this
    #[arg(long = "reorder-by", value_name = "TIME", value_parser = time, default_value = "1ms")]
    pub reorder_by: Duration,
    /// ... and until a random number of frames up to this have overtaken it, if that comes first
    #[arg(long, value_name = "FRAMES", default_value_t = u32::MAX)]
    pub depth: u32,
    /// A frame arrives twice
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub duplicate: f64,
    /// One bit of a frame flips
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub corrupt: f64,
    /// Of these frames, so many have their TCP checksum repaired: only MPA's CRC can tell
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub repair: f64,
    /// Nothing passes: the first time from the start of the hop, for how long, and from one beginning to the next
    #[arg(long, value_name = "FROM,LENGTH,EVERY", value_parser = blackout)]
    pub blackout: Option<Blackout>,
    /// Larger IP packets do not pass, and their senders are told
    #[arg(long = "path-mtu", value_name = "BYTES")]
    pub path_mtu: Option<u16>,
    /// ... from so long after the start of the hop on
    #[arg(long = "path-mtu-from", value_name = "TIME", value_parser = time, default_value = "0us")]
    pub path_mtu_from: Duration,
    /// ... and their senders are not told
    #[arg(long = "filter-icmp")]
    pub filter_icmp: bool,
    /// A TCP segment is cut into pieces
    #[arg(long, value_name = "CHANCE", value_parser = chance, default_value = "0")]
    pub split: f64,
    /// All but line, queue and delay only for what this end sends
    #[arg(long, value_name = "END")]
    pub only: Option<End>,
    /// Seed of all randomness
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Never sleep: frames leave on time, for one CPU
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
        // Joining takes segments that are not full, which bulk data has not.
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

/// A number and what follows it.
fn number(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    Some((digits.parse().ok()?, unit))
}

/// Bits per second; K, M, G are powers of 1000.
pub fn rate(text: &str) -> Result<u64, String> {
    let factor = |unit| match unit {
        "" => Some(1.0),
        "K" | "k" => Some(1e3),
        "M" | "m" => Some(1e6),
        "G" | "g" => Some(1e9),
        _ => None,
    };
    number(text)
        .and_then(|(value, unit)| Some(value * factor(unit)?))
        .filter(|bits| *bits >= 8.0)
        .map(|bits| bits as u64)
        .ok_or_else(|| format!("'{text}' is not a rate like 100M"))
}

/// A time with its unit.
pub fn time(text: &str) -> Result<Duration, String> {
    let seconds = |unit| match unit {
        "ns" => Some(1e-9),
        "us" => Some(1e-6),
        "ms" => Some(1e-3),
        "s" => Some(1.0),
        _ => None,
    };
    number(text)
        .and_then(|(value, unit)| Duration::try_from_secs_f64(value * seconds(unit)?).ok())
        .ok_or_else(|| format!("'{text}' is not a time like 50ms"))
}

/// From 0 to 1, or in percent.
pub fn chance(text: &str) -> Result<f64, String> {
    let chance = match number(text) {
        Some((value, "%")) => value / 100.0,
        Some((value, "")) => value,
        _ => f64::NAN,
    };
    if (0.0..=1.0).contains(&chance) { Ok(chance) } else { Err(format!("'{text}' is not a chance like 1%")) }
}

fn bursts(text: &str) -> Result<Gilbert, String> {
    let parts: Vec<f64> = text.split(',').map(chance).collect::<Result<_, _>>()?;
    match parts[..] {
        [enter, leave, loss] => Ok(Gilbert { enter, leave, loss }),
        _ => Err(format!("'{text}' is not three chances")),
    }
}

fn blackout(text: &str) -> Result<Blackout, String> {
    let parts: Vec<Duration> = text.split(',').map(time).collect::<Result<_, _>>()?;
    match parts[..] {
        [from, length, every] => Ok(Blackout { from: Instant::ZERO + from, length, every: Some(every) }),
        _ => Err(format!("'{text}' is not three times")),
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
    fn what_happens_on_the_way_becomes_faults_too() {
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
    fn one_end_alone_can_have_the_faults_but_both_have_the_line() {
        let [there, back] = parse("--rate 1G --loss 1 --corrupt 1% --only b").unwrap().faults();
        assert_eq!(there, Faults { loss: 0.0, corrupt: 0.0, reorder_by: Duration::ZERO, ..back });
        assert_eq!(there.rate_bytes, Some(125_000_000));
    }

    #[test]
    fn nonsense_is_refused() {
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
