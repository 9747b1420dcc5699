//! Streaming data before MPA (RFC 5044 sections 7.1.3 and 7.1.5), on connections whose
//! [`MpaConfig::streaming`](crate::mpa::MpaConfig::streaming) enables it.

use super::{AcceptError, Stack};
use crate::{
    framing::either,
    link::Link,
    tcp::State,
    time::Instant,
    ulp::{ConnId, Ulp},
};

impl<U: Ulp> Stack<U> {
    /// Queues streaming bytes. Returns the number of bytes taken, which is less than all when 64 KiB are waiting to be
    /// sent.
    pub fn stream_send(&mut self, conn: ConnId, bytes: &[u8]) -> Result<usize, AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        let taken = either!(&mut slot.session => stream_send(bytes))?;
        self.make_ready(conn.index);
        Ok(taken)
    }

    /// Copies streaming bytes of the peer into `out` and returns their number. Bytes that are not read when MPA begins
    /// belong to MPA.
    pub fn stream_recv(
        &mut self,
        link: &mut dyn Link,
        conn: ConnId,
        out: &mut [u8],
    ) -> Result<usize, AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        let taken = either!(&mut slot.session => stream_recv(link, out))?;
        self.count_memory(conn.index);
        Ok(taken)
    }

    /// Begins MPA after the streaming bytes that were sent and read; `last` is sent before it. The responder should
    /// call this with its last streaming bytes, the initiator when it has received them. The events of an MPA start-up
    /// follow.
    pub fn begin_mpa(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        conn: ConnId,
        last: &[u8],
        ulp: &mut U,
    ) -> Result<(), AcceptError> {
        let slot = self.slot(conn).ok_or(AcceptError::NotWaiting)?;
        let path = *slot.tcp.path();
        either!(&mut slot.session => begin_mpa(now, ulp, conn, &path, link, last))?;
        self.after_change(now, link, conn.index, None, ulp);
        Ok(())
    }

    /// Reports connection `index` when its TCP is established and it carries streaming data.
    pub(super) fn report_streaming(&mut self, now: Instant, index: u32, ulp: &mut U) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && slot.tcp.state() == State::Established
            && either!(&slot.session => awaits_report())
        {
            let conn = ConnId { index, generation: slot.generation };
            let path = *slot.tcp.path();
            either!(&mut slot.session => report_streaming(now, ulp, conn, &path));
        }
    }
}
