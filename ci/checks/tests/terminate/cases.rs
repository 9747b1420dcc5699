//! The errors of an established stream.

use anyhow::Result;
use xwarp_checks::hostile::{SocketPeer, atomic_request, read_request, tagged, untagged};
use xwarp_verbs::WcStatus;

use super::{Keys, RECEIVE};

/// The parts of a message that a Terminate quotes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quote {
    /// None: M, D and R are clear.
    Nothing,
    /// M and D: the segment's length and the DDP header.
    Header,
    /// M, D and R: also the Read Request.
    Request,
}

/// One error case.
pub struct Case {
    /// Description of the error.
    pub sent: &'static str,
    /// The section that defines the response.
    pub rule: &'static str,
    /// Expected layer, type, code.
    pub numbers: (u8, u8, u8),
    pub quote: Quote,
    /// Sends the error and returns the ULPDU at fault.
    pub provoke: fn(Keys, &mut SocketPeer) -> Result<Vec<u8>>,
    /// Use markers in both directions.
    pub markers: bool,
    /// The server's queue pair rejects a Send without a receive immediately.
    pub strict: bool,
    /// Number of posted receives, and whether their region has been deregistered.
    pub receives: u64,
    pub stale: bool,
    /// The server reads from the peer.
    pub reads: bool,
    /// How the server's first request fails, if it is not flushed.
    pub fails: Option<WcStatus>,
}

const fn case(
    sent: &'static str,
    rule: &'static str,
    numbers: (u8, u8, u8),
    quote: Quote,
    provoke: fn(Keys, &mut SocketPeer) -> Result<Vec<u8>>,
) -> Case {
    Case {
        sent,
        rule,
        numbers,
        quote,
        provoke,
        markers: false,
        strict: false,
        receives: 2,
        stale: false,
        reads: false,
        fails: None,
    }
}

fn say(peer: &mut SocketPeer, ulpdu: Vec<u8>) -> Result<Vec<u8>> {
    peer.send(&ulpdu)?;
    Ok(ulpdu)
}

/// Encodes a Send with MSN `msn`.
fn send(msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(0x43, 0, 0, msn, mo, payload)
}

fn with_first(first: u8, mut ulpdu: Vec<u8>) -> Vec<u8> {
    ulpdu[0] = first;
    ulpdu
}

/// Waits for the server's Read Request, which follows our first FPDU, and responds to it.
fn answer(peer: &mut SocketPeer, to: impl FnOnce(&[u8]) -> Vec<u8>) -> Result<Vec<u8>> {
    peer.send(&tagged(0x40, 0, 0, b""))?;
    let request = peer.expect(1)?.remove(0);
    say(peer, to(&request))
}

/// The sink's key in a Read Request.
fn sink(request: &[u8]) -> u32 {
    u32::from_be_bytes([request[18], request[19], request[20], request[21]])
}

use Quote::{Header, Nothing, Request};

