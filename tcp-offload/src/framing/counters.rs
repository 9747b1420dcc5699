//! The counters of a session, with the same names for every framing.

crate::counters! {
    /// Counters of one session since it began.
    pub struct FramingCounters in "framing" {
        /// ULPDUs handed to TCP.
        ulpdus_sent,
        /// ULPDUs placed when everything before them had been delivered.
        placed_in_order,
        /// ULPDUs placed beyond a gap.
        placed_early,
        /// ULPDUs beyond a gap that the upper layer refused to place early, so that they are offered again in order.
        refused_early,
        /// ULPDUs delivered.
        delivered,
        /// Bytes received more than once.
        duplicate_bytes,
        /// Largest number of bytes held at once.
        held_bytes_peak: peak,
        /// Bytes copied out of receive frames so that holding them does not hold the frames.
        copied_bytes,
        /// Frames with a wrong CRC, in order (the stream ends there) or beyond a gap (not placed).
        crc_errors,
        /// FPDUs of MPA for whose start a marker and the lengths before it disagree.
        marker_errors,
        /// ULPDUs that had to wait for a receive.
        withheld,
        /// Segments not taken because the hold limit was reached; TCP treats them as lost.
        refused_segments,
    }
}
