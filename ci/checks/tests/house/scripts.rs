//! The scripts of `ci`.

use std::{os::unix::fs::PermissionsExt as _, process::Command};

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
