//! Descriptors and threads of a process, to be compared before and after a test for leaks.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    fs, io, thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

/// Open descriptors of a process, counted by target without its varying number (`socket:[123]` counts as
/// `socket`).
pub fn descriptors(pid: u32) -> io::Result<BTreeMap<String, usize>> {
    let mut kinds = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed during the iteration, and the one used to read the directory is gone
        // afterwards.
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        if target.starts_with("/proc/") {
            continue;
        }
        let kind = target.split_once(":[").map_or(target.as_str(), |(kind, _)| kind).to_owned();
        *kinds.entry(kind).or_insert(0) += 1;
    }
    Ok(kinds)
}

/// Number of threads of a process.
pub fn threads(pid: u32) -> io::Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/task"))?.count())
}

/// Waits until the census of `count` equals `before`; the error has the difference.
pub fn settle<C: PartialEq + Debug>(count: impl Fn() -> C, before: &C, limit: Duration) -> Result<()> {
    let begin = Instant::now();
    loop {
        let now = count();
        if now == *before {
            return Ok(());
        }
        ensure!(begin.elapsed() < limit, "{now:?}\nbefore: {before:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_file_is_seen_and_its_closing_too() {
        let pid = std::process::id();
        let path = std::env::temp_dir().join(format!("xwarp-leak-{pid}"));
        let count = || descriptors(pid).unwrap().get(path.to_str().unwrap()).copied();
        assert_eq!(count(), None);
        let file = fs::File::create(&path).unwrap();
        assert_eq!(count(), Some(1));
        drop(file);
        assert_eq!(count(), None);
        fs::remove_file(&path).unwrap();
    }
}
