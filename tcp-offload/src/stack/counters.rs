//! What the stack counted, over all its connections.

/// Frames and connections by what became of them. Plain numbers that only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StackCounters {
    /// Frames received.
    pub frames_in: u64,
    /// Frames that no header parser accepted, dropped.
    pub malformed: u64,
    /// Of those, a wrong IP or TCP checksum.
    pub bad_checksum: u64,
    /// Frames whose checksum a local sender left to its hardware.
    pub partial_checksum: u64,
    /// Frames that are neither TCP nor an ICMP error about us, dropped.
    pub foreign: u64,
    /// Segments for no connection and no listener.
    pub no_connection: u64,
    /// Resets sent in answer to them.
    pub resets_sent: u64,
    /// ICMP errors about one of our connections.
    pub icmp_errors: u64,
    /// Payloads not taken because a connection held too much already; the peer sends them again.
    pub refused_payloads: u64,
    /// Connections we opened.
    pub active_opens: u64,
    /// Connections that came to our listeners.
    pub passive_opens: u64,
    /// SYNs dropped because a backlog was full.
    pub backlog_full: u64,
    /// Times that sending stopped because no transmit frame or ring slot was free.
    pub starved: u64,
}
