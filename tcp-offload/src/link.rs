//! [`Link`]: the interface of the stack to a network interface, and the frame tokens that cross it.
//!
//! A frame is a chain of one or more chunks of memory that the link owns (AF_XDP: of its UMEM). Budgets count chunks.
//! All headers lie in the first chunk of a frame. The stack holds frames as move-only tokens, [`RxFrame`] and
//! [`TxFrame`]. The holder of the token owns the frame, and the link knows the state of each chunk: free, on the fill
//! ring, received (token out), retained (token out), being sent, or being sent and already released. The AF_XDP driver
//! and the simulator implement this trait; [`crate::stack::Stack`] calls it.

mod batch;
mod forward;
mod looped;

use std::{
    fmt,
    net::IpAddr,
    num::{NonZeroU16, NonZeroU64},
};

use smallvec::SmallVec;

pub use self::{batch::Batch, looped::LoopedFrames};
use crate::wire::Flow;

/// A receive queue of the interface; a transmit queue has the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct QueueId(pub u16);

/// A received frame, owned by the stack until it is returned by [`Link::recycle`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is not recycled is leaked"]
pub struct RxFrame {
    /// The link's name for the first chunk.
    head: u32,
    /// Bytes of the whole frame, from the Ethernet header on.
    len: u32,
    chunks: u16,
    queue: QueueId,
}

impl RxFrame {
    /// A token, created by the link once for each received frame.
    pub const fn new(head: u32, chunks: u16, len: u32, queue: QueueId) -> Self {
        Self { head, len, chunks, queue }
    }

    /// The link's name for the first chunk.
    pub const fn head(&self) -> u32 {
        self.head
    }

    /// How many chunks the frame has; at least one.
    pub const fn chunks(&self) -> usize {
        self.chunks as usize
    }

    /// Bytes of the whole frame, from the Ethernet header on.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether the frame is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The queue on which it arrived.
    pub const fn queue(&self) -> QueueId {
        self.queue
    }
}

/// A frame to send, or one that was sent and is retained until it is acknowledged.
///
/// [`Link::release`] returns it to the link, even while the link is still sending it.
// One word, which is returned in a register. If its fields were stored one by one, loading them at once would wait for that.
#[derive(PartialEq, Eq)]
#[must_use = "a frame that is not released is leaked"]
pub struct TxFrame(NonZeroU64);

impl TxFrame {
    /// A token, created by the link in [`Link::alloc`]. A frame has at least one chunk.
    pub fn new(head: u32, chunks: u16) -> Self {
        Self::of(head, chunks, 0)
    }

    /// The name is in the lowest 32 bits of the word, the number of chunks in the next 16. The highest 16 bits are the place of the
    /// TCP header whose checksum is left to the link, or 0.
    #[inline]
    fn of(head: u32, chunks: u16, left_checksum: u16) -> Self {
        let word = u64::from(head) | u64::from(chunks.max(1)) << 32 | u64::from(left_checksum) << 48;
        // The number of chunks is not 0, so the word is not.
        Self(NonZeroU64::new(word).unwrap_or(NonZeroU64::MIN))
    }

    /// The link's name for the first chunk.
    pub const fn head(&self) -> u32 {
        self.0.get() as u32
    }

    /// How many chunks the frame has; at least one.
    pub const fn chunks(&self) -> usize {
        (self.0.get() >> 32) as u16 as usize
    }

    /// Leaves the checksum of the TCP header that begins at byte `header` of the frame to the link, which must
    /// [offload](Link::offloads_checksums) it: the field contains the sum of the pseudo-header. `None` if it is complete.
    pub fn leave_checksum(&mut self, header: Option<NonZeroU16>) {
        *self = Self::of(self.head(), self.chunks() as u16, header.map_or(0, NonZeroU16::get));
    }

    /// For the link: where the TCP header begins whose checksum was [left](Self::leave_checksum) to the link.
    pub const fn left_checksum(&self) -> Option<NonZeroU16> {
        NonZeroU16::new((self.0.get() >> 48) as u16)
    }

    /// For the link: removes all chunks but the first `chunks` from the frame.
    pub fn shorten(&mut self, chunks: u16) {
        *self = Self::of(self.head(), chunks, self.left_checksum().map_or(0, NonZeroU16::get));
    }
}

impl fmt::Debug for TxFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TxFrame")
            .field("head", &self.head())
            .field("chunks", &self.chunks())
            .field("left_checksum", &self.left_checksum())
            .finish()
    }
}

