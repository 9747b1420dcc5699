//! The command line.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum, value_parser};
use ipnet::IpNet;
use xwarp_control::DEFAULT_SOCKET;
use xwarp_driver::{FromClients, Sharing};

use crate::limits::Limits;
use crate::slots::MAX_SLOTS;

/// Shares network interfaces among unprivileged processes that use xwarp
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarpd", version)]
#[allow(clippy::doc_markdown, reason = "these comments are help texts and a manual page")]
pub struct Options {
    /// Interfaces to share; none only with `--socket -`, where clients then hear that nothing is shared
    #[arg(required_unless_present = "socket")]
    pub interfaces: Vec<String>,
    /// Path of the socket for clients; `-`: the socket that the service manager passes, as the first of `LISTEN_FDS` or as the
    /// standard input
    #[arg(long, default_value = DEFAULT_SOCKET)]
    pub socket: PathBuf,
    /// Permissions of the socket, in octal: users that may connect may use the interfaces
    #[arg(long, default_value = "0660", value_parser = octal)]
    pub mode: u32,
    /// Group of the socket, by number or by its name in /etc/group
    #[arg(long)]
    pub group: Option<String>,
    /// Run XDP after the kernel has made a socket buffer, for interfaces whose driver does not support native XDP
    #[arg(long)]
    pub generic: bool,
    /// Where XDP runs on the frames that clients send: natively only if the interface takes redirected frames
    #[arg(long, value_enum, default_value_t = FromClientsArg::Auto)]
    pub from_clients: FromClientsArg,
    /// With native XDP, process the frames that clients send on kernel threads, in batches: more throughput, more
    /// latency
    #[arg(long)]
    pub threaded_napi: bool,
    /// 802.1Q tag of all frames of clients, on each interface; a VLAN interface of the kernel needs no option
    #[arg(long, value_name = "ID", value_parser = value_parser!(u16).range(1..=4094))]
    pub vlan: Option<u16>,
    /// Keep devices, connections and ports across restarts: systemd holds them (FileDescriptorStoreMax=), or else a process
    /// of xwarpd itself, which starts it again when it ends. SIGTERM to that process ends all
    #[arg(long)]
    pub keep: bool,
    /// Devices that one user may have open [default: 4 for each CPU, at least 8]
    #[arg(long, value_parser = value_parser!(u32).range(1..=4095))]
    pub devices_per_user: Option<u32>,
    /// Ports that one user may have reserved
    #[arg(long, default_value_t = 1024, value_parser = value_parser!(u32).range(1..=65535))]
    pub ports_per_user: u32,
    /// Frame memory that one user may have registered, in MiB [default: 16 for each device]
    #[arg(long, value_parser = value_parser!(u64).range(1..=MAX_MEMORY_MIB))]
    pub memory_per_user: Option<u64>,
    /// Devices that all users together may have open
    #[arg(long, default_value_t = 1024, value_parser = value_parser!(u32).range(1..=4095))]
    pub devices: u32,
    /// Frame memory that all users together may have registered, in MiB [default: a quarter of the host's memory]
    #[arg(long, value_parser = value_parser!(u64).range(1..=MAX_MEMORY_MIB))]
    pub memory: Option<u64>,
    /// The only ports of clients, best outside of net.ipv4.ip_local_port_range [default: all, at most half as many as that
    /// range has]
    #[arg(long, value_name = "LOW-HIGH", value_parser = ports)]
    pub ports: Option<Ports>,
    /// Peers on the network that clients may talk to: a prefix such as 10.1.0.0/16 or fd00:1::/64, or several with commas
    /// between them [default: all]. Clients of this host always reach each other
    #[arg(long, value_name = "PREFIX", value_delimiter = ',', value_parser = prefix, num_args = 1..=MAX_PREFIXES)]
    pub peers: Vec<IpNet>,
    /// What each client may send out of an interface, in Mbit/s; frames beyond that are dropped [default: no limit]
    #[arg(long, value_name = "MBIT", value_parser = value_parser!(u64).range(1..=10_000_000))]
    pub rate_per_client: Option<u64>,
    /// Who may have ports below net.ipv4.ip_unprivileged_port_start
    #[arg(long, value_enum, default_value_t = PrivilegedPorts::Root)]
    pub privileged_ports: PrivilegedPorts,
    /// Requests that one user may send each second on average; requests beyond that wait
    #[arg(long, default_value_t = 2000, value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub requests_per_second: u32,
    /// Serve counters in the format of OpenMetrics by HTTP on this address, which must be a loopback address
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub metrics: Option<SocketAddr>,
    /// Seconds for which a released port is kept from other users
    #[arg(long, default_value_t = 60, value_parser = value_parser!(u64).range(0..=86_400))]
    pub quarantine: u64,
    /// Seconds for which an address of the interface may be missing before the connections from it end
    #[arg(long, default_value_t = 30, value_parser = value_parser!(u64).range(1..=86_400))]
    pub address_limit: u64,
}

