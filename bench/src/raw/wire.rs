//! [`Wire`]: the interface of an end, through xwarp's driver or through xsk-rs (`xsk`). The rows are the same over both.

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use xwarp_driver::Interface;
use xwarp_tcp::link::{Link as _, QueueId, RxFrame};

/// Frames taken from an interface at a time.
pub(super) const BATCH: usize = 64;
/// Longest sleep between two readings of the clock.
pub(super) const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Sends and receives the frames of one flow.
pub(super) trait Wire {
    /// Receive chunks, and the bytes of one.
    fn receive_chunks(&self) -> (usize, usize);

    /// Copies a frame's header and payload into free chunks and puts them on the transmit ring. Returns false when there is no room;
    /// [`flush`](Self::flush) makes some.
    fn submit(&mut self, header: &[u8], payload: &[u8]) -> bool;

    /// Makes the kernel send the submitted frames.
    fn flush(&mut self);

    /// Whether frames are submitted that the kernel did not take in the last flush. No descriptor signals room.
    fn has_unsent(&mut self) -> bool;

    /// Takes some received frames; `frame` sees the chunks of each. Returns their number.
    fn receive(&mut self, frame: impl FnMut(&[&[u8]])) -> usize;

    /// Waits until a frame arrives, for at most [`NAP`].
    fn sleep(&mut self) -> Result<()>;
}

/// xwarp's driver.
pub(super) struct Driver {
    interface: Interface,
    queue: QueueId,
    batch: Vec<RxFrame>,
}

impl Driver {
    /// The frames that `interface` steers to us, sent on `queue`.
    pub(super) fn new(interface: Interface, queue: QueueId) -> Self {
        Self { interface, queue, batch: Vec::with_capacity(BATCH) }
    }
}

impl Wire for Driver {
    fn receive_chunks(&self) -> (usize, usize) {
        (self.interface.rx_capacity(), self.interface.chunk_bytes())
    }

    fn submit(&mut self, header: &[u8], payload: &[u8]) -> bool {
        let Self { interface, queue, .. } = self;
        let len = header.len() + payload.len();
        let Some(mut frame) = interface.alloc(len) else { return false };
        let mut rest = payload;
        if let Some(chunks) = interface.tx_chunks(&mut frame) {
            let mut at = header.len();
            for (index, chunk) in chunks.into_iter().enumerate() {
                if index == 0 {
                    chunk[..at].copy_from_slice(header);
                }
                let (now, later) = rest.split_at(rest.len().min(chunk.len() - at));
                chunk[at..at + now.len()].copy_from_slice(now);
                (rest, at) = (later, 0);
            }
        }
        let sent = rest.is_empty() && interface.submit(*queue, &mut frame, len).is_ok();
        // The frame becomes free when the kernel has sent it.
        interface.release(frame);
        sent
    }

    fn flush(&mut self) {
        self.interface.flush();
    }

    fn has_unsent(&mut self) -> bool {
        self.interface.unsent() > 0
    }

    fn receive(&mut self, mut frame: impl FnMut(&[&[u8]])) -> usize {
        let Self { interface, batch, .. } = self;
        interface.receive(batch, BATCH);
        let taken = batch.len();
        for received in batch.drain(..) {
            frame(&interface.rx_chunks(&received));
            interface.recycle(received);
        }
        taken
    }

    fn sleep(&mut self) -> Result<()> {
        sleep(&self.interface)
    }
}

/// Waits until a frame arrives, for at most [`NAP`].
pub(super) fn sleep(interface: &Interface) -> Result<()> {
    let mut list: Vec<PollFd<'_>> =
        interface.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    match poll(&mut list, Some(&NAP)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error).context("waiting for a frame"),
    }
}