/// The transmit ring has no room: flush, which collects completions, and try again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the transmit ring is full")]
pub struct RingFull;

/// A steering rule: the received frames that the interface hands to the stack instead of to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Steer {
    /// Every TCP segment of one connection, and ICMP errors that quote it.
    Flow(Flow),
    /// SYNs to a port, on one local address or (`None`) on any of the interface's.
    Listener {
        /// The local address; `None` is the wildcard of both families.
        addr: Option<IpAddr>,
        /// The local TCP port.
        port: u16,
    },
}

/// The interface refused a steering rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("steering rule refused: {0}")]
pub struct SteerError(pub String);

/// Chunks of a frame up to which lists of chunks and pieces need no allocation: the longest IP packet with its Ethernet
/// header, in AF_XDP chunks of 3840 usable bytes.
const MAX_CHUNKS: usize = 18;

/// The writable chunks of one frame, in order.
#[derive(Debug, Default)]
pub struct ChunksMut<'a> {
    /// The first chunk, apart from the others: most frames have no more, and a list takes longer.
    first: &'a mut [u8],
    others: SmallVec<[&'a mut [u8]; MAX_CHUNKS - 1]>,
}

impl<'a> ChunksMut<'a> {
    /// Appends a chunk, which is not empty.
    #[inline]
    pub fn push(&mut self, chunk: &'a mut [u8]) {
        if self.first.is_empty() {
            self.first = chunk;
        } else {
            self.others.push(chunk);
        }
    }

    /// Chunk `index`; an empty one behind the last.
    #[inline]
    pub fn chunk(&self, index: usize) -> &[u8] {
        if index == 0 { self.first } else { self.others.get(index - 1).map_or(&[], |chunk| chunk) }
    }

    /// [`Self::chunk`], to write to it.
    #[inline]
    pub fn chunk_mut(&mut self, index: usize) -> &mut [u8] {
        if index == 0 { self.first } else { self.others.get_mut(index - 1).map_or(&mut [], |chunk| chunk) }
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&*self.first).chain(self.others.iter().map(|chunk| &**chunk))
    }
}

impl<'a> IntoIterator for ChunksMut<'a> {
    type Item = &'a mut [u8];
    type IntoIter =
        std::iter::Chain<std::iter::Once<&'a mut [u8]>, smallvec::IntoIter<[&'a mut [u8]; MAX_CHUNKS - 1]>>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.first).chain(self.others)
    }
}

impl<'a> Extend<&'a mut [u8]> for ChunksMut<'a> {
    fn extend<I: IntoIterator<Item = &'a mut [u8]>>(&mut self, chunks: I) {
        chunks.into_iter().for_each(|chunk| self.push(chunk));
    }
}

impl<'a> FromIterator<&'a mut [u8]> for ChunksMut<'a> {
    fn from_iter<I: IntoIterator<Item = &'a mut [u8]>>(chunks: I) -> Self {
        let mut list = Self::default();
        list.extend(chunks);
        list
    }
}

/// Readable pieces of bytes that belong together, in order: a payload across chunks, markers and frames.
pub type Pieces<'a> = SmallVec<[&'a [u8]; MAX_CHUNKS]>;

/// The `len` bytes from byte `start` on of the bytes in `chunks`; fewer when the chunks are shorter.
pub fn part<'a>(chunks: &[&'a [u8]], start: usize, len: usize) -> Pieces<'a> {
    let mut pieces = Pieces::from_slice(chunks);
    trim(&mut pieces, start, len);
    pieces
}

/// Shortens `pieces` to the `len` bytes from byte `start` on, or to fewer when it has fewer.
fn trim(pieces: &mut Pieces<'_>, start: usize, len: usize) {
    let (mut skip, mut want) = (start, len);
    pieces.retain(|piece| {
        let before = skip.min(piece.len());
        skip -= before;
        let rest = piece.get(before..).unwrap_or_default();
        *piece = rest.get(..want).unwrap_or(rest);
        want -= piece.len();
        !piece.is_empty()
    });
}

/// Copies the bytes of `raw` from position `at` on into `out`; bytes beyond the end of `raw` stay as they are.
#[inline]
pub(crate) fn read_at(raw: &[&[u8]], mut at: usize, out: &mut [u8]) {
    if let [piece] = raw
        && let Some(bytes) = piece.get(at..at + out.len())
    {
        return out.copy_from_slice(bytes);
    }
    let mut done = 0;
    for piece in raw {
        let rest = piece.get(at..).unwrap_or_default();
        at = at.saturating_sub(piece.len());
        for (to, from) in out.iter_mut().skip(done).zip(rest) {
            *to = *from;
            done += 1;
        }
    }
}

