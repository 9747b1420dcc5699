//! Ping-pong of one message, which fits one frame; the result is half of the round-trip time.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::{
    end::{End, Wait},
    frame::Kind,
    meet::Asked,
    wire::Wire,
};
use crate::{
    options::Amount,
    order::Receipt,
    progress::Progress,
    report::{DurationRow, LatencyRow, Row},
    stats::{Latencies, Summary},
};

/// The client: sends a message and waits for its echo.
pub(super) fn ask<W: Wire>(end: &mut End<W>, bytes: u64, amount: Amount) -> Result<Row> {
    ensure!(
        bytes <= end.payload_room() as u64,
        "raw_lat sends each message in one frame, which takes {} bytes at this MTU",
        end.payload_room()
    );
    let message = vec![0x5a_u8; bytes as usize];
    let mut answer = message.clone();
    let mut progress = Progress::new(amount.units(), bytes, false);
    let mut latencies = Latencies::new()?;
    let mut samples = Vec::with_capacity(if let Amount::Iterations(n) = amount { n as usize } else { 0 });
    let begin = Instant::now();
    let mut done = 0_u64;
    loop {
        let start = Instant::now();
        exchange(end, done as u32, &message, &mut answer)?;
        done += 1;
        let now = Instant::now();
        match amount {
            Amount::Iterations(n) => {
                samples.push((now - start).as_nanos() as f64 / 2000.0);
                progress.at(now, done, done);
                if done == n {
                    let summary = Summary::of(&samples).context("no message was measured")?;
                    return Ok(Row::Latency(LatencyRow { bytes, iterations: n, summary }));
                }
            }
            Amount::Duration(time) => {
                latencies.record(now - start);
                let elapsed = now - begin;
                progress.at(now, elapsed.as_millis() as u64, done);
                if elapsed >= time {
                    let summary = latencies.summary(2.0).context("no message was measured")?;
                    let latency = LatencyRow { bytes, iterations: done, summary };
                    let transactions = done as f64 / elapsed.as_secs_f64();
                    return Ok(Row::Duration(DurationRow { latency, transactions }));
                }
            }
        }
    }
}

/// Sends a message and waits for its echo. A message is retransmitted when it or its echo seems to be lost.
fn exchange<W: Wire>(end: &mut End<W>, number: u32, message: &[u8], answer: &mut [u8]) -> Result<()> {
    ensure!(end.submit(Kind::Data, number, message), "there is no free frame to send");
    end.flush();
    let mut arrived = false;
    loop {
        let heard = end.receive(|head, payload| {
            if (head.kind, head.number) == (Kind::Data, number) {
                copy(answer, &payload);
                arrived = true;
            }
        });
        if arrived {
            return Ok(());
        }
        if heard == 0 && end.wait()? == Wait::Silent {
            ensure!(end.submit(Kind::Data, number, message), "there is no free frame to send");
            end.flush();
        }
    }
}

/// The server: sends back each message from its own memory until the client has finished.
pub(super) fn answer<W: Wire>(end: &mut End<W>, bytes: u64) -> Result<Receipt> {
    let mut message = vec![0; bytes as usize];
    let mut asked = Asked::default();
    loop {
        let mut arrived = None;
        let heard = end.receive(|head, payload| match head.kind {
            Kind::Data => {
                copy(&mut message, &payload);
                arrived = Some(head.number);
            }
            _ => asked.note(head),
        });
        if let Some(number) = arrived {
            ensure!(end.submit(Kind::Data, number, &message), "there is no free frame to send");
            end.flush();
        }
        if asked.answer(end)? {
            return Ok(Receipt::default());
        }
        if heard == 0 {
            end.wait()?;
        }
    }
}

fn copy(to: &mut [u8], pieces: &[&[u8]]) {
    let mut rest = to;
    for piece in pieces {
        let (now, later) = rest.split_at_mut(piece.len().min(rest.len()));
        now.copy_from_slice(&piece[..now.len()]);
        rest = later;
    }
}
