//! Environment variables, all with the prefix `XWARP_`. `docs/compat.md` describes them.

use std::{io::IsTerminal as _, ops::RangeInclusive, path::PathBuf, sync::OnceLock, time::Duration};

use xwarp_verbs::{Algorithm, DeviceOptions, FramingConfig, Markers, MpaConfig, Progress, RequestRevision};

/// Default vendor of devices: a locally administered identifier.
const OWN_VENDOR: u32 = 0x02_5857;

/// Port of connections by queue pair number. Both ends must use the same one.
const PAIRING_PORT: u16 = 4794;

/// Default of `XWARP_TIMEOUT`, in seconds.
const TIMEOUT: u32 = 30;

/// The kind of device that programs see. The connections are iWARP's with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Face {
    /// An RNIC of iWARP.
    Iwarp,
    /// An RNIC of an unspecified transport, for programs that use less of an iWARP device.
    Unspecified,
    /// A channel adapter with a port of RoCE version 2, for programs that refuse iWARP or use less of it.
    Roce,
}

/// The configuration in the environment.
pub struct Config {
    /// The interfaces that are devices; `None`: all suitable ones.
    pub devices: Option<Vec<String>>,
    /// The fabric whose host is the only device; `None`: interfaces are devices.
    pub fabric: Option<OfFabric>,
    /// `vendor_id` of the device attributes.
    pub vendor: u32,
    /// The kind of device that programs see.
    pub face: Face,
    /// Port of connections by queue pair number; `None`: there are none.
    pub pairing_port: Option<u16>,
    /// The librdmacm.so.1 whose rsockets are used; `None`: the distribution's.
    pub rsockets: Option<String>,
    markers: Markers,
    crc: bool,
    /// Whether initiators ask for peer-to-peer mode (RFC 6581 section 5). Without it they fall back to revision 1 of MPA.
    is_peer_to_peer: bool,
    revision: RequestRevision,
    progress: Progress,
    congestion: Algorithm,
    engines: u16,
    capture: Option<PathBuf>,
    replaces_program: bool,
    /// Time for which a connection survives without an answer, or without its local address.
    timeout: Duration,
}

/// The host of a fabric that this process is.
pub struct OfFabric {
    /// The fabric's name.
    pub name: String,
    /// The host's name; empty for `localhost`.
    pub host: String,
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The number that a variable has, decimal or hexadecimal (0x). Warns when it is none in this range.
fn number(name: &str, default: u32, range: RangeInclusive<u32>) -> u32 {
    let Some(text) = variable(name) else { return default };
    let hex = text.strip_prefix("0x").map(|hex| u32::from_str_radix(hex, 16).ok());
    let found = hex.unwrap_or_else(|| text.parse().ok()).filter(|number| range.contains(number));
    if found.is_none() {
        let (first, last) = range.into_inner();
        say!("{name}={text} is no number from {first} to {last}: {default} is used");
    }
    found.unwrap_or(default)
}

/// The choice that a variable names. Warns when the value is none of the names.
fn choice<T: Copy>(name: &str, default: T, choices: &[(&str, T)]) -> T {
    let Some(value) = variable(name) else { return default };
    let found = choices.iter().find(|(word, _)| *word == value);
    if found.is_none() {
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        say!("{name}={value} is none of {}", words.join(", "));
    }
    found.map_or(default, |(_, value)| *value)
}

impl Config {
    fn read() -> Self {
        let names = |list: String| {
            list.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::to_owned).collect()
        };
        Self {
            devices: variable("XWARP_DEVICES").map(names),
            fabric: variable("XWARP_FABRIC")
                .map(|name| OfFabric { name, host: variable("XWARP_FABRIC_HOST").unwrap_or_default() }),
            vendor: number("XWARP_VENDOR_ID", OWN_VENDOR, 0..=u32::MAX),
            face: choice(
                "XWARP_AS",
                Face::Iwarp,
                &[("iwarp", Face::Iwarp), ("unspecified", Face::Unspecified), ("roce", Face::Roce)],
            ),
            pairing_port: u16::try_from(number("XWARP_PAIRING_PORT", PAIRING_PORT.into(), 0..=0xffff))
                .ok()
                .filter(|port| *port > 0),
            rsockets: variable("XWARP_RSOCKETS"),
            markers: choice(
                "XWARP_MARKERS",
                Markers::Prefer,
                &[("off", Markers::Off), ("prefer", Markers::Prefer), ("require", Markers::Require)],
            ),
            crc: choice("XWARP_CRC", true, &[("on", true), ("off", false)]),
            is_peer_to_peer: choice("XWARP_PEER_TO_PEER", true, &[("on", true), ("off", false)]),
            revision: choice(
                "XWARP_MPA_REVISION",
                RequestRevision::default(),
                &[("1", RequestRevision::One), ("2", RequestRevision::PreferTwo)],
            ),
            progress: choice(
                "XWARP_PROGRESS",
                Progress::Auto,
                &[("auto", Progress::Auto), ("thread", Progress::Thread)],
            ),
            congestion: choice(
                "XWARP_CONGESTION",
                Algorithm::default(),
                &Algorithm::ALL.map(|algorithm| (algorithm.name(), algorithm)),
            ),
            engines: u16::try_from(number("XWARP_ENGINES", 1, 1..=0xffff)).unwrap_or(1),
            capture: variable("XWARP_CAPTURE").map(PathBuf::from),
            timeout: Duration::from_secs(number("XWARP_TIMEOUT", TIMEOUT, 1..=86_400).into()),
            replaces_program: choice("XWARP_REPLACE_PROGRAM", false, &[("0", false), ("1", true)]),
        }
    }

