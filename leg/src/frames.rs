//! The frame table: the place of each chunk of the UMEM.
//!
//! A chunk moves only along these arrows, by methods of [`FrameTable`]:
//!
//! ```text
//! receive:   Free -> Fill -> Received -> Free
//! transmit:  Free -> Retained -> Sending -> Retained (again) ... -> Free
//!                                Sending -> Released -> Free
//! ```
//!
//! Free chunks are reused last in, first out, so that the chunks in use are a small set that stays in the cache. Each
//! receive chunk belongs to one queue, so no queue can starve another, and transmission cannot starve reception.

/// The place of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Unused.
    Free,
    /// On a fill ring: the kernel may write it.
    Fill,
    /// Received: an `RxFrame` names it.
    Received,
    /// A `TxFrame` names it and the kernel does not read it.
    Retained,
    /// A `TxFrame` names it and the kernel may read it.
    Sending,
    /// The kernel may still read it, and no token names it.
    Released,
}

/// Number of chunks in each place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameCensus {
    /// Unused.
    pub free: usize,
    /// On fill rings.
    pub fill: usize,
    /// Received and not recycled.
    pub received: usize,
    /// Retained for transmission or retransmission.
    pub retained: usize,
    /// Being sent, with a token that the caller holds.
    pub sending: usize,
    /// Being sent, after their token was given back.
    pub released: usize,
}

impl FrameCensus {
    /// All chunks.
    pub const fn total(&self) -> usize {
        self.free + self.fill + self.idle_out() + self.sending + self.released
    }

    /// Chunks that tokens name and the kernel does not use. The caller must give them back at the end.
    const fn idle_out(&self) -> usize {
        self.received + self.retained
    }

    /// Whether the caller holds no token: every chunk is free, on a fill ring, or about to become free.
    pub const fn nothing_out(&self) -> bool {
        self.idle_out() == 0 && self.sending == 0
    }
}

/// A move that the chunk's place does not allow: the token is forged or belongs to another link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misplaced;

/// The place of every chunk, and the free ones in stacks.
///
/// Chunks `0..queues * receive` are for receiving (`receive` to each queue), the rest for transmission, of which queues that are added
/// later get some.
#[derive(Debug)]
pub struct FrameTable {
    places: Box<[Place]>,
    receive_per_queue: u32,
    /// The first chunk for transmission.
    first_transmit: u32,
    queues: Vec<ReceiveChunks>,
    /// By chunk from [`Self::first_transmit`] on: the added queue to which it belongs. Empty until there is one.
    added: Vec<u16>,
    free_transmit: Vec<u32>,
}

/// The receive chunks of a queue.
#[derive(Debug)]
struct ReceiveChunks {
    total: usize,
    free: Vec<u32>,
    /// Those that an `RxFrame` names.
    received: usize,
}

impl FrameTable {
    /// All chunks free.
    pub fn new(queues: u16, receive_per_queue: u32, transmit: u32) -> Self {
        let receive = u32::from(queues) * receive_per_queue;
        let total = receive + transmit;
        let stack = |range: std::ops::Range<u32>| range.rev().collect::<Vec<_>>();
        let chunks = |queue: u32| {
            let free = stack(queue * receive_per_queue..(queue + 1) * receive_per_queue);
            ReceiveChunks { total: receive_per_queue as usize, free, received: 0 }
        };
        Self {
            places: vec![Place::Free; total as usize].into(),
            receive_per_queue,
            first_transmit: receive,
            queues: (0..u32::from(queues)).map(chunks).collect(),
            added: Vec::new(),
            free_transmit: stack(receive..total),
        }
    }

    /// Adds a queue, which gets half of the free transmit chunks, at most `most` and at least `least`. Returns its number; `None`
    /// while too few are free.
    pub fn add_queue(&mut self, least: usize, most: usize) -> Option<u16> {
        let number = u16::try_from(self.queues.len()).ok()?;
        let total = (self.free_transmit.len() / 2).min(most);
        if total < least {
            return None;
        }
        // The last ones to be used again: the others are in the processor's cache.
        let free: Vec<u32> = self.free_transmit.drain(..total).collect();
        self.added.resize(self.places.len() - self.first_transmit as usize, 0);
        for chunk in &free {
            self.added[(chunk - self.first_transmit) as usize] = number;
        }
        self.queues.push(ReceiveChunks { total, free, received: 0 });
        Some(number)
    }

