//! The order field (section 3.4 of the proposal): which messages may be processed before others.

use std::collections::VecDeque;

/// A Message Number. Numbers wrap, so they have no total order; a difference is meaningful within half of the number space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MessageNumber(pub u32);

impl MessageNumber {
    /// The next number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Distance from `earlier` to this number, in messages; `None` when this number precedes `earlier`.
    pub const fn ahead_of(self, earlier: Self) -> Option<u32> {
        let distance = self.0.wrapping_sub(earlier.0);
        if distance < 1 << 31 { Some(distance) } else { None }
    }
}

/// The order field: the number of immediately preceding messages that this one may overtake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order(pub u16);

impl Order {
    /// The message is processed after all messages before it.
    pub const STRICT: Self = Self(0);
    /// The message may be processed at once, whatever precedes it.
    pub const AT_ONCE: Self = Self(u16::MAX);
}

/// Size of the window of message numbers, which begins with the oldest unprocessed one. A message beyond the window waits
/// whatever its order field says, which bounds the bitmap to 8 KiB for each connection.
pub const WINDOW: u32 = 65_535;

/// The processed messages of one direction: the number of the oldest unprocessed message, and a bitmap of the numbers after it.
#[derive(Debug)]
pub struct OrderWindow {
    oldest: MessageNumber,
    /// Bit n of word w is set when message `oldest + 64 w + n - skew` is processed.
    words: VecDeque<u64>,
    /// Bits of the first word that belong to messages before `oldest`.
    skew: u32,
}

impl OrderWindow {
    /// A window in which no message from `first` on is processed.
    pub fn new(first: MessageNumber) -> Self {
        Self { oldest: first, words: VecDeque::new(), skew: 0 }
    }

    /// Number of the oldest unprocessed message.
    pub fn oldest(&self) -> MessageNumber {
        self.oldest
    }

    /// Whether message `number` with this order field, N, may be processed now: it is unprocessed and in the window, and all
    /// messages up to `number - N - 1` are processed.
    pub fn may_process(&self, number: MessageNumber, order: Order) -> bool {
        let Some(ahead) = number.ahead_of(self.oldest).filter(|ahead| *ahead < WINDOW) else { return false };
        (order == Order::AT_ONCE || ahead <= u32::from(order.0)) && !self.is_processed(number)
    }

    /// Whether `number` is processed. Messages before the window count as processed.
    pub fn is_processed(&self, number: MessageNumber) -> bool {
        let Some(ahead) = number.ahead_of(self.oldest) else { return true };
        let (word, bit) = self.place(ahead);
        self.words.get(word).is_some_and(|word| word >> bit & 1 == 1)
    }

    /// Marks `number` as processed. A number outside the window is ignored.
    pub fn process(&mut self, number: MessageNumber) {
        match number.ahead_of(self.oldest) {
            Some(0) => self.advance(),
            Some(ahead) if ahead < WINDOW => {
                let (word, bit) = self.place(ahead);
                if self.words.len() <= word {
                    self.words.resize(word + 1, 0);
                }
                if let Some(word) = self.words.get_mut(word) {
                    *word |= 1 << bit;
                }
            }
            _ => {}
        }
    }

    fn place(&self, ahead: u32) -> (usize, u32) {
        let at = ahead + self.skew;
        ((at / 64) as usize, at % 64)
    }

    /// Moves `oldest` past the processed messages.
    fn advance(&mut self) {
        loop {
            self.oldest = self.oldest.next();
            if self.words.is_empty() {
                self.skew = 0;
                return;
            }
            self.skew += 1;
            if self.skew == 64 {
                self.words.pop_front();
                self.skew = 0;
            }
            if self.words.front().is_none_or(|word| word >> self.skew & 1 == 0) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
