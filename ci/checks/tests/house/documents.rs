//! Documents: README is short and shows programs that compile, and links lead somewhere.

use std::{fs, path::Path, process::Command};

use xwarp_checks::documents;

use super::{files, root, shown};

/// README is what a stranger reads first; everything else is one link away.
#[test]
fn house_readme_is_short() {
    let readme = read("README.md");
    let lines = readme.lines().count();
    assert!(lines <= 120, "README.md has {lines} lines: move some to a page of docs");
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// The programs in a document: its blocks of Rust.
fn programs(text: &str) -> Vec<&str> {
    text.split("```rust\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect()
}

/// Programs in README and in the guide are parts of files that tests compile and run.
#[test]
fn house_programs_in_documents_are_those_that_tests_run() {
    let files = ["verified_write.rs", "kv/slot.rs", "kv/client.rs", "kv/server.rs"];
    let tests = read("verbs/tests/tutorials.rs");
    let mut sources = vec![tests.clone()];
    for file in files {
        assert!(tests.contains(&format!("../examples/{file}")), "no test runs {file}");
        sources.push(read(&format!("verbs/examples/{file}")));
    }
    for (document, expected) in [
        ("README.md", 1),
        ("docs/guide/first-write.md", 3),
        ("docs/guide/key-value-store.md", 5),
        ("docs/guide/testing.md", 1),
    ] {
        let text = read(document);
        let programs = programs(&text);
        assert_eq!(programs.len(), expected, "{document}");
        for program in programs {
            let is_part = sources.iter().any(|source| source.contains(program));
            assert!(is_part, "{document} shows what no test runs:\n{program}");
        }
    }
}

/// Scripts and examples that README and the guide name exist, with the options that are named. Other tests run the commands.
#[test]
fn house_scripts_and_examples_in_documents_exist() {
    let mut found = 0;
    for document in documents::documents().unwrap() {
        let text = read(&document);
        let words = |rest: &str| -> Vec<String> {
            let command = rest.split(['`', '#', '\n']).next().unwrap();
            command.split_whitespace().map(str::to_owned).collect()
        };
        for command in text.split("./ci/").skip(1).map(words) {
            let script = read(&format!("ci/{}", command[0]));
            for option in command[1..].iter().filter(|word| word.starts_with("--")) {
                assert!(script.contains(option.as_str()), "{document}: ci/{} has no {option}", command[0]);
            }
            found += 1;
        }
        for command in text.split("--example ").skip(1).map(words) {
            let example = root().join("verbs/examples").join(&command[0]);
            assert!(example.exists() || example.with_extension("rs").exists(), "{document}: {}", command[0]);
            found += 1;
        }
    }
    assert!(found >= 10, "only {found} are found: has their form changed?");
    // Each block says where it is run.
    assert!(documents::commands().unwrap().len() >= 5);
}

/// What ci/guide makes a site of has each page of docs, and each file that they link to.
#[test]
fn house_the_site_has_all_pages() {
    let directory = std::env::temp_dir().join(format!("xwarp-guide-{}", std::process::id()));
    let mut command = Command::new("python3");
    let output = command.arg(root().join("ci/guide.py")).arg("pages").arg(&directory).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary = fs::read_to_string(directory.join("src/SUMMARY.md")).unwrap();
    let copied = directory.join("src/verbs/examples/kv/main.rs").exists();
    fs::remove_dir_all(&directory).unwrap();
    assert!(copied, "files that pages link to are missing");
    for path in files(&[".md"]) {
        let page = shown(&path).replace("README.md", "index.md");
        if page.starts_with("docs/") {
            assert!(summary.contains(&format!("({page})")), "no page leads to {page}");
        }
    }
}

/// The rows of speed in README are rows of the page of performance.
#[test]
fn house_figures_in_readme_are_those_of_the_page() {
    let (readme, page) = (read("README.md"), read("docs/performance.md"));
    let speed = readme.split_once("## Speed\n").unwrap().1.split_once("\n## ").unwrap().0;
    let rows: Vec<_> = speed.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert!(page.lines().any(|line| line == row), "docs/performance.md has no row\n{row}");
    }
}

/// Errors of opening, routes, ports, the fabric and starting a program are found in the page of symptoms: for each text in the code
/// its longest part without values.
#[test]
fn house_the_page_of_symptoms_has_the_texts_of_errors() {
    let page = read("docs/guide/troubleshooting.md");
    let mut found = 0;
    for file in ["driver/src/error.rs", "leg/src/fabric.rs", "tool/src/program.rs"] {
        for rest in read(file).split("#[error(\"").skip(1) {
            let text = rest.split_once('"').unwrap().0;
            let parts = text.split('{').map(|part| part.split_once('}').map_or(part, |(_, rest)| rest));
            let part =
                parts.max_by_key(|part| part.len()).unwrap().trim().trim_matches(['(', ')', ':', ',', ';']);
            let part = part.split([':', '(']).next().unwrap().trim();
            if part.len() >= 9 {
                assert!(page.contains(part), "docs/guide/troubleshooting.md lacks '{part}' of {file}");
                found += 1;
            }
        }
    }
    assert!(found >= 20, "only {found} texts are found: has their form changed?");
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