    /// The place of the chunk; `None` if there is no such chunk.
    pub fn place(&self, chunk: u32) -> Option<Place> {
        self.places.get(chunk as usize).copied()
    }

    /// Number of free transmit chunks.
    pub fn transmit_free(&self) -> usize {
        self.free_transmit.len()
    }

    /// Number of receive chunks of `queue`.
    pub fn receive_total(&self, queue: u16) -> usize {
        self.queues.get(usize::from(queue)).map_or(0, |chunks| chunks.total)
    }

    /// Number of chunks of `queue` that wait to be put on the fill ring.
    pub fn receive_free(&self, queue: u16) -> usize {
        self.queues.get(usize::from(queue)).map_or(0, |chunks| chunks.free.len())
    }

    /// Chunks of `queue` that were received and not recycled.
    pub fn receive_out(&self, queue: u16) -> usize {
        self.queues.get(usize::from(queue)).map_or(0, |chunks| chunks.received)
    }

    /// Free -> Fill, for a chunk of `queue`.
    pub fn fill(&mut self, queue: u16) -> Option<u32> {
        let chunk = self.queues.get_mut(usize::from(queue))?.free.pop()?;
        self.places[chunk as usize] = Place::Fill;
        Some(chunk)
    }

    /// Fill -> Received.
    pub fn received(&mut self, chunk: u32) -> Result<(), Misplaced> {
        self.step(chunk, Place::Fill, Place::Received)?;
        self.home(chunk).ok_or(Misplaced)?.received += 1;
        Ok(())
    }

    /// Received -> Free.
    pub fn recycle(&mut self, chunk: u32) -> Result<(), Misplaced> {
        self.step(chunk, Place::Received, Place::Free)?;
        let home = self.home(chunk).ok_or(Misplaced)?;
        home.free.push(chunk);
        home.received -= 1;
        Ok(())
    }

    /// The queue that a receive chunk belongs to.
    fn home(&mut self, chunk: u32) -> Option<&mut ReceiveChunks> {
        let queue = match chunk.checked_sub(self.first_transmit) {
            Some(place) => usize::from(*self.added.get(place as usize)?),
            None => (chunk / self.receive_per_queue.max(1)) as usize,
        };
        self.queues.get_mut(queue)
    }

    /// Free -> Retained.
    pub fn alloc(&mut self) -> Option<u32> {
        let chunk = self.free_transmit.pop()?;
        self.places[chunk as usize] = Place::Retained;
        Some(chunk)
    }

    /// Retained -> Sending.
    pub fn sending(&mut self, chunk: u32) -> Result<(), Misplaced> {
        self.step(chunk, Place::Retained, Place::Sending)
    }

    /// Sending -> Retained, or Released -> Free: the kernel is done with it.
    pub fn sent(&mut self, chunk: u32) -> Result<(), Misplaced> {
        match self.place(chunk) {
            Some(Place::Released) => {
                self.places[chunk as usize] = Place::Free;
                self.free_transmit.push(chunk);
                Ok(())
            }
            _ => self.step(chunk, Place::Sending, Place::Retained),
        }
    }

    /// Retained -> Free, or Sending -> Released: the token is given back.
    pub fn release(&mut self, chunk: u32) -> Result<(), Misplaced> {
        match self.place(chunk) {
            Some(Place::Retained) => {
                self.places[chunk as usize] = Place::Free;
                self.free_transmit.push(chunk);
                Ok(())
            }
            _ => self.step(chunk, Place::Sending, Place::Released),
        }
    }

    /// Counts all chunks, and checks that the stacks of free ones agree with their places.
    pub fn census(&self) -> FrameCensus {
        let mut census = FrameCensus::default();
        for place in &self.places {
            *match place {
                Place::Free => &mut census.free,
                Place::Fill => &mut census.fill,
                Place::Received => &mut census.received,
                Place::Retained => &mut census.retained,
                Place::Sending => &mut census.sending,
                Place::Released => &mut census.released,
            } += 1;
        }
        let stacked =
            self.free_transmit.len() + self.queues.iter().map(|chunks| chunks.free.len()).sum::<usize>();
        debug_assert_eq!(stacked, census.free, "a free chunk is on no stack, or on two");
        census
    }

