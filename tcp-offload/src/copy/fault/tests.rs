//! Every access to shared memory, with a page that is gone at its first byte, at one in the middle and at its last one: it returns
//! [`Fault`], touches nothing else, and the process lives.
#![expect(
    clippy::undocumented_unsafe_blocks,
    reason = "all memory is either good or protected, and faults are handled"
)]

use std::{ptr, slice, sync::Once};

use super::super::{
    Fault, Gapped, GappedMut, Gaps, Sum, access, compare_exchange_u64, landing, load_u8, load_u16, load_u32,
    load_u64, read, read_gapped, store_u8, store_u16, store_u32, store_u64, write, write_gapped,
};

const PAGE: usize = 4096;
/// Bytes around the private side of a copy that must not change.
const MARGIN: usize = 64;

/// A handler as an application of [`landing`] has it.
extern "C" fn handle(signal: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    let at = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    #[cfg(target_arch = "aarch64")]
    let at = &mut context.uc_mcontext.pc;
    match landing(*at as usize) {
        Some(landing) => *at = landing as _,
        None => _ = unsafe { libc::signal(signal, libc::SIG_DFL) },
    }
}

fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
        }
    });
}

/// Pages of which the later ones cannot be accessed as `protection` says.
struct Pages(*mut u8);

const READABLE: usize = 3;

impl Pages {
    fn new(protection: libc::c_int) -> Self {
        install();
        unsafe {
            let (all, flags) = (2 * READABLE * PAGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let base = libc::mmap(ptr::null_mut(), all, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(base.byte_add(READABLE * PAGE), READABLE * PAGE, protection), 0);
            Self(base.cast())
        }
    }

    /// The address whose byte `good` is the first one that cannot be accessed.
    fn with(&self, good: usize) -> *mut u8 {
        assert!(good <= READABLE * PAGE);
        unsafe { self.0.add(READABLE * PAGE - good) }
    }

    /// Fills the bytes that can be accessed.
    fn fill(&self, byte: u8) {
        unsafe { slice::from_raw_parts_mut(self.0, READABLE * PAGE) }.fill(byte);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        unsafe { libc::munmap(self.0.cast(), 2 * READABLE * PAGE) };
    }
}

fn lengths() -> impl Iterator<Item = usize> {
    (1..=70).chain([127, 128, 200, 255, 256, 257, 300, 383, 511, 512, 1000, 1024, 1460, 3508, 3840, 4096])
}

/// The places of the first byte that cannot be accessed. `len`: all can.
fn places(len: usize) -> [usize; 6] {
    [0, 1.min(len), len / 2, len.saturating_sub(2), len - 1, len]
}

/// Checks a copy from shared memory: `copy(from, out)` fills all of `out` but its gaps.
fn reads(
    name: &str,
    bytes_in: impl Fn(usize) -> usize,
    copy: impl Fn(*const u8, &mut [u8]) -> Result<(), Fault>,
) {
    let pages = Pages::new(libc::PROT_NONE);
    pages.fill(7);
    for space in lengths() {
        let len = bytes_in(space);
        if len == 0 {
            continue;
        }
        for good in places(len) {
            let mut out = vec![0xee; space + 2 * MARGIN];
            let done = copy(pages.with(good), &mut out[MARGIN..MARGIN + space]);
            assert_eq!(done.is_ok(), good == len, "{name} of {len} bytes, the page is gone at {good}");
            let around = out[..MARGIN].iter().chain(&out[MARGIN + space..]);
            assert!(around.copied().all(|byte| byte == 0xee), "{name} of {len} bytes at {good}: around it");
        }
    }
}

/// Checks a copy to shared memory.
fn writes(name: &str, bytes_in: impl Fn(usize) -> usize, copy: impl Fn(*mut u8, &[u8]) -> Result<(), Fault>) {
    for protection in [libc::PROT_NONE, libc::PROT_READ] {
        let pages = Pages::new(protection);
        for space in lengths() {
            let len = bytes_in(space);
            if len == 0 {
                continue;
            }
            for good in places(len) {
                pages.fill(0xee);
                let done = copy(pages.with(good), &vec![7; space]);
                assert_eq!(done.is_ok(), good == len, "{name} of {len} bytes, the page is gone at {good}");
                let before = unsafe { slice::from_raw_parts(pages.with(good).sub(MARGIN), MARGIN) };
                assert!(
                    before.iter().all(|byte| *byte == 0xee),
                    "{name} of {len} bytes at {good}: before it"
                );
            }
        }
    }
}

#[test]
fn a_fault_ends_every_copy() {
    reads("read", |len| len, |from, out| unsafe { read(from, out) });
    writes("write", |len| len, |to, bytes| unsafe { write(to, bytes) });
    for first in [0, 3, 40, 508, usize::MAX] {
        let gaps = Gaps { first, between: 508, len: 4 };
        let bytes_in = |space| gaps.bytes_in(space);
        reads("read_gapped", bytes_in, |from, out| {
            let mut space = GappedMut { len: gaps.bytes_in(out.len()), bytes: out, gaps, sum: Sum::Apart };
            unsafe { read_gapped(from, &mut space) }
        });
        writes("write_gapped", bytes_in, |to, bytes| {
            let source = Gapped { bytes, len: gaps.bytes_in(bytes.len()), gaps };
            unsafe { write_gapped(to, &source) }
        });
        reads("read_gapped with a sum", bytes_in, |from, out| {
            let sum = Sum::Wanted { crc: 0, number: 1 };
            let mut space = GappedMut { len: gaps.bytes_in(out.len()), bytes: out, gaps, sum };
            let done = unsafe { read_gapped(from, &mut space) };
            assert!(done.is_ok() || space.sum == sum, "the sum of bytes that could not be read");
            done
        });
    }
}

/// The ways that the processor has, also those that the copies above do not choose.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_fault_ends_a_copy_of_every_way() {
    use super::super::crc::kernel;

