//! The only unsafe code of this crate: memory that two processes share, its rings, and the descriptors that children lose. The
//! interface of the module is safe.
//!
//! Two arguments hold for the blocks below.
//!
//! *Bounds.* Every offset that comes from the other end is compared with the length of the mapping before an address is made of
//! it, in release builds too. A mapping is of a file whose size is sealed, so that no access to it can fault.
//!
//! *Sharing.* Positions, flags and descriptors are accessed as atomic words, each read once into a private value. The bytes of
//! frames are copied by functions that the compiler does not see through (`xwarp_tcp::copy`, `memmove` of the C library), so a
//! peer that writes meanwhile changes what is copied and nothing else. Only [`Chunks`] makes references into the memory, at the
//! end that owns it: to a chunk that its table says is not with the other end. An other end that writes it nevertheless must be a
//! process of the same user, which [`Fabric::connect`](crate::fabric::Fabric::connect) checks, and could as well write the memory of
//! this process.
#![expect(unsafe_code, reason = "the one place for it; see the module's argument")]

mod children;
mod chunks;
mod ring;
mod shared;

pub use self::children::{NotInherited, keep_from_programs, prepare_for_forks};
pub(crate) use self::chunks::{Arrived, CHUNK_BYTES, Chunks, chunks_of};
pub use self::ring::Lie;
pub(crate) use self::ring::{Descriptor, MAX_LOG2, Ring};
pub(crate) use self::shared::Shared;
