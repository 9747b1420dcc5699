//! The macro that defines counters: each is declared once, with its documentation.

/// Defines the counters of a layer: a struct of plain `u64` fields that only grow, the sum of two such structs, and
/// an iterator over `("layer.name", value)`, so that every counter can be read. A field marked `: peak` is the
/// largest value ever seen; a sum keeps the larger of two peaks.
///
/// ```
/// xwarp_tcp::counters! {
///     /// Counters of a tap.
///     pub struct TapCounters in "tap" {
///         /// Frames written.
///         frames,
///         /// Most frames ever waiting.
///         waiting_peak: peak,
///     }
/// }
/// let mut sum = TapCounters { frames: 1, waiting_peak: 7 };
/// sum += TapCounters { frames: 2, waiting_peak: 5 };
/// assert!(sum.iter().eq([("tap.frames", 3), ("tap.waiting_peak", 7)]));
/// ```
#[macro_export]
macro_rules! counters {
    (
        $(#[$of_all:meta])*
        pub struct $counters:ident in $layer:literal {
            $($(#[$of_one:meta])* $name:ident $(: $kind:ident)?),+ $(,)?
        }
    ) => {
        $(#[$of_all])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $counters {
            $($(#[$of_one])* pub $name: u64),+
        }

        impl $counters {
            /// Pairs of `layer.name` and value.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((concat!($layer, ".", stringify!($name)), self.$name)),+].into_iter()
            }
        }

        impl std::ops::AddAssign for $counters {
            /// Sums, and the larger of the peaks.
            fn add_assign(&mut self, other: Self) {
                $($crate::counters!(@add self.$name, other.$name $(, $kind)?);)+
            }
        }
    };
    (@add $to:expr, $value:expr) => { $to += $value };
    (@add $to:expr, $value:expr, peak) => { $to = $to.max($value) };
}
