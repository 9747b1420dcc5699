//! Nanoseconds for 1460 bytes (or the lengths given): `memcpy` beside the copy that registered memory gets, the CRC32c
//! alone, and both; also between MPA markers, in several passes and in one.
//!
//!     cargo run --release -p xwarp-tcp --example copy_bench -- 64 508 1460 3440
//!
//! The contenders run in turn within each round; the median of all rounds is printed, and the spread
//! (10th to 90th percentile) of the ratio to `memcpy` of the same round.
#![allow(unsafe_code, clippy::print_stdout, reason = "a bench of the unsafe primitives that prints")]

use std::{hint::black_box, time::Instant};

use xwarp_tcp::copy::{self, GappedMut, Gaps, Sum};

/// Rounds of all contenders.
const ROUNDS: usize = 401;
/// Bytes that one measurement of a contender copies.
const BYTES: usize = 4 << 20;
/// Buffers that are used in turn; together they fit into a first-level cache.
const BUFFERS: usize = 4;
/// Bytes from one buffer to the next.
const STRIDE: usize = 4096;

/// Called like a function of a library, so that no contender is optimised for the one length.
type Contender = fn(&mut [u8], &mut [u8]);

#[inline(never)]
fn memcpy(from: &mut [u8], to: &mut [u8]) {
    to.copy_from_slice(from);
}

#[inline(never)]
fn read(from: &mut [u8], to: &mut [u8]) {
    // SAFETY: two slices of the same length, which do not overlap.
    unsafe { copy::read(from.as_ptr(), to) }.expect("the buffers are mapped");
}

#[inline(never)]
fn write(from: &mut [u8], to: &mut [u8]) {
    // SAFETY: two slices of the same length, which do not overlap.
    unsafe { copy::write(to.as_mut_ptr(), from) }.expect("the buffers are mapped");
}

#[inline(never)]
fn crate_crc(from: &mut [u8], _: &mut [u8]) {
    black_box(crc32c::crc32c(from));
}

#[inline(never)]
fn crc(from: &mut [u8], _: &mut [u8]) {
    black_box(copy::crc32c(0, from));
}

#[inline(never)]
fn read_then_crate_crc(from: &mut [u8], to: &mut [u8]) {
    read(from, to);
    black_box(crc32c::crc32c(to));
}

#[inline(never)]
fn read_then_crc(from: &mut [u8], to: &mut [u8]) {
    read(from, to);
    black_box(copy::crc32c(0, to));
}

/// Copies as many bytes as `to` has outside of markers, the first of which lies in its middle.
fn read_marked(from: &mut [u8], to: &mut [u8], sum: Sum) -> Sum {
    let gaps = Gaps { first: to.len() / 2 % 512, between: 508, len: 4 };
    let len = gaps.bytes_in(to.len());
    let mut space = GappedMut { bytes: to, len, gaps, sum };
    // SAFETY: `from` is as long as `to`, and they do not overlap.
    unsafe { copy::read_gapped(from.as_ptr(), &mut space) }.expect("the buffers are mapped");
    space.sum
}

#[inline(never)]
fn read_marked_then_crc(from: &mut [u8], to: &mut [u8]) {
    read_marked(from, to, Sum::Apart);
    for at in (to.len() / 2 % 512..to.len().saturating_sub(4)).step_by(512) {
        to[at..at + 4].copy_from_slice(&(at as u32).to_be_bytes());
    }
    black_box(copy::crc32c(0, to));
}

#[inline(never)]
fn read_marked_with_crc(from: &mut [u8], to: &mut [u8]) {
    black_box(read_marked(from, to, Sum::Wanted { crc: 0, number: 0 }));
}

const CONTENDERS: [(&str, Contender); 9] = [
    ("memcpy", memcpy),
    ("copy::read", read),
    ("copy::write", write),
    ("crate crc32c", crate_crc),
    ("copy::crc32c", crc),
    ("read, then crate crc32c", read_then_crate_crc),
    ("read, then copy::crc32c", read_then_crc),
    ("markers, then CRC", read_marked_then_crc),
    ("markers and CRC at once", read_marked_with_crc),
];

/// Nanoseconds per call. Source and destination lie at different distances from a cache line, as payloads do.
fn measure(contender: Contender, len: usize, from: &mut [u8], to: &mut [u8]) -> f64 {
    let calls = (BYTES / len.max(1)).clamp(1, 100_000);
    let begin = Instant::now();
    for call in 0..calls {
        let at = call % BUFFERS * STRIDE;
        let source = black_box(&mut from[at + 8..at + 8 + len]);
        contender(source, black_box(&mut to[at + 52..at + 52 + len]));
    }
    begin.elapsed().as_nanos() as f64 / calls as f64
}

fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}

fn main() {
    let lengths: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let lengths = if lengths.is_empty() { vec![1460] } else { lengths };
    for len in lengths {
        let room = (BUFFERS * STRIDE).max(len) + STRIDE + len;
        let (mut from, mut to) = (vec![1u8; room], vec![2u8; room]);
        let mut times = vec![Vec::new(); CONTENDERS.len()];
        for round in 0..ROUNDS {
            // The first subject changes from round to round.
            for turn in 0..CONTENDERS.len() {
                let who = (round + turn) % CONTENDERS.len();
                times[who].push(measure(CONTENDERS[who].1, len, &mut from, &mut to));
            }
        }
        for (who, (name, _)) in CONTENDERS.iter().enumerate() {
            let mut ratios: Vec<f64> =
                times[who].iter().zip(&times[0]).map(|(own, memcpy)| own / memcpy).collect();
            println!(
                "{len:6} bytes  {name:24} {:8.2} ns  ratio to memcpy {:.3} ({:.3} to {:.3})",
                percentile(&mut times[who].clone(), 50),
                percentile(&mut ratios, 50),
                percentile(&mut ratios, 10),
                percentile(&mut ratios, 90),
            );
        }
    }
}
