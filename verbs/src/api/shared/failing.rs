//! How an engine fails. A panic leaves the engine in an unknown state, so it never runs again. Reporting the failure to applications
//! does not depend on that state, or is attempted and given up if it panics too ([`SharedEngine::fail`]).

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{SharedEngine, State, common::Sibling};
use crate::api::failure::{ClosedInterface, DeviceFailed};

/// A step of failing a device, with its description for the log in case the step fails too.
type FailureStep = (&'static str, fn(&mut State));

impl SharedEngine {
    /// Fails the other engines of a failed device, and reports the failure.
    #[cold]
    pub(super) fn fail_others(&self, failure: &DeviceFailed) {
        self.common.fail_others(self.number, failure);
    }

    /// Fails this engine after a panic of an engine of its device: it never runs again.
    /// A panic leaves the state unreliable, so flushing work, notifying connections and closing the interface are
    /// attempted one by one.
    pub(super) fn fail(&self, state: &mut State, failure: &DeviceFailed) {
        if self.failure.set(failure.clone()).is_err() {
            return;
        }
        let steps: [FailureStep; 3] = [
            ("flush the work of its queue pairs", |state| state.engine.fail_all()),
            ("notify its connections", |state| state.cm.device_failed()),
            ("close its interface", |state| {
                let closed = ClosedInterface::of(&*state.link);
                drop(std::mem::replace(&mut state.link, Box::new(closed)));
            }),
        ];
        for (what, step) in steps {
            if catch_unwind(AssertUnwindSafe(|| step(state))).is_err() {
                tracing::error!("the failed device could not {what}");
            }
        }
        self.doorbell.ring();
    }

    /// The reason why the device has failed, if it has.
    pub(crate) fn failure(&self) -> Option<&DeviceFailed> {
        self.inherited();
        self.failure.get()
    }

    /// Whether the device has failed. Asked before the lock is taken: in a child process, a thread that does not exist there
    /// may hold it.
    pub(crate) fn failed(&self) -> bool {
        self.inherited() || self.failure.get().is_some()
    }

    /// Whether a parent of this process opened the device, which still uses it.
    pub(crate) fn inherited(&self) -> bool {
        let inherited = self.fork.is_inherited();
        if inherited {
            self.failure.get_or_init(DeviceFailed::inherited);
        }
        inherited
    }
}

impl Sibling for SharedEngine {
    fn number(&self) -> u16 {
        self.number
    }

    fn fail_with(&self, failure: &DeviceFailed) {
        self.fail(&mut self.lock(), failure);
    }
}
