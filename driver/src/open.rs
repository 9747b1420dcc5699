//! Opening an interface: from a name to bound queues, in the best mode that works.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;

use rustix::net::xdp::SocketAddrXdpFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use rustix::process::getppid;
use xwarp_prog::{AttachError, AttachMode, Attached, ProgramError, SteeringProgram, af_xdp_users};

use crate::config::{Attributes, DriverConfig, Mode, ModePreference, Origin, SINGLE_CHUNK_MTU};
use crate::deadline::Deadline;
use crate::error::OpenError;
use crate::netlink::Netlink;
use crate::netlink::link::KernelLink;
use crate::state::path_mtu;
use crate::sys::{self, CHUNK_CAPACITY, QueueCounts, Rings, Sizes};

/// Pause between two retries of a busy queue, or of frame memory.
const BUSY_RETRY_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// Longest wait for the end of a process that holds the interface and ends: one with much memory ends slowly.
const OWNER_EXIT: std::time::Duration = std::time::Duration::from_secs(3);
/// Longest wait for the parent of this process to end, because a program that becomes a daemon forks and the parent exits; or for
/// another thread of this process to close the interface.
const RELATIVE_EXIT: std::time::Duration = std::time::Duration::from_secs(1);
/// Interval between two checks whether the owner has ended.
const OWNER_POLL: std::time::Duration = std::time::Duration::from_millis(10);

/// Longest time for which registering frame memory is retried. A limit that is too low must not block an application that waits for
/// a busy queue without end.
const MEMORY_RETRY: std::time::Duration = std::time::Duration::from_millis(100);

/// The first kernel with every feature that the program needs: `bpf_xdp_load_bytes` and multi-buffer XDP came together.
pub const OLDEST_KERNEL: (u32, u32) = (5, 18);

/// Largest number of chunks of a frame in zero-copy mode. Network drivers support different numbers (netlink family
/// netdev, attribute xdp-zc-max-segs); a frame of 9216 bytes, the usual largest, needs three.
const ZERO_COPY_CHUNKS: usize = 3;

/// Bytes of an Ethernet header with two VLAN tags.
const MAX_ETHERNET_BYTES: usize = 22;

/// An interface that was found and checked.
#[derive(Clone)]
pub(crate) struct Found {
    pub link: KernelLink,
    /// The interface that carries the frames: the one below a VLAN interface.
    pub carrier: KernelLink,
    /// VLAN ids of our frames, outermost first.
    pub vlans: Vec<u16>,
}

impl Found {
    /// The attributes of the interface once it is open in `mode` with frames of these sizes.
    pub(crate) fn attributes(self, mode: Mode, sizes: &Sizes, program_id: u32) -> Attributes {
        let Self { link, carrier, vlans } = self;
        let largest_mtu = largest_mtu(mode, sizes);
        Attributes {
            origin: Origin::Owned,
            name: link.name,
            carrier: carrier.name,
            index: link.index,
            mac: link.mac,
            mtu: link.mtu,
            path_mtu: path_mtu(link.mtu, largest_mtu, &vlans),
            largest_mtu,
            up: link.up,
            mode,
            queues: sizes.queues,
            vlans,
            program_id,
        }
    }
}

/// Finds the interface with this name or address and, if it is a VLAN interface, its parent.
pub(crate) fn find(netlink: &mut Netlink, name: &str, config: &DriverConfig) -> Result<Found, OpenError> {
    let links =
        netlink.links().map_err(|source| OpenError::System { doing: "listing interfaces", source })?;
    let named = match name.parse::<IpAddr>() {
        Ok(address) => with_address(netlink, &links, address)?,
        Err(_) => links.iter().find(|link| link.name == name),
    };
    let Some(link) = named else {
        let present = links.iter().map(|link| link.name.clone()).collect();
        return Err(OpenError::NoSuchInterface { name: name.into(), present });
    };
    if !link.ethernet {
        return Err(OpenError::NotEthernet { name: name.into() });
    }
    let mut carrier = link;
    let mut vlans = Vec::new();
    while let Some((below, id)) = carrier.vlan {
        vlans.insert(0, id);
        carrier = links.iter().find(|link| link.index == below).ok_or_else(|| {
            OpenError::Config(format!("the interface below {} is in another network namespace", carrier.name))
        })?;
    }
    vlans.splice(0..0, config.service_vlan);
    vlans.extend(config.vlan);
    if vlans.len() > xwarp_prog::MAX_VLANS {
        return Err(OpenError::Config(format!(
            "{} VLAN tags; at most {} are possible",
            vlans.len(),
            xwarp_prog::MAX_VLANS
        )));
    }
    if let Some(id) = vlans.iter().find(|id| !(1..=4094).contains(*id)) {
        return Err(OpenError::Config(format!("{id} is not a VLAN id (1 to 4094)")));
    }
    Ok(Found { link: link.clone(), carrier: carrier.clone(), vlans })
}

