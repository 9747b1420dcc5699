//! The listening TCP sockets of this network namespace, in the kernel's tables.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader},
    net::SocketAddr,
};

const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];

/// Bytes of a line. Lines for IPv6 are longer.
const LINE: usize = 150;

/// The state of a listening socket.
const LISTEN: &str = "0A";

/// Whether a socket, of `user` if one is given, listens at the port of `address`. Fails if neither table can be read.
///
/// A socket that is closed during a search may hide another one from it. Therefore a second search confirms that there is none.
pub fn is_listening(address: SocketAddr, user: Option<u32>) -> io::Result<bool> {
    Ok(search(address, user)? || search(address, user)?)
}

fn search(address: SocketAddr, user: Option<u32>) -> io::Result<bool> {
    let [first, second] = if address.is_ipv4() { TABLES } else { [TABLES[1], TABLES[0]] };
    match has_listener(first, address.port(), user) {
        Ok(true) => Ok(true),
        Ok(false) => Ok(has_listener(second, address.port(), user).unwrap_or(false)),
        Err(_) => has_listener(second, address.port(), user),
    }
}

/// Searches one table.
///
/// The kernel lists the listening sockets before all others, and writes as many lines as a read has room for. A read here has room
/// for one line, and the search ends behind these sockets: to find the first connection, the kernel searches a table of many
/// thousand entries.
fn has_listener(table: &str, port: u16, user: Option<u32>) -> io::Result<bool> {
    let end = format!(":{port:04X}");
    for line in BufReader::with_capacity(LINE, File::open(table)?).lines().skip(1) {
        let line = line?;
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, state, owner) = (words.next(), words.nth(1), words.nth(3));
        if state != Some(LISTEN) {
            break;
        }
        let owned = user.is_none_or(|user| owner.is_some_and(|owner| owner.parse() == Ok(user)));
        if owned && local.is_some_and(|local| local.ends_with(&end)) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_socket_listens_until_it_is_closed() {
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let listener = TcpListener::bind((ip, 0)).unwrap();
            let local = listener.local_addr().unwrap();
            let connected = TcpStream::connect(local).unwrap();
            assert!(is_listening(local, None).unwrap());
            drop(listener);
            assert!(!is_listening(local, None).unwrap(), "only {connected:?} has the port");
        }
    }

    #[test]
    fn a_missing_table_is_an_error() {
        assert!(has_listener("/proc/thread-self/net/none", 80, None).is_err());
    }
}
