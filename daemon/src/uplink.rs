//! [`Uplink`]: a shared interface, and the answers about it that clients cannot get from the kernel themselves.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use xwarp_control::{Device as Granted, Event, MAX_ADDRESSES, Neighbour, Reason, Refusal, Reply};
use xwarp_driver::netlink::Netlink;
use xwarp_driver::shared::{Remains, SharedInterface};
use xwarp_driver::{
    DriverConfig, Event as Change, Mode, ModePreference, Question, ResolveError, Resolver, SINGLE_CHUNK_MTU,
};

use crate::names::Name;
use crate::options::Options;
use crate::pairs::Pairs;

/// Largest number of addresses in a line of the log.
const MAX_SHOWN: usize = 16;

/// An interface and the answers about it.
pub(crate) struct Uplink {
    pub shared: SharedInterface,
    pub resolver: Resolver,
    /// The interface is gone, or in another network namespace.
    pub removed: bool,
}

impl Uplink {
    /// Opens an interface. `remains` returns what a former helper has left of the one with this index.
    pub(crate) fn open(
        name: &str,
        options: &Options,
        remains: impl FnOnce(u32) -> Option<Remains>,
    ) -> Result<Self> {
        let mode = if options.generic { ModePreference::Force(Mode::Generic) } else { ModePreference::Probe };
        let address_limit = Duration::from_secs(options.address_limit);
        let config = DriverConfig { mode, vlan: options.vlan, address_limit, ..DriverConfig::default() };
        let shared = SharedInterface::open(name, &config, &options.sharing(), remains)?;
        let resolver = shared.resolver().context("opening a netlink socket")?;
        let uplink = Self { shared, resolver, removed: false };
        uplink.follow();
        Ok(uplink)
    }

    /// Whether this network namespace has an interface of this name.
    pub(crate) fn exists(name: &str) -> bool {
        Netlink::open().and_then(|mut netlink| netlink.index_of(name)).is_ok()
    }

    /// Makes the relay, if the interface needs one because another XDP program has it. `number` is its place among all.
    pub(crate) fn connect_relay(&mut self, number: usize, pairs: &Pairs) -> Result<()> {
        let Some(mtu) = self.shared.relay_mtu() else { return Ok(()) };
        let near = format!("xw{}-{number}", std::process::id());
        pairs.make_relay(&near, Arc::clone(self.shared.switch()), mtu)?;
        self.shared.attach_relay(&near).context("taking frames behind another XDP program")
    }

    /// The name of the link on the interface.
    pub(crate) fn name(&self) -> Name {
        let attributes = self.shared.attributes();
        Name::Uplink {
            interface: attributes.index,
            multi_buffer: self.shared.multi_buffer(),
            vlans: attributes.vlans.clone(),
        }
    }

    /// The current state of the interface, as changes.
    pub(crate) fn state(&self) -> impl Iterator<Item = Event> {
        let attributes = self.shared.attributes();
        let latest = [
            Event::LinkState { up: attributes.up },
            Event::Mtu(attributes.path_mtu),
            Event::Mac(attributes.mac),
        ];
        self.shared.addresses().iter().map(|address| Event::AddressAdded(*address)).chain(latest)
    }

    /// Writes to the log how the interface is shared.
    pub(crate) fn report(&self) {
        let attributes = self.shared.attributes();
        let addresses = self.shared.addresses();
        tracing::info!(
            interface = attributes.name,
            from_wire = %self.shared.hook(),
            mtu = attributes.path_mtu,
            from_clients = if self.shared.takes_redirected() { "native" } else { "generic" },
            addresses = ?addresses.get(..MAX_SHOWN.min(addresses.len())).unwrap_or_default(),
            "shared"
        );
        if addresses.is_empty() {
            tracing::warn!(
                interface = attributes.name,
                "the interface has no address: clients can neither listen nor connect (a bridge's port? then share the bridge)"
            );
        }
        if !attributes.up {
            tracing::warn!(interface = attributes.name, "the interface is down, or has no carrier");
        }
    }

    /// Lets the resolver know the current attributes of the interface.
    pub(crate) fn follow(&self) {
        self.resolver.follow(self.shared.attributes());
    }

