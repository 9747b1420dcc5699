//! Received bytes that cannot be placed yet, and the frames that contain them.
//!
//! A [`Hold`] keeps a receive frame while at least one of its bytes is needed. Ranges never overlap: of two copies of
//! a byte, the first one is kept.

use slab::Slab;
use smallvec::SmallVec;

use super::ordered::{Extent, Ordered};
use crate::{
    link::{Link, Pieces, QueueId, RxFrame, rx_pieces},
    seq::StreamOffset,
};

/// A range of the stream, half open.
pub(crate) type Range = (StreamOffset, StreamOffset);

/// Ranges, of which there are usually few.
pub(crate) type Ranges = SmallVec<[Range; 4]>;

/// Largest size of a copy to which further copies are appended, in bytes. The limit matters because one needed byte
/// keeps the whole copy in memory.
const COPY_BYTES: usize = 4096;

/// The key of a frame or copy that holds bytes; see [`Hold::adopt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreKey(usize);

/// A contiguous piece of the stream in one store.
#[derive(Debug)]
struct Span {
    offset: StreamOffset,
    end: StreamOffset,
    /// Position of the first byte in the store.
    at: usize,
    store: StoreKey,
}

impl Extent for Span {
    fn end(&self) -> StreamOffset {
        self.end
    }
}

#[derive(Debug)]
enum Data {
    Frame(RxFrame),
    Copied(Vec<u8>),
}

#[derive(Debug)]
struct Store {
    data: Data,
    /// Bytes in this store that spans refer to. The store is removed when none is left.
    live: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Hold {
    spans: Ordered<Span>,
    /// The held ranges, with adjacent ranges joined, because every segment needs to know where the stream is
    /// contiguous.
    islands: Ordered<Range>,
    stores: Slab<Store>,
    bytes: usize,
    chunks: usize,
}

impl Hold {
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Chunks of the frames held.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Number of separate pieces of the held bytes.
    pub fn pieces(&self) -> usize {
        self.spans.len()
    }

    /// The contiguous held ranges that end after `offset`, in order.
    pub fn islands_from(&self, offset: StreamOffset) -> impl Iterator<Item = Range> {
        self.islands.iter_from(self.islands.seek(offset)).copied()
    }

    /// The end of the last held byte.
    pub fn end(&self) -> Option<StreamOffset> {
        self.islands.back().map(|island| island.1)
    }

    /// Takes a frame over. [`Self::add`] must follow, or else [`Self::discard_unused`], because no span refers to the
    /// frame yet.
    pub fn adopt(&mut self, frame: RxFrame) -> StoreKey {
        self.chunks += frame.chunks();
        StoreKey(self.stores.insert(Store { data: Data::Frame(frame), live: 0 }))
    }

    /// Holds the bytes `range` of the stream, which lie in `store` from byte `at` on. Nothing of the range
    /// is held already.
    pub fn add(&mut self, (offset, end): Range, store: StoreKey, at: usize) {
        let len = (end - offset) as usize;
        let Some(entry) = self.stores.get_mut(store.0) else { return };
        entry.live += len;
        self.bytes += len;
        self.spans.insert(self.spans.seek(offset), Span { offset, end, at, store });
        self.join_island((offset, end));
    }

    /// Adds `range` to the islands.
    fn join_island(&mut self, (start, end): Range) {
        // The first island that ends at `start` or after it.
        let place = self.islands.seek(start.saturating_sub(1));
        let Some(island) = self.islands.get_mut(place).filter(|island| island.0 <= end) else {
            return self.islands.insert(place, (start, end));
        };
        if island.1 != start {
            island.0 = start;
            return;
        }
        island.1 = end;
        // Join the island with its right neighbour, if `range` was the whole gap between them.
        let left = island.0;
        let place = self.islands.seek(end);
        if let Some(right) = self.islands.get_mut(place).filter(|right| right.0 == end) {
            right.0 = left;
            if let Some(place) = self.islands.before(place) {
                self.islands.remove(place);
            }
        }
    }

