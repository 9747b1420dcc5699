//! [`Addresses`]: the addresses of the interface in the maps of its programs.

use std::net::IpAddr;

use libbpf_rs::MapHandle;

use crate::{ProgramError, insert, keys, remove};

/// The addresses of the interface. Wildcard listeners and ports accept segments to these only: this host may forward segments
/// to others.
#[derive(Debug)]
pub struct Addresses(pub(crate) MapHandle);

impl Addresses {
    /// Adds an address.
    pub fn add(&self, address: IpAddr) -> Result<(), ProgramError> {
        insert(&self.0, &keys::address(address), "adding an address")
    }

    /// Removes an address.
    pub fn remove(&self, address: IpAddr) {
        remove(&self.0, &keys::address(address));
    }
}