/// The interface that has an address.
fn with_address<'a>(
    netlink: &mut Netlink,
    links: &'a [KernelLink],
    address: IpAddr,
) -> Result<Option<&'a KernelLink>, OpenError> {
    for link in links {
        let addresses = netlink.addresses(link.index);
        let addresses =
            addresses.map_err(|source| OpenError::System { doing: "reading addresses", source })?;
        if addresses.contains(&address) {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// The active queues and the size of their memory.
pub(crate) fn sizes(found: &Found, config: &DriverConfig) -> Result<Sizes, OpenError> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .map_err(|errno| OpenError::System { doing: "opening a socket", source: errno.into() })?;
    let carrier = &found.carrier;
    if !found.vlans.is_empty() && sys::strips_vlan_tags(socket.as_fd(), &carrier.name) {
        tracing::warn!(
            interface = carrier.name,
            "VLAN tags may be taken off before XDP sees them, and frames be missed: ethtool -K {} rxvlan off",
            carrier.name
        );
    }
    // For a driver that does not report its active queues, the number at creation counts.
    let unknown = QueueCounts { receive: carrier.receive_queues, transmit: carrier.transmit_queues };
    let counts = sys::active_queues(socket.as_fd(), &carrier.name).unwrap_or(unknown);
    let multi_buffer = carrier.mtu > u32::from(SINGLE_CHUNK_MTU);
    // Of other interfaces it is not known whether they find the headers of a frame that AF_XDP made.
    let offload_checksums = carrier.veth && sys::offloads_checksums(socket.as_fd(), &carrier.name);
    Ok(Sizes { offload_checksums, ..Sizes::new(counts, config.sizes(), multi_buffer) })
}

pub(crate) fn check(config: &DriverConfig) -> Result<(), OpenError> {
    if !config.ring_size.is_power_of_two() {
        return Err(OpenError::Config(format!(
            "ring_size is {}; it must be a power of two",
            config.ring_size
        )));
    }
    if config.receive_chunks == 0 || config.transmit_chunks == 0 {
        return Err(OpenError::Config("receive_chunks and transmit_chunks must not be 0".into()));
    }
    Ok(())
}

/// The error for programs that cannot be loaded.
pub(crate) fn load_error(error: ProgramError) -> OpenError {
    if error.is_permission() {
        return OpenError::Permission { doing: "loading the steering program" };
    }
    match kernel_release() {
        Some((release, version)) if version < OLDEST_KERNEL => {
            OpenError::KernelTooOld { release, missing: "bpf_xdp_load_bytes", needs: "5.18" }
        }
        _ => OpenError::Program(error.to_string()),
    }
}

pub(crate) fn kernel_release() -> Option<(String, (u32, u32))> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Some((release, (major, minor))),
        _ => None,
    }
}

/// The largest IP packet that frames of this mode and these sizes can carry, in bytes.
fn largest_mtu(mode: Mode, sizes: &Sizes) -> u16 {
    let chunks = match mode {
        Mode::ZeroCopy => sizes.frame_chunks().min(ZERO_COPY_CHUNKS),
        Mode::Copy | Mode::Generic => sizes.frame_chunks(),
    };
    if chunks == 1 {
        return SINGLE_CHUNK_MTU;
    }
    u16::try_from(chunks * CHUNK_CAPACITY - MAX_ETHERNET_BYTES).unwrap_or(u16::MAX)
}

/// The modes to try in turn, each with whether frames may have several chunks. A kernel before 6.6 does not support such
/// frames, nor does every network driver in zero-copy mode. `multi_buffer` says whether the MTU needs them.
///
/// Generic mode asks for them at every MTU, because a peer's kernel leaves segmentation to its veth, which has no hardware for
/// it. With them it is the first choice on a veth of one queue (`docs/decisions/0022-generic-mode-on-veth.md`); of several
/// queues, it would use the first one only.
fn attempts(preference: ModePreference, one_queue_veth: bool, multi_buffer: bool) -> Vec<(Mode, bool)> {
    use Mode::{Copy, Generic, ZeroCopy};
    let mut attempts = match preference {
        ModePreference::Force(mode) => vec![(mode, true), (mode, false)],
        ModePreference::Probe if one_queue_veth => {
            vec![(Generic, true), (Copy, true), (Copy, false), (Generic, false)]
        }
        ModePreference::Probe => [ZeroCopy, Copy, Generic].map(|mode| [(mode, true), (mode, false)]).concat(),
    };
    attempts.retain(|(mode, several)| !several || multi_buffer || *mode == Generic);
    attempts
}

