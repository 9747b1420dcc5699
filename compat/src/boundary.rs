//! The boundary to C: pointers that C programs pass, and our objects as C structures. Nearly all unsafe code of this
//! crate.
//!
//! The functions of the ABI have parameters of the types [`Handle`], [`In`], [`Out`] and [`Text`], which look like
//! pointers to C. Rust code cannot make them from nothing, so their methods rely on the contract of libibverbs: a
//! pointer is null, or valid as the manual page requires.
//!
//! Our objects live in `Arc`s. The pointers to them that C programs hold are entries of a table, so each call detects a
//! null, stale or foreign pointer, except calls of the data path, which do not search the table.
#![allow(unsafe_code)]

use std::{
    alloc::Layout,
    any::Any,
    cell::UnsafeCell,
    collections::BTreeMap,
    ffi::{CStr, c_char, c_void},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    ptr,
    sync::{Arc, PoisonError, RwLock},
};

use nix::errno::Errno;

use crate::{
    abi::cm::{sockaddr, sockaddr_storage},
    users::{Usable, check_unused},
};

/// A part of one of our objects that C programs read and write.
#[repr(transparent)]
pub struct CPart<T>(UnsafeCell<T>);

// SAFETY: access from Rust is by `update` only, each a short access to plain data. A program that races with such an
// access (reads `qp->state` while another thread changes it) gets an old or a new value, as with every provider.
unsafe impl<T> Send for CPart<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for CPart<T> {}

impl<T> CPart<T> {
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Reads or changes the part. `f` must not reach the same part again.
    pub fn update<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the cell is alive, and no other reference from Rust exists while `f` runs: callers hold the object's lock, or are
        // the one thread that the verbs allow to use the object.
        f(unsafe { &mut *self.0.get() })
    }
}

/// One of our objects, to which C programs have pointers. [`object!`] implements it.
pub trait Object: Sized + Send + Sync + 'static {
    /// The C structure.
    type C;
    /// Offset of the structure in the object, in bytes.
    const OFFSET: usize;

    /// The structure's address.
    fn c_ptr(&self) -> *mut Self::C {
        ptr::from_ref(self).cast_mut().wrapping_byte_add(Self::OFFSET).cast()
    }
}

/// Implements [`Object`] for a type whose field `c` is the C structure, or has it as a field:
/// `object!(Pd: ibv_pd)`, `object!(Cq: ibv_cq is cq of ibv_cq_ex)`.
macro_rules! object {
    ($object:ident: $c:ident) => {
        object!(@ $object, $c, std::mem::offset_of!($object, c));
    };
    ($object:ident: $c:ident is $field:ident of $outer:ident) => {
        object!(@ $object, $c, std::mem::offset_of!($object, c) + std::mem::offset_of!($outer, $field));
    };
    (@ $object:ident, $c:ident, $offset:expr) => {
        impl $crate::boundary::Object for $object {
            type C = $c;
            const OFFSET: usize = $offset;
        }
    };
}
pub(crate) use object;

/// An entry of the table.
struct Published {
    object: Arc<dyn Any + Send + Sync>,
    /// The object is being destroyed: only acknowledgements still find it.
    retired: bool,
}

type Live = BTreeMap<usize, Published>;

/// All objects to which C programs have pointers, by address.
static LIVE: RwLock<Live> = RwLock::new(BTreeMap::new());

/// A C program's pointer to one of our objects.
#[repr(transparent)]
pub struct Handle<T: Object>(*mut T::C);

// SAFETY: a handle is the name of an object, which may be used from every thread; the object is `Send` and `Sync`.
unsafe impl<T: Object> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T: Object> Sync for Handle<T> {}

impl<T: Object> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Object> Copy for Handle<T> {}

impl<T: Object> Handle<T> {
    /// A null pointer: the result of a failed function.
    pub const NULL: Self = Self(ptr::null_mut());

