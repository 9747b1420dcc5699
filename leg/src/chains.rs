//! Frames as chains of chunks: the successor of each chunk, and the length of each chain at its first chunk.
//!
//! A chunk is in at most one chain. A token identifies a chain by its first chunk; a token whose chunk is not the first
//! of a chain identifies an empty chain.

/// A chunk's place in its chain.
#[derive(Debug, Clone, Copy, Default)]
struct ChainEntry {
    /// The next chunk; meaningless in the last one.
    next: u32,
    /// Length of the chain that begins here, in chunks; 0 when none does.
    chunks: u16,
}

/// The chains of all frames, received ones and those to send.
#[derive(Debug)]
pub struct Chains(Box<[ChainEntry]>);

impl Chains {
    /// No chains yet, of `total` chunks.
    pub fn new(total: u32) -> Self {
        Self(vec![ChainEntry::default(); total as usize].into())
    }

    /// Makes `chunk` a chain of its own.
    pub fn begin(&mut self, chunk: u32) {
        if let Some(link) = self.0.get_mut(chunk as usize) {
            link.chunks = 1;
        }
    }

    /// Appends `chunk` to the chain that begins with `head` and ends with `last`.
    pub fn append(&mut self, head: u32, last: u32, chunk: u32) {
        if let Some(link) = self.0.get_mut(last as usize) {
            link.next = chunk;
        }
        if let Some(link) = self.0.get_mut(head as usize) {
            link.chunks += 1;
        }
    }

    /// Chunks of the chain that begins with `head`.
    pub fn len(&self, head: u32) -> usize {
        self.0.get(head as usize).map_or(0, |link| usize::from(link.chunks))
    }

    /// The chunks of the chain that begins with `head`, in order.
    pub fn iter(&self, head: u32) -> impl Iterator<Item = u32> {
        self.walk(head, self.len(head))
    }

    fn walk(&self, first: u32, chunks: usize) -> impl Iterator<Item = u32> {
        let next = |chunk: &u32| self.0.get(*chunk as usize).map(|link| link.next);
        std::iter::successors(Some(first), next).take(chunks)
    }

    /// Shortens the chain that begins with `head` to its first `chunks` (0: dissolves it). Returns the chunks behind them.
    pub fn truncate(&mut self, head: u32, chunks: usize) -> impl Iterator<Item = u32> {
        let all = self.len(head);
        if let Some(link) = self.0.get_mut(head as usize) {
            link.chunks = all.min(chunks) as u16;
        }
        self.walk(head, all).skip(chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(chains: &mut Chains, chunks: &[u32]) {
        chains.begin(chunks[0]);
        for pair in chunks.windows(2) {
            chains.append(chunks[0], pair[0], pair[1]);
        }
    }

    #[test]
    fn chains_grow_at_the_end_and_are_cut_there() {
        let mut chains = Chains::new(8);
        chain(&mut chains, &[5, 2, 7]);
        chain(&mut chains, &[3]);
        assert_eq!(chains.iter(5).collect::<Vec<_>>(), [5, 2, 7]);
        assert_eq!(chains.iter(3).collect::<Vec<_>>(), [3]);
        assert_eq!(chains.truncate(5, 2).collect::<Vec<_>>(), [7]);
        assert_eq!(chains.truncate(5, 2).count(), 0);
        assert_eq!(chains.iter(5).collect::<Vec<_>>(), [5, 2]);
        assert_eq!(chains.truncate(5, 0).collect::<Vec<_>>(), [5, 2]);
        assert_eq!(chains.len(5), 0);
    }

    #[test]
    fn only_the_first_chunk_names_a_chain() {
        let mut chains = Chains::new(8);
        chain(&mut chains, &[5, 2, 7]);
        for other in [2, 7, 0, 8, u32::MAX] {
            assert_eq!((chains.len(other), chains.iter(other).count()), (0, 0), "{other}");
            assert_eq!(chains.truncate(other, 0).count(), 0);
        }
    }
}