/// Binds all queues and attaches the program, in the first mode that works. Returns the mode, and the rings and sizes
/// of each owner. Falls back to frames of one chunk when the kernel refuses longer ones.
///
/// The program comes last: it may have to replace another one, which must not be missing because frame memory is.
pub(crate) fn bring_up(
    program: &mut SteeringProgram,
    found: &Found,
    owners: &[Sizes],
    config: &DriverConfig,
) -> Result<(Mode, Vec<(Sizes, Rings)>), OpenError> {
    await_owner(&found.carrier, config)?;
    let mut refusal = None;
    let multi_buffer = owners.iter().any(|sizes| sizes.multi_buffer);
    let one_queue_veth = found.carrier.veth && matches!(owners, [sizes] if sizes.queues == 1);
    for (mode, multi_buffer) in attempts(config.mode, one_queue_veth, multi_buffer) {
        let bound = |sizes: &Sizes| {
            let sizes = Sizes { multi_buffer, ..*sizes };
            bind_queues(mode, program, found, sizes, config).map(|rings| (sizes, rings))
        };
        let rings: Result<Vec<_>, Refusal> = owners.iter().map(bound).collect();
        match rings.and_then(|rings| attach(program, &found.carrier, mode, config).map(|()| rings)) {
            Ok(rings) => return Ok((mode, rings)),
            Err(Refusal::Final(error)) => return Err(error),
            Err(Refusal::Mode(error)) => {
                tracing::debug!(interface = found.carrier.name, %mode, multi_buffer, %error, "mode refused");
                refusal = Some(error);
            }
        }
    }
    let name = found.carrier.name.clone();
    let source = refusal.unwrap_or_else(|| io::ErrorKind::Unsupported.into());
    Err(match config.mode {
        _ if source.raw_os_error() == Some(libc::ERANGE) => {
            OpenError::MtuTooLarge { name, mtu: found.carrier.mtu }
        }
        ModePreference::Force(mode) => OpenError::ModeUnsupported { name, mode, source },
        ModePreference::Probe => OpenError::XdpUnsupported { name, source },
    })
}

/// The error of one mode, and whether another mode may work.
enum Refusal {
    Mode(io::Error),
    Final(OpenError),
}

fn bind_queues(
    mode: Mode,
    program: &SteeringProgram,
    found: &Found,
    sizes: Sizes,
    config: &DriverConfig,
) -> Result<Rings, Refusal> {
    let name = &found.carrier.name;
    let copy =
        if mode == Mode::ZeroCopy { SocketAddrXdpFlags::XDP_ZEROCOPY } else { SocketAddrXdpFlags::XDP_COPY };
    let mut rings = frame_memory(sizes, config).map_err(Refusal::Final)?;
    for queue in 0..sizes.queues {
        bind(&mut rings, &found.carrier, sizes, copy | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, config)?;
        let number = sizes.number_of(queue);
        let socket = rings.socket(queue).ok_or_else(|| Refusal::Mode(io::ErrorKind::NotFound.into()))?;
        if let Err(errno) = sockopt::set_socket_send_buffer_size_force(socket, config.send_buffer_bytes) {
            tracing::warn!(interface = name, queue = number, %errno, "the send buffer keeps its default size; sending may stall");
        }
        program
            .add_socket(number, socket)
            .map_err(|error| Refusal::Final(OpenError::Program(error.to_string())))?;
    }
    Ok(rings)
}

fn attach(
    program: &mut SteeringProgram,
    carrier: &KernelLink,
    mode: Mode,
    config: &DriverConfig,
) -> Result<(), Refusal> {
    let attach_mode = if mode == Mode::Generic { AttachMode::Generic } else { AttachMode::Native };
    program.attach(carrier.index, attach_mode, config.replace_program).map_err(|error| match error {
        AttachError::Foreign(there) => Refusal::Final(in_use(carrier.name.clone(), there)),
        AttachError::System(source) if is_permission(&source) => {
            Refusal::Final(OpenError::Permission { doing: "attaching the steering program" })
        }
        AttachError::System(source) => Refusal::Mode(source),
    })
}

/// Returns when no program is on the interface, or one that may be replaced. If a process that has the interface is about to end,
/// waits until it has ended.
fn await_owner(carrier: &KernelLink, config: &DriverConfig) -> Result<(), OpenError> {
    let (owner_ends, relative_ends) = (Deadline::after(OWNER_EXIT), Deadline::after(RELATIVE_EXIT));
    loop {
        let attached = xwarp_prog::attached_to(carrier.index)
            .map_err(|source| OpenError::System { doing: "looking for an XDP program", source })?;
        let Some(there) = attached else { return Ok(()) };
        let is_ours = there.name == xwarp_prog::PROGRAM_NAME;
        let waits = match &there.holder {
            _ if !is_ours => false,
            // The holder may have closed its descriptors already; the kernel detaches the program a moment later.
            None => !owner_ends.passed(),
            Some(holder) if holder.is_ending() => !owner_ends.passed(),
            Some(holder) if is_relative(holder.pid) => !relative_ends.passed(),
            Some(_) => false,
        };
        if !waits {
            return if config.replace_program { Ok(()) } else { Err(in_use(carrier.name.clone(), there)) };
        }
        std::thread::sleep(OWNER_POLL);
    }
}

