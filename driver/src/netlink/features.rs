//! XDP features of network drivers, and the distribution of segments over the queues of a NIC: by the generic netlink families
//! "netdev" and "ethtool" of kernel 6.3 and newer.

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};

use crate::rss::Rss;

/// The family that names the others, and its request and attributes (`linux/genetlink.h`).
const CONTROLLER: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// The request for a device, and its attributes (`linux/netdev.h`).
const GET_DEVICE: u8 = 1;
const DEVICE_INDEX: u16 = 1;
const DEVICE_XDP_FEATURES: u16 = 3;

/// The request for receive side scaling, and its attributes (`linux/ethtool_netlink.h`).
const GET_RSS: u8 = 38;
const RSS_HEADER: u16 = 1;
const RSS_FUNCTION: u16 = 3;
const RSS_TABLE: u16 = 4;
const RSS_KEY: u16 = 5;
/// The function is Toeplitz (`ETH_RSS_HASH_TOP`).
const TOEPLITZ: u32 = 1;
/// In the header: the name of the interface.
const HEADER_NAME: u16 = 2;
/// Flag of the type of an attribute that holds attributes.
const NESTED: u16 = 1 << 15;

/// `NETDEV_XDP_ACT_NDO_XMIT` and `NETDEV_XDP_ACT_NDO_XMIT_SG`.
const TAKES_REDIRECTED: u64 = 1 << 2;
const TAKES_REDIRECTED_CHAINS: u64 = 1 << 6;

const HEADER_BYTES: usize = 16;
const GENERIC_HEADER_BYTES: usize = 4;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Type of a message that holds an error code.
const ERROR: u16 = 2;
/// Flag of a request.
const REQUEST: u16 = 1;

/// Whether the driver of interface `index` sends frames that an XDP program of another interface redirects to it; with
/// `chains`, also frames of several buffers.
///
/// # Errors
/// The kernel does not know, because it is too old or the interface is gone.
pub fn takes_redirected(index: u32, chains: bool) -> io::Result<bool> {
    let (socket, family) = open(b"netdev\0")?;
    let found = ask(&socket, family, GET_DEVICE, DEVICE_INDEX, &index.to_ne_bytes())?;
    let features = u64::from_ne_bytes(attribute(&found, DEVICE_XDP_FEATURES)?);
    let wanted = if chains { TAKES_REDIRECTED | TAKES_REDIRECTED_CHAINS } else { TAKES_REDIRECTED };
    Ok(features & wanted == wanted)
}

/// How the NIC of this name distributes TCP segments over its queues.
///
/// # Errors
/// The NIC does not, or not by Toeplitz, or the kernel does not tell.
pub fn rss(interface: &str) -> io::Result<Rss> {
    let (socket, family) = open(b"ethtool\0")?;
    let name = [interface.as_bytes(), b"\0"].concat();
    let mut header = Vec::from(((ATTRIBUTE_HEADER_BYTES + name.len()) as u16).to_ne_bytes());
    header.extend(HEADER_NAME.to_ne_bytes());
    header.extend(name);
    rss_of(&ask(&socket, family, GET_RSS, RSS_HEADER | NESTED, &header)?)
}

