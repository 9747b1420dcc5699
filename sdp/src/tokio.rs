//! Streams and listeners for tokio (feature `tokio`): [`SdpStream`] implements [`AsyncRead`] and [`AsyncWrite`], and
//! connecting and accepting are futures.
//!
//! SDP's service thread wakes the tasks, so no reactor is needed, and any runtime for standard futures works. Futures
//! may be dropped at any time. For time limits use `tokio::time::timeout`. Two tasks that use one stream each take a
//! clone of it.
//!
//! ```no_run
//! # use std::{io, net::SocketAddr};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use xwarp_sdp::{Sdp, SdpStream};
//!
//! # async fn ask(sdp: &Sdp, peer: SocketAddr) -> io::Result<()> {
//! let mut stream = SdpStream::connect_async(sdp, peer).await?;
//! stream.write_all(b"hello").await?;
//! let mut answer = [0; 5];
//! stream.read_exact(&mut answer).await?;
//! # Ok(())
//! # }
//! ```

use std::{
    future::poll_fn,
    io,
    net::{Shutdown, SocketAddr},
    pin::Pin,
    task::{Context, Poll},
};

use ::tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{listener::SdpListener, service::Sdp, socket::State, stream::SdpStream};

impl SdpStream {
    /// Connects to the SDP listener at `peer`. Dropping the future abandons the attempt.
    pub async fn connect_async(sdp: &Sdp, peer: SocketAddr) -> io::Result<Self> {
        let core = &sdp.0.core;
        let stream = Self::of(core.connect(core.identifier(None)?, peer)?, sdp);
        poll_fn(|cx| stream.poll_step(cx, |state| state.connected())).await?;
        Ok(stream)
    }

    /// Attempts `step`. If it must wait, the next change wakes the task.
    fn poll_step<R>(
        &self,
        cx: &Context<'_>,
        step: impl FnMut(&mut State) -> Option<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        let mut state = self.socket().lock();
        if let Some(outcome) = self.attempt(&mut state, step) {
            return Poll::Ready(outcome);
        }
        state.tasks.add(cx.waker());
        Poll::Pending
    }
}

impl AsyncRead for &SdpStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let out = buf.initialize_unfilled();
        let read = self.poll_step(cx, |state| self.read_step(state, out, false));
        read.map_ok(|n| buf.advance(n))
    }
}

impl AsyncWrite for &SdpStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        self.poll_step(cx, |state| self.write_step(state, bytes))
    }

    /// Data is always sent at once.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ends the sending direction.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.shutdown(Shutdown::Write))
    }
}

impl AsyncRead for SdpStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &*self).poll_read(cx, buf)
    }
}

impl AsyncWrite for SdpStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut &*self).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &*self).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut &*self).poll_shutdown(cx)
    }
}

impl SdpListener {
    /// The next connection and its peer's address. If none waits, the next one wakes the task.
    pub fn poll_accept(&self, cx: &Context<'_>) -> Poll<io::Result<(SdpStream, SocketAddr)>> {
        let mut waiting = self.backlog.lock();
        if let Some(accepted) = self.next(&mut waiting) {
            return Poll::Ready(accepted);
        }
        waiting.tasks.add(cx.waker());
        Poll::Pending
    }

    /// Waits for the next connection. Dropping the future loses no connection.
    pub async fn accept_async(&self) -> io::Result<(SdpStream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }
}