/// Whether this is the process of the caller or its parent.
fn is_relative(pid: u32) -> bool {
    pid == std::process::id()
        || getppid().is_some_and(|parent| u32::try_from(parent.as_raw_nonzero().get()) == Ok(pid))
}

/// The error for an interface that already has a program. Program names are readable with `CAP_SYS_ADMIN` only;
/// without it, our own program counts as another one.
pub(crate) fn in_use(name: String, there: Attached) -> OpenError {
    let detach = there.detach_command(&name);
    let Attached { id, name: program, holder, .. } = there;
    if program == xwarp_prog::SWITCH_NAME {
        OpenError::Shared { name, holder }
    } else if program == xwarp_prog::PROGRAM_NAME {
        OpenError::InUse { name, holder }
    } else {
        OpenError::ForeignProgram { name, program, id, detach, holder }
    }
}

/// Registers frame memory. The memory of a socket counts towards the limit for some milliseconds after it was closed, for instance
/// that of a refused mode, so this retries, at most for [`MEMORY_RETRY`] and [`DriverConfig::busy_retry`].
fn frame_memory(sizes: Sizes, config: &DriverConfig) -> Result<Rings, OpenError> {
    let deadline = Deadline::after(config.busy_retry.min(MEMORY_RETRY));
    loop {
        match Rings::new(sizes).map_err(|source| memory_error(source, sizes)) {
            Err(OpenError::LockedMemory { .. }) if !deadline.passed() => std::thread::sleep(BUSY_RETRY_PAUSE),
            outcome => return outcome,
        }
    }
}

/// Binds the next queue; retries while it is busy, at most for [`DriverConfig::busy_retry`].
fn bind(
    rings: &mut Rings,
    carrier: &KernelLink,
    sizes: Sizes,
    flags: SocketAddrXdpFlags,
    config: &DriverConfig,
) -> Result<(), Refusal> {
    let deadline = Deadline::after(config.busy_retry);
    loop {
        match rings.bind(carrier.index, sizes, flags) {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                if deadline.passed() {
                    return Err(Refusal::Final(OpenError::QueueInUse {
                        name: carrier.name.clone(),
                        queue: sizes.number_of(rings.queues()),
                        users: af_xdp_users(),
                    }));
                }
                std::thread::sleep(BUSY_RETRY_PAUSE);
            }
            Err(error) if is_permission(&error) => {
                return Err(Refusal::Final(OpenError::Permission { doing: "binding an AF_XDP socket" }));
            }
            Err(error) => return Err(Refusal::Mode(error)),
        }
    }
}

fn memory_error(source: io::Error, sizes: Sizes) -> OpenError {
    match source.raw_os_error() {
        Some(libc::ENOBUFS | libc::ENOMEM) => OpenError::LockedMemory { bytes: sizes.bytes() },
        Some(libc::EPERM | libc::EACCES) => OpenError::Permission { doing: "opening an AF_XDP socket" },
        Some(libc::EAFNOSUPPORT) => OpenError::XdpUnsupported { name: "this kernel".into(), source },
        _ => OpenError::System { doing: "registering frame memory", source },
    }
}

pub(crate) fn is_permission(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

#[cfg(test)]
mod tests {
    use Mode::{Copy, Generic, ZeroCopy};

    use super::*;

    /// Without frames of several chunks, what the peer's kernel did not segment would be lost in generic mode: native XDP is
    /// better then.
    #[test]
    fn generic_mode_is_the_first_choice_on_a_veth_of_one_queue_with_frames_of_several_chunks() {
        let probed = |veth, long| attempts(ModePreference::Probe, veth, long);
        let veth = [(Generic, true), (Copy, true), (Copy, false), (Generic, false)];
        assert_eq!(probed(true, true), veth);
        assert_eq!(probed(true, false), [veth[0], veth[2], veth[3]]);
        assert_eq!(
            probed(false, false),
            [(ZeroCopy, false), (Copy, false), (Generic, true), (Generic, false)]
        );
    }

    #[test]
    fn a_forced_mode_is_the_only_one() {
        let forced = |mode, long| attempts(ModePreference::Force(mode), true, long);
        assert_eq!(forced(Copy, false), [(Copy, false)]);
        assert_eq!(forced(Copy, true), [(Copy, true), (Copy, false)]);
        assert_eq!(forced(Generic, false), [(Generic, true), (Generic, false)]);
    }
}
