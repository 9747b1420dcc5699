//! Bulk transfer in one direction at the highest rate.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{
    end::{End, Wait},
    frame::Kind,
    meet::Asked,
    wire::Wire,
};
use crate::{
    cpu,
    options::Amount,
    order::Receipt,
    progress::Progress,
    report::{BandwidthRow, CpuUse},
    stats::Completions,
};

/// Data frames that one acknowledgement answers.
const FRAMES_PER_ACK: u32 = 4;

/// Frames for one kick. The kernel sends at most as many in one system call.
const BURST: u32 = 32;

/// The client's result.
pub(super) struct Transfer {
    /// Size of a message.
    bytes: u64,
    /// Bytes of all frames.
    sent: u64,
    start: Instant,
    cpu_before: Duration,
    completions: Completions,
}

impl Transfer {
    /// Bytes sent.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    fn messages(&self) -> u64 {
        self.sent / self.bytes.max(1)
    }

    /// The row, now that the receipt has arrived.
    pub(super) fn row(&self, receipt: Receipt) -> BandwidthRow {
        let elapsed = self.start.elapsed().as_secs_f64();
        let local = cpu::process_time().saturating_sub(self.cpu_before).as_secs_f64();
        let remote = Duration::from_nanos(receipt.cpu_ns).as_secs_f64();
        let taken = receipt.taken as f64;
        let peak = self.completions.peak(PEAK_WINDOW_BYTES.div_ceil(self.bytes.max(1)));
        BandwidthRow {
            bytes: self.bytes,
            iterations: self.messages(),
            peak: peak.map(|rate| rate * self.bytes as f64),
            average: taken / elapsed,
            cpu: Some(CpuUse::of(local, Some(remote), taken, elapsed)),
        }
    }
}

/// Minimum bytes of a window for the peak rate, so that it spans many windows of the flow control.
const PEAK_WINDOW_BYTES: u64 = 4 << 20;

/// The frames in flight.
struct Flight {
    /// Number of the next frame.
    next: u32,
    /// All frames below this number have been received or lost.
    acknowledged: u32,
    most: u32,
}

impl Flight {
    fn has_room(&self) -> bool {
        self.next.wrapping_sub(self.acknowledged) < self.most
    }

    fn acknowledge(&mut self, number: u32) {
        if number.wrapping_sub(self.acknowledged) <= self.next.wrapping_sub(self.acknowledged) {
            self.acknowledged = number;
        }
    }
}

/// The client: sends messages for a time, or a number of them. Messages that are longer than a frame make a stream of
/// full frames, as those of a transport do; of shorter ones, each is a frame.
pub(super) fn send<W: Wire>(end: &mut End<W>, bytes: u64, amount: Amount, window: u32) -> Result<Transfer> {
    let length = (bytes as usize).min(end.payload_room());
    // The last frame of a message continues with the start of the next one.
    let message = vec![0x5a_u8; bytes as usize + length];
    let limit = if let Amount::Iterations(n) = amount { n * bytes } else { u64::MAX };
    let mut flight = Flight { next: 0, acknowledged: 0, most: window.min(end.most_in_flight()) };
    let mut progress = Progress::new(amount.units(), bytes, false);
    let mut transfer = Transfer {
        bytes,
        sent: 0,
        cpu_before: cpu::process_time(),
        start: Instant::now(),
        completions: Completions::with_capacity(1 << 16),
    };
    loop {
        let heard = end.receive(|head, _| {
            if head.kind == Kind::Ack {
                flight.acknowledge(head.number);
            }
        });
        let (mut burst, before) = (0, transfer.messages());
        while burst < BURST && flight.has_room() && transfer.sent < limit {
            let at = (transfer.sent % bytes) as usize;
            let now = length.min((limit - transfer.sent) as usize);
            if !end.submit(Kind::Data, flight.next, &message[at..at + now]) {
                break;
            }
            flight.next = flight.next.wrapping_add(1);
            burst += 1;
            transfer.sent += now as u64;
        }
        if burst > 0 {
            end.flush();
        } else if heard == 0 && end.wait()? == Wait::Silent {
            end.submit(Kind::Probe, flight.next, &[]);
            end.flush();
        }
        let messages = transfer.messages();
        if messages > before {
            let now = Instant::now();
            let elapsed = now - transfer.start;
            transfer.completions.mark(messages, elapsed.as_nanos() as u64);
            let done = match amount {
                Amount::Iterations(_) => messages,
                Amount::Duration(_) => elapsed.as_millis() as u64,
            };
            progress.at(now, done, messages);
            if transfer.sent >= limit || matches!(amount, Amount::Duration(time) if elapsed >= time) {
                return Ok(transfer);
            }
        }
    }
}

/// The server: receives until the client has finished. Each payload is copied to its place in the message.
pub(super) fn receive<W: Wire>(end: &mut End<W>, bytes: u64) -> Result<Receipt> {
    let mut message = vec![0_u8; bytes as usize + end.payload_room()];
    let before = cpu::process_time();
    let (mut at, mut taken) = (0, 0_u64);
    let (mut expected, mut unanswered, mut answer) = (0_u32, 0, Vec::with_capacity(64));
    let mut asked = Asked::default();
    loop {
        let heard = end.receive(|head, payload| match head.kind {
            Kind::Data => {
                for piece in &payload {
                    if let Some(to) = message.get_mut(at..at + piece.len()) {
                        to.copy_from_slice(piece);
                        at += piece.len();
                    }
                }
                at %= bytes.max(1) as usize;
                taken += head.len as u64;
                expected = head.number.wrapping_add(1);
                unanswered += 1;
                if unanswered == FRAMES_PER_ACK {
                    unanswered = 0;
                    answer.push(expected);
                }
            }
            // The probe has the number of the next frame: all before it have arrived or are lost.
            Kind::Probe => {
                unanswered = 0;
                answer.push(head.number);
            }
            _ => asked.note(head),
        });
        let answering = !answer.is_empty();
        for number in answer.drain(..) {
            // A lost acknowledgement is made up for by the next one.
            end.submit(Kind::Ack, number, &[]);
        }
        if answering {
            end.flush();
        }
        if asked.answer(end)? {
            break;
        }
        if heard == 0 {
            end.wait()?;
        }
    }
    let spent = cpu::process_time().saturating_sub(before);
    Ok(Receipt { taken, cpu_ns: spent.as_nanos() as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_wild_acknowledgements_are_ignored() {
        let mut flight = Flight { next: 5, acknowledged: u32::MAX - 1, most: 8 };
        assert!(flight.has_room());
        flight.next = 6;
        assert!(!flight.has_room());
        flight.acknowledge(100);
        flight.acknowledge(u32::MAX - 2);
        assert!(!flight.has_room(), "neither was ever in flight");
        flight.acknowledge(2);
        assert!(flight.has_room());
        assert_eq!(flight.acknowledged, 2);
    }
}
