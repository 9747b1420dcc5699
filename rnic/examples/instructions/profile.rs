//! Reads the profile that callgrind writes: exclusive instructions by function.

use std::collections::BTreeMap;

/// Parts of the names of functions whose work is in the bytes themselves: copies, CRCs and checksums of payload.
const BYTES: [&str; 3] = ["xwarp_tcp::copy::", "xwarp_tcp::wire::checksum::", "crc_fast::"];

/// Instructions by function.
#[derive(Debug, Default)]
pub struct Profile(pub BTreeMap<String, u64>);

impl Profile {
    /// Parses callgrind's format. A line with a cost belongs to the function named last, unless the line before it is a
    /// call: then it is the inclusive cost of that call.
    pub fn parse(text: &str) -> Self {
        let mut names: BTreeMap<&str, String> = BTreeMap::new();
        let mut profile = Self::default();
        let (mut function, mut after_call) = (String::new(), false);
        for line in text.lines() {
            if let Some((key, value)) = line.split_once('=')
                && !key.starts_with(|c: char| c.is_ascii_digit() || c == '+' || c == '-' || c == '*')
            {
                if matches!(key, "fn" | "cfn") {
                    let (id, name) =
                        value.split_once(' ').map_or((value, None), |(id, name)| (id, Some(name)));
                    if let Some(name) = name {
                        names.insert(id, plain(name));
                    }
                    if key == "fn" {
                        function = names.get(id).cloned().unwrap_or_else(|| value.to_owned());
                    }
                }
                after_call = key == "calls";
            } else if line.starts_with(|c: char| c.is_ascii_digit() || c == '+' || c == '-' || c == '*') {
                let cost =
                    line.split_ascii_whitespace().nth(1).and_then(|cost| cost.parse().ok()).unwrap_or(0u64);
                if !std::mem::take(&mut after_call) {
                    *profile.0.entry(function.clone()).or_default() += cost;
                }
            }
        }
        // The first and the last instructions of the link's functions are counted, because the profiler switches there.
        profile.0.retain(|name, cost| *cost > 0 && !name.contains("::memory_link::"));
        profile
    }

    /// Instructions of all functions.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }

    /// Instructions of copies, CRCs and checksums.
    pub fn bytes(&self) -> u64 {
        self.0.iter().filter(|(name, _)| is_bytes(name)).map(|(_, cost)| cost).sum()
    }
}

/// Whether a function's work is in the bytes themselves.
pub fn is_bytes(name: &str) -> bool {
    BYTES.iter().any(|part| name.contains(part))
}

/// A function's name without the compiler's hash, and without the suffix of a clone or of a recursion level.
fn plain(name: &str) -> String {
    let name = name.split_once(".llvm.").map_or(name, |(name, _)| name);
    let name =
        name.rsplit_once('\'').filter(|(_, level)| level.parse::<u32>().is_ok()).map_or(name, |(n, _)| n);
    match name.rsplit_once("::h") {
        Some((name, hash)) if hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()) => {
            name.to_owned()
        }
        _ => name.to_owned(),
    }
}
