//! Keys that work requests open and close: memory windows and fast-registration regions, each over separate
//! memory, and the checks of that memory.
//!
//! A wall is a region of which only the middle can be opened: its first part for all rights, its second for
//! reading. The memory around it is secret. While a door is certainly closed, no byte of its wall may change.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use xwarp_rnic::{
    Access, Binding, Memory, Operation, QpId, ResourceError, STag, WcStatus, WorkCompletion,
    engine::Engine,
    rnic::{FastRegistration, PdId, Registration},
};

use crate::{canary::Guarded, input::Input};

/// Size of a wall, in bytes.
const WALL: usize = 8192;
/// The parts that can be opened for writing, and only for reading.
const WRITABLE: Range<usize> = 1024..4096;
const READABLE: Range<usize> = 4096..7168;
const FILL: u8 = 0x44;
/// Maximum number of pieces in a fast-registration region.
const MAX_PIECES: u32 = 3;

/// A memory window with its region, or a fast-registration region.
#[derive(Debug)]
struct Door {
    key: STag,
    /// The region of a memory window; `None` for a fast-registration region.
    region: Option<STag>,
    wall: Guarded,
    /// Outstanding requests that may open the door, with the keys that they set.
    opening: HashMap<u64, STag>,
    /// Outstanding requests that close the door, with no opening request before or after them.
    shutting: HashSet<u64>,
    /// Whether the door was opened and is not known to be closed.
    open: bool,
    /// The wall's bytes at the time when the door was certainly closed.
    shut: Option<Vec<u8>>,
}

/// A request created by [`Doors`].
pub struct Request {
    /// The operation.
    pub operation: Operation,
    /// The memory of a fast registration.
    pub memory: Vec<Memory>,
}

/// Same index with another key.
pub fn rekeyed(stag: STag, key: u8) -> STag {
    STag::new(stag.index() << 8 | u32::from(key))
}

/// All memory windows and fast-registration regions.
#[derive(Debug)]
pub struct Doors(Vec<Door>);

impl Doors {
    /// Creates two memory windows and two fast-registration regions, the second of which is limited to
    /// `only`. All are closed.
    pub fn new(engine: &mut Engine, pd: PdId, only: QpId) -> Self {
        let mut doors = Vec::new();
        for stream in [None, None, None, Some(only)] {
            let wall = Guarded::new(WALL, None);
            wall.region().fill(WRITABLE.start, READABLE.end - WRITABLE.start, FILL).expect("the middle");
            let (key, region) = if doors.len() < 2 {
                let access = Access::LOCAL_WRITE | Access::WINDOW_BIND;
                let memory = wall.region().clone();
                let registration = Registration { pd, memory, access, base: 0, stream };
                let region = engine.rnic().registry().register(registration).expect("a region");
                (engine.rnic().registry().alloc_window(pd).expect("a window"), Some(region))
            } else {
                let registration = FastRegistration { pd, max_pieces: MAX_PIECES, stream };
                (engine.rnic().registry().alloc_fast_region(registration).expect("a fast region"), None)
            };
            let shut = Some(wall.bytes());
            let (opening, shutting) = (HashMap::new(), HashSet::new());
            doors.push(Door { key, region, wall, opening, shutting, open: false, shut });
        }
        Self(doors)
    }

    /// The current keys.
    pub fn keys(&self) -> impl Iterator<Item = STag> {
        self.0.iter().map(|door| door.key)
    }

    fn door(&mut self, number: u8) -> &mut Door {
        let count = self.0.len();
        &mut self.0[usize::from(number) % count]
    }

