//! Protocol violations of the peer. Each kind ends the connection (draft section 8.2.2) and has a counter.

use crate::wire::WireError;

/// A violation of the protocol by the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The bytes are not a valid message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Less than three receives.
    #[error("fewer than three receives were granted")]
    FewBuffers,
    /// A Hello on a connection, a message before the HelloAck, or a second one.
    #[error("a set-up message at the wrong time, or another message before the set-up")]
    SetUp,
    /// MSeq is not the last one plus one.
    #[error("a message is missing or repeated")]
    Sequence,
    /// MSeqAck acknowledges an unsent message, or less than before.
    #[error("an acknowledgement of a message that was not sent")]
    Acknowledgement,
    /// More messages, or more payload messages, than the credit allows.
    #[error("a message without credit")]
    Credit,
    /// Payload after DisConn, or a second DisConn.
    #[error("data or DisConn after DisConn")]
    AfterDisConn,
    /// DisConn before all advertised data was transferred.
    #[error("DisConn while data was advertised")]
    EarlyDisConn,
    /// A Data message with payload while SrcAvails are outstanding, or with more bytes than SendSm requested.
    #[error("data in a message beside advertised data")]
    DataBesideSrcAvail,
    /// A SrcAvail or SinkAvail that the mode does not allow, or with or without payload against the mode's rule.
    #[error("an advertisement that the flow control mode does not allow")]
    AdvertMode,
    /// More advertisements than the limit of the set-up.
    #[error("too many advertisements")]
    TooManyAdverts,
    /// A completion message for no advertisement, for more bytes than it has, or in the wrong order.
    #[error("completion of a transfer that was not advertised")]
    Completion,
    /// Many messages without payload in a second in which nothing was transferred.
    #[error("too many messages without payload")]
    Flood,
    /// A withdrawal of advertisements was not answered in time.
    #[error("a cancellation was not answered")]
    Unanswered,
    /// A key was invalidated that belongs to no completed advertisement.
    #[error("another key than the advertised one was invalidated")]
    Invalidation,
    /// A ModeChange that is not a transition of the draft's figure 26.
    #[error("an illegal change of the flow control mode")]
    ModeChange,
    /// A second ChRcvBuf before the answer to the first, or an answer to none.
    #[error("resizing of receive buffers out of turn")]
    Resize,
    /// SuspComm or its answer out of turn or with an invalid port, or a message while communication is suspended.
    #[error("suspension of communication out of turn")]
    Suspend,
}

impl Violation {
    /// The name of its counter.
    pub const fn counter(self) -> &'static str {
        match self {
            Self::Wire(error) => error.counter(),
            Self::FewBuffers => "sdp_few_buffers",
            Self::SetUp => "sdp_set_up",
            Self::Sequence => "sdp_sequence",
            Self::Acknowledgement => "sdp_acknowledgement",
            Self::Credit => "sdp_credit",
            Self::AfterDisConn => "sdp_after_disconn",
            Self::EarlyDisConn => "sdp_early_disconn",
            Self::DataBesideSrcAvail => "sdp_data_beside_srcavail",
            Self::AdvertMode => "sdp_advert_mode",
            Self::TooManyAdverts => "sdp_too_many_adverts",
            Self::Completion => "sdp_completion",
            Self::Flood => "sdp_flood",
            Self::Unanswered => "sdp_unanswered",
            Self::Invalidation => "sdp_invalidation",
            Self::ModeChange => "sdp_mode_change",
            Self::Resize => "sdp_resize",
            Self::Suspend => "sdp_suspend",
        }
    }
}
