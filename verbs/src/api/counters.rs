//! All counters of a device, by names that stay: `layer.what`.

use std::fmt;

use super::shared::State;

/// A snapshot of everything that a device counts. Numbers only grow while the device is open.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters(Vec<(&'static str, u64)>);

/// Lists the fields of a counter struct by the names they have here. It is taken apart without `..`, so
/// that a counter which is added below and forgotten here does not compile.
macro_rules! list {
    ($to:ident, $layer:literal, $type:path, $value:expr, $($field:ident),* $(,)?) => {{
        let $type { $($field),* } = $value;
        $($to.push((concat!($layer, ".", stringify!($field)), u64::from($field)));)*
    }};
}

impl Counters {
    pub(super) fn collect(state: &State) -> Self {
        use xwarp_tcp::{mpa, stack::StackCounters, tcp};
        let mut all = Vec::with_capacity(128);
        state.link.counters(&mut |name, value| all.push((name, value)));
        list!(
            all,
            "stack",
            StackCounters,
            state.engine.stack().counters(),
            frames_in,
            malformed,
            bad_checksum,
            partial_checksum,
            foreign,
            no_connection,
            resets_sent,
            icmp_errors,
            refused_payloads,
            active_opens,
            passive_opens,
            backlog_full,
            starved,
        );
        list!(
            all,
            "tcp",
            tcp::Counters,
            state.engine.stack().tcp_counters(),
            segments_in,
            segments_out,
            bytes_out,
            bytes_in,
            acks_out,
            retransmits,
            rto_expired,
            tlp_probes,
            recoveries,
            undone,
            dsacks_in,
            out_of_order,
            duplicates,
            out_of_window,
            paws_dropped,
            challenge_acks,
            window_probes,
            keepalives,
            ecn_echoes,
            recut,
        );
        list!(
            all,
            "mpa",
            mpa::Counters,
            state.engine.stack().mpa_counters(),
            fpdus_sent,
            placed_in_order,
            placed_early,
            refused_early,
            delivered,
            duplicate_bytes,
            held_bytes_peak,
            copied_bytes,
            crc_errors,
            marker_errors,
            withheld,
            refused_segments,
        );
        all.sort_unstable();
        Self(all)
    }

    /// The counter `name`, if there is one.
    pub fn value(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }

    /// Names and values, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().copied()
    }

    /// What was counted since `earlier`, and is not zero.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let grown = self.iter().map(|(n, v)| (n, v.saturating_sub(earlier.value(n).unwrap_or(0))));
        Self(grown.filter(|(_, v)| *v > 0).collect())
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().try_for_each(|(name, value)| writeln!(f, "{name} {value}"))
    }
}
