//! Rules of this repository as tests: dependencies between crates, files that may contain `unsafe`, length of
//! files, and existence of the tests, code and RFC sections that documents name.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

#[path = "house/circles.rs"]
mod circles;
#[path = "house/citations.rs"]
mod citations;
#[path = "house/dependencies.rs"]
mod dependency_rules;
#[path = "house/documents.rs"]
mod documents;
#[path = "house/scripts.rs"]
mod scripts;
#[path = "house/shapes.rs"]
mod shapes;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Files that git tracks (or would track) with one of these endings.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "git ls-files");
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter(|f| endings.iter().any(|e| f.ends_with(e)))
        .map(|f| root().join(f))
        .filter(|f| f.exists())
        .collect()
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// Compares what breaks a rule with the `text` of the list of what is known to.
fn compare_with_list(rule: &str, found: &BTreeSet<String>, list: &str, text: &str) {
    let known: BTreeSet<_> = text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    let new: Vec<_> = found.difference(&known).collect();
    let mended: Vec<_> = known.difference(found).collect();
    assert!(
        new.is_empty() && mended.is_empty(),
        "{rule}: {new:#?}\nmended, to be taken out of house/{list}: {mended:#?}"
    );
}

/// The workspace's packages, from `cargo metadata`.
fn packages() -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Dependencies of each workspace package, without those of tests and build scripts.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let name = |v: &serde_json::Value| v["name"].as_str().unwrap().to_owned();
    let normal = |d: &&serde_json::Value| d["kind"].is_null();
    packages()
        .iter()
        .map(|p| (name(p), p["dependencies"].as_array().unwrap().iter().filter(normal).map(name).collect()))
        .collect()
}

#[test]
fn house_crates_import_only_what_the_design_allows() {
    let dependencies = dependencies();
    let forbidden: [(&str, &[&str]); 12] = [
        ("xwarp-compat", &["xwarp-tcp", "xwarp-driver", "xwarp-prog", "xwarp-control", "libbpf-rs"]),
        ("xwarp-verbs", &["xwarp-prog", "xwarp-control", "libbpf-rs", "libbpf-sys"]),
        (
            "xwarp-control",
            &["xwarp-driver", "xwarp-verbs", "xwarp-prog", "libc", "rustix", "nix", "libbpf-rs"],
        ),
        ("xwarp-daemon", &["xwarp-tcp", "xwarp-verbs", "libbpf-rs", "libbpf-sys", "libc"]),
        ("xwarp-prog", &["xwarp-tcp", "xwarp-verbs", "xwarp-driver"]),
        ("xwarp-driver", &["xwarp-verbs", "xwarp-fabric"]),
        ("xwarp-leg", &["xwarp-verbs", "xwarp-rnic", "xwarp-driver", "xwarp-prog", "nix", "libbpf-rs"]),
        (
            "xwarp-fabric",
            &["xwarp-verbs", "xwarp-rnic", "xwarp-driver", "xwarp-prog", "libc", "nix", "libbpf-rs"],
        ),
        ("xwarp-tool", &["libbpf-rs", "libbpf-sys", "xwarp-perf", "xwarp-checks"]),
        ("xwarp-sdp", &["xwarp-tcp", "xwarp-driver", "xwarp-prog", "libc", "nix"]),
        ("xwarp-sdp-preload", &["xwarp-tcp", "xwarp-driver", "xwarp-prog", "nix"]),
        ("xwarp-fuzz", &["xwarp-driver", "xwarp-prog", "xwarp-perf", "libc"]),
    ];
    for (package, never) in forbidden {
        let has = &dependencies[package];
        for name in never {
            assert!(!has.contains(*name), "{package} must not depend on {name} (design, section 2)");
        }
    }
    // The core is sans-IO: these lists are complete. Of the crates on them, memmap2 makes system calls (rnic/src/memory.rs), and
    // parking_lot where a thread waits for a lock, as the standard library does.
    let complete: [(&str, &[&str]); 2] = [
        (
            "xwarp-tcp",
            &[
                "crc-fast",
                "crc32c",
                "etherparse",
                "rand",
                "siphasher",
                "slab",
                "smallvec",
                "thiserror",
                "tracing",
            ],
        ),
        (
            "xwarp-rnic",
            &["bitflags", "memmap2", "parking_lot", "rand", "smallvec", "thiserror", "tracing", "xwarp-tcp"],
        ),
    ];
    for (package, only) in complete {
        let only: BTreeSet<String> = only.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(dependencies[package], only, "{package} (docs/decisions/0019)");
    }
    for package in ["xwarp-perf", "xwarp-checks"] {
        let prog = "xwarp-prog";
        assert!(!dependencies[package].contains(prog), "{package} must not depend on {prog}");
    }
}

