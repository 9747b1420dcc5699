//! The command line.
#![allow(clippy::doc_markdown, reason = "these comments are help texts and manual pages")]

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use xwarp_tool::{explain::Options, lab::Properties, observed::Choice, run, sdp};

/// Runs programs over xwarp, an RDMA NIC in software; explains captures, checks machines, shows running devices.
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
    Lab(LabArguments),
    Stat(StatArguments),
    Capture(CaptureArguments),
    Sdp(SdpArguments),
    Run(RunArguments),
    Fabric(FabricArguments),
    /// Prints a completion script for a shell.
    ///
    /// Example: 'xwarp completions bash > /usr/share/bash-completion/completions/xwarp'.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Writes the manual pages, one for each subcommand, to a directory.
    Manual {
        /// The directory, for instance /usr/share/man/man1.
        directory: PathBuf,
    },
}

/// Explains a capture: connections, MPA negotiation, messages, retransmissions, Terminates.
///
/// Reads pcap and pcapng files, also compressed by gzip, of 'xwarp-perf --pcap', tcpdump or Wireshark: Ethernet with or without
/// VLAN tags, IPv4 and IPv6, up to 4096 connections. If the start of a connection or later packets were not captured, FPDUs are
/// found at the start of a segment. Frames of a file are sorted by time within 4096 frames; those of a pipe are explained as they
/// come. What is not explained is counted in the last lines: other protocols, link types, blocks without packets, frames that
/// were captured only in part. Needs no privileges.
///
/// Times are seconds since the first frame. The number in brackets is the connection's. Repeated events, such as
/// messages of one kind and size, are counted instead of shown; '--all' shows them.
///
/// Exit code: 0, or 1 when the file cannot be read to its end or has more connections than are followed; the part before the error
/// is explained.
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
    /// Shows each event, including repeated ones.
    #[arg(long, short)]
    all: bool,
    /// Shows also each frame: Ethernet, ARP, IP, ICMP, UDP and TCP headers.
    #[arg(long, short)]
    frames: bool,
    /// Prints a JSON object a line: events, then '{"summary": ...}' for each connection, then totals.
    #[arg(long)]
    json: bool,
    /// Prints one HTML page with a sequence diagram of each connection, without scripts and other files.
    #[arg(long, conflicts_with_all = ["json", "frames", "summary"])]
    html: bool,
}

impl ExplainArguments {
    /// The output format.
    pub fn options(&self) -> Options {
        let Self { connection, summary, all, frames, json, html, .. } = *self;
        Options { json, html, frames, summary, all, connection, live: false }
    }
}

/// Checks what a machine and an interface need to run xwarp, and names a remedy for each problem.
///
/// Checks the kernel, the privileges of this process, the link, the MTU, addresses, XDP programs and their processes,
/// offloads and the limit on locked memory. Nothing is changed, unless '--open' is given.
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

/// Makes and removes a fabric for tests: two network namespaces joined by a veth pair.
///
/// In each of them the interface is called xw0; a has 10.77.0.1 and fd77::1, b has 10.77.0.2 and fd77::2. With '--vlan ID' there
/// is also xw0.ID with 10.78.0.x and fd78::x. Needs root, bash and iproute2.
///
/// Example: 'xwarp lab up', then 'xwarp lab run a xwarp-perf write_bw -d xw0', and in another terminal 'xwarp lab run b
/// xwarp-perf write_bw -d xw0 10.77.0.1', then 'xwarp lab down'.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct LabArguments {
    /// First part of the names of the namespaces, NAME-a and NAME-b.
    #[arg(long, default_value = "xw", value_parser = lab_name)]
    pub name: String,
    #[command(subcommand)]
    pub command: LabCommand,
}

/// The action on a lab.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    Up(LabUpArguments),
    /// Removes the lab and kills the processes in it.
    Down,
    /// Shows the addresses.
    Show,
    /// Runs a program in one of the namespaces, and returns its status as a shell does: 126 or 127 for one that does not start,
    /// 128 and the number for one that a signal ended.
    Run {
        /// The namespace.
        side: LabSide,
        /// The program and its arguments.
        #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

/// Makes the lab; one of the same name is removed first.
#[derive(Debug, Args)]
pub struct LabUpArguments {
    /// MTU in bytes [default: 65535, because large frames are the fastest].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1280..=65535))]
    mtu: Option<u32>,
    /// Receive and transmit queues of each interface [default: 1].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,
    /// Also makes a VLAN interface with this id on each end.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4094))]
    vlan: Option<u16>,
    /// Turns the kernel's segmentation and receive offloads off, for comparisons with kernel TCP.
    #[arg(long)]
    without_offloads: bool,
}

impl LabUpArguments {
    /// The properties of the lab.
    pub fn properties(&self) -> Properties {
        let Self { mtu, queues, vlan, without_offloads } = *self;
        Properties { mtu, queues, vlan, without_offloads }
    }
}

/// An end of a lab.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum LabSide {
    A,
    B,
}

