//! The helper's side: an interface that it shares ([`SharedInterface`]), and the sockets that it grants.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use xwarp_control::{Hook, Sizes as GrantedSizes};
use xwarp_prog::{
    AttachError, AttachMode, Attached, ProgramConfig, ProgramError, Relay, Switch, attached_to, detach,
    interface_of,
};

use crate::config::{Attributes, DriverConfig, FromClients, Mode, ModePreference, SINGLE_CHUNK_MTU, Sharing};
use crate::error::OpenError;
use crate::netlink::Netlink;
use crate::netlink::features;
use crate::netlink::monitor::{Event, Monitor};
use crate::open::{self, Found};
use crate::resolver::Resolver;
use crate::state::{Watch, follow_addresses};
use crate::sys::{self, Sizes};
use crate::upkeep;

/// An interface whose frames the switch distributes among clients. Dropping it detaches the switch.
#[derive(Debug)]
pub struct SharedInterface {
    switch: Arc<Switch>,
    watch: Watch,
    hook: Hook,
    relay: Option<Relay>,
    multi_buffer: bool,
    takes_redirected: bool,
    /// The link of a former helper, until [`take_over`](Self::take_over).
    former: Option<Former>,
}

/// What a former helper has left of an interface that it shared.
#[derive(Debug)]
pub struct Remains {
    /// The link that keeps its program attached.
    pub link: OwnedFd,
    /// Frames may have several chunks.
    pub multi_buffer: bool,
    /// VLAN ids of frames, outermost first.
    pub vlans: Vec<u16>,
}

/// The link of a former helper, and the mode in which its program is attached.
#[derive(Debug)]
struct Former {
    link: OwnedFd,
    mode: AttachMode,
    carrier: u32,
}

impl Remains {
    /// The link, if the devices of the former helper can go on with it. Otherwise its program is detached.
    fn usable(self, found: &Found, config: &DriverConfig) -> Option<Former> {
        let carrier = found.carrier.index;
        let there = attached_to(carrier).ok().flatten();
        let is_there = interface_of(self.link.as_fd()) == Some(carrier);
        let mode = there.filter(|_| is_there && self.vlans == found.vlans).map(|there| there.mode);
        let wanted = |mode: &AttachMode| match config.mode {
            ModePreference::Probe => true,
            ModePreference::Force(wanted) => (wanted == Mode::Generic) == (*mode == AttachMode::Generic),
        };
        if let Some(mode) = mode.filter(wanted) {
            return Some(Former { link: self.link, mode, carrier });
        }
        // The keeper still holds a copy.
        let _ = detach(self.link.as_fd());
        None
    }
}

impl SharedInterface {
    /// Opens interface `name` of the calling thread's network namespace, natively or else in generic mode, unless
    /// `config` forces one of them. If the interface has a foreign XDP program, frames arrive through a relay that the
    /// caller creates: see [`relay_mtu`](Self::relay_mtu).
    ///
    /// `remains` returns what a former helper has left of the interface with this index. If that [can be
    /// used](Self::has_former), the former program stays attached until [`take_over`](Self::take_over).
    ///
    /// # Errors
    /// As [`Interface::open`](crate::Interface::open).
    pub fn open(
        name: &str,
        config: &DriverConfig,
        sharing: &Sharing,
        remains: impl FnOnce(u32) -> Option<Remains>,
    ) -> Result<Self, OpenError> {
        // Now, so that the first reserved port leaves no further descriptor in the helper.
        sys::prepare_for_forks();
        let system = |doing| move |source| OpenError::System { doing, source };
        let mut netlink = Netlink::open().map_err(system("opening a netlink socket"))?;
        let found = open::find(&mut netlink, name, config)?;
        let large = found.carrier.mtu > u32::from(SINGLE_CHUNK_MTU);
        let remains = remains(found.link.index);
        let multi_buffer = remains.as_ref().map_or(large, |remains| remains.multi_buffer);
        let former = remains.and_then(|remains| remains.usable(&found, config));
        let multi_buffer = if former.is_some() { multi_buffer } else { large };
        let program_config = ProgramConfig { vlans: &found.vlans, multi_buffer };
        let mut switch = Switch::load(&program_config).map_err(open::load_error)?;
        let failed = |error: ProgramError| OpenError::Program(error.to_string());
        switch.station().set(found.link.mac.0).map_err(failed)?;
        allow(&switch, sharing).map_err(failed)?;
        let monitor = Monitor::open(found.link.index).map_err(system("listening for address changes"))?;
        let hook = match &former {
            Some(former) => {
                switch.send_through(former.carrier).map_err(failed)?;
                if former.mode == AttachMode::Generic { Hook::Generic } else { Hook::Native }
            }
            None => attach(&mut switch, &found, config)?,
        };
        let takes_redirected = hook != Hook::Generic
            && match sharing.from_clients {
                FromClients::Native => true,
                FromClients::Generic => false,
                // A veth takes redirected frames only while its other end has a native XDP program or GRO, and announces the
                // feature only then. When that changes, it drops them silently.
                FromClients::Probe if found.carrier.veth => false,
                FromClients::Probe => {
                    features::takes_redirected(found.carrier.index, multi_buffer).unwrap_or(false)
                }
            };
        // The announced largest frame is that of a client with the default settings.
        let sizes = Sizes::granted(DriverConfig::default().sizes(), multi_buffer);
        let attributes = found.attributes(hook.into(), &sizes, switch.id());
        let limit = config.address_limit;
        let watch = Watch::new(monitor, netlink, attributes, limit, |event| follow(&switch, &event))
            .map_err(system("reading addresses"))?;
        Ok(Self {
            switch: Arc::new(switch),
            watch,
            hook,
            relay: None,
            multi_buffer,
            takes_redirected,
            former,
        })
    }

