//! Ports of clients: reserved in the kernel, and kept from other users for some time after their release, because peers may
//! still send segments of old connections.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use xwarp_control::{Reason, Refusal};
use xwarp_driver::{PortError, PortReservation, reserve_port};

/// Largest number of ports of one user in quarantine; the oldest are freed early.
const MOST_QUARANTINED: usize = 1024;

/// Released ports, oldest first.
#[derive(Debug)]
pub(crate) struct Quarantine {
    time: Duration,
    ports: VecDeque<Released>,
    /// Ports below this one belong to privileged users.
    first_unprivileged: u16,
}

#[derive(Debug)]
struct Released {
    until: Instant,
    uid: u32,
    interface: u32,
    port: PortReservation,
}

impl Quarantine {
    pub(crate) fn new(time: Duration) -> Self {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
        let first_unprivileged = text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(1024);
        Self { time, ports: VecDeque::new(), first_unprivileged }
    }

    /// Reserves a port of an interface for `uid`, perhaps one that the same user has released.
    pub(crate) fn reserve(
        &mut self,
        uid: u32,
        address: Option<IpAddr>,
        port: u16,
        interface: u32,
    ) -> Result<PortReservation, Refusal> {
        if port != 0 && port < self.first_unprivileged && uid != 0 {
            let text = format!("ports below {} are reserved for root", self.first_unprivileged);
            return Err(Refusal { reason: Reason::Permission, text });
        }
        let own = |released: &Released| {
            released.uid == uid
                && released.interface == interface
                && released.port.address() == address
                && released.port.port() == port
        };
        if let Some(at) = self.ports.iter().position(own)
            && let Some(released) = self.ports.remove(at)
        {
            return Ok(released.port);
        }
        reserve_port(address, Some(port), interface).map_err(|error| Refusal {
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
    pub(crate) fn add(&mut self, now: Instant, uid: u32, interface: u32, port: PortReservation) {
        if self.ports.iter().filter(|released| released.uid == uid).count() >= MOST_QUARANTINED
            && let Some(oldest) = self.ports.iter().position(|released| released.uid == uid)
        {
            self.ports.remove(oldest);
        }
        self.ports.push_back(Released { until: now + self.time, uid, interface, port });
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