/// Largest limit on frame memory, in MiB: 16 TiB.
const MAX_MEMORY_MIB: u64 = 1 << 24;
/// Largest number of prefixes, the size of the program's table.
const MAX_PREFIXES: usize = 1024;
/// Defaults of one user: devices for each CPU, so that a rank of MPI on each, of several jobs, has one; the least number of
/// devices; and frame memory of a device.
const DEVICES_PER_CPU: usize = 4;
const MIN_DEVICES: usize = 8;
const MEMORY_PER_DEVICE_MIB: u64 = 16;

/// The first and the last port of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports(pub u16, pub u16);

/// Values of `--privileged-ports`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrivilegedPorts {
    /// Root of this host, and not root of a container
    Root,
    /// Nobody
    None,
}

/// Values of `--from-clients`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FromClientsArg {
    /// Native if the interface's driver announces that it sends redirected frames, else generic; a veth's answer may
    /// change later
    Auto,
    /// In the driver: an interface that does not send redirected frames drops them silently
    Native,
    /// After the kernel has made a socket buffer
    Generic,
}

impl From<FromClientsArg> for FromClients {
    fn from(argument: FromClientsArg) -> Self {
        match argument {
            FromClientsArg::Auto => Self::Probe,
            FromClientsArg::Native => Self::Native,
            FromClientsArg::Generic => Self::Generic,
        }
    }
}

impl Options {
    /// Resource limits of one user.
    pub(crate) fn limits(&self) -> Limits {
        let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
        let devices = self.devices_per_user.map_or(default_devices(cpus), |devices| devices as usize);
        let memory_mib = self.memory_per_user.unwrap_or(MEMORY_PER_DEVICE_MIB * devices as u64);
        Limits {
            devices,
            ports: self.ports_per_user as usize,
            memory_bytes: memory_mib << 20,
            requests_per_second: self.requests_per_second,
            all_devices: self.devices as usize,
            all_memory_bytes: self.memory.map_or_else(default_memory_bytes, |mib| mib << 20),
        }
    }

    /// What clients may do, and how their frames travel.
    pub(crate) fn sharing(&self) -> Sharing {
        Sharing {
            from_clients: self.from_clients.into(),
            peers: self.peers.clone(),
            bits_per_second: self.rate_per_client.map(|mbit| mbit * 1_000_000),
        }
    }

    /// Whether clients may talk to this address on the network.
    pub(crate) fn allows_peer(&self, address: IpAddr) -> bool {
        self.peers.is_empty() || self.peers.iter().any(|prefix| prefix.contains(&address))
    }

    pub(crate) fn quarantine(&self) -> Duration {
        Duration::from_secs(self.quarantine)
    }
}

/// Devices of one user without an option.
fn default_devices(cpus: usize) -> usize {
    (cpus * DEVICES_PER_CPU).clamp(MIN_DEVICES, MAX_SLOTS as usize)
}

/// Frame memory of all users without an option.
fn default_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit)) / 4
}

