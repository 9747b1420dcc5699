//! The packets of a file in the order of their times. Captures of several interfaces or processors, and captures that
//! were merged, are not in this order; the window of the sort is bounded, and packets from beyond it are counted.

use std::{collections::BTreeMap, io::Read, time::Duration};

use super::file::{CaptureFile, FileError, Packet};

/// Packets of the window, and the bytes in them.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 16 << 20;

/// Reads packets in the order of their times.
pub struct SortedPackets<R> {
    file: CaptureFile<R>,
    /// Packets to wait for before the earliest one is returned; 0 leaves the order of the file.
    window: usize,
    /// By time and number.
    waiting: BTreeMap<(Duration, u64), OwnedPacket>,
    waiting_bytes: usize,
    /// How the file ended.
    end: Option<Result<(), FileError>>,
    /// Time of the last packet that was read from the file: the time of a packet that has none.
    read: Duration,
    returned: Duration,
    misplaced: u64,
}

/// A packet and its bytes.
pub struct OwnedPacket {
    packet: Packet<'static>,
    bytes: Vec<u8>,
}

impl OwnedPacket {
    /// The packet.
    pub fn packet(&self) -> Packet<'_> {
        Packet { bytes: &self.bytes, ..self.packet }
    }
}

impl<R: Read> SortedPackets<R> {
    /// Sorts the packets of a file, or of a pipe in which the next packet may be far: then nothing waits.
    pub fn new(file: CaptureFile<R>, live: bool) -> Self {
        Self {
            file,
            window: if live { 0 } else { MAX_WAITING },
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            end: None,
            read: Duration::ZERO,
            returned: Duration::ZERO,
            misplaced: 0,
        }
    }

    /// The file.
    pub fn file(&self) -> &CaptureFile<R> {
        &self.file
    }

    /// Packets that are earlier than one that was returned before them.
    pub fn misplaced(&self) -> u64 {
        self.misplaced
    }

    /// The next packet; `None` at the end. An error of the file comes after the packets before it.
    pub fn next_packet(&mut self) -> Result<Option<OwnedPacket>, FileError> {
        while self.end.is_none()
            && self.waiting.len() <= self.window
            && self.waiting_bytes <= MAX_WAITING_BYTES
        {
            self.read_packet();
        }
        let Some((_, packet)) = self.waiting.pop_first() else {
            return self.end.take().unwrap_or(Ok(())).map(|()| None);
        };
        self.waiting_bytes -= packet.bytes.len();
        if let Some(time) = packet.packet.time {
            self.misplaced += u64::from(time < self.returned);
            self.returned = self.returned.max(time);
        }
        Ok(Some(packet))
    }

    fn read_packet(&mut self) {
        match self.file.next_packet() {
            Ok(Some(packet)) => {
                self.read = packet.time.unwrap_or(self.read);
                let bytes = packet.bytes.to_vec();
                let packet = Packet { bytes: &[], ..packet };
                self.waiting_bytes += bytes.len();
                self.waiting.insert((self.read, packet.number), OwnedPacket { packet, bytes });
            }
            Ok(None) => self.end = Some(Ok(())),
            Err(error) => self.end = Some(Err(error)),
        }
    }
}
