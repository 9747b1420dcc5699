//! [`Addresses`] and [`Station`]: the addresses of the interface in the maps of its programs.

use std::net::IpAddr;

use libbpf_rs::{MapCore, MapFlags, MapHandle};

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

/// The Ethernet address of the interface.
#[derive(Debug)]
pub struct Station(pub(crate) MapHandle);

impl Station {
    /// Sets the address.
    pub fn set(&self, mac: [u8; 6]) -> Result<(), ProgramError> {
        self.0
            .update(&0u32.to_ne_bytes(), &mac, MapFlags::ANY)
            .map_err(ProgramError::new("setting the Ethernet address"))
    }
}