/// The `len` bytes from byte `start` on of a received frame, across its chunks; fewer when the frame is shorter.
pub fn rx_pieces<'a>(link: &'a dyn Link, frame: &RxFrame, start: usize, len: usize) -> Pieces<'a> {
    let mut pieces = link.rx_chunks(frame);
    trim(&mut pieces, start, len);
    pieces
}

/// Number of transmit chunks of a frame of `len` bytes.
pub fn chunks_for(link: &dyn Link, len: usize) -> usize {
    chunks_of(link.chunk_bytes(), len)
}

/// Number of chunks of `chunk_bytes` that a frame of `len` bytes takes.
#[inline]
pub(crate) fn chunks_of(chunk_bytes: usize, len: usize) -> usize {
    // A division takes longer than the rest of this function.
    if len <= chunk_bytes { 1 } else { len.div_ceil(chunk_bytes.max(1)) }
}

/// A write position that walks the chunks of a frame from front to back.
#[derive(Debug)]
pub struct FrameWriter<'a> {
    chunks: ChunksMut<'a>,
    /// Index of the current chunk, and the position of its first byte.
    chunk: usize,
    chunk_start: usize,
    /// Bytes from the frame's start to the write position and to the end of the writable range.
    position: usize,
    limit: usize,
}

impl<'a> FrameWriter<'a> {
    /// A writer of the bytes from `start` to `limit` of the frame (fewer when the chunks are shorter).
    pub fn new(chunks: ChunksMut<'a>, start: usize, limit: usize) -> Self {
        let mut writer = Self { chunks, ..Self::closed() };
        writer.start(start, limit);
        writer
    }

    /// A writer without memory, until it is [opened](Self::open).
    #[inline]
    pub fn closed() -> Self {
        Self { chunks: ChunksMut::default(), chunk: 0, chunk_start: 0, position: 0, limit: 0 }
    }

