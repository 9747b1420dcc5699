//! [`Resolver`]: from a peer's address to the [`Path`] of frames to it.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use xwarp_control::{Neighbour as HelpersNeighbour, Reason, Reply, Request};

use xwarp_tcp::link::QueueId;
use xwarp_tcp::wire::{Flow, Mac, Path, VlanTags};

use crate::config::Attributes;
use crate::deadline::Deadline;
use crate::error::{PortError, ResolveError};
use crate::helper::{CallError, Helper, PATIENCE, unexpected};
use crate::netlink::Netlink;
use crate::netlink::neighbour::Neighbour;
use crate::netlink::route::{Question, RouteAnswer};
use crate::netlink::xfrm::{Demand, Policies};
use crate::port::{self, PortReservation};

/// First interval between two look-ups of a neighbour that the kernel resolves; it doubles up to the longest.
const NEIGHBOUR_POLL: Duration = Duration::from_millis(2);
const LONGEST_NEIGHBOUR_POLL: Duration = Duration::from_millis(16);

/// Longest wait for a helper's answer about a next hop: the engine's lock is held meanwhile.
const NEXT_HOP_PATIENCE: Duration = Duration::from_millis(50);
/// Pause before a helper that did not answer is asked about next hops again.
const NEXT_HOP_PAUSE: Duration = Duration::from_secs(1);

/// The smallest MTU that IPv4 allows (RFC 791); a route's MTU below it counts as this.
const MIN_MTU: u32 = 68;

/// The constant attributes of an open interface that paths depend on.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub name: String,
    pub index: u32,
    pub vlan: VlanTags,
    pub queues: u16,
}

/// Where the frames of a connection go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// Its Ethernet address, if known.
    pub mac: Option<Mac>,
    /// The largest IP packet of the route, in bytes, if known.
    pub mtu: Option<u16>,
}

/// How to reach an address: the kernel's routing decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The peer's address.
    pub destination: IpAddr,
    /// The local address to use.
    pub source: IpAddr,
    /// The neighbour to send to: a gateway, or the destination itself.
    pub next_hop: IpAddr,
    /// Largest IP packet, in bytes.
    pub mtu: u16,
}

/// Asks the kernel, or the helper that granted the interface, for paths and ports.
///
/// Borrows nothing from the interface, so a connection manager can use it
/// without the engine's lock, from several threads: a thread that waits for a neighbour blocks no other.
#[derive(Debug)]
pub struct Resolver {
    source: Source,
    /// The process that opened the interface. A child (`fork`) must not use its sockets, because it would consume the
    /// parent's answers.
    owner: u32,
    facts: Facts,
    /// Ethernet address and path MTU of the interface.
    link: Mutex<(Mac, u16)>,
    policies: Mutex<Policies>,
}

/// The source of routes and neighbours, which also reserves ports.
#[derive(Debug)]
enum Source {
    /// The kernel of this network namespace; locked for one request and its answer.
    Kernel(Mutex<Netlink>),
    Helper {
        helper: Arc<Helper>,
        /// When to ask about next hops again, after the helper did not answer.
        ask_again_at: Mutex<Option<Instant>>,
    },
}

