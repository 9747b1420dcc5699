//! The source of TCP's payload: the connection's framing, which pulls ULPDUs from the upper layer.

use crate::{
    framing::{AnySession, either},
    link::FrameWriter,
    seq::StreamOffset,
    tcp::{Filled, Source},
    time::Instant,
    ulp::{ConnId, Ulp},
};

/// The arguments of [`Source::fill`] for one connection.
pub(super) struct FramingSource<'a, U: Ulp> {
    pub(super) now: Instant,
    pub(super) emss: usize,
    pub(super) session: &'a mut AnySession<U::Placed>,
    pub(super) ulp: &'a mut U,
    pub(super) conn: ConnId,
}

impl<U: Ulp> Source for FramingSource<'_, U> {
    fn has_data(&self) -> bool {
        either!(&*self.session => has_data(self.ulp, self.conn))
    }

    fn fill(&mut self, offset: StreamOffset, out: &mut FrameWriter<'_>) -> Filled {
        either!(&mut *self.session => fill(self.now, self.ulp, self.conn, offset, self.emss, out))
    }
}
