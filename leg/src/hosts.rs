//! The hosts of a fabric, and their addresses, which are the same on each machine.
//!
//! | | IPv4 | IPv6 |
//! |---|---|---|
//! | host 0, `localhost` | `127.0.0.1` | `::1` |
//! | host `n` | `127.77.0.0` + n | `fd77:7761:7270::` + n |
//!
//! The IPv4 addresses are of the loopback network of every machine, so that the kernel's TCP reaches them too: programs that exchange
//! addresses over a connection of their own find each other.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use xwarp_tcp::wire::Mac;

/// The name of the host that programs are which name none.
pub const LOCALHOST: &str = "localhost";
/// Largest number of a host.
pub const MAX_HOST: u16 = 4095;

const V4: u32 = 0x7f4d_0000;
const V6: u128 = 0xfd77_7761_7270 << 80;

/// Whether a host may have this name: letters, digits, '-', '.' and '_', at most 15, and no address. The empty name is `localhost`.
pub fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    name.len() <= 15 && name.chars().all(fits) && name.parse::<IpAddr>().is_err()
}

/// The addresses of a host.
pub fn addresses(number: u16) -> [IpAddr; 2] {
    if number == 0 {
        return [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    }
    [Ipv4Addr::from(V4 + u32::from(number)).into(), Ipv6Addr::from(V6 + u128::from(number)).into()]
}

/// The Ethernet address of a host: locally administered.
pub fn mac(number: u16) -> Mac {
    let [high, low] = number.to_be_bytes();
    Mac([0x02, 0x58, 0x57, 0x46, high, low])
}

/// The host that has an address, whether or not it is in the table; `None` for other addresses, and for those of host 0, which each
/// host has.
pub fn number(address: IpAddr) -> Option<u16> {
    let number = match address {
        IpAddr::V4(v4) => v4.to_bits().checked_sub(V4).map(u128::from),
        IpAddr::V6(v6) => v6.to_bits().checked_sub(V6),
    };
    number.and_then(|number| u16::try_from(number).ok()).filter(|number| (1..=MAX_HOST).contains(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_addresses_of_its_own() {
        for host in [1, 7, 256, MAX_HOST] {
            assert_eq!(addresses(host).map(number), [Some(host); 2]);
        }
        assert_eq!(addresses(258)[0], IpAddr::from([127, 77, 1, 2]));
        assert_eq!(addresses(2)[1].to_string(), "fd77:7761:7270::2");
        let others = [
            "127.77.0.0",
            "127.77.16.0",
            "127.0.0.1",
            "::1",
            "fd77:7761:7270::",
            "fd77:7761:7271::1",
            "10.0.0.1",
        ];
        for other in others {
            assert_eq!(number(other.parse().unwrap()), None, "{other}");
        }
    }
}
