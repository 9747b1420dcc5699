//! Received bytes that cannot be placed yet, and the frames they lie in.
//!
//! A [`Hold`] knows for each byte that it has where it lies. A receive frame stays with it while at least
//! one of its bytes is needed. Ranges never overlap: what came first stays.

use std::collections::VecDeque;

use slab::Slab;
use smallvec::SmallVec;

use crate::{
    link::{Link, Pieces, QueueId, RxFrame, rx_pieces},
    seq::StreamOffset,
};

/// A range of the stream, half open.
pub(crate) type Range = (StreamOffset, StreamOffset);

/// A few ranges.
pub(crate) type Ranges = SmallVec<[Range; 4]>;

/// Names something that holds bytes: see [`Hold::adopt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreKey(usize);

/// A contiguous piece of the stream in one store.
#[derive(Debug)]
struct Span {
    offset: StreamOffset,
    end: StreamOffset,
    /// Where its first byte lies in the store.
    at: usize,
    store: StoreKey,
}

#[derive(Debug)]
enum Data {
    Frame(RxFrame),
    Copied(Vec<u8>),
}

#[derive(Debug)]
struct Store {
    data: Data,
    /// Bytes of spans that lie in it; it goes with the last of them.
    live: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Hold {
    /// In order of offset.
    spans: VecDeque<Span>,
    stores: Slab<Store>,
    bytes: usize,
    frames: usize,
}

impl Hold {
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Frames held.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// How many separate pieces the held bytes consist of.
    pub fn pieces(&self) -> usize {
        self.spans.len()
    }

    /// The held ranges, each a contiguous piece of one frame.
    pub fn ranges(&self) -> impl Iterator<Item = Range> {
        self.spans.iter().map(|s| (s.offset, s.end))
    }

    /// The first held range that ends after `offset`.
    pub fn first_after(&self, offset: StreamOffset) -> Option<Range> {
        self.spans.get(self.index(offset)).map(|s| (s.offset, s.end))
    }

    /// Takes a frame in. It holds nothing before [`Self::add`], and [`Self::discard_unused`] must follow.
    pub fn adopt(&mut self, frame: RxFrame) -> StoreKey {
        self.frames += 1;
        StoreKey(self.stores.insert(Store { data: Data::Frame(frame), live: 0 }))
    }