    /// The pointer in a field of a C structure.
    pub const fn of(pointer: *mut T::C) -> Self {
        Self(pointer)
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn as_ptr(self) -> *mut T::C {
        self.0
    }

    /// The object, if the pointer names one of this type that has not been destroyed.
    pub fn object(self) -> Result<Arc<T>, Errno> {
        self.find(&LIVE.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn find(self, live: &Live) -> Result<Arc<T>, Errno> {
        let published = live.get(&self.0.addr()).filter(|published| !published.retired);
        Arc::clone(&published.ok_or(Errno::EINVAL)?.object).downcast().map_err(|_| Errno::EINVAL)
    }

    /// The object whose event is acknowledged. Its destruction may have begun, which waits for that.
    pub fn acknowledged(self) -> Option<Arc<T>> {
        let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&live.get(&self.0.addr())?.object).downcast().ok()
    }

    /// Makes `object` reachable for C programs.
    pub fn publish(object: Arc<T>) -> Self {
        let pointer = object.c_ptr();
        let published = Published { object, retired: false };
        LIVE.write().unwrap_or_else(PoisonError::into_inner).insert(pointer.addr(), published);
        Self(pointer)
    }

    /// Ends the life of the pointer. Fails with `EINVAL` for a pointer that names no such object; of several threads that call
    /// it for one object, one succeeds.
    pub fn withdraw(self) -> Result<Arc<T>, Errno> {
        let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
        let object = self.find(&live)?;
        live.remove(&self.0.addr());
        Ok(object)
    }

    /// Like [`withdraw`](Self::withdraw), but fails with `EBUSY` while other objects use this one.
    pub fn withdraw_unused(self) -> Result<Arc<T>, Errno>
    where
        T: Usable,
    {
        let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
        let object = self.find(&live)?;
        check_unused(&object)?;
        live.remove(&self.0.addr());
        Ok(object)
    }

    /// Ends the life of the pointer in two steps, for an object with events: from now on only their acknowledgements find the
    /// object, and after `finish`, which waits for them, nothing does. Fails as [`withdraw`](Self::withdraw).
    pub fn retire(self, finish: impl FnOnce(&T)) -> Result<(), Errno> {
        self.retire_if(|_| Ok(()), finish)
    }

    /// Like [`retire`](Self::retire), but fails with `EBUSY` while other objects use this one.
    pub fn retire_unused(self, finish: impl FnOnce(&T)) -> Result<(), Errno>
    where
        T: Usable,
    {
        self.retire_if(check_unused, finish)
    }

    fn retire_if(
        self,
        check: impl FnOnce(&Arc<T>) -> Result<(), Errno>,
        finish: impl FnOnce(&T),
    ) -> Result<(), Errno> {
        let object = {
            let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
            let object = self.find(&live)?;
            check(&object)?;
            if let Some(published) = live.get_mut(&self.0.addr()) {
                published.retired = true;
            }
            object
        };
        finish(&object);
        let published = LIVE.write().unwrap_or_else(PoisonError::into_inner).remove(&self.0.addr());
        drop(published);
        Ok(())
    }

    /// The object, without a search: for the data path, whose callers guarantee that the object is alive.
    pub fn alive<'a>(self) -> Option<&'a T> {
        // SAFETY: a pointer of this type that is not null came from `publish`, so the structure lies at `OFFSET` of a `T`, which
        // lives until the program destroys it. The verbs forbid using an object that is or is being destroyed.
        (!self.0.is_null()).then(|| unsafe { &*self.0.byte_sub(T::OFFSET).cast::<T>() })
    }
}

/// All objects of one type.
pub fn objects<T: Object>() -> Vec<Arc<T>> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    live.values().filter_map(|published| Arc::clone(&published.object).downcast().ok()).collect()
}

/// A structure, or the first one of an array, that the program passes to us.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    /// The pointer in a field of a C structure.
    pub const fn of(pointer: *const T) -> Self {
        Self(pointer)
    }

    pub fn as_ptr(self) -> *const T {
        self.0
    }

    /// A copy of the structure; `None` for a null pointer.
    pub fn read(self) -> Option<T> {
        // SAFETY: by the module's contract a pointer that is not null leads to a structure that is not written during
        // the call.
        (!self.0.is_null()).then(|| unsafe { self.0.read() })
    }

    /// The structure, without a copy.
    pub fn get<'a>(self) -> Option<&'a T> {
        // SAFETY: as in `read`; callers keep the reference for the time of the call.
        unsafe { self.0.as_ref() }
    }

    /// A list of `len` structures. Fails with `EINVAL` for a negative length, and for a null pointer unless the list is empty.
    pub fn list<'a>(self, len: i32) -> Result<&'a [T], Errno> {
        if len < 0 || len > 0 && self.0.is_null() { Err(Errno::EINVAL) } else { Ok(self.slice(len)) }
    }

    /// An array of `len` structures. Empty for a null pointer or a negative length.
    pub fn slice<'a>(self, len: i32) -> &'a [T] {
        match usize::try_from(len) {
            // SAFETY: as in `get`, for `len` structures.
            Ok(len) if !self.0.is_null() => unsafe { std::slice::from_raw_parts(self.0, len) },
            _ => &[],
        }
    }
}

