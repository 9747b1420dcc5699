//! Scenarios whose every choice is drawn from a seed.

use std::{env, panic};

/// Number of seeds that run by default.
const SEEDS: u64 = 64;

/// Runs `scenario` for `XWARP_SEEDS` seeds, beginning with `XWARP_SEED`. When `scenario` panics for some of them,
/// this panics after the last seed and names all seeds that failed.
pub fn run_seeds<T>(scenario: fn(u64) -> T) {
    let setting = |name, default| env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(default);
    let first: u64 = setting("XWARP_SEED", 1);
    let failed: Vec<u64> = (first..first + setting("XWARP_SEEDS", SEEDS))
        .filter(|seed| {
            let outcome = panic::catch_unwind(|| scenario(*seed));
            outcome.inspect_err(|_| eprintln!("seed {seed} failed")).is_err()
        })
        .collect();
    assert!(failed.is_empty(), "failed seeds, each reproduced by XWARP_SEED=... XWARP_SEEDS=1: {failed:?}");
}
