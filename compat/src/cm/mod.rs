//! librdmacm: identifiers, their events, and connections.
//!
//! An identifier of C is bound to a device late, or to several for a listener at a wildcard address. Therefore one event channel of C is
//! one channel of ours for each device, behind one descriptor.

pub mod addrinfo;
pub mod channel;
pub mod connect;
pub mod endpoint;
pub mod event;
pub mod id;
pub mod interfaces;
pub mod names;
pub mod options;
pub mod parking;
pub mod refused;
pub mod resolve;
pub mod rsocket;
