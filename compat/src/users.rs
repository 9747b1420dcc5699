//! Which of our objects use which: an object that others use is not destroyed.

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use nix::errno::Errno;

use crate::boundary::Object;

/// The number of objects that use one of ours, which cannot be destroyed meanwhile. Calls that have merely found the object are
/// not counted.
#[derive(Default)]
pub struct Users(AtomicUsize);

/// One of our objects that others use. [`usable!`] implements it.
pub trait Usable: Object {
    fn users(&self) -> &Users;
}

/// Implements [`Usable`] for a type with a field `users`.
macro_rules! usable {
    ($object:ident) => {
        impl $crate::users::Usable for $object {
            fn users(&self) -> &$crate::users::Users {
                &self.users
            }
        }
    };
}
pub(crate) use usable;

/// An object that another one uses until that is destroyed.
pub struct Used<T: Usable> {
    object: Arc<T>,
    is_released: AtomicBool,
}

impl<T: Usable> Used<T> {
    pub fn of(object: &Arc<T>) -> Self {
        object.users().0.fetch_add(1, Ordering::Relaxed);
        Self { object: Arc::clone(object), is_released: AtomicBool::new(false) }
    }

    /// Ends the use. The destruction of an object calls it for those that the object uses, because a call of another thread may have
    /// found the object, which is then alive after its destruction.
    pub fn release(&self) {
        if !self.is_released.swap(true, Ordering::AcqRel) {
            self.object.users().0.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<T: Usable> Drop for Used<T> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<T: Usable> Deref for Used<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.object
    }
}

/// Fails with `EBUSY` if other objects use this one.
pub fn check_unused<T: Usable>(object: &Arc<T>) -> Result<(), Errno> {
    if object.users().0.load(Ordering::Acquire) > 0 { Err(Errno::EBUSY) } else { Ok(()) }
}
