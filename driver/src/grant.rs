//! [`Grant`]: a device on an interface that the helper `xwarpd` shares.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::xdp::SocketAddrXdpFlags;
use xwarp_control::{
    Choice, DEFAULT_SOCKET, Description, Device, Event as HelpersEvent, Reason, Refusal, Reply, Request,
    SOCKET_VARIABLE,
};
use xwarp_leg::message::receive_message;

use crate::config::{Attributes, DriverConfig, ModePreference, Origin};
use crate::deadline::Deadline;
use crate::error::OpenError;
use crate::helper::{CallError, Helper, PATIENCE, unexpected};
use crate::netlink::monitor::Event;
use crate::state::State;
use crate::sys::{Rings, Sizes};

/// Largest number of events that are read at a time.
const MAX_EVENTS: usize = 256;

/// Why no device was granted.
#[derive(Debug)]
pub(crate) enum Unshared {
    /// No process listens on the helper's socket, or this process may not connect.
    NoHelper(PathBuf, io::Error),
    /// The helper does not share the interface.
    NotServed(Refusal),
    Failed(OpenError),
}

impl Unshared {
    /// Whether the interface may still be opened by this process itself.
    pub(crate) fn leaves_interface(&self) -> bool {
        !matches!(self, Self::Failed(_))
    }

    pub(crate) fn into_error(self) -> OpenError {
        match self {
            Self::NoHelper(socket, source) if source.kind() == io::ErrorKind::PermissionDenied => {
                match group_of(&socket) {
                    Some(group) => OpenError::NotInGroup { socket, group },
                    None => OpenError::Excluded { socket },
                }
            }
            Self::NoHelper(socket, source) => OpenError::NoHelper { socket, source },
            Self::NotServed(refusal) => OpenError::Refused(refusal.text),
            Self::Failed(error) => error,
        }
    }
}

/// The group that may use a socket, by its name in /etc/group or else by its number; `None` if that is no group, or root's.
fn group_of(path: &Path) -> Option<String> {
    let found = fs::metadata(path).ok()?;
    if found.mode() & 0o020 == 0 || found.gid() == 0 {
        return None;
    }
    let number = found.gid().to_string();
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    let name = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1) == Some(&number)).then(|| name.to_owned())
    });
    Some(name.unwrap_or(number))
}

/// Whether the settings need rights that only the owner of an interface has.
pub(crate) fn wants_owner(config: &DriverConfig) -> bool {
    config.mode != ModePreference::Probe
        || config.vlan.is_some()
        || config.service_vlan.is_some()
        || config.replace_program
}

/// Whether the helper has ended in the middle of an attempt. Another one may have taken its place.
fn is_lost(error: &Unshared) -> bool {
    let Unshared::Failed(OpenError::System { source, .. }) = error else { return false };
    matches!(source.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Repeats an attempt, from connecting on, whose helper ends in the middle of it, while there is a helper.
fn again<T>(attempt: impl Fn() -> Result<T, Unshared>) -> Result<T, Unshared> {
    let deadline = Deadline::after(PATIENCE);
    let mut lost = None;
    loop {
        match (attempt(), lost) {
            (Err(error), _) if is_lost(&error) && !deadline.passed() => lost = Some(error),
            (Err(Unshared::NoHelper(..)), Some(lost)) => return Err(lost),
            (outcome, _) => return outcome,
        }
        thread::sleep(RESTART_PAUSE);
    }
}

/// The connection to the helper that granted a device, and the state of the interface as the helper reports it.
pub(crate) struct Grant {
    helper: Arc<Helper>,
    events: OwnedFd,
    pub state: State,
    /// The reason, if the helper has taken the device away.
    pub ended: Option<String>,
    /// The addresses that a new helper has named so far.
    repeated: Option<BTreeSet<IpAddr>>,
}

impl fmt::Debug for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grant").field("state", &self.state).finish_non_exhaustive()
    }
}