    /// Whether the devices of a former helper on this interface go on.
    pub fn has_former(&self) -> bool {
        self.former.is_some()
    }

    /// Replaces the program of the former helper, if there is one. The maps of the switch must be complete: from now on they
    /// decide about frames from the wire.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take_over(&mut self) -> Result<(), AttachError> {
        match self.former.take() {
            Some(Former { link, mode, carrier }) => self.switch.take_over(link, carrier, mode),
            None => Ok(()),
        }
    }

    /// The hook at which frames from the wire are taken.
    pub fn hook(&self) -> Hook {
        self.hook
    }

    /// The MTU of the relay, if this interface needs one. The relay is a veth pair from the interface's namespace to
    /// that of the clients' pairs; its far end runs the program of the switch ([`Switch::attach_behind_relay`]). It
    /// carries frames of any MTU that the interface may get.
    pub fn relay_mtu(&self) -> Option<u32> {
        let mtu = if self.multi_buffer { u16::MAX } else { SINGLE_CHUNK_MTU };
        (self.hook == Hook::TrafficControl).then_some(u32::from(mtu))
    }

    /// Hands frames for clients to the relay whose near end, in the calling thread's network namespace, has this name.
    ///
    /// # Errors
    /// As [`Relay::attach`]; the near end is missing.
    pub fn attach_relay(&mut self, near: &str) -> io::Result<()> {
        // Otherwise the kernel would assign an address and send router solicitations.
        if let Err(error) = fs::write(format!("/proc/sys/net/ipv6/conf/{near}/disable_ipv6"), "1") {
            tracing::debug!(near, %error, "IPv6 stays on at the relay");
        }
        let mut netlink = Netlink::open()?;
        let index = netlink.index_of(near)?;
        netlink.set_up(index)?;
        let carrier = netlink.index_of(&self.attributes().carrier)?;
        self.relay = Some(Relay::attach(&self.switch, carrier, index).map_err(io::Error::other)?);
        Ok(())
    }

    /// The programs and their maps.
    pub fn switch(&self) -> &Arc<Switch> {
        &self.switch
    }

    /// The current attributes.
    pub fn attributes(&self) -> &Attributes {
        &self.watch.state.attributes
    }

    /// Its addresses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.watch.state.addresses
    }

    /// Whether frames of the interface are received on an address: its own, or another one of the host.
    pub fn is_ours(&self, address: IpAddr) -> bool {
        self.watch.state.has(address)
    }

    /// Whether frames may have several chunks.
    pub fn multi_buffer(&self) -> bool {
        self.multi_buffer
    }

    /// Whether the network driver sends frames that native XDP redirects to it. Otherwise XDP on the near ends of clients must
    /// be generic, which makes a socket buffer of each frame.
    pub fn takes_redirected(&self) -> bool {
        self.takes_redirected
    }

    /// Readable when [`events`](Self::events) has changes to report.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.watch.event_fd()
    }

    /// Reads the changes that the kernel announced since the last call, without waiting, and applies them to the
    /// attributes and to the switch.
    ///
    /// # Errors
    /// Reading from the netlink socket failed.
    pub fn events(&mut self, mut notify: impl FnMut(Event)) -> io::Result<()> {
        let Self { switch, watch, relay, .. } = self;
        watch.events(|event| {
            follow(switch, &event);
            notify(event);
        })?;
        if watch.check_due() {
            let name = watch.state.attributes.carrier.clone();
            let kept = relay.as_ref().map_or_else(|| switch.keep_attached(), Relay::keep_attached);
            if let Some(reason) = upkeep::attached(&name, kept, || watch.link_is_gone()) {
                watch.end(reason, &mut notify);
            } else if watch.queues_changed() {
                upkeep::covered(&name, switch.cover_queues());
            }
        }
        Ok(())
    }

    /// Why the interface was given up though it is there, after [`Event::LinkRemoved`]; text for users.
    pub fn ended(&self) -> Option<&str> {
        self.watch.ended()
    }

    /// A resolver for this interface.
    ///
    /// # Errors
    /// No netlink socket can be opened.
    pub fn resolver(&self) -> io::Result<Resolver> {
        Resolver::new(self.watch.state.facts(), self.attributes())
    }
}