pub const CASES: &[Case] = &[
    // DDP, tagged buffers.
    case("Write to an unknown key", "5041 7.1 tagged 1", (1, 1, 0), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.open ^ 1, 0, b"x"))
    }),
    case("Write to a deregistered key", "5041 7.1 tagged 1", (1, 1, 0), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.gone, 0, b"x"))
    }),
    case(
        "Write without the access right (no code of its own)",
        "5041 7.1 tagged 2",
        (1, 1, 0),
        Header,
        |keys, peer| say(peer, tagged(0x40, keys.no_write, 0, b"x")),
    ),
    case("Write beginning after the region", "5041 7.1 tagged 3", (1, 1, 1), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.open, 33, b"x"))
    }),
    case("Write ending after the region", "5041 7.1 tagged 4", (1, 1, 1), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.open, 30, b"xyz"))
    }),
    case(
        "Write to a key of another protection domain",
        "5041 7.1 tagged 1",
        (1, 1, 2),
        Header,
        |keys, peer| say(peer, tagged(0x40, keys.other_domain, 0, b"x")),
    ),
    case("Write to a key of another stream", "5041 7.1 tagged 1", (1, 1, 2), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.other_stream, 0, b"x"))
    }),
    case("Write whose offset wraps", "5041 7.1 tagged 5", (1, 1, 3), Header, |keys, peer| {
        say(peer, tagged(0x40, keys.open, u64::MAX, b"xy"))
    }),
    case("tagged segment of DDP version 0", "5041 7.2", (1, 1, 4), Header, |keys, peer| {
        say(peer, with_first(0xc0, tagged(0x40, keys.open, 0, b"x")))
    }),
    // DDP, untagged buffers.
    case("Send on queue 4", "5041 7.1 untagged 1", (1, 2, 1), Header, |_, peer| {
        say(peer, untagged(0x43, 0, 4, 1, 0, b"x"))
    }),
    Case {
        strict: true,
        receives: 0,
        ..case("Send without a receive, strict", "5041 7.1 untagged 2", (1, 2, 2), Header, |_, peer| {
            say(peer, send(1, 0, b"x"))
        })
    },
    Case {
        receives: 0,
        ..case(
            "Send without a receive until the time limit",
            "5041 7.1 untagged 2",
            (1, 2, 2),
            Header,
            |_, peer| say(peer, send(1, 0, b"x")),
        )
    },
    case("one Read Request more than the IRD", "5041 7.1 untagged 2", (1, 2, 2), Header, |keys, peer| {
        // Sent in one segment, so that no Read is answered in between.
        let requests = [1, 2, 3].map(|msn| read_request(msn, keys.open, 0, 8));
        let bytes: Vec<u8> = requests.iter().flat_map(|request| peer.frame(request)).collect();
        peer.say(&bytes)?;
        Ok(requests[2].clone())
    }),
    case("Send of MSN 2 before MSN 1", "5041 7.1 untagged 5", (1, 2, 3), Header, |_, peer| {
        say(peer, send(2, 0, b"x"))
    }),
    case("Read Request of MSN 2 before MSN 1", "5041 7.1 untagged 5", (1, 2, 3), Header, |keys, peer| {
        say(peer, read_request(2, keys.open, 0, 8))
    }),
    Case {
        fails: Some(WcStatus::LocalLength),
        ..case("Send at an offset beyond the receive", "5041 7.1 untagged 3", (1, 2, 4), Header, |_, peer| {
            say(peer, send(1, RECEIVE as u32 + 1, b"x"))
        })
    },
    Case {
        fails: Some(WcStatus::LocalLength),
        ..case("Send longer than the receive", "5041 7.1 untagged 4", (1, 2, 5), Header, |_, peer| {
            say(peer, send(1, 0, &[1; RECEIVE + 1]))
        })
    },
    case("untagged segment of DDP version 2", "5041 7.2", (1, 2, 6), Header, |_, peer| {
        say(peer, with_first(0x42, send(1, 0, b"x")))
    }),
    Case {
        stale: true,
        fails: Some(WcStatus::LocalProtection),
        ..case(
            "Send into a receive whose region was deregistered",
            "5040 4.8, 5041 7.2",
            (1, 0, 0),
            Nothing,
            |_, peer| say(peer, send(1, 0, b"x")),
        )
    },
    // RDMAP, remote protection.
    case("Read Request of an unknown key", "5040 7.2 4a", (0, 1, 0), Request, |keys, peer| {
        say(peer, read_request(1, keys.open ^ 1, 0, 8))
    }),
    case("Read Request beyond the region", "5040 7.2 4d", (0, 1, 1), Request, |keys, peer| {
        say(peer, read_request(1, keys.open, 30, 8))
    }),
    case("Read Request without the access right", "5040 4.8", (0, 1, 2), Request, |keys, peer| {
        say(peer, read_request(1, keys.no_read, 0, 8))
    }),
    case("Read Request of another domain's key", "5040 7.2 4b", (0, 1, 3), Request, |keys, peer| {
        say(peer, read_request(1, keys.other_domain, 0, 8))
    }),
    case("Read Request of another stream's key", "5040 7.2 4b", (0, 1, 3), Request, |keys, peer| {
        say(peer, read_request(1, keys.other_stream, 0, 8))
    }),
    case("Read Request whose offset wraps", "5040 7.2 4e", (0, 1, 4), Request, |keys, peer| {
        say(peer, read_request(1, keys.open, u64::MAX, 2))
    }),
    case("Send with Invalidate of an unknown key", "5040 7.2 4", (0, 1, 0), Header, |keys, peer| {
        say(peer, untagged(0x44, keys.open ^ 1, 0, 1, 0, b""))
    }),
    case(
        "Send with Invalidate of another stream's key",
        "5040 5.3, 7.2 5",
        (0, 1, 9),
        Header,
        |keys, peer| say(peer, untagged(0x44, keys.other_stream, 0, 1, 0, b"")),
    ),
    case(
        "Send with SE and Invalidate of another domain's key",
        "5040 5.3, 7.2 5",
        (0, 1, 9),
        Header,
        |keys, peer| say(peer, untagged(0x46, keys.other_domain, 0, 1, 0, b"")),
    ),
    case(
        "Send with Invalidate of a key shared by streams",
        "5040 8.1.1 7",
        (0, 1, 9),
        Header,
        |keys, peer| say(peer, untagged(0x44, keys.open, 0, 1, 0, b"")),
    ),
    case("Atomic Request of an unknown key", "7306 8.1, 5040 4.8", (0, 1, 0), Header, |keys, peer| {
        say(peer, atomic_request(0, keys.open ^ 1, 0))
    }),
    case("Atomic Request beyond the region", "7306 8.1, 5040 4.8", (0, 1, 1), Header, |keys, peer| {
        say(peer, atomic_request(0, keys.open, 32))
    }),
    case("Atomic Request without the access right", "7306 8.1, 5040 4.8", (0, 1, 2), Header, |keys, peer| {
        say(peer, atomic_request(0, keys.no_atomic, 0))
    }),
    // RDMAP, remote operation.
    case("RDMAP version 2", "5040 7.2 3", (0, 2, 5), Header, |_, peer| {
        say(peer, untagged(0x83, 0, 0, 1, 0, b"x"))
    }),
    case("reserved opcode", "5040 7.2 2", (0, 2, 6), Header, |_, peer| {
        say(peer, untagged(0x4f, 0, 0, 1, 0, b"x"))
    }),
    case("Write in an untagged segment", "5040 7.2 2", (0, 2, 6), Header, |_, peer| {
        say(peer, untagged(0x40, 0, 0, 1, 0, b"x"))
    }),
    case("Send in a tagged segment", "5040 7.2 2", (0, 2, 6), Header, |keys, peer| {
        say(peer, tagged(0x43, keys.open, 0, b"x"))
    }),
    case("Send on the request queue", "5040 7.2 2", (0, 2, 6), Header, |_, peer| {
        say(peer, untagged(0x43, 0, 1, 1, 0, b"x"))
    }),
    case("Read Response without a request", "5040 7.2 2", (0, 2, 6), Header, |keys, peer| {
        say(peer, tagged(0x42, keys.open, 0, b"x"))
    }),
    case("Atomic Response without a request", "7306 8.2, 5040 7.2 2", (0, 2, 6), Header, |_, peer| {
        say(peer, untagged(0x4b, 0, 3, 1, 0, &[0; 12]))
    }),
    case("Atomic Request with an unknown operation", "7306 5.2.1 4", (0, 2, 6), Header, |keys, peer| {
        say(peer, atomic_request(9, keys.open, 0))
    }),
    case("Atomic Request of an unaligned word", "7306 8.2", (0, 2, 7), Header, |keys, peer| {
        say(peer, atomic_request(0, keys.open, 4))
    }),
    case("ULPDU shorter than a DDP header", "5040 4.8", (0, 2, 7), Nothing, |_, peer| {
        say(peer, vec![0x41, 0x43, 0])
    }),
    case("Read Request shorter than its header", "5040 4.8", (0, 2, 7), Header, |_, peer| {
        say(peer, untagged(0x41, 0, 1, 1, 0, &[0; 27]))
    }),
    case("Read Request longer than its header", "5041 7.1 untagged 4", (1, 2, 5), Header, |_, peer| {
        say(peer, untagged(0x41, 0, 1, 1, 0, &[0; 29]))
    }),
    case(
        "Read Request at a nonzero message offset",
        "5041 7.1 untagged 3",
        (1, 2, 4),
        Header,
        |keys, peer| {
            let request = read_request(1, keys.open, 0, 8);
            say(peer, untagged(0x41, 0, 1, 1, 4, &request[18..]))
        },
    ),
    case("Immediate Data of seven bytes", "7306 6.3, 5040 4.8", (0, 2, 7), Header, |_, peer| {
        say(peer, untagged(0x48, 0, 0, 1, 0, &[0; 7]))
    }),
    case("Immediate Data of nine bytes", "7306 6.3, 5041 7.1", (1, 2, 5), Header, |_, peer| {
        say(peer, untagged(0x48, 0, 0, 1, 0, &[0; 9]))
    }),
    // Responses to our own Read Request.
    Case {
        reads: true,
        ..case(
            "Read Response to another key than requested",
            "5041 7.1 tagged 1",
            (1, 1, 0),
            Header,
            |keys, peer| answer(peer, |_| tagged(0x42, keys.open, 0, &[1; RECEIVE])),
        )
    },
    Case {
        reads: true,
        ..case(
            "Read Response at another offset than requested",
            "5041 7.1 tagged 3",
            (1, 1, 1),
            Header,
            |_, peer| answer(peer, |request| tagged(0x42, sink(request), 8, &[1; RECEIVE])),
        )
    },
    Case {
        reads: true,
        ..case("Read Response longer than requested", "5041 7.1 tagged 4", (1, 1, 1), Header, |_, peer| {
            answer(peer, |request| tagged(0x42, sink(request), 0, &[1; RECEIVE + 1]))
        })
    },
    Case {
        reads: true,
        ..case("Read Response that ends too early", "5040 4.8", (0, 2, 7), Header, |_, peer| {
            answer(peer, |request| tagged(0x42, sink(request), 0, b"short"))
        })
    },
    // MPA.
    case("FPDU with a wrong CRC", "5044 8 code 2", (2, 0, 2), Nothing, |_, peer| {
        let mut fpdu = peer.frame(&send(1, 0, b"x"));
        *fpdu.last_mut().expect("a CRC") ^= 1;
        peer.say(&fpdu)?;
        Ok(fpdu)
    }),
    Case {
        markers: true,
        ..case("marker that does not point to the header", "5044 8 code 3", (2, 0, 3), Nothing, |_, peer| {
            let mut fpdu = peer.frame(&send(1, 0, b"x"));
            fpdu[3] = 8;
            let covered = fpdu.len() - 4;
            let sum = crc32c::crc32c(&fpdu[..covered]);
            fpdu[covered..].copy_from_slice(&sum.to_le_bytes());
            peer.say(&fpdu)?;
            Ok(fpdu)
        })
    },
    Case {
        markers: true,
        ..case(
            "with markers: Write to an unknown key",
            "5041 7.1 tagged 1",
            (1, 1, 0),
            Header,
            |keys, peer| say(peer, tagged(0x40, keys.open ^ 1, 0, &[1; 900])),
        )
    },
    case("FIN in the middle of an FPDU", "5044 8 code 1", (2, 0, 1), Nothing, |_, peer| {
        let fpdu = peer.frame(&send(1, 0, b"half"));
        peer.say(&fpdu[..fpdu.len() / 2])?;
        peer.finish()?;
        Ok(fpdu)
    }),
];
