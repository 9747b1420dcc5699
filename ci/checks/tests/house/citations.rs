//! References in documents and comments: sections of RFCs, and code names in conformance rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use super::{conformance_pages, conformance_rows, files, root, shown};

/// The sections of each RFC, read from `ci/checks/rfc-sections.txt`.
fn known_sections() -> BTreeMap<String, BTreeSet<String>> {
    let table = fs::read_to_string(root().join("ci/checks/rfc-sections.txt")).unwrap();
    let mut known = BTreeMap::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace().map(str::to_owned);
        known.insert(words.next().unwrap(), words.collect());
    }
    known
}

/// A section number (`4.3`, `A.1`, `B`) at the start of `text`, without a trailing full stop.
fn section_at(text: &str) -> Option<&str> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(text.len());
    let section = text[..end].trim_end_matches('.');
    let first = section.split('.').next()?;
    let is_letter = first.len() == 1 && first.chars().all(|c| c.is_ascii_uppercase());
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    let starts_well = is_letter || is_number(first);
    (starts_well && section.split('.').skip(1).all(is_number)).then_some(section)
}

/// The citations in `text` as RFC number and section. `RFC 5040 sections 5.1, 5.2 and 7` has three.
fn citations(text: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("RFC ") {
        let rest = &text[at + 4..];
        let (number, rest) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len()));
        let rest = rest.trim_start_matches(',').trim_start();
        let words = ["sections ", "section ", "appendix "];
        let Some(mut rest) = words.iter().find_map(|word| rest.strip_prefix(word)) else { continue };
        while let Some(section) = section_at(rest) {
            found.push((number, section));
            let behind = &rest[section.len()..];
            let Some(more) = [", ", " and ", " to ", " or "].iter().find_map(|w| behind.strip_prefix(w))
            else {
                break;
            };
            // A single letter after the first section is a word of the sentence.
            let is_word =
                section_at(more).is_some_and(|next| next.starts_with(|c: char| c.is_ascii_uppercase()));
            if is_word {
                break;
            }
            rest = more;
        }
    }
    found
}

/// Joins the lines of a file and removes comment markers, so that a citation may be wrapped anywhere.
fn in_one_line(text: &str) -> String {
    let line = |line: &str| line.trim().trim_start_matches(['/', '!', '*', '#']).trim().to_owned();
    text.lines().map(line).collect::<Vec<_>>().join(" ")
}

#[test]
fn house_cited_sections_exist() {
    let known = known_sections();
    let mut cited = 0;
    for path in files(&[".rs", ".md", ".c", ".h"]) {
        if shown(&path).starts_with("ci/checks/tests/house") {
            continue;
        }
        let text = in_one_line(&fs::read_to_string(&path).unwrap());
        for (number, section) in citations(&text) {
            cited += 1;
            let exists = known.get(number).is_some_and(|sections| sections.contains(section));
            assert!(
                exists,
                "{}: RFC {number} has no section {section} (ci/checks/rfc-sections.txt)",
                shown(&path)
            );
        }
    }
    assert!(cited > 100, "only {cited} citations were found: has their form changed?");
}

#[test]
fn house_conformance_rows_are_of_sections_that_exist() {
    let known = known_sections();
    for path in conformance_pages() {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let Some(sections) = name.strip_prefix("rfc").map(|number| known.get(number)) else { continue };
        let sections = sections.unwrap_or_else(|| panic!("{name} is not in ci/checks/rfc-sections.txt"));
        for (at, [section, ..]) in conformance_rows(&path) {
            for section in section.split([',', ' ']).filter_map(section_at) {
                assert!(sections.contains(section), "{at}: {name} has no section {section}");
            }
        }
    }
}

#[test]
fn house_citations_are_read_in_all_their_forms() {
    let text =
        "of RFC 5040 sections 5.1, 5.2 and 7. RFC 6298, section 2.4. RFC 3720 appendix B.4; RFC 793 says.";
    let expected = [("5040", "5.1"), ("5040", "5.2"), ("5040", "7"), ("6298", "2.4"), ("3720", "B.4")];
    assert_eq!(citations(text), expected);
    assert_eq!(citations(&in_one_line("/// RFC 5044\n    /// section 4.3).")), [("5044", "4.3")]);
    let known = known_sections();
    assert!(known["5044"].contains("4.3") && !known["5044"].contains("4.9"));
}

