//! Mistakes that tests can enable, to show that the model checker and the tests with hostile peers find them: reversed
//! decisions of docs/decisions/0016, and missing checks. Outside of tests none can be enabled.

/// A reversed decision, or a missing check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mistake {
    /// D4: the HelloAck takes a receive that Bufs counts.
    HelloAckUncounted,
    /// D5: the first message after the set-up has number 0, which MSeqAck 0 seems to acknowledge.
    FirstNumberIsZero,
    /// D10: SinkAvails that arrive after the end of Pipelined mode are ignored without counting.
    LateSinkAvailsUncounted,
    /// D14: a SrcAvailCancel does not end when SendSm closes the last SrcAvail.
    SendSmLeavesCancel,
    /// D16: any Data message ends a SinkAvailCancel, although other SinkAvails live.
    DataEndsSinkCancel,
    /// D21: two crossing requests to suspend are both answered.
    BothAnswerSuspComm,
    /// Draft section 13: after a suspension, only the source continues the count of SinkAvails that messages used.
    CountsSurviveSuspension,
    /// Messages out of order are accepted.
    NumberUnchecked,
    /// Messages without credit are accepted.
    CreditUnchecked,
    /// RdmaRdCompl may report more than was advertised.
    CompletionUnchecked,
    /// SrcAvails beyond MaxAdverts are accepted.
    AdvertsUnbounded,
    /// Messages are accepted after the end of the connection.
    EndIgnored,
    /// D19: the end that closed first waits for the other to end the stream.
    FirstCloserWaits,
}

#[cfg(test)]
thread_local! {
    /// The mistake that is enabled in this thread.
    pub(super) static MISTAKE: std::cell::Cell<Option<Mistake>> = const { std::cell::Cell::new(None) };
}

/// Whether `mistake` is on.
#[cfg(test)]
pub(super) fn seeded(mistake: Mistake) -> bool {
    MISTAKE.get() == Some(mistake)
}

/// Whether `mistake` is enabled: never outside of tests.
#[cfg(not(test))]
pub(super) const fn seeded(_mistake: Mistake) -> bool {
    false
}
