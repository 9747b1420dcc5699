//! [`Hosts`]: the table of the fabric's hosts.

use std::net::IpAddr;

use xwarp_control::Host;
use xwarp_leg::hosts::{self, LOCALHOST, MAX_HOST};

/// The names of the hosts, by number.
#[derive(Debug)]
pub(crate) struct Hosts(Vec<String>);

impl Default for Hosts {
    fn default() -> Self {
        Self(vec![LOCALHOST.to_owned()])
    }
}

impl Hosts {
    /// The number of the host `name`; the empty name is `localhost`.
    pub(crate) fn find(&self, name: &str) -> Option<u16> {
        let name = if name.is_empty() { LOCALHOST } else { name };
        self.0.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|number| number as u16)
    }

    /// The number of the host `name`, which is added if it is not there.
    ///
    /// # Errors
    /// The text says what is wrong with the name, or that the table is full.
    pub(crate) fn join(&mut self, name: &str) -> Result<u16, String> {
        if let Some(number) = self.find(name) {
            return Ok(number);
        }
        if !hosts::is_name(name) {
            return Err(format!(
                "{name:?} is no name of a host: letters, digits, '-', '.' and '_', at most 15"
            ));
        }
        if self.0.len() > usize::from(MAX_HOST) {
            return Err(format!("the fabric has {MAX_HOST} hosts already"));
        }
        self.0.push(name.to_owned());
        Ok(self.0.len() as u16 - 1)
    }

    pub(crate) fn len(&self) -> u16 {
        self.0.len() as u16
    }

    pub(crate) fn name(&self, number: u16) -> &str {
        self.0.get(usize::from(number)).map_or("", String::as_str)
    }

    /// What a client is told about a host.
    pub(crate) fn describe(number: u16) -> Host {
        Host { number, mac: hosts::mac(number), addresses: hosts::addresses(number).to_vec() }
    }

    /// The host that `address` is for one on host `from`: the loopback addresses are its own.
    pub(crate) fn at(&self, from: u16, address: IpAddr) -> Option<u16> {
        if hosts::addresses(0).contains(&address) {
            return Some(from);
        }
        hosts::number(address).filter(|number| *number < self.len())
    }

    /// The address of host `from` for frames to `destination`, and the host there.
    ///
    /// # Errors
    /// There is no way; the text says why, for people.
    pub(crate) fn route(
        &self,
        from: u16,
        destination: IpAddr,
        source: Option<IpAddr>,
    ) -> Result<(IpAddr, u16), String> {
        let Some(host) = self.at(from, destination) else {
            return Err(format!("no host of the fabric has the address {destination}: xwarp fabric show"));
        };
        if from == 0 && host != 0 {
            return Err(format!(
                "{destination} is an address of host {}, and this program is {LOCALHOST}, which only reaches itself: give it \
                 a host of its own (--host NAME)",
                self.name(host)
            ));
        }
        let own = hosts::addresses(from);
        let fits = |address: &IpAddr| address.is_ipv4() == destination.is_ipv4();
        match source {
            Some(source) if !fits(&source) => {
                Err(format!("{source} and {destination} are of different address families"))
            }
            Some(source)
                if own.contains(&source) || hosts::addresses(0).contains(&source) && host == from =>
            {
                Ok((source, host))
            }
            Some(source) => Err(format!("{source} is not an address of host {}", self.name(from))),
            None => own.into_iter().find(fits).map(|own| (own, host)).ok_or_else(String::new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn names_are_found_and_bounded() {
        let mut hosts = Hosts::default();
        assert_eq!((hosts.join("a"), hosts.join("B"), hosts.join("A")), (Ok(1), Ok(2), Ok(1)));
        assert_eq!((hosts.find(""), hosts.find("localhost"), hosts.find("c")), (Some(0), Some(0), None));
        for name in ["a b", "0123456789abcdef", "10.0.0.1", "::1", "a/b"] {
            assert!(hosts.join(name).is_err(), "{name}");
        }
        while hosts.join(&format!("n{}", hosts.len())).is_ok() {}
        assert_eq!(hosts.len(), MAX_HOST + 1);
        assert!(hosts.join("a").is_ok(), "it is there");
    }

    #[test]
    fn hosts_reach_each_other_and_themselves() {
        let mut hosts = Hosts::default();
        hosts.join("a").unwrap();
        hosts.join("b").unwrap();
        let (a, b) = (ip("127.77.0.1"), ip("127.77.0.2"));
        assert_eq!(hosts.route(1, b, None), Ok((a, 2)));
        assert_eq!(hosts.route(1, ip("fd77:7761:7270::2"), None), Ok((ip("fd77:7761:7270::1"), 2)));
        assert_eq!(hosts.route(2, ip("127.0.0.1"), None), Ok((b, 2)), "its own loopback");
        assert_eq!(hosts.route(0, ip("::1"), None), Ok((ip("::1"), 0)));
        assert!(hosts.route(0, a, None).unwrap_err().contains("--host"));
        assert!(hosts.route(1, b, Some(b)).unwrap_err().contains("not an address of host a"));
        assert!(hosts.route(1, b, Some(ip("::1"))).is_err());
        for nobody in ["127.77.0.3", "10.0.0.1", "fd77:7761:7270::3"] {
            assert!(hosts.route(1, ip(nobody), None).unwrap_err().contains("no host"), "{nobody}");
        }
    }
}
