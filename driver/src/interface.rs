//! [`Interface`]: an open network interface, its attributes, counters and events.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

use rustix::net::sockopt;
use xwarp_leg::FrameCensus;
use xwarp_prog::{ProgramConfig, ProgramCounters, ProgramError, SteeringProgram};
use xwarp_tcp::link::QueueId;
use xwarp_tcp::wire::{Flow, Path};

use crate::config::{Attributes, DriverConfig, LinkCounters, Origin, OriginPreference};
use crate::error::{OpenError, ResolveError};
use crate::grant::{self, Grant, Unshared};
use crate::kick::{Kicker, Kicks};
use crate::lease::{Lease, lock};
use crate::netlink::monitor::{Event, Monitor};
use crate::netlink::{Netlink, features};
use crate::open;
use crate::reassembly::Reassembler;
use crate::resolver::Resolver;
use crate::rss::Arrivals;
use crate::state::{State, Watch, follow_addresses};
use crate::sys::{NotInherited, Rings, Sizes};

/// An open interface, whose frames to and from us pass through AF_XDP.
///
/// If this process owns the interface, the steering program is attached and every receive queue has a socket. Dropping
/// it (the last owner, if there are several) detaches the program and frees the queues; the kernel does the same when
/// the process dies. A granted interface has one queue, on a pair of virtual interfaces that the helper removes when
/// this is dropped or the process dies.
#[derive(Debug)]
pub struct Interface {
    // Dropped first, so that frames go to the kernel again before the sockets close.
    origin: From,
    pub(crate) rings: Rings,
    pub(crate) sizes: Sizes,
    pub(crate) counters: LinkCounters,
    pub(crate) kicks: Kicks,
    /// Frames were submitted since the last flush.
    pub(crate) sent_since_flush: bool,
    /// The queue from which the next batch is received first.
    pub(crate) next_queue: u16,
    arrivals: Option<Arrivals>,
    pub(crate) reassembler: Reassembler,
    /// The sockets of the queues with their duplicates. A child that kept them would keep the queues bound.
    not_inherited: Mutex<Vec<NotInherited>>,
}

/// The origin of an interface.
#[derive(Debug)]
enum From {
    Owned { lease: Lease, watch: Box<Watch> },
    Granted(Box<Grant>),
}

impl Interface {
    /// Opens the interface with this name or IP address in the calling thread's network namespace, or asks the helper for a
    /// device on its interface of this name or address: see [`DriverConfig::origin`].
    ///
    /// # Errors
    /// See [`OpenError`]; each error text names a remedy.
    pub fn open(name: &str, config: &DriverConfig) -> Result<Self, OpenError> {
        open::check(config)?;
        match config.origin {
            OriginPreference::Force(Origin::Owned) => Self::open_owned(name, config),
            OriginPreference::Force(Origin::Granted) => {
                Self::open_granted(name, config).map_err(Unshared::into_error)
            }
            OriginPreference::Probe if grant::wants_owner(config) => Self::open_owned(name, config),
            OriginPreference::Probe => match Self::open_granted(name, config) {
                Err(unshared) if unshared.leaves_interface() => {
                    let unshared = unshared.into_error();
                    tracing::debug!(interface = name, reason = %unshared, "not granted by a helper");
                    Self::open_owned(name, config).map_err(|error| match (error, unshared) {
                        // The error about the helper is more useful: it names what the user can change.
                        (
                            OpenError::Permission { .. }
                            | OpenError::NoSuchInterface { .. }
                            | OpenError::Shared { .. },
                            outside,
                        ) if outside.is_helper_there() => outside,
                        (error, _) => error,
                    })
                }
                granted => granted.map_err(Unshared::into_error),
            },
        }
    }

    fn open_granted(name: &str, config: &DriverConfig) -> Result<Self, Unshared> {
        let (grant, rings, sizes) = Grant::open(name, config)?;
        let attributes = &grant.state.attributes;
        tracing::info!(interface = attributes.name, mode = %attributes.mode, mtu = attributes.path_mtu, "opened through xwarpd");
        Self::new(From::Granted(Box::new(grant)), rings, sizes)
            .map_err(|source| Unshared::Failed(OpenError::System { doing: "duplicating sockets", source }))
    }

    fn open_owned(name: &str, config: &DriverConfig) -> Result<Self, OpenError> {
        let only = Self::open_several(name, 1, config)?.pop();
        only.ok_or_else(|| OpenError::Config("an interface without an owner".into()))
    }

