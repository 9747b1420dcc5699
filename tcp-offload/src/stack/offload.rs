//! [`ChecksumOffload`]: whether a peer leaves its TCP checksums to hardware.

/// Number of consecutive segments that contradict a peer's known habit before the habit counts as changed.
const CHANGE_AFTER: u8 = 3;

/// Whether the peer of one connection leaves its TCP checksums to hardware.
///
/// A sender on the same host whose interface offloads checksums stores only the sum of the pseudo-header, and nothing
/// fills in the rest on a veth pair. Such a checksum protects nothing: of the frames of a peer that does compute
/// checksums, one corrupted frame in 65536 looks like it and would be accepted. Therefore partial checksums are
/// accepted only from a peer that sends them habitually.
#[derive(Debug, Default)]
pub(super) struct ChecksumOffload {
    /// Whether the peer sends partial checksums; `None` before its first segment.
    habit: Option<bool>,
    /// Consecutive segments of the other kind.
    contrary: u8,
}

impl ChecksumOffload {
    /// Whether a segment may be processed. Its checksum is correct or, with `partial`, only the sum of the
    /// pseudo-header.
    pub(super) fn admits(&mut self, partial: bool) -> bool {
        let habit = *self.habit.get_or_insert(partial);
        if habit == partial {
            self.contrary = 0;
        } else {
            self.contrary += 1;
            if self.contrary == CHANGE_AFTER {
                *self = Self { habit: Some(partial), contrary: 0 };
            }
        }
        !partial || self.habit == Some(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(segments: &[bool]) -> Vec<bool> {
        let mut offload = ChecksumOffload::default();
        segments.iter().map(|partial| offload.admits(*partial)).collect()
    }

    #[test]
    fn a_partial_checksum_is_admitted_by_habit_only() {
        assert_eq!(admitted(&[true, true]), [true; 2]);
        assert_eq!(
            admitted(&[false, true, false, true, true, false]),
            [true, false, true, false, false, true]
        );
    }

    #[test]
    fn a_few_complete_checksums_do_not_end_the_habit() {
        // The kernel computes the checksum of some control segments itself.
        assert_eq!(admitted(&[true, false, false, true]), [true; 4]);
    }

    #[test]
    fn a_changed_setting_of_the_peer_is_followed() {
        assert_eq!(admitted(&[false, true, true, true, true]), [true, false, false, true, true]);
        assert_eq!(admitted(&[true, false, false, false, true]), [true, true, true, true, false]);
    }
}
