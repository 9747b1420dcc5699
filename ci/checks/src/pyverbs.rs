//! pyverbs' own test suite, as `tests/compat/pyverbs_suite.py` runs it: the outcomes that it prints, and those that a file expects.

use std::collections::BTreeMap;

/// The outcome of each test, by name, and the reason for it.
pub type Outcomes<'a> = BTreeMap<&'a str, (&'a str, &'a str)>;

/// The outcomes in a file: `outcome name # reason` a line.
pub fn expected(text: &str) -> Outcomes<'_> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines
        .filter_map(|line| {
            let (found, reason) = line.split_once(" # ").unwrap_or((line, ""));
            let (outcome, name) = found.split_once(' ')?;
            Some((name, (outcome, reason)))
        })
        .collect()
}

/// The outcomes that the suite printed. `None`: it did not run to its end.
pub fn found(said: &str) -> Option<Outcomes<'_>> {
    let outcomes: Outcomes<'_> = said
        .lines()
        .filter_map(|line| line.strip_prefix("outcome "))
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            let (outcome, name) = (words.next()?, words.next()?);
            Some((name, (outcome, words.next().unwrap_or_default())))
        })
        .collect();
    said.contains(&format!("ran {} tests", outcomes.len())).then_some(outcomes)
}
