//! Registered memory between canaries: a byte written outside a region is detected, and a byte read from
//! outside is recognised in sent frames.
#![expect(unsafe_code, reason = "a region is borrowed out of the middle of a larger mapping")]

use std::{cell::RefCell, mem, ops::Range, ptr::NonNull};

use xwarp_rnic::{Memory, Pages};

/// Size of the canary before and after a region, in bytes.
const MARGIN: usize = 512;
/// Size of the longest region, in bytes.
const MOST: usize = 8192;

/// The pattern of memory that the peer may neither read nor write, repeated.
pub const SECRET: [u8; 16] = *b"\xc5\x3a\x91\x6eNobodySees!\xf7";

/// The secret pattern for a whole mapping.
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
    /// Unused mappings.
    static POOL: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
}

/// Memory for one region, with canaries around it.
#[derive(Debug)]
pub struct Guarded {
    /// The whole mapping; the region begins at [`MARGIN`].
    all: Memory,
    region: Memory,
}

impl Guarded {
    /// Creates a region of `len` bytes filled with `fill`, or with the secret pattern for `None`.
    pub fn new(len: usize, fill: Option<u8>) -> Self {
        assert!(len <= MOST, "longer than the mappings");
        let all = POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| {
            let all = Memory::anonymous(MOST + 2 * MARGIN, Pages::Normal).expect("mapping of a region");
            // Mapped for the life of the process, because users of a region may keep it.
            mem::forget(all.clone());
            all
        });
        all.write(0, &SECRETS).expect("all of it");
        if let Some(fill) = fill {
            all.fill(MARGIN, len, fill).expect("the middle of it");
        }
        let base = NonNull::new(all.as_ptr().wrapping_add(MARGIN)).expect("mappings are not at address 0");
        // SAFETY: the bytes lie inside a mapping that is writable and is never unmapped; all accesses go
        // through `Memory`, which creates no references, and are on this thread.
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

    /// Panics if a canary has changed.
    pub fn check(&self) {
        let mut bytes = vec![0; self.all.len()];
        self.all.read(0, &mut bytes).expect("all of it");
        let end = MARGIN + self.region.len();
        assert!(bytes[..MARGIN] == SECRETS[..MARGIN], "bytes before a region have changed");
        assert!(bytes[end..] == SECRETS[end..], "bytes after a region have changed");
    }

    /// Whether the whole region still has the secret pattern.
    pub fn is_secret(&self) -> bool {
        self.is_secret_outside(0..0)
    }

    /// Whether the region still has the secret pattern outside this part.
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

/// Whether sent bytes contain half of the secret pattern, as any fifteen consecutive bytes of it do.
pub fn betrays(sent: &[u8]) -> bool {
    let (front, back) = SECRET.split_at(SECRET.len() / 2);
    sent.windows(front.len()).any(|window| window == front || window == back)
}
