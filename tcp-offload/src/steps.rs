//! Counts searches, visited items and moved items, so that a test can measure how the work for a segment grows.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
pub fn add(steps: usize) {
    STEPS.set(STEPS.get() + steps);
}

#[cfg(not(test))]
#[inline(always)]
pub const fn add(_steps: usize) {}

/// The number of steps of `work`.
#[cfg(test)]
pub fn of(work: impl FnOnce()) -> usize {
    let before = STEPS.get();
    work();
    STEPS.get() - before
}
