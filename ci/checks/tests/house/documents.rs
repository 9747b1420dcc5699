//! Documents: README is short and shows programs that compile, and links lead somewhere.

use std::{fs, path::Path};

use super::{files, root, shown};

/// README is what a stranger reads first; everything else is one link away.
#[test]
fn house_readme_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let lines = readme.lines().count();
    assert!(lines <= 200, "README.md has {lines} lines: move some to a page of docs");
}

/// The client in README is the one that `verbs/tests/example.rs` compiles and runs.
#[test]
fn house_readme_shows_the_client_that_tests_run() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let client = fs::read_to_string(root().join("verbs/examples/hello/client.rs")).unwrap();
    let (_, program) = client.split_once("\n\n").unwrap();
    assert!(readme.contains(program), "README.md lacks the text of verbs/examples/hello/client.rs");
}

/// The targets of the links in a document: what follows `](` up to the parenthesis.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
}

/// The anchors of a document's headings, as they are made on the web: lower case, words joined by hyphens, without punctuation.
fn anchors(text: &str) -> Vec<String> {
    let headings =
        text.lines().filter_map(|line| line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' '));
    let plain = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings
        .map(|heading| heading.to_lowercase().chars().filter(plain).collect::<String>().replace(' ', "-"))
        .collect()
}

#[test]
fn house_links_of_documents_lead_somewhere() {
    let mut broken = Vec::new();
    for path in files(&[".md"]) {
        let text = fs::read_to_string(&path).unwrap();
        let folder = path.parent().unwrap_or(Path::new("/"));
        for link in links(&text).filter(|link| !link.contains(':') && !link.contains(' ')) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            let is_there = target.exists()
                && (anchor.is_empty()
                    || fs::read_to_string(&target)
                        .is_ok_and(|text| anchors(&text).iter().any(|a| a == anchor)));
            if !is_there {
                broken.push(format!("{}: {link}", shown(&path)));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// The dashboard shows each metric of `xwarpd`, and no others.
#[test]
fn house_the_dashboard_shows_the_metrics_of_xwarpd() {
    let metrics = |text: &str| -> std::collections::BTreeSet<String> {
        let word = |c: char| c.is_ascii_lowercase() || c == '_';
        let names = text.split(|c| !word(c)).filter(|name| name.starts_with("xwarpd_"));
        names.map(|name| name.trim_end_matches("_total").to_owned()).collect()
    };
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (served, shown) = (read("daemon/src/report.rs"), read("packaging/grafana/xwarpd.json"));
    assert!(metrics(&served).len() >= 10);
    assert_eq!(metrics(&served), metrics(&shown));
    let dashboard: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.iter().all(|panel| !panel["targets"].as_array().unwrap().is_empty()));
}
