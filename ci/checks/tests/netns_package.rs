//! The Debian package, installed below a temporary root, and what runs from there; containers without privileges.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use xwarp_checks::{
    lab::{Family, INTERFACE, Lab, LabOptions, Side},
    shared::SharedInterface,
    vm::built,
};

const LIMIT: Duration = Duration::from_secs(60);

fn script(name: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name))
}

/// The output of a command that must succeed.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// The folder with the programs and libraries that cargo has built.
fn programs() -> PathBuf {
    let libraries = ["libxwarp_compat.so", "libxwarp_sdp_preload.so"];
    for file in ["xwarpd", "xwarp", "xwarp-perf", "xwarp-pages"].into_iter().chain(libraries) {
        built(file).unwrap();
    }
    built("xwarpd").unwrap().parent().unwrap().to_path_buf()
}

/// Runs dpkg for another root, where no other package is.
fn dpkg(root: &Path, args: &[&str]) -> String {
    let mut command = Command::new("dpkg");
    command.arg(format!("--root={}", root.display()));
    output(command.args(["--force-depends", "--force-script-chrootless", "--no-pager"]).args(args))
}

/// `xwarp run` and `xwarp sdp` find their libraries, also for users who cannot write below /usr.
fn libraries_are_found(root: &Path) {
    let xwarp = root.join("usr/bin/xwarp");
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        let script = format!("readlink -e ${{LD_LIBRARY_PATH%%:*}}/{name}");
        let found = output(Command::new(&xwarp).args(["run", "--", "sh", "-c", &script]));
        assert_eq!(found.trim(), root.join("usr/lib/xwarp/libxwarp_compat.so").to_str().unwrap());
    }
    let found = output(Command::new(&xwarp).args(["sdp", "--", "sh", "-c", "echo $LD_PRELOAD"]));
    assert!(found.contains("/usr/lib/xwarp/libxwarp-sdp.so"), "{found}");
}

#[test]
fn netns_package_is_installed_works_and_is_removed() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let folder = lab.file("package");
    let mut package = script("package");
    package.arg("--programs").arg(programs()).arg("--output").arg(&folder);
    let package = output(&mut package).trim().to_owned();
    let fields = output(Command::new("dpkg-deb").args(["--field", &package]));
    assert!(fields.contains("Package: xwarp\n") && fields.contains("libc6 (>= "), "{fields}");
    assert!(fields.contains("libelf1"), "{fields}");

    let root = lab.file("root");
    for directory in ["var/lib/dpkg/updates", "var/lib/dpkg/info", "etc"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available", "etc/group"] {
        fs::write(root.join(file), "").unwrap();
    }
    dpkg(&root, &["--install", &package]);
    assert!(dpkg(&root, &["--status", "xwarp"]).contains("Status: install ok installed"));
    assert!(fs::read_to_string(root.join("etc/group")).unwrap().starts_with("xwarp:"));

    // Each unit starts a program that is there, and each program has its page and its completions.
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/xwarpd.service")).unwrap();
    let started = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/")).unwrap();
    let helper = root.join(started.split(' ').next().unwrap());
    assert_eq!(fs::metadata(&helper).unwrap().permissions().mode() & 0o777, 0o755);
    let options = unit.lines().find_map(|line| line.strip_prefix("EnvironmentFile=/")).unwrap();
    assert!(fs::read_to_string(root.join(options)).unwrap().contains("XWARPD_OPTIONS="));
    assert!(root.join("usr/lib/systemd/system/xwarpd.socket").exists());
    for (program, page) in [
        ("xwarpd", "man8/xwarpd.8.gz"),
        ("xwarp", "man1/xwarp.1.gz"),
        ("xwarp", "man1/xwarp-stat.1.gz"),
        ("xwarp-perf", "man1/xwarp-perf.1.gz"),
        ("xwarp-perf", "man1/xwarp-perf-send_bw.1.gz"),
    ] {
        let text = output(Command::new("zcat").arg(root.join("usr/share/man").join(page)));
        assert!(text.contains(&format!(".TH {program}")) && text.contains(".SH SYNOPSIS"), "{page}: {text}");
        for script in [
            format!("bash-completion/completions/{program}"),
            format!("zsh/vendor-completions/_{program}"),
            format!("fish/vendor_completions.d/{program}.fish"),
        ] {
            assert!(fs::read_to_string(root.join("usr/share").join(script)).unwrap().contains(program));
        }
        output(
            Command::new("bash")
                .arg("-n")
                .arg(root.join("usr/share/bash-completion/completions").join(program)),
        );
    }

    libraries_are_found(&root);

    // What was installed works: a client and a server without privileges.
    {
        let shared = SharedInterface::start(&lab, helper.to_str().unwrap(), &[]).unwrap();
        let perf = root.join("usr/bin/xwarp-perf");
        let perf = perf.to_str().unwrap();
        let args = ["send_bw", "-d", INTERFACE, "--verify", "-n", "100"];
        let mut server = shared.start_unprivileged(perf, &args).unwrap();
        server.wait_for("Waiting for a client", LIMIT).unwrap();
        let here = lab.address(Side::A, Family::V4).to_string();
        shared.start_unprivileged(perf, &[&args[..], &[&here]].concat()).unwrap().finish(LIMIT).unwrap();
        server.finish(LIMIT).unwrap();
        let found = output(shared.unprivileged(root.join("usr/bin/xwarp").to_str().unwrap()).arg("stat"));
        assert!(found.contains("shared by xwarpd"), "{found}");
    }

    dpkg(&root, &["--remove", "xwarp"]);
    assert!(!helper.exists() && root.join(options).exists(), "the administrator's file stays");
    dpkg(&root, &["--purge", "xwarp"]);
    assert!(!root.join(options).exists());
}

/// `ci/containers`: two hosts with a bridge between them, each with a container of user nobody.
#[test]
fn netns_package_containers_without_privileges_talk_over_a_bridge() {
    let said = output(script("containers").arg(programs()));
    assert!(said.contains("all messages arrived as they were sent"), "{said}");
}

/// A container has a root of its own, in which nothing but xwarpd's socket is of the host; server and client are in two of them.
#[test]
fn netns_package_containers_of_one_host_talk_with_nothing_but_the_socket() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let shared = SharedInterface::start(&lab, built("xwarpd").unwrap().to_str().unwrap(), &[]).unwrap();
    let container = |args: &[&str]| {
        let mut command = script("container");
        command.arg(shared.socket()).arg(built("xwarp-perf").unwrap()).args(args);
        xwarp_checks::process::Running::start(command).unwrap()
    };
    for family in [Family::V4, Family::V6] {
        let args = ["write_bw", "-d", INTERFACE, "--verify", "-n", "100"];
        let mut server = container(&args);
        server.wait_for("Waiting for a client", LIMIT).unwrap();
        let here = lab.address(Side::A, family).to_string();
        container(&[&args[..], &[&here]].concat()).finish(LIMIT).unwrap();
        server.finish(LIMIT).unwrap();
    }
}