/// Writes what clients may do to the maps of the switch, before it has clients.
fn allow(switch: &Switch, sharing: &Sharing) -> Result<(), ProgramError> {
    for prefix in &sharing.peers {
        switch.policy().allow_peers(prefix.network(), prefix.prefix_len())?;
    }
    sharing.bits_per_second.map_or(Ok(()), |rate| switch.policy().limit_rate(rate))
}

/// Attaches the switch in the first mode that works. If another program has the interface, only the clients' outgoing
/// frames pass directly.
fn attach(switch: &mut Switch, found: &Found, config: &DriverConfig) -> Result<Hook, OpenError> {
    let (name, index) = (&found.carrier.name, found.carrier.index);
    let modes: &[Mode] = match config.mode {
        ModePreference::Force(Mode::Generic) => &[Mode::Generic],
        ModePreference::Force(_) => &[Mode::Copy],
        ModePreference::Probe => &[Mode::Copy, Mode::Generic],
    };
    let mut refusal: io::Error = io::ErrorKind::Unsupported.into();
    for &mode in modes {
        let attach_mode = if mode == Mode::Generic { AttachMode::Generic } else { AttachMode::Native };
        match switch.attach(index, attach_mode) {
            Ok(()) if mode == Mode::Generic => return Ok(Hook::Generic),
            Ok(()) => return Ok(Hook::Native),
            Err(AttachError::Foreign(there)) => return behind(switch, found, there),
            Err(AttachError::System(source)) if open::is_permission(&source) => {
                return Err(OpenError::Permission { doing: "attaching the switch" });
            }
            Err(AttachError::System(source)) => refusal = source,
        }
    }
    Err(OpenError::XdpUnsupported { name: name.into(), source: refusal })
}

/// Leaves the interface to the program that is there, unless it is ours.
fn behind(switch: &Switch, found: &Found, there: Attached) -> Result<Hook, OpenError> {
    let interface = found.carrier.name.clone();
    let (program, id) = (there.name.clone(), there.id);
    match open::in_use(interface.clone(), there) {
        OpenError::ForeignProgram { .. } if found.vlans.is_empty() => {
            tracing::warn!(
                interface,
                program,
                id,
                "another XDP program has the interface: frames are taken behind it, by tc"
            );
            let sending = switch.send_through(found.carrier.index);
            sending.map_err(|error| OpenError::Program(error.to_string()))?;
            Ok(Hook::TrafficControl)
        }
        // The kernel takes VLAN tags out of frames before tc sees them.
        error => Err(error),
    }
}

/// Bytes of the frame memory that a client with these sizes registers.
pub fn memory_bytes(granted: GrantedSizes) -> u64 {
    Sizes::granted(granted, false).bytes()
}

/// An AF_XDP socket for a client, in the calling thread's network namespace, with a send buffer of `send_buffer_bytes`. It has
/// neither memory nor rings and is not bound: the client can bind it to any interface of that namespace, which therefore must
/// have no other one than the loopback and `far`, the far end of the client's pair.
///
/// # Errors
/// The kernel refuses.
pub fn client_socket(far: &str, send_buffer_bytes: usize) -> io::Result<OwnedFd> {
    // The client may register its memory with metadata, and have the kernel write a checksum to any place of a frame. Without
    // this, the device at the end of the frame's way would do it, after the switch has checked addresses and ports.
    let any = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::complete_checksums(any.as_fd(), far)?;
    let socket = sys::new_socket()?;
    sockopt::set_socket_send_buffer_size_force(socket.as_fd(), send_buffer_bytes)?;
    Ok(socket)
}

/// Registers `memory`, which a client with these sizes made, to that client's socket. It is not mapped here any more afterwards.
///
/// # Errors
/// The memory is not as announced, or the kernel refuses.
pub fn register_for(socket: BorrowedFd<'_>, memory: OwnedFd, granted: GrantedSizes) -> io::Result<()> {
    sys::register_for(socket, memory, memory_bytes(granted))
}

/// Keeps the switch's copy of the interface's attributes up to date.
fn follow(switch: &Switch, event: &Event) {
    let followed = match event {
        Event::Mac(mac) => switch.station().set(mac.0),
        _ => follow_addresses(switch.addresses(), event),
    };
    if let Err(error) = followed {
        tracing::warn!(%error, "the switch does not follow a change of the interface");
    }
}
