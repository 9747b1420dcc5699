//! Error types. Each error text names a remedy.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use xwarp_control::DEFAULT_SOCKET;
use xwarp_prog::Holder;

use crate::config::{Mode, SINGLE_CHUNK_MTU};

/// The capabilities that opening an interface needs: the first three for the program, its maps and the sockets, the
/// last to lock frame memory beyond `RLIMIT_MEMLOCK`.
pub const CAPABILITIES: [&str; 4] = ["CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_BPF", "CAP_IPC_LOCK"];

/// How a program of an ordinary user gets at an interface; the user's name and the program are to be filled in. Capabilities in the
/// program's file (setcap) are not among the ways: for such a file the dynamic linker ignores the drop-in libraries.
pub const RIGHTS_OF_A_USER: &str = "root can share the interface with this user (xwarpd IFACE), or start the program with \
    capabilities (setpriv --reuid USER --regid GROUP --init-groups --inh-caps +net_admin,+net_raw,+bpf,+ipc_lock \
    --ambient-caps +net_admin,+net_raw,+bpf,+ipc_lock PROGRAM)";

/// The text of an error and its causes in one line, without causes that the text before them contains already.
pub fn one_line(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        next = cause.source();
    }
    line
}

/// Why an interface could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The process lacks a capability.
    #[error(
        "{doing} needs more rights: {RIGHTS_OF_A_USER}; programs of one machine need none on its fabric (xwarp run --fabric PROGRAM, \
         or the device fabric:)"
    )]
    Permission {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The network namespace has no interface of this name.
    #[error("no interface {name:?} in this network namespace; there are: {}", present.join(", "))]
    NoSuchInterface {
        /// The requested name.
        name: String,
        /// The names of the existing interfaces.
        present: Vec<String>,
    },
    /// Only Ethernet interfaces carry our frames.
    #[error(
        "{name} is not an Ethernet interface: XDP needs one (loopback and tunnels do not work; use a veth pair)"
    )]
    NotEthernet {
        /// The interface.
        name: String,
    },
    /// Each engine needs a queue on which it can transmit.
    #[error(
        "{name} has {queues} transmit queues, too few for {engines} engines: ethtool -L {name} combined {engines}, or open fewer"
    )]
    TooFewQueues {
        /// The interface.
        name: String,
        /// Its transmit queues.
        queues: u16,
        /// The requested engines.
        engines: u16,
    },
    /// The network driver refuses XDP at this MTU.
    #[error(
        "MTU {mtu} of {name} is too large for native XDP in its driver: ip link set dev {name} mtu {max} (on both ends), or \
         choose generic mode", max = SINGLE_CHUNK_MTU
    )]
    MtuTooLarge {
        /// The interface.
        name: String,
        /// Its MTU.
        mtu: u32,
    },
    /// The forced mode does not work on this interface.
    #[error("{name} does not support {mode} mode ({source}): force another mode, or let it be probed")]
    ModeUnsupported {
        /// The interface.
        name: String,
        /// The requested mode.
        mode: Mode,
        /// The kernel's error.
        source: io::Error,
    },
    /// No mode works.
    #[error(
        "XDP does not work on {name} ({source}): is the kernel built with CONFIG_XDP_SOCKETS and CONFIG_BPF_SYSCALL?"
    )]
    XdpUnsupported {
        /// The interface.
        name: String,
        /// The kernel's error for the last mode tried.
        source: io::Error,
    },
    /// The kernel lacks a feature.
    #[error("the kernel is too old ({release}): {missing} needs Linux {needs} or newer")]
    KernelTooOld {
        /// The running kernel.
        release: String,
        /// The missing feature.
        missing: &'static str,
        /// The first kernel that has it.
        needs: &'static str,
    },
    /// This or another process has opened the interface with xwarp.
    #[error("{name} is {}", owned_by(holder.as_ref()))]
    InUse {
        /// The interface.
        name: String,
        /// The process, if /proc shows it to us.
        holder: Option<Holder>,
    },
    /// Another XDP program is attached to the interface.
    #[error(
        "{name} already runs XDP program {program:?} (id {id}{}), perhaps a firewall: detach it ({detach}) or let xwarp \
         replace it (--replace-program of xwarp run and xwarp-perf, `replace_program` of the driver's settings)",
        holder.as_ref().map(|holder| format!(", held by {holder}")).unwrap_or_default()
    )]
    ForeignProgram {
        /// The interface.
        name: String,
        /// The program's name.
        program: String,
        /// The program's id.
        id: u32,
        /// The command that detaches it.
        detach: String,
        /// The process that holds it, if one does.
        holder: Option<Holder>,
    },
    /// Another AF_XDP socket is bound to the queue.
    #[error(
        "receive queue {queue} of {name} is in use by another AF_XDP socket: stop its owner, {}",
        owners(users)
    )]
    QueueInUse {
        /// The interface.
        name: String,
        /// The queue.
        queue: u16,
        /// The processes with AF_XDP sockets that are visible to us; one of them may be the owner. The kernel reports
        /// the queue of a socket only by socket diagnostics, which many kernels lack.
        users: Vec<Holder>,
    },
    /// The limit on locked memory is too small for the frames.
    #[error(
        "{bytes} bytes of frame memory exceed the limit on locked memory: ulimit -l unlimited, LimitMEMLOCK=infinity in \
         the unit file, CAP_IPC_LOCK, or fewer frames"
    )]
    LockedMemory {
        /// Bytes of frame memory.
        bytes: u64,
    },
    /// The helper shares the interface, so it has an owner already.
    #[error(
        "{name} is shared by xwarpd{}: connect to it (its socket is {DEFAULT_SOCKET} unless XWARP_HELPER names another), or stop it",
        holder.as_ref().map(|holder| format!(", {holder}")).unwrap_or_default()
    )]
    Shared {
        /// The interface.
        name: String,
        /// The process, if /proc shows it to us.
        holder: Option<Holder>,
    },
    /// The helper cannot be reached.
    #[error("no answer from xwarpd at {} ({source}): start it, or name its socket in XWARP_HELPER", socket.display())]
    NoHelper {
        /// The helper's socket.
        socket: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The permissions of the helper's socket exclude this user.
    #[error(
        "this user may not use xwarpd at {}: membership in group {group} is needed (usermod -aG {group} USER, then a new login)",
        socket.display()
    )]
    NotInGroup {
        /// The helper's socket.
        socket: PathBuf,
        /// The socket's group, by name or number.
        group: String,
    },
    /// The permissions of the helper's socket, or of its directory, exclude this user, whatever its groups.
    #[error(
        "this user may not use xwarpd at {}: its socket, or the directory, admits only its owner (xwarpd --group GROUP admits a group)",
        socket.display()
    )]
    Excluded {
        /// The helper's socket.
        socket: PathBuf,
    },
    /// The helper refuses.
    #[error("xwarpd refuses: {0}")]
    Refused(String),
    /// The configuration contradicts itself.
    #[error("configuration: {0}")]
    Config(String),
    /// The steering program could not be loaded or attached.
    #[error("the steering program: {0}")]
    Program(String),
    /// A system call failed with an error that has no variant above.
    #[error("{doing}: {source}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether a helper's socket exists, though this process has no answer: then the helper, and not the interface, is what
    /// the user has to look at.
    pub(crate) fn is_helper_there(&self) -> bool {
        match self {
            Self::NotInGroup { .. } | Self::Excluded { .. } => true,
            Self::NoHelper { source, .. } => {
                matches!(source.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::TimedOut)
            }
            _ => false,
        }
    }
}

