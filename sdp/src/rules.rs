//! Rules that choose the connections of a program that use SDP, in the grammar of libsdp's configuration file:
//!
//! ```text
//! # comment
//! use {sdp|tcp|both} {server|listen|client|connect} PROGRAM|* ADDRESS[/PREFIX]|*:PORT[-PORT]|*
//! log [destination stderr|syslog|file FILE] [min-level 1-9]
//! ```
//!
//! `server` and `client` are synonyms of `listen` and `connect`. The program is a pattern with `*` and `?` for its
//! short name. An IPv6 address may stand in brackets. The first rule that matches counts; without one it is `both`.

use std::{net::IpAddr, net::SocketAddr, str::FromStr};

/// The transport that a rule selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// SDP only.
    Sdp,
    /// TCP only.
    Tcp,
    /// A listener accepts both; a connection tries SDP, then TCP.
    Both,
}

/// What the program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The program listens at the address.
    Listen,
    /// The program connects to the address.
    Connect,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    what: Use,
    role: Role,
    program: String,
    /// Address and length of its prefix; `None` is every address.
    network: Option<(IpAddr, u32)>,
    ports: (u16, u16),
}

/// The rules of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules(Vec<Rule>);

/// The reason why a configuration file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct RuleError {
    /// The line, from 1.
    pub line: usize,
    /// The problem, as text.
    pub reason: String,
}

impl Rules {
    /// The transport for `address`. A listener's port or IP address may be unspecified.
    pub fn decide(&self, role: Role, program: &str, address: SocketAddr) -> Use {
        let fits = |rule: &&Rule| {
            rule.role == role
                && matches(rule.program.as_bytes(), program.as_bytes())
                && rule.network.is_none_or(|(network, prefix)| contains(network, prefix, address.ip()))
                && (rule.ports.0..=rule.ports.1).contains(&address.port())
        };
        self.0.iter().find(fits).map_or(Use::Both, |rule| rule.what)
    }
}

impl FromStr for Rules {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let mut rules = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let words: Vec<&str> =
                line.split('#').next().unwrap_or_default().split_ascii_whitespace().collect();
            let failed = |reason: String| RuleError { line: index + 1, reason };
            match words.as_slice() {
                // The environment of the process chooses the log level.
                [] | ["log", ..] => {}
                ["use", what, role, program, address] => {
                    rules.push(rule(what, role, program, address).map_err(failed)?);
                }
                ["use", ..] => return Err(failed("a rule is: use WHAT ROLE PROGRAM ADDRESS:PORT".into())),
                [word, ..] => return Err(failed(format!("unknown word {word:?}"))),
            }
        }
        Ok(Self(rules))
    }
}

fn rule(what: &str, role: &str, program: &str, address: &str) -> Result<Rule, String> {
    let what = match what {
        "sdp" => Use::Sdp,
        "tcp" => Use::Tcp,
        "both" => Use::Both,
        _ => return Err(format!("{what:?} is not sdp, tcp or both")),
    };
    let role = match role {
        "server" | "listen" => Role::Listen,
        "client" | "connect" => Role::Connect,
        _ => return Err(format!("{role:?} is not server, listen, client or connect")),
    };
    let (address, ports) = address.rsplit_once(':').ok_or_else(|| format!("no port in {address:?}"))?;
    let port = |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is no port"));
    let ports = match ports.split_once('-') {
        None if ports == "*" => (0, u16::MAX),
        None => (port(ports)?, port(ports)?),
        Some((first, last)) => (port(first)?, port(last)?),
    };
    let network = match address {
        "*" => None,
        address => Some(network(address)?),
    };
    Ok(Rule { what, role, program: program.to_owned(), network, ports })
}

fn network(text: &str) -> Result<(IpAddr, u32), String> {
    let (address, prefix) = text.split_once('/').map_or((text, None), |(ip, prefix)| (ip, Some(prefix)));
    let address = address.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(address);
    let ip: IpAddr = address.parse().map_err(|_| format!("{address:?} is no address"))?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    let prefix = match prefix {
        None => most,
        Some(prefix) => prefix
            .parse()
            .ok()
            .filter(|prefix| *prefix <= most)
            .ok_or_else(|| format!("{prefix:?} is no length of a prefix"))?,
    };
    Ok((ip, prefix))
}

