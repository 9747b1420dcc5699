//! A hostile peer: MPA, DDP and RDMAP written by hand over an ordinary TCP socket, with full control of every
//! byte. Responses are parsed by hand as well (RFC 5040 figures 7 and 8). It shares no code with the stack.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::framing;

const MARKER_INTERVAL: usize = 512;
/// Flags of a start-up frame.
pub const MARKERS: u8 = 0x80;
/// See [`MARKERS`].
pub const CRC: u8 = 0x40;
/// See [`MARKERS`].
pub const ENHANCED: u8 = 0x10;
/// The reserved bit by which a request of revision 2 offers Sends with immediate data (`docs/decisions/0031-*`).
pub const SEND_IMMEDIATE: u8 = 0x01;

/// How the peer's direction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By a FIN.
    Closed,
    /// By an RST.
    Reset,
    /// Not before the time limit.
    Open,
}

impl End {
    /// Name in a table.
    pub fn word(self) -> &'static str {
        match self {
            Self::Closed => "FIN",
            Self::Reset => "RST",
            Self::Open => "open",
        }
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct SocketPeer {
    stream: TcpStream,
    /// Bytes of FPDUs sent.
    sent: usize,
    /// All received bytes.
    heard: Vec<u8>,
    markers_sent: bool,
    markers_heard: bool,
}

/// Encodes a start-up frame; `key`, its first 16 bytes, identifies its kind.
pub fn start_up(key: &[u8; 16], flags: u8, revision: u8, private_data: &[u8]) -> Vec<u8> {
    let len = (private_data.len() as u16).to_be_bytes();
    [&key[..], &[flags, revision], &len, private_data].concat()
}

/// The first bytes of a Request.
pub const REQUEST: &[u8; 16] = b"MPA ID Req Frame";
/// The first bytes of a Reply.
pub const REPLY: &[u8; 16] = b"MPA ID Rep Frame";

impl SocketPeer {
    fn new(stream: TcpStream, limit: Duration) -> io::Result<Self> {
        stream.set_read_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, sent: 0, heard: Vec::new(), markers_sent: false, markers_heard: false })
    }

    /// Connects without sending anything. Each later wait for the other end may take `limit`.
    pub fn connect(to: SocketAddr, limit: Duration) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&to, limit).with_context(|| format!("connecting to {to}"))?;
        Ok(Self::new(stream, limit)?)
    }

    /// Accepts the next connection of a listener and reads the Request.
    pub fn accept(listener: &TcpListener, limit: Duration) -> Result<Self> {
        let mut this = Self::accept_stream(listener, limit)?;
        this.hear_start_up(REQUEST)?;
        Ok(this)
    }

    /// Accepts the next connection of a listener without reading anything.
    pub fn accept_stream(listener: &TcpListener, limit: Duration) -> Result<Self> {
        let (stream, _) = listener.accept()?;
        Ok(Self::new(stream, limit)?)
    }

    /// Accepts the next connection of a listener and agrees to its Request, including markers if it asks for
    /// them.
    pub fn accepted(listener: &TcpListener, limit: Duration) -> Result<Self> {
        let mut this = Self::accept_stream(listener, limit)?;
        this.answer(|request| {
            let flags = request[16];
            if flags & ENHANCED == 0 {
                start_up(REPLY, flags, 1, &[])
            } else {
                start_up(REPLY, flags, 2, &[0, 4, 0, 4])
            }
        })?;
        Ok(this)
    }

    /// Reads the Request and sends the Reply that `reply` makes of it; returns the Request.
    pub fn answer(&mut self, reply: impl FnOnce(&[u8]) -> Vec<u8>) -> Result<Vec<u8>> {
        let request = self.hear_start_up(REQUEST)?;
        let reply = reply(&request);
        self.markers_heard = reply[16] & MARKERS != 0;
        // With revision 0 there are markers in both directions (RFC 5044 figure 16).
        self.markers_sent = request[16] & MARKERS != 0 || reply[17] == 0;
        self.say(&reply)?;
        Ok(request)
    }

    /// Sends this Request and returns the Reply.
    pub fn start(&mut self, request: &[u8]) -> Result<Vec<u8>> {
        self.say(request)?;
        let reply = self.hear_start_up(REPLY)?;
        self.markers_heard = request[16] & MARKERS != 0;
        self.markers_sent = reply[16] & MARKERS != 0;
        Ok(reply)
    }

    /// Reads a start-up frame that begins with `key`.
    fn hear_start_up(&mut self, key: &[u8; 16]) -> Result<Vec<u8>> {
        self.hear(20)?;
        let private_data = usize::from(u16::from_be_bytes([self.heard[18], self.heard[19]]));
        ensure!(self.heard.starts_with(key), "no start-up frame: {:02x?}", self.heard);
        self.hear_stream(20 + private_data)
    }

    /// Reads this many bytes of streaming data.
    pub fn hear_stream(&mut self, bytes: usize) -> Result<Vec<u8>> {
        self.hear(bytes)?;
        Ok(self.heard.drain(..bytes).collect())
    }

    /// Connects and completes a revision 2 start-up with CRCs, and optionally with markers in both
    /// directions.
    pub fn started(to: SocketAddr, markers: bool, limit: Duration) -> Result<Self> {
        let mut this = Self::connect(to, limit)?;
        let flags = CRC | if markers { MARKERS } else { 0 };
        // IRD and ORD that allow a few requests of each kind.
        this.start(&start_up(REQUEST, flags | ENHANCED, 2, &[0, 4, 0, 4]))?;
        Ok(this)
    }

    /// Sends raw bytes.
    pub fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// A second handle of the socket, for sending while this one waits for the response.
    pub fn sender(&self) -> io::Result<TcpStream> {
        let sender = self.stream.try_clone()?;
        sender.set_write_timeout(self.stream.read_timeout()?)?;
        Ok(sender)
    }

    /// Sends a ULPDU in an FPDU.
    pub fn send(&mut self, ulpdu: &[u8]) -> io::Result<()> {
        let fpdu = self.frame(ulpdu);
        self.say(&fpdu)
    }

    /// Encodes the next ULPDU as an FPDU.
    pub fn frame(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        let fpdu = fpdu(ulpdu, self.markers_sent.then_some(self.sent));
        self.sent += fpdu.len();
        fpdu
    }

    /// Closes our direction.
    pub fn finish(&self) -> io::Result<()> {
        self.stream.shutdown(std::net::Shutdown::Write)
    }

    /// Reads until this many bytes have arrived.
    fn hear(&mut self, bytes: usize) -> io::Result<()> {
        let mut buffer = [0; 4096];
        while self.heard.len() < bytes {
            let n = self.stream.read(&mut buffer)?;
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.heard.extend_from_slice(&buffer[..n]);
        }
        Ok(())
    }

    /// Reads until this many ULPDUs have arrived.
    pub fn expect(&mut self, count: usize) -> Result<Vec<Vec<u8>>> {
        loop {
            let ulpdus = self.ulpdus()?;
            if ulpdus.len() >= count {
                return Ok(ulpdus);
            }
            self.hear(self.heard.len() + 1)?;
        }
    }

    /// Reads until a message with this opcode has arrived.
    pub fn expect_opcode(&mut self, opcode: u8) -> Result<Vec<u8>> {
        loop {
            let is_wanted = |ulpdu: &Vec<u8>| ulpdu.get(1).is_some_and(|control| control & 0x0f == opcode);
            if let Some(ulpdu) = self.ulpdus()?.into_iter().find(is_wanted) {
                return Ok(ulpdu);
            }
            self.hear(self.heard.len() + 1)?;
        }
    }

    /// Reads until the last segment of the first message with this opcode has arrived; returns the message's segments.
    pub fn expect_message(&mut self, opcode: u8) -> Result<Vec<Vec<u8>>> {
        const LAST: u8 = 0x40;
        loop {
            let of_message = |ulpdu: &Vec<u8>| ulpdu.get(1).is_some_and(|control| control & 0x0f == opcode);
            let mut segments: Vec<_> = self.ulpdus()?.into_iter().filter(of_message).collect();
            if let Some(last) = segments.iter().position(|segment| segment[0] & LAST != 0) {
                segments.truncate(last + 1);
                return Ok(segments);
            }
            self.hear(self.heard.len() + 1)?;
        }
    }

    /// Reads until the other end closes; returns all ULPDUs, and how it ended.
    pub fn to_the_end(&mut self) -> Result<(Vec<Vec<u8>>, End)> {
        let end = loop {
            match self.hear(self.heard.len() + 1) {
                Ok(()) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::UnexpectedEof => break End::Closed,
                    io::ErrorKind::ConnectionReset => break End::Reset,
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => break End::Open,
                    _ => return Err(error.into()),
                },
            }
        };
        Ok((self.ulpdus()?, end))
    }

    /// Bytes received after the start-up.
    pub fn heard(&self) -> &[u8] {
        &self.heard
    }

    fn ulpdus(&self) -> Result<Vec<Vec<u8>>> {
        framing::ulpdus(&self.heard, self.markers_heard, true).map_err(anyhow::Error::msg)
    }
}

