//! Counters of a device or a connection, by stable names: `layer.counter`.

use std::{fmt, sync::Arc};

use xwarp_tcp::{framing::FramingCounters, tcp};

use super::shared::{SharedEngine, State};

/// A snapshot of counters. Values only grow while the device or the connection exists.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters(Vec<(&'static str, u64)>);

impl Counters {
    /// The counters of a device: the sums over its engines.
    pub(super) fn of_device(engines: &[Arc<SharedEngine>]) -> Self {
        let mut all = Vec::with_capacity(128);
        for engine in engines {
            let _ = engine.look(|state| collect(state, &mut all));
        }
        all.sort_unstable();
        all.dedup_by(|(name, value), (first, sum)| {
            let same = name == first;
            if same {
                *sum += *value;
            }
            same
        });
        Self(all)
    }

    pub(super) fn of_connection(tcp: &tcp::Info, framing: &FramingCounters) -> Self {
        let mut all: Vec<_> = tcp.counters.iter().chain(framing.iter()).collect();
        all.sort_unstable();
        Self(all)
    }

    /// The value of the counter `name`; `None` for an unknown name.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }

    /// Names and values, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().copied()
    }

    /// The growth since `earlier`, without counters that did not grow.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let grown = self.iter().map(|(n, v)| (n, v.saturating_sub(earlier.value(n).unwrap_or(0))));
        Self(grown.filter(|(_, v)| *v > 0).collect())
    }
}

/// Appends the counters of one engine.
fn collect(state: &State, all: &mut Vec<(&'static str, u64)>) {
    let stack = state.engine.stack();
    state.link.counters(&mut |name, value| all.push((name, value)));
    all.extend(stack.counters().iter());
    all.extend(stack.tcp_counters().iter());
    all.extend(stack.framing_counters().iter());
    all.extend(state.engine.rnic().counters().iter());
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|(name, value)| writeln!(f, "{name} {value}"))
    }
}
