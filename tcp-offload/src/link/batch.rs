//! [`Batch`]: received frames that are processed one after the other.

use super::{Link, RxFrame};

/// Received frames that are still to be processed, in the order in which they arrived.
#[derive(Debug, Default)]
pub struct Batch {
    /// The next frame is the last one, so that taking it moves no other.
    frames: Vec<RxFrame>,
}

impl Batch {
    /// An empty batch with memory for `most` frames.
    pub fn with_capacity(most: usize) -> Self {
        Self { frames: Vec::with_capacity(most) }
    }

    /// Takes at most `most` received frames from `link`, once all earlier ones are processed. Returns whether there was one.
    pub fn fill(&mut self, link: &mut dyn Link, most: usize) -> bool {
        debug_assert!(self.is_empty());
        link.receive(&mut self.frames, most);
        if self.len() > 1 {
            self.frames.reverse();
        }
        !self.is_empty()
    }

    /// Whether all frames are processed.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Number of frames that are still to be processed.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// The next frame.
    pub fn first(&self) -> Option<&RxFrame> {
        self.frames.last()
    }
}

impl From<RxFrame> for Batch {
    fn from(frame: RxFrame) -> Self {
        Self { frames: vec![frame] }
    }
}

impl Iterator for Batch {
    type Item = RxFrame;

    fn next(&mut self) -> Option<RxFrame> {
        self.frames.pop()
    }
}
