//! Counters of RDMAP and DDP. MPA and TCP have their own counters of the same streams.

use xwarp_tcp::{rdma_tcp::SegmentKind, ulp::Arrival};

use super::{
    placement::Segment,
    work::{Operation, WcStatus},
};
use crate::rdmap::TerminateHeader;

xwarp_tcp::counters! {
    /// RDMAP's counters, over all streams.
    pub struct RdmapCounters in "rdmap" {
        /// Our Sends that completed.
        sends,
        /// Our RDMA Writes that completed.
        writes,
        /// Our RDMA Reads that completed.
        reads,
        /// Our atomic operations that completed.
        atomics,
        /// Our Immediate Data that completed, with an RDMA Write or alone.
        immediates,
        /// Requests and receives that were flushed.
        flushed,
        /// Requests and receives that failed otherwise.
        failed,
        /// Sends of peers that were delivered.
        sends_in,
        /// Immediate Data of peers that was delivered.
        immediates_in,
        /// Read Requests of peers that were accepted.
        reads_in,
        /// Atomic Requests of peers that were accepted.
        atomics_in,
        /// Messages that were due and had no posted receive.
        no_receive,
        /// Keys invalidated by peers (Send with Invalidate).
        invalidated_by_peer,
        /// Keys invalidated by our own work requests.
        invalidated_here,
        /// Windows bound.
        windows_bound,
        /// Fast registrations.
        fast_registrations,
    }
}

xwarp_tcp::counters! {
    /// DDP's counters, over all streams.
    pub struct DdpCounters in "ddp" {
        /// Bytes that RDMA Writes placed.
        write_bytes,
        /// Bytes that Read Responses placed.
        read_bytes,
        /// Bytes of untagged messages, placed in receives or consumed by the RNIC itself.
        untagged_bytes,
        /// Bytes of all kinds that were placed beyond a gap.
        early_bytes,
        /// Segments beyond a gap that were rejected; each is checked again when it is in order.
        early_refused,
    }
}

/// Counters of the streams of one queue pair, or the sum over several queue pairs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamCounters {
    pub(crate) rdmap: RdmapCounters,
    pub(crate) ddp: DdpCounters,
}

impl std::ops::AddAssign for StreamCounters {
    fn add_assign(&mut self, other: Self) {
        self.rdmap += other.rdmap;
        self.ddp += other.ddp;
    }
}

/// Counters of the streams of one RNIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct RnicCounters {
    /// RDMAP's counters.
    pub rdmap: RdmapCounters,
    /// DDP's counters.
    pub ddp: DdpCounters,
    /// Terminates that we sent.
    pub terminates_sent: TerminateCounters,
    /// Terminates that we received.
    pub terminates_received: TerminateCounters,
}

impl RnicCounters {
    /// Name, prefixed with the layer, and value of each counter.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let sent = self.terminates_sent.0.into_iter().zip(TERMINATES).map(|(n, t)| (t.sent, n));
        let received = self.terminates_received.0.into_iter().zip(TERMINATES).map(|(n, t)| (t.received, n));
        self.rdmap.iter().chain(self.ddp.iter()).chain(sent).chain(received)
    }
}

impl StreamCounters {
    /// Counts the end of one of our requests.
    pub(super) fn request_done(&mut self, operation: &Operation, status: WcStatus) {
        let rdmap = &mut self.rdmap;
        if status != WcStatus::Success {
            return self.work_failed(status);
        }
        match operation {
            Operation::Send { .. } | Operation::SendImmediate { .. } => rdmap.sends += 1,
            Operation::Write { .. } => rdmap.writes += 1,
            Operation::WriteImmediate { .. } => {
                rdmap.writes += 1;
                rdmap.immediates += 1;
            }
            Operation::Read { .. } => rdmap.reads += 1,
            Operation::Immediate { .. } => rdmap.immediates += 1,
            Operation::FetchAdd { .. } | Operation::CompareSwap { .. } => rdmap.atomics += 1,
            Operation::LocalInvalidate { .. } => rdmap.invalidated_here += 1,
            Operation::BindWindow { .. } => rdmap.windows_bound += 1,
            Operation::FastRegister { .. } => rdmap.fast_registrations += 1,
        }
    }

    /// Counts a request or receive that did not succeed.
    pub(super) fn work_failed(&mut self, status: WcStatus) {
        match status {
            WcStatus::Flushed => self.rdmap.flushed += 1,
            _ => self.rdmap.failed += 1,
        }
    }

    /// Counts a placed segment.
    #[expect(clippy::inline_always, reason = "see `QueuePair::take_first`")]
    #[inline(always)]
    pub(super) fn placed(&mut self, segment: &Segment, arrival: Arrival) {
        let ddp = &mut self.ddp;
        let (total, len) = match segment {
            Segment::Silent => return,
            Segment::Write { len, .. } => (&mut ddp.write_bytes, *len),
            Segment::ReadResponse(seen) => (&mut ddp.read_bytes, seen.len),
            Segment::Untagged(seen, _) => (&mut ddp.untagged_bytes, seen.len),
            Segment::Numbered(segment) => match segment.header.kind {
                SegmentKind::Write { .. } => (&mut ddp.write_bytes, segment.len),
                SegmentKind::ReadResponse { .. } => (&mut ddp.read_bytes, segment.len),
                _ => (&mut ddp.untagged_bytes, segment.len),
            },
        };
        *total += u64::from(len);
        if arrival == Arrival::Early {
            ddp.early_bytes += u64::from(len);
        }
    }
}