    /// Creates a request that opens a door, which may already be open. A memory window is bound to
    /// `elsewhere` or to its own wall.
    pub fn open(&mut self, elsewhere: Option<STag>, input: &mut Input<'_>) -> Request {
        let door = self.door(input.u8());
        let key = rekeyed(door.key, input.u8());
        let access = Access::from_bits_truncate(input.u8().into());
        let part = if access.intersects(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC) {
            WRITABLE
        } else {
            WRITABLE.start..READABLE.end
        };
        let mut piece = || {
            let (offset, len) = (usize::from(input.u16()), usize::from(input.u16()));
            let offset = part.start + offset % part.len();
            // Use all or nothing when the length does not fit, because memory outside a wall's middle is
            // never opened.
            (offset, if len > WALL { len } else { len.min(part.end - offset) })
        };
        let Some(region) = door.region else {
            let memory = door.wall.region();
            let pieces = (0..=MAX_PIECES).map(|_| piece()).map_while(|(offset, len)| {
                (len > 0).then(|| memory.slice(offset, len.min(part.end - offset)).expect("the middle"))
            });
            let memory = pieces.collect();
            let base = u64::from(input.u16());
            return Request { operation: Operation::FastRegister { key, access, base }, memory };
        };
        let (offset, len) = piece();
        let base = u64::from(input.u16());
        let region = elsewhere.unwrap_or(region);
        let binding = Binding { region, offset: offset as u64, len: len as u64, base, access };
        Request { operation: Operation::BindWindow { window: key, binding }, memory: Vec::new() }
    }

    /// Records a posted request.
    pub fn posted(&mut self, wr_id: u64, operation: &Operation) {
        for door in &mut self.0 {
            match *operation {
                Operation::BindWindow { window: key, .. } | Operation::FastRegister { key, .. }
                    if key.index() == door.key.index() =>
                {
                    door.check();
                    door.shut = None;
                    door.shutting.clear();
                    door.opening.insert(wr_id, key);
                }
                Operation::LocalInvalidate { key } if key == door.key && door.opening.is_empty() => {
                    door.shutting.insert(wr_id);
                }
                _ => {}
            }
        }
    }

    /// Records a completed request.
    pub fn completed(&mut self, completion: &WorkCompletion) {
        let success = completion.status == WcStatus::Success;
        for door in &mut self.0 {
            if let Some(key) = door.opening.remove(&completion.wr_id)
                && success
            {
                door.key = key;
                door.open = true;
            }
            let shut = door.shutting.remove(&completion.wr_id) || completion.invalidated == Some(door.key);
            if success && shut && door.opening.is_empty() {
                door.open = false;
            }
            if door.shut.is_none() && !door.open && door.opening.is_empty() {
                door.shut = Some(door.wall.bytes());
            }
        }
    }

    /// The owner destroys a door, or the region of a memory window.
    pub fn take_away(&mut self, engine: &mut Engine, input: &mut Input<'_>) {
        let (number, how) = (input.u8(), input.u8());
        let door = self.door(number);
        let done = match (door.region, how % 3) {
            (Some(_), 0) => engine.rnic().registry().dealloc_window(door.key),
            (Some(region), 1) => engine.rnic().registry().revoke(region),
            (Some(region), _) => engine.rnic().registry().deregister(region),
            (None, 0 | 1) => engine.rnic().registry().revoke(door.key),
            (None, _) => engine.rnic().registry().deregister(door.key),
        };
        // No request can open it any more, and windows bound to it are closed too.
        if done.is_ok() {
            door.open = false;
            door.shut.get_or_insert_with(|| door.wall.bytes());
        }
    }

    /// Checks that closed memory has not changed. Returns the number of changed bytes of all walls.
    pub fn check(&self) -> usize {
        self.0.iter().map(Door::check).sum()
    }

    /// Frees everything; call it after all queue pairs are destroyed.
    pub fn over(self, engine: &mut Engine) -> usize {
        let changed = self.check();
        for door in self.0 {
            // Destroyed objects are unknown now. Destroyed queue pairs leave no memory window open.
            let done = match door.region {
                Some(region) => [
                    engine.rnic().registry().deregister(region),
                    engine.rnic().registry().dealloc_window(door.key),
                ],
                None => [Ok(()), engine.rnic().registry().deregister(door.key)],
            };
            assert!(!done.iter().any(|done| matches!(done, Err(ResourceError::InUse(..)))), "{done:?}");
        }
        changed
    }
}

impl Door {
    fn check(&self) -> usize {
        self.wall.check();
        let now = self.wall.bytes();
        if let Some(shut) = &self.shut {
            assert!(now == *shut, "written while it was closed");
        }
        assert!(
            self.wall.is_secret_outside(WRITABLE.start..READABLE.end),
            "written outside of the opened part"
        );
        assert!(now[READABLE].iter().all(|byte| *byte == FILL), "written where only reading was allowed");
        now[WRITABLE].iter().filter(|byte| **byte != FILL).count()
    }
}
