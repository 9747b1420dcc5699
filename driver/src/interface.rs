//! [`Interface`]: an open network interface, its attributes, counters and events.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;
use xwarp_prog::{ProgramConfig, ProgramCounters, SteeringProgram};
use xwarp_tcp::link::QueueId;
use xwarp_tcp::wire::{Flow, Path, VlanTags};

use crate::config::{Attributes, Counters, DriverConfig};
use crate::error::{OpenError, ResolveError};
use crate::frames::FrameCensus;
use crate::kick::{Kicker, Kicks};
use crate::netlink::Netlink;
use crate::netlink::link::Link;
use crate::netlink::monitor::{Change, Event, Monitor};
use crate::open;
use crate::resolver::{Facts, Resolver};
use crate::sys::{Rings, Sizes};

/// `EtherType` of an 802.1Q tag, the inner or only one.
const TPID_CUSTOMER: u16 = 0x8100;
/// `EtherType` of an 802.1ad tag, the outer of two.
const TPID_SERVICE: u16 = 0x88a8;
const VLAN_TAG_BYTES: u32 = 4;

/// An open interface: the steering program is attached, every receive queue has a socket.
///
/// Dropping it detaches the program and frees the queues; the kernel does the same when the process dies.
#[derive(Debug)]
pub struct Interface {
    // Dropped first, so that frames go to the kernel again before the sockets close.
    pub(crate) program: SteeringProgram,
    pub(crate) rings: Rings,
    pub(crate) sizes: Sizes,
    pub(crate) counters: Counters,
    pub(crate) kicks: Kicks,
    /// Frames were submitted since the last flush.
    pub(crate) sent_since_flush: bool,
    /// The queue from which the next batch is received first.
    pub(crate) next_queue: u16,
    monitor: Monitor,
    netlink: Netlink,
    attributes: Attributes,
    addresses: Vec<std::net::IpAddr>,
    /// [`Event::LinkRemoved`] was reported.
    removed: bool,
}

impl Interface {
    /// Opens interface `name` of the calling thread's network namespace.
    ///
    /// # Errors
    /// See [`OpenError`]; each error text says what to do.
    pub fn open(name: &str, config: &DriverConfig) -> Result<Self, OpenError> {
        open::check(config)?;
        let system = |doing| move |source| OpenError::System { doing, source };
        let mut netlink = Netlink::open().map_err(system("opening a netlink socket"))?;
        let found = open::find(&mut netlink, name, config)?;
        let sizes = open::sizes(&found, config)?;
        let mut program =
            open::load_program(&ProgramConfig { vlans: &found.vlans, multi_buffer: sizes.multi_buffer })?;
        // Listening starts before the addresses are read, so no change in between is missed.
        let monitor = Monitor::open(found.link.index).map_err(system("listening for address changes"))?;
        let (mode, sizes, rings) = open::bring_up(&mut program, &found, sizes, config)?;
        let kicks = Kicks::new(&rings).map_err(system("duplicating sockets"))?;
        let largest_mtu = open::largest_mtu(mode, &sizes);
        let attributes = Attributes {
            name: name.into(),
            carrier: found.carrier.name,
            index: found.link.index,
            mac: found.link.mac,
            mtu: found.link.mtu,
            path_mtu: path_mtu(found.link.mtu, largest_mtu, &found.vlans),
            largest_mtu,
            up: found.link.up,
            mode,
            queues: rings.queues(),
            vlans: found.vlans,
            program_id: program.id(),
        };
        tracing::info!(interface = name, %mode, queues = attributes.queues, mtu = attributes.mtu, "opened");
        let mut interface = Self {
            program,
            rings,
            sizes,
            counters: Counters::default(),
            kicks,
            sent_since_flush: false,
            next_queue: 0,
            monitor,
            netlink,
            attributes,
            addresses: Vec::new(),
            removed: false,
        };
        interface.reload_addresses(|_| ()).map_err(system("reading addresses"))?;
        Ok(interface)
    }

    /// The current attributes.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Its addresses, up to date as of the last call of [`events`](Self::events).
    pub fn addresses(&self) -> &[std::net::IpAddr] {
        &self.addresses
    }