    /// Writes from now on the bytes from `start` to `limit` of `frame`; the writer was [closed](Self::closed) before. Returns false
    /// while the link still reads the frame.
    #[inline]
    pub fn open(
        &mut self,
        link: &'a mut (dyn Link + '_),
        frame: &mut TxFrame,
        start: usize,
        limit: usize,
    ) -> bool {
        let opened = link.tx_chunks_into(frame, &mut self.chunks);
        self.start(start, limit);
        opened
    }

    #[expect(clippy::inline_always, reason = "each frame calls it once")]
    #[inline(always)]
    fn start(&mut self, start: usize, limit: usize) {
        if self.chunks.others.is_empty() {
            self.limit = self.chunks.first.len().min(limit);
            self.position = start.min(self.limit);
        } else {
            self.start_in_chain(start, limit);
        }
    }

    fn start_in_chain(&mut self, start: usize, limit: usize) {
        self.limit = self.chunks.iter().map(<[u8]>::len).sum::<usize>().min(limit);
        self.position = start.min(self.limit);
        while self.at() > self.chunks.chunk(self.chunk).len() {
            self.chunk_start += self.chunks.chunk(self.chunk).len();
            self.chunk += 1;
        }
    }

    /// The write position in the current chunk. It is not stored besides [`position`](Self::position): after a copy, a load of
    /// two fields that were stored apart would wait until all copied bytes are in the cache.
    #[inline]
    fn at(&self) -> usize {
        self.position - self.chunk_start
    }

    /// Moves the write position back to `position`, as if nothing had been written since.
    #[cold]
    pub(crate) fn rewind(&mut self, position: usize) {
        (self.chunk, self.chunk_start) = (0, 0);
        self.start(position, self.limit);
    }

    /// Bytes from the frame's start to the write position.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes that can still be written.
    #[inline]
    pub fn room(&self) -> usize {
        self.limit - self.position
    }

    /// The memory from the write position to the end of its chunk, or of the next one, as far as there is room. The position
    /// moves with [`Self::advance`].
    #[inline]
    pub(crate) fn rest_of_chunk(&mut self) -> &mut [u8] {
        let room = self.room();
        if room > 0 && self.at() == self.chunks.chunk(self.chunk).len() {
            self.chunk += 1;
            self.chunk_start = self.position;
        }
        let at = self.at();
        let rest = self.chunks.chunk_mut(self.chunk).get_mut(at..).unwrap_or_default();
        let most = rest.len().min(room);
        rest.get_mut(..most).unwrap_or_default()
    }

    /// Moves the write position past `n` bytes of [`Self::rest_of_chunk`].
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        self.position += n;
    }

    /// Writes as many of `bytes` as fit; returns their number.
    #[inline]
    pub fn put(&mut self, mut bytes: &[u8]) -> usize {
        let total = bytes.len();
        while !bytes.is_empty() {
            let space = self.rest_of_chunk();
            let n = space.len().min(bytes.len());
            if n == 0 {
                break;
            }
            let (now, later) = bytes.split_at(n);
            if let Some(to) = space.get_mut(..n) {
                to.copy_from_slice(now);
            }
            self.advance(n);
            bytes = later;
        }
        total - bytes.len()
    }

    /// Like [`Self::put`], for a field of a few bytes, which nearly always lies in one chunk.
    #[inline]
    pub fn put_field<const N: usize>(&mut self, field: [u8; N]) -> usize {
        let at = self.at();
        let space = self.chunks.chunk_mut(self.chunk).get_mut(at..);
        if self.limit - self.position >= N
            && let Some(to) = space.and_then(|space| space.first_chunk_mut())
        {
            *to = field;
            self.position += N;
            return N;
        }
        self.put(&field)
    }

    /// The next `n` bytes, if there is room for them and they lie in one chunk; the position moves past them.
    #[inline]
    pub fn contiguous(&mut self, n: usize) -> Option<&mut [u8]> {
        if self.room() < n {
            return None;
        }
        let at = self.at();
        let space = self.chunks.chunk_mut(self.chunk).get_mut(at..at + n)?;
        self.position += n;
        Some(space)
    }

    /// Overwrites the bytes at byte `position` of the frame, independent of the write position.
    pub fn patch(&mut self, position: usize, mut bytes: &[u8]) {
        let mut skip = position;
        let ChunksMut { first, others } = &mut self.chunks;
        for chunk in std::iter::once(first).chain(others) {
            let Some(rest) = chunk.get_mut(skip..) else {
                skip -= chunk.len();
                continue;
            };
            skip = 0;
            let n = rest.len().min(bytes.len());
            let (now, later) = bytes.split_at(n);
            if let Some(to) = rest.get_mut(..n) {
                to.copy_from_slice(now);
            }
            bytes = later;
            if bytes.is_empty() {
                break;
            }
        }
    }

    /// The first `len` bytes of the frame, which must lie in its first chunk as headers do; fewer when that is shorter.
    pub fn front(&mut self, len: usize) -> &mut [u8] {
        let len = len.min(self.chunks.first.len());
        self.chunks.first.get_mut(..len).unwrap_or_default()
    }

    /// The `n` bytes before the write position, if they lie in one chunk.
    #[inline]
    pub fn written_last(&self, n: usize) -> Option<&[u8]> {
        let at = self.at();
        self.chunks.chunk(self.chunk).get(at.checked_sub(n)?..at)
    }

    /// The bytes `start..end` of the frame, if they lie in its first chunk.
    #[inline]
    pub(crate) fn in_first_chunk(&self, start: usize, end: usize) -> Option<&[u8]> {
        self.chunks.first.get(start..end)
    }

    /// Passes the bytes `start..end` of the frame to `f`, chunk by chunk.
    #[inline]
    pub fn for_each(&self, start: usize, end: usize, mut f: impl FnMut(&[u8])) {
        let (mut skip, mut want) = (start, end.saturating_sub(start));
        for chunk in self.chunks.iter() {
            let Some(rest) = chunk.get(skip..) else {
                skip -= chunk.len();
                continue;
            };
            skip = 0;
            let piece = rest.get(..want).unwrap_or(rest);
            if !piece.is_empty() {
                f(piece);
            }
            want -= piece.len();
            if want == 0 {
                break;
            }
        }
    }
}

/// Makes an interface send the submitted frames, in a thread that does not hold the [`Link`]: a kick is a system call
/// that takes longer than all other work on a frame, and other threads use the link meanwhile. Any number of threads
/// may call it at the same time. It does not keep the interface open.
pub trait Kick: Send + Sync {
    /// Serves the requests of [`Link::flush`] that no other thread is serving.
    fn kick(&self) -> Kicked;
}

/// The outcome of [`Kick::kick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kicked {
    /// Nothing was requested, or another thread serves the request.
    Nothing,
    /// All requests have been served. The number is that of the requested chunks.
    Done(u32),
    /// The interface had no room for all frames, or other threads request kicks faster than one thread serves them:
    /// some thread must flush and kick again soon. The number is that of the requested chunks.
    More(u32),
}