/// How long a user waits who has opened and closed devices faster than the helper removes them, until it asks again.
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a helper is tried again that has ended.
const RESTART_PAUSE: Duration = Duration::from_millis(50);

/// Opens a device; waits while former devices of this user are still being removed.
fn open_in_time(helper: &Helper, request: &Request) -> Result<(Reply, Vec<OwnedFd>), CallError> {
    let deadline = Deadline::after(PATIENCE);
    loop {
        match helper.exchange(request.clone(), None) {
            Err(CallError::Refused(refusal)) if refusal.reason == Reason::Rate && !deadline.passed() => {
                thread::sleep(REMOVAL_PAUSE);
            }
            answer => return answer,
        }
    }
}

impl Grant {
    /// Asks the helper for a device.
    pub(crate) fn open(name: &str, config: &DriverConfig) -> Result<(Self, Rings, Sizes), Unshared> {
        again(|| Self::open_once(name, config))
    }

    fn open_once(name: &str, config: &DriverConfig) -> Result<(Self, Rings, Sizes), Unshared> {
        let path = socket_path(config);
        let helper = Helper::connect(&path).map_err(|source| Unshared::NoHelper(path, source))?;
        helper.greet().map_err(refused)?;
        let system = |doing| move |source| Unshared::Failed(OpenError::System { doing, source });
        let mut sizes = Sizes::granted(config.sizes(), false);
        let interface = match name.parse::<IpAddr>() {
            Ok(address) => Choice::Address(address),
            Err(_) => Choice::Name(name.into()),
        };
        let request = Request::Open { interface, sizes: config.sizes() };
        let (reply, descriptors) = open_in_time(&helper, &request).map_err(refused)?;
        let Reply::Opened(device) = reply else { return Err(refused(unexpected(&reply))) };
        let Ok([socket, events]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            let source = io::Error::new(io::ErrorKind::InvalidData, "xwarpd passed no sockets");
            return Err(system("opening through xwarpd")(source));
        };
        sizes.multi_buffer = device.multi_buffer;
        let register = |memory: BorrowedFd<'_>| match helper.exchange(Request::Register, Some(memory)) {
            Ok((Reply::Registered, _)) => Ok(()),
            Ok((other, _)) => Err(unexpected(&other).into()),
            Err(error) => Err(error.into()),
        };
        let mut rings =
            Rings::granted(socket, sizes, register).map_err(system("registering frame memory"))?;
        let flags = SocketAddrXdpFlags::XDP_COPY | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        rings.bind(device.socket_index, sizes, flags).map_err(system("binding the socket of xwarpd"))?;
        let state = state_of(device);
        Ok((Self { helper: Arc::new(helper), events, state, ended: None, repeated: None }, rings, sizes))
    }

    pub(crate) fn helper(&self) -> Arc<Helper> {
        Arc::clone(&self.helper)
    }

    /// Readable when [`events`](Self::events) has something to report, also the end of the helper: the AF_XDP socket reports
    /// nothing when its interface is gone.
    pub(crate) fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Reads the events that the helper has sent, without waiting, and applies them.
    pub(crate) fn events(&mut self, mut notify: impl FnMut(Event)) {
        for _ in 0..MAX_EVENTS {
            if self.state.removed {
                return;
            }
            let event = match receive_message(self.events.as_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => self.ended("xwarpd has ended"),
                Ok((bytes, _)) => match HelpersEvent::decode(&bytes) {
                    Ok(HelpersEvent::Revoked { text }) => self.ended(&text),
                    Ok(event) => {
                        self.repeats(&event, &mut notify);
                        let Some(event) = event_of(event) else { continue };
                        event
                    }
                    Err(error) => self.ended(&error.to_string()),
                },
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => continue,
                Err(errno) => self.ended(&errno.to_string()),
            };
            if self.state.follow(&event) {
                notify(event);
            }
        }
    }

    /// Follows a new helper, which repeats the state of the interface.
    fn repeats(&mut self, event: &HelpersEvent, notify: &mut impl FnMut(Event)) {
        match (event, &mut self.repeated) {
            (HelpersEvent::Restarted, repeated) => *repeated = Some(BTreeSet::new()),
            (HelpersEvent::AddressAdded(address), Some(repeated)) => drop(repeated.insert(*address)),
            (HelpersEvent::Routes, repeated) => {
                let Some(repeated) = repeated.take() else { return };
                let is_gone = |address: &&IpAddr| !repeated.contains(address);
                let gone: Vec<IpAddr> = self.state.addresses.iter().filter(is_gone).copied().collect();
                for event in gone.into_iter().map(Event::AddressRemoved) {
                    self.state.follow(&event);
                    notify(event);
                }
            }
            _ => {}
        }
    }

    /// The event for the end of the device.
    fn ended(&mut self, reason: &str) -> Event {
        tracing::error!(interface = self.state.attributes.name, reason, "xwarpd took the device away");
        self.ended = Some(reason.to_owned());
        Event::LinkRemoved
    }
}

