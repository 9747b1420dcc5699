//! [`RawPeer`]: an iWARP initiator that says what it is told, right or wrong, over a TCP socket of the kernel;
//! and the pieces to tell it. It shares no code with the stack.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

/// Longest wait for anything of the peer's.
const LIMIT: Duration = Duration::from_secs(20);

/// DDP's control byte (RFC 5041 section 4.1): tagged, last, version 1.
const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION: u8 = 0x01;
/// RDMAP's control byte (RFC 5040 section 4.1): version 1 above the opcode.
const RDMAP_VERSION: u8 = 0x40;

/// Opcodes of RFC 5040 section 4.3.
pub const WRITE: u8 = 0;
/// RDMA Read Request.
pub const READ_REQUEST: u8 = 1;
/// RDMA Read Response.
pub const READ_RESPONSE: u8 = 2;
/// Send.
pub const SEND: u8 = 3;
/// Send with Invalidate.
pub const SEND_INVALIDATE: u8 = 4;
/// Terminate.
pub const TERMINATE: u8 = 7;

/// The only segment of a tagged message.
pub fn tagged(opcode: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![TAGGED | LAST | DDP_VERSION, RDMAP_VERSION | opcode];
    ulpdu.extend(stag.to_be_bytes());
    ulpdu.extend(to.to_be_bytes());
    ulpdu.extend(payload);
    ulpdu
}

/// The header of an untagged segment.
#[derive(Debug, Clone, Copy)]
pub struct Untagged {
    /// Of RDMAP.
    pub opcode: u8,
    /// The word that is reserved, or names what to invalidate.
    pub word: u32,
    /// Queue number.
    pub queue: u32,
    /// Message sequence number.
    pub msn: u32,
    /// Message offset.
    pub offset: u32,
}

impl Untagged {
    /// The first message of a connection in the queue of Sends.
    pub const SEND: Self = Self { opcode: SEND, word: 0, queue: 0, msn: 1, offset: 0 };

    /// The only segment of such a message.
    pub fn segment(self, payload: &[u8]) -> Vec<u8> {
        let mut ulpdu = vec![LAST | DDP_VERSION, RDMAP_VERSION | self.opcode];
        for word in [self.word, self.queue, self.msn, self.offset] {
            ulpdu.extend(word.to_be_bytes());
        }
        ulpdu.extend(payload);
        ulpdu
    }
}

/// The first Read Request of a connection, for `len` bytes at `to` of `source`.
pub fn read_request(source: u32, to: u64, len: u32) -> Vec<u8> {
    let mut body = Vec::new();
    // The sink: what the peer would answer with.
    body.extend(1u32.to_be_bytes());
    body.extend(0u64.to_be_bytes());
    body.extend(len.to_be_bytes());
    body.extend(source.to_be_bytes());
    body.extend(to.to_be_bytes());
    Untagged { opcode: READ_REQUEST, queue: 1, ..Untagged::SEND }.segment(&body)
}

/// An FPDU without markers (RFC 5044 section 4.1).
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut fpdu = (ulpdu.len() as u16).to_be_bytes().to_vec();
    fpdu.extend(ulpdu);
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    let crc = crc32c::crc32c(&fpdu);
    fpdu.extend(crc.to_le_bytes());
    fpdu
}

/// An established connection.
#[derive(Debug)]
pub struct RawPeer {
    stream: TcpStream,
}

impl RawPeer {
    /// Connects, and starts up with revision 2, CRC, no markers, IRD and ORD of 4.
    pub fn connect(to: SocketAddr) -> Result<Self> {
        let mut stream = TcpStream::connect(to).with_context(|| format!("cannot connect to {to}"))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_nodelay(true)?;
        // C and S; the private data are IRD and ORD (RFC 6581 section 9).
        stream.write_all(b"MPA ID Req Frame\x50\x02\x00\x04\x00\x04\x00\x04")?;
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).context("no MPA Reply")?;
        ensure!(reply.starts_with(b"MPA ID Rep Frame") && reply[16] & 0x20 == 0, "rejected: {reply:?}");
        let mut private_data = vec![0; usize::from(u16::from_be_bytes([reply[18], reply[19]]))];
        stream.read_exact(&mut private_data)?;
        Ok(Self { stream })
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).context("cannot send")
    }

    /// The next ULPDU, its CRC checked; `None` when the peer has closed or reset the connection.
    pub fn receive(&mut self) -> Result<Option<Vec<u8>>> {
        let mut length = [0; 2];
        match self.stream.read_exact(&mut length) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
                return Ok(None);
            }
            Err(error) => bail!("nothing came: {error}"),
        }
        let ulpdu_bytes = usize::from(u16::from_be_bytes(length));
        let mut rest = vec![0; (2 + ulpdu_bytes).next_multiple_of(4) - 2 + 4];
        self.stream.read_exact(&mut rest).context("an FPDU is cut off")?;
        let ulpdu = rest.get(..ulpdu_bytes).unwrap_or_default().to_vec();
        // Whatever the pad holds is part of what the CRC covers.
        let mut covered = length.to_vec();
        covered.extend(rest.get(..rest.len() - 4).unwrap_or_default());
        ensure!(rest.ends_with(&crc32c::crc32c(&covered).to_le_bytes()), "a bad CRC");
        Ok(Some(ulpdu))
    }

    /// The control field and what follows it of the Terminate with which the peer answers; `None` when
    /// it closes without. Other messages before it are passed over.
    pub fn terminate(&mut self) -> Result<Option<Vec<u8>>> {
        while let Some(ulpdu) = self.receive()? {
            let opcode = ulpdu.get(1).context("an empty FPDU")? & 0x0f;
            if opcode == TERMINATE {
                return Ok(ulpdu.get(18..).map(<[u8]>::to_vec));
            }
        }
        Ok(None)
    }
}
