//! What the stack counted, over all its connections.

crate::counters! {
    /// Frames and connections by what became of them. Plain numbers that only grow.
    pub struct StackCounters in "stack" {
        /// Frames received.
        frames_in,
        /// Frames that no header parser accepted, dropped.
        malformed,
        /// Of those, a wrong IP or TCP checksum.
        bad_checksum,
        /// Frames whose checksum a local sender left to its hardware.
        partial_checksum,
        /// Frames that are neither TCP nor an ICMP error about us, dropped.
        foreign,
        /// Segments for no connection and no listener.
        no_connection,
        /// Resets sent in answer to them.
        resets_sent,
        /// ICMP errors about one of our connections.
        icmp_errors,
        /// Payloads not taken because a connection held too much already; the peer sends them again.
        refused_payloads,
        /// Connections we opened.
        active_opens,
        /// Connections that came to our listeners.
        passive_opens,
        /// SYNs dropped because a backlog was full.
        backlog_full,
        /// Times that sending stopped because no transmit frame or ring slot was free.
        starved,
    }
}
