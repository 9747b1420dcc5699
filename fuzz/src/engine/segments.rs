//! The hostile end of RDMA/TCP: segments made by hand from records of an input, with correct length, Connection ID, pad and
//! CRC. It shares nothing with the code under test.

/// The peer's Connection ID when it is the client.
const CONNECTION: [u8; 8] = *b"\x01\x23\x45\x67\x89\xab\xcd\xef";
/// Number of the peer's first message, near the wrap.
const FIRST_NUMBER: u32 = u32::MAX - 1;

/// The E bit, and the type Read Response, of the second byte.
const LAST: u8 = 4;
const TYPE: u8 = 3;
const WRITE: u8 = 1;
const READ_REQUEST: u8 = 2;
const RESPONSE: u8 = 3;

/// The generator of the proposal, reflected.
const GENERATOR: u32 = 0x8260_8edb;

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut sum, mut bit) = (byte as u32, 0);
        while bit < 8 {
            sum = sum >> 1 ^ if sum & 1 == 1 { GENERATOR } else { 0 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| sum >> 8 ^ TABLE[usize::from(sum as u8 ^ byte)])
}

/// The peer's side of a connection's numbers.
#[derive(Debug, Clone)]
pub struct Numbers {
    connection: [u8; 8],
    due: u32,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { connection: CONNECTION, due: FIRST_NUMBER }
    }
}

impl Numbers {
    /// Encodes the first message: a Connect, or an Accept or Reject of the engine's Connect, of which `heard` begins with.
    /// `depths` has IRD and ORD, four bits each.
    pub fn first(&mut self, heard: Option<&[u8]>, rejects: bool, depths: u8, private_data: &[u8]) -> Vec<u8> {
        *self = Self::default();
        if let Some(theirs) = heard.and_then(|heard| heard.get(4..12)) {
            self.connection.copy_from_slice(theirs);
        }
        let (ird, ord) = (depths >> 4, depths & 15);
        let control: &[u8] = match heard {
            None => &[1, 0, 0, 0, 0, ird, 0, ord],
            Some(_) if rejects => &[3, 0, 0, 0],
            Some(_) => &[2, 0, 0, 0, 0, ird, 0, ord],
        };
        let rest = [&[0; 4], control, private_data].concat();
        let first = self.segment(0x0c, control.len() as u8 / 4, [0; 2], self.due, &rest);
        self.due = self.due.wrapping_add(1);
        first
    }

    /// Encodes the segment of a record: the second byte, CLEN, the order field, the distance of the number from the one that
    /// is due, or for a response the place of the engine's request in `heard`, and all bytes from the 21st on.
    pub fn record(&mut self, record: &[u8], heard: &[u8]) -> Vec<u8> {
        let Some((&[flags, words, high, low, distance], rest)) = record.split_first_chunk() else {
            return Vec::new();
        };
        let number = if flags & TYPE == RESPONSE {
            requests(heard).nth(distance.into()).unwrap_or(distance.into())
        } else {
            let number = self.due.wrapping_add_signed(i32::from(distance.cast_signed()));
            self.due = self.due.wrapping_add(u32::from(distance == 0 && flags & LAST != 0));
            number
        };
        self.segment(flags, words, [high, low], number, rest)
    }

    fn segment(&self, flags: u8, words: u8, order: [u8; 2], number: u32, rest: &[u8]) -> Vec<u8> {
        let len = (20 + rest.len()) as u16;
        let mut out = [&[1, flags][..], &len.to_be_bytes(), &self.connection].concat();
        out.extend_from_slice(&number.to_be_bytes());
        out.extend_from_slice(&order);
        out.extend_from_slice(&[0, words]);
        out.extend_from_slice(rest);
        out.resize(out.len().next_multiple_of(4), 0);
        let sum = crc(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        out
    }
}

/// Offset in a record of the field that names a region, if its segment has one: Buffer ID, or the tag to invalidate.
pub fn key_of(record: &[u8]) -> Option<usize> {
    match (record.first()? & TYPE, record.get(9)) {
        (WRITE | READ_REQUEST, _) => Some(5),
        (0, Some(5)) => Some(13),
        _ => None,
    }
}

/// Numbers of the Read Requests in the engine's stream.
fn requests(heard: &[u8]) -> impl Iterator<Item = u32> {
    let mut rest = heard;
    std::iter::from_fn(move || {
        loop {
            let head = rest.first_chunk::<16>()?;
            let len = usize::from(u16::from_be_bytes([head[2], head[3]]));
            rest = rest.get((len.next_multiple_of(4) + 4).max(16)..)?;
            if head[1] & TYPE == READ_REQUEST {
                return Some(u32::from_be_bytes([head[12], head[13], head[14], head[15]]));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vectors_of_the_study() {
        assert_eq!(crc(b"123456789"), 0xe07e_661e);
        let numbers = Numbers { due: 0x10, ..Numbers::default() };
        let segment = numbers.segment(0x0c, 0, [0; 2], 0x10, b"\0\0\0\0hello");
        assert_eq!(segment[24..], *b"hello\0\0\0\x8c\x11\x26\x4d");
    }
}
