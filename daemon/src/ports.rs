//! Ports of clients: reserved in the kernel, and kept from other users for some time after their release, because peers may
//! still send segments of old connections.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use xwarp_control::{Reason, Refusal};
use xwarp_driver::{PortError, PortReservation, ephemeral_range, reserve_port, reserve_port_in};

use crate::options::{Options, Ports, PrivilegedPorts};

/// Largest number of ports of one user in quarantine; the oldest are freed early.
const MAX_QUARANTINED: usize = 1024;

/// Whose a port is: one user may run several containers that do not trust each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub uid: u32,
    /// Its network namespace, if that can be seen.
    pub namespace: Option<u64>,
}

/// What decides about a client's ports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights {
    pub owner: Owner,
    /// Its process is root of this host.
    pub privileged: bool,
}

/// Released ports, oldest first.
#[derive(Debug)]
pub(crate) struct Quarantine {
    time: Duration,
    ports: VecDeque<Released>,
    /// Ports below this one belong to privileged users.
    first_unprivileged: u16,
    /// Root of this host may have them.
    privileged_ports: bool,
    /// The only ports of clients; `None`: all.
    range: Option<RangeInclusive<u16>>,
    /// Largest number of ports, reserved or in quarantine: the kernel keeps others for itself.
    most: usize,
}

#[derive(Debug)]
struct Released {
    until: Instant,
    owner: Owner,
    interface: u32,
    port: PortReservation,
}

impl Quarantine {
    pub(crate) fn new(options: &Options) -> Self {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
        let first_unprivileged = text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024);
        let range = options.ports.map(|Ports(first, last)| first..=last);
        let most = match &range {
            Some(range) => range.len(),
            // Half of the kernel's range for outgoing connections stays for the host's own.
            None => ephemeral_range().len() / 2,
        };
        Self {
            time: options.quarantine(),
            ports: VecDeque::new(),
            first_unprivileged,
            privileged_ports: options.privileged_ports == PrivilegedPorts::Root,
            range,
            most,
        }
    }

    /// Reserves a port of an interface for a client, perhaps one that the same user has released in the same network
    /// namespace. `reserved` ports belong to clients.
    pub(crate) fn reserve(
        &mut self,
        rights: &Rights,
        address: Option<IpAddr>,
        port: u16,
        interface: u32,
        reserved: usize,
    ) -> Result<PortReservation, Refusal> {
        let refuse = |reason, text| Err(Refusal { reason, text });
        if port != 0 && port < self.first_unprivileged {
            if !(rights.privileged && self.privileged_ports) {
                let first = self.first_unprivileged;
                let text = format!(
                    "ports below {first} are for root of this host only, outside of containers (--privileged-ports of xwarpd)"
                );
                return refuse(Reason::Permission, text);
            }
        } else if let Some(range) = self.range.as_ref().filter(|range| port != 0 && !range.contains(&port)) {
            let text = format!("clients may have the ports {range:?} only (--ports of xwarpd)");
            return refuse(Reason::Permission, text);
        }
        let own = |released: &Released| {
            released.owner == rights.owner
                && released.interface == interface
                && released.port.address() == address
                && released.port.port() == port
        };
        if let Some(at) = self.ports.iter().position(own)
            && let Some(released) = self.ports.remove(at)
        {
            return Ok(released.port);
        }
        if reserved + self.ports.len() >= self.most && !self.give_up_oldest() {
            let most = self.most;
            let text = format!(
                "all users together have {most} ports already, and the others are the kernel's (--ports of xwarpd)"
            );
            return refuse(Reason::PortsExhausted, text);
        }
        let made = match self.range.clone() {
            Some(range) if port == 0 => reserve_port_in(address, range, interface),
            _ => reserve_port(address, Some(port), interface),
        };
        made.map_err(|error| Refusal {
            reason: match &error {
                PortError::InUse { .. } => Reason::PortInUse,
                PortError::Permission(_) => Reason::Permission,
                PortError::NotOurAddress(_) => Reason::NotOurAddress,
                PortError::Exhausted(_) => Reason::PortsExhausted,
                _ => Reason::System,
            },
            text: error.to_string(),
        })
    }

    /// Quarantines a port of an interface that `uid` no longer needs.
    pub(crate) fn add(&mut self, now: Instant, owner: Owner, interface: u32, port: PortReservation) {
        if self.ports.iter().filter(|released| released.owner.uid == owner.uid).count() >= MAX_QUARANTINED
            && let Some(oldest) = self.ports.iter().position(|released| released.owner.uid == owner.uid)
        {
            self.ports.remove(oldest);
        }
        self.ports.push_back(Released { until: now + self.time, owner, interface, port });
    }

    /// Frees the port that has been in quarantine for the longest time. Returns false if there is none.
    pub(crate) fn give_up_oldest(&mut self) -> bool {
        self.ports.pop_front().is_some()
    }

    /// Ports in quarantine.
    pub(crate) fn len(&self) -> usize {
        self.ports.len()
    }

    /// Frees the ports whose quarantine has ended. Returns the time until the next one.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Duration> {
        while self.ports.front().is_some_and(|released| released.until <= now) {
            self.ports.pop_front();
        }
        self.ports.front().map(|released| released.until.saturating_duration_since(now))
    }
}
