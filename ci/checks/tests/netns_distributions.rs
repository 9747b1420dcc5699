//! The scripts of `ci` and `xwarp lab` in root file systems of Debian releases that `ci/distributions` makes: with git and nothing
//! else, as a person has them who is about to clone this repository.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::process::{Command, Stdio};

use xwarp_checks::{lab::ci_script, vm::built};

/// What `ci/distributions run` says, and whether the command succeeded.
fn inside(suite: &str, script: &str) -> (bool, String) {
    let mut command = Command::new(ci_script("distributions"));
    // Without the variables that cargo and rustup set for this test.
    command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    for kept in ["HOME", "CARGO_HOME", "CARGO_TARGET_DIR"] {
        command.envs(std::env::var_os(kept).map(|value| (kept, value)));
    }
    let output = command.args(["run", suite, "bash", "-c", script]).stdin(Stdio::null()).output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// In a root with git and nothing else, the scripts install a compiler, a linker and the rest, and find the package of Rust that is new
/// enough, although another toolchain on the PATH is too old.
fn scripts_install(suite: &str) {
    let old =
        "for name in cargo rustc; do printf '#!/bin/sh\\necho %s 1.85.0\\n' $name >/usr/local/bin/$name; done
        chmod +x /usr/local/bin/*";
    let script = format!(
        "{old}
        ! command -v cc || exit 9
        {top}/ci/install demo && {top}/ci/install package || exit
        echo again
        {top}/ci/install demo && {top}/ci/install package || exit
        echo all is there
        /usr/bin/cargo --version && cc --version && strip --version && clang --version
        for name in ip ethtool sysctl; do command -v $name || exit; done",
        top = ci_script("..").display(),
    );
    let (success, said) = inside(suite, &script);
    assert!(success, "{suite}: {said}");
    assert!(said.contains("too old for this workspace") && said.contains("1.85.0"), "{suite}: {said}");
    let (_, second) = said.split_once("again").unwrap();
    let (second, versions) = second.split_once("all is there").unwrap();
    assert!(!second.contains("installing"), "{suite}: the second run installs again: {second}");
    let cargo = versions.lines().find_map(|line| line.strip_prefix("cargo 1.")).unwrap();
    let minor: u32 = cargo.split('.').next().unwrap().parse().unwrap();
    assert!(minor >= 95, "{suite}: {versions}");
}

#[test]
fn netns_distributions_scripts_install_on_bare_debian_13() {
    scripts_install("trixie-bare");
}

#[test]
fn netns_distributions_scripts_install_on_bare_debian_12() {
    scripts_install("bookworm-bare");
}

/// A toolchain that is too old, and no package that is newer: the script ends before it installs or builds anything.
#[test]
fn netns_distributions_an_old_toolchain_is_found_before_anything_is_installed() {
    let script = format!(
        "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d /var/lib/apt/lists/*
        printf '#!/bin/sh\\necho x 1.85.0\\n' >/usr/local/bin/cargo; cp /usr/local/bin/cargo /usr/local/bin/rustc
        chmod +x /usr/local/bin/*
        dpkg-query -W >/tmp-before
        {top}/ci/demo; echo status $?
        dpkg-query -W | cmp - /tmp-before && echo nothing is installed",
        top = ci_script("..").display(),
    );
    let (_, said) = inside("trixie-bare", &script);
    for expected in
        ["needs Rust 1.95 or newer (found: /usr/local/bin/cargo 1.85.0)", "status 1", "nothing is installed"]
    {
        assert!(said.contains(expected), "no {expected:?} in {said}");
    }
}

/// `xwarp lab` needs `ip`, and nothing that a minimal system lacks besides.
#[test]
fn netns_distributions_labs_need_iproute2_only() {
    let xwarp = built("xwarp").unwrap();
    let name = format!("xwl{}-bare", std::process::id());
    let lab = format!("{} lab --name {name}", xwarp.display());
    let script = format!(
        "! command -v sysctl || exit 9
        trap '{lab} down' EXIT
        {lab} up && {lab} run a -- ip -brief address && {lab} run b -- cat /proc/sys/net/ipv6/conf/all/accept_dad"
    );
    let (success, said) = inside("trixie", &script);
    assert!(success && said.contains("10.77.0.1/24") && said.lines().any(|line| line == "0"), "{said}");
    let (success, said) = inside("trixie-bare", &format!("{} up", ci_script("../tool/src/lab.sh").display()));
    assert!(!success && said.contains("install iproute2"), "{said}");
}

/// The whole of the two first commands in a root with git and nothing else, with crates from this machine.
#[test]
#[ignore = "slow: run by ./ci/test --slow"]
fn netns_distributions_demo_and_package_work_on_bare_debian_13() {
    let script = format!(
        "export CARGO_TARGET_DIR=/root/target
        cd {top} && ci/demo && ci/package --output /root/package && apt-get install -y /root/package/*.deb && xwarp --version",
        top = ci_script("..").display(),
    );
    let (success, said) = inside("trixie-bare", &script);
    assert!(success && said.contains("Every byte arrived as it was sent."), "{said}");
}