    /// The options of the device on `interface`. Frames of the process's first device are recorded in the file of
    /// `XWARP_CAPTURE`, those of further ones in files beside it.
    pub fn device_options(&self, interface: &str, is_first: bool) -> DeviceOptions {
        let beside = |file: &PathBuf| {
            let name = file.file_stem().unwrap_or_default().to_string_lossy();
            let ending = file.extension().map(|ending| format!(".{}", ending.to_string_lossy()));
            file.with_file_name(format!("{name}-{interface}{}", ending.unwrap_or_default()))
        };
        let capture = if is_first { self.capture.clone() } else { self.capture.as_ref().map(beside) };
        // Programs of C may send first at either end: the initiator's ready-to-receive message lets the responder do so.
        let Self { markers, crc, revision, .. } = *self;
        let mpa = MpaConfig { markers, crc, revision, ..MpaConfig::default() };
        // Revision 1 does not have that mode.
        let asks = self.is_peer_to_peer && revision != RequestRevision::One;
        let mpa = if asks { mpa.either_speaks_first() } else { mpa };
        let mut options = DeviceOptions {
            engines: self.engines,
            progress: self.progress,
            capture,
            framing: FramingConfig::Mpa(mpa),
            fabric: self.fabric.as_ref().map(|fabric| fabric.name.clone()),
            ..DeviceOptions::default()
        };
        options.driver.replace_program = self.replaces_program;
        options.driver.address_limit = self.timeout;
        options.tcp.user_timeout = self.timeout;
        options.tcp.algorithm = self.congestion;
        if let Some(keepalive) = &mut options.tcp.keepalive {
            // An idle connection survives as long: half of the time until the first probe, and the rest for the others.
            keepalive.idle = self.timeout / 2;
            keepalive.interval = self.timeout / 2 / keepalive.probes.max(1);
        }
        options
    }

    /// Whether the interface `name` may be a device.
    pub fn allows(&self, name: &str) -> bool {
        self.devices.as_ref().is_none_or(|names| names.iter().any(|allowed| allowed == name))
    }
}

/// The configuration of this process, read at first use, which also starts logging if it is configured.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| {
        if let Some(filter) = variable("XWARP_LOG") {
            let filter = tracing_subscriber::EnvFilter::new(filter);
            // A log that cannot be written loses lines: by default the subscriber would report that, and panic.
            let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
            let log = log.with_ansi(std::io::stderr().is_terminal()).log_internal_errors(false);
            let _ = log.try_init();
        }
        Config::read()
    })
}
