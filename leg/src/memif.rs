//! The handshake of memif version 2, by which the end that owns the memory of a leg tells the other end where it is.
//!
//! Each message is a datagram of 128 bytes on a socket of type `SOCK_SEQPACKET`: a kind of 16 bits, then the fields without gaps, in
//! the byte order of the machine. Three kinds carry a descriptor.
//!
//! | kind | from | fields | descriptor |
//! |---|---|---|---|
//! | 2 hello | master | name, lowest and highest version, highest numbers of regions and rings, log2 of the largest ring | |
//! | 3 init | slave | version, identifier, mode, secret, name | |
//! | 4 region | slave | number, size | memory |
//! | 5 ring | slave | flags, number, region, offset, log2 of its size, bytes of a private header | wake-ups |
//! | 6 connect | slave | name | |
//! | 7 connected | master | name | |
//! | 8 disconnect | both | code, text | |
//! | 1 acknowledge | both | | |
//!
//! The slave is the end that owns the memory.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::sys::Lie;

/// Bytes of a message.
const MESSAGE_BYTES: usize = 128;
/// Version 2.0.
const VERSION: u16 = 0x0200;
/// Bytes of the names of programs and interfaces, and of a text.
const NAME_BYTES: usize = 32;
const SECRET_BYTES: usize = 24;
const TEXT_BYTES: usize = 96;
/// The mode in which frames begin with an Ethernet header.
const ETHERNET: u8 = 0;
/// Flag of a ring for frames to the master.
const TO_MASTER: u16 = 1;
/// The only numbers of regions and rings.
const ONLY: u16 = 0;
/// Largest number of descriptors of any message (`SCM_MAX_FD`). All are received: the kernel would close the others.
const MAX_RECEIVED: usize = 253;

const ACKNOWLEDGE: u16 = 1;
const HELLO: u16 = 2;
const INIT: u16 = 3;
const REGION: u16 = 4;
const RING: u16 = 5;
const CONNECT: u16 = 6;
const CONNECTED: u16 = 7;
const DISCONNECT: u16 = 8;

/// A message while it is written or read. A read behind the end gives zeroes.
struct Message {
    bytes: [u8; MESSAGE_BYTES],
    at: usize,
}

impl Message {
    fn new(kind: u16) -> Self {
        Self { bytes: [0; MESSAGE_BYTES], at: 0 }.put(&kind.to_ne_bytes())
    }

    fn put(mut self, field: &[u8]) -> Self {
        if let Some(to) = self.bytes.get_mut(self.at..self.at + field.len()) {
            to.copy_from_slice(field);
        }
        self.at += field.len();
        self
    }

    /// A text in a field of `bytes`, which ends with a zero.
    fn text(self, text: &str, bytes: usize) -> Self {
        let end = self.at + bytes;
        let mut text = text.to_owned();
        while text.len() >= bytes {
            text.pop();
        }
        Self { at: end, ..self.put(text.as_bytes()) }
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let field = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk).copied();
        self.at += N;
        field.unwrap_or([0; N])
    }

    fn u8(&mut self) -> u8 {
        u8::from_ne_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.take())
    }

    fn text_of<const N: usize>(&mut self) -> String {
        let bytes = self.take::<N>();
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect()
    }
}

fn send(socket: BorrowedFd<'_>, message: &Message, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.as_slice();
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(&message.bytes)], &mut control, flags).map(drop)
}

/// Receives a message without waiting; `None` when the other end has hung up.
fn receive(socket: BorrowedFd<'_>) -> Result<Option<(Message, Vec<OwnedFd>)>, Errno> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok((received.bytes > 0).then_some((Message { bytes, at: 0 }, descriptors)))
}

/// How the slave introduces itself.
#[derive(Debug, Clone, Copy)]
pub struct Handshake<'a> {
    /// The number of the interface, which a master that has several knows.
    pub id: u32,
    /// The master's secret, if it has one; at most 23 bytes.
    pub secret: &'a str,
    /// Longest wait for the handshake.
    pub patience: Duration,
}