    type Copied = unsafe fn(u32, *const u8, &mut [u8], crate::copy::NumberedGaps) -> Result<u32, Fault>;

    let short =
        |from: *const u8, out: &mut [u8]| unsafe { access::copy_short(from, out.as_mut_ptr(), out.len()) };
    reads("copy_short", |len| len, short);
    writes(
        "copy_short",
        |len| len,
        |to, bytes| unsafe { access::copy_short(bytes.as_ptr(), to, bytes.len()) },
    );
    if is_x86_feature_detected!("avx") {
        let least = |len: usize| if len < access::LONG { 0 } else { len };
        reads("copy_long", least, |from, out| unsafe {
            access::copy_long(from, out.as_mut_ptr(), out.len())
        });
        writes("copy_long", least, |to, bytes| unsafe { access::copy_long(bytes.as_ptr(), to, bytes.len()) });
    }
    for first in [0, 3, 40, 508, usize::MAX] {
        let gaps = Gaps { first, between: 508, len: 4 };
        let least = |space: usize| {
            // The space ends with a byte, not within a gap or behind one.
            let whole = gaps.space_of(gaps.bytes_in(space)) == space;
            if space < kernel::LEAST_COPIED || !whole { 0 } else { gaps.bytes_in(space) }
        };
        let summed = |name, copied: Copied| {
            reads(name, least, |from, out| unsafe { copied(0, from, out, gaps.numbered(5)) }.map(|_| ()));
        };
        if kernel::has_512() {
            summed("AVX-512", kernel::avx512::copied);
        }
        if kernel::has_256() {
            summed("AVX2", kernel::avx2::copied);
        }
    }
}

#[test]
fn a_fault_ends_every_access_to_a_word() {
    let [gone, constant] = [libc::PROT_NONE, libc::PROT_READ].map(Pages::new);
    let (nothing, good, fixed) = (gone.with(0), gone.with(8), constant.with(0));
    gone.fill(0);
    unsafe {
        for (at, done) in [(good, Ok(())), (nothing, Err(Fault)), (fixed, Err(Fault))] {
            assert_eq!(store_u8(at, 1), done);
            assert_eq!(store_u16(at.cast(), 1), done);
            assert_eq!(store_u32(at.cast(), 1), done);
            assert_eq!(store_u64(at.cast(), 1), done);
            assert_eq!(compare_exchange_u64(at.cast(), 1, 2), done.map(|()| 1));
            // As above, although nothing would be stored.
            assert_eq!(compare_exchange_u64(at.cast(), 1, 3), done.map(|()| 2));
        }
        for (at, word) in [(good, Ok(2)), (nothing, Err(Fault)), (fixed, Ok(0))] {
            assert_eq!(load_u8(at), word);
            assert_eq!(load_u16(at.cast()), word.map(u16::from));
            assert_eq!(load_u32(at.cast()), word.map(u32::from));
            assert_eq!(load_u64(at.cast()), word.map(u64::from));
        }
    }
}

#[test]
fn other_instructions_have_no_landing() {
    assert_eq!(landing(0), None);
    assert_eq!(landing(usize::MAX), None);
    assert_eq!(landing(landing as *const () as usize), None);
}