/// A Terminate message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminate {
    /// Layer, error type, error code.
    pub numbers: (u8, u8, u8),
    /// The DDP Segment Length, if M is set.
    pub length: Option<u16>,
    /// The DDP header, if D is set.
    pub ddp: Option<Vec<u8>>,
    /// The RDMA header, if R is set.
    pub rdma: Option<Vec<u8>>,
}

impl Terminate {
    /// Parses the ULPDU of a Terminate and checks every field that does not depend on the error.
    pub fn read(ulpdu: &[u8]) -> Result<Self> {
        const DDP: [u8; 18] = [0x41, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0];
        let mut rest = ulpdu;
        let mut take = |bytes: usize| {
            let (now, later) = rest.split_at_checked(bytes).context("the Terminate is too short")?;
            rest = later;
            anyhow::Ok(now.to_vec())
        };
        ensure!(take(18)? == DDP, "queue 2, MSN 1, MO 0, last, opcode 7: {ulpdu:02x?}");
        let control = take(4)?;
        let reserved = (control[2] & 0x1f, control[3]);
        ensure!(reserved == (0, 0), "reserved bits: {control:02x?}");
        let [m, d, r] = [0x80, 0x40, 0x20].map(|bit| control[2] & bit != 0);
        let length = if m || d { Some(take(2)?) } else { None };
        let length = length.filter(|_| m).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        let ddp = if d {
            let first = take(1)?;
            let more = take(if first[0] & 0x80 == 0 { 17 } else { 13 })?;
            Some([first, more].concat())
        } else {
            None
        };
        let rdma = if r { Some(take(28)?) } else { None };
        ensure!(rest.is_empty(), "{} bytes after the Terminate", rest.len());
        Ok(Self { numbers: (control[0] >> 4, control[0] & 15, control[1]), length, ddp, rdma })
    }
}