/// A helper's answer about a path.
struct Resolved {
    route: Route,
    neighbour: HelpersNeighbour,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each value is replaced or read as a whole, so a panic leaves no partial change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Resolver {
    pub(crate) fn new(facts: Facts, attributes: &Attributes) -> io::Result<Self> {
        let link = Mutex::new((attributes.mac, attributes.path_mtu));
        Ok(Self {
            source: Source::Kernel(Mutex::new(Netlink::open()?)),
            owner: std::process::id(),
            facts,
            link,
            policies: Mutex::new(Policies::open()),
        })
    }

    pub(crate) fn by_helper(facts: Facts, attributes: &Attributes, helper: Arc<Helper>) -> Self {
        let link = Mutex::new((attributes.mac, attributes.path_mtu));
        let source = Source::Helper { helper, ask_again_at: Mutex::default() };
        // The helper looks at the policies.
        let policies = Mutex::new(Policies::none());
        Self { source, owner: std::process::id(), facts, link, policies }
    }

    /// Uses the interface's Ethernet address and MTU of `attributes` from now on: call it when an
    /// [`Event`](crate::Event) announces a change of either.
    pub fn follow(&self, attributes: &Attributes) {
        *lock(&self.link) = (attributes.mac, attributes.path_mtu);
    }

    /// The route to `destination`, from `source` if given, else from the address that the kernel prefers.
    ///
    /// # Errors
    /// Everything but [`ResolveError::Unreachable`] and [`ResolveError::TimedOut`].
    pub fn route(&self, destination: IpAddr, source: Option<IpAddr>) -> Result<Route, ResolveError> {
        check_addresses(destination, source)?;
        self.check_process()?;
        match &self.source {
            Source::Kernel(netlink) => {
                self.kernel_route(&mut lock(netlink), &Question::to(destination, source))
            }
            Source::Helper { helper, .. } => Ok(ask(helper, destination, source)?.route),
        }
    }

    /// The route of the flow that `question` describes.
    ///
    /// # Errors
    /// As [`Self::route`].
    pub fn route_of(&self, question: &Question) -> Result<Route, ResolveError> {
        match &self.source {
            Source::Kernel(netlink) => {
                check_addresses(question.destination, question.source)?;
                self.check_process()?;
                self.kernel_route(&mut lock(netlink), question)
            }
            Source::Helper { .. } => self.route(question.destination, question.source),
        }
    }

    fn kernel_route(&self, netlink: &mut Netlink, question: &Question) -> Result<Route, ResolveError> {
        let Question { destination, source, .. } = *question;
        self.check_link(netlink)?;
        if let Some(address) = source.filter(|source| !self.is_local(netlink, *source)) {
            return Err(ResolveError::NotOurAddress { address, name: self.facts.name.clone() });
        }
        let no_route = |source| ResolveError::NoRoute { destination, source };
        let mut answer = self.look_up(netlink, question).map_err(no_route)?;
        if answer.local {
            return Err(ResolveError::Local(destination));
        }
        if answer.interface != self.facts.index {
            if !netlink.has_route(destination, self.facts.index) {
                return Err(self.other_interface(netlink, destination, answer.interface));
            }
            // Both interfaces have a route; the caller chose this one by opening it.
            answer = netlink.route(question, Some(self.facts.index))?;
        }
        let Some(source) = source.or(answer.source) else {
            return Err(no_route(io::ErrorKind::AddrNotAvailable.into()));
        };
        self.check_policies(&Question { source: Some(source), ..*question })?;
        let mtu = self.mtu_of(&answer);
        Ok(Route { destination, source, next_hop: answer.gateway.unwrap_or(destination), mtu })
    }

    /// Whether the kernel's local table has an address, and another host can answer it.
    fn is_local(&self, netlink: &mut Netlink, address: IpAddr) -> bool {
        if address.is_loopback() {
            return false;
        }
        let found = netlink.route(&Question::to(address, None), self.scope(address));
        // The addresses of an interface in a VRF are in another table.
        found.is_ok_and(|route| route.local)
            || netlink.addresses(self.facts.index).is_ok_and(|own| own.contains(&address))
    }

    /// Rejects flows that the kernel would encrypt, or block, by a policy (`ip xfrm policy`).
    fn check_policies(&self, question: &Question) -> Result<(), ResolveError> {
        let demands = match lock(&self.policies).demand(question) {
            Ok(Demand::Transformation) => "encrypts or authenticates",
            Ok(Demand::Block) => "blocks",
            Ok(Demand::Nothing) | Err(_) => return Ok(()),
        };
        Err(ResolveError::Policy { destination: question.destination, demands })
    }

    /// The kernel's route of a flow.
    fn look_up(&self, netlink: &mut Netlink, question: &Question) -> io::Result<RouteAnswer> {
        let index = self.facts.index;
        match netlink.route(question, self.scope(question.destination)) {
            // The routes of an interface in a VRF are found by the interface only.
            Err(error)
                if error.raw_os_error() == Some(libc::ENETUNREACH)
                    && netlink.has_route(question.destination, index) =>
            {
                netlink.route(question, Some(index))
            }
            answer => answer,
        }
    }

    /// The largest IP packet on a route, in bytes.
    fn mtu_of(&self, answer: &RouteAnswer) -> u16 {
        let most = u32::from(lock(&self.link).1);
        answer.mtu.unwrap_or(most).min(most).max(MIN_MTU) as u16
    }

    /// Reserves `port`, or (0) a random ephemeral one, on `address`, or (`None`) on all addresses of both families.
    ///
    /// # Errors
    /// As [`reserve_port`](crate::reserve_port), and the helper's refusals.
    pub fn reserve_port(&self, address: Option<IpAddr>, port: u16) -> Result<PortReservation, PortError> {
        self.check_process().map_err(|error| PortError::Helper(error.to_string()))?;
        match &self.source {
            Source::Kernel(_) => port::reserve_port(address, Some(port), self.facts.index),
            Source::Helper { helper, .. } => port::reserve_by_helper(helper, address, port),
        }
    }

    fn check_process(&self) -> Result<(), ResolveError> {
        if std::process::id() == self.owner {
            Ok(())
        } else {
            Err(ResolveError::Inherited { owner: self.owner })
        }
    }

    /// The kernel has no route over an interface that is down: this error comes first, because it names the remedy.
    fn check_link(&self, netlink: &mut Netlink) -> Result<(), ResolveError> {
        let name = self.facts.name.clone();
        match netlink.link(self.facts.index) {
            Ok(link) if !link.admin_up => Err(ResolveError::LinkDown { name }),
            Ok(link) if !link.up => Err(ResolveError::NoCarrier { name }),
            Ok(_) => Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                Err(ResolveError::LinkRemoved { name })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// A link-local address is reachable over its own link only.
    fn scope(&self, destination: IpAddr) -> Option<u32> {
        is_link_local(destination).then_some(self.facts.index)
    }

    /// The next hop of a connection by the current routes, and its Ethernet address if the kernel knows it. If not, the kernel is
    /// asked to resolve it, and an [`Event::Neighbour`](crate::Event::Neighbour) announces the result. With `confirm`, the kernel is
    /// asked to confirm even a known address, because the peer does not answer.
    ///
    /// # Errors
    /// [`ResolveError::NoRoute`], [`ResolveError::NotOurAddress`], [`ResolveError::Policy`] or [`ResolveError::Netlink`].
    pub fn next_hop(&self, flow: Flow, confirm: bool) -> Result<NextHop, ResolveError> {
        let Flow { local, remote } = flow;
        let question = Question {
            destination_port: remote.port(),
            source_port: local.port(),
            ..Question::to(remote.ip(), Some(local.ip()))
        };
        self.next_hop_of(&question, confirm)
    }

    /// The same for the flow that `question` describes.
    ///
    /// # Errors
    /// As [`Self::next_hop`].
    pub fn next_hop_of(&self, question: &Question, confirm: bool) -> Result<NextHop, ResolveError> {
        let Question { destination, source, .. } = *question;
        check_addresses(destination, source)?;
        self.check_process()?;
        let index = self.facts.index;
        let netlink = match &self.source {
            Source::Kernel(netlink) => netlink,
            Source::Helper { helper, ask_again_at } => {
                return next_hop_by_helper(helper, ask_again_at, question, confirm);
            }
        };
        let mut netlink = lock(netlink);
        let no_route = |source| ResolveError::NoRoute { destination, source };
        // In IPv6, the kernel answers also for a source that is not, or no longer, an address of the host.
        if let Some(address) = source.filter(|it| it.is_ipv6() && !self.is_local(&mut netlink, *it)) {
            return Err(ResolveError::NotOurAddress { address, name: self.facts.name.clone() });
        }
        let mut answer = self.look_up(&mut netlink, question).map_err(no_route)?;
        if answer.interface != index {
            answer = netlink.route(question, Some(index)).map_err(no_route)?;
        }
        self.check_policies(question)?;
        let address = answer.gateway.unwrap_or(destination);
        let mac = match netlink.neighbour(index, address)? {
            Neighbour::Known(mac) => {
                if confirm {
                    netlink.confirm_neighbour(index, address)?;
                }
                Some(mac)
            }
            Neighbour::Incomplete => None,
            Neighbour::Unknown | Neighbour::Failed => {
                netlink.probe_neighbour(index, address)?;
                None
            }
        };
        Ok(NextHop { address, mac, mtu: Some(self.mtu_of(&answer)) })
    }

    fn other_interface(&self, netlink: &mut Netlink, destination: IpAddr, index: u32) -> ResolveError {
        let through = netlink.link(index).map_or_else(|_| format!("interface {index}"), |link| link.name);
        ResolveError::OtherInterface { destination, name: self.facts.name.clone(), through }
    }

    /// The next hop's Ethernet address if the kernel knows it. If not, the kernel is asked to resolve it and the
    /// result is `None`: call again when an [`Event::Neighbour`](crate::Event::Neighbour) announces the address.
    ///
    /// # Errors
    /// [`ResolveError::Unreachable`] when the kernel has asked and got no answer. Each call makes it ask again.
    pub fn neighbour(&self, route: &Route) -> Result<Option<Mac>, ResolveError> {
        self.check_process()?;
        let unreachable =
            ResolveError::Unreachable { destination: route.destination, next_hop: route.next_hop };
        let netlink = match &self.source {
            Source::Kernel(netlink) => netlink,
            Source::Helper { helper, .. } => {
                return match ask(helper, route.destination, Some(route.source))?.neighbour {
                    HelpersNeighbour::Known(mac) => Ok(Some(mac)),
                    HelpersNeighbour::Pending => Ok(None),
                    HelpersNeighbour::Failed => Err(unreachable),
                };
            }
        };
        let mut netlink = lock(netlink);
        match netlink.neighbour(self.facts.index, route.next_hop)? {
            Neighbour::Known(mac) => Ok(Some(mac)),
            Neighbour::Incomplete => Ok(None),
            Neighbour::Unknown => {
                netlink.probe_neighbour(self.facts.index, route.next_hop)?;
                Ok(None)
            }
            Neighbour::Failed => {
                netlink.probe_neighbour(self.facts.index, route.next_hop)?;
                Err(unreachable)
            }
        }
    }

    /// The path of a connection, once its route and the next hop's Ethernet address are known. Its frames leave on a
    /// queue chosen by the ports, until the peer's first frame shows on which queue the peer's frames arrive.
    pub fn path(&self, flow: Flow, route: &Route, next_hop_mac: Mac) -> Path {
        Path {
            flow,
            source_mac: lock(&self.link).0,
            next_hop: Some(route.next_hop),
            next_hop_mac,
            vlan: self.facts.vlan,
            mtu: route.mtu,
            queue: QueueId((flow.local.port() ^ flow.remote.port()) % self.facts.queues.max(1)),
        }
    }

    /// Waits for the path of a connection, at most `limit`. `flow.local` holds a local address and port.
    ///
    /// A neighbour whose last resolution failed is resolved again within `limit`.
    ///
    /// # Errors
    /// Any of [`ResolveError`].
    pub fn resolve(&self, flow: Flow, limit: Duration) -> Result<Path, ResolveError> {
        let route = self.route_of(&Question {
            destination_port: flow.remote.port(),
            source_port: flow.local.port(),
            ..Question::to(flow.remote.ip(), Some(flow.local.ip()))
        })?;
        let deadline = Deadline::after(limit);
        let mut asked_again = false;
        let mut pause = NEIGHBOUR_POLL;
        loop {
            match self.neighbour(&route) {
                Ok(Some(mac)) => return Ok(self.path(flow, &route, mac)),
                Ok(None) => asked_again = true,
                // An earlier resolution failed: ask again.
                Err(ResolveError::Unreachable { .. }) if !asked_again => asked_again = true,
                Err(error) => return Err(error),
            }
            if deadline.passed() {
                return Err(ResolveError::TimedOut {
                    destination: route.destination,
                    next_hop: route.next_hop,
                });
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_NEIGHBOUR_POLL);
        }
    }
}

/// Asks the helper how to reach `destination`.
fn ask(helper: &Helper, destination: IpAddr, source: Option<IpAddr>) -> Result<Resolved, ResolveError> {
    match helper.call(Request::Resolve { destination, source }, PATIENCE) {
        Ok(Reply::Resolved { source, next_hop, neighbour, mtu }) => {
            Ok(Resolved { route: Route { destination, source, next_hop, mtu }, neighbour })
        }
        Ok(other) => Err(unexpected(&other).into()),
        Err(error) => Err(error.into()),
    }
}

impl From<CallError> for ResolveError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(refusal) => Self::Helper(refusal.text),
            other => Self::Helper(io::Error::from(other).to_string()),
        }
    }
}

