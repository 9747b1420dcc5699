//! The scripts of `ci`.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use super::{files, root, shown};

/// Asked for help, a script describes itself and does nothing: there is no cargo that it could build with.
#[test]
fn house_scripts_answer_help() {
    let is_script = |path: &std::path::PathBuf| {
        let name = shown(path);
        let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
        // The first process of the virtual machine runs nowhere else.
        matches!(folder, "ci" | "ci/vm")
            && name != "ci/vm/init"
            && path.metadata().is_ok_and(|of| of.permissions().mode() & 0o111 != 0)
    };
    let scripts: Vec<_> = files(&[""]).into_iter().filter(is_script).collect();
    assert!(scripts.len() >= 20, "{scripts:?}");
    for script in scripts {
        for option in ["--help", "-h"] {
            let mut command = Command::new(&script);
            command.arg(option).current_dir(root()).env_clear().env("PATH", "/usr/bin:/bin");
            let output =
                command.env("HOME", "/nonexistent").env("CARGO_TARGET_DIR", "/nonexistent").output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            let name = shown(&script);
            assert!(
                output.status.success()
                    && output.stderr.is_empty()
                    && said.contains(&name)
                    && said.lines().count() > 2,
                "{name} {option}: {output:?}"
            );
        }
    }
}

/// The score of `systemd-analyze security`, in tenths, stays below 3.
#[test]
fn house_the_unit_of_xwarpd_is_confined() {
    let unit = root().join("daemon/systemd/xwarpd.service");
    let judged = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--threshold=29", "--no-pager"])
        .arg(unit)
        .output()
        .unwrap();
    assert!(judged.status.success(), "{}", String::from_utf8_lossy(&judged.stdout));
}

/// A repository of its own with what `ci/release` looks at.
struct Tree(PathBuf);

impl Tree {
    fn new() -> Self {
        let tree = Self(std::env::temp_dir().join(format!("xwarp-release-{}", std::process::id())));
        fs::create_dir_all(tree.0.join("ci")).unwrap();
        fs::create_dir_all(tree.0.join("docs/releases")).unwrap();
        for script in ["ci/release", "ci/install.sh"] {
            fs::copy(root().join(script), tree.0.join(script)).unwrap();
        }
        let crates = "xwarp-tcp = { path = \"tcp-offload\", version = \"0.1.0\" }\n";
        tree.write("Cargo.toml", &format!("version = \"0.1.0\"\n{crates}"));
        tree.write("CHANGELOG.md", "## Unreleased\n\n## 0.1.0 - 2026-12-01\n\n- All of it.\n");
        tree.write("docs/releases/0.1.0.md", "# xwarp 0.1.0\n");
        tree.git(&["init", "-q"]);
        tree.commit();
        tree
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }

    fn git(&self, arguments: &[&str]) -> String {
        let output = Command::new("git")
            .args(["-c", "user.name=house", "-c", "user.email=house@localhost"])
            .args(arguments)
            .current_dir(&self.0)
            .output()
            .unwrap();
        assert!(output.status.success(), "git {arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn commit(&self) {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "--allow-empty", "-m", "a state"]);
    }

    /// Whether the script calls the tree ready, and everything that it prints.
    fn release(&self, version: &str) -> (bool, String) {
        let script: &Path = &self.0.join("ci/release");
        let output = Command::new(script).arg(version).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Each thing that a release needs is missed if it is missing, and the script itself tags nothing.
#[test]
fn house_a_release_is_checked_and_not_made() {
    let tree = Tree::new();
    let (ready, text) = tree.release("0.1.0");
    assert!(ready && text.contains("git tag -a v0.1.0"), "{text}");
    assert_eq!(tree.git(&["tag"]), "");

    let refused = |why: &str, version: &str| {
        let (ready, text) = tree.release(version);
        assert!(!ready && text.contains(why), "{why}: {text}");
    };
    refused("Cargo.toml depends on xwarp-tcp 0.1.0", "0.2.0");
    refused("no section '## 0.2.0", "0.2.0");
    refused("docs/releases/0.2.0.md is missing", "0.2.0");
    refused("ci/release VERSION", "first");
    tree.write("Cargo.toml", "version = \"0.1.1\"\n");
    refused("uncommitted changes", "0.1.0");
    tree.commit();
    refused("Cargo.toml has version 0.1.1", "0.1.0");
    tree.write("Cargo.toml", "version = \"0.1.0\"\n");
    tree.write("CHANGELOG.md", "## Unreleased\n\n- More.\n\n## 0.1.0 - 2026-12-01\n");
    tree.commit();
    refused("1 entries under Unreleased", "0.1.0");
    tree.write("CHANGELOG.md", "## Unreleased\n\n## 0.1.0 - 2026-12-01\n");
    tree.commit();
    tree.git(&["tag", "v0.1.0"]);
    refused("the tag v0.1.0 exists", "0.1.0");
}

/// A hosted service runs what `.ci/run` runs, and rustup is not made to download a toolchain.
#[test]
fn house_hosted_ci_calls_the_script_of_ours() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    assert!(read(".github/workflows/ci.yml").contains("- run: .ci/run\n"));
    let toolchain = read("rust-toolchain.toml");
    assert!(!toolchain.lines().any(|line| line.trim_start().starts_with("channel")), "{toolchain}");
}