/// Why there is no path to a peer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The destination is an address of this host, whose frames pass no interface.
    #[error(
        "{0} is an address of this host, and no frame to it passes a network interface: a device reaches itself at its own \
         addresses; processes of one host reach each other through xwarpd"
    )]
    Local(IpAddr),
    /// The destination is not one host.
    #[error("{0} is not a unicast address")]
    NotUnicast(IpAddr),
    /// The kernel has no route.
    #[error("no route to {destination} from here ({source}): ip route get {destination}")]
    NoRoute {
        /// The peer's address.
        destination: IpAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// A policy of the host (`ip xfrm policy`) demands what we do not do.
    #[error(
        "an IPsec policy of this host {demands} what is sent to {destination}, and xwarp sends no IPsec: ip xfrm policy"
    )]
    Policy {
        /// The peer's address.
        destination: IpAddr,
        /// What the policy does.
        demands: &'static str,
    },
    /// The interface is down.
    #[error("{name} is down: ip link set dev {name} up")]
    LinkDown {
        /// The interface.
        name: String,
    },
    /// The interface is up but has no carrier.
    #[error("{name} has no carrier: connect the cable, or set the other end of the veth pair up")]
    NoCarrier {
        /// The interface.
        name: String,
    },
    /// The interface does not exist any more.
    #[error("{name} was removed: open the device again when the interface is back")]
    LinkRemoved {
        /// The interface.
        name: String,
    },
    /// The kernel reaches the destination through another interface.
    #[error("{destination} is reached through {through}, not {name}: open {through} instead, or add a route")]
    OtherInterface {
        /// The peer's address.
        destination: IpAddr,
        /// The open interface.
        name: String,
        /// The interface that the kernel would use.
        through: String,
    },
    /// The source address is not one of the interface's.
    #[error("{address} is not an address of {name}")]
    NotOurAddress {
        /// The address.
        address: IpAddr,
        /// The interface.
        name: String,
    },
    /// Local and remote address are of different families.
    #[error("{0} and {1} are of different address families")]
    Family(IpAddr, IpAddr),
    /// The next hop does not answer ARP or neighbour discovery.
    #[error("{next_hop}, the next hop to {destination}, does not answer (ARP or neighbour discovery)")]
    Unreachable {
        /// The peer's address.
        destination: IpAddr,
        /// The neighbour whose Ethernet address is missing.
        next_hop: IpAddr,
    },
    /// The time limit passed before the next hop's Ethernet address was known.
    #[error("{next_hop}, the next hop to {destination}, did not answer in time (ARP or neighbour discovery)")]
    TimedOut {
        /// The peer's address.
        destination: IpAddr,
        /// The neighbour whose Ethernet address is missing.
        next_hop: IpAddr,
    },
    /// This process is a child (`fork`) of the one that opened the interface.
    #[error("process {owner} opened the interface, a parent of this one: open it in this process")]
    Inherited {
        /// The process that opened it.
        owner: u32,
    },
    /// The helper refuses, or is gone.
    #[error("{0}")]
    Helper(String),
    /// A netlink request failed.
    #[error("netlink: {0}")]
    Netlink(#[from] io::Error),
}

