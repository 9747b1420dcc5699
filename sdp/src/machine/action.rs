//! Actions that a machine requests from its caller, and changes that it reports.

use crate::wire::Advert;

/// The caller's next step. Steps are taken in the order in which the machine returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Post receives.
    PostReceives {
        /// Their number.
        count: u16,
        /// The size of each, in bytes.
        bytes: u32,
    },
    /// Send the message whose header, and copied payload, [`Machine::poll`](super::Machine::poll) has written.
    Send {
        /// The rest of the payload: a piece of the program's memory.
        memory: Option<Advert>,
        /// Raise a solicited event.
        solicited: bool,
        /// Invalidate this key of the peer's.
        invalidate: Option<u32>,
    },
    /// Read from the peer's memory into ours, both of the same length; then call [`Machine::read_done`](super::Machine::read_done).
    Read {
        /// The peer's memory.
        remote: Advert,
        /// The program's memory.
        local: Advert,
    },
    /// Write from our memory to the peer's, both of the same length.
    Write {
        /// The program's memory.
        local: Advert,
        /// The peer's memory.
        remote: Advert,
    },
    /// Close the stream below in order, after all sent data.
    Disconnect,
    /// The peer has suspended communication. Close the stream below when everything that was sent is acknowledged, connect
    /// from the same address and port to this port of the peer, and call [`Machine::reconnect`](super::Machine::reconnect).
    Reconnect {
        /// The peer's port.
        port: u16,
    },
    /// Reset the stream below. `flush`: only after all sent messages have completed.
    Reset {
        /// Whether an AbortConn was sent before.
        flush: bool,
    },
}

/// A change of the program's memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Notice {
    /// The memory was sent.
    Sent {
        /// What [`Machine::write_memory`](super::Machine::write_memory) returned.
        id: u64,
    },
    /// A receive into memory has ended with `len` bytes; 0 is the end of the stream, or an empty transfer.
    Received {
        /// What [`Machine::read_memory`](super::Machine::read_memory) returned.
        id: u64,
        /// Number of bytes.
        len: u32,
        /// The bytes, to be copied to the memory; empty when RDMA has placed them.
        copied: Vec<u8>,
    },
    /// A receive into memory was withdrawn.
    Withdrawn {
        /// What [`Machine::read_memory`](super::Machine::read_memory) returned.
        id: u64,
    },
}
