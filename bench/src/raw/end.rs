//! [`End`]: one end of the raw reference on its interface.

use std::{
    hint,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use xwarp_driver::Interface;
use xwarp_tcp::{
    link::{Link as _, Pieces, QueueId, RxFrame, part},
    wire::Path,
};

use super::frame::{Head, Header, Kind};

/// Frames taken from the interface at a time.
const BATCH: usize = 64;
/// Empty polls between two readings of the clock.
const SPINS_PER_LOOK: u32 = 1024;
/// Longest sleep between two readings of the clock.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// Silence after which frames are considered lost.
const SILENCE: Duration = Duration::from_millis(20);
/// Silence after which the peer is considered dead.
const PATIENCE: Duration = Duration::from_secs(10);

/// One end: its interface, and the headers of its frames.
pub(super) struct End {
    interface: Interface,
    header: Header,
    queue: QueueId,
    mtu: usize,
    polling: bool,
    batch: Vec<RxFrame>,
    silent_since: Option<Instant>,
    probed: Option<Instant>,
    spins: u32,
}

/// The outcome of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// The peer may have sent something.
    Look,
    /// The peer has been silent for so long that frames are probably lost. Reported once per [`SILENCE`].
    Silent,
}

impl End {
    /// An end whose frames take `path`.
    pub(super) fn new(interface: Interface, path: &Path, polling: bool) -> Self {
        Self {
            interface,
            header: Header::new(path),
            queue: path.queue,
            mtu: path.mtu.into(),
            polling,
            batch: Vec::with_capacity(BATCH),
            silent_since: None,
            probed: None,
            spins: 0,
        }
    }

    /// Whether this end polls instead of sleeping.
    pub(super) fn set_polling(&mut self, polling: bool) {
        self.polling = polling;
    }

    /// Bytes of payload of a full frame. The MTU counts IP and TCP headers, not those of Ethernet.
    pub(super) fn payload_room(&self) -> usize {
        const ETHERNET: usize = 14;
        self.mtu + ETHERNET - self.header.bytes()
    }

    /// Full frames that fit into half of the receive chunks of the peer, which are as many as ours.
    pub(super) fn most_in_flight(&self) -> u32 {
        let chunks = (self.payload_room() + self.header.bytes()).div_ceil(self.interface.chunk_bytes());
        (self.interface.rx_capacity() / 2 / chunks).max(8) as u32
    }

    /// Copies `payload` behind the headers into a frame and puts it on the transmit ring. Returns false when
    /// there is no room; [`flush`](Self::flush) makes some.
    pub(super) fn submit(&mut self, kind: Kind, number: u32, payload: &[u8]) -> bool {
        let header = self.header.fast(kind, number, payload);
        submit(&mut self.interface, self.queue, header, payload)
    }

    /// Sends one frame with a valid checksum.
    pub(super) fn send_checked(&mut self, kind: Kind, number: u32, payload: &[u8]) -> Result<()> {
        let header = self.header.checked(kind, number, payload);
        ensure!(submit(&mut self.interface, self.queue, &header, payload), "there is no free frame to send");
        self.flush();
        Ok(())
    }

    /// Makes the kernel send the submitted frames.
    pub(super) fn flush(&mut self) {
        self.interface.flush();
    }

    /// Takes the received frames; `frame` sees the header and the payload of each. Returns their number.
    pub(super) fn receive(&mut self, mut frame: impl FnMut(Head, Pieces<'_>)) -> usize {
        self.interface.receive(&mut self.batch, BATCH);
        let taken = self.batch.len();
        for received in self.batch.drain(..) {
            let chunks = self.interface.rx_chunks(&received);
            if let Some(head) = chunks.first().and_then(|first| self.header.parse(first)) {
                frame(head, part(&chunks, self.header.bytes(), head.len));
            }
            drop(chunks);
            self.interface.recycle(received);
        }
        if taken > 0 {
            (self.silent_since, self.probed, self.spins) = (None, None, 0);
        }
        taken
    }

    /// Spins once, or sleeps until a frame arrives.
    pub(super) fn wait(&mut self) -> Result<Wait> {
        if self.polling {
            self.spins += 1;
            if !self.spins.is_multiple_of(SPINS_PER_LOOK) {
                hint::spin_loop();
                return Ok(Wait::Look);
            }
        } else {
            sleep(&self.interface)?;
        }
        // Frames that the kernel did not take at once: no descriptor signals room.
        if self.interface.unsent() > 0 {
            self.flush();
        }
        let now = Instant::now();
        let silence = now - *self.silent_since.get_or_insert(now);
        ensure!(silence < PATIENCE, "no frame arrived from the other end for {} seconds", PATIENCE.as_secs());
        if now - *self.probed.get_or_insert(now) < SILENCE {
            return Ok(Wait::Look);
        }
        self.probed = Some(now);
        Ok(Wait::Silent)
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

fn submit(interface: &mut Interface, queue: QueueId, header: &[u8], payload: &[u8]) -> bool {
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
    let sent = rest.is_empty() && interface.submit(queue, &mut frame, len).is_ok();
    // The frame becomes free when the kernel has sent it.
    interface.release(frame);
    sent
}
