//! [`ChecksumOffload`]: whether a peer leaves its TCP checksums to hardware.

/// Number of consecutive segments with partial checksums after which they are accepted from a peer that has computed its checksums.
const CHANGE_AFTER: u8 = 3;

/// Whether the peer of one connection leaves its TCP checksums to hardware.
///
/// A sender on the same host whose interface offloads checksums stores only the sum of the pseudo-header, and nothing
/// fills in the rest on a veth pair. Such a checksum protects nothing: of the frames of a peer that does compute
/// checksums, one corrupted frame in 65536 looks like it and would be accepted. Therefore partial checksums are
/// accepted only from a peer that has sent them from the beginning, or several in a row since.
///
/// From then on they are always accepted: a sender computes some checksums itself.
///
/// Only [credible](crate::tcp::Connection::is_credible) segments change the state. Anybody who knows the four-tuple can forge
/// others, which must neither turn the check off nor make the peer's own segments unacceptable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ChecksumOffload {
    /// There was no segment yet.
    #[default]
    Unknown,
    /// The peer computes its checksums.
    Computed {
        /// Consecutive segments with partial ones.
        partial: u8,
    },
    /// The peer may leave its checksums to hardware.
    Partial,
}

impl ChecksumOffload {
    /// Whether a segment would be admitted and change nothing.
    pub(super) fn expects(self, partial: bool) -> bool {
        match self {
            Self::Unknown => false,
            Self::Computed { partial: before } => !partial && before == 0,
            Self::Partial => true,
        }
    }

    /// Whether a segment may be processed. Its checksum is correct or, with `partial`, only the sum of the
    /// pseudo-header; `credible` says whether only the peer can have sent it.
    pub(super) fn admits(&mut self, partial: bool, credible: bool) -> bool {
        let after = match *self {
            Self::Unknown if partial => Self::Partial,
            Self::Computed { partial: before } if partial && before + 1 == CHANGE_AFTER => Self::Partial,
            Self::Computed { partial: before } if partial => Self::Computed { partial: before + 1 },
            Self::Unknown | Self::Computed { .. } => Self::Computed { partial: 0 },
            Self::Partial => Self::Partial,
        };
        if credible {
            *self = after;
        }
        !partial || matches!(*self, Self::Partial | Self::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(segments: &[bool]) -> Vec<bool> {
        let mut offload = ChecksumOffload::default();
        segments
            .iter()
            .map(|partial| {
                let (before, expected) = (offload, offload.expects(*partial));
                let admitted = offload.admits(*partial, true);
                assert!(!expected || admitted && offload == before);
                admitted
            })
            .collect()
    }

    #[test]
    fn partial_checksums_are_admitted_from_a_peer_that_began_with_them() {
        assert_eq!(admitted(&[true, true]), [true; 2]);
        assert_eq!(
            admitted(&[false, true, false, true, true, false]),
            [true, false, true, false, false, true]
        );
    }

    #[test]
    fn complete_checksums_do_not_make_partial_ones_unacceptable() {
        assert_eq!(admitted(&[true, false, false, false, false, true]), [true; 6]);
    }

    #[test]
    fn a_changed_setting_of_the_peer_is_followed() {
        assert_eq!(admitted(&[false, true, true, true, true]), [true, false, false, true, true]);
    }

    #[test]
    fn segments_that_anybody_can_forge_change_nothing() {
        for known in [
            ChecksumOffload::Unknown,
            ChecksumOffload::Computed { partial: 0 },
            ChecksumOffload::Computed { partial: CHANGE_AFTER - 1 },
            ChecksumOffload::Partial,
        ] {
            for partial in [false, true] {
                let mut offload = known;
                let admitted = offload.admits(partial, false);
                assert_eq!(offload, known);
                assert_eq!(admitted, !partial || !matches!(known, ChecksumOffload::Computed { .. }));
            }
        }
    }
}
