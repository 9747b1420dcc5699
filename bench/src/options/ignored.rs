//! [`IgnoredArgs`]: options of perftest that are accepted for compatibility and have no effect. Each use
//! prints a note on standard error with the reason.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};

/// An option without effect.
#[derive(Debug)]
struct IgnoredOption {
    short: Option<char>,
    long: &'static str,
    /// Name of its value in the help; `None` for a flag.
    value: Option<&'static str>,
    reason: &'static str,
}

const fn flag(long: &'static str, reason: &'static str) -> IgnoredOption {
    IgnoredOption { short: None, long, value: None, reason }
}

const fn option(long: &'static str, value: &'static str, reason: &'static str) -> IgnoredOption {
    IgnoredOption { short: None, long, value: Some(value), reason }
}

impl IgnoredOption {
    const fn short(self, short: char) -> Self {
        Self { short: Some(short), ..self }
    }
}

const NOT_INFINIBAND: &str = "it means something to InfiniBand only";
const NOT_A_BUS: &str = "a software RNIC has no PCIe bus of its own";
const ONE_PORT: &str = "an interface is one port";
const NOT_A_FILE: &str = "the buffers are anonymous memory, which every device of the host can share";

const IGNORED: &[IgnoredOption] = &[
    flag("CPU-freq", "the clock used here does not depend on the CPU's frequency").short('F'),
    option("ib-port", "PORT", ONE_PORT).short('i'),
    flag("report-per-port", ONE_PORT),
    flag("dualport", ONE_PORT).short('O'),
    option("gid-index", "INDEX", "iWARP has IP addresses and no GIDs: see --bind_source_ip").short('x'),
    option("mtu", "MTU", "the MTU is the interface's, and path MTU discovery adapts it").short('m'),
    option("sl", "SL", NOT_INFINIBAND).short('S'),
    option("dlid", "LID", NOT_INFINIBAND),
    option("pkey_index", "INDEX", NOT_INFINIBAND),
    option("qp-timeout", "TIMEOUT", "TCP measures its retransmission time-out").short('u'),
    option("retry_count", "COUNT", "TCP retransmits until its user timeout"),
    option("vector", "VECTOR", "there is one completion vector").short('X'),
    option("margin", "SECONDS", "with -D the whole duration is measured").short('f'),
    option("report-counters", "NAMES", "see --stats").short('W'),
    flag("comm_rdma_cm", "the control connection always uses the connection manager").short('z'),
    flag("dont_xchg_versions", "both ends always exchange versions"),
    option("force-link", "TYPE", "the link is Ethernet"),
    option("inline_recv", "BYTES", "received data is always placed directly"),
    flag("mr_per_qp", "each queue pair has a part of its own in one region"),
    flag("odp", "registration pins nothing, so all memory is paged on demand"),
    flag("use_hugepages", "the buffers are as large as the messages in flight"),
    flag("use_old_post_send", "there is one way to post"),
    flag("perform_warm_up", "the connections are up and the memory is mapped before a row begins"),
    flag("report-both", "both ends print the sum of both directions"),
    option("wait_destroy", "SECONDS", "closing waits until the peer has everything"),
    flag("disable_pcie_relaxed", NOT_A_BUS),
    flag("no_lock", "the engine has one lock, which only its users take"),
    flag("disable_dynamic_polling", "polling takes as many completions as there are"),
    option("cqe_poll", "COUNT", "polling takes as many completions as there are"),
    option("mmap", "FILE", NOT_A_FILE),
    option("mmap-offset", "BYTES", NOT_A_FILE),
    option("rate_limit_type", "TYPE", "the limiter is always the program's own (SW)"),
    option("typical_pkt_size", "BYTES", "it means something to limiters in hardware only"),
];

impl IgnoredOption {
    fn to_arg(&self) -> Arg {
        let help = format!("No effect: {}", self.reason);
        let arg =
            Arg::new(self.long).long(self.long).help(help).help_heading("perftest's options without effect");
        let arg = if let Some(short) = self.short { arg.short(short) } else { arg };
        match self.value {
            Some(value) => arg.value_name(value),
            None => arg.action(ArgAction::SetTrue),
        }
    }
}

/// The ignored options that were given.
#[derive(Debug, Clone, Default)]
pub struct IgnoredArgs(Vec<usize>);

impl IgnoredArgs {
    /// A line for each ignored option that was given: its name and why it has no effect.
    pub fn notes(&self) -> impl Iterator<Item = String> + '_ {
        self.0
            .iter()
            .map(|&index| format!("--{} has no effect: {}", IGNORED[index].long, IGNORED[index].reason))
    }
}

impl Args for IgnoredArgs {
    fn augment_args(command: Command) -> Command {
        command.args(IGNORED.iter().map(IgnoredOption::to_arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for IgnoredArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given =
            |option: &IgnoredOption| matches.value_source(option.long) == Some(ValueSource::CommandLine);
        Ok(Self((0..IGNORED.len()).filter(|&index| given(&IGNORED[index])).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