    /// Opens the interface with this name or IP address for `count` owners in this process, of which each has every
    /// `count`-th queue, with sockets and frame memory of its own. Each owner may be used by another thread. Several
    /// owners may steer the same listening port; the owner of the queue on which a SYN arrives receives it, if it is one of
    /// them. Frames of a flow that arrive on a queue of another owner are handed over: see
    /// [`Link::hand_over`](xwarp_tcp::link::Link::hand_over).
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`OpenError::TooFewQueues`]. An interface of a helper has one owner.
    pub fn open_several(name: &str, count: u16, config: &DriverConfig) -> Result<Vec<Self>, OpenError> {
        open::check(config)?;
        if config.origin == OriginPreference::Force(Origin::Granted) {
            return Err(OpenError::Config(
                "a helper's device has one engine: open it once for each engine".into(),
            ));
        }
        let system = |doing| move |source| OpenError::System { doing, source };
        let mut netlink = Netlink::open().map_err(system("opening a netlink socket"))?;
        let found = open::find(&mut netlink, name, config)?;
        let sizes = open::sizes(&found, config)?;
        let too_few =
            || OpenError::TooFewQueues { name: name.into(), queues: sizes.transmit_queues, engines: count };
        let owners = sizes.split(count).ok_or_else(too_few)?;
        let program_config = ProgramConfig { vlans: &found.vlans, multi_buffer: sizes.multi_buffer };
        let mut program = SteeringProgram::load(&program_config).map_err(open::load_error)?;
        let failed = |error: ProgramError| OpenError::Program(error.to_string());
        program.station().set(found.link.mac.0).map_err(failed)?;
        // Listening starts before the addresses are read, so no change in between is missed.
        let listen = |_: &Sizes| Ok((Monitor::open(found.link.index)?, Netlink::open()?));
        let monitors: io::Result<Vec<_>> = owners.iter().map(listen).collect();
        let monitors = monitors.map_err(system("listening for address changes"))?;
        let (mode, rings) = open::bring_up(&mut program, &found, &owners, config)?;
        let id = program.id();
        let rss = (count > 1).then(|| features::rss(&found.carrier.name).ok()).flatten();
        let leases = Lease::split(program, count).map_err(system("making an eventfd"))?;
        let mut interfaces = Vec::with_capacity(leases.len());
        for ((lease, (sizes, rings)), (monitor, netlink)) in leases.into_iter().zip(rings).zip(monitors) {
            let attributes = found.clone().attributes(mode, &sizes, id);
            tracing::info!(
                interface = name, %mode, queues = attributes.queues, mtu = attributes.mtu,
                checksum_offload = rings.offloads_checksums(), "opened"
            );
            let limit = config.address_limit;
            let follow = |event| follow(lease.program(), &event);
            let watch = Watch::new(monitor, netlink, attributes, limit, follow)
                .map_err(system("reading addresses"))?;
            let arrivals =
                rss.clone().map(|rss| Arrivals { rss, first: sizes.first_queue, step: sizes.queue_step });
            let interface = Self::new(From::Owned { lease, watch: Box::new(watch) }, rings, sizes);
            let interface = interface.map_err(system("duplicating sockets"))?;
            interfaces.push(Self { arrivals, ..interface });
        }
        for lease in interfaces.iter().filter_map(Self::lease) {
            lease.program().give_up_replaced();
        }
        Ok(interfaces)
    }

    fn new(origin: From, rings: Rings, sizes: Sizes) -> io::Result<Self> {
        let kicks = Kicks::new(&rings)?;
        let sockets = (0..rings.queues()).filter_map(|queue| rings.socket(queue)).chain(kicks.descriptors());
        let not_inherited = Mutex::new(vec![NotInherited::new(sockets)]);
        let (counters, arrivals) = (LinkCounters::default(), None);
        Ok(Self {
            origin,
            rings,
            sizes,
            counters,
            kicks,
            sent_since_flush: false,
            next_queue: 0,
            arrivals,
            reassembler: Reassembler::default(),
            not_inherited,
        })
    }

    fn state(&self) -> &State {
        match &self.origin {
            From::Owned { watch, .. } => &watch.state,
            From::Granted(grant) => &grant.state,
        }
    }

    /// The lease of an owned interface.
    pub(crate) fn lease(&self) -> Option<&Lease> {
        match &self.origin {
            From::Owned { lease, .. } => Some(lease),
            From::Granted(_) => None,
        }
    }

    /// Readable while handed-over frames of other owners wait; `None` without other owners.
    pub(crate) fn handed_over_bell(&self) -> Option<BorrowedFd<'_>> {
        self.lease().and_then(Lease::bell)
    }

    /// Whether the helper has taken the device away or has ended, or somebody has taken the program away.
    pub(crate) fn revoked(&self) -> bool {
        match &self.origin {
            From::Granted(grant) => grant.state.removed,
            From::Owned { watch, .. } => watch.ended().is_some(),
        }
    }

    /// Why it no longer carries frames, after [`Event::LinkRemoved`]; text for users.
    pub fn removal(&self) -> String {
        let name = &self.attributes().name;
        match &self.origin {
            From::Granted(grant) if grant.ended.is_some() => {
                let reason = grant.ended.as_deref().unwrap_or_default();
                format!("the device on interface {name} is gone: {reason}")
            }
            From::Owned { watch, .. } if watch.ended().is_some() => {
                watch.ended().unwrap_or_default().to_owned()
            }
            _ => format!("the interface {name} was removed"),
        }
    }

    /// Which flows arrive on the queues of this owner; `None` for the only owner, and where the NIC does not tell. It is read when
    /// the interface is opened.
    pub fn arrivals(&self) -> Option<&Arrivals> {
        self.arrivals.as_ref()
    }

    /// The current attributes.
    pub fn attributes(&self) -> &Attributes {
        &self.state().attributes
    }

    /// Its addresses, up to date as of the last call of [`events`](Self::events).
    pub fn addresses(&self) -> &[IpAddr] {
        &self.state().addresses
    }

    /// Counters since it was opened, including the kernel's. Takes a few system calls: do not call it for every
    /// frame.
    pub fn counters(&self) -> LinkCounters {
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

    /// Counters of the steering program, over all CPUs and owners; none of a granted interface, nor of other owners than the first.
    /// Takes a few system calls.
    pub fn program_counters(&self) -> Option<ProgramCounters> {
        self.lease()
            .filter(|lease| lease.is_first())
            .map(|lease| lease.program().counters().unwrap_or_default())
    }

    /// Number of chunks in each place. Examines every chunk: for tests and diagnosis.
    pub fn frame_census(&self) -> FrameCensus {
        self.rings.census()
    }

    /// Descriptors of which one is readable when a frame has come in: the sockets of all queues, and with several owners the one
    /// for frames that the others hand over.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        (0..self.rings.queues()).filter_map(|queue| self.rings.socket(queue)).chain(self.handed_over_bell())
    }

    /// Duplicates of [`fds`](Self::fds) and [`event_fd`](Self::event_fd), to be polled without this.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn readiness(&self) -> io::Result<Vec<OwnedFd>> {
        let duplicates = self.fds().chain([self.event_fd()]).map(|fd| fd.try_clone_to_owned());
        let duplicates = duplicates.collect::<io::Result<Vec<_>>>()?;
        lock(&self.not_inherited).push(NotInherited::new(duplicates.iter().map(OwnedFd::as_fd)));
        Ok(duplicates)
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
        (0..self.rings.queues()).map(|queue| self.rings.transmit_pending(queue) as usize).sum()
    }

    /// Readable when [`events`](Self::events) has changes to report.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        match &self.origin {
            From::Owned { watch, .. } => watch.event_fd(),
            From::Granted(grant) => grant.event_fd(),
        }
    }

    /// Reads the changes that the kernel or the helper announced since the last call, without waiting, and applies them:
    /// attributes are up to date, and wildcard listeners answer on new addresses.
    ///
    /// # Errors
    /// Reading from the netlink socket failed.
    pub fn events(&mut self, mut notify: impl FnMut(Event)) -> io::Result<()> {
        match &mut self.origin {
            From::Owned { lease, watch } => watch.events(|event| {
                follow(lease.program(), &event);
                notify(event);
            })?,
            From::Granted(grant) => grant.events(&mut notify),
        }
        self.check(&mut notify);
        Ok(())
    }

    /// The parts of an owned interface that follow its changes.
    pub(crate) fn owned(&mut self) -> Option<(&Lease, &mut Watch)> {
        match &mut self.origin {
            From::Owned { lease, watch } => Some((lease, watch)),
            From::Granted(_) => None,
        }
    }

    /// Receives frames of a queue that was added, interface's number `number`: from now on the program steers them to its socket.
    pub(crate) fn serve(&mut self, queue: u16, number: u16) -> io::Result<()> {
        let Some(socket) = self.rings.socket(queue) else { return Ok(()) };
        lock(&self.not_inherited).push(NotInherited::new([socket]));
        if let From::Owned { lease, watch } = &mut self.origin {
            watch.add(socket)?;
            watch.state.attributes.queues = queue + 1;
            lease.program().add_socket(number, socket).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// A resolver for this interface; see [`Resolver::follow`].
    pub fn resolver(&self) -> io::Result<Resolver> {
        let State { attributes, .. } = self.state();
        match &self.origin {
            From::Owned { .. } => Resolver::new(self.state().facts(), attributes),
            From::Granted(grant) => Ok(Resolver::by_helper(self.state().facts(), attributes, grant.helper())),
        }
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
}

/// Keeps the addresses that the steering program knows up to date.
fn follow(program: &SteeringProgram, event: &Event) {
    let followed = match event {
        Event::Mac(mac) => program.station().set(mac.0),
        _ => follow_addresses(program.addresses(), event),
    };
    if let Err(error) = followed {
        tracing::warn!(%error, "the steering program does not follow a change of the interface");
    }
}
