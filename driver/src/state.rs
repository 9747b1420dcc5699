//! [`State`]: the attributes and addresses of an open interface, which follow its events; [`Watch`]: the events of the
//! kernel.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use xwarp_prog::{Addresses, ProgramError};
use xwarp_tcp::wire::VlanTags;

use crate::config::Attributes;
use crate::netlink::Netlink;
use crate::netlink::link::KernelLink;
use crate::netlink::monitor::{Change, Event, Monitor};
use crate::resolver::Facts;
use crate::sys;

/// `EtherType` of an 802.1Q tag, the inner or only one.
const TPID_CUSTOMER: u16 = 0x8100;
/// `EtherType` of an 802.1ad tag, the outer of two.
const TPID_SERVICE: u16 = 0x88a8;
const VLAN_TAG_BYTES: u32 = 4;

/// The state of an open interface, as of the last event.
#[derive(Debug)]
pub(crate) struct State {
    pub attributes: Attributes,
    pub addresses: Vec<IpAddr>,
    /// Addresses of the host that are not the interface's, on which its frames are received too.
    pub elsewhere: Vec<IpAddr>,
    /// [`Event::LinkRemoved`] was reported.
    pub removed: bool,
}

impl State {
    /// Applies an event. Returns false if the event announces nothing new.
    pub(crate) fn follow(&mut self, event: &Event) -> bool {
        let Self { attributes, addresses, elsewhere, removed } = self;
        match event {
            Event::AddressAdded(address) if addresses.contains(address) => return false,
            Event::AddressAdded(address) => {
                elsewhere.retain(|a| a != address);
                addresses.push(*address);
            }
            Event::LocalAdded(address) if addresses.contains(address) || elsewhere.contains(address) => {
                return false;
            }
            Event::LocalAdded(address) => elsewhere.push(*address),
            Event::AddressRemoved(address) => {
                addresses.retain(|a| a != address);
                elsewhere.retain(|a| a != address);
            }
            Event::LinkState { up } => attributes.up = *up,
            Event::Mtu(mtu) => attributes.path_mtu = *mtu,
            Event::Mac(mac) => attributes.mac = *mac,
            Event::LinkRemoved => {
                attributes.up = false;
                return !std::mem::replace(removed, true);
            }
            _ => {}
        }
        true
    }

    /// Whether frames of the interface are received on an address.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address) || self.elsewhere.contains(&address)
    }

    /// The constant attributes that paths depend on.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            name: self.attributes.name.clone(),
            index: self.attributes.index,
            vlan: vlan_tags(&self.attributes.vlans),
            queues: self.attributes.queues,
        }
    }
}

/// Interval between two checks of what the kernel does not announce: whether the program is attached, and the number of queues.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// Reads the changes of an interface that the kernel announces.
#[derive(Debug)]
pub(crate) struct Watch {
    monitor: Monitor,
    netlink: Netlink,
    pub state: State,
    /// Why the interface was given up, though it is there.
    ended: Option<String>,
    check_at: Instant,
    /// Addresses that the kernel has removed, and when that is reported unless they come back; later, if the carrier is away.
    leaving: BTreeMap<IpAddr, Instant>,
    /// [`DriverConfig::address_limit`](crate::DriverConfig::address_limit).
    address_limit: Duration,
    /// The receive queues at the last check.
    queues: Option<u32>,
    /// Expires at the earliest of these times.
    timer: OwnedFd,
    /// Readable when the monitor, the timer or a socket of a queue that was added is.
    either: OwnedFd,
}

