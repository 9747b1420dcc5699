//! [`Input`] takes numbers and bytes from the front of the fuzzer's bytes. It never fails: at the end of the
//! input, numbers are 0 and slices are empty.

/// The rest of an input.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Starts at the beginning of an input.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether the input is used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// The next two bytes, most significant first.
    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let bytes = self.bytes(N);
        out[..bytes.len()].copy_from_slice(bytes);
        out
    }

    /// The next `len` bytes, or all that are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    /// Reads a 16-bit length and that many bytes, or all that are left.
    pub fn chunk(&mut self) -> &'a [u8] {
        let len = self.u16();
        self.bytes(len.into())
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }
}
