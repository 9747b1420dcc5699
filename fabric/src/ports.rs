//! [`Ports`]: which client has which port. They are the fabric's own: the kernel's TCP may use the same numbers.

use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use rand::Rng as _;
use smallvec::SmallVec;

/// Ports for those who want any (RFC 6335 section 6).
const EPHEMERAL: RangeInclusive<u16> = 49152..=65535;

/// A port that a client has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reserved {
    /// On this address; `None`: on all of the host.
    address: Option<IpAddr>,
    client: usize,
}

/// The reserved ports, by host and number.
#[derive(Debug, Default)]
pub(crate) struct Ports(HashMap<(u16, u16), SmallVec<[Reserved; 1]>>);

impl Ports {
    /// Reserves a port for a client, or any free one. `None`: another address or client has it; of any: all are in use.
    pub(crate) fn reserve(
        &mut self,
        host: u16,
        address: Option<IpAddr>,
        port: u16,
        client: usize,
    ) -> Option<u16> {
        let port = if port == 0 { self.any(host, address)? } else { port };
        if !self.is_free(host, address, port) {
            return None;
        }
        self.0.entry((host, port)).or_default().push(Reserved { address, client });
        Some(port)
    }

    /// A free port, at a random place (RFC 6056 section 3.3.1).
    fn any(&self, host: u16, address: Option<IpAddr>) -> Option<u16> {
        let count = EPHEMERAL.len() as u16;
        let first = rand::rng().random_range(0..count);
        (0..count)
            .map(|step| EPHEMERAL.start() + ((u32::from(first) + u32::from(step)) % u32::from(count)) as u16)
            .find(|port| self.is_free(host, address, *port))
    }

    fn is_free(&self, host: u16, address: Option<IpAddr>, port: u16) -> bool {
        let others = self.0.get(&(host, port)).map_or(&[][..], |all| all);
        others
            .iter()
            .all(|other| other.address.is_some_and(|theirs| address.is_some_and(|ours| ours != theirs)))
    }

    /// Frees a port of a client; returns whether the client had it.
    pub(crate) fn release(&mut self, host: u16, address: Option<IpAddr>, port: u16, client: usize) -> bool {
        let Some(all) = self.0.get_mut(&(host, port)) else { return false };
        let before = all.len();
        all.retain(|reserved| *reserved != Reserved { address, client });
        let released = all.len() < before;
        if all.is_empty() {
            self.0.remove(&(host, port));
        }
        released
    }

    /// Frees all ports of a client.
    pub(crate) fn release_all(&mut self, client: usize) {
        self.0.retain(|_, all| {
            all.retain(|reserved| reserved.client != client);
            !all.is_empty()
        });
    }

    /// The client that has a port at an address.
    pub(crate) fn owner(&self, host: u16, address: IpAddr, port: u16) -> Option<usize> {
        let all = self.0.get(&(host, port))?;
        all.iter().find(|reserved| reserved.address.is_none_or(|at| at == address)).map(|found| found.client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));
    const V6: Option<IpAddr> = Some(IpAddr::V6(std::net::Ipv6Addr::LOCALHOST));

    #[test]
    fn a_port_has_one_owner_at_an_address() {
        let mut ports = Ports::default();
        assert_eq!(ports.reserve(0, V4, 80, 1), Some(80));
        assert_eq!(ports.reserve(0, V6, 80, 2), Some(80));
        assert_eq!(ports.reserve(0, V4, 80, 2), None);
        assert_eq!(ports.reserve(0, None, 80, 3), None, "all addresses");
        assert_eq!(ports.reserve(1, None, 80, 3), Some(80), "another host");
        assert_eq!(ports.reserve(1, V4, 80, 3), None);
        assert_eq!([V4, V6].map(|at| ports.owner(0, at.unwrap(), 80)), [Some(1), Some(2)]);
        assert_eq!([V4, V6].map(|at| ports.owner(1, at.unwrap(), 80)), [Some(3), Some(3)]);
        assert!(!ports.release(0, V4, 80, 2), "not its own");
        assert!(ports.release(0, V4, 80, 1) && !ports.release(0, V4, 80, 1));
        assert_eq!(ports.owner(0, V4.unwrap(), 80), None);
        ports.release_all(2);
        assert_eq!(ports.reserve(0, None, 80, 4), Some(80));
    }

    #[test]
    fn any_port_is_a_free_one_until_none_is_left() {
        let mut ports = Ports::default();
        for _ in EPHEMERAL {
            let port = ports.reserve(0, None, 0, 1).unwrap();
            assert!(EPHEMERAL.contains(&port));
        }
        assert_eq!(ports.reserve(0, V4, 0, 1), None);
        assert!(ports.reserve(1, V4, 0, 1).is_some());
    }
}
