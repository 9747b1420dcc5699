//! `xwarp lab`, and that `ci/lab` sees the same labs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    path::Path,
    process::{Command, Output},
};

const XWARP: &str = env!("CARGO_BIN_EXE_xwarp");

/// A lab that is removed at the end of the test.
struct Lab(String);

impl Lab {
    fn new(test: &str) -> Self {
        Self(format!("xwl{}-{test}", std::process::id()))
    }

    fn output(&self, args: &[&str]) -> Output {
        Command::new(XWARP).args(["lab", "--name", &self.0]).args(args).output().unwrap()
    }

    fn run(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.output(args);
        assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.output(&["down"]);
    }
}

#[test]
fn netns_xwarp_lab_connects_two_namespaces() {
    let lab = Lab::new("pair");
    lab.run(&["up", "--mtu", "1500", "--queues", "2", "--without-offloads"]);
    for peer in ["10.77.0.2", "fd77::2"] {
        lab.run(&["run", "a", "ping", "-c", "1", "-W", "5", peer]);
    }
    let links = lab.run(&["run", "b", "ip", "-o", "link", "show", "dev", "xw0"]);
    assert!(links.contains("mtu 1500"), "{links}");
    for (command, status) in [
        (&["sh", "-c", "exit 7"][..], 7),
        (&["sh", "-c", "kill -TERM $$"], 128 + 15),
        (&["no-such-program"], 127),
        (&["/etc/passwd"], 126),
    ] {
        let output = lab.output(&[&["run", "b"], command].concat());
        assert_eq!(output.status.code(), Some(status), "{command:?}: {output:?}");
    }
    let ours = lab.run(&["show"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/lab");
    let theirs = Command::new(script).args(["--name", &lab.0, "show"]).output().unwrap();
    assert!(ours.contains("10.77.0.1/24") && ours.contains("fd77::2/64"), "{ours}");
    assert_eq!(ours.as_bytes(), theirs.stdout);
    lab.run(&["down"]);
    assert_eq!(lab.run(&["show"]), "");
    let output = lab.output(&["run", "a", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no lab"), "{output:?}");
    lab.run(&["down"]);
}

#[test]
fn netns_xwarp_lab_says_that_it_needs_root() {
    let output = Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", XWARP, "lab", "up"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("network namespaces need root: try 'sudo xwarp lab up'"), "{text}");
}

#[test]
fn lab_names_that_are_not_file_names_are_refused() {
    for name in ["", "../x", "a b", "-a"] {
        let output = Command::new(XWARP).args(["lab", &format!("--name={name}"), "down"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{name:?}");
    }
}
