//! [`Endpoint`]: the device, opened with the options of the command line, and [`Idle`], the only way a test
//! waits.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::{
    CompletionChannel, CompletionQueue, Device, DeviceOptions, DriverConfig, Keepalive, Markers, MpaConfig,
    Progress, ProtectionDomain, QueuePair, RdmaTcpConfig, RequestRevision,
    cm::{ConnectionError, ConnectionRequest, Listener},
};

use crate::options::{DeviceArgs, FramingArg, MarkersArg, ProgressArg};

/// Number of keepalive probes before a peer is considered dead.
const PROBES: u32 = 5;

/// Longest wait without an event before a test fails. It exceeds TCP's user timeout and the default
/// keepalive time, which report a more precise reason.
pub const PATIENCE: Duration = Duration::from_secs(40);

/// An open device, or one of its engines.
#[derive(Debug)]
pub struct Endpoint {
    /// The device.
    pub device: Device,
    /// The engine that has the queue pairs; `None`: the device has one.
    engine: Option<u16>,
    /// The protection domain of all regions and queue pairs.
    pub pd: ProtectionDomain,
    /// The channel that wakes a sleeping test (`-e`); `None` when the test polls.
    pub channel: Option<CompletionChannel>,
}

impl Endpoint {
    /// Opens the named interface, or the only one. Prints a note for each option that has no effect.
    pub fn open(args: &DeviceArgs) -> Result<Self> {
        for note in args.ignored.notes() {
            eprintln!("xwarp-perf: {note}");
        }
        let name = interface_name(args.device.as_deref())?;
        let device =
            Device::open_with(&name, options(args)).with_context(|| format!("cannot open {name}"))?;
        Self::over(device, args.events)
    }

    /// Opens the interface with several engines that run in parallel: an endpoint for each.
    pub fn open_engines(args: &DeviceArgs, engines: u16) -> Result<Vec<Self>> {
        if engines == 1 {
            return Ok(vec![Self::open(args)?]);
        }
        let name = interface_name(args.device.as_deref())?;
        let device = Device::open_with(&name, DeviceOptions { engines, ..options(args) })
            .with_context(|| format!("cannot open {name} with {engines} engines"))?;
        let endpoint = |engine| {
            let endpoint = Self::over(device.clone(), args.events)?;
            Ok(Self { engine: Some(engine), ..endpoint })
        };
        (0..engines).map(endpoint).collect()
    }

    /// Creates an endpoint on an open device. With `events` it sleeps instead of polling.
    pub fn over(device: Device, events: bool) -> Result<Self> {
        let pd = device.create_pd()?;
        let channel = if events { Some(CompletionChannel::new()?) } else { None };
        Ok(Self { device, engine: None, pd, channel })
    }

    /// A new queue pair, in the endpoint's engine.
    pub fn own(&self, qp: QueuePair) -> Result<QueuePair> {
        if let Some(engine) = self.engine {
            qp.move_to_engine(engine)?;
        }
        Ok(qp)
    }

    /// Creates a completion queue; it wakes the test if the test sleeps.
    pub fn completion_queue(&self, capacity: u32) -> Result<CompletionQueue> {
        Ok(match &self.channel {
            Some(channel) => self.device.create_cq_with_channel(capacity, channel)?,
            None => self.device.create_cq(capacity)?,
        })
    }
}

