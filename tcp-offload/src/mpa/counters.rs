//! The counters of one MPA session.

crate::counters! {
    /// Events of one session since it began; plain numbers, read at any time.
    pub struct Counters in "mpa" {
        /// FPDUs handed to TCP.
        fpdus_sent,
        /// FPDUs placed when everything before them had been delivered.
        placed_in_order,
        /// FPDUs placed beyond a gap, found by markers.
        placed_early,
        /// FPDUs beyond a gap that the upper layer refused to place early, so that they are offered again in order.
        refused_early,
        /// FPDUs delivered.
        delivered,
        /// Bytes received more than once.
        duplicate_bytes,
        /// Most bytes ever held at once.
        held_bytes_peak: peak,
        /// Bytes copied out of receive frames so that holding them does not hold the frames.
        copied_bytes,
        /// FPDUs with a wrong CRC, in order (the stream ends there) or beyond a gap (not placed).
        crc_errors,
        /// FPDUs on whose start markers and lengths disagree.
        marker_errors,
        /// FPDUs that had to wait for a receive.
        withheld,
        /// Segments not taken because the hold limit was reached; TCP treats them as lost.
        refused_segments,
    }
}
