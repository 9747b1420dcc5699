//! The Debian package, installed below a temporary root, and its programs run from there; containers without
//! privileges.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fmt::Write as _,
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

/// `xwarp run` and `xwarp sdp` find their libraries, also for users without write access below /usr.
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

/// Builds the package in a folder of its own; returns its path.
fn package(lab: &Lab) -> String {
    let mut package = script("package");
    package.arg("--programs").arg(programs()).arg("--output").arg(lab.file("package"));
    output(&mut package).trim().to_owned()
}

/// Installs the package below a root, which is returned.
fn installed(lab: &Lab, package: &str) -> PathBuf {
    let fields = output(Command::new("dpkg-deb").args(["--field", package]));
    assert!(fields.contains("Package: xwarp\n") && fields.contains("libc6 (>= "), "{fields}");
    assert!(fields.contains("libelf1"), "{fields}");

    let root = lab.file("root");
    for directory in ["var/lib/dpkg/updates", "var/lib/dpkg/info", "etc"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available", "etc/group"] {
        fs::write(root.join(file), "").unwrap();
    }
    dpkg(&root, &["--install", package]);
    assert!(dpkg(&root, &["--status", "xwarp"]).contains("Status: install ok installed"));
    assert!(fs::read_to_string(root.join("etc/group")).unwrap().starts_with("xwarp:"));
    root
}

/// The unit of the helper starts an existing program, with options from an existing file; returns both paths.
fn unit_is_complete(root: &Path) -> [PathBuf; 2] {
    let unit = fs::read_to_string(root.join("usr/lib/systemd/system/xwarpd.service")).unwrap();
    let started = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/")).unwrap();
    let helper = root.join(started.split(' ').next().unwrap());
    assert_eq!(fs::metadata(&helper).unwrap().permissions().mode() & 0o777, 0o755);
    let options = unit.lines().find_map(|line| line.strip_prefix("EnvironmentFile=/")).unwrap();
    let options = root.join(options);
    assert!(fs::read_to_string(&options).unwrap().contains("XWARPD_OPTIONS="));
    assert!(root.join("usr/lib/systemd/system/xwarpd.socket").exists());
    [helper, options]
}

/// Each program has its page and its completions.
fn programs_are_described(root: &Path) {
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
}

/// An unprivileged client and server exchange messages by the installed programs.
fn programs_work(lab: &Lab, root: &Path, helper: &Path) {
    let shared = SharedInterface::start(lab, helper.to_str().unwrap(), &[]).unwrap();
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

#[test]
fn netns_package_is_installed_works_and_is_removed() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    let package = package(&lab);
    let root = installed(&lab, &package);
    let [helper, options] = unit_is_complete(&root);
    programs_are_described(&root);
    libraries_are_found(&root);
    programs_work(&lab, &root, &helper);

    dpkg(&root, &["--remove", "xwarp"]);
    assert!(!helper.exists() && options.exists(), "the administrator's file stays");
    dpkg(&root, &["--purge", "xwarp"]);
    assert!(!options.exists());

    an_image_is_built(&lab, &package);
}

/// The commands that build an image by the recipe in $root, and start its program. This system is the base image, and the lists of
/// packages that the recipe fetches are not needed: what the package depends on is here.
fn build_steps(context: &Path) -> String {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/Containerfile");
    let recipe = fs::read_to_string(recipe).unwrap();
    let (mut steps, mut user) = (String::new(), "root");
    for line in recipe.lines().filter(|line| !line.starts_with('#')) {
        let (instruction, rest) = line.split_once(' ').unwrap();
        let step = match instruction {
            "FROM" => {
                assert!(rest.ends_with("/debian:bookworm-slim"), "{line}");
                continue;
            }
            "USER" => {
                user = rest;
                format!("chroot $root id {user}")
            }
            "COPY" => {
                let (from, to) = rest.split_once(' ').unwrap();
                format!("cp {}/{from} $root{to}", context.display())
            }
            "RUN" => {
                let (update, offline) = rest.split_once(" && ").unwrap();
                assert!(update == "apt-get update" && !offline.contains('\''), "{line}");
                format!("chroot $root sh -ec '{offline}'")
            }
            "CMD" => {
                let words: Vec<String> = serde_json::from_str(rest).unwrap();
                format!("chroot --userspec={user} $root {} || true", words.join(" "))
            }
            other => panic!("{other} is unknown here"),
        };
        writeln!(steps, "{step}").unwrap();
    }
    steps
}

/// The recipe for containers builds an image from the package, in which the programs are.
fn an_image_is_built(lab: &Lab, package: &str) {
    let steps = build_steps(Path::new(package).parent().unwrap());
    let scratch = lab.file("image");
    fs::create_dir(&scratch).unwrap();
    let begin = "set -e; cd $0; mount -t tmpfs none $0; cd $0; mkdir upper work root; root=$0/root
        mount -t overlay overlay -o lowerdir=/,upperdir=$0/upper,workdir=$0/work root
        mount -t proc none root/proc; mount --rbind /dev root/dev";
    let end = "ls $root/tmp/*.deb 2>/dev/null || echo no package is left
        chroot $root sh -ec 'for name in xwarpd xwarp xwarp-perf; do command -v $name; done; grep ^xwarp: /etc/group'";
    let mut build = Command::new("unshare");
    build.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private"]);
    build.args(["sh", "-c", &format!("{begin}\n{steps}{end}")]).arg(&scratch);
    let said = output(&mut build);
    for expected in
        ["(nobody)", "kernel", "no package is left", "/usr/sbin/xwarpd", "/usr/bin/xwarp-perf", "xwarp:x:"]
    {
        assert!(said.contains(expected), "no {expected}: {said}");
    }
    assert!(!Path::new("/usr/sbin/xwarpd").exists(), "it was installed on this system");
}

/// `ci/containers`: two hosts with a bridge between them, each with a container of user nobody.
#[test]
fn netns_package_containers_without_privileges_talk_over_a_bridge() {
    let said = output(script("containers").arg(programs()));
    assert!(said.contains("all messages arrived as they were sent"), "{said}");
}

/// A container has a root of its own, which contains only xwarpd's socket of the host; server and client are in two of
/// them.
#[test]
fn netns_package_containers_of_one_host_talk_with_nothing_but_the_socket() {
    let lab = Lab::up(LabOptions::default()).unwrap();
    // The second server is another container, to which a port in quarantine is not given.
    let options = ["--quarantine", "0"];
    let shared = SharedInterface::start(&lab, built("xwarpd").unwrap().to_str().unwrap(), &options).unwrap();
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
