//! [`End`]: one end of the raw reference on its interface.

use std::{
    hint,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use xwarp_tcp::{
    link::{Pieces, part},
    wire::Path,
};

use super::{
    frame::{Head, Header, Kind},
    wire::Wire,
};

/// Empty polls between two readings of the clock.
const SPINS_PER_LOOK: u32 = 1024;
/// Silence after which frames are considered lost.
const SILENCE: Duration = Duration::from_millis(20);
/// Silence after which the peer is considered dead.
const PATIENCE: Duration = Duration::from_secs(10);

/// One end: its interface, and the headers of its frames.
pub(super) struct End<W> {
    wire: W,
    header: Header,
    mtu: usize,
    polling: bool,
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

impl<W: Wire> End<W> {
    /// An end whose frames take `path`.
    pub(super) fn new(wire: W, path: &Path, polling: bool) -> Self {
        Self {
            wire,
            header: Header::new(path),
            mtu: path.mtu.into(),
            polling,
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
        let (count, bytes) = self.wire.receive_chunks();
        let chunks = (self.payload_room() + self.header.bytes()).div_ceil(bytes);
        (count / 2 / chunks).max(8) as u32
    }

    /// Copies `payload` behind the headers into a frame and puts it on the transmit ring. Returns false when
    /// there is no room; [`flush`](Self::flush) makes some.
    pub(super) fn submit(&mut self, kind: Kind, number: u32, payload: &[u8]) -> bool {
        let header = self.header.fast(kind, number, payload);
        self.wire.submit(header, payload)
    }

    /// Sends one frame with a valid checksum.
    pub(super) fn send_checked(&mut self, kind: Kind, number: u32, payload: &[u8]) -> Result<()> {
        let header = self.header.checked(kind, number, payload);
        ensure!(self.wire.submit(&header, payload), "there is no free frame to send");
        self.flush();
        Ok(())
    }

    /// Makes the kernel send the submitted frames.
    pub(super) fn flush(&mut self) {
        self.wire.flush();
    }

    /// Takes the received frames; `frame` sees the header and the payload of each. Returns their number.
    pub(super) fn receive(&mut self, mut frame: impl FnMut(Head, Pieces<'_>)) -> usize {
        let header = &self.header;
        let taken = self.wire.receive(|chunks| {
            if let Some(head) = chunks.first().and_then(|first| header.parse(first)) {
                frame(head, part(chunks, header.bytes(), head.len));
            }
        });
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
            self.wire.sleep()?;
        }
        // Frames that the kernel did not take at once: no descriptor signals room.
        if self.wire.has_unsent() {
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