fn next_hop_by_helper(
    helper: &Helper,
    ask_again_at: &Mutex<Option<Instant>>,
    question: &Question,
    confirm: bool,
) -> Result<NextHop, ResolveError> {
    let Question { destination, destination_port, source_port, .. } = *question;
    let source = question.source.unwrap_or(destination);
    let mut ask_again_at = lock(ask_again_at);
    if ask_again_at.is_some_and(|at| Instant::now() < at) {
        return Err(CallError::TimedOut.into());
    }
    let request = Request::NextHop { destination, source, destination_port, source_port, confirm };
    match helper.call(request, NEXT_HOP_PATIENCE) {
        Ok(Reply::NextHop { address, mac, mtu }) => Ok(NextHop { address, mac, mtu: Some(mtu) }),
        Ok(other) => Err(unexpected(&other).into()),
        Err(CallError::Refused(refusal)) if refusal.reason == Reason::Route => {
            let source = io::Error::from_raw_os_error(libc::EHOSTUNREACH);
            Err(ResolveError::NoRoute { destination, source })
        }
        Err(error) => {
            *ask_again_at = Some(Instant::now() + NEXT_HOP_PAUSE);
            Err(error.into())
        }
    }
}

/// Rejects addresses that no route can serve.
fn check_addresses(destination: IpAddr, source: Option<IpAddr>) -> Result<(), ResolveError> {
    let broadcast = matches!(destination, IpAddr::V4(v4) if v4.is_broadcast());
    if destination.is_multicast() || destination.is_unspecified() || broadcast {
        return Err(ResolveError::NotUnicast(destination));
    }
    if destination.is_loopback() {
        return Err(ResolveError::Local(destination));
    }
    match source {
        Some(source) if source.is_ipv4() != destination.is_ipv4() => {
            Err(ResolveError::Family(source, destination))
        }
        _ => Ok(()),
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(v6) => Ipv6Addr::is_unicast_link_local(&v6),
    }
}
