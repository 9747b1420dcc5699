//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use xwarp_tool::explain::Options;

/// Examines xwarp, an RDMA NIC in software: captures of its traffic, and what a machine needs to run it.
#[derive(Debug, Parser)]
#[command(name = "xwarp", version, arg_required_else_help = true)]
pub struct XwarpArguments {
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Explain(ExplainArguments),
    Doctor(DoctorArguments),
}

/// Tells what happened in a capture: connections, MPA negotiation, messages, retransmissions, Terminates.
///
/// Reads pcap and pcapng files, of 'xwarp-perf --pcap', tcpdump or Wireshark: Ethernet with or without VLAN tags, IPv4
/// and IPv6, any number of connections. Where the begin of a connection is not in the capture, or packets were not
/// captured, FPDUs are found again at the begin of a segment.
///
/// Times are seconds since the first frame. The number in brackets is the connection's. Events like the one before,
/// such as messages of one kind and size, are counted instead of shown; '--all' shows them.
///
/// Exit code: 0, or 1 when the file cannot be read to its end; what was read is explained first.
#[derive(Debug, Args)]
pub struct ExplainArguments {
    /// The capture; '-' is the standard input ('tcpdump -w - | xwarp explain -').
    pub file: PathBuf,
    /// Shows only this connection.
    #[arg(long, short, value_name = "NUMBER")]
    connection: Option<usize>,
    /// Shows only the summary of each connection.
    #[arg(long, short, conflicts_with = "all")]
    summary: bool,
    /// Shows each event, though it is like the one before.
    #[arg(long, short)]
    all: bool,
    /// Shows also each frame: Ethernet, ARP, IP, ICMP, UDP and TCP headers.
    #[arg(long, short)]
    frames: bool,
    /// Prints a JSON object a line: events, then '{"summary": ...}' for each connection, then totals.
    #[arg(long)]
    json: bool,
}

impl ExplainArguments {
    /// What is printed.
    pub fn options(&self) -> Options {
        let Self { connection, summary, all, frames, json, .. } = *self;
        Options { json, frames, summary, all, connection }
    }
}

/// Checks what a machine and an interface need to run xwarp, and says what to do about each problem.
///
/// Checks the kernel, the rights of this process, the link, the MTU, addresses, XDP programs and who holds them, offloads and
/// the limit on locked memory. Nothing is changed, unless '--open' is given.
///
/// Exit code: 0, or 1 when there is a problem that keeps xwarp from working.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// The interface to check, in the network namespace of this process.
    pub interface: Option<String>,
    /// Opens the interface for a moment, which shows the XDP mode. Some network cards drop frames while a program is attached.
    #[arg(long, requires = "interface")]
    pub open: bool,
    /// Prints one JSON object.
    #[arg(long)]
    pub json: bool,
}