    /// Holds the bytes `range` of the stream, which lie in `store` from byte `at` on. Nothing of the range
    /// is held already.
    pub fn add(&mut self, (offset, end): Range, store: StoreKey, at: usize) {
        let len = (end - offset) as usize;
        let Some(entry) = self.stores.get_mut(store.0) else { return };
        entry.live += len;
        self.bytes += len;
        self.spans.insert(self.index(offset), Span { offset, end, at, store });
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
        let mut pieces = Pieces::new();
        let mut at = offset;
        let first = self.index(offset);
        // Whether all is there is asked before any frame is touched.
        let count = self.spans.range(first..).take_while(|s| {
            let follows = s.offset <= at && at < end;
            at = if follows { s.end } else { at };
            follows
        });
        let count = count.count();
        if at < end {
            return None;
        }
        for span in self.spans.range(first..first + count) {
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

    /// The `N` bytes from `offset` on, if all of them are held.
    pub fn read<const N: usize>(&self, link: &dyn Link, offset: StreamOffset) -> Option<[u8; N]> {
        let raw = self.raw(link, (offset, offset + N as u64))?;
        let mut bytes = [0; N];
        for (to, from) in bytes.iter_mut().zip(raw.iter().flat_map(|p| p.iter())) {
            *to = *from;
        }
        Some(bytes)
    }

    /// Where the bytes end that are held without a gap from `offset` on.
    pub fn contiguous_from(&self, offset: StreamOffset) -> StreamOffset {
        let mut at = offset;
        for span in self.spans.range(self.index(offset)..) {
            if span.offset > at {
                break;
            }
            at = span.end;
        }
        at
    }

    /// Forgets the bytes `range`, and gives back the frames that nothing else is held of.
    pub fn remove(&mut self, link: &mut dyn Link, (offset, end): Range) {
        let mut index = self.index(offset);
        while let Some(span) = self.spans.get_mut(index)
            && span.offset < end
        {
            let (from, to) = (span.offset.max(offset), span.end.min(end));
            let (store, at) = (span.store, span.at);
            match (from > span.offset, to < span.end) {
                (false, false) => {
                    self.spans.remove(index);
                }
                (false, true) => {
                    span.at += (to - span.offset) as usize;
                    span.offset = to;
                }
                (true, later) => {
                    let rest =
                        Span { offset: to, end: span.end, at: at + (to - span.offset) as usize, store };
                    span.end = from;
                    index += 1;
                    if later {
                        self.spans.insert(index, rest);
                    }
                }
            }
            self.bytes -= (to - from) as usize;
            if let Some(entry) = self.stores.get_mut(store.0) {
                entry.live -= (to - from) as usize;
                self.discard_unused(link, store);
            }
        }
    }

    /// Forgets what is held of `store` within `range`, and gives its frame back when that was all.
    pub fn evict(&mut self, link: &mut dyn Link, store: StoreKey, (offset, end): Range) {
        let mut index = self.index(offset);
        while let Some(span) = self.spans.get(index)
            && span.offset < end
        {
            if span.store == store {
                let range = (span.offset, span.end);
                self.remove(link, range);
            } else {
                index += 1;
            }
        }
    }

    /// Copies what is held of `store`, all of it within `range`, into memory of its own and gives the
    /// frame back. Returns the bytes copied.
    pub fn compact(&mut self, link: &mut dyn Link, store: StoreKey, (offset, end): Range) -> usize {
        let Some(Store { data: Data::Frame(frame), live }) = self.stores.get(store.0) else { return 0 };
        let mut copy = Vec::with_capacity(*live);
        let first = self.index(offset);
        for span in self.spans.range_mut(first..).take_while(|s| s.offset < end) {
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
        self.coalesce(first);
        copied
    }

    /// Appends the copied span `index` to the copied span right before it: a peer that sends single bytes
    /// makes no long list.
    fn coalesce(&mut self, index: usize) {
        let Some((before, span)) =
            index.checked_sub(1).and_then(|before| Some((self.spans.get(before)?, self.spans.get(index)?)))
        else {
            return;
        };
        let len = (span.end - span.offset) as usize;
        let (from, to, end) = (span.store, before.store, span.end);
        let tail = before.at + (before.end - before.offset) as usize;
        let starts_store = span.at == 0;
        if before.end != span.offset || from == to {
            return;
        }
        let Some([Store { data: Data::Copied(bytes), live }, Store { data: Data::Copied(more), .. }]) =
            self.stores.get_disjoint_mut([to.0, from.0]).ok()
        else {
            return;
        };
        // Whatever else lay in the two would move or be lost.
        if tail != bytes.len() || !starts_store || more.len() != len {
            return;
        }
        bytes.append(more);
        *live += len;
        self.spans.remove(index);
        if let Some(before) = self.spans.get_mut(index - 1) {
            before.end = end;
        }
        self.stores.remove(from.0);
    }

    /// Gives a frame back that nothing is held of.
    pub fn discard_unused(&mut self, link: &mut dyn Link, store: StoreKey) {
        if self.stores.get(store.0).is_some_and(|s| s.live == 0) {
            let data = self.stores.remove(store.0).data;
            self.give_back(link, data);
        }
    }

    /// Forgets everything and gives all frames back.
    pub fn release(&mut self, link: &mut dyn Link) {
        self.spans.clear();
        self.bytes = 0;
        for store in std::mem::take(&mut self.stores) {
            self.give_back(link, store.1.data);
        }
    }

    fn give_back(&mut self, link: &mut dyn Link, data: Data) {
        if let Data::Frame(frame) = data {
            self.frames -= 1;
            link.recycle(frame);
        }
    }

    /// The first span that ends after `offset`.
    fn index(&self, offset: StreamOffset) -> usize {
        self.spans.partition_point(|s| s.end <= offset)
    }
}