fn contains(network: IpAddr, prefix: u32, ip: IpAddr) -> bool {
    let same = |a: u128, b: u128, bits: u32| (a ^ b).checked_shr(bits - prefix).unwrap_or(0) == 0;
    match (network, ip) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

/// Whether `text` matches a pattern with `*` and `?`. The time is bounded by the product of the lengths.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // The pattern after the last star, and the shortest text that the star matches.
    let mut star = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
            }
            Some(c) if *c == b'?' || Some(c) == text.get(t) => (p, t) = (p + 1, t + 1),
            _ => {
                let Some((behind, taken)) = star else { return false };
                star = Some((behind, taken + 1));
                (p, t) = (behind, taken + 1);
            }
        }
    }
    pattern.get(p..).is_some_and(|rest| rest.iter().all(|c| *c == b'*'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_first_rule_that_matches_counts() {
        let rules: Rules = "# my rules\n\
            log min-level 9 destination file /tmp/x\n\
            use tcp server sshd *:22   # never\n\
            use sdp connect iperf* 10.0.0.0/8:5000-6000\n\
            use tcp client * [fd77::]/16:*\n\
            use both listen * *:*\n"
            .parse()
            .unwrap();
        assert_eq!(rules.decide(Role::Listen, "sshd", at("0.0.0.0:22")), Use::Tcp);
        assert_eq!(rules.decide(Role::Listen, "sshd", at("0.0.0.0:23")), Use::Both);
        assert_eq!(rules.decide(Role::Connect, "iperf3", at("10.1.2.3:5201")), Use::Sdp);
        assert_eq!(rules.decide(Role::Connect, "iperf3", at("11.1.2.3:5201")), Use::Both);
        assert_eq!(rules.decide(Role::Connect, "iperf3", at("10.1.2.3:6001")), Use::Both);
        assert_eq!(rules.decide(Role::Connect, "curl", at("[fd77::2]:80")), Use::Tcp);
        assert_eq!(rules.decide(Role::Connect, "curl", at("[fd78::2]:80")), Use::Both);
        assert_eq!(Rules::default().decide(Role::Connect, "curl", at("1.2.3.4:80")), Use::Both);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, says) in [
            ("\nuse udp server * *:*", "line 2: \"udp\" is not sdp, tcp or both"),
            ("use sdp both * *:*", "line 1: \"both\" is not server, listen, client or connect"),
            ("use sdp server *", "line 1: a rule is: use WHAT ROLE PROGRAM ADDRESS:PORT"),
            ("use sdp server * *", "line 1: no port in \"*\""),
            ("use sdp server * *:http", "line 1: \"http\" is no port"),
            ("use sdp server * *:70000", "line 1: \"70000\" is no port"),
            ("use sdp server * 10.0.0.0/33:*", "line 1: \"33\" is no length of a prefix"),
            ("use sdp server * host:80", "line 1: \"host\" is no address"),
            ("match both", "line 1: unknown word \"match\""),
        ] {
            assert_eq!(text.parse::<Rules>().unwrap_err().to_string(), says);
        }
    }

    #[test]
    fn prefixes_of_every_length_match() {
        assert!(contains([0; 4].into(), 0, [255; 4].into()));
        assert!(contains([10, 128, 0, 0].into(), 9, [10, 255, 1, 1].into()));
        assert!(!contains([10, 128, 0, 0].into(), 9, [10, 127, 1, 1].into()));
        let six = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(contains(six("::"), 0, six("ffff::")));
        assert!(
            contains(six("fd77::1"), 128, six("fd77::1")) && !contains(six("fd77::1"), 128, six("fd77::2"))
        );
        assert!(!contains(six("::"), 0, [1, 2, 3, 4].into()));
    }

    #[test]
    fn patterns_match_names() {
        for (pattern, text, expected) in [
            ("*", "", true),
            ("ipe?f*", "iperf3", true),
            ("ipe?f", "iperf3", false),
            ("*f*3", "iperf3", true),
            ("a*a*b", "aaaaaaaa", false),
            ("", "x", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
    }
}
