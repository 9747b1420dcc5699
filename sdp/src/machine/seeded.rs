//! Mistakes that tests can switch on, to show that the model checker finds them. Each reverses a decision of
//! docs/decisions/0016. Outside of tests none can be on.

/// A reversed decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    /// D4: the HelloAck takes a receive that Bufs counts.
    HelloAckUncounted,
    /// D5: the first message after the set-up has number 0, which MSeqAck 0 seems to acknowledge.
    FirstNumberIsZero,
    /// D10: SinkAvails that come after the end of Pipelined mode are ignored without counting.
    LateSinkAvailsUncounted,
    /// D14: a SrcAvailCancel does not end when SendSm closes the last SrcAvail.
    SendSmLeavesCancel,
    /// D16: any Data message ends a SinkAvailCancel, although other SinkAvails live.
    DataEndsSinkCancel,
    /// D19: the end that closed first waits for the other to end the stream.
    FirstCloserWaits,
}

#[cfg(test)]
thread_local! {
    /// The mistake that is on in this thread.
    pub(super) static MISTAKE: std::cell::Cell<Option<Mistake>> = const { std::cell::Cell::new(None) };
}

/// Whether `mistake` is on.
#[cfg(test)]
pub(super) fn seeded(mistake: Mistake) -> bool {
    MISTAKE.get() == Some(mistake)
}

/// Whether `mistake` is on: never, outside of tests.
#[cfg(not(test))]
pub(super) const fn seeded(_mistake: Mistake) -> bool {
    false
}
