//! The source of TCP's payload: the connection's framing, which pulls ULPDUs from the upper layer.

use crate::{
    framing::{AnySession, either},
    link::FrameWriter,
    seq::StreamOffset,
    tcp::{Filled, Source},
    time::Instant,
    ulp::{ConnId, Ulp},
};

/// What is known of the upper layer's data for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Supply {
    /// Nothing: the framing has to be asked.
    Unknown,
    /// When the connection last sent, it allowed the fast path, and the upper layer had nothing more to send. It calls
    /// [`Stack::wake`](super::Stack::wake) when it has data again.
    Dry,
    /// The upper layer has called [`Stack::wake`](super::Stack::wake) since the connection last sent, so it probably has data.
    Announced,
}

/// The arguments of [`Source::fill`] for one connection.
pub(super) struct FramingSource<'a, U: Ulp> {
    pub(super) now: Instant,
    pub(super) emss: usize,
    pub(super) session: &'a mut AnySession<U::Placed>,
    /// See [`Supply::Announced`].
    pub(super) announced: bool,
    pub(super) ulp: &'a mut U,
    pub(super) conn: ConnId,
}

impl<U: Ulp> Source for FramingSource<'_, U> {
    fn has_data(&self) -> bool {
        either!(&*self.session => has_data(self.ulp, self.conn))
    }

    fn may_have_data(&self) -> bool {
        self.announced || self.has_data()
    }

    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled {
        either!(&mut *self.session => fill(self.now, self.ulp, self.conn, offset, self.emss, out))
    }
}
