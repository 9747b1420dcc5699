//! What a distribution's libraries export, and what the drop-in library exports: whatever a program or another library of that
//! distribution asks for must be there, under its name and version node.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use crate::vm::built;

/// Directories of a root in which distributions have their libraries.
const DIRECTORIES: [&str; 4] =
    ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib"];
const LIBRARIES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];

/// Exports of the drop-in library, as `name@node`.
pub fn ours() -> Result<BTreeSet<String>> {
    exports(&built("libxwarp_compat.so")?)
}

/// Exports of the libraries of the distribution whose root directory is `root`.
pub fn of_root(root: &Path) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for library in LIBRARIES {
        let directory =
            DIRECTORIES.iter().map(|name| root.join(name)).find(|path| path.join(library).exists());
        let path = directory.with_context(|| format!("{} has no {library}", root.display()))?.join(library);
        all.append(&mut exports(&path)?);
    }
    Ok(all)
}

/// What the libraries of `root` export and the drop-in library does not.
pub fn missing(root: &Path) -> Result<Vec<String>> {
    Ok(of_root(root)?.difference(&ours()?).cloned().collect())
}

/// Exports of all rdma-core versions since 34, from the list in this crate: a line has a node and its names.
pub fn known() -> BTreeSet<String> {
    let lines = include_str!("../exports.txt").lines().filter(|line| !line.starts_with('#'));
    let named = lines.filter_map(|line| line.split_once(' '));
    named
        .flat_map(|(node, names)| names.split_whitespace().map(move |name| format!("{name}@{node}")))
        .collect()
}

fn exports(library: &PathBuf) -> Result<BTreeSet<String>> {
    let mut command = Command::new("nm");
    let output = command.args(["-D", "--defined-only", "--with-symbol-versions"]).arg(library).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout)?;
    // Address, kind, `name@node` or `name@@node`. Kind A is a node.
    let symbols = lines.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let kind = words.next()?;
        let name = words.next()?;
        (kind != "A" && name.contains('@')).then(|| name.replace("@@", "@"))
    });
    let all: BTreeSet<_> = symbols.collect();
    ensure!(!all.is_empty(), "{} exports nothing", library.display());
    Ok(all)
}
