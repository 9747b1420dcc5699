//! Measurements in interleaved rounds: each round measures every subject once. [`order`] of the subjects, their figures in
//! [`Samples`], and the page about them.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use xwarp_perf::stats::Spread;

/// The directory of this program, where the programs are that were built with it.
pub fn programs() -> Result<PathBuf> {
    let program = env::current_exe().context("cannot find the path of this program")?;
    Ok(program.parent().context("a program is in a directory")?.to_path_buf())
}

/// The subjects in the order of a round. It rotates from round to round, so that slow changes of the machine favour no subject.
pub fn order<S: Clone>(round: u32, subjects: &[S]) -> Vec<S> {
    let mut order = subjects.to_vec();
    order.rotate_left(round as usize % subjects.len().max(1));
    order
}

/// The figures of all rounds, by subject and quantity.
#[derive(Debug)]
pub struct Samples<K>(BTreeMap<K, Vec<f64>>);

impl<K> Default for Samples<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Samples<K> {
    /// Adds the figure of the next round.
    pub fn add(&mut self, key: K, value: f64) {
        self.0.entry(key).or_default().push(value);
    }

    /// Median and range.
    pub fn spread(&self, key: &K) -> Option<Spread> {
        Spread::of(self.0.get(key)?)
    }

    /// Median and range of the ratios of `of` to `to` within each round.
    pub fn ratio(&self, of: &K, to: &K) -> Option<Spread> {
        let (of, to) = (self.0.get(of)?, self.0.get(to)?);
        Spread::of(&of.iter().zip(to).map(|(of, to)| of / to).collect::<Vec<_>>())
    }
}

/// Prints the page, and writes it to the file `out`, if there is one.
pub fn publish(page: &str, out: Option<&Path>) -> Result<()> {
    println!("{page}");
    if let Some(path) = out {
        fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_rotates() {
        let orders = [0, 1, 2, 3].map(|round| order(round, &['a', 'b', 'c']));
        assert_eq!(orders, [['a', 'b', 'c'], ['b', 'c', 'a'], ['c', 'a', 'b'], ['a', 'b', 'c']]);
        assert_eq!(order::<char>(1, &[]), []);
    }

    #[test]
    fn ratios_are_within_a_round() {
        let mut samples = Samples::default();
        for (ours, theirs) in [(1.0, 2.0), (9.0, 3.0), (4.0, 4.0)] {
            samples.add("ours", ours);
            samples.add("theirs", theirs);
        }
        let spread = |spread: Option<Spread>| spread.map(|s| (s.min, s.median, s.max));
        assert_eq!(spread(samples.spread(&"ours")), Some((1.0, 4.0, 9.0)));
        assert_eq!(spread(samples.ratio(&"ours", &"theirs")), Some((0.5, 1.0, 3.0)));
        assert_eq!(spread(samples.ratio(&"ours", &"nobody's")), None);
    }
}