/// The stack's interface to a network interface.
///
/// The trait is object safe on purpose: the stack and everything above it are compiled once for the driver and the
/// simulator; a frame costs a handful of indirect calls.
pub trait Link: Send {
    /// Bytes that one chunk can carry on transmit.
    fn chunk_bytes(&self) -> usize;

    /// Whether the link completes the checksum of a frame to which [it was left](TxFrame::leave_checksum), or hands the
    /// frame to a receiver that needs no checksum. The answer never changes.
    fn offloads_checksums(&self) -> bool {
        false
    }

    /// Whether no frame leaves this host, so that peers may have loopback addresses. The answer never changes.
    fn is_within_host(&self) -> bool {
        false
    }

    /// Free transmit chunks.
    fn tx_available(&self) -> usize;

    /// Receive chunks of each queue. They bound the data that a peer may have in flight to this end.
    fn rx_capacity(&self) -> usize;

    /// Receive chunks of `queue` that are free now. When a frame needs more, the queue drops it.
    fn rx_available(&self, queue: QueueId) -> usize;

    /// Appends up to `max` received frames to `batch` and returns their number.
    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize;

    /// The bytes of a received frame, chunk by chunk.
    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_>;

    /// The first chunk of a received frame, in which all headers lie. Most frames have no other one, and a list of chunks takes
    /// longer to make than to read.
    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        self.rx_chunks(frame).first().copied().unwrap_or_default()
    }

    /// Takes back a received frame.
    fn recycle(&mut self, frame: RxFrame);

    /// A frame with room for `len` bytes, or `None` when too few chunks are free.
    fn alloc(&mut self, len: usize) -> Option<TxFrame>;

    /// Appends the memory of a frame to `chunks`, chunk by chunk. Returns false, and appends nothing, while an earlier
    /// transmission still reads it. The list is the caller's, because moving one takes longer than filling it.
    fn tx_chunks_into<'a>(&'a mut self, frame: &mut TxFrame, chunks: &mut ChunksMut<'a>) -> bool;

    /// The memory of a frame, chunk by chunk, or `None` while an earlier transmission still reads it.
    fn tx_chunks(&mut self, frame: &mut TxFrame) -> Option<ChunksMut<'_>> {
        let mut chunks = ChunksMut::default();
        self.tx_chunks_into(frame, &mut chunks).then_some(chunks)
    }

    /// Puts the frame's first `len` bytes on the transmit ring of `queue`, all chunks or none. Chunks after these bytes
    /// become free. The token stays with the caller, who may submit it again (a retransmission) or release it.
    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull>;

    /// Takes back a frame. A frame that is still being sent becomes free when that is done.
    fn release(&mut self, frame: TxFrame);

    /// Makes the interface send the submitted frames (the kick), and collects completions. When the link's user has
    /// taken over the kicks, this only requests one: see [`Kick`].
    fn flush(&mut self);

    /// Installs a steering rule.
    fn steer(&mut self, rule: Steer) -> Result<(), SteerError>;

    /// Removes a steering rule; unknown rules are ignored.
    fn unsteer(&mut self, rule: Steer);

    /// Hands a received frame of `flow` over to another engine of the interface, if that one has steered the flow, or
    /// has steered a listener for it and this engine has not; returns whether it has. The caller recycles the frame in
    /// any case. A link with one engine never hands frames over.
    fn hand_over(&mut self, frame: &RxFrame, flow: &Flow) -> bool {
        let _ = (frame, flow);
        false
    }

    /// Takes a frame with a fragment of a packet. Returns the frame of the whole packet when it is complete. A link that does not
    /// reassemble drops fragments.
    fn reassemble(&mut self, frame: RxFrame) -> Option<RxFrame> {
        self.recycle(frame);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transmit_token_is_a_word_that_keeps_its_parts() {
        assert_eq!(size_of::<Option<TxFrame>>(), 8);
        let header = |at| NonZeroU16::new(at);
        for (head, chunks) in [(0, 1), (7, 18), (u32::MAX, u16::MAX)] {
            let mut frame = TxFrame::new(head, chunks);
            for left in [header(34), header(u16::MAX), None] {
                frame.leave_checksum(left);
                assert_eq!(
                    (frame.head(), frame.chunks(), frame.left_checksum()),
                    (head, chunks.into(), left)
                );
            }
            frame.leave_checksum(header(54));
            frame.shorten(1);
            assert_eq!((frame.head(), frame.chunks(), frame.left_checksum()), (head, 1, header(54)));
        }
    }
}