    /// MTU of the clients' pairs.
    pub(crate) fn pair_mtu(&self) -> u32 {
        let mtu = self.shared.attributes().mtu;
        if self.shared.multi_buffer() { mtu } else { mtu.min(u32::from(SINGLE_CHUNK_MTU)) }
    }

    /// The device of a client whose socket is for interface `socket_index` of its namespace.
    pub(crate) fn granted(&self, socket_index: u32) -> Granted {
        let attributes = self.shared.attributes();
        Granted {
            name: attributes.name.clone(),
            carrier: attributes.carrier.clone(),
            index: attributes.index,
            socket_index,
            mac: attributes.mac,
            mtu: attributes.mtu,
            path_mtu: attributes.path_mtu,
            largest_mtu: attributes.largest_mtu,
            up: attributes.up,
            hook: self.shared.hook(),
            multi_buffer: self.shared.multi_buffer(),
            vlans: attributes.vlans.clone(),
            program_id: attributes.program_id,
            addresses: self.shared.addresses().iter().take(MAX_ADDRESSES).copied().collect(),
        }
    }

    /// How clients reach `destination`, without waiting.
    pub(crate) fn resolve(&self, destination: IpAddr, source: Option<IpAddr>) -> Result<Reply, Refusal> {
        let attributes = self.shared.attributes();
        let ours = self.shared.addresses();
        if let Some(address) = source.filter(|source| !self.shared.is_ours(*source)) {
            return Err(refusal(
                Reason::NotOurAddress,
                format!("{address} is not an address of {}", attributes.name),
            ));
        }
        if ours.contains(&destination) && source.is_none_or(|s| s.is_ipv4() == destination.is_ipv4()) {
            // The destination is a client of this host: the switch carries the frames there.
            return Ok(Reply::Resolved {
                source: source.unwrap_or(destination),
                next_hop: destination,
                neighbour: Neighbour::Known(attributes.mac),
                mtu: attributes.path_mtu,
            });
        }
        let route = self.resolver.route(destination, source).map_err(no_route)?;
        let neighbour = match self.resolver.neighbour(&route) {
            Ok(Some(mac)) => Neighbour::Known(mac),
            Ok(None) => Neighbour::Pending,
            Err(ResolveError::Unreachable { .. }) => Neighbour::Failed,
            Err(error) => return Err(no_route(error)),
        };
        Ok(Reply::Resolved { source: route.source, next_hop: route.next_hop, neighbour, mtu: route.mtu })
    }

    /// The next hop of a client's connection.
    pub(crate) fn next_hop(&self, question: &Question, confirm: bool) -> Result<Reply, Refusal> {
        let attributes = self.shared.attributes();
        if self.shared.addresses().contains(&question.destination) {
            let (address, mac) = (question.destination, Some(attributes.mac));
            return Ok(Reply::NextHop { address, mac, mtu: attributes.path_mtu });
        }
        let found = self.resolver.next_hop_of(question, confirm);
        let found = found.map_err(|error| {
            // The client holds its output when there is no route.
            let reason = if error.forbids() { Reason::Route } else { Reason::System };
            refusal(reason, error.to_string())
        })?;
        let mtu = found.mtu.unwrap_or(attributes.path_mtu);
        Ok(Reply::NextHop { address: found.address, mac: found.mac, mtu })
    }
}

pub(crate) fn refusal(reason: Reason, text: impl Into<String>) -> Refusal {
    Refusal { reason, text: text.into() }
}

fn no_route(error: ResolveError) -> Refusal {
    refusal(Reason::Route, error.to_string())
}

/// The event that announces a change to clients.
pub(crate) fn event_of(change: Change) -> Option<Event> {
    Some(match change {
        Change::AddressAdded(address) => Event::AddressAdded(address),
        Change::AddressRemoved(address) => Event::AddressRemoved(address),
        Change::LinkState { up } => Event::LinkState { up },
        Change::Mtu(mtu) => Event::Mtu(mtu),
        Change::Mac(mac) => Event::Mac(mac),
        Change::LinkRemoved => Event::LinkRemoved,
        Change::Neighbour { address, mac: Some(mac) } => Event::Neighbour { address, mac },
        // The lost changes may be of any kind; a lookup for every connection covers routes and neighbours.
        Change::Routes | Change::Overrun => Event::Routes,
        _ => return None,
    })
}
