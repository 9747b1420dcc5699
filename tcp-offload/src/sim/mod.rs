//! The virtual wire: [`Wire`] joins two in-memory [`Link`]s, with seeded [`Faults`] in each
//! direction and time as an argument. The same engines run over it as over AF_XDP.
//!
//! Without faults and delay it needs no clock, so two threads can also use it in real time.
//!
//! [`Link`]: crate::link::Link

mod faults;
mod run;
mod ulpdu;
mod wire;

pub use faults::{Direction, Fate, Faults, Gilbert, Tally};
pub use run::{Node, Outcome, run};
pub use ulpdu::{PulledUlpdu, pull, pull_into};
pub use wire::{Census, SimLink, Wire, WireConfig};
