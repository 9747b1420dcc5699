// The table that both ends know: 1024 slots of 128 bytes. A slot has a checksum, two lengths, a key and a value.

/// Slots of the table.
pub const SLOTS: usize = 1024;
/// Bytes of a slot.
pub const SLOT_BYTES: usize = 128;
/// The longest key, in bytes.
pub const MAX_KEY: usize = 32;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = SLOT_BYTES - 8 - 2 - MAX_KEY;

/// FNV-1a: short, and good enough to choose a slot and to notice a half-written one.
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Offset of a key's slot in the table, in bytes.
pub fn offset(key: &[u8]) -> usize {
    (hash(key) % SLOTS as u64) as usize * SLOT_BYTES
}

/// The bytes of a slot, or `None` if key or value is too long.
pub fn encode(key: &[u8], value: &[u8]) -> Option<[u8; SLOT_BYTES]> {
    if key.is_empty() || key.len() > MAX_KEY || value.len() > MAX_VALUE {
        return None;
    }
    let mut slot = [0; SLOT_BYTES];
    slot[8] = key.len() as u8;
    slot[9] = value.len() as u8;
    slot[10..10 + key.len()].copy_from_slice(key);
    slot[10 + MAX_KEY..10 + MAX_KEY + value.len()].copy_from_slice(value);
    let sum = hash(&slot[8..]);
    slot[..8].copy_from_slice(&sum.to_be_bytes());
    Some(slot)
}

/// What a slot says about a key.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Its value.
    Value(Vec<u8>),
    /// The slot is empty, or another key's.
    Nothing,
    /// The slot was read while it was written.
    Torn,
}

/// Reads a slot. No byte of it is trusted: the peer may have written while it was read.
pub fn decode(slot: &[u8; SLOT_BYTES], key: &[u8]) -> Found {
    if slot.iter().all(|byte| *byte == 0) {
        return Found::Nothing;
    }
    if slot[..8] != hash(&slot[8..]).to_be_bytes() {
        return Found::Torn;
    }
    let lengths = (usize::from(slot[8]), usize::from(slot[9]));
    let found = slot.get(10..10 + lengths.0);
    let value = slot.get(10 + MAX_KEY..10 + MAX_KEY + lengths.1);
    match (found, value) {
        (Some(found), Some(value)) if found == key => Found::Value(value.to_vec()),
        _ => Found::Nothing,
    }
}