/// Asks the helper for the state of its interfaces.
pub(crate) fn describe(config: &DriverConfig) -> Result<Vec<Description>, Unshared> {
    again(|| describe_once(config))
}

fn describe_once(config: &DriverConfig) -> Result<Vec<Description>, Unshared> {
    let path = socket_path(config);
    let helper = Helper::connect(&path).map_err(|source| Unshared::NoHelper(path, source))?;
    helper.greet().map_err(refused)?;
    let mut all = Vec::new();
    for number in 0.. {
        match helper.call(Request::Describe { number }, PATIENCE).map_err(refused)? {
            Reply::Described(description) => {
                let last = number + 1 >= description.interfaces;
                all.push(description);
                if last {
                    break;
                }
            }
            other => return Err(refused(unexpected(&other))),
        }
    }
    Ok(all)
}

fn socket_path(config: &DriverConfig) -> PathBuf {
    let named = || std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from);
    config.helper.clone().or_else(named).unwrap_or_else(|| DEFAULT_SOCKET.into())
}

fn refused(error: CallError) -> Unshared {
    match error {
        CallError::Refused(refusal) if refusal.reason == Reason::NotServed => Unshared::NotServed(refusal),
        CallError::Refused(refusal) => Unshared::Failed(OpenError::Refused(refusal.text)),
        other => {
            Unshared::Failed(OpenError::System { doing: "opening through xwarpd", source: other.into() })
        }
    }
}

fn state_of(device: Device) -> State {
    let attributes = Attributes {
        origin: Origin::Granted,
        name: device.name,
        carrier: device.carrier,
        index: device.index,
        mac: device.mac,
        mtu: device.mtu,
        path_mtu: device.path_mtu,
        largest_mtu: device.largest_mtu,
        up: device.up,
        mode: device.hook.into(),
        queues: 1,
        vlans: device.vlans,
        program_id: device.program_id,
    };
    State { attributes, addresses: device.addresses, elsewhere: Vec::new(), removed: false }
}

/// The event for the device; `None` if it concerns only the messages that follow.
fn event_of(event: HelpersEvent) -> Option<Event> {
    Some(match event {
        HelpersEvent::AddressAdded(address) => Event::AddressAdded(address),
        HelpersEvent::AddressRemoved(address) => Event::AddressRemoved(address),
        HelpersEvent::LinkState { up } => Event::LinkState { up },
        HelpersEvent::Mtu(mtu) => Event::Mtu(mtu),
        HelpersEvent::Mac(mac) => Event::Mac(mac),
        HelpersEvent::LinkRemoved | HelpersEvent::Revoked { .. } => Event::LinkRemoved,
        HelpersEvent::Neighbour { address, mac } => Event::Neighbour { address, mac: Some(mac) },
        HelpersEvent::Routes => Event::Routes,
        HelpersEvent::Restarted => return None,
    })
}