/// Waits for the next connection request, without a time limit.
pub fn next_request(listener: &Listener) -> Result<ConnectionRequest> {
    loop {
        match listener.accept(Duration::from_secs(3600)) {
            Ok(request) => return Ok(request),
            Err(ConnectionError::TimeLimit) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A wait for completions, by spinning or sleeping, with a time limit.
#[derive(Debug)]
pub struct Idle<'a> {
    endpoint: &'a Endpoint,
    queues: &'a [&'a CompletionQueue],
    since: Option<Instant>,
    spins: u32,
    armed: bool,
}

/// Number of empty polls between two readings of the clock.
const SPINS_PER_LOOK: u32 = 1024;
/// Longest sleep between two readings of the clock.
const NAP: Duration = Duration::from_millis(100);

impl<'a> Idle<'a> {
    /// Creates a wait for completions on these queues.
    pub fn new(endpoint: &'a Endpoint, queues: &'a [&'a CompletionQueue]) -> Self {
        Self { endpoint, queues, since: None, spins: 0, armed: false }
    }

    /// Restarts the time limit after an event.
    pub fn over(&mut self) {
        (self.since, self.spins, self.armed) = (None, 0, false);
    }

    /// Spins once, or sleeps until a queue has a completion. The first call after an event only arms the
    /// queues, because the caller must poll them again after arming.
    pub fn wait(&mut self, what: &str) -> Result<()> {
        if let Some(channel) = &self.endpoint.channel {
            if !self.armed {
                self.queues.iter().for_each(|queue| queue.arm(false));
                self.armed = true;
                return Ok(());
            }
            self.endpoint.device.wait_notification(channel, Some(NAP))?;
            while channel.poll().is_some() {}
            self.armed = false;
            return self.look(what);
        }
        self.spins += 1;
        if self.spins.is_multiple_of(SPINS_PER_LOOK) {
            return self.look(what);
        }
        std::hint::spin_loop();
        Ok(())
    }

    fn look(&mut self, what: &str) -> Result<()> {
        let since = *self.since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE {
            bail!("{what}: nothing happened for {} seconds", PATIENCE.as_secs());
        }
        Ok(())
    }
}

/// Starts the probes after half of `time`, so that the connection of a dead peer ends after `time` (a tenth more at the server,
/// which accepted the connection); `None` for 0.
fn keepalive(time: Duration) -> Option<Keepalive> {
    let keepalive = Keepalive { idle: time / 2, interval: time / (2 * PROBES), probes: PROBES };
    (!time.is_zero()).then_some(keepalive)
}

/// Converts the command line to device options.
fn options(args: &DeviceArgs) -> DeviceOptions {
    let progress = match args.progress {
        ProgressArg::Auto => Progress::Auto,
        ProgressArg::Application => Progress::Application,
        ProgressArg::Thread => Progress::Thread,
    };
    let mut options = DeviceOptions { progress, ..Default::default() };
    options.tcp.keepalive = keepalive(args.keepalive);
    options.tcp.algorithm = args.congestion;
    // The lower two bits are ECN, which TCP sets.
    options.tcp.dscp = args.tos >> 2;
    if let Some(hops) = args.hop_limit {
        options.tcp.hop_limit = hops;
    }
    options.capture.clone_from(&args.pcap);
    options.framing = match args.framing {
        FramingArg::Mpa => MpaConfig {
            crc: !args.no_crc,
            markers: match args.markers {
                MarkersArg::Prefer => Markers::Prefer,
                MarkersArg::Require => Markers::Require,
                MarkersArg::Off => Markers::Off,
            },
            permissive: args.permissive,
            revision: match args.mpa_revision {
                1 => RequestRevision::One,
                _ => RequestRevision::PreferTwo,
            },
            ..MpaConfig::default()
        }
        .into(),
        FramingArg::RdmaTcp => RdmaTcpConfig::default().into(),
    };
    options.driver = DriverConfig {
        mode: args.mode.preference(),
        vlan: args.vlan,
        replace_program: args.replace_program,
        ..DriverConfig::default()
    };
    options
}

/// The named interface, or the only one besides the loopback.
pub fn interface_name(named: Option<&str>) -> Result<String> {
    if let Some(name) = named {
        return Ok(name.to_owned());
    }
    let mut names: Vec<String> = fs::read_dir("/sys/class/net")
        .context("cannot list the interfaces: name one with -d")?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name != "lo")
        .collect();
    names.sort_unstable();
    match names.as_slice() {
        [name] => Ok(name.clone()),
        [] => bail!("there is no interface besides the loopback"),
        _ => bail!("there are several interfaces, name one with -d: {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::options::{Cli, Command};

    fn options_of(line: &str) -> DeviceOptions {
        let cli = Cli::try_parse_from(std::iter::once("xwarp-perf").chain(line.split_whitespace())).unwrap();
        let Command::WriteBw(args) = cli.command else { panic!("not write_bw") };
        options(&args.rnic.device)
    }

    #[test]
    fn a_dead_peer_is_detected_within_the_keepalive_time() {
        let found = options_of("write_bw --keepalive 4").tcp.keepalive.unwrap();
        assert_eq!(found.idle + found.interval * found.probes, Duration::from_secs(4));
        assert_eq!(options_of("write_bw").tcp.keepalive, Some(Keepalive::default()));
        assert_eq!(options_of("write_bw --keepalive 0").tcp.keepalive, None);
    }

    #[test]
    fn the_command_line_reaches_the_packets_and_the_driver() {
        let found = options_of("write_bw -T 106 -L 3 --replace-program");
        assert_eq!((found.tcp.dscp, found.tcp.hop_limit, found.driver.replace_program), (26, 3, true));
        assert!(!options_of("write_bw").driver.replace_program);
    }
}
