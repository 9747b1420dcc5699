//! Bulk transfer in one direction at the highest rate.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    cpu,
    options::Amount,
    order::Receipt,
    progress::Progress,
    report::{BandwidthRow, CpuUse},
    stats::Completions,
};

/// Minimum bytes of a window for the peak rate. A write returns when the socket buffer has taken the bytes,
/// so a shorter window would measure the buffers instead of the wire.
const PEAK_WINDOW_BYTES: u64 = 32 << 20;

/// The client: sends messages, and stops the clock when the server's receipt arrives.
pub(super) fn send(mut stream: TcpStream, bytes: u64, amount: Amount) -> Result<BandwidthRow> {
    let message = vec![0x5a_u8; bytes as usize];
    let (limit, until) = match amount {
        Amount::Iterations(n) => (n, None),
        Amount::Duration(time) => (u64::MAX, Some(time)),
    };
    let mut completions = Completions::with_capacity(1 << 16);
    let mut progress = Progress::new(amount.units(), bytes, false);
    let cpu_before = cpu::process_time();
    let start = Instant::now();
    let mut sent = 0;
    while sent < limit {
        stream.write_all(&message).context("sending to the server")?;
        sent += 1;
        let now = Instant::now();
        let elapsed = now - start;
        completions.mark(sent, elapsed.as_nanos() as u64);
        progress.at(now, if until.is_some() { elapsed.as_millis() as u64 } else { sent }, sent);
        if until.is_some_and(|until| elapsed >= until) {
            break;
        }
    }
    stream.shutdown(Shutdown::Write)?;
    let mut receipt = [0; Receipt::LEN];
    stream.read_exact(&mut receipt).context("waiting for the server's receipt")?;
    let elapsed = start.elapsed().as_secs_f64();
    let local = cpu::process_time().saturating_sub(cpu_before).as_secs_f64();
    let Receipt { taken, cpu_ns } = Receipt::parse(receipt);
    ensure!(taken == sent * bytes, "the server received {taken} of {} bytes", sent * bytes);
    let total = (sent * bytes) as f64;
    let remote = Duration::from_nanos(cpu_ns).as_secs_f64();
    Ok(BandwidthRow {
        bytes,
        iterations: sent,
        peak: completions.peak(PEAK_WINDOW_BYTES.div_ceil(bytes.max(1))).map(|rate| rate * bytes as f64),
        average: total / elapsed,
        cpu: Some(CpuUse::of(local, Some(remote), total, elapsed)),
    })
}

/// The server: receives until the end of the stream, with a buffer of the message size (at least 64 KiB, as a
/// sensible receiver has).
pub(super) fn receive(mut stream: TcpStream, bytes: u64) -> Result<()> {
    let mut buffer = vec![0; (bytes as usize).clamp(64 << 10, 4 << 20)];
    let before = cpu::process_time();
    let mut taken = 0_u64;
    loop {
        let n = stream.read(&mut buffer).context("receiving from the client")?;
        if n == 0 {
            break;
        }
        taken += n as u64;
    }
    let spent = cpu::process_time().saturating_sub(before);
    let receipt = Receipt { taken, cpu_ns: spent.as_nanos() as u64 };
    stream.write_all(&receipt.emit()).context("sending the receipt")
}
