//! Ping-pong of one message; the result is half of the round-trip time.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use super::{read_message, write_message};
use crate::{
    options::Amount,
    progress::Progress,
    report::{DurationRow, LatencyRow, Row},
    stats::{Latencies, Summary},
};

/// The client: sends a message and waits for its echo.
pub(super) fn ask(mut stream: TcpStream, bytes: u64, polling: bool, amount: Amount) -> Result<Row> {
    stream.set_nonblocking(polling)?;
    let message = vec![0x5a_u8; bytes as usize];
    let mut answer = message.clone();
    match amount {
        Amount::Iterations(n) => {
            let mut samples = Vec::with_capacity(n as usize);
            let mut progress = Progress::new(n, bytes, false);
            for done in 1..=n {
                let start = Instant::now();
                exchange(&mut stream, &message, &mut answer, polling)?;
                let now = Instant::now();
                samples.push((now - start).as_nanos() as f64 / 2000.0);
                progress.at(now, done, done);
            }
            let summary = Summary::of(&samples).context("no message was measured")?;
            Ok(Row::Latency(LatencyRow { bytes, iterations: n, summary }))
        }
        Amount::Duration(time) => timed(stream, &message, answer, polling, time),
    }
}

fn timed(
    mut stream: TcpStream,
    message: &[u8],
    mut answer: Vec<u8>,
    polling: bool,
    time: Duration,
) -> Result<Row> {
    let bytes = message.len() as u64;
    let mut progress = Progress::new(time.as_millis() as u64, bytes, false);
    let mut latencies = Latencies::new()?;
    let begin = Instant::now();
    let mut done = 0_u64;
    let elapsed = loop {
        let start = Instant::now();
        exchange(&mut stream, message, &mut answer, polling)?;
        done += 1;
        let now = Instant::now();
        latencies.record(now - start);
        progress.at(now, (now - begin).as_millis() as u64, done);
        if now - begin >= time {
            break (now - begin).as_secs_f64();
        }
    };
    let summary = latencies.summary(2.0).context("no message was measured")?;
    let latency = LatencyRow { bytes, iterations: done, summary };
    Ok(Row::Duration(DurationRow { latency, transactions: done as f64 / elapsed }))
}

fn exchange(stream: &mut TcpStream, message: &[u8], answer: &mut [u8], polling: bool) -> Result<()> {
    write_message(stream, message)?;
    ensure!(read_message(stream, answer, polling)?, "the server closed the connection");
    Ok(())
}

/// The server: echoes each message until the client closes.
pub(super) fn answer(mut stream: TcpStream, bytes: u64, polling: bool) -> Result<()> {
    stream.set_nonblocking(polling)?;
    let mut message = vec![0; bytes as usize];
    while read_message(&mut stream, &mut message, polling)? {
        write_message(&mut stream, &message)?;
    }
    Ok(())
}
