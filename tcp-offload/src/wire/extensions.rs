//! Extension headers of IPv6 (RFC 8200 section 4) between the IP header and TCP. Ordinary senders of TCP use none, but a translator
//! may add a fragment header to whole packets, and a network options of its own; kernel TCP gets what is behind them.

use super::Malformed;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// Largest number of extension headers; the XDP programs look behind as many.
const MAX_EXTENSIONS: usize = 8;

/// Largest number of bytes of all extension headers: with the other headers they lie in the first chunk of a frame.
const MAX_BYTES: usize = 128;

/// More fragments, and the offset, of a fragment header.
const FRAGMENT_MASK: u16 = 0xfff9;

/// Skips the extension headers of the packet in `bytes`, of which the first is of type `first` and begins at `begin`. Returns the
/// protocol of what follows, and its position; `first` and `begin` if it is no extension header that we skip.
///
/// # Errors
/// A fragment, a header or an option that must not be skipped (sections 4.2 and 4.4), or more headers than any host sends.
#[cold]
pub(super) fn skip(bytes: &[u8], first: u8, begin: usize) -> Result<(u8, usize), Malformed> {
    let (mut protocol, mut at) = (first, begin);
    for place in 0..=MAX_EXTENSIONS {
        if !matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION) {
            return Ok((protocol, at));
        }
        let rest = bytes.get(at..).unwrap_or_default();
        let [next, length, high, low] = *rest.first_chunk().ok_or(Malformed::Truncated)?;
        let length = if protocol == FRAGMENT { 8 } else { (usize::from(length) + 1) * 8 };
        if at - begin + length > MAX_BYTES {
            return Err(Malformed::Extension);
        }
        let header = rest.get(..length).ok_or(Malformed::Truncated)?;
        match protocol {
            FRAGMENT if u16::from_be_bytes([high, low]) & FRAGMENT_MASK != 0 => {
                return Err(Malformed::Fragment);
            }
            // The packet is on its way to another address.
            ROUTING if low != 0 => return Err(Malformed::SourceRoute),
            HOP_BY_HOP if place > 0 => return Err(Malformed::Extension),
            HOP_BY_HOP | DESTINATION => check_options(header.get(2..).unwrap_or_default())?,
            _ => {}
        }
        protocol = next;
        at += length;
    }
    Err(Malformed::Extension)
}

/// Checks that a host that knows none of these options may skip all of them: the highest two bits of their types are 0 (RFC 8200
/// section 4.2). The kernel knows a few of them, which are for routers or mobile hosts.
fn check_options(options: &[u8]) -> Result<(), Malformed> {
    const PAD1: u8 = 0;
    let mut rest = options;
    loop {
        match *rest {
            [] => return Ok(()),
            [PAD1, ref after @ ..] => rest = after,
            [kind, length, ref after @ ..] if kind & 0xc0 == 0 => {
                rest = after.get(usize::from(length)..).ok_or(Malformed::HeaderLength)?;
            }
            _ => return Err(Malformed::Extension),
        }
    }
}
