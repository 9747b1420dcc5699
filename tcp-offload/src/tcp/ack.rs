//! When to acknowledge (RFC 9293 section 3.8.6.3, RFC 5681 section 4.2, and the project's rule for whole batches).

/// Whether an ACK is owed to the peer, and how urgently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Owed {
    #[default]
    Nothing,
    /// An ACK that may wait for data to carry it.
    Pending,
    /// An ACK that is sent with the next transmission.
    Now,
}

/// The delayed-ACK state of one connection.
#[derive(Debug, Clone, Default)]
pub(super) struct AckPolicy {
    owed: Owed,
    /// Bytes taken since the last ACK.
    bytes: usize,
}

impl AckPolicy {
    /// Records payload that was taken in order. Once `limit` bytes are unacknowledged, the ACK is due. Returns whether
    /// the delayed-ACK timer has to be armed.
    pub(super) fn in_order(&mut self, len: usize, limit: usize) -> bool {
        self.bytes += len;
        match self.owed {
            _ if self.bytes >= limit => {
                self.owed = Owed::Now;
                false
            }
            Owed::Nothing => {
                self.owed = Owed::Pending;
                true
            }
            Owed::Pending | Owed::Now => false,
        }
    }

    /// Makes an ACK due at once.
    pub(super) fn now(&mut self) {
        self.owed = Owed::Now;
    }

    /// Makes a delayed ACK due now. Returns whether an ACK is due.
    pub(super) fn flush(&mut self) -> bool {
        if self.owed == Owed::Pending {
            self.owed = Owed::Now;
        }
        self.owed == Owed::Now
    }

    /// Whether data was taken since the last ACK.
    pub(super) fn is_owed(&self) -> bool {
        self.owed != Owed::Nothing
    }

    pub(super) fn is_due(&self) -> bool {
        self.owed == Owed::Now
    }

    /// Records that a segment with the current acknowledgment number was sent.
    pub(super) fn sent(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ack_is_delayed_until_enough_bytes_or_a_flush() {
        let mut ack = AckPolicy::default();
        assert!(!ack.flush());
        assert!(ack.in_order(1000, 8000));
        assert!(!ack.in_order(1000, 8000));
        assert!(!ack.is_due());
        for _ in 0..6 {
            ack.in_order(1000, 8000);
        }
        assert!(ack.is_due());
        ack.sent();
        assert!(!ack.is_due());
        assert!(ack.in_order(1, 8000));
        assert!(ack.flush());
        assert!(ack.is_due());
    }
}