/// An error that a Terminate can name.
struct TerminateName {
    layer: u8,
    error_type: u8,
    code: u8,
    sent: &'static str,
    received: &'static str,
}

/// Names each Terminate twice: for the counter of sent and for that of received Terminates.
macro_rules! terminates {
    ($($layer:literal $error_type:literal $code:literal $name:literal,)*) => {
        [$(TerminateName {
            layer: $layer,
            error_type: $error_type,
            code: $code,
            sent: concat!("rdmap.terminate_sent_", $name),
            received: concat!("rdmap.terminate_received_", $name),
        }),*]
    };
}

/// Figure 9 of RFC 5040, section 7.2 of RFC 5041, section 8 of RFC 5044 and section 8 of RFC 6581; the last entry is
/// for numbers that none of them defines.
const TERMINATES: [TerminateName; TERMINATE_NAMES] = terminates![
    0 0 0x00 "rdma_local_catastrophic",
    0 1 0x00 "rdma_invalid_stag",
    0 1 0x01 "rdma_bounds",
    0 1 0x02 "rdma_access_rights",
    0 1 0x03 "rdma_stag_not_associated",
    0 1 0x04 "rdma_to_wrap",
    0 1 0x09 "rdma_cannot_invalidate",
    0 1 0xff "rdma_protection_unspecified",
    0 2 0x05 "rdma_version",
    0 2 0x06 "rdma_unexpected_opcode",
    0 2 0x07 "rdma_stream_catastrophic",
    0 2 0x08 "rdma_global_catastrophic",
    0 2 0x09 "rdma_cannot_invalidate_operation",
    0 2 0xff "rdma_operation_unspecified",
    1 0 0x00 "ddp_local_catastrophic",
    1 1 0x00 "ddp_invalid_stag",
    1 1 0x01 "ddp_bounds",
    1 1 0x02 "ddp_stag_not_associated",
    1 1 0x03 "ddp_to_wrap",
    1 1 0x04 "ddp_tagged_version",
    1 2 0x01 "ddp_invalid_queue",
    1 2 0x02 "ddp_no_buffer",
    1 2 0x03 "ddp_msn_range",
    1 2 0x04 "ddp_invalid_mo",
    1 2 0x05 "ddp_too_long",
    1 2 0x06 "ddp_untagged_version",
    2 0 0x01 "mpa_closed",
    2 0 0x02 "mpa_crc",
    2 0 0x03 "mpa_marker",
    2 0 0x04 "mpa_startup_frame",
    2 0 0x05 "mpa_local_catastrophic",
    2 0 0x06 "mpa_insufficient_ird",
    2 0 0x07 "mpa_no_matching_rtr",
    15 15 0xff "other",
];
const TERMINATE_NAMES: usize = 34;

/// Terminates by layer, type and code.
#[derive(Debug, Clone, Copy)]
pub struct TerminateCounters([u64; TERMINATE_NAMES]);

impl Default for TerminateCounters {
    fn default() -> Self {
        Self([0; TERMINATE_NAMES])
    }
}

/// Terminates of one RNIC, sent and received.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TerminateCount {
    pub(crate) sent: TerminateCounters,
    pub(crate) received: TerminateCounters,
}

impl TerminateCounters {
    /// Counts one Terminate. Linux's siw exchanges layer and type, so its Terminates count under other names.
    pub(super) fn count(&mut self, header: &TerminateHeader) {
        let TerminateHeader { layer, error_type, code, .. } = *header;
        let known = TERMINATES
            .iter()
            .position(|known| (known.layer, known.error_type, known.code) == (layer, error_type, code));
        if let Some(count) = self.0.get_mut(known.unwrap_or(TERMINATE_NAMES - 1)) {
            *count += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ddp::DdpError,
        rdmap::{RdmapError, StreamError},
    };

    #[test]
    fn every_error_that_can_be_sent_has_its_own_counter() {
        let errors = RdmapError::ALL.into_iter().map(StreamError::from);
        let errors = errors.chain(DdpError::ALL.into_iter().map(StreamError::from));
        let mut counted = TerminateCounters::default();
        for error in errors {
            let (layer, error_type, code) = error.numbers();
            counted.count(&TerminateHeader {
                layer,
                error_type,
                code,
                segment_length: None,
                ddp_header: None,
                rdma_header: None,
            });
        }
        assert_eq!(counted.0[..26], [1; 26]);
        assert_eq!(counted.0[26..], [0; 8]);
    }

    #[test]
    fn names_are_unique() {
        let names: Vec<_> = RnicCounters::default().iter().map(|(name, _)| name).collect();
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }
}