/// A registry needs from each package a description, both licenses as files, and versions of its dependencies.
#[test]
fn house_packages_are_ready_for_a_registry() {
    let published = packages().into_iter().filter(|package| package["publish"].is_null());
    let mut names = Vec::new();
    for package in published {
        let name = package["name"].as_str().unwrap().to_owned();
        for field in ["description", "license", "readme", "rust_version"] {
            assert!(package[field].as_str().is_some_and(|text| !text.is_empty()), "{name} has no {field}");
        }
        assert!(!package["keywords"].as_array().unwrap().is_empty(), "{name} has no keywords");
        let folder = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
            let text = fs::read_to_string(folder.join(license)).unwrap_or_default();
            assert!(text.len() > 500, "{name} has no {license}");
        }
        for dependency in package["dependencies"].as_array().unwrap() {
            let of_tests = dependency["kind"] == "dev";
            assert!(of_tests || dependency["req"] != "*", "{name}: {} has no version", dependency["name"]);
        }
        package_is_whole(&name, folder);
        names.push(name);
    }
    for name in [
        "xwarp-tcp",
        "xwarp-rnic",
        "xwarp-verbs",
        "xwarp-prog",
        "xwarp-control",
        "xwarp-leg",
        "xwarp-driver",
        "xwarp-fabric",
        "xwarp-daemon",
    ] {
        assert!(names.iter().any(|published| published == name), "{name} is not published");
    }
    assert!(!names.iter().any(|name| name == "xwarp-checks" || name == "xwarp-fuzz"), "{names:?}");
}

/// Checks that the upload of a package contains its licenses, its readme, and every file below src that git tracks.
fn package_is_whole(name: &str, folder: &Path) {
    let mut list = Command::new(env!("CARGO"));
    list.args(["package", "--list", "--allow-dirty", "--offline", "--package", name]).current_dir(root());
    let output = list.output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    let listed: BTreeSet<String> =
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    let sources = files(&[""]).into_iter().filter_map(|path| {
        let inside = path.strip_prefix(folder).ok()?.to_str()?.to_owned();
        inside.starts_with("src/").then_some(inside)
    });
    let needed = ["Cargo.toml", "LICENSE-MIT", "LICENSE-APACHE", "README.md"].map(str::to_owned);
    for file in sources.chain(needed) {
        assert!(listed.contains(&file), "the package {name} lacks {file}");
    }
}

/// A test that is ignored is run by `./ci/test --slow`, which runs those of this package, or by another test as a process.
#[test]
fn house_ignored_tests_are_run() {
    let script = fs::read_to_string(root().join("ci/test")).unwrap();
    assert!(script.contains("run_slow_tests -p xwarp-checks\n"), "what does ci/test --slow run?");
    let mut found = 0;
    for path in files(&[".rs"]) {
        let text = fs::read_to_string(&path).unwrap();
        for (before, after) in text.match_indices("\n#[ignore").map(|(at, _)| text.split_at(at + 1)) {
            let name = after.split_once("fn ").and_then(|(_, rest)| rest.split_once('(')).unwrap().0;
            let slow = after.starts_with("#[ignore = \"slow: run by ./ci/test --slow\"]")
                && path.starts_with(root().join("ci/checks/tests"));
            let child = after.starts_with("#[ignore = \"run as a process of its own by another test\"]")
                && format!("{before}{after}").contains(&format!("\"{name}\""));
            assert!(slow || child, "{}: nothing runs {name}", shown(&path));
            found += 1;
        }
    }
    assert!(found >= 6, "only {found} are found: has their form changed?");
}

/// Files that share memory with the kernel, the application, a device or C programs; only these may contain `unsafe`.
/// (The tests of the verbs and the fuzz targets register borrowed memory, which is an unsafe verb; the
/// benchmark of the copy functions calls them directly; two tests fork; the time-stamp counter and xsk-rs have no safe functions;
/// a signal handler changes where its thread goes on.)
const UNSAFE_PLACES: [&str; 18] = [
    "bench/src/raw/xsk.rs",
    "compat/src/boundary.rs",
    "compat/src/faults.rs",
    "compat/src/library.rs",
    "compat/src/sleep.rs",
    "driver/src/sys",
    "leg/src/sys",
    "xdp-prog/src/",
    "tcp-offload/src/copy/",
    "tcp-offload/examples/copy_bench.rs",
    "sdp/preload/src/",
    "rnic/src/memory.rs",
    "verbs/src/fork.rs",
    "verbs/src/ticks.rs",
    "verbs/tests/verbs.rs",
    "verbs/tests/edges.rs",
    "fuzz/src/canary.rs",
    "ci/checks/src/bin/xwarp-fork.rs",
];

#[test]
fn house_unsafe_is_only_in_the_listed_files() {
    for path in files(&[".rs"]) {
        let name = shown(&path);
        if UNSAFE_PLACES.iter().any(|place| name.starts_with(place)) || name == "ci/checks/tests/house.rs" {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let block =
                code.contains("unsafe {") || code.contains("unsafe impl") || code.contains("unsafe extern");
            assert!(!block, "{name}:{}: unsafe outside the listed files", number + 1);
        }
    }
}

