//! libFuzzer entry point for the target named by `XWARP_FUZZ_TARGET`. `ci/fuzz` builds and starts it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use xwarp_fuzz::{TARGETS, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("XWARP_FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("XWARP_FUZZ_TARGET is '{name}', which is not a target")).1
});

fuzz_target!(|data: &[u8]| (*TARGET)(data));