/// What the slave offers: memory and two rings in it, each an offset, the logarithm of a size and a descriptor for wake-ups.
pub(crate) struct Offer<'a> {
    pub memory: BorrowedFd<'a>,
    pub bytes: u64,
    pub to_master: (u32, u8, BorrowedFd<'a>),
    pub to_slave: (u32, u8, BorrowedFd<'a>),
}

/// The slave's side of the handshake.
pub(crate) fn greet(socket: BorrowedFd<'_>, handshake: &Handshake<'_>, offer: &Offer<'_>) -> io::Result<()> {
    let end = Instant::now() + handshake.patience;
    let mut hello = expect(socket, HELLO, end)?;
    let _name = hello.take::<NAME_BYTES>();
    let (lowest, highest) = (hello.u16(), hello.u16());
    if !(lowest..=highest).contains(&VERSION) {
        return Err(io::Error::other(format!(
            "the other end speaks memif {lowest:#x} to {highest:#x}, not 2.0"
        )));
    }
    let _numbers = hello.take::<6>();
    let largest = hello.u8();
    if offer.to_master.1 > largest || offer.to_slave.1 > largest {
        return Err(io::Error::other("the other end takes only smaller rings"));
    }
    let ask = |message: Message, descriptor, answer| {
        transmit(socket, &message, descriptor, end)?;
        expect(socket, answer, end)
    };
    let init = Message::new(INIT)
        .put(&VERSION.to_ne_bytes())
        .put(&handshake.id.to_ne_bytes())
        .put(&[ETHERNET])
        .text(handshake.secret, SECRET_BYTES)
        .text("xwarp", NAME_BYTES);
    ask(init, None, ACKNOWLEDGE)?;
    let region = Message::new(REGION).put(&ONLY.to_ne_bytes()).put(&offer.bytes.to_ne_bytes());
    ask(region, Some(offer.memory), ACKNOWLEDGE)?;
    for ((offset, log2, bell), flags) in [(offer.to_master, TO_MASTER), (offer.to_slave, 0)] {
        let ring = Message::new(RING)
            .put(&flags.to_ne_bytes())
            .put(&ONLY.to_ne_bytes())
            .put(&ONLY.to_ne_bytes())
            .put(&offset.to_ne_bytes())
            .put(&[log2])
            .put(&0_u16.to_ne_bytes());
        ask(ring, Some(bell), ACKNOWLEDGE)?;
    }
    ask(Message::new(CONNECT).text("xwarp", NAME_BYTES), None, CONNECTED)?;
    Ok(())
}

fn transmit(
    socket: BorrowedFd<'_>,
    message: &Message,
    descriptor: Option<BorrowedFd<'_>>,
    end: Instant,
) -> io::Result<()> {
    loop {
        match send(socket, message, descriptor) {
            Err(Errno::AGAIN) => wait(socket, PollFlags::OUT, end)?,
            Err(Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

/// Waits for a message of a kind.
fn expect(socket: BorrowedFd<'_>, kind: u16, end: Instant) -> io::Result<Message> {
    loop {
        let (mut message, _) = match receive(socket) {
            Ok(Some(received)) => received,
            Ok(None) => {
                return Err(io::Error::new(io::ErrorKind::ConnectionReset, "the other end has hung up"));
            }
            Err(Errno::AGAIN) => {
                wait(socket, PollFlags::IN, end)?;
                continue;
            }
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
        };
        return match message.u16() {
            found if found == kind => Ok(message),
            DISCONNECT => Err(io::Error::other(disconnect_text(&mut message))),
            other => {
                Err(io::Error::new(io::ErrorKind::InvalidData, format!("an unexpected message {other}")))
            }
        };
    }
}

fn disconnect_text(message: &mut Message) -> String {
    let _code = message.u32();
    message.text_of::<TEXT_BYTES>()
}

fn wait(socket: BorrowedFd<'_>, flags: PollFlags, end: Instant) -> io::Result<()> {
    let limit = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok();
    match poll(&mut [PollFd::new(&socket, flags)], limit.as_ref()) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Reads what the other end of a connected leg has said, without waiting.
///
/// # Errors
/// It has hung up; the text says why, for people.
pub(crate) fn listen(socket: BorrowedFd<'_>) -> Result<(), String> {
    loop {
        match receive(socket) {
            Ok(Some((mut message, _))) => {
                if message.u16() == DISCONNECT {
                    return Err(disconnect_text(&mut message));
                }
            }
            Ok(None) => return Err("the other end of the leg has hung up".into()),
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.to_string()),
        }
    }
}

/// What a slave has asked for.
#[derive(Debug)]
pub struct Asked {
    pub(crate) memory: OwnedFd,
    pub(crate) bytes: usize,
    pub(crate) to_master: AskedRing,
    pub(crate) to_slave: AskedRing,
}

/// A ring that a slave has asked for.
#[derive(Debug)]
pub(crate) struct AskedRing {
    pub offset: u32,
    pub log2: u8,
    pub bell: OwnedFd,
}

/// The master's side of the handshake, which never waits.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "a direction is named by its end")]
pub struct Master {
    socket: OwnedFd,
    largest: u64,
    initialised: bool,
    memory: Option<(OwnedFd, usize)>,
    to_master: Option<AskedRing>,
    to_slave: Option<AskedRing>,
    is_connected: bool,
}

/// What a [`Master`] has read.
#[derive(Debug)]
pub enum Step {
    /// Nothing that concerns its user; perhaps more follows.
    Nothing,
    /// The slave has described its leg, and waits for [`Master::connected`].
    Asked(Asked),
    /// The slave has hung up.
    Gone,
}

impl Master {
    /// A master on `socket`, which takes memory of at most `largest` bytes, and says hello.
    ///
    /// # Errors
    /// The slave has hung up already.
    pub fn new(socket: OwnedFd, largest: u64) -> io::Result<Self> {
        let hello = Message::new(HELLO)
            .text("xwarp", NAME_BYTES)
            .put(&VERSION.to_ne_bytes())
            .put(&VERSION.to_ne_bytes())
            .put(&[0; 6])
            .put(&[crate::sys::MAX_LOG2]);
        let master = Self {
            socket,
            largest,
            initialised: false,
            memory: None,
            to_master: None,
            to_slave: None,
            is_connected: false,
        };
        send(master.fd(), &hello, None)?;
        Ok(master)
    }

    /// Readable when there is something for [`read`](Self::read).
    pub fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.socket)
    }

    /// Reads a message, if there is one.
    ///
    /// # Errors
    /// The slave violates the protocol: its leg has ended.
    pub fn read(&mut self) -> Result<Step, Lie> {
        let (mut message, mut descriptors) = match receive(self.fd()) {
            Ok(Some(received)) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Step::Nothing),
            Ok(None) | Err(_) => return Ok(Step::Gone),
        };
        let descriptor = (descriptors.len() == 1).then(|| descriptors.pop()).flatten();
        match (message.u16(), descriptor) {
            (ACKNOWLEDGE, None) => return Ok(Step::Nothing),
            (DISCONNECT, None) => return Ok(Step::Gone),
            _ if self.is_connected => return Err(Lie("changes a leg that is connected")),
            (INIT, None) if !self.initialised => self.init(&mut message)?,
            (REGION, Some(memory)) if self.initialised && self.memory.is_none() => {
                let (number, size) = (message.u16(), message.u64());
                if number != ONLY || size > self.largest {
                    return Err(Lie("has more memory than is allowed (one region)"));
                }
                self.memory = Some((memory, size as usize));
            }
            (RING, Some(bell)) if self.memory.is_some() => self.ring(&mut message, bell)?,
            (CONNECT, None) => {
                let parts = (self.memory.take(), self.to_master.take(), self.to_slave.take());
                let (Some((memory, bytes)), Some(to_master), Some(to_slave)) = parts else {
                    return Err(Lie("connects before it has described a leg"));
                };
                self.is_connected = true;
                return Ok(Step::Asked(Asked { memory, bytes, to_master, to_slave }));
            }
            _ => return Err(Lie("violates the protocol (memif 2.0)")),
        }
        self.answer(&Message::new(ACKNOWLEDGE));
        Ok(Step::Nothing)
    }

    fn init(&mut self, message: &mut Message) -> Result<(), Lie> {
        let (version, _id, mode) = (message.u16(), message.u32(), message.u8());
        if version != VERSION || mode != ETHERNET {
            return Err(Lie("has another version or mode (memif 2.0, Ethernet)"));
        }
        self.initialised = true;
        Ok(())
    }

    fn ring(&mut self, message: &mut Message, bell: OwnedFd) -> Result<(), Lie> {
        let (flags, number, region, offset, log2) =
            (message.u16(), message.u16(), message.u16(), message.u32(), message.u8());
        let place = if flags & TO_MASTER != 0 { &mut self.to_master } else { &mut self.to_slave };
        if number != ONLY || region != ONLY || place.is_some() {
            return Err(Lie("has more rings than one in each direction"));
        }
        *place = Some(AskedRing { offset, log2, bell });
        Ok(())
    }

    /// Tells the slave that its leg is connected.
    pub fn connected(&self) {
        self.answer(&Message::new(CONNECTED).text("xwarp", NAME_BYTES));
    }

    /// Tells the slave that its leg has ended, and why.
    pub fn disconnect(&self, reason: &str) {
        self.answer(&Message::new(DISCONNECT).put(&0_u32.to_ne_bytes()).text(reason, TEXT_BYTES));
    }

    /// A slave that does not read gets no answer.
    fn answer(&self, message: &Message) {
        let _ = send(self.fd(), message, None);
    }
}