    /// Removes `range`, a part of one island, from the islands.
    fn cut_island(&mut self, (start, end): Range) {
        let place = self.islands.seek(start);
        let Some(island) = self.islands.get_mut(place) else { return };
        match (island.0 < start, end < island.1) {
            (false, false) => drop(self.islands.remove(place)),
            (false, true) => island.0 = end,
            (true, false) => island.1 = start,
            (true, true) => {
                let left = (island.0, start);
                island.0 = end;
                self.islands.insert(place, left);
            }
        }
    }

    /// Bytes of `store` that are held.
    pub fn live(&self, store: StoreKey) -> usize {
        self.stores.get(store.0).map_or(0, |s| s.live)
    }

    /// The queue that the frame of `store` came from, while it is held.
    pub fn queue(&self, store: StoreKey) -> Option<QueueId> {
        match &self.stores.get(store.0)?.data {
            Data::Frame(frame) => Some(frame.queue()),
            Data::Copied(_) => None,
        }
    }

    /// The bytes `range`, or `None` when not all of them are held.
    pub fn raw<'a>(&'a self, link: &'a dyn Link, (offset, end): Range) -> Option<Pieces<'a>> {
        if self.contiguous_from(offset) < end {
            return None;
        }
        let mut pieces = Pieces::new();
        for span in self.spans.iter_from(self.spans.seek(offset)).take_while(|s| s.offset < end) {
            let skip = offset.saturating_sub(span.offset);
            let len = (span.end.min(end) - span.offset - skip) as usize;
            let at = span.at + skip as usize;
            match &self.stores.get(span.store.0)?.data {
                Data::Frame(frame) => pieces.extend(rx_pieces(link, frame, at, len)),
                Data::Copied(bytes) => pieces.push(bytes.get(at..at + len)?),
            }
        }
        Some(pieces)
    }

    /// As many bytes from `offset` on as the array `A` has, if all of them are held.
    pub fn read<A: Default + AsMut<[u8]>>(&self, link: &dyn Link, offset: StreamOffset) -> Option<A> {
        let mut bytes = A::default();
        let raw = self.raw(link, (offset, offset + bytes.as_mut().len() as u64))?;
        for (to, from) in bytes.as_mut().iter_mut().zip(raw.iter().flat_map(|p| p.iter())) {
            *to = *from;
        }
        Some(bytes)
    }

    /// The end of the bytes held without a gap from `offset` on; `offset` when that byte is not held.
    pub fn contiguous_from(&self, offset: StreamOffset) -> StreamOffset {
        match self.islands.get(self.islands.seek(offset)) {
            Some(&(start, end)) if start <= offset => end,
            _ => offset,
        }
    }

    /// The start of the bytes held without a gap up to `offset`; `offset` when that byte is not held.
    pub fn island_start(&self, offset: StreamOffset) -> StreamOffset {
        self.islands.get(self.islands.seek(offset)).map_or(offset, |island| island.0.min(offset))
    }

    /// Removes the bytes `range`, and recycles the frames of which nothing else is held.
    pub fn remove(&mut self, link: &mut dyn Link, (offset, end): Range) {
        loop {
            let place = self.spans.seek(offset);
            let Some(span) = self.spans.get_mut(place).filter(|span| span.offset < end) else { break };
            let (from, to) = (span.offset.max(offset), span.end.min(end));
            let (store, skip) = (span.store, (to - span.offset) as usize);
            match (from > span.offset, to < span.end) {
                (false, false) => drop(self.spans.remove(place)),
                (false, true) => {
                    span.at += skip;
                    span.offset = to;
                }
                (true, false) => span.end = from,
                (true, true) => {
                    let head = Span { offset: span.offset, end: from, at: span.at, store };
                    span.at += skip;
                    span.offset = to;
                    self.spans.insert(place, head);
                }
            }
            self.cut_island((from, to));
            self.bytes -= (to - from) as usize;
            if let Some(entry) = self.stores.get_mut(store.0) {
                entry.live -= (to - from) as usize;
                self.discard_unused(link, store);
            }
        }
    }

