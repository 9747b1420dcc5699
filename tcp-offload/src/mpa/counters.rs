//! What one session counts.

use std::ops::AddAssign;

/// Events of one session since it began; plain numbers, read at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// FPDUs handed to TCP.
    pub fpdus_sent: u64,
    /// FPDUs placed when everything before them had been delivered.
    pub placed_in_order: u64,
    /// FPDUs placed beyond a gap, found by markers.
    pub placed_early: u64,
    /// FPDUs found beyond a gap that the upper layer wanted to see again in order.
    pub refused_early: u64,
    /// FPDUs delivered.
    pub delivered: u64,
    /// Received bytes that had been received before.
    pub duplicate_bytes: u64,
    /// Most bytes ever held at once.
    pub held_bytes_peak: u64,
    /// Bytes copied out of receive frames so that holding them does not hold the frames.
    pub copied_bytes: u64,
    /// FPDUs with a wrong CRC, in order (the stream ends there) or beyond a gap (not placed).
    pub crc_errors: u64,
    /// FPDUs on whose start markers and lengths disagree.
    pub marker_errors: u64,
    /// FPDUs that had to wait for a receive.
    pub withheld: u64,
    /// Segments not taken because the hold limit was reached; TCP treats them as lost.
    pub refused_segments: u64,
}

impl AddAssign for Counters {
    /// Sums, and the larger of the peaks.
    fn add_assign(&mut self, other: Self) {
        self.fpdus_sent += other.fpdus_sent;
        self.placed_in_order += other.placed_in_order;
        self.placed_early += other.placed_early;
        self.refused_early += other.refused_early;
        self.delivered += other.delivered;
        self.duplicate_bytes += other.duplicate_bytes;
        self.held_bytes_peak = self.held_bytes_peak.max(other.held_bytes_peak);
        self.copied_bytes += other.copied_bytes;
        self.crc_errors += other.crc_errors;
        self.marker_errors += other.marker_errors;
        self.withheld += other.withheld;
        self.refused_segments += other.refused_segments;
    }
}