impl LabSide {
    /// Last part of the namespace's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }
}

/// Names of namespaces are file names.
fn lab_name(name: &str) -> Result<String, String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.is_empty() && name.len() <= 64 && !name.starts_with('-') && name.chars().all(fits) {
        Ok(name.to_owned())
    } else {
        Err("letters, digits, '-' and '_', not more than 64".to_owned())
    }
}

/// Runs a program of libibverbs and librdmacm over xwarp, unmodified.
///
/// The program finds the drop-in libraries instead of the distribution's, and the interfaces as its RDMA devices. Needs the
/// privileges to open an interface, or xwarpd; with '--fabric' nothing.
///
/// Example: 'xwarp run ib_write_bw -R', and on another machine 'xwarp run ib_write_bw -R 10.0.0.1'. On one machine, as any user:
/// 'xwarp run --fabric ib_write_bw -R &' and 'xwarp run --fabric ib_write_bw -R localhost'.
///
/// Environment variables: XWARP_DEVICES (interfaces, separated by commas), XWARP_MARKERS (off, prefer, require), XWARP_CRC (on,
/// off), XWARP_CONGESTION (reno, cubic, dctcp, bbr), XWARP_PROGRESS (auto, thread), XWARP_VENDOR_ID, XWARP_AS (as --as), XWARP_CAPTURE (a pcapng file),
/// XWARP_TIMEOUT (seconds without an answer), XWARP_REPLACE_PROGRAM (1: as --replace-program), XWARP_OBSERVE (1: for 'xwarp stat'), XWARP_LOG (a filter such as xwarp=debug), XWARP_LIBRARY (where libxwarp_compat.so
/// is).
///
/// Exit status: the program's; 126 for a program that cannot be run, or that would not load the libraries because it gains
/// privileges (set-user-ID, set-group-ID, file capabilities); 127 for one that is not found; 1 for another error.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Only this interface is a device; repeat for several [default: every interface that is up and has an address].
    #[arg(long, value_name = "IFACE")]
    device: Vec<String>,
    /// The only device is on the fabric of this user: a switch between the programs of this machine that are started so, which
    /// needs no privileges. NAME is another fabric than 'default'.
    #[arg(long, value_name = "NAME", num_args = 0..=1, require_equals = true, default_missing_value = "default",
          conflicts_with_all = ["device", "replace_program", "sysfs"])]
    fabric: Option<String>,
    /// The program is this host of the fabric, with addresses of its own, and other programs find it by this name [default:
    /// localhost].
    #[arg(long, value_name = "HOST", requires = "fabric")]
    host: Option<String>,
    /// Replaces another owner's XDP program on an interface.
    #[arg(long)]
    replace_program: bool,
    /// The kind of device that the program sees; the connections are iWARP's with each. 'roce' is for programs that refuse iWARP or
    /// do less over it, such as MPI on libfabric [default: iwarp].
    #[arg(long = "as", value_name = "KIND", value_enum)]
    face: Option<run::Face>,
    /// Lists the devices in /sys/class/infiniband and /dev/infiniband, for scripts that look there. The program gets a mount
    /// namespace of its own: as root, or where users may make user namespaces.
    #[arg(long)]
    sysfs: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

impl RunArguments {
    /// How to run the program.
    pub fn options(&self) -> run::Options {
        run::Options {
            devices: self.device.clone(),
            replace_program: self.replace_program,
            fabric: self.fabric.clone().map(|name| run::Fabric { name, host: self.host.clone() }),
            face: self.face,
            sysfs: self.sysfs,
        }
    }
}