/// A location that the program wants filled.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T: Copy> Out<T> {
    /// A place in a structure of C.
    pub const fn of(pointer: *mut T) -> Self {
        Self(pointer)
    }

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Stores `value`. Fails with `EINVAL` for a null pointer.
    pub fn write(self, value: T) -> Result<(), Errno> {
        if self.0.is_null() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: by the module's contract a pointer that is not null leads to room for a `T`.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Stores `value` where the program may pass a null pointer because it does not need it.
    pub fn write_if_wanted(self, value: T) {
        let _ = self.write(value);
    }

    /// Stores `value` at `index` of an array, whose length the caller has checked.
    pub fn write_at(self, index: usize, value: T) {
        // SAFETY: as in `write`; the program's array has more than `index` elements.
        unsafe { self.0.add(index).write(value) };
    }

    /// A copy of the stored value.
    pub fn read(self) -> Option<T> {
        In(self.0.cast_const()).read()
    }

    /// Stores `value` in the program's structure of `len` bytes: it is smaller in programs compiled with older headers,
    /// and larger with newer headers, where the rest becomes zero. Fails with `EINVAL` for a null pointer.
    pub fn write_sized(self, value: &T, len: usize) -> Result<(), Errno> {
        if self.0.is_null() {
            return Err(Errno::EINVAL);
        }
        let from = ptr::from_ref(value).cast::<u8>();
        let to = self.0.cast::<u8>();
        let known = len.min(size_of::<T>());
        // SAFETY: the program has room for `len` bytes, and `value` has at least `known`.
        unsafe {
            ptr::copy_nonoverlapping(from, to, known);
            to.add(known).write_bytes(0, len - known);
        }
        Ok(())
    }
}

/// A string that the program passes.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    pub fn as_ptr(self) -> *const c_char {
        self.0
    }

    /// The string, if it is valid UTF-8; `None` for a null pointer.
    pub fn read<'a>(self) -> Option<&'a str> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: by the module's contract the pointer leads to a string that ends with a zero.
        unsafe { CStr::from_ptr(self.0) }.to_str().ok()
    }
}

/// Copies `len` bytes of the program's memory to the end of `out`: inline data, which the program may reuse when the verb returns.
pub fn append_bytes(out: &mut InlineBuffer, address: u64, len: usize) -> Result<(), Errno> {
    let room = out.bytes.get_mut(out.len..out.len.saturating_add(len)).ok_or(Errno::ENOMEM)?;
    copy_bytes(address, room)?;
    out.len += len;
    Ok(())
}

/// [`append_bytes`] to a list, which has room.
pub fn append_bytes_to(out: &mut Vec<u8>, address: u64, len: usize) -> Result<(), Errno> {
    out.reserve(len);
    copy_bytes(address, out.spare_capacity_mut().get_mut(..len).ok_or(Errno::ENOMEM)?)?;
    // SAFETY: `copy_bytes` has initialised the bytes, for which there is room.
    unsafe { out.set_len(out.len() + len) };
    Ok(())
}

