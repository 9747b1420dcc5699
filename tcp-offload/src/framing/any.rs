//! The choice of a connection's framing at run time.

use std::{fmt, time::Duration};

use super::{
    Carried, Session, SetupError, Taken,
    receiver::{Halt, Upper},
};
use crate::{
    link::{Link, RxFrame, rx_pieces},
    mpa::MpaConfig,
    rdma_tcp::{self, RdmaTcpConfig, Setup},
    tcp::NewPayload,
    time::Instant,
    ulp::{ConnId, ListenerId, Ulp},
    wire::Path,
};

/// The framing of a connection, with this end's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FramingConfig {
    /// MPA (RFC 5044).
    Mpa(MpaConfig),
    /// RDMA/TCP of 2000.
    RdmaTcp(RdmaTcpConfig),
    /// Only of a listener: the client's first byte decides, which is `M` of MPA or the version of RDMA/TCP. Until it
    /// arrives, MPA's time limit for the start-up applies.
    Either(MpaConfig, RdmaTcpConfig),
}

impl Default for FramingConfig {
    fn default() -> Self {
        Self::Mpa(MpaConfig::default())
    }
}

impl FramingConfig {
    /// The time limit for streaming data that precede the framing, if the connection begins with them.
    pub fn streaming(&self) -> Option<Duration> {
        match self {
            Self::Mpa(config) => config.streaming,
            Self::RdmaTcp(_) | Self::Either(..) => None,
        }
    }
}

impl From<MpaConfig> for FramingConfig {
    fn from(config: MpaConfig) -> Self {
        Self::Mpa(config)
    }
}

impl From<RdmaTcpConfig> for FramingConfig {
    fn from(config: RdmaTcpConfig) -> Self {
        Self::RdmaTcp(config)
    }
}

/// The session of a connection, with either framing. `P` is [`Ulp::Placed`]. Each frame asks several times which it is, and a
/// discriminant in the unused values of another field takes seven instructions to read.
#[derive(Debug)]
#[repr(u8)]
pub(crate) enum AnySession<P> {
    /// With MPA.
    Mpa(Session<P, MpaConfig>),
    /// With RDMA/TCP.
    RdmaTcp(Session<P, Setup>),
    /// Of a responder that accepts both, before the client's first byte. The session waits, in place of the one that will
    /// be created.
    Undecided(Session<P, MpaConfig>, Box<Undecided>),
}

/// The parameters of the session, which is created when the client's first byte has arrived.
#[derive(Debug, Clone)]
pub(crate) struct Undecided {
    mpa: MpaConfig,
    rdma_tcp: RdmaTcpConfig,
    random: u128,
    listener: ListenerId,
    /// The time when the connection was accepted.
    since: Instant,
}

/// Calls a method of the session of either framing: `either!(&mut session => resume(now, ulp, conn, link))`.
macro_rules! either {
    ($any:expr => $method:ident($($argument:expr),*)) => {
        match $any {
            $crate::framing::AnySession::Mpa(session) | $crate::framing::AnySession::Undecided(session, _) => {
                session.$method($($argument),*)
            }
            $crate::framing::AnySession::RdmaTcp(session) => session.$method($($argument),*),
        }
    };
}
pub(crate) use either;

impl<P: Copy + fmt::Debug> AnySession<P> {
    /// See [`Session::initiator`]. `random` has 128 unpredictable bits.
    pub(crate) fn initiator(
        config: FramingConfig,
        random: u128,
        private_data: Vec<u8>,
        ird: u16,
        ord: u16,
    ) -> Result<Self, SetupError> {
        Ok(match config {
            FramingConfig::Mpa(config) => Self::Mpa(Session::initiator(config, private_data, ird, ord)?),
            FramingConfig::RdmaTcp(config) => {
                Self::RdmaTcp(Session::initiator(Setup { config, random }, private_data, ird, ord)?)
            }
            FramingConfig::Either(..) => return Err(SetupError::TwoFramings),
        })
    }

    /// See [`Session::responder`].
    pub(crate) fn responder(now: Instant, config: FramingConfig, random: u128, listener: ListenerId) -> Self {
        match config {
            FramingConfig::Mpa(config) => Self::Mpa(Session::responder(now, config, listener)),
            FramingConfig::RdmaTcp(config) => {
                Self::RdmaTcp(Session::responder(now, Setup { config, random }, listener))
            }
            FramingConfig::Either(mpa, rdma_tcp) => {
                let waiting = Session::responder(now, mpa.clone(), listener);
                Self::Undecided(waiting, Box::new(Undecided { mpa, rdma_tcp, random, listener, since: now }))
            }
        }
    }

    /// See [`Session::receive`].
    #[expect(clippy::inline_always, reason = "the first arm needs no `Carried` in memory")]
    #[inline(always)]
    pub(crate) fn receive<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        ulp: &mut U,
        conn: ConnId,
        path: &Path,
        link: &mut dyn Link,
        Carried { payload, frame, spare, fast }: Carried,
    ) -> Taken {
        debug_assert_eq!(fast, either!(&*self => allows_fast_path()));
        let mut outcome = Ok(false);
        if fast && frame.chunks() == 1 {
            let (offset, start, end) = (payload.offset, payload.start, payload.start + payload.len);
            let bytes = link.rx_head(&frame).get(start..end).unwrap_or_default();
            outcome = either!(&mut *self => take_whole(ulp, conn, offset, bytes));
        }
        if outcome == Ok(true) {
            link.recycle(frame);
            return Taken::Whole;
        }
        // A tuple, which is made here: a `Carried` would be kept in memory from the beginning.
        let rest = (payload, frame, spare, fast);
        self.receive_rest(now, &mut Upper { ulp, conn }, path, link, rest, outcome.map(drop))
    }

    /// The general arm of [`Self::receive`].
    #[inline(never)]
    fn receive_rest<U: Ulp<Placed = P>>(
        &mut self,
        now: Instant,
        upper: &mut Upper<'_, U>,
        path: &Path,
        link: &mut dyn Link,
        (payload, frame, spare, fast): (NewPayload, RxFrame, usize, bool),
        outcome: Result<(), Halt>,
    ) -> Taken {
        let carried = Carried { payload, frame, spare, fast };
        if let Self::Undecided(_, undecided) = self {
            // A later byte does not identify the framing; the client retransmits bytes that are not taken.
            let Some(first) = first_byte(link, &carried) else {
                link.recycle(carried.frame);
                return Taken::Not;
            };
            *self = undecided.decide(first);
        }
        either!(self => receive_rest(now, upper, path, link, carried, outcome))
    }
}

/// The first byte of the stream, if the payload begins with it.
fn first_byte(link: &dyn Link, Carried { payload, frame, .. }: &Carried) -> Option<u8> {
    let pieces = rx_pieces(link, frame, payload.start, payload.len.min(1));
    pieces.first()?.first().copied().filter(|_| payload.offset == 0)
}

impl Undecided {
    /// The session of a responder to a client whose first byte is `first`.
    #[cold]
    fn decide<P: Copy + fmt::Debug>(&self, first: u8) -> AnySession<P> {
        let Self { mpa, rdma_tcp, random, listener, since } = self.clone();
        let framing: FramingConfig = if first == rdma_tcp::VERSION { rdma_tcp.into() } else { mpa.into() };
        AnySession::responder(since, framing, random, listener)
    }
}
