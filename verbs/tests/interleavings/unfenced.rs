#[allow(dead_code, reason = "the test needs a part of it")]
#[path = "../../src/api/progress/sleeper.rs"]
pub(crate) mod sleeper;

mod sync {
    pub(super) use crate::sync::{AtomicBool, AtomicU64, Ordering};

    /// The mistake: it does nothing.
    pub(super) fn fence(_: Ordering) {}
}
