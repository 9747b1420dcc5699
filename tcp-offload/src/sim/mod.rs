//! The virtual wire: [`Wire`] joins in-memory [`Link`]s, with seeded [`Faults`] in each direction and time as an
//! argument. The same engines run over it as over AF_XDP, and every frame that they send is audited.
//!
//! Without faults and delay it needs no clock, so two threads can also use it in real time. [`Direction`] alone is
//! the fault model, for frames of any origin.
//!
//! [`Link`]: crate::link::Link

mod audit;
mod direction;
mod faults;
mod packet;
mod run;
#[cfg(test)]
mod tests;
mod ulpdu;
mod wire;

pub use direction::{Direction, Tally};
pub use faults::{Aim, Blackout, Faults, Gilbert, PathMtu, Recut, Resets};
pub use run::{Node, Outcome, run};
pub use ulpdu::{PulledUlpdu, pull, pull_into};
pub use wire::{Census, SimLink, Wire, WireConfig};
