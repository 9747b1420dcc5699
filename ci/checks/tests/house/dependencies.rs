//! Dependencies: licences, sources and versions that `deny.toml` allows. `cargo deny check` judges by the same file, and advisories too.

use std::{collections::BTreeMap, fs, process::Command};

use super::root;

/// The lines of `deny.toml` after `KEY = [` up to the bracket that closes the list.
fn list(key: &str) -> String {
    let rules = fs::read_to_string(root().join("deny.toml")).unwrap();
    let start = rules.find(&format!("\n{key} = [")).unwrap_or_else(|| panic!("deny.toml has no {key}"));
    rules[start + 1..].split_once("]\n").unwrap().0.to_owned()
}

/// The first string in quotes after each `before`.
fn quoted(text: &str, before: &str) -> Vec<String> {
    text.split(before).skip(1).filter_map(|rest| rest.split('"').next().map(str::to_owned)).collect()
}

/// All packages that a build for x86-64 Linux has, those of tests and build scripts too.
fn packages() -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

/// Whether a licence expression (SPDX, or with the slash of old packages) can be met by allowed licences alone. Parts that are joined
/// by AND must be in parentheses if they have alternatives.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let plain = expression.replace('/', " OR ").replace(['(', ')'], " ");
    plain
        .split(" AND ")
        .all(|part| part.split(" OR ").any(|licence| allowed.iter().any(|allowed| allowed == licence.trim())))
}

#[test]
fn house_licences_of_dependencies_are_allowed() {
    let allowed = list("allow").split('"').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    assert!(is_allowed("LGPL-2.1-only OR BSD-2-Clause", &allowed));
    assert!(is_allowed("MIT/Apache-2.0", &allowed));
    assert!(!is_allowed("MIT AND LGPL-2.1-only", &allowed) && !is_allowed("GPL-3.0-only", &allowed));
    let packages = packages();
    assert!(packages.len() > 100);
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        assert!(is_allowed(licence, &allowed), "{}: licence {licence}", package["name"]);
        let source = package["source"].as_str();
        let from_registry = source.is_none_or(|source| source.starts_with("registry+"));
        assert!(from_registry, "{} comes from {source:?}", package["name"]);
    }
}

/// A version of a crate beside a newer one costs time to build and size; `deny.toml` names each that is there, and who needs it.
#[test]
fn house_crates_have_one_version_unless_deny_toml_says_why() {
    let mut skipped = quoted(&list("skip"), "crate = \"");
    assert!(!skipped.is_empty());
    let mut versions = BTreeMap::<String, Vec<String>>::new();
    for package in packages() {
        let text = |key: &str| package[key].as_str().unwrap().to_owned();
        versions.entry(text("name")).or_default().push(text("version"));
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let mut counted = versions.clone();
        counted.retain(|version| {
            let skip = skipped.iter().position(|skip| {
                skip.split_once('@').is_some_and(|(of, major)| {
                    of == name && format!("{version}.").starts_with(&format!("{major}."))
                })
            });
            skip.map(|at| skipped.remove(at)).is_none()
        });
        assert!(
            counted.len() == 1,
            "{name} has the versions {versions:?}: use one, or say in deny.toml why not"
        );
    }
    assert!(skipped.is_empty(), "deny.toml skips what is not there: {skipped:?}");
}
