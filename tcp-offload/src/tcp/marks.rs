//! [`Marks`]: explicit congestion notification of one connection (RFC 3168 section 6.1, RFC 8257 section 3.2).

use std::collections::VecDeque;

use crate::{seq::StreamOffset, wire::Ecn};

/// Largest number of changes of the congestion mark that one batch reports exactly; a batch rarely has more.
const MAX_BOUNDARIES: usize = 64;

/// An offset of the received data at which congestion marks begin or end (RFC 8257 section 3.2).
#[derive(Debug, Clone, Copy)]
pub(super) struct Boundary {
    /// Where the mark changes.
    pub next: StreamOffset,
    /// Whether the data before `next` was marked.
    pub marked: bool,
}

/// The rule for echoing and answering marks. When ECN was not negotiated, nothing is ever set.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// ECN was negotiated.
    on: bool,
    /// ACKs carry ECN-Echo.
    echo: bool,
    /// The next new segment carries CWR.
    cwr: bool,
    feedback: Feedback,
}

/// When ECN-Echo is set.
#[derive(Debug, Default)]
enum Feedback {
    /// From a mark until the peer sends CWR.
    #[default]
    UntilCwr,
    /// Exactly for the data that was marked (DCTCP), with the ACKs due with an earlier acknowledgment number, at which
    /// marks began or ended.
    Exact(VecDeque<Boundary>),
}

impl Marks {
    /// The negotiated ECN mode.
    pub(super) fn negotiated(on: bool, exact: bool) -> Self {
        let feedback = if exact { Feedback::Exact(VecDeque::new()) } else { Feedback::UntilCwr };
        if on { Self { on, feedback, ..Self::default() } } else { Self::default() }
    }

    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether ACKs carry ECN-Echo.
    pub(super) fn echo(&self) -> bool {
        self.echo
    }

    /// Whether the next new segment carries CWR.
    pub(super) fn cwr(&self) -> bool {
        self.cwr
    }

    /// Sets whether the next new segment carries CWR: from a reduction of the congestion window until it was reported.
    pub(super) fn set_cwr(&mut self, due: bool) {
        self.cwr = due && self.on;
    }

    /// The next ACK due with an earlier acknowledgment number.
    #[inline]
    pub(super) fn boundary(&self) -> Option<Boundary> {
        match &self.feedback {
            Feedback::Exact(boundaries) => boundaries.front().copied(),
            Feedback::UntilCwr => None,
        }
    }

    /// Records that the ACK for [`Self::boundary`] was sent.
    pub(super) fn boundary_sent(&mut self) {
        if let Feedback::Exact(boundaries) = &mut self.feedback {
            boundaries.pop_front();
        }
    }

    /// Processes the mark of a received segment, and its CWR bit. `unacknowledged` says whether an ACK is owed for the data before `next`,
    /// where the segment's data begins to be acknowledged.
    #[inline]
    pub(super) fn received(
        &mut self,
        ecn: Ecn,
        cwr: bool,
        payload_len: usize,
        unacknowledged: bool,
        next: StreamOffset,
    ) {
        if !self.on {
            return;
        }
        let marked = ecn == Ecn::Ce;
        match &mut self.feedback {
            // RFC 3168 section 6.1.3: a mark is echoed until the sender reports by CWR that it has reduced its window.
            Feedback::UntilCwr => {
                self.echo = (self.echo && !cwr) || marked && payload_len > 0;
            }
            // RFC 8257 section 3.2: ECN-Echo in an ACK reports exactly whether the data that it acknowledges was
            // marked.
            Feedback::Exact(boundaries) => {
                if payload_len == 0 || marked == self.echo {
                    return;
                }
                if unacknowledged && boundaries.len() < MAX_BOUNDARIES {
                    boundaries.push_back(Boundary { next, marked: self.echo });
                }
                self.echo = marked;
            }
        }
    }
}