impl ResolveError {
    /// Whether the host must not send to the destination: there is no route, one that forbids it (blackhole, unreachable,
    /// prohibit), a policy that demands encryption, or the source is not the host's address.
    pub fn forbids(&self) -> bool {
        const FORBIDDING: [i32; 5] =
            [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL, libc::ENETDOWN];
        match self {
            Self::NoRoute { source, .. } => {
                source.raw_os_error().is_some_and(|errno| FORBIDDING.contains(&errno))
            }
            Self::Policy { .. } | Self::NotOurAddress { .. } => true,
            _ => false,
        }
    }
}

/// Why a port could not be reserved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// Another socket has the port.
    #[error(
        "{address} is in use by {}: RDMA connections need a TCP port of their own, because iWARP runs over TCP; choose another \
         port or address for one of them (ss -tlnp shows the kernel's listeners)",
        holder.as_ref().map_or_else(|| "another socket of this host".into(), ToString::to_string)
    )]
    InUse {
        /// The address.
        address: SocketAddr,
        /// The process that has the port, if it is known.
        holder: Option<Holder>,
    },
    /// Ports below 1024 need a capability.
    #[error("{0}: ports below 1024 need CAP_NET_BIND_SERVICE")]
    Permission(SocketAddr),
    /// The address is not one of this host's.
    #[error("{0} is not an address of this host")]
    NotOurAddress(IpAddr),
    /// Every ephemeral port tried was in use.
    #[error("no ephemeral port is free on {0} (sysctl net.ipv4.ip_local_port_range)")]
    Exhausted(IpAddr),
    /// The helper refuses, or is gone.
    #[error("{0}")]
    Helper(String),
    /// A system call failed.
    #[error("reserving {address}: {source}")]
    System {
        /// The address.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Names the owner of an interface.
fn owned_by(holder: Option<&Holder>) -> String {
    match holder {
        Some(holder) if holder.pid == std::process::id() => {
            "open in this process already: an interface has one owner at a time; use the device that is open"
                .into()
        }
        holder => {
            let who = holder.map(|holder| format!(", {holder}")).unwrap_or_default();
            format!(
                "in use by another xwarp process{who}: an interface has one owner at a time; stop that process, or share the \
                 interface among processes by xwarpd"
            )
        }
    }
}

/// Names the processes that may own a queue.
fn owners(users: &[Holder]) -> String {
    if users.is_empty() {
        return "which cannot be seen from here".into();
    }
    let named = |user: &Holder| {
        if user.pid == std::process::id() { "this process".into() } else { user.to_string() }
    };
    let list: Vec<String> = users.iter().map(named).collect();
    format!("one of those with such sockets: {}", list.join(", "))
}