/// Serves, shows and ends the fabric of this user: a switch between programs of one machine, without privileges.
///
/// Programs use it that are started by 'xwarp run --fabric' or that open the device 'fabric:'. It starts with the first of them, and
/// ends half a minute after the last. Its socket is in XDG_RUNTIME_DIR, or in a directory of this user in /tmp.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub struct FabricArguments {
    /// The name of the fabric [default: default].
    #[arg(long, global = true, value_name = "NAME")]
    pub name: Option<String>,
    #[command(subcommand)]
    pub command: FabricCommand,
}

/// The action on a fabric.
#[derive(Debug, Subcommand)]
pub enum FabricCommand {
    /// Shows its hosts and counters.
    Show,
    /// Starts it in the background; does nothing if it runs.
    Start {
        /// Ends it SECONDS seconds after its last client; 0: never.
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        idle: u64,
    },
    /// Serves it in the foreground.
    Serve {
        /// Ends it SECONDS seconds after its last client; 0: never.
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        idle: u64,
        /// Writes a line when it serves, and leaves the session.
        #[arg(long, hide = true)]
        detached: bool,
    },
    /// Ends it, and the devices of its clients.
    Stop,
    /// Sets faults between two hosts, also while programs run. Those that are not named stay.
    Set {
        #[command(flatten)]
        ends: FabricEnds,
        #[command(flatten)]
        faults: Box<FabricFaults>,
    },
    /// Lets nothing pass between two hosts.
    Cut {
        #[command(flatten)]
        ends: FabricEnds,
        /// Begins after this time (100ms), or after so many frames of each direction.
        #[arg(long, value_name = "TIME|FRAMES")]
        after: Option<String>,
        /// Ends by itself after this time.
        #[arg(long = "for", value_name = "TIME")]
        lasts: Option<String>,
    },
    /// Ends a cut.
    Heal(FabricEnds),
}

/// Two hosts of a fabric.
#[derive(Debug, Args)]
pub struct FabricEnds {
    /// A host.
    from: String,
    /// Another host, or the same one.
    to: String,
    /// Only for frames from the first to the second.
    #[arg(long)]
    pub one_way: bool,
}

impl FabricEnds {
    /// The names of the hosts.
    pub fn names(&self) -> [&str; 2] {
        [&self.from, &self.to]
    }
}

/// Faults in words; those of the hop of 'ci/lab' are the same.
#[derive(Debug, Args)]
pub struct FabricFaults {
    /// Ends all faults and the cut before the others are set.
    #[arg(long)]
    clear: bool,
    /// Probability of loss: 1% or 0.01.
    #[arg(long, value_name = "CHANCE")]
    loss: Option<String>,
    /// Bursty loss in addition: probabilities to enter and to leave the bad state per frame, and of loss in it.
    #[arg(long, value_name = "ENTER,LEAVE,LOSS")]
    bursts: Option<String>,
    /// Delay of each frame: 50ms, 10us.
    #[arg(long, value_name = "TIME")]
    delay: Option<String>,
    /// Largest additional random delay, without reordering.
    #[arg(long, value_name = "TIME")]
    jitter: Option<String>,
    /// Line rate in bits per second: 100M, 1G.
    #[arg(long, value_name = "BITS")]
    rate: Option<String>,
    /// Frames that may wait for the line.
    #[arg(long, value_name = "FRAMES")]
    queue: Option<String>,
    /// Probability that a frame is held back, so that later ones overtake it.
    #[arg(long, value_name = "CHANCE")]
    reorder: Option<String>,
    /// ... for a random time up to this.
    #[arg(long, value_name = "TIME")]
    reorder_by: Option<String>,
    /// Probability that a frame arrives twice.
    #[arg(long, value_name = "CHANCE")]
    duplicate: Option<String>,
    /// Probability that one bit of a frame is flipped.
    #[arg(long, value_name = "CHANCE")]
    corrupt: Option<String>,
    /// Share of these frames whose TCP checksum is repaired, so that only MPA's CRC detects the error.
    #[arg(long, value_name = "CHANCE")]
    repair: Option<String>,
    /// Seed of the random numbers, which begin again.
    #[arg(long, value_name = "NUMBER")]
    seed: Option<String>,
}

