//! Files of one crate that import each other in a circle: none of them can be understood or tested alone. What `use` imports is
//! followed through re-exports to the file that defines it; paths within expressions are not read.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use crate::{compare_with_list, files, packages, shown};

/// The circles that still stand, a line each. No new one may come, and a dissolved one leaves the list.
const STANDING: &str = include_str!("circles.txt");

type ModulePath = Vec<String>;

/// The modules of a crate: each with its file, its imports and what it exports by another module's name.
#[derive(Default)]
struct Crate {
    files: BTreeMap<ModulePath, String>,
    imports: Vec<(ModulePath, ModulePath)>,
    exports: BTreeMap<(ModulePath, String), ModulePath>,
}

/// The paths of a `use` tree.
fn expand(prefix: &[String], tree: &str, found: &mut Vec<ModulePath>) {
    let tree = tree.trim();
    if let Some((head, list)) = tree.split_once('{').filter(|(head, _)| !head.contains(',')) {
        let inner = list.trim_end().strip_suffix('}').unwrap_or(list);
        let mut all = prefix.to_vec();
        all.extend(head.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned));
        let (mut depth, mut from) = (0, 0);
        for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    expand(&all, &inner[from..at], found);
                    from = at + 1;
                }
                _ => {}
            }
        }
    } else if !tree.is_empty() {
        let path = tree.split(" as ").next().unwrap();
        let parts = path.split("::").map(|part| part.trim().to_owned());
        found.push(prefix.iter().cloned().chain(parts).collect());
    }
}

/// The text without comments, and without the tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines()
        .map(|line| line.split("//").next().unwrap())
        .fold(String::new(), |all, line| all + line + "\n")
}

impl Crate {
    /// Reads the files below `folder`, without those of tests and binaries.
    fn read(folder: &Path) -> Self {
        let mut found = Self::default();
        let mut texts = Vec::new();
        for path in files(&[".rs"]) {
            let Ok(inside) = path.strip_prefix(folder.join("src")) else { continue };
            let mut module: ModulePath =
                inside.with_extension("").iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            if module.iter().any(|part| ["tests", "bin", "main"].contains(&part.as_str())) {
                continue;
            }
            if ["lib", "mod"].contains(&module.last().unwrap().as_str()) {
                module.pop();
            }
            texts.push((module.clone(), code(&path)));
            found.files.insert(module, shown(&path));
        }
        for (module, text) in texts {
            found.read_imports(&module, &text);
        }
        found
    }

    fn read_imports(&mut self, module: &ModulePath, text: &str) {
        for item in text.split('\n').scan(0, |at, line| {
            let start = *at;
            *at += line.len() + 1;
            Some((start, line))
        }) {
            let (at, line) = item;
            let Some((visibility, _)) = line.split_once("use ").filter(|(before, _)| {
                before.is_empty() || before.starts_with("pub") && !before.contains(['=', '"'])
            }) else {
                continue;
            };
            let tree = text[at + visibility.len() + 4..].split(';').next().unwrap();
            let mut paths = Vec::new();
            expand(&[], tree, &mut paths);
            for path in paths {
                let Some(path) = self.absolute(module, &path) else { continue };
                // What a module exports is not imported by it but by those who use it.
                match path.last() {
                    Some(name) if visibility.starts_with("pub") => {
                        self.exports.insert((module.clone(), name.clone()), path.clone());
                    }
                    _ => self.imports.push((module.clone(), path)),
                }
            }
        }
    }

    /// The path from the root of the crate; `None` for one of another crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<ModulePath> {
        let mut base = module.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|part| part == "super") {
                    base.pop()?;
                    rest = &rest[1..];
                }
            }
            child => {
                let inside = [module, &[child.to_owned()]].concat();
                self.files.contains_key(&inside).then_some(())?;
            }
        }
        Some([base.as_slice(), rest].concat())
    }

    /// The module that defines what `path` names.
    fn definition(&self, path: &[String], depth: usize) -> Option<ModulePath> {
        let length = (0..=path.len()).rev().find(|length| self.files.contains_key(&path[..*length]))?;
        let (module, rest) = path.split_at(length);
        let export = rest.first().and_then(|name| self.exports.get(&(module.to_vec(), name.clone())));
        match export {
            Some(target) if depth < 8 => {
                self.definition(&[target.as_slice(), &rest[1..]].concat(), depth + 1)
            }
            _ => Some(module.to_vec()),
        }
    }

    /// The files that each file imports.
    fn graph(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut graph: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (from, path) in &self.imports {
            let to = self.definition(path, 0).unwrap_or_default();
            if let (Some(from), Some(to)) = (self.files.get(from), self.files.get(&to))
                && from != to
            {
                graph.entry(from).or_default().insert(to);
            }
        }
        graph
    }
}

/// The groups of nodes that all reach each other.
fn circles<'a>(graph: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<Vec<&'a str>> {
    let reached = |from: &'a str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(node) = next.pop() {
            next.extend(graph.get(node).into_iter().flatten().filter(|to| seen.insert(**to)));
        }
        seen
    };
    let all: BTreeMap<&str, BTreeSet<&str>> = graph.keys().map(|from| (*from, reached(from))).collect();
    let group = |of: &'a str| {
        let both = all[of].iter().filter(|to| all.get(**to).is_some_and(|back| back.contains(of)));
        both.copied().collect::<Vec<_>>()
    };
    graph.keys().map(|node| group(node)).filter(|group| group.len() > 1).collect()
}

#[test]
fn house_no_new_circle_of_files_inside_a_crate() {
    let mut found = BTreeSet::new();
    for package in packages() {
        let manifest = package["manifest_path"].as_str().unwrap().to_owned();
        let package = Crate::read(Path::new(&manifest).parent().unwrap());
        found.extend(circles(&package.graph()).into_iter().map(|circle| circle.join(" ")));
    }
    compare_with_list("circles of files", &found, "circles.txt", STANDING);
}

#[test]
fn house_circles_are_found_through_re_exports() {
    let mut paths = Vec::new();
    expand(&[], "super::{a, b::{self, C as D}, e::*}", &mut paths);
    let paths: Vec<_> = paths.iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["super::a", "super::b::self", "super::b::C", "super::e::*"]);

    let mut small = Crate::default();
    let path = |text: &str| text.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
    for module in ["", "a", "b", "c"] {
        small.files.insert(path(module), format!("{module}.rs"));
    }
    small.read_imports(&path(""), "pub use self::b::Name;\n");
    small.read_imports(&path("a"), "use crate::{\n    Name,\n    c::Other,\n};\n");
    assert!(circles(&small.graph()).is_empty());
    small.read_imports(&path("c"), "pub(crate) use std::io;\nuse super::a::{self};\n");
    assert_eq!(circles(&small.graph()), BTreeSet::from([vec!["a.rs", "c.rs"]]));
    small.read_imports(&path("b"), "use crate::a;\n");
    assert_eq!(circles(&small.graph()), BTreeSet::from([vec!["a.rs", "b.rs", "c.rs"]]));
}