impl Watch {
    /// Starts with `attributes`. `monitor` was opened before they were read, so that no change in between is missed.
    /// Reports the addresses to `notify`.
    pub(crate) fn new(
        monitor: Monitor,
        netlink: Netlink,
        attributes: Attributes,
        address_limit: Duration,
        mut notify: impl FnMut(Event),
    ) -> io::Result<Self> {
        let (addresses, elsewhere) = (Vec::new(), Vec::new());
        let state = State { attributes, addresses, elsewhere, removed: false };
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in monitor.fds().chain([timer.as_fd()]) {
            epoll::add(&either, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let mut watch = Self {
            monitor,
            netlink,
            state,
            ended: None,
            check_at: Instant::now() + CHECK_EVERY,
            leaving: BTreeMap::new(),
            address_limit,
            queues: None,
            timer,
            either,
        };
        watch.queues = watch.active_queues();
        watch.reload_addresses(&mut notify)?;
        watch.set_timer()?;
        Ok(watch)
    }

    /// Readable when [`events`](Self::events) has changes to report.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }

    /// Reads the changes that the kernel announced since the last call, without waiting, and applies them to the state.
    pub(crate) fn events(&mut self, mut notify: impl FnMut(Event)) -> io::Result<()> {
        let mut changes = Vec::new();
        self.monitor.read(|change| changes.push(change))?;
        for change in changes {
            match change {
                Change::Link(link) => self.follow_link(&link, &mut notify),
                Change::Other(Event::Overrun) => {
                    notify(Event::Overrun);
                    match self.netlink.link(self.state.attributes.index) {
                        Ok(link) => self.follow_link(&link, &mut notify),
                        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                            self.report(Event::LinkRemoved, &mut notify);
                        }
                        Err(error) => return Err(error),
                    }
                    self.reload_addresses(&mut notify)?;
                }
                // A removed interface loses its addresses first; only the removal is reported.
                Change::Other(Event::AddressRemoved(_)) if self.link_is_gone() => {
                    self.report(Event::LinkRemoved, &mut notify);
                }
                Change::Other(Event::AddressRemoved(address)) => {
                    self.leaves(address);
                    // The kernel has no route from the address any more: its connections hold their output.
                    self.report(Event::Routes, &mut notify);
                }
                Change::Other(event) => {
                    if let Event::AddressAdded(address) | Event::LocalAdded(address) = event
                        && self.leaving.remove(&address).is_some()
                    {
                        self.report(Event::Routes, &mut notify);
                    }
                    self.report(event, &mut notify);
                }
            }
        }
        self.report_left(&mut notify)
    }

    /// Notes that the kernel has removed an address.
    fn leaves(&mut self, address: IpAddr) {
        if self.state.has(address) {
            let at = later(self.address_limit);
            self.leaving.entry(address).or_insert(at);
        }
    }

    /// Reports the addresses that have been missing for too long, and sets the timer for the others.
    fn report_left(&mut self, notify: &mut impl FnMut(Event)) -> io::Result<()> {
        let now = Instant::now();
        if !self.state.attributes.up {
            // The kernel removes IPv6 addresses with the carrier, and they come back after it.
            self.leaving.values_mut().for_each(|at| *at = later(self.address_limit));
        }
        let due: Vec<IpAddr> =
            self.leaving.iter().filter(|(_, at)| **at <= now).map(|(address, _)| *address).collect();
        if !due.is_empty() {
            // An address may have been there with two prefixes, of which one was removed.
            let index = self.state.attributes.index;
            let mut there = self.netlink.addresses(index)?;
            there.extend(self.netlink.local_addresses(index)?);
            for address in due {
                self.leaving.remove(&address);
                if !there.contains(&address) {
                    self.report(Event::AddressRemoved(address), notify);
                }
            }
        }
        self.set_timer()
    }

    /// Sets the timer for what is due next.
    fn set_timer(&self) -> io::Result<()> {
        let next = self.leaving.values().copied().fold(self.check_at, Instant::min);
        // Zero would stop the timer.
        let left = next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let it_value = Timespec::try_from(left).unwrap_or_default();
        let setting = Itimerspec { it_interval: Timespec::default(), it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting)?;
        Ok(())
    }

    /// Whether what the kernel does not announce should be checked now; true once in [`CHECK_EVERY`].
    pub(crate) fn check_due(&mut self) -> bool {
        let now = Instant::now();
        if self.state.removed || now < self.check_at {
            return false;
        }
        self.check_at = now + CHECK_EVERY;
        self.set_timer().is_ok()
    }

    fn active_queues(&self) -> Option<u32> {
        sys::active_queues(self.any_socket(), &self.state.attributes.carrier).map(|counts| counts.receive)
    }

    /// Whether the interface has other receive queues than when this was asked before.
    pub(crate) fn queues_changed(&mut self) -> bool {
        let now = self.active_queues();
        now != std::mem::replace(&mut self.queues, now)
    }

    /// Gives the interface up, for a reason that users read.
    pub(crate) fn end(&mut self, reason: String, notify: &mut impl FnMut(Event)) {
        tracing::error!(interface = self.state.attributes.name, reason, "the device ends");
        self.ended = Some(reason);
        self.report(Event::LinkRemoved, notify);
    }

    /// Why the interface was given up, though it is there.
    pub(crate) fn ended(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Makes [`event_fd`](Self::event_fd) readable while `fd` is.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::add(&self.either, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?)
    }

    /// A socket of the interface's network namespace.
    pub(crate) fn any_socket(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }

    fn report(&mut self, event: Event, notify: &mut impl FnMut(Event)) {
        if self.state.follow(&event) {
            notify(event);
        }
    }

    /// Whether the interface is gone, or in another network namespace.
    pub(crate) fn link_is_gone(&mut self) -> bool {
        let link = self.netlink.link(self.state.attributes.index);
        link.is_err_and(|error| error.raw_os_error() == Some(libc::ENODEV))
    }

    fn follow_link(&mut self, link: &KernelLink, notify: &mut impl FnMut(Event)) {
        let attributes = &mut self.state.attributes;
        let path_mtu = path_mtu(link.mtu, attributes.largest_mtu, &attributes.vlans);
        let changes = [
            (link.up != attributes.up).then_some(Event::LinkState { up: link.up }),
            (link.mtu != attributes.mtu).then_some(Event::Mtu(path_mtu)),
            (link.mac != attributes.mac).then_some(Event::Mac(link.mac)),
        ];
        attributes.mtu = link.mtu;
        for event in changes.into_iter().flatten() {
            self.report(event, notify);
        }
    }

    fn reload_addresses(&mut self, notify: &mut impl FnMut(Event)) -> io::Result<()> {
        let index = self.state.attributes.index;
        let now = self.netlink.addresses(index)?;
        let local = self.netlink.local_addresses(index)?;
        let all = self.state.addresses.iter().chain(&self.state.elsewhere);
        let is_gone = |address: &&IpAddr| !now.contains(address) && !local.contains(address);
        let gone: Vec<_> = all.filter(is_gone).copied().collect();
        for address in gone {
            self.leaves(address);
        }
        for address in local.into_iter().filter(|address| !now.contains(address)) {
            self.leaving.remove(&address);
            self.report(Event::LocalAdded(address), notify);
        }
        for address in now {
            self.leaving.remove(&address);
            self.report(Event::AddressAdded(address), notify);
        }
        Ok(())
    }
}

/// The time after `limit`; far away, if there is no such time.
fn later(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now + Duration::from_secs(1 << 30))
}

/// Applies an event to the addresses that a program knows.
pub(crate) fn follow_addresses(known: &Addresses, event: &Event) -> Result<(), ProgramError> {
    match event {
        Event::AddressAdded(address) | Event::LocalAdded(address) => known.add(*address),
        Event::AddressRemoved(address) => {
            known.remove(*address);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Devices let frames exceed their MTU by one VLAN tag; the room for a second one comes from the packet.
pub(crate) fn path_mtu(mtu: u32, largest: u16, vlans: &[u16]) -> u16 {
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