fn ports(text: &str) -> Result<Ports, String> {
    let wrong = || "two ports, such as 20000-29999".to_owned();
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    match (first.parse(), last.parse()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(Ports(first, last)),
        _ => Err(wrong()),
    }
}

/// A prefix, or an address, which is a prefix of all its bits.
fn prefix(text: &str) -> Result<IpNet, String> {
    let address = text.parse::<IpAddr>().map(IpNet::from);
    let wrong = |_| "a prefix such as 10.1.0.0/16 or fd00:1::/64, or an address".to_owned();
    text.parse().or(address).map_err(wrong)
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).map_err(|error| error.to_string())?;
    if mode <= 0o777 { Ok(mode) } else { Err("permissions have three octal digits".into()) }
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr =
        text.parse().map_err(|_| "an address and a port, such as 127.0.0.1:9815".to_owned())?;
    if address.ip().is_loopback() { Ok(address) } else { Err("the address is no loopback address".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_stay_on_the_host() {
        assert!(loopback("127.0.0.1:9815").is_ok() && loopback("[::1]:9815").is_ok());
        assert!(
            loopback("0.0.0.0:9815").is_err()
                && loopback("192.0.2.1:9815").is_err()
                && loopback("9815").is_err()
        );
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Options::command().debug_assert();
    }

    /// No number that is accepted makes a later calculation overflow, and none locks everybody out.
    #[test]
    fn attack_numbers_of_options_have_ranges() {
        let parsed = |option: &str, value: &str| {
            Options::try_parse_from(["xwarpd", "eth0", option, value]).map(|options| options.limits())
        };
        for (option, wrong, right) in [
            ("--quarantine", ["18446744073709551615", "-1"], "86400"),
            ("--address-limit", ["18446744073709551615", "0"], "86400"),
            ("--memory-per-user", ["17592186044416", "0"], "16777216"),
            ("--requests-per-second", ["0", "4294967295"], "1"),
            ("--devices-per-user", ["0", "4096"], "4095"),
            ("--ports-per-user", ["0", "65536"], "65535"),
            ("--vlan", ["0", "4095"], "4094"),
            ("--rate-per-client", ["0", "18446744073709551615"], "10000000"),
        ] {
            for wrong in wrong {
                assert!(parsed(option, wrong).is_err(), "{option} {wrong}");
            }
            assert!(parsed(option, right).unwrap().memory_bytes > 0, "{option} {right}");
        }
        assert_eq!(parsed("--memory-per-user", "16777216").unwrap().memory_bytes, 1 << 44);
        assert_eq!([1, 2, 4, 128].map(default_devices), [8, 8, 16, 512]);
    }

    #[test]
    fn ranges_of_ports_are_read() {
        assert_eq!(ports("20000-29999"), Ok(Ports(20000, 29999)));
        for wrong in ["", "1", "0-9", "9-1", "1-65536", "a-b"] {
            assert!(ports(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn peers_are_prefixes_of_both_families() {
        let options = |peers: &str| Options::try_parse_from(["xwarpd", "eth0", "--peers", peers]);
        let some = options("10.1.0.0/16,fd00:1::/64,192.0.2.7").unwrap();
        for (peer, allowed) in [
            ("10.1.255.1", true),
            ("10.2.0.1", false),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
            ("fd00:1::7", true),
            ("fd00:1:0:1::7", false),
        ] {
            assert_eq!(some.allows_peer(peer.parse().unwrap()), allowed, "{peer}");
        }
        for wrong in ["10.1.0.0/33", "fd00::/129", "eth0", "", "10.1.0.0/16,"] {
            assert!(options(wrong).is_err(), "{wrong}");
        }
        assert!(Options::try_parse_from(["xwarpd", "eth0"]).unwrap().allows_peer(IpAddr::from([9; 4])));
    }

    #[test]
    fn permissions_are_octal() {
        assert_eq!(octal("0660"), Ok(0o660));
        assert!(octal("0888").is_err() && octal("7777").is_err());
    }
}
