//! [`Order`]: the request of a client of a reference (kernel TCP, raw AF_XDP) to its server, as bytes. An order begins
//! each row of the table.

/// The server's part of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// The server receives until the client has finished.
    Bulk,
    /// The server sends back each message.
    Echo,
    /// The server ends.
    End,
}

/// The first bytes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The server's part.
    pub task: Task,
    /// Whether both ends poll instead of sleeping.
    pub polling: bool,
    /// Size of a message.
    pub bytes: u64,
}

impl Order {
    /// Bytes of an order.
    pub const LEN: usize = 16;
    const MAGIC: [u8; 6] = *b"xwperf";

    /// Writes the order.
    pub fn emit(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..6].copy_from_slice(&Self::MAGIC);
        out[6] = match self.task {
            Task::Bulk => 1,
            Task::Echo => 2,
            Task::End => 3,
        };
        out[7] = u8::from(self.polling);
        out[8..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// Reads an order; `None` when the peer is another program.
    pub fn parse(bytes: [u8; Self::LEN]) -> Option<Self> {
        let (head, size) = bytes.split_at(8);
        if head[..6] != Self::MAGIC {
            return None;
        }
        let task = match head[6] {
            1 => Task::Bulk,
            2 => Task::Echo,
            3 => Task::End,
            _ => return None,
        };
        let bytes = u64::from_le_bytes(size.try_into().ok()?);
        // Limits the allocation that an unknown peer's order can cause.
        (bytes <= 1 << 32).then_some(Self { task, polling: head[7] != 0, bytes })
    }
}

/// The server's account of a bulk row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Receipt {
    /// Bytes of messages received.
    pub taken: u64,
    /// Nanoseconds of CPU time used.
    pub cpu_ns: u64,
}

impl Receipt {
    /// Bytes of a receipt.
    pub const LEN: usize = 16;

    /// Writes the receipt.
    pub fn emit(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.taken.to_le_bytes());
        out[8..].copy_from_slice(&self.cpu_ns.to_le_bytes());
        out
    }

    /// Reads a receipt.
    pub fn parse(bytes: [u8; Self::LEN]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self { taken: word(0), cpu_ns: word(8) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn prop_orders_survive_the_wire(task in 0..3, polling: bool, bytes in 0u64..=1 << 32) {
            let task = [Task::Bulk, Task::Echo, Task::End][task as usize];
            let order = Order { task, polling, bytes };
            prop_assert_eq!(Order::parse(order.emit()), Some(order));
        }

        #[test]
        fn prop_strangers_are_refused(bytes: [u8; Order::LEN]) {
            prop_assume!(bytes[..6] != Order::MAGIC);
            prop_assert_eq!(Order::parse(bytes), None);
        }

        #[test]
        fn prop_receipts_survive_the_wire(taken: u64, cpu_ns: u64) {
            let receipt = Receipt { taken, cpu_ns };
            prop_assert_eq!(Receipt::parse(receipt.emit()), receipt);
        }
    }
}
