//! [`Header`]: the headers of a raw frame. They are those of a TCP segment without options; the fields of TCP
//! carry this reference's own numbers.

use xwarp_tcp::{
    seq::SeqNum,
    wire::{Fields, Flags, Headers, MAX_HEADER_BYTES, Options, Path, Sum},
};

/// The purpose of a frame, as TCP control bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The client's order, which begins a row: SYN.
    Order,
    /// The server's answer to an order: SYN and ACK.
    Accepted,
    /// A payload: PSH and ACK.
    Data,
    /// Acknowledges all frames below its number: ACK.
    Ack,
    /// Asks for an acknowledgement at once, when frames or acknowledgements seem to be lost: CWR and ACK.
    Probe,
    /// The client has finished the row: FIN and ACK.
    Finish,
    /// The server's answer to that, with its [`Receipt`](crate::order::Receipt): FIN, PSH and ACK.
    Done,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Order, Self::Accepted, Self::Data, Self::Ack, Self::Probe, Self::Finish, Self::Done];

    const fn flags(self) -> Flags {
        const NONE: Flags =
            Flags { fin: false, syn: false, rst: false, psh: false, ack: false, ece: false, cwr: false };
        match self {
            Self::Order => Flags { syn: true, ..NONE },
            Self::Accepted => Flags { syn: true, ack: true, ..NONE },
            Self::Data => Flags { psh: true, ack: true, ..NONE },
            Self::Ack => Flags { ack: true, ..NONE },
            Self::Probe => Flags { cwr: true, ack: true, ..NONE },
            Self::Finish => Flags { fin: true, ack: true, ..NONE },
            Self::Done => Flags { fin: true, psh: true, ack: true, ..NONE },
        }
    }

    /// The octet of control bits (RFC 9293 section 3.1).
    const fn bits(self) -> u8 {
        match self {
            Self::Order => 0x02,
            Self::Accepted => 0x12,
            Self::Data => 0x18,
            Self::Ack => 0x10,
            Self::Probe => 0x90,
            Self::Finish => 0x11,
            Self::Done => 0x19,
        }
    }
}

/// The fields of a received frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    /// Number of the frame, or of the row; in the sequence number.
    pub number: u32,
    /// Bytes of payload, in the window field: an Ethernet driver may have padded a short frame.
    pub len: usize,
}

/// Positions in a TCP header, counted from its end.
const SEQ_BACK: usize = 16;
const FLAGS_BACK: usize = 7;
const WINDOW_BACK: usize = 6;

/// The headers of one direction.
#[derive(Debug)]
pub(super) struct Header {
    headers: Headers,
    /// Headers of a frame with `payload` bytes of payload. Only the number differs between frames of one kind and
    /// length.
    ready: [u8; MAX_HEADER_BYTES],
    /// Bytes of the headers, the same for all frames.
    bytes: usize,
    kind: Kind,
    payload: usize,
}

impl Header {
    pub(super) fn new(path: &Path) -> Self {
        let headers = Headers::new(path);
        let bytes = headers.len(&Options::default());
        let mut header = Self { headers, ready: [0; MAX_HEADER_BYTES], bytes, kind: Kind::Ack, payload: 0 };
        header.prepare(Kind::Ack, &[]);
        header
    }

    /// Bytes of the headers, in both directions.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Computes the headers with their checksums.
    fn prepare(&mut self, kind: Kind, payload: &[u8]) {
        let fields = Fields { flags: kind.flags(), window: payload.len() as u16, ..Fields::default() };
        // The receiver does not verify the checksum of data frames, so it is not computed over the payload.
        let sum = if kind == Kind::Data { Sum::default() } else { Sum::of(payload) };
        // Fits: the array has room for the longest headers.
        let _ = self.headers.emit(&mut self.ready, &fields, payload.len(), sum);
        (self.kind, self.payload) = (kind, payload.len());
    }

    /// The headers of a data frame or of an acknowledgement.
    pub(super) fn fast(&mut self, kind: Kind, number: u32, payload: &[u8]) -> &[u8] {
        if (self.kind, self.payload) != (kind, payload.len()) {
            self.prepare(kind, payload);
        }
        let at = self.bytes - SEQ_BACK;
        self.ready[at..at + 4].copy_from_slice(&number.to_be_bytes());
        &self.ready[..self.bytes]
    }

    /// The headers of any other frame, with a valid checksum: the server parses an order like any SYN.
    pub(super) fn checked(&self, kind: Kind, number: u32, payload: &[u8]) -> Vec<u8> {
        let fields = Fields {
            seq: SeqNum::new(number),
            flags: kind.flags(),
            window: payload.len() as u16,
            ..Fields::default()
        };
        let mut out = vec![0; self.bytes];
        let _ = self.headers.emit(&mut out, &fields, payload.len(), Sum::of(payload));
        out
    }

    /// Reads the headers of a frame of the peer, which have the length of ours.
    pub(super) fn parse(&self, frame: &[u8]) -> Option<Head> {
        let tcp = frame.get(self.bytes - SEQ_BACK..self.bytes)?;
        let number = u32::from_be_bytes(*tcp.first_chunk()?);
        let bits = *tcp.get(SEQ_BACK - FLAGS_BACK)?;
        let kind = Kind::ALL.into_iter().find(|kind| kind.bits() == bits)?;
        let len = tcp.get(SEQ_BACK - WINDOW_BACK..)?.first_chunk()?;
        Some(Head { kind, number, len: usize::from(u16::from_be_bytes(*len)) })
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use xwarp_tcp::{
        link::QueueId,
        wire::{Flow, Mac, VlanTags},
    };

    use super::*;

    fn header(local: &str, remote: &str) -> Header {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        Header::new(&Path {
            flow: Flow { local: address(local), remote: address(remote) },
            source_mac: Mac::default(),
            next_hop: None,
            next_hop_mac: Mac::default(),
            vlan: VlanTags::default(),
            mtu: 1500,
            queue: QueueId::default(),
        })
    }

    #[test]
    fn every_kind_survives_the_wire_in_both_families() {
        for mut header in [header("10.0.0.1:1", "10.0.0.2:2"), header("[fd00::1]:1", "[fd00::2]:2")] {
            for kind in Kind::ALL {
                for len in [0, 1, 64, 1446] {
                    let payload = vec![7; len];
                    let expected = Some(Head { kind, number: 0xdead_beef, len });
                    let checked = header.checked(kind, 0xdead_beef, &payload);
                    assert_eq!(header.parse(&checked), expected);
                    let fast = header.fast(kind, 0xdead_beef, &payload).to_vec();
                    assert_eq!(header.parse(&fast), expected);
                    assert_eq!(header.parse(&fast[..fast.len() - 1]), None, "a truncated frame");
                }
            }
        }
    }
}
