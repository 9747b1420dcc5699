//! [`Endpoint`]: the device, opened as the command line says, and the one way in which this program waits.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use xwarp_verbs::{
    CompletionChannel, CompletionQueue, Device, DeviceOptions, DriverConfig, Markers, Mode, ModePreference,
    Progress, ProtectionDomain, Revision,
    cm::{ConnectionError, ConnectionRequest, Listener},
};

use crate::options::{DeviceArgs, MarkersArg, ModeArg, ProgressArg};

/// Nothing moved for so long: the other end is gone, or something is stuck. It must be longer than what
/// TCP needs to give up.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// One open device.
#[derive(Debug)]
pub struct Endpoint {
    /// The device.
    pub device: Device,
    /// The domain of everything here.
    pub pd: ProtectionDomain,
    /// Wakes us when we sleep (`-e`); `None` when we poll.
    pub channel: Option<CompletionChannel>,
}

impl Endpoint {
    /// Opens the interface that the command line names, or the only one there is.
    pub fn open(args: &DeviceArgs) -> Result<Self> {
        let name = match &args.device {
            Some(name) => name.clone(),
            None => only_interface()?,
        };
        let device =
            Device::open_with(&name, options(args)).with_context(|| format!("cannot open {name}"))?;
        Self::over(device, args.events)
    }

    /// Over a device that is open already. `events`: sleep instead of polling.
    pub fn over(device: Device, events: bool) -> Result<Self> {
        let pd = device.create_pd()?;
        let channel = if events { Some(CompletionChannel::new()?) } else { None };
        Ok(Self { device, pd, channel })
    }

    /// A completion queue that can wake us when we sleep.
    pub fn completion_queue(&self, capacity: u32) -> Result<CompletionQueue> {
        Ok(match &self.channel {
            Some(channel) => self.device.create_cq_with_channel(capacity, channel)?,
            None => self.device.create_cq(capacity)?,
        })
    }
}

/// The next connection that a client asks for, whenever it comes.
pub fn next_request(listener: &Listener) -> Result<ConnectionRequest> {
    loop {
        match listener.accept(Duration::from_secs(3600)) {
            Ok(request) => return Ok(request),
            Err(ConnectionError::TimeLimit) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How long we have been waiting for something to happen, and how we do it.
#[derive(Debug)]
pub struct Idle<'a> {
    endpoint: &'a Endpoint,
    queues: &'a [&'a CompletionQueue],
    since: Option<Instant>,
    spins: u32,
    armed: bool,
}

/// Looks at the clock once in so many empty polls.
const SPINS_PER_LOOK: u32 = 1024;
/// Longest sleep without a look around.
const NAP: Duration = Duration::from_millis(100);

impl<'a> Idle<'a> {
    /// Waits on these queues.
    pub fn new(endpoint: &'a Endpoint, queues: &'a [&'a CompletionQueue]) -> Self {
        Self { endpoint, queues, since: None, spins: 0, armed: false }
    }

    /// Something happened.
    pub fn over(&mut self) {
        (self.since, self.spins, self.armed) = (None, 0, false);
    }

    /// Nothing happened at the last look: spins, or sleeps until a queue has something. The first call after
    /// something happened only arms the queues, because they must be looked at once more after that.
    pub fn wait(&mut self, what: &str) -> Result<()> {
        if let Some(channel) = &self.endpoint.channel {
            if !self.armed {
                self.queues.iter().for_each(|queue| queue.arm(false));
                self.armed = true;
                return Ok(());
            }
            self.endpoint.device.wait(channel, Some(NAP))?;
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

/// The device's options from ours.
fn options(args: &DeviceArgs) -> DeviceOptions {
    let progress = match args.progress {
        ProgressArg::Auto => Progress::Auto,
        ProgressArg::Application => Progress::Application,
        ProgressArg::Thread => Progress::Thread,
    };
    let mut options = DeviceOptions { progress, ..Default::default() };
    options.capture.clone_from(&args.pcap);
    options.mpa.crc = !args.no_crc;
    options.mpa.markers = match args.markers {
        MarkersArg::Prefer => Markers::Prefer,
        MarkersArg::Require => Markers::Require,
        MarkersArg::Off => Markers::Off,
    };
    options.mpa.revision = if args.mpa_revision == 1 { Revision::One } else { Revision::Two };
    options.driver = DriverConfig {
        mode: match args.mode {
            ModeArg::Auto => ModePreference::Probe,
            ModeArg::Zerocopy => ModePreference::Force(Mode::ZeroCopy),
            ModeArg::Copy => ModePreference::Force(Mode::Copy),
            ModeArg::Generic => ModePreference::Force(Mode::Generic),
        },
        vlan: args.vlan,
        ..DriverConfig::default()
    };
    options
}

/// The name of the only interface besides the loopback.
fn only_interface() -> Result<String> {
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
