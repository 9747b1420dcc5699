//! [`Rounds`]: verification of RDMA Writes, which a receiver is not notified of. After as many Writes as
//! there are slots, the writer sends a Send on the same queue pair. It is delivered after those Writes (RFC
//! 5040 section 5.5), so the receiver finds all of them placed, checks every byte, and replies. The writer
//! reuses the slots only after this reply.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use xwarp_verbs::{Payload, RecvRequest, WorkRequest};

use super::links::Links;

/// `wr_id` of the Sends of rounds.
const OWN_ID: u64 = u64::MAX;
/// Receives for the Sends of rounds on each queue pair: one for the peer's Written, one for its Checked.
const RECEIVES: usize = 2;
/// Bytes of such a Send: its kind, first message, number of messages; each 64 bits, little endian.
const WORD_BYTES: usize = 24;

/// The content of a round's Send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// From the writer: these messages have been written.
    Written {
        /// The first message.
        first: u64,
        /// Number of messages.
        count: u64,
    },
    /// From the receiver: all messages of the last `Written` have been checked.
    Checked,
}

#[derive(Debug, Clone, Copy, Default)]
struct Round {
    first: u64,
    written: u64,
    /// The `Written` of this round has been sent and not answered.
    closed: bool,
}

/// The rounds of all queue pairs; empty when nothing is verified.
#[derive(Debug, Default)]
pub struct Rounds {
    rounds: HashMap<u32, Round>,
    /// Messages in a round.
    slots: u64,
}

impl Rounds {
    /// Creates no rounds: messages may be written at any time.
    pub fn none() -> Self {
        Self::default()
    }

    /// Creates a round on every queue pair.
    pub fn begin(links: &Links) -> Self {
        let mut rounds = HashMap::new();
        for number in 0..links.list.len() as u32 {
            rounds.insert(number, Round::default());
        }
        Self { rounds, slots: u64::from(links.layout.slots) }
    }

    /// Posts the receives for the Sends of rounds on all queue pairs, once for the life of the connections.
    pub fn post_receives(links: &Links) -> Result<()> {
        for number in 0..links.list.len() as u32 {
            for slot in 0..RECEIVES {
                Self::post_receive(links, number, slot as u64)?;
            }
        }
        Ok(())
    }

    fn post_receive(links: &Links, number: u32, slot: u64) -> Result<()> {
        let at = links.layout.words(number) + slot as usize * WORD_BYTES;
        let place = [links.sink.sge(at, WORD_BYTES)];
        let qp = &links.list[number as usize].qp;
        qp.post_recv(&RecvRequest::new(slot, &place)).context("posting a receive for a round's word")
    }

    /// Reads the `Word` of a completed receive and posts the receive again.
    pub fn read(links: &Links, number: u32, slot: u64) -> Result<Word> {
        let bytes = links.sink.to_vec(links.layout.words(number) + slot as usize * WORD_BYTES, WORD_BYTES)?;
        Self::post_receive(links, number, slot)?;
        let word = |at: usize| {
            bytes.get(at * 8..at * 8 + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
        };
        Ok(if word(0) == 0 { Word::Written { first: word(1), count: word(2) } } else { Word::Checked })
    }

    /// Sends a `Word` on a queue pair.
    pub fn send(links: &Links, number: u32, word: Word) -> Result<()> {
        let (kind, first, count) = match word {
            Word::Written { first, count } => (0_u64, first, count),
            Word::Checked => (1, 0, 0),
        };
        let mut bytes = [0; WORD_BYTES];
        for (to, value) in bytes.chunks_mut(8).zip([kind, first, count]) {
            to.copy_from_slice(&value.to_le_bytes());
        }
        let request = WorkRequest::send(OWN_ID, Payload::Inline(&bytes));
        links.list[number as usize].qp.post_send(&request).context("sending a round's word")
    }

    /// Whether a completion belongs to a round's Send and not to a message.
    pub fn is_own(wr_id: u64) -> bool {
        wr_id == OWN_ID
    }

    /// Number of messages that may still be written in this queue pair's round.
    pub fn room(&self, number: u32) -> u64 {
        match self.rounds.get(&number) {
            None => u64::MAX,
            Some(round) if round.closed => 0,
            Some(round) => self.slots - round.written,
        }
    }

    /// Records that `count` messages were written.
    pub fn wrote(&mut self, number: u32, count: u64) {
        if let Some(round) = self.rounds.get_mut(&number) {
            round.written += count;
        }
    }

    /// Ends the round when it is full, or with `flush` when it is not empty. Returns whether it did.
    pub fn close_if_full(&mut self, links: &Links, number: u32, flush: bool) -> Result<bool> {
        let Some(round) = self.rounds.get_mut(&number) else { return Ok(false) };
        let enough = round.written == self.slots || flush && round.written > 0;
        if round.closed || !enough {
            return Ok(false);
        }
        round.closed = true;
        Self::send(links, number, Word::Written { first: round.first, count: round.written })?;
        Ok(true)
    }

    /// Records that the peer checked the round, and begins the next.
    pub fn checked(&mut self, number: u32) {
        if let Some(round) = self.rounds.get_mut(&number) {
            *round = Round { first: round.first + round.written, written: 0, closed: false };
        }
    }

    /// Whether all written messages have been checked.
    pub fn is_settled(&self, number: u32) -> bool {
        self.rounds.get(&number).is_none_or(|round| round.written == 0)
    }
}
