//! Registered memory that lies between canaries, so that a byte written outside of a region is seen, and one read
//! from outside is known again in what is sent.
#![expect(unsafe_code, reason = "a region is borrowed out of the middle of a larger mapping")]

use std::{cell::RefCell, mem, ops::Range, ptr::NonNull};

use xwarp_verbs::{Memory, Pages};

/// Bytes of canary before and behind a region.
const MARGIN: usize = 512;
/// Bytes of the longest region.
const MOST: usize = 8192;

/// What nobody may read or write consists of this, over and over.
pub const SECRET: [u8; 16] = *b"\xc5\x3a\x91\x6eNobodySees!\xf7";

/// As much secret as a mapping holds.
static SECRETS: [u8; MOST + 2 * MARGIN] = {
    let mut all = [0; MOST + 2 * MARGIN];
    let mut at = 0;
    while at < all.len() {
        all[at] = SECRET[at % SECRET.len()];
        at += 1;
    }
    all
};

thread_local! {
    /// Mappings that are free to use again.
    static POOL: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
}

/// Memory for one region, with canaries around it.
#[derive(Debug)]
pub struct Guarded {
    /// All of it; the region begins at [`MARGIN`].
    all: Memory,
    region: Memory,
}

impl Guarded {
    /// A region of `len` bytes that all are `fill`, or with `None` a secret.
    pub fn new(len: usize, fill: Option<u8>) -> Self {
        assert!(len <= MOST, "longer than the mappings");
        let all = POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| {
            let all = Memory::anonymous(MOST + 2 * MARGIN, Pages::Normal).expect("memory for regions");
            // Mapped for ever: whoever gets a region may keep it.
            mem::forget(all.clone());
            all
        });
        all.write(0, &SECRETS).expect("all of it");
        if let Some(fill) = fill {
            all.fill(MARGIN, len, fill).expect("the middle of it");
        }
        let base = NonNull::new(all.as_ptr().wrapping_add(MARGIN)).expect("mappings are not at address 0");
        // SAFETY: the bytes lie inside a mapping that is writable and is never unmapped; everybody uses it through
        // `Memory`, which makes no references, and on this thread.
        let region = unsafe { Memory::borrowed(base, len) };
        Self { all, region }
    }

    /// The region.
    pub fn region(&self) -> &Memory {
        &self.region
    }

    /// The region's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.len()];
        self.region.read(0, &mut bytes).expect("all of it");
        bytes
    }

    /// Panics when a canary has changed.
    pub fn check(&self) {
        let mut bytes = vec![0; self.all.len()];
        self.all.read(0, &mut bytes).expect("all of it");
        let end = MARGIN + self.region.len();
        assert!(bytes[..MARGIN] == SECRETS[..MARGIN], "bytes before a region have changed");
        assert!(bytes[end..] == SECRETS[end..], "bytes behind a region have changed");
    }

    /// Whether all of the region is secret, as it was made.
    pub fn is_secret(&self) -> bool {
        self.is_secret_outside(0..0)
    }

    /// Whether all of the region but this part is secret, as it was made.
    pub fn is_secret_outside(&self, part: Range<usize>) -> bool {
        let (bytes, secrets) = (self.bytes(), &SECRETS[MARGIN..MARGIN + self.region.len()]);
        bytes[..part.start] == secrets[..part.start] && bytes[part.end..] == secrets[part.end..]
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        POOL.with_borrow_mut(|pool| pool.push(self.all.clone()));
    }
}

/// Whether as much of a secret as fifteen bytes can be seen in what is sent.
pub fn betrays(sent: &[u8]) -> bool {
    let (front, back) = SECRET.split_at(SECRET.len() / 2);
    sent.windows(front.len()).any(|window| window == front || window == back)
}
