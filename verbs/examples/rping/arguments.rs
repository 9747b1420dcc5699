//! The command line.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use xwarp_verbs::{Markers, MpaConfig, RequestRevision, Rtr};

pub const USAGE: &str = "\
usage: rping INTERFACE -s|-c [-a ADDRESS] [OPTIONS]
  -s, -c              server or client
  -a ADDRESS          where to listen (default 0.0.0.0), or the server
  -p PORT             default 7174
  -C COUNT            rounds of the client (default 10)
  -S SIZE             bytes of the text (default 64; the same at both ends)
  -v                  print each text
  --no-crc            do not ask for CRC (it is used when the peer asks)
  --markers HOW       off, prefer (default) or require
  --mpa-rev 1|2       revision of the client's request (default 2)
  --p2p LIST          client: ask for peer-to-peer mode, with these of empty,send,write,read
  --wait SECONDS      longest wait for anything of the peer's (default 60)
  --pause MS          client: wait so long between connecting and the first message
  --private-data N    bytes of private data in the request or the reply
  --long-private-data allow more of it than Linux's siw survives, up to 508
  --reject            server: reject the client
  --abort             client: reset the connection after the last round instead of closing it
  --capture FILE      record all frames (pcapng)";

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Server,
    Client,
}

/// The command line.
#[derive(Debug, Clone)]
pub struct Arguments {
    pub interface: String,
    pub role: Role,
    pub address: SocketAddr,
    pub count: u32,
    pub size: usize,
    pub verbose: bool,
    pub mpa: MpaConfig,
    pub limit: Duration,
    pub pause: Duration,
    pub private_data: Vec<u8>,
    pub reject: bool,
    pub abort: bool,
    pub capture: Option<PathBuf>,
}

impl Arguments {
    pub fn parse(words: &[String]) -> Result<Self, String> {
        let mut words = words.iter().map(String::as_str);
        let interface = words.next().filter(|w| !w.starts_with('-')).ok_or("which interface?")?;
        let mut parsed = Self {
            interface: interface.to_owned(),
            role: Role::Server,
            address: SocketAddr::from(([0, 0, 0, 0], 7174)),
            count: 10,
            size: 64,
            verbose: false,
            mpa: MpaConfig::default(),
            limit: Duration::from_secs(60),
            pause: Duration::ZERO,
            private_data: Vec::new(),
            reject: false,
            abort: false,
            capture: None,
        };
        let (mut role, mut address) = (None, None);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word {
                "-s" => role = Some(Role::Server),
                "-c" => role = Some(Role::Client),
                "-a" => address = Some(number::<IpAddr>(value()?)?),
                "-p" => parsed.address.set_port(number(value()?)?),
                "-C" => parsed.count = number(value()?)?,
                "-S" => parsed.size = number(value()?)?,
                "-v" => parsed.verbose = true,
                "--wait" => parsed.limit = Duration::from_secs(number(value()?)?),
                "--pause" => parsed.pause = Duration::from_millis(number(value()?)?),
                "--private-data" => parsed.private_data = vec![b'a'; number(value()?)?],
                "--long-private-data" => parsed.mpa.private_data_bytes = 512,
                "--reject" => parsed.reject = true,
                "--abort" => parsed.abort = true,
                "--capture" => parsed.capture = Some(value()?.into()),
                "--no-crc" => parsed.mpa.crc = false,
                "--markers" => parsed.mpa.markers = markers(value()?)?,
                "--mpa-rev" => parsed.mpa.revision = revision(value()?)?,
                "--p2p" => {
                    parsed.mpa.peer_to_peer = value()?.split(',').map(rtr).collect::<Result<_, _>>()?;
                }
                _ => return Err(format!("unknown option {word}")),
            }
        }
        parsed.role = role.ok_or("-s or -c?")?;
        if let Some(address) = address {
            parsed.address.set_ip(address);
        } else if parsed.role == Role::Client {
            return Err("a client needs -a".into());
        }
        if parsed.size < 32 {
            return Err("a text has at least 32 bytes".into());
        }
        Ok(parsed)
    }
}

fn number<T: std::str::FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("cannot read {word}"))
}

fn markers(word: &str) -> Result<Markers, String> {
    match word {
        "off" => Ok(Markers::Off),
        "prefer" => Ok(Markers::Prefer),
        "require" => Ok(Markers::Require),
        _ => Err(format!("markers cannot be {word}")),
    }
}

fn revision(word: &str) -> Result<RequestRevision, String> {
    match word {
        "1" => Ok(RequestRevision::One),
        "2" => Ok(RequestRevision::PreferTwo),
        _ => Err(format!("there is no revision {word}")),
    }
}

fn rtr(word: &str) -> Result<Rtr, String> {
    match word {
        "empty" => Ok(Rtr::EmptyFpdu),
        "send" => Ok(Rtr::Send),
        "write" => Ok(Rtr::Write),
        "read" => Ok(Rtr::Read),
        _ => Err(format!("there is no ready-to-receive message {word}")),
    }
}