impl FabricFaults {
    /// The words that the fabric understands.
    pub fn words(&self) -> String {
        let named = [
            ("loss", &self.loss),
            ("bursts", &self.bursts),
            ("delay", &self.delay),
            ("jitter", &self.jitter),
            ("rate", &self.rate),
            ("queue", &self.queue),
            ("reorder", &self.reorder),
            ("reorder-by", &self.reorder_by),
            ("duplicate", &self.duplicate),
            ("corrupt", &self.corrupt),
            ("repair", &self.repair),
            ("seed", &self.seed),
        ];
        let set = named.iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
        self.clear.then(|| "clear".to_owned()).into_iter().chain(set).collect::<Vec<_>>().join(" ")
    }
}

/// The selected devices.
#[derive(Debug, Args)]
pub struct ChoiceArguments {
    /// Only devices of this process.
    #[arg(long, short, value_name = "PID")]
    pid: Option<u32>,
    /// Only devices on this interface.
    #[arg(long, short, value_name = "IFACE")]
    interface: Option<String>,
}

impl ChoiceArguments {
    /// The choice.
    pub fn choice(&self) -> Choice {
        Choice { pid: self.pid, interface: self.interface.clone() }
    }
}

/// Shows running devices: process, mode, queue pairs with state, peer, RTT, congestion window and retransmissions; and the
/// interfaces that xwarpd shares, with its counts of frames.
///
/// A program is visible if it was started with XWARP_OBSERVE=1 or sets DeviceOptions::observe; to its own user and to
/// root. With '--watch', rates are shown from the second output on. 'wnd' is the congestion window, 'flight' the bytes
/// in the network.
#[derive(Debug, Args)]
pub struct StatArguments {
    #[command(flatten)]
    pub choice: ChoiceArguments,
    /// Repeats the output every SECONDS seconds.
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1",
          value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub watch: Option<u64>,
    /// Prints one JSON object per output, with all counters.
    #[arg(long)]
    pub json: bool,
}

/// Records the frames of a running device to a pcapng file, until it is interrupted.
///
/// AF_XDP bypasses tcpdump; this is its substitute. The program must be observable, see 'xwarp stat --help'. The
/// capture ends early when the file is written so slowly that 16 MiB of frames wait. 'xwarp explain' explains the file.
#[derive(Debug, Args)]
pub struct CaptureArguments {
    #[command(flatten)]
    pub choice: ChoiceArguments,
    /// The file to write; '-' is the standard output ('xwarp capture -w - | xwarp explain -').
    #[arg(long, short, value_name = "FILE")]
    pub write: PathBuf,
    /// Ends the capture after SECONDS seconds.
    #[arg(long, short, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub seconds: Option<u64>,
}

/// Runs an unmodified program with its TCP connections over SDP.
///
/// Run both ends this way: 'xwarp sdp -- iperf3 -s' and 'xwarp sdp -- iperf3 -c HOST'. Connections to and from hosts
/// without SDP use kernel TCP. Rules in libsdp's grammar choose the transport: 'use {sdp|tcp|both} {server|client}
/// PROGRAM ADDRESS[/PREFIX]:PORT[-PORT]'; the first match counts.
///
/// Statically linked programs, programs with other privileges than their caller's, and calls through io_uring keep
/// using TCP.
///
/// Exit status: the program's; 126 for a program that cannot be run, or with '--only' not over SDP; 127 for one that is not
/// found; 1 for another error.
#[derive(Debug, Args)]
pub struct SdpArguments {
    /// The interface; needed if there are several, or if only xwarpd has one.
    #[arg(long, short, value_name = "IFACE")]
    device: Option<String>,
    /// The file with the rules.
    #[arg(long, short, value_name = "FILE", conflicts_with = "only")]
    rules: Option<PathBuf>,
    /// SDP only: connections to hosts without SDP are refused.
    #[arg(long)]
    only: bool,
    /// Prints how many bytes were transferred by RDMA when the program ends.
    #[arg(long)]
    statistics: bool,
    /// Records all frames of each process in a file in this directory; 'xwarp explain' reads them.
    #[arg(long, short, value_name = "DIRECTORY")]
    capture: Option<PathBuf>,
    /// The library 'libxwarp-sdp.so' [default: beside this program, or in its ../lib].
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

impl SdpArguments {
    /// How to run the program.
    pub fn options(&self) -> sdp::Options {
        let Self { library, device, rules, only, statistics, capture, .. } = self;
        sdp::Options {
            library: library.clone(),
            device: device.clone(),
            rules: rules.clone(),
            only: *only,
            statistics: *statistics,
            capture: capture.clone(),
        }
    }
}
