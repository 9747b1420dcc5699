//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use xwarp_control::DEFAULT_SOCKET;
use xwarp_driver::FromClients;

use crate::limits::Limits;

/// Shares network interfaces among unprivileged processes that use xwarp
#[derive(Debug, Clone, Parser)]
#[command(name = "xwarpd", version)]
#[allow(clippy::doc_markdown, reason = "these comments are help texts and a manual page")]
pub struct Options {
    /// Interfaces to share
    #[arg(required = true)]
    pub interfaces: Vec<String>,
    /// Path of the socket for clients; `-`: the socket on standard input (systemd: `StandardInput=socket`)
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
    #[arg(long, value_name = "ID")]
    pub vlan: Option<u16>,
    /// Devices that one user may have open
    #[arg(long, default_value_t = 8)]
    pub devices_per_user: usize,
    /// Ports that one user may have reserved
    #[arg(long, default_value_t = 1024)]
    pub ports_per_user: usize,
    /// Frame memory that one user may have registered, in MiB
    #[arg(long, default_value_t = 128)]
    pub memory_per_user: u64,
    /// Requests that one user may send each second
    #[arg(long, default_value_t = 1000)]
    pub requests_per_second: u32,
    /// Serve counters in the format of OpenMetrics by HTTP on this address, which must be a loopback address
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = loopback)]
    pub metrics: Option<SocketAddr>,
    /// Seconds for which a released port is kept from other users
    #[arg(long, default_value_t = 60)]
    pub quarantine: u64,
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
        Limits {
            devices: self.devices_per_user,
            ports: self.ports_per_user,
            memory_bytes: self.memory_per_user << 20,
            requests_per_second: self.requests_per_second,
        }
    }

    pub(crate) fn quarantine(&self) -> Duration {
        Duration::from_secs(self.quarantine)
    }
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

    #[test]
    fn permissions_are_octal() {
        assert_eq!(octal("0660"), Ok(0o660));
        assert!(octal("0888").is_err() && octal("7777").is_err());
    }
}
