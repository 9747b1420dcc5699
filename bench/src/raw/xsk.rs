//! [`Xsk`]: frames through xsk-rs and the program that libxdp loads, which redirects every frame of the queue. Nothing of xwarp's
//! driver is in the path of a frame, so this wire is the limit that the driver is measured against.
//!
//! Each descriptor of a frame is in one place: the list of free ones, a ring, or the frame that is being received. The crate's
//! functions are unsafe because it does not check this.

#![expect(unsafe_code, reason = "the functions of xsk-rs are unsafe; see the module's argument")]

use std::{
    num::NonZeroU32,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use smallvec::SmallVec;
use xsk_rs::{
    CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem,
    config::{BindFlags, QueueSize, SocketConfig, UmemConfig, XdpFlags},
};
use xwarp_driver::SINGLE_CHUNK_MTU;

use super::wire::{BATCH, NAP, Wire};

/// Bytes of a frame in a chunk. xsk-rs leaves as many free at the start of a chunk to send as the kernel does in a received one.
const ROOM: usize = 4096 - 256;
/// Chunks for each direction: few enough to stay in the cache, or enough for a window of frames of many chunks.
const FEW: u32 = 256;
const MANY: u32 = 2048;
/// The descriptor of a frame's chunk that another one follows (`XDP_PKT_CONTD`).
const CONTINUED: u32 = 1;
/// A queue stays busy for some milliseconds after its last socket was closed.
const BUSY: Duration = Duration::from_secs(2);

/// See the module.
pub(super) struct Xsk {
    umem: Umem,
    fill: FillQueue,
    completion: CompQueue,
    transmit: TxQueue,
    receive: RxQueue,
    chunks: u32,
    /// Free chunks to send. The one that became free last is used first.
    free: Vec<FrameDesc>,
    /// For the descriptors that come from a ring.
    batch: [FrameDesc; BATCH],
    /// Chunks of a frame whose other chunks have not been received yet.
    part: SmallVec<[FrameDesc; 32]>,
    /// A frame is on the transmit ring.
    unsent: bool,
}

/// The parts of a socket.
type Parts = (TxQueue, RxQueue, Option<(FillQueue, CompQueue)>);

impl Xsk {
    /// Binds queue `queue` of `interface`, in generic or native XDP.
    pub(super) fn open(interface: &str, queue: u32, mtu: u16, generic: bool) -> Result<Self> {
        let several = mtu > SINGLE_CHUNK_MTU;
        let chunks = if several { MANY } else { FEW };
        let size = QueueSize::new(chunks)?;
        let config = UmemConfig::builder().fill_queue_size(size).comp_queue_size(size).build()?;
        let count = NonZeroU32::new(2 * chunks).context("no chunks")?;
        let (umem, mut free) = Umem::new(config, count, false).context("cannot register memory")?;
        let mut bind = BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP;
        bind.set(BindFlags::XDP_USE_SG, several);
        let mode = if generic { XdpFlags::XDP_FLAGS_SKB_MODE } else { XdpFlags::XDP_FLAGS_DRV_MODE };
        let socket = SocketConfig::builder()
            .rx_queue_size(size)
            .tx_queue_size(size)
            .xdp_flags(mode | XdpFlags::XDP_FLAGS_UPDATE_IF_NOEXIST)
            .bind_flags(bind)
            .build();
        let (transmit, receive, rings) = bind_when_free(socket, &umem, interface, queue)?;
        let (mut fill, completion) = rings.context("the memory has another socket")?;
        let filled = free.split_off(chunks as usize);
        // SAFETY: these descriptors are in no other place.
        unsafe { fill.produce(&filled) };
        Ok(Self {
            umem,
            fill,
            completion,
            transmit,
            receive,
            chunks,
            free,
            batch: [FrameDesc::default(); BATCH],
            part: SmallVec::new(),
            unsent: false,
        })
    }

    /// Takes back the chunks that the kernel has sent.
    fn reclaim(&mut self) {
        loop {
            // SAFETY: the descriptors in `batch` are copies that are not used any more.
            let sent = unsafe { self.completion.consume(&mut self.batch) };
            self.free.extend_from_slice(&self.batch[..sent]);
            if sent < BATCH {
                return;
            }
        }
    }
}

fn bind_when_free(config: SocketConfig, umem: &Umem, interface: &str, queue: u32) -> Result<Parts> {
    let name = interface.parse().context("the interface's name")?;
    let end = Instant::now() + BUSY;
    loop {
        // SAFETY: the memory has no other socket, so the rule for programs of shared memory does not apply.
        match unsafe { Socket::new(config, umem, &name, queue) } {
            Ok(parts) => return Ok(parts),
            Err(error) if Instant::now() >= end => {
                return Err(error)
                    .with_context(|| format!("xsk-rs cannot bind queue {queue} of {interface}"));
            }
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

impl Wire for Xsk {
    fn receive_chunks(&self) -> (usize, usize) {
        (self.chunks as usize, ROOM)
    }

    fn submit(&mut self, header: &[u8], payload: &[u8]) -> bool {
        let count = (header.len() + payload.len()).div_ceil(ROOM);
        if self.free.len() < count {
            self.reclaim();
        }
        let Some(first) = self.free.len().checked_sub(count) else { return false };
        let (mut head, mut rest) = (header, payload);
        // From the end, where the hot ones are.
        let frame = &mut self.free[first..];
        for (index, chunk) in frame.iter_mut().enumerate() {
            chunk.set_options(if index + 1 < count { CONTINUED } else { 0 });
            // SAFETY: the chunk is free, so nobody else reads or writes it.
            let mut data = unsafe { self.umem.data_mut(chunk) };
            let mut to = data.cursor();
            to.set_pos(ROOM.min(head.len() + rest.len()));
            let bytes = data.contents_mut();
            let (start, room) = bytes.split_at_mut(head.len());
            start.copy_from_slice(head);
            let (now, later) = rest.split_at(room.len());
            room.copy_from_slice(now);
            (head, rest) = (&[], later);
        }
        // SAFETY: the chunks are free, and are removed from the list when the ring has them. The ring takes all or none.
        let sent = unsafe { self.transmit.produce(frame) } == count;
        if sent {
            self.free.truncate(first);
            self.unsent = true;
        }
        sent
    }

    fn flush(&mut self) {
        let mut free = self.transmit.nb_free(self.chunks);
        // A kick sends at most 32 chunks.
        while self.unsent {
            // The errors that end a kick are those of the interface, which the silence of the peer shows.
            _ = self.transmit.wakeup();
            let now = self.transmit.nb_free_exact();
            self.unsent = now < self.chunks;
            if now <= free && self.unsent {
                break;
            }
            free = now;
        }
        self.reclaim();
    }

    fn has_unsent(&mut self) -> bool {
        self.unsent
    }

    fn receive(&mut self, mut frame: impl FnMut(&[&[u8]])) -> usize {
        // SAFETY: the descriptors in `batch` are copies that are not used any more.
        let taken = unsafe { self.receive.consume(&mut self.batch) };
        let mut frames = 0;
        for &chunk in &self.batch[..taken] {
            self.part.push(chunk);
            if chunk.has_more_frames() {
                continue;
            }
            {
                // SAFETY: the chunk has been received and is not on the fill ring yet, so the kernel does not write it.
                let chunks = self.part.iter().map(|chunk| unsafe { self.umem.data(chunk) }.contents());
                frame(&chunks.collect::<SmallVec<[&[u8]; 32]>>());
            }
            frames += 1;
            // SAFETY: nothing refers to these chunks any more. The ring has room for all chunks of this direction.
            unsafe { self.fill.produce(&self.part) };
            self.part.clear();
        }
        frames
    }

    fn sleep(&mut self) -> Result<()> {
        match self.receive.poll((NAP.tv_nsec / 1_000_000) as i32) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error).context("waiting for a frame"),
        }
    }
}