/// Bytes of headers are read and written by the codecs in `rnic/src/segment`; only the RNIC's implementation of
/// `Ulp`, and the first arm of a queue pair's receive path, pass them on. (A Terminate is a message of RDMAP, which quotes a header.)
#[test]
fn house_queue_pairs_handle_no_bytes_of_headers() {
    for path in files(&[".rs"]) {
        let name = shown(&path);
        let is_test = name.contains("/tests/") || name.ends_with("tests.rs");
        if !name.starts_with("rnic/src/rnic/") || is_test || name == "rnic/src/rnic/mod.rs" {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
        for (number, line) in code.enumerate() {
            for bytes in ["Ulpdu<", "UlpduWriter", " Header::parse(", "SegmentHeader::parse(", ".emit("] {
                let used = line.split("//").next().unwrap_or_default().contains(bytes);
                assert!(
                    !used || line.contains("terminate.emit(") || line.contains("fn take_first("),
                    "{name}:{}: {bytes} outside of the codec",
                    number + 1
                );
            }
        }
    }
}

#[test]
fn house_files_stay_short() {
    const MAX_LINES: usize = 640;
    for path in files(&[".rs", ".c", ".h"]) {
        let name = shown(&path);
        if name.contains("/tests/") || name.ends_with("tests.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        // Up to the tests inside of the file, which are its last item.
        let tests = text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        let lines = text[..tests].lines().count();
        assert!(
            lines <= MAX_LINES,
            "{name} has {lines} lines without its tests; put one concept in each file"
        );
    }
}

#[test]
fn house_has_no_unfinished_work_markers() {
    let marks =
        [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("to", "do!("), concat!("unimple", "mented!(")];
    for path in files(&[".rs", ".c", ".h", ".sh", ".toml"]) {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let left = marks.iter().find(|m| line.contains(**m));
            assert!(left.is_none(), "{}:{}: {}", shown(&path), number + 1, line.trim());
        }
    }
}

/// Names of all test functions of the workspace.
fn test_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in files(&[".rs"]) {
        let text = fs::read_to_string(&path).unwrap();
        let mut after_attribute = false;
        for line in text.lines().map(str::trim) {
            if line.starts_with("#[test]") || line.starts_with("#[test_case") {
                after_attribute = true;
            } else if let Some(rest) = line.strip_prefix("fn ")
                && std::mem::take(&mut after_attribute)
            {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                names.insert(rest[..end].to_owned());
            }
        }
    }
    names
}

/// The conformance index and the page of each RFC.
fn conformance_pages() -> Vec<PathBuf> {
    let pages = fs::read_dir(root().join("docs/conformance")).unwrap();
    let mut pages: Vec<PathBuf> = pages.map(|entry| entry.unwrap().path()).collect();
    pages.push(root().join("docs/conformance.md"));
    pages.sort();
    pages
}

#[test]
fn house_conformance_rows_name_tests_that_exist() {
    let tests = test_names();
    let index = fs::read_to_string(root().join("docs/conformance.md")).unwrap();
    for path in conformance_pages() {
        let rows = check_conformance_page(&path, &tests);
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name != "conformance.md" {
            assert!(rows > 0, "{name} has no rows: has the table's form changed?");
            assert!(index.contains(&format!("(conformance/{name})")), "the index does not lead to {name}");
        }
    }
}

/// The rows of a conformance page, each with its location and its six cells.
fn conformance_rows(path: &Path) -> Vec<(String, [String; 6])> {
    let text = fs::read_to_string(path).unwrap();
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, l)| l.starts_with("| ")) {
        let cells: Vec<String> =
            line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        let Ok(cells) = <[String; 6]>::try_from(cells) else { continue };
        if cells[0] != "Section" && !cells[0].starts_with("--") {
            rows.push((format!("{}:{}", shown(path), number + 1), cells));
        }
    }
    rows
}

/// Checks the rows of one page and returns their number.
fn check_conformance_page(path: &Path, tests: &BTreeSet<String>) -> usize {
    let rows = conformance_rows(path);
    for (at, [_, _, level, status, place, test]) in &rows {
        assert!(
            ["MUST", "MUST NOT", "SHOULD", "SHOULD NOT", "MAY"].contains(&level.as_str()),
            "{at}: level {level:?}"
        );
        assert!(["met", "partly", "not met", "n/a"].contains(&status.as_str()), "{at}: status {status:?}");
        assert!(!place.is_empty(), "{at}: where it is met, or why not");
        assert!(status != "met" || !test.is_empty(), "{at}: a row that is met names its test, or `review`");
        for name in
            test.split(',').map(|t| t.trim().trim_matches('`')).filter(|t| !t.is_empty() && *t != "review")
        {
            let found = name
                .strip_suffix('*')
                .map_or_else(|| tests.contains(name), |prefix| tests.iter().any(|t| t.starts_with(prefix)));
            assert!(found, "{at}: there is no test {name}");
        }
    }
    rows.len()
}