/// The answer to a request for receive side scaling.
fn rss_of(attributes: &[u8]) -> io::Result<Rss> {
    let function = u32::from_ne_bytes(attribute(attributes, RSS_FUNCTION)?);
    let table = value(attributes, RSS_TABLE)?.chunks_exact(4);
    let table =
        table.filter_map(|entry| entry.first_chunk()).map(|entry| u32::from_ne_bytes(*entry)).collect();
    let rss = Rss::new(value(attributes, RSS_KEY)?.to_vec(), table);
    rss.filter(|_| function == TOEPLITZ).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// A socket for the family of this name, with the family's number.
fn open(family: &[u8]) -> io::Result<(Socket, u16)> {
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let found = ask(&socket, CONTROLLER, GET_FAMILY, FAMILY_NAME, family)?;
    let family = u16::from_ne_bytes(attribute(&found, FAMILY_ID)?);
    Ok((socket, family))
}

/// Sends a request with one attribute; returns the attributes of the answer.
fn ask(socket: &Socket, family: u16, command: u8, attribute: u16, value: &[u8]) -> io::Result<Vec<u8>> {
    let attribute_bytes = ATTRIBUTE_HEADER_BYTES + value.len();
    let bytes = HEADER_BYTES + GENERIC_HEADER_BYTES + attribute_bytes.next_multiple_of(4);
    let mut message = Vec::with_capacity(bytes);
    message.extend((bytes as u32).to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    // Sequence number and port: one request at a time.
    message.extend([0; 8]);
    message.extend([command, 1, 0, 0]);
    message.extend((attribute_bytes as u16).to_ne_bytes());
    message.extend(attribute.to_ne_bytes());
    message.extend(value);
    message.resize(bytes, 0);
    socket.send(&message, 0)?;
    let (answer, _) = socket.recv_from_full()?;
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let kind = answer.get(4..6).and_then(|bytes| bytes.first_chunk()).ok_or_else(short)?;
    let body = answer.get(HEADER_BYTES..).ok_or_else(short)?;
    if u16::from_ne_bytes(*kind) == ERROR {
        let code = i32::from_ne_bytes(*body.first_chunk().ok_or_else(short)?);
        return Err(io::Error::from_raw_os_error(-code));
    }
    Ok(body.get(GENERIC_HEADER_BYTES..).ok_or_else(short)?.to_vec())
}

/// The value of an attribute of this size.
fn attribute<const N: usize>(attributes: &[u8], wanted: u16) -> io::Result<[u8; N]> {
    value(attributes, wanted)?.first_chunk().copied().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The value of an attribute.
fn value(mut attributes: &[u8], wanted: u16) -> io::Result<&[u8]> {
    while let Some((header, rest)) = attributes.split_first_chunk::<ATTRIBUTE_HEADER_BYTES>() {
        let [low, high, kind @ ..] = *header;
        let bytes = usize::from(u16::from_ne_bytes([low, high])).saturating_sub(ATTRIBUTE_HEADER_BYTES);
        if u16::from_ne_bytes(kind) == wanted
            && let Some(value) = rest.get(..bytes)
        {
            return Ok(value);
        }
        attributes = rest.get(bytes.next_multiple_of(4)..).unwrap_or_default();
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_found_behind_others_and_never_beyond_the_end() {
        let bytes = [5, 0, 9, 0, 1, 0, 0, 0, 8, 0, 3, 0, 1, 2, 3, 4, 3, 0, 4, 0];
        assert_eq!(attribute::<4>(&bytes, 3).unwrap(), [1, 2, 3, 4]);
        assert_eq!(attribute::<1>(&bytes, 9).unwrap(), [1]);
        for len in 0..16 {
            assert!(attribute::<4>(&bytes[..len], 3).is_err(), "{len}");
        }
        assert!(attribute::<4>(&bytes, 9).is_err() && attribute::<1>(&bytes, 4).is_err());
    }

    fn push(attributes: &mut Vec<u8>, kind: u16, value: &[u8]) {
        attributes.extend(((ATTRIBUTE_HEADER_BYTES + value.len()) as u16).to_ne_bytes());
        attributes.extend(kind.to_ne_bytes());
        attributes.extend(value);
        attributes.resize(attributes.len().next_multiple_of(4), 0);
    }

    #[test]
    fn an_answer_about_receive_side_scaling_is_read() {
        let answer = |function: u32| {
            let mut attributes = Vec::new();
            push(&mut attributes, RSS_HEADER | NESTED, &[8, 0, 1, 0, 2, 0, 0, 0]);
            push(&mut attributes, RSS_FUNCTION, &function.to_ne_bytes());
            push(&mut attributes, RSS_TABLE, &[0u32, 1, 2, 3].map(u32::to_ne_bytes).concat());
            push(&mut attributes, RSS_KEY, &[7; 40]);
            attributes
        };
        assert_eq!(rss_of(&answer(TOEPLITZ)).unwrap(), Rss::new(vec![7; 40], vec![0, 1, 2, 3]).unwrap());
        assert!(rss_of(&answer(2)).is_err(), "not Toeplitz");
        let whole = answer(TOEPLITZ);
        for len in 0..whole.len() {
            assert!(rss_of(&whole[..len]).is_err(), "{len}");
        }
    }

    #[test]
    fn the_kernel_knows_no_such_interface() {
        assert!(rss("xwarp-absent").is_err());
        assert!(takes_redirected(u32::MAX >> 1, false).is_err());
    }
}