/// Encodes a ULPDU as an FPDU (RFC 5044 section 4); with markers if given its position in the stream.
pub fn fpdu(ulpdu: &[u8], start: Option<usize>) -> Vec<u8> {
    let mut body = (ulpdu.len() as u16).to_be_bytes().to_vec();
    body.extend_from_slice(ulpdu);
    body.resize(body.len().next_multiple_of(4), 0);
    let due = |at: usize| start.is_some() && at.is_multiple_of(MARKER_INTERVAL);
    let start = start.unwrap_or_default();
    let header = if due(start) { start + 4 } else { start };
    let mut fpdu = Vec::new();
    let mark = |fpdu: &mut Vec<u8>| {
        let at = start + fpdu.len();
        if due(at) {
            fpdu.extend_from_slice(&[0, 0]);
            fpdu.extend_from_slice(&(at.saturating_sub(header) as u16).to_be_bytes());
        }
    };
    for byte in body {
        mark(&mut fpdu);
        fpdu.push(byte);
    }
    mark(&mut fpdu);
    let sum = crc32c::crc32c(&fpdu);
    fpdu.extend_from_slice(&sum.to_le_bytes());
    fpdu
}

/// Encodes a tagged segment (RFC 5041 section 4.2) with RDMAP's control byte.
pub fn tagged(control: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    [&[0xc1, control][..], &stag.to_be_bytes(), &to.to_be_bytes(), payload].concat()
}

/// Encodes an untagged segment (RFC 5041 section 4.3), the last of its message.
pub fn untagged(control: u8, word: u32, queue: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let words = [word, queue, msn, mo].map(u32::to_be_bytes).concat();
    [&[0x41, control][..], &words, payload].concat()
}

/// Encodes a Read Request (RFC 5040 section 4.4) with an arbitrary sink.
pub fn read_request(msn: u32, stag: u32, to: u64, len: u32) -> Vec<u8> {
    let body = [
        &0x5117_u32.to_be_bytes()[..],
        &0_u64.to_be_bytes(),
        &len.to_be_bytes(),
        &stag.to_be_bytes(),
        &to.to_be_bytes(),
    ];
    untagged(0x41, 0, 1, msn, 0, &body.concat())
}

/// Encodes an Atomic Request (RFC 7306 section 5.2.1): FetchAdd of one, or the operation `code`.
pub fn atomic_request(code: u8, stag: u32, to: u64) -> Vec<u8> {
    let mut body = vec![0, 0, 0, code, 0, 0, 0, 1];
    body.extend_from_slice(&stag.to_be_bytes());
    body.extend_from_slice(&to.to_be_bytes());
    for word in [1_u64, 0, 0, 0] {
        body.extend_from_slice(&word.to_be_bytes());
    }
    untagged(0x4a, 0, 1, 1, 0, &body)
}
