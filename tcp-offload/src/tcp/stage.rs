//! [`Stage`]: the state of RFC 9293 section 3.3.2, with the data that mean something in that state only.

use super::State;
use crate::{
    seq::StreamOffset,
    time::{Duration, Instant},
    ulp::CloseReason,
};

/// Our SYN or SYN-ACK.
#[derive(Debug, Clone, Copy)]
pub(super) struct Syn {
    /// Whether it has to be sent with the next transmission.
    pub due: bool,
    pub sent: u32,
    pub sent_at: Instant,
}

/// The direction to the peer before our FIN was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    Open,
    /// The user has closed the connection, and the source may still have data. See
    /// [`Connection::close_when_sent`](super::Connection::close_when_sent).
    Closing,
    /// The source has no more data: a FIN follows the data sent.
    Finished,
}

/// Our FIN, once it was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fin {
    /// Its stream offset.
    pub at: StreamOffset,
    /// When it was first sent.
    pub sent_at: Instant,
    /// Silence of the peer before its latest segment, counted from our FIN where that is later. It measures the
    /// back-off of the peer's retransmissions in TIME-WAIT.
    pub silence: Duration,
}

/// The state of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    SynSent(Syn, Sending),
    SynReceived(Syn, Sending),
    Established(Sending),
    /// The peer has closed its direction.
    CloseWait(Sending),
    FinWait1(Fin),
    FinWait2(Fin),
    Closing(Fin),
    LastAck(Fin),
    /// With [`CloseReason::Graceful`] until that was reported.
    TimeWait(Fin, Option<CloseReason>),
    /// With the reason until that was reported.
    Closed(Option<CloseReason>),
}

impl Stage {
    /// The state's name.
    pub(super) fn state(&self) -> State {
        match self {
            Self::SynSent(..) => State::SynSent,
            Self::SynReceived(..) => State::SynReceived,
            Self::Established(_) => State::Established,
            Self::CloseWait(_) => State::CloseWait,
            Self::FinWait1(_) => State::FinWait1,
            Self::FinWait2(_) => State::FinWait2,
            Self::Closing(_) => State::Closing,
            Self::LastAck(_) => State::LastAck,
            Self::TimeWait(..) => State::TimeWait,
            Self::Closed(_) => State::Closed,
        }
    }

    /// Our SYN, until it is acknowledged.
    pub(super) fn syn_mut(&mut self) -> Option<&mut Syn> {
        match self {
            Self::SynSent(syn, _) | Self::SynReceived(syn, _) => Some(syn),
            _ => None,
        }
    }

    /// The direction to the peer while new data may be sent.
    pub(super) fn sending(&self) -> Option<Sending> {
        match self {
            Self::Established(sending) | Self::CloseWait(sending) => Some(*sending),
            _ => None,
        }
    }

    /// Whether the user has not closed the connection.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(
            self,
            Self::SynSent(_, Sending::Open)
                | Self::SynReceived(_, Sending::Open)
                | Self::Established(Sending::Open)
                | Self::CloseWait(Sending::Open)
        )
    }

    /// Records that the direction to the peer will be closed, or that all its data was sent. After the FIN nothing changes.
    pub(super) fn close(&mut self, how: Sending) {
        if let Self::SynSent(_, sending)
        | Self::SynReceived(_, sending)
        | Self::Established(sending)
        | Self::CloseWait(sending) = self
            && *sending != Sending::Finished
        {
            *sending = how;
        }
    }

    /// Records that our FIN was sent at `now`.
    pub(super) fn fin_sent(&mut self, now: Instant, at: StreamOffset) {
        let fin = Fin { at, sent_at: now, silence: Duration::ZERO };
        match self {
            Self::Established(_) => *self = Self::FinWait1(fin),
            Self::CloseWait(_) => *self = Self::LastAck(fin),
            _ => {}
        }
    }

    /// Our FIN, once it was sent.
    pub(super) fn fin(&self) -> Option<&Fin> {
        match self {
            Self::FinWait1(fin)
            | Self::FinWait2(fin)
            | Self::Closing(fin)
            | Self::LastAck(fin)
            | Self::TimeWait(fin, _) => Some(fin),
            _ => None,
        }
    }

    pub(super) fn fin_mut(&mut self) -> Option<&mut Fin> {
        match self {
            Self::FinWait1(fin)
            | Self::FinWait2(fin)
            | Self::Closing(fin)
            | Self::LastAck(fin)
            | Self::TimeWait(fin, _) => Some(fin),
            _ => None,
        }
    }

    /// Enters CLOSED. `reason` is reported unless the connection has ended for its user before.
    pub(super) fn end(&mut self, reason: Option<CloseReason>) {
        let reason = match self {
            Self::TimeWait(_, unreported) | Self::Closed(unreported) => *unreported,
            _ => reason,
        };
        *self = Self::Closed(reason);
    }

    /// Why the connection has ended for its user, until that is reported.
    pub(super) fn ended(&self) -> Option<CloseReason> {
        match self {
            Self::TimeWait(_, reason) | Self::Closed(reason) => *reason,
            _ => None,
        }
    }

    /// Returns what [`Self::ended`] returns, once.
    pub(super) fn take_ended(&mut self) -> Option<CloseReason> {
        match self {
            Self::TimeWait(_, reason) | Self::Closed(reason) => reason.take(),
            _ => None,
        }
    }
}