/// The words of each source file, without words that occur only in comments.
fn words_of_code() -> BTreeMap<String, BTreeSet<String>> {
    let words = |line: &str| -> Vec<String> {
        let code = line.split("//").next().unwrap_or_default();
        code.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    files(&[".rs", ".c", ".h"])
        .iter()
        .map(|path| (shown(path), fs::read_to_string(path).unwrap().lines().flat_map(words).collect()))
        .collect()
}

/// The names that `text` defines: its items, and the fields and variants of its types.
fn definitions(text: &str) -> BTreeSet<String> {
    const ITEMS: [&str; 9] = ["fn", "struct", "enum", "const", "static", "trait", "type", "mod", "union"];
    let mut found = BTreeSet::new();
    // The indent of the type whose members follow.
    let mut members: Option<usize> = None;
    for line in text.lines().map(|line| line.split("//").next().unwrap_or_default().trim_end()) {
        let indent = line.len() - line.trim_start().len();
        let words: Vec<&str> =
            line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
        let declared = words.windows(2).filter(|pair| ITEMS.contains(&pair[0]) && !ITEMS.contains(&pair[1]));
        found.extend(declared.map(|pair| pair[1].to_owned()));
        match members {
            Some(outer) if indent <= outer && line.trim() == "}" => members = None,
            Some(outer) if indent == outer + 4 => {
                let member = words.iter().find(|word| !["pub", "crate", "super", "in"].contains(*word));
                found.extend(member.map(|word| (*word).to_owned()));
            }
            None if words.iter().any(|word| ["struct", "enum"].contains(word)) && line.ends_with('{') => {
                members = Some(indent);
            }
            _ => {}
        }
    }
    found
}

/// The names that each source file defines; of a C file, all its words.
fn defined() -> BTreeMap<String, BTreeSet<String>> {
    let words = words_of_code();
    words
        .into_iter()
        .map(|(name, words)| {
            let names = if Path::new(&name).extension().is_some_and(|ending| ending == "rs") {
                definitions(&fs::read_to_string(root().join(&name)).unwrap())
            } else {
                words
            };
            (name, names)
        })
        .collect()
}

/// The folder that the files of a page are relative to, from its line "Files are of `tcp-offload/src/mpa/`".
fn base_of(page: &Path) -> String {
    let text = fs::read_to_string(page).unwrap();
    let behind = text.split_once("Files are of").and_then(|(_, rest)| rest.split('`').nth(1));
    behind.unwrap_or_default().to_owned()
}

/// `folder` and `name` joined, with each `..` applied: `tcp-offload/src/mpa/` and `../ulp.rs` are `tcp-offload/src/ulp.rs`.
fn joined(folder: &str, name: &str) -> String {
    let mut parts = Vec::new();
    for part in folder.split('/').chain(name.split('/')).filter(|part| !part.is_empty()) {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join("/")
}

/// The names of a cell that the code does not have where the cell says: files and folders, relative to `base` or to the
/// repository; and names that follow them (``file.rs`: `name`, `other``): those files must define the last word. Names that
/// stand alone must be a word of the code somewhere.
fn unresolved(
    place: &str,
    base: &str,
    code: &BTreeMap<String, BTreeSet<String>>,
    everywhere: &BTreeSet<String>,
) -> Vec<String> {
    let mut missing = Vec::new();
    let mut named: Vec<&BTreeSet<String>> = Vec::new();
    let mut last_is_place = false;
    let mut between = "";
    for (piece, text) in place.split('`').enumerate() {
        if piece % 2 == 0 {
            between = text;
            continue;
        }
        if ![": ", ", ", " and "].contains(&between) {
            named.clear();
        }
        if text.ends_with('/') || Path::new(text).extension().is_some() {
            if !last_is_place {
                named.clear();
            }
            let found = [joined(base, text), joined("", text)].iter().find_map(|at| {
                let words: Vec<_> =
                    code.iter().filter(|(f, _)| *f == at || f.starts_with(&format!("{at}/"))).collect();
                (!words.is_empty()).then(|| words.into_iter().map(|(_, words)| words).collect::<Vec<_>>())
            });
            match found {
                Some(words) => named.extend(words),
                None => missing.push(format!("there is no {text} in {base} or here")),
            }
            last_is_place = true;
            continue;
        }
        last_is_place = false;
        let words = || text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty());
        let is_there = if named.is_empty() {
            words().all(|word| everywhere.contains(word))
        } else {
            words().next_back().is_none_or(|word| named.iter().any(|file| file.contains(word)))
        };
        if !is_there {
            missing.push(format!("{text} is not defined there"));
        }
    }
    missing
}

#[test]
fn house_conformance_rows_name_code_that_exists() {
    let code = defined();
    let everywhere = words_of_code().into_values().flatten().collect();
    let mut names = 0;
    let mut missing = Vec::new();
    for path in conformance_pages() {
        let base = base_of(&path);
        for (at, [_, _, _, _, place, _]) in conformance_rows(&path) {
            names += place.matches('`').count() / 2;
            let unresolved = unresolved(&place, &base, &code, &everywhere);
            missing.extend(unresolved.into_iter().map(|what| format!("{at}: {what}")));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(names > 100, "only {names} names were found: has the rows' form changed?");
}

#[test]
fn house_names_of_conformance_rows_are_resolved_exactly() {
    let writer = "use super::Ulpdu;\nimpl Writer {\n    pub const fn finish(self) -> Ulpdu {\n        pad();\n    }\n}\n";
    let ulp = "pub(crate) struct Ulpdu<'a> {\n    pub(super) len: usize,\n}\nenum Arrival {\n    Early,\n}\n";
    let code = BTreeMap::from([
        ("tcp/src/mpa/writer.rs".to_owned(), definitions(writer)),
        ("tcp/src/ulp.rs".to_owned(), definitions(ulp)),
    ]);
    let everywhere = code.values().flatten().cloned().collect();
    let resolved = |place: &str| unresolved(place, "tcp/src/mpa/", &code, &everywhere).is_empty();
    assert!(resolved("`../ulp.rs`: `Ulpdu::len`, `Arrival::Early`"));
    assert!(!resolved("`writer.rs`: `pad`"), "a call is no definition");
    assert!(resolved("`writer.rs`: `finish`, `../ulp.rs`: `Ulpdu`; also `Ulpdu` alone"));
    assert!(resolved("`tcp/src/ulp.rs`, `writer.rs`: `finish` and `Ulpdu`"));
    assert!(!resolved("`ulp.rs`"), "the file of another folder");
    assert!(!resolved("`writer.rs`: `Ulpdu`"), "the name of another file");
    assert!(!resolved("`nowhere`"));
}
