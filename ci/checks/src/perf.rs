//! Runs `xwarp-perf` between the two ends of a lab and checks the traffic.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::{
    capture,
    framing::{self, Connection},
    lab::{Family, INTERFACE, Lab, Side},
    process::Running,
    tshark,
};

/// A run with a server in B and a client in A.
#[derive(Debug, Clone)]
pub struct Perf<'a> {
    lab: &'a Lab,
    program: PathBuf,
    test: &'static str,
    family: Family,
    both: Vec<String>,
    server: Vec<String>,
    client: Vec<String>,
    limit: Duration,
    capture: bool,
}

/// The results of a run.
#[derive(Debug)]
pub struct Ran {
    /// The client's JSON.
    pub client: Value,
    /// The server's JSON.
    pub server: Value,
    /// The client's capture, if requested.
    pub capture: Option<PathBuf>,
    /// The client's output.
    pub printed: String,
}

impl<'a> Perf<'a> {
    /// `test` is a subcommand (`send_bw`); `program` is the path of `xwarp-perf`.
    pub fn new(lab: &'a Lab, program: impl AsRef<Path>, test: &'static str) -> Self {
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        Self {
            lab,
            program: program.as_ref().to_owned(),
            test,
            family: Family::V4,
            both: words("--verify"),
            server: Vec::new(),
            client: Vec::new(),
            limit: Duration::from_mins(2),
            capture: false,
        }
    }

    /// Sets the address family.
    #[must_use]
    pub fn over(mut self, family: Family) -> Self {
        self.family = family;
        self
    }

    /// Adds options of both ends, as one line.
    #[must_use]
    pub fn both(mut self, line: &str) -> Self {
        self.both.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds options of the server.
    #[must_use]
    pub fn server(mut self, line: &str) -> Self {
        self.server.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// Adds options of the client.
    #[must_use]
    pub fn client(mut self, line: &str) -> Self {
        self.client.extend(line.split_whitespace().map(str::to_owned));
        self
    }

    /// Captures the client's traffic, with complete checksums.
    #[must_use]
    pub fn captured(mut self) -> Self {
        self.capture = true;
        self
    }

    /// Starts the server and waits until it listens.
    pub fn start_server(&self) -> Result<Running> {
        let mut server = self.start(Side::B, &self.server, None)?;
        server.wait_for("Waiting for a client", Duration::from_secs(30))?;
        Ok(server)
    }

    /// Starts the client.
    pub fn start_client(&self) -> Result<Running> {
        let address = self.lab.address(Side::B, self.family).to_string();
        self.start(Side::A, &self.client, Some(&address))
    }

    fn start(&self, side: Side, own: &[String], server: Option<&str>) -> Result<Running> {
        let json = self.json(side);
        let _ = fs::remove_file(&json);
        let json = json.to_string_lossy().into_owned();
        let pcap = self.pcap().to_string_lossy().into_owned();
        let mut args = vec![self.test, "-d", INTERFACE, "--out_json", "--out_json_file", &json];
        args.extend(self.both.iter().chain(own).map(String::as_str));
        if self.capture {
            self.lab.without_checksum_offload(side)?;
        }
        if self.capture && side == Side::A {
            args.extend(["--pcap", &pcap]);
        }
        args.extend(server);
        self.lab.start(side, &self.program, &args)
    }

    fn json(&self, side: Side) -> PathBuf {
        self.lab.file(&format!("{}-{side:?}.json", self.test))
    }

    fn pcap(&self) -> PathBuf {
        self.lab.file(&format!("{}.pcapng", self.test))
    }

    /// Runs both ends; both must succeed.
    pub fn run(&self) -> Result<Ran> {
        let mut server = self.start_server()?;
        let client = self.start_client()?;
        let printed = match client.finish(self.limit) {
            Ok(printed) => printed,
            Err(error) => {
                // The server's message is more specific than the client's failure.
                let _ = server.wait(Duration::from_secs(5));
                bail!("{error:#}\nserver:\n{}", server.output());
            }
        };
        server.finish(Duration::from_secs(30))?;
        let read = |side| -> Result<Value> {
            let text = fs::read_to_string(self.json(side)).context("no JSON was written")?;
            serde_json::from_str(&text).context("the result is not JSON")
        };
        let capture = self.capture.then(|| self.pcap());
        Ok(Ran { client: read(Side::A)?, server: read(Side::B)?, capture, printed })
    }
}

/// Expected properties of a capture that has no faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Markers in the direction to the server, and to the client.
    pub markers: (bool, bool),
    /// CRCs in use.
    pub crc: bool,
    /// MPA revision.
    pub revision: u8,
}

impl Default for Expected {
    fn default() -> Self {
        Self { markers: (true, true), crc: true, revision: 2 }
    }
}

impl Ran {
    /// Value of a counter of the client.
    pub fn counter(&self, name: &str) -> u64 {
        self.client["xwarp"]["counters"][name].as_u64().unwrap_or(0)
    }

    /// Whether either end has sent a segment more than once, as happens on a loaded machine.
    pub fn retransmitted(&self) -> bool {
        [&self.client, &self.server]
            .iter()
            .any(|end| end["xwarp"]["counters"]["tcp.retransmits"].as_u64().unwrap_or(0) > 0)
    }

    /// Checks the capture's TCP streams and FPDUs: every connection must match the expectation and have no
    /// faults.
    pub fn judge_framing(&self, expected: Expected) -> Result<Vec<Connection>> {
        let path = self.capture.as_deref().context("the run was not captured")?;
        let connections = framing::connections(&capture::streams(path)?);
        ensure!(!connections.is_empty(), "no MPA connection was captured");
        for connection in &connections {
            ensure!(connection.faults.is_empty(), "{}", connection.faults.join("\n"));
            let found =
                Expected { markers: connection.markers, crc: connection.crc, revision: connection.revision };
            ensure!(found == expected, "found {found:?}, expected {expected:?}");
            ensure!(connection.fpdus > 0 && connection.terminates == 0, "{connection:?}");
            if found.markers != (false, false) {
                ensure!(connection.marker_count > 0, "no marker in {} FPDUs", connection.fpdus);
            }
        }
        Ok(connections)
    }

    /// Checks the same, and Wireshark's verdict.
    pub fn judge(&self, expected: Expected) -> Result<()> {
        let connections = self.judge_framing(expected)?;
        let path = self.capture.as_deref().context("the run was not captured")?;
        let markers = expected.markers != (false, false);
        let verdict = tshark::judge(path, markers)?;
        ensure!(verdict.complaints.is_empty(), "Wireshark complains:\n{}", verdict.complaints.join("\n"));
        ensure!(verdict.tcp_frames == verdict.frames, "expected only TCP frames: {verdict:?}");
        if markers {
            return Ok(());
        }
        // The dissector does not recognise a connection whose first FPDU was sent twice, as happens on a loaded machine.
        let fpdus = |which: fn(&&Connection) -> bool| -> usize {
            connections.iter().filter(which).map(|connection| connection.fpdus).sum()
        };
        let possible = fpdus(|connection| !connection.repeats_first)..=fpdus(|_| true);
        ensure!(verdict.mpa_frames > 0 || *possible.start() == 0, "Wireshark found no MPA: {verdict:?}");
        if expected.crc {
            ensure!(possible.contains(&verdict.good_crcs), "{possible:?} FPDUs, but {verdict:?}");
        }
        Ok(())
    }
}