/// Copies bytes of the program's memory to all of `room`.
fn copy_bytes(address: u64, room: &mut [MaybeUninit<u8>]) -> Result<(), Errno> {
    let from = ptr::with_exposed_provenance::<u8>(address as usize);
    if !room.is_empty() && from.is_null() {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the program names as many readable bytes; `room` is ours alone.
    unsafe { ptr::copy_nonoverlapping(from, room.as_mut_ptr().cast(), room.len()) };
    Ok(())
}

/// Largest length of inline data, in bytes.
pub const INLINE_BYTES: usize = 1024;

/// Inline data of one work request. The first `len` bytes are initialised.
pub struct InlineBuffer {
    bytes: [MaybeUninit<u8>; INLINE_BYTES],
    len: usize,
}

impl InlineBuffer {
    pub const fn new() -> Self {
        Self { bytes: [MaybeUninit::uninit(); INLINE_BYTES], len: 0 }
    }

    pub fn filled(&self) -> &[u8] {
        let filled = self.bytes.get(..self.len).unwrap_or_default();
        // SAFETY: `append_bytes` has initialised as many bytes as it counted.
        unsafe { std::slice::from_raw_parts(filled.as_ptr().cast(), filled.len()) }
    }
}

/// A copy of the `len` bytes of private data at `data`.
pub fn private_data(data: *const c_void, len: u8) -> Vec<u8> {
    In::of(data.cast::<u8>()).slice(i32::from(len)).to_vec()
}

/// A copy of `values` in a block of its own, which programs may free by `free()`. Null if there is no memory.
pub fn c_block<T: Copy>(values: &[T]) -> *mut T {
    // SAFETY: allocates; the block has room for the values, and is aligned for any type of C.
    unsafe {
        let block = libc::calloc(values.len().max(1), size_of::<T>()).cast::<T>();
        if !block.is_null() {
            ptr::copy_nonoverlapping(values.as_ptr(), block, values.len());
        }
        block
    }
}

/// Frees a block of [`c_block`], or another one that the program allocated by `malloc()` and handed over. Null is allowed.
pub fn c_free<T>(block: *mut T) {
    // SAFETY: by the contract of the functions that free, the pointer came from one that allocates.
    unsafe { libc::free(block.cast()) };
}

/// Whole pages that the library allocated for the program.
pub struct Pages {
    address: ptr::NonNull<u8>,
    layout: Layout,
}

// SAFETY: the owner of the memory, which only the program reads and writes.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Alignment in bytes: the largest page size of the supported processors.
    const ALIGN: usize = 1 << 16;

    /// Allocates at least `len` zeroed bytes; `None` if there is no memory for them.
    pub fn allocate(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1), Self::ALIGN).ok()?;
        // SAFETY: the size is not 0.
        let address = ptr::NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { address, layout })
    }

    pub fn address(&self) -> *mut c_void {
        self.address.as_ptr().cast()
    }

    pub fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the memory came from `alloc_zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.address.as_ptr(), self.layout) };
    }
}

/// The memory of a registration.
pub fn memory(address: *mut c_void, len: usize, writable: bool) -> Option<xwarp_verbs::Memory> {
    let base = ptr::NonNull::new(address.cast::<u8>())?;
    Some(if writable {
        // SAFETY: the program that registers memory keeps it mapped until it deregisters it, and accesses it from C.
        unsafe { xwarp_verbs::Memory::borrowed(base, len) }
    } else {
        // SAFETY: as above.
        unsafe { xwarp_verbs::Memory::borrowed_read_only(base, len) }
    })
}

/// Checks that the pages of a registration are mapped, and writable if requested, and brings them into memory, as a
/// registration with hardware does. Kernels before 5.14 cannot check.
pub fn populate(address: *mut c_void, len: usize, writable: bool) -> Result<(), Errno> {
    use rustix::mm::{Advice, madvise};

    // SAFETY: only asks. (rustix, which reads the number in the auxiliary vector, fails under valgrind.)
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).map_err(|_| Errno::EINVAL)?;
    let before = address.addr() % page;
    let start = address.wrapping_byte_sub(before);
    let len =
        len.checked_add(before).and_then(|len| len.checked_next_multiple_of(page)).ok_or(Errno::EINVAL)?;
    // SAFETY: populating changes the contents of no page; for pages that are not mapped the kernel returns an error.
    let populate = |advice| unsafe { madvise(start, len, advice) };
    match populate(Advice::LinuxPopulateRead) {
        Ok(()) => {}
        // A kernel that cannot check.
        Err(rustix::io::Errno::INVAL) => return Ok(()),
        Err(_) => return Err(Errno::EFAULT),
    }
    if writable && populate(Advice::LinuxPopulateWrite).is_err() { Err(Errno::EFAULT) } else { Ok(()) }
}

/// An address of a program: IPv4 or IPv6. `None` for a null pointer or another family.
#[expect(clippy::cast_ptr_alignment, reason = "programs align an address for its family")]
pub fn read_address(address: In<sockaddr>) -> Option<SocketAddr> {
    let family = address.read()?.sa_family;
    if i32::from(family) == libc::AF_INET {
        let v4 = In::of(address.0.cast::<libc::sockaddr_in>()).read()?;
        let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
        Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
    } else if i32::from(family) == libc::AF_INET6 {
        let v6 = In::of(address.0.cast::<libc::sockaddr_in6>()).read()?;
        let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
        Some(SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id)))
    } else {
        None
    }
}

/// An address in the form of C.
pub fn address(address: SocketAddr) -> sockaddr_storage {
    // SAFETY: `sockaddr_storage` is plain data, for which all zero is valid.
    let mut storage: sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut storage;
    match address {
        SocketAddr::V4(v4) => {
            let value = libc::sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage is larger than, and aligned for, every address.
            unsafe { place.cast::<libc::sockaddr_in>().write(value) };
        }
        SocketAddr::V6(v6) => {
            let value = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(value) };
        }
    }
    storage
}

/// A structure of C, all zero.
pub fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` types consist of integers and pointers, for which all zero is valid.
    unsafe { std::mem::zeroed() }
}

