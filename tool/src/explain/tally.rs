//! Counts by name, for names that a file chooses.

use std::collections::BTreeMap;

use serde::Serialize;

/// Largest number of names; the rest is counted together.
const MAX_NAMES: usize = 64;

/// Counts by name, at most [`MAX_NAMES`] and one for the rest.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Tally {
    counts: BTreeMap<String, u64>,
}

impl Tally {
    /// Counts one of this name.
    pub fn add(&mut self, name: String) {
        let full = self.counts.len() >= MAX_NAMES && !self.counts.contains_key(&name);
        let name = if full { "of further kinds".to_owned() } else { name };
        *self.counts.entry(name).or_default() += 1;
    }

    /// Names and counts, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.counts.iter().map(|(name, count)| (name.as_str(), *count))
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded() {
        let mut tally = Tally::default();
        for number in 0..1000 {
            tally.add(number.to_string());
        }
        assert_eq!(tally.iter().count(), MAX_NAMES + 1);
        assert_eq!(tally.iter().find(|(name, _)| *name == "of further kinds").map(|(_, n)| n), Some(936));
    }
}
