//! Tables of outcomes that are recorded in a file.

use std::{env, fs, path::Path};

/// Lines that a failure shows.
const SHOWN: usize = 20;

/// Compares `found`, whose sections begin with lines `== NAME`, with the table in the file at `path`. With `XWARP_RECORD` in the
/// environment it is recorded instead.
///
/// # Panics
/// If a line differs, or the file cannot be read or written.
pub fn compare_with_record(path: &Path, found: &str) {
    if env::var_os("XWARP_RECORD").is_some() {
        return fs::write(path, found).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let recorded = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let (found, recorded): (Vec<_>, Vec<_>) = (found.lines().collect(), recorded.lines().collect());
    let mut section = "";
    let changed: Vec<_> = (0..found.len().max(recorded.len()))
        .filter_map(|line| {
            let (now, before) = (found.get(line).unwrap_or(&""), recorded.get(line).unwrap_or(&""));
            section = before.strip_prefix("== ").unwrap_or(section);
            (now != before).then(|| format!("{section}\n  before {before}\n  now    {now}\n"))
        })
        .collect();
    let first: String = changed.iter().take(SHOWN).map(String::as_str).collect();
    assert!(changed.is_empty(), "{} lines changed; the first ones:\n{first}", changed.len());
}