/// Structures of integers and pointers only.
///
/// # Safety
/// All zero is a valid value.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:path),+ $(,)?) => {
        $(
            // SAFETY: integers, pointers, and arrays and structures of them.
            unsafe impl Plain for $name {}
        )+
    };
}
plain!(
    crate::abi::cm::rdma_cm_id,
    crate::abi::cm::rdma_cm_event,
    crate::abi::cm::rdma_addrinfo,
    crate::abi::cm::rdma_conn_param,
    crate::abi::device::ibv_device_attr,
    crate::abi::device::ibv_device_attr_ex,
    crate::abi::device::ibv_port_attr,
    crate::abi::device::verbs_context,
    crate::abi::queue::ibv_cq_ex,
    crate::abi::queue::ibv_qp_ex,
    crate::abi::queue::ibv_qp_attr,
    crate::abi::queue::ibv_qp_init_attr,
    crate::abi::queue::ibv_srq,
);

/// `poll` on the program's descriptors.
pub fn poll(fds: *mut c_void, number: libc::nfds_t, limit_ms: std::ffi::c_int) -> std::ffi::c_int {
    // SAFETY: the kernel checks the array.
    unsafe { libc::poll(fds.cast(), number, limit_ms) }
}

/// Runs `f` when the process exits.
pub fn at_exit(f: extern "C" fn()) {
    // SAFETY: `f` is a function that may be called at any time.
    let _ = unsafe { libc::atexit(f) };
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::users::{Used, Users, usable};

    /// The structure is not the first field.
    struct Sample {
        number: u32,
        c: CPart<u64>,
        users: Users,
    }

    object!(Sample: u64);
    usable!(Sample);

    impl Sample {
        fn new(number: u32) -> Arc<Self> {
            Arc::new(Self { number, c: CPart::new(9), users: Users::default() })
        }
    }

    #[test]
    fn a_pointer_leads_back_to_its_object() {
        let handle = Handle::publish(Sample::new(7));
        assert_eq!(handle.alive().map(|sample| (sample.number, sample.c.update(|c| *c))), Some((7, 9)));
        assert_eq!(handle.alive().map(Object::c_ptr), Some(handle.as_ptr()));
        handle.withdraw().unwrap();
        assert_eq!(handle.object().map(drop), Err(Errno::EINVAL));
    }

    #[test]
    fn an_object_that_is_being_destroyed_is_found_by_acknowledgements_only() {
        let handle = Handle::publish(Sample::new(7));
        let user = handle.object().map(|object| Used::of(&object)).ok();
        assert_eq!(handle.retire_unused(|_| ()), Err(Errno::EBUSY));
        // The user is destroyed; a call of another thread still has it.
        user.iter().for_each(Used::release);
        // A call of another thread that has only found the object.
        let _found = handle.object();
        let found = handle.retire_unused(|sample| {
            assert_eq!(sample.number, 7);
            assert_eq!(handle.object().map(drop), Err(Errno::EINVAL));
            assert_eq!(handle.retire(|_| ()), Err(Errno::EINVAL));
            assert_eq!(handle.acknowledged().map(|sample| sample.number), Some(7));
        });
        assert_eq!(found, Ok(()));
        assert!(handle.acknowledged().is_none());
    }

    #[test]
    fn one_of_several_threads_that_destroy_an_object_succeeds() {
        const THREADS: usize = 4;
        type Destroy = fn(Handle<Sample>) -> Result<(), Errno>;
        let destroys: [Destroy; 4] = [
            |handle| handle.withdraw().map(drop),
            |handle| handle.withdraw_unused().map(drop),
            |handle| handle.retire(|_| ()),
            |handle| handle.retire_unused(|_| ()),
        ];
        for destroy in destroys {
            for _ in 0..500 {
                let handle = Handle::publish(Sample::new(0));
                let barrier = Barrier::new(THREADS);
                let succeeded = std::thread::scope(|scope| {
                    let destroyers: Vec<_> = (0..THREADS)
                        .map(|_| {
                            scope.spawn(|| {
                                barrier.wait();
                                destroy(handle).is_ok()
                            })
                        })
                        .collect();
                    destroyers.into_iter().filter_map(|thread| thread.join().ok()).filter(|ok| *ok).count()
                });
                assert_eq!(succeeded, 1);
            }
        }
    }
}