    /// Removes the bytes of `store` within `range`, and recycles its frame when no other byte of it is held.
    pub fn evict(&mut self, link: &mut dyn Link, store: StoreKey, (mut offset, end): Range) {
        while let Some(span) = self.spans.get(self.spans.seek(offset)).filter(|span| span.offset < end) {
            let range = (span.offset, span.end);
            offset = range.1;
            if span.store == store {
                self.remove(link, range);
            }
        }
    }

    /// Copies the held bytes of `store`, all of which lie within `range`, to the heap and recycles the frame. Returns
    /// the number of bytes copied.
    pub fn compact(&mut self, link: &mut dyn Link, store: StoreKey, (offset, end): Range) -> usize {
        let Some(Store { data: Data::Frame(frame), live }) = self.stores.get(store.0) else { return 0 };
        let mut copy = Vec::with_capacity(*live);
        let mut from = offset;
        loop {
            let place = self.spans.seek(from);
            let Some(span) = self.spans.get_mut(place).filter(|span| span.offset < end) else { break };
            from = span.end;
            if span.store == store {
                let at = copy.len();
                let len = (span.end - span.offset) as usize;
                for piece in rx_pieces(link, frame, span.at, len) {
                    copy.extend_from_slice(piece);
                }
                span.at = at;
            }
        }
        let copied = copy.len();
        if let Some(entry) = self.stores.get_mut(store.0) {
            let data = std::mem::replace(&mut entry.data, Data::Copied(copy));
            self.give_back(link, data);
        }
        self.coalesce(offset);
        copied
    }

    /// Appends the copied span at `offset` to the copied span right before it, so that single bytes from a peer do
    /// not make a long list.
    fn coalesce(&mut self, offset: StreamOffset) {
        let place = self.spans.seek(offset);
        let Some((before, span)) = self
            .spans
            .before(place)
            .and_then(|before| Some((self.spans.get(before)?, self.spans.get(place)?)))
        else {
            return;
        };
        let len = (span.end - span.offset) as usize;
        let (from, to, start, end) = (span.store, before.store, before.offset, span.end);
        let tail = before.at + (before.end - before.offset) as usize;
        let starts_store = span.at == 0;
        if before.end != span.offset || from == to || tail + len > COPY_BYTES {
            return;
        }
        let Some([Store { data: Data::Copied(bytes), live }, Store { data: Data::Copied(more), .. }]) =
            self.stores.get_disjoint_mut([to.0, from.0]).ok()
        else {
            return;
        };
        // Other bytes in the two stores would move or be lost.
        if tail != bytes.len() || !starts_store || more.len() != len {
            return;
        }
        bytes.append(more);
        *live += len;
        self.spans.remove(place);
        let place = self.spans.seek(start);
        if let Some(before) = self.spans.get_mut(place) {
            before.end = end;
        }
        self.stores.remove(from.0);
    }

    /// Removes `store` and recycles its frame, if no span refers to it.
    pub fn discard_unused(&mut self, link: &mut dyn Link, store: StoreKey) {
        if self.stores.get(store.0).is_some_and(|s| s.live == 0) {
            let data = self.stores.remove(store.0).data;
            self.give_back(link, data);
        }
    }

    /// Removes everything and recycles all frames.
    pub fn release(&mut self, link: &mut dyn Link) {
        self.spans.clear();
        self.islands.clear();
        self.bytes = 0;
        for store in std::mem::take(&mut self.stores) {
            self.give_back(link, store.1.data);
        }
    }

    fn give_back(&mut self, link: &mut dyn Link, data: Data) {
        if let Data::Frame(frame) = data {
            self.chunks -= frame.chunks();
            link.recycle(frame);
        }
    }
}
