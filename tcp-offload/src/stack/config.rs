//! [`StackConfig`]: the limits that all connections of a stack share.

use std::time::Duration;

use crate::{secret::Secret, tcp::TcpConfig};

/// Settings of a stack.
#[derive(Debug, Clone)]
pub struct StackConfig {
    /// The source of initial sequence numbers and hash keys.
    pub secret: Secret,
    /// TCP settings with which every connection starts.
    pub tcp: TcpConfig,
    /// Largest number of connections in all states; more are refused.
    pub most_connections: usize,
    /// Largest number of half-open connections of all listeners: SYNs that were answered and are not confirmed. When
    /// the table is full, the entry whose SYN-ACK is due next is evicted; at `n` SYNs a second, an honest peer thus has
    /// about `most_half_open / n` seconds to confirm.
    pub most_half_open: usize,
    /// Largest number of connections in TIME-WAIT. Beyond it, the oldest is removed early.
    pub most_time_wait: usize,
    /// Bytes that all connections together may hold for FPDUs that cannot be placed or delivered yet;
    /// [`MpaConfig::hold_bytes`](crate::mpa::MpaConfig::hold_bytes) limits each of them. Beyond the limit, payload
    /// that is not next in order counts as lost.
    pub most_held_bytes: usize,
    /// Age from which held bytes may be evicted when [`Self::most_held_bytes`] is used up. The connection with the
    /// oldest held bytes is evicted: its peer must retransmit the bytes beyond a gap, and a connection that holds
    /// only the beginning of an FPDU is terminated. The default is 1 s, because a loss is repaired within a few round
    /// trips or one retransmission time-out.
    pub gap_age: Duration,
    /// Bytes of unacknowledged payload that all connections together may keep on the heap, so that their transmit
    /// frames can be reused when frames are scarce.
    pub most_spilled_bytes: usize,
    /// Longest time that data may stay unacknowledged when frames are scarce and the heap's share is nearly full.
    /// Connections beyond this limit are reset, those with the oldest data first. Otherwise a peer may keep its window
    /// closed indefinitely (RFC 9293 section 3.8.6.1).
    pub stall_limit: Duration,
}

impl Default for StackConfig {
    fn default() -> Self {
        Self {
            secret: Secret::from_number(0),
            tcp: TcpConfig::default(),
            most_connections: 32_768,
            most_half_open: 4096,
            most_time_wait: 4096,
            most_held_bytes: 64 << 20,
            gap_age: Duration::from_secs(1),
            most_spilled_bytes: 32 << 20,
            stall_limit: Duration::from_secs(10),
        }
    }
}

/// Parameters of an initiator's MPA Request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConnectParams {
    /// IRD: inbound RDMA Reads that this end can serve at once.
    pub ird: u16,
    /// ORD: outbound RDMA Reads that this end wants to have outstanding.
    pub ord: u16,
    /// Private data for the peer's application.
    pub private_data: Vec<u8>,
}
