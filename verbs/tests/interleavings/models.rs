//! What the compiled files import, by the names that they use.

/// Loom's locks and atomics, and a doorbell.
pub(crate) mod sync {
    use std::{io, os::fd::BorrowedFd};

    use loom::sync::Condvar;
    pub(crate) use loom::sync::{
        MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence},
    };

    /// Locked like that of `parking_lot`, which completion queues use.
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock()
    }

    /// The eventfd of a doorbell.
    pub(crate) struct Doorbell {
        rung: Mutex<bool>,
        rings: Condvar,
    }

    #[allow(clippy::unnecessary_wraps, clippy::unused_self, reason = "as the methods that it stands for")]
    impl Doorbell {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self { rung: Mutex::new(false), rings: Condvar::new() })
        }

        pub(crate) fn set_hook(&self, _hook: impl Fn() + Send + Sync + 'static) {}

        pub(crate) fn ring(&self) {
            *self.rung.lock() = true;
            self.rings.notify_all();
        }

        pub(crate) fn clear(&self) -> bool {
            std::mem::take(&mut *self.rung.lock())
        }

        /// Sleeps until the descriptor is readable.
        pub(crate) fn wait(&self) {
            let mut rung = self.rung.lock();
            while !*rung {
                rung = self.rings.wait(rung).unwrap();
            }
        }

        pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
            unreachable!("a model has no descriptor")
        }
    }
}

/// The part of the policy that counts of calls are compared with, for a short model.
pub(crate) mod policy {
    pub(crate) const BUSY_POLLS: u64 = 1;

    #[expect(dead_code, reason = "the policy reads them")]
    pub(crate) struct Calls {
        pub(crate) polls: u64,
        pub(crate) posts: u64,
        pub(crate) chunks: u64,
        pub(crate) kicking: bool,
        pub(crate) leads: u64,
        pub(crate) sleeps: u64,
    }
}

/// The name of a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QpId;

pub(crate) mod table {
    pub(crate) trait Id {
        fn from_raw(raw: u64) -> Self;
    }

    impl Id for super::QpId {
        fn from_raw(_: u64) -> Self {
            Self
        }
    }
}

/// Completions.
pub(crate) mod work {
    pub(crate) use xwarp_verbs::{Opcode, WcStatus};

    #[derive(Debug, Clone, Copy)]
    #[expect(dead_code, reason = "the queue moves them only")]
    pub(crate) struct WorkCompletion {
        pub(crate) wr_id: u64,
        pub(crate) status: WcStatus,
        pub(crate) opcode: Opcode,
        pub(crate) qp: super::QpId,
        pub(crate) context: u64,
        pub(crate) byte_len: u32,
        pub(crate) invalidated: Option<()>,
        pub(crate) immediate: Option<()>,
        pub(crate) solicited: bool,
        pub(crate) overtook: bool,
    }
}

/// A completion of a Send.
pub(crate) fn entry(wr_id: u64) -> work::WorkCompletion {
    work::WorkCompletion {
        wr_id,
        status: work::WcStatus::Success,
        opcode: work::Opcode::Send,
        qp: QpId,
        context: 0,
        byte_len: 0,
        invalidated: None,
        immediate: None,
        solicited: false,
        overtook: false,
    }
}
