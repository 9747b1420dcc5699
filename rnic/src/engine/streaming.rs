//! Streaming data before MPA (RFC 5044 sections 7.1.3 and 7.1.5), on connections whose
//! [`MpaConfig::streaming`](xwarp_tcp::mpa::MpaConfig::streaming) enables it.

use xwarp_tcp::{link::Link, time::Instant};

use super::Engine;
use crate::rnic::{CmError, RequestId, StreamId};

impl Engine {
    /// Queues streaming bytes. Returns the number of bytes taken, which is less than all when 64 KiB are waiting to be
    /// sent.
    pub fn stream_send(&mut self, stream: StreamId, bytes: &[u8]) -> Result<usize, CmError> {
        let conn = self.rnic.stream_connection(stream)?;
        Ok(self.stack.stream_send(conn, bytes)?)
    }

    /// Copies streaming bytes of the peer into `out` and returns their number. Another
    /// [`CmEvent::StreamReadable`](crate::rnic::CmEvent::StreamReadable) follows only after all bytes were read.
    pub fn stream_recv(
        &mut self,
        link: &mut dyn Link,
        stream: StreamId,
        out: &mut [u8],
    ) -> Result<usize, CmError> {
        let conn = self.rnic.stream_connection(stream)?;
        Ok(self.stack.stream_recv(link, conn, out)?)
    }

    /// Begins MPA after the streaming bytes that were sent and read; `last` is sent before it. A responder's
    /// [`CmEvent::ConnectRequest`](crate::rnic::CmEvent::ConnectRequest) or an initiator's
    /// [`CmEvent::Established`](crate::rnic::CmEvent::Established) follows.
    pub fn begin_mpa(
        &mut self,
        now: Instant,
        link: &mut dyn Link,
        stream: StreamId,
        last: &[u8],
    ) -> Result<(), CmError> {
        let conn = self.rnic.stream_connection(stream)?;
        Ok(self.stack.begin_mpa(now, link, conn, last, &mut self.rnic)?)
    }

    /// Resets a responder's connection before it was accepted or rejected.
    pub fn abandon(&mut self, request: RequestId) -> Result<(), CmError> {
        let conn = self.rnic.stream_connection(StreamId::Request(request))?;
        self.rnic.rejected(request);
        self.stack.abort(conn);
        Ok(())
    }
}
