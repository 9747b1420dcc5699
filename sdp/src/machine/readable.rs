//! Queries about the receiving half, for a program before it reads.

use super::Machine;

impl Machine {
    /// Whether advertised data of the peer waits.
    pub fn has_offer(&self) -> bool {
        self.sink.has_offer()
    }

    /// Whether the peer has closed its direction and everything was read.
    pub fn at_eof(&self) -> bool {
        self.sink.at_eof()
    }

    /// Whether the peer has closed its direction.
    pub fn peer_closed(&self) -> bool {
        self.sink.has_eof()
    }

    /// Whether an out-of-band byte was announced or waits.
    pub fn is_urgent(&self) -> bool {
        self.sink.is_urgent()
    }

    /// Takes the out-of-band byte.
    pub fn take_oob(&mut self) -> Option<u8> {
        self.sink.take_oob()
    }

    /// Whether the next byte of the stream is an out-of-band byte that was not taken.
    pub fn oob_is_next(&self) -> bool {
        self.sink.at_mark() && self.sink.has_oob()
    }

    /// Whether the next byte to read follows the last out-of-band byte (`SIOCATMARK`).
    pub fn at_mark(&self) -> bool {
        self.sink.at_mark()
    }
}
