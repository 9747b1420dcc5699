//! The drop-in library exports what the distributions' libraries export.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;

use xwarp_checks::exports;

#[test]
fn exports_have_everything_of_the_installed_libraries() {
    assert_eq!(exports::missing(Path::new("/")).unwrap(), Vec::<String>::new());
}

#[test]
fn exports_have_everything_that_rdma_core_ever_had_since_34() {
    let ours = exports::ours().unwrap();
    let missing: Vec<_> = exports::known().difference(&ours).cloned().collect();
    assert_eq!(missing, Vec::<String>::new());
}

#[test]
fn the_list_of_exports_has_everything_of_the_installed_libraries() {
    let known = exports::known();
    let unknown: Vec<_> = exports::of_root(Path::new("/")).unwrap().difference(&known).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new());
}