    /// Counters since it was opened, including the kernel's. Takes a few system calls: do not call it for every
    /// frame.
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters;
        self.kicks.count(&mut counters);
        for queue in 0..self.rings.queues() {
            let Some(statistics) =
                self.rings.socket(queue).and_then(|socket| sockopt::xdp_statistics(socket).ok())
            else {
                continue;
            };
            counters.kernel_rx_dropped += statistics.rx_dropped;
            counters.kernel_rx_ring_full += statistics.rx_ring_full.unwrap_or(0);
            counters.kernel_fill_ring_empty += statistics.rx_fill_ring_empty_descs.unwrap_or(0);
            counters.kernel_rx_invalid += statistics.rx_invalid_descs;
            counters.kernel_tx_invalid += statistics.tx_invalid_descs;
        }
        counters
    }

    /// Counters of the steering program, over all CPUs. Takes a few system calls.
    pub fn program_counters(&self) -> ProgramCounters {
        self.program.counters().unwrap_or_default()
    }

    /// Number of chunks in each place. Examines every chunk: for tests and diagnosis.
    pub fn frame_census(&self) -> FrameCensus {
        self.rings.census()
    }

    /// The sockets of all queues: readable when a frame has come in.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        (0..self.rings.queues()).filter_map(|queue| self.rings.socket(queue))
    }

    /// Takes over the kicks: from now on [`flush`](xwarp_tcp::link::Link::flush) only requests them, and the caller calls
    /// [`Kick::kick`](xwarp_tcp::link::Kick::kick) after each.
    pub fn kicker(&mut self) -> Kicker {
        self.kicks.hand_over()
    }

    /// Frames that wait on transmit rings because the kernel did not take them (its send buffer or the path's queue
    /// was full). While there are any, call [`flush`](xwarp_tcp::link::Link::flush) again soon: no descriptor signals
    /// room.
    pub fn unsent(&mut self) -> usize {
        let ring = self.sizes.transmit_ring;
        (0..self.rings.queues()).map(|queue| self.rings.transmit_pending(queue, ring) as usize).sum()
    }

    /// Readable when [`events`](Self::events) has changes to report.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }

    /// Reads the changes that the kernel announced since the last call, without waiting, and applies them:
    /// attributes are up to date, and wildcard listeners answer on new addresses.
    ///
    /// # Errors
    /// Reading from the netlink socket failed.
    pub fn events(&mut self, mut tell: impl FnMut(Event)) -> io::Result<()> {
        let mut changes = Vec::new();
        self.monitor.read(|change| changes.push(change))?;
        for change in changes {
            match change {
                Change::Link(link) => self.follow_link(&link, &mut tell),
                Change::Other(Event::Overrun) => {
                    tell(Event::Overrun);
                    match self.netlink.link(self.attributes.index) {
                        Ok(link) => self.follow_link(&link, &mut tell),
                        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                            if self.follow(&Event::LinkRemoved) {
                                tell(Event::LinkRemoved);
                            }
                        }
                        Err(error) => return Err(error),
                    }
                    self.reload_addresses(&mut tell)?;
                }
                // A removed interface loses its addresses first; only the removal is reported.
                Change::Other(Event::AddressRemoved(_)) if self.link_is_gone() => {
                    if self.follow(&Event::LinkRemoved) {
                        tell(Event::LinkRemoved);
                    }
                }
                Change::Other(event) => {
                    if self.follow(&event) {
                        tell(event);
                    }
                }
            }
        }
        Ok(())
    }

    /// A resolver for this interface; see [`Resolver::follow`].
    pub fn resolver(&self) -> io::Result<Resolver> {
        Resolver::new(self.facts(), &self.attributes)
    }

    /// Waits for the path of a connection, at most `limit`; see [`Resolver::resolve`].
    ///
    /// # Errors
    /// Any of [`ResolveError`].
    pub fn resolve(&self, flow: Flow, limit: Duration) -> Result<Path, ResolveError> {
        self.resolver()?.resolve(flow, limit)
    }

    /// The socket of a queue, for the [`Link`](xwarp_tcp::link::Link) half.
    pub(crate) fn socket(&self, queue: QueueId) -> Option<BorrowedFd<'_>> {
        self.rings.socket(queue.0)
    }

    fn facts(&self) -> Facts {
        Facts {
            name: self.attributes.name.clone(),
            index: self.attributes.index,
            vlan: vlan_tags(&self.attributes.vlans),
            queues: self.attributes.queues,
        }
    }

    fn link_is_gone(&mut self) -> bool {
        let link = self.netlink.link(self.attributes.index);
        link.is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
    }

    fn follow_link(&mut self, link: &Link, tell: &mut impl FnMut(Event)) {
        let attributes = &mut self.attributes;
        if link.up != attributes.up {
            attributes.up = link.up;
            tell(Event::LinkState { up: link.up });
        }
        if link.mtu != attributes.mtu {
            attributes.mtu = link.mtu;
            attributes.path_mtu = path_mtu(link.mtu, attributes.largest_mtu, &attributes.vlans);
            tell(Event::Mtu(attributes.path_mtu));
        }
        if link.mac != attributes.mac {
            attributes.mac = link.mac;
            tell(Event::Mac(link.mac));
        }
    }

    /// Updates the attributes, the list of addresses and that of the steering program. Returns false if the event
    /// announces nothing new.
    fn follow(&mut self, event: &Event) -> bool {
        match event {
            Event::AddressAdded(address) if self.addresses.contains(address) => return false,
            Event::AddressAdded(address) => {
                self.addresses.push(*address);
                if let Err(error) = self.program.add_address(*address) {
                    tracing::warn!(interface = self.attributes.name, %address, %error, "wildcard listeners miss an address");
                }
            }
            Event::AddressRemoved(address) => {
                self.addresses.retain(|a| a != address);
                self.program.remove_address(*address);
            }
            Event::LinkRemoved => {
                self.attributes.up = false;
                return !std::mem::replace(&mut self.removed, true);
            }
            _ => {}
        }
        true
    }

    fn reload_addresses(&mut self, mut tell: impl FnMut(Event)) -> io::Result<()> {
        let now = self.netlink.addresses(self.attributes.index)?;
        let gone: Vec<_> = self.addresses.iter().filter(|a| !now.contains(a)).copied().collect();
        let added = now.into_iter().map(Event::AddressAdded);
        for event in gone.into_iter().map(Event::AddressRemoved).chain(added) {
            if self.follow(&event) {
                tell(event);
            }
        }
        Ok(())
    }
}

/// Devices let frames exceed their MTU by one VLAN tag; the room for a second one comes from the packet.
fn path_mtu(mtu: u32, largest: u16, vlans: &[u16]) -> u16 {
    let second_tag = if vlans.len() > 1 { VLAN_TAG_BYTES } else { 0 };
    mtu.saturating_sub(second_tag).min(u32::from(largest)) as u16
}

fn vlan_tags(ids: &[u16]) -> VlanTags {
    match *ids {
        [outer, inner, ..] => VlanTags([Some((TPID_SERVICE, outer)), Some((TPID_CUSTOMER, inner))]),
        [only] => VlanTags([Some((TPID_CUSTOMER, only)), None]),
        [] => VlanTags::default(),
    }
}
