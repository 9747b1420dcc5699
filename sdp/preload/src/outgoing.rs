//! Long pieces in transit to the network, in registered memory from which the peer reads them by RDMA.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    time::{Duration, Instant},
};

use xwarp_sdp::{SdpStream, Sending};
use xwarp_verbs::{Memory, Pages};

/// Shorter pieces are sent in messages. A full segment on the loopback is longer.
pub const ADVERTISED_BYTES: usize = 32 << 10;
/// Bytes of a piece.
pub const PIECE_BYTES: usize = 512 << 10;
/// Pieces of a connection.
const PIECES: usize = 4;
/// Number of free pieces at which a program that waits for room is woken, so that it is not woken for each piece.
const ROOM_PIECES: usize = 2;

/// Length of a write after which the program's writes bypass the loopback, and the number of shorter writes that end
/// this.
const LONG_WRITE_BYTES: usize = 256 << 10;
const MAX_OTHERS: u32 = 8;
/// Longest time for which a write that finds no room runs the device: in all, and until the next piece is free.
const HOLD: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_micros(250);

/// Memory of a connection for long pieces. It is protected by the lock that orders all writes to the stream.
#[derive(Debug)]
pub struct Outgoing {
    free: Vec<Memory>,
    /// Pieces that the peer has not received yet, oldest first.
    sending: VecDeque<(Sending, Memory)>,
    /// Pieces that were ever allocated.
    made: usize,
    /// Shorter writes, and pieces from the loopback, since the last long write.
    others: u32,
}

impl Default for Outgoing {
    fn default() -> Self {
        Self { free: Vec::new(), sending: VecDeque::new(), made: 0, others: MAX_OTHERS }
    }
}

impl Outgoing {
    /// Whether a write of this length, and the following ones, bypass the loopback. The kernel gathers shorter ones
    /// into pieces.
    pub fn is_for_long_writes(&mut self, len: usize) -> bool {
        self.others = if len >= LONG_WRITE_BYTES { 0 } else { self.others.saturating_add(1) };
        self.others < MAX_OTHERS
    }

    /// Takes back the memory of pieces that the peer has received.
    fn take_back(&mut self, stream: &SdpStream) {
        while let Some((sending, memory)) = self.sending.pop_front_if(|(sending, _)| stream.is_sent(sending))
        {
            // Only counts it.
            let _ = stream.finish_send_memory(sending);
            self.free.push(memory);
        }
    }

    /// Whether a program that waits for room should be woken.
    pub fn has_room(&mut self, stream: &SdpStream) -> bool {
        if self.free.len() < ROOM_PIECES {
            self.take_back(stream);
        }
        PIECES - self.made + self.free.len() >= ROOM_PIECES
    }

    /// Memory for the next piece, unless the peer must take older ones first.
    pub fn memory(&mut self, stream: &SdpStream) -> Option<Memory> {
        if self.free.is_empty() {
            self.take_back(stream);
        }
        if self.free.is_empty() && self.made < PIECES {
            let memory = Memory::anonymous(PIECE_BYTES, Pages::Normal).ok()?;
            self.made += 1;
            return Some(memory);
        }
        self.free.pop()
    }

    /// Does the same, but runs the device until the peer has received the oldest piece.
    fn poll_memory(&mut self, stream: &SdpStream, end: Instant) -> Option<Memory> {
        let (sending, _) = self.sending.front()?;
        let left = end.saturating_duration_since(Instant::now()).min(PATIENCE);
        (!left.is_zero() && stream.poll_sent(sending, left)).then(|| self.memory(stream)).flatten()
    }

    /// Gives back memory that was not sent.
    pub fn give_back(&mut self, memory: Memory) {
        self.free.push(memory);
    }

    /// Advertises the first `len` bytes of `memory`.
    pub fn start(&mut self, stream: &SdpStream, memory: Memory, len: usize) -> io::Result<()> {
        match stream.start_send_memory(&memory, 0..len) {
            Ok(sending) => self.sending.push_back((sending, memory)),
            Err(error) => {
                self.free.push(memory);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The oldest piece in transit.
    pub fn oldest(&mut self) -> Option<(Sending, Memory)> {
        self.sending.pop_front()
    }

    /// Copies and advertises `pieces` as far as there is memory, except a short rest. Returns the number of bytes.
    pub fn write(&mut self, stream: &SdpStream, pieces: &[IoSlice<'_>]) -> usize {
        let mut left = pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let mut pieces = pieces.iter().map(|piece| &**piece);
        let (mut piece, mut sent): (&[u8], usize) = (&[], 0);
        let end = Instant::now() + HOLD;
        while left >= ADVERTISED_BYTES {
            let Some(memory) = self.memory(stream).or_else(|| self.poll_memory(stream, end)) else { break };
            let (mut at, most) = (0, left.min(PIECE_BYTES));
            while at < most {
                if piece.is_empty() {
                    let Some(next) = pieces.next() else { break };
                    piece = next;
                }
                let (now, later) = piece.split_at(piece.len().min(most - at));
                if memory.write(at, now).is_err() {
                    break;
                }
                (at, piece) = (at + now.len(), later);
            }
            if self.start(stream, memory, at).is_err() {
                break;
            }
            (sent, left) = (sent + at, left - at);
        }
        stream.end_polling();
        sent
    }
}
