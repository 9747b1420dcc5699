//! MPA through its public interface: conformance, properties against simple oracles, and captures of the
//! kernel's Soft-iWARP.

mod captures;
mod islands;
mod receive;
mod startup;
mod support;
mod transmit;
mod withhold;