    fn step(&mut self, chunk: u32, from: Place, to: Place) -> Result<(), Misplaced> {
        match self.places.get_mut(chunk as usize) {
            Some(place) if *place == from => {
                *place = to;
                Ok(())
            }
            _ => Err(Misplaced),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_starts_free_and_comes_back() {
        let mut table = FrameTable::new(2, 3, 4);
        assert_eq!(table.census(), FrameCensus { free: 10, ..Default::default() });

        let filled: Vec<u32> = std::iter::from_fn(|| table.fill(1)).collect();
        assert_eq!(filled, [3, 4, 5]);
        assert_eq!((table.receive_free(0), table.receive_free(1), table.receive_free(2)), (3, 0, 0));
        for chunk in filled {
            table.received(chunk).unwrap();
            table.recycle(chunk).unwrap();
        }
        assert_eq!(table.receive_free(1), 3);

        let frame = table.alloc().unwrap();
        table.sending(frame).unwrap();
        table.sent(frame).unwrap();
        table.sending(frame).unwrap();
        table.release(frame).unwrap();
        assert_eq!(table.census(), FrameCensus { free: 9, released: 1, ..Default::default() });
        assert!(table.census().nothing_out());
        table.sent(frame).unwrap();
        assert_eq!(table.census(), FrameCensus { free: 10, ..Default::default() });
    }

    #[test]
    fn an_added_queue_gets_half_of_the_free_transmit_chunks() {
        let mut table = FrameTable::new(2, 3, 6);
        assert_eq!(table.add_queue(4, 9), None, "too few");
        assert_eq!(table.add_queue(3, 3), Some(2));
        assert_eq!((table.receive_total(2), table.receive_free(2), table.transmit_free()), (3, 3, 3));
        let filled: Vec<u32> = std::iter::from_fn(|| table.fill(2)).collect();
        for chunk in &filled {
            table.received(*chunk).unwrap();
        }
        assert_eq!((table.receive_out(0), table.receive_out(1), table.receive_out(2)), (0, 0, 3));
        for chunk in filled {
            table.recycle(chunk).unwrap();
        }
        assert_eq!((table.receive_free(2), table.receive_out(2)), (3, 0));
        let sent = table.alloc().unwrap();
        table.release(sent).unwrap();
        assert_eq!(table.add_queue(1, 3), Some(3));
        assert_eq!((table.receive_total(3), table.transmit_free()), (1, 2));
        assert_eq!(table.census(), FrameCensus { free: 12, ..Default::default() });
    }

    #[test]
    fn the_last_chunk_freed_is_the_first_used() {
        let mut table = FrameTable::new(1, 1, 8);
        let (first, second) = (table.alloc().unwrap(), table.alloc().unwrap());
        table.release(first).unwrap();
        table.release(second).unwrap();
        assert_eq!((table.alloc(), table.alloc()), (Some(second), Some(first)));
    }

    /// Every operation on a chunk in every place: allowed exactly along the arrows.
    #[test]
    fn no_move_but_along_the_arrows() {
        /// A place, the operations allowed there, and the way to bring a chunk there.
        type Case = (Place, &'static [&'static str], fn(&mut FrameTable) -> u32);
        type Op = fn(&mut FrameTable, u32) -> Result<(), Misplaced>;
        let ops: [(&str, Op); 5] = [
            ("received", FrameTable::received),
            ("recycle", FrameTable::recycle),
            ("sending", FrameTable::sending),
            ("sent", FrameTable::sent),
            ("release", FrameTable::release),
        ];
        let places: [Case; 6] = [
            (Place::Free, &[], |_| 3),
            (Place::Fill, &["received"], |t| t.fill(0).unwrap()),
            (Place::Received, &["recycle"], |t| {
                let chunk = t.fill(0).unwrap();
                t.received(chunk).unwrap();
                chunk
            }),
            (Place::Retained, &["sending", "release"], |t| t.alloc().unwrap()),
            (Place::Sending, &["sent", "release"], |t| {
                let chunk = t.alloc().unwrap();
                t.sending(chunk).unwrap();
                chunk
            }),
            (Place::Released, &["sent"], |t| {
                let chunk = t.alloc().unwrap();
                t.sending(chunk).unwrap();
                t.release(chunk).unwrap();
                chunk
            }),
        ];
        for (place, allowed, reach) in places {
            for (name, op) in ops {
                let mut table = FrameTable::new(1, 2, 2);
                let chunk = reach(&mut table);
                assert_eq!(table.place(chunk), Some(place));
                assert_eq!(op(&mut table, chunk).is_ok(), allowed.contains(&name), "{name} from {place:?}");
                assert_eq!(table.census().total(), 4);
            }
        }
        assert_eq!(FrameTable::new(1, 2, 2).sent(4), Err(Misplaced), "there is no such chunk");
    }
}
