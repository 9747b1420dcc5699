//! `xwarp stat` run by root, beside users who put other things than sockets of devices where it looks.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::Command;

const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/attacks/stat.py");

/// No file of root is removed through a symbolic link or otherwise, no answer is waited for without end, and no character
/// of another user controls the terminal.
#[test]
fn netns_attack_stat_by_root_trusts_no_file_and_no_answer_of_a_user() {
    let mut command = Command::new("unshare");
    command.args(["--mount", "/usr/bin/python3", PROGRAM, env!("CARGO_BIN_EXE_xwarp")]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
