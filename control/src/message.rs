//! The messages and their encoding: a byte for the kind, then the fields in the order of their declaration.

use std::net::IpAddr;

use xwarp_tcp::wire::Mac;

use crate::codec::{DecodeError, Reader, Writer};

/// Version of the protocol. Client and helper must have the same.
pub const VERSION: u16 = 1;

/// Largest message in bytes.
pub const MOST_BYTES: usize = 2048;

/// Most addresses in [`Device::addresses`]; the others follow as [`Event::AddressAdded`].
pub const MOST_ADDRESSES: usize = 64;

/// Most bytes of an interface's name (`IFNAMSIZ` without the final zero).
const MOST_NAME_BYTES: usize = 15;

/// Most bytes of a text for people.
const MOST_TEXT_BYTES: usize = 512;

/// Most VLAN tags of a frame.
const MOST_VLANS: usize = 2;

/// A request or a reply with the number that joins them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tagged<T> {
    /// Chosen by the client.
    pub id: u32,
    /// The message.
    pub body: T,
}

/// Which interface a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// The one with this name.
    Name(String),
    /// The one that has this address.
    Address(IpAddr),
}

/// Sizes of frame memory and rings, as the client made the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Receive chunks of 4096 bytes.
    pub receive_chunks: u32,
    /// Transmit chunks.
    pub transmit_chunks: u32,
    /// Descriptors of the transmit ring, a power of two.
    pub ring: u32,
}

/// A client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// The first message.
    Hello {
        /// The client's [`VERSION`].
        version: u16,
    },
    /// Opens a device; once for each connection to the helper. Carries the memory.
    Open {
        /// The interface.
        interface: Choice,
        /// The sizes.
        sizes: Sizes,
    },
    /// Reserves a port.
    Reserve {
        /// On this address; `None`: on all addresses of both families.
        address: Option<IpAddr>,
        /// The port; 0: any free one.
        port: u16,
    },
    /// Gives a port back. Not answered.
    Release {
        /// As it was reserved.
        address: Option<IpAddr>,
        /// The port.
        port: u16,
    },
    /// Looks up how to reach an address. To be repeated while the neighbour is [pending](Neighbour::Pending).
    Resolve {
        /// The peer.
        destination: IpAddr,
        /// The local address; `None`: the one that the kernel prefers.
        source: Option<IpAddr>,
    },
    /// Looks up the next hop of an established connection.
    NextHop {
        /// The peer.
        destination: IpAddr,
        /// The local address.
        source: IpAddr,
        /// The peer does not answer: the neighbour is to be confirmed.
        confirm: bool,
    },
}

/// An opened device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The interface, in the helper's network namespace.
    pub name: String,
    /// The interface that carries the frames: the parent of a VLAN interface, else the same.
    pub carrier: String,
    /// Index of the interface.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Largest path MTU in bytes.
    pub path_mtu: u16,
    /// Largest IP packet that frames can carry, in bytes.
    pub largest_mtu: u16,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// XDP runs after the kernel has made a socket buffer.
    pub generic: bool,
    /// Frames may have several chunks.
    pub multi_buffer: bool,
    /// VLAN ids of frames, outermost first.
    pub vlans: Vec<u16>,
    /// The kernel's id of the program on the interface.
    pub program_id: u32,
    /// Addresses of the interface.
    pub addresses: Vec<IpAddr>,
}

/// What is known about the Ethernet address of a next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Neighbour {
    /// It is known.
    Known(Mac),
    /// It is being resolved.
    Pending,
    /// The neighbour did not answer; it is asked again.
    Failed,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The helper has another version.
    Version,
    /// The request does not fit the state of the connection.
    State,
    /// The helper does not share this interface.
    NotServed,
    /// A limit of this user is reached.
    Limit,
    /// This user sends requests too fast.
    Rate,
    /// The port is in use.
    PortInUse,
    /// The port needs more rights.
    Permission,
    /// The address is not the interface's.
    NotOurAddress,
    /// No ephemeral port is free.
    PortsExhausted,
    /// The memory that came with the request cannot be used.
    Memory,
    /// There is no route.
    Route,
    /// A system call failed.
    System,
}

/// All reasons, in the order of their codes.
const REASONS: [Reason; 12] = [
    Reason::Version,
    Reason::State,
    Reason::NotServed,
    Reason::Limit,
    Reason::Rate,
    Reason::PortInUse,
    Reason::Permission,
    Reason::NotOurAddress,
    Reason::PortsExhausted,
    Reason::Memory,
    Reason::Route,
    Reason::System,
];

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For the program.
    pub reason: Reason,
    /// For people: what is wrong and what to do.
    pub text: String,
}

/// The helper's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// To [`Request::Hello`].
    Hello {
        /// The helper's [`VERSION`].
        version: u16,
    },
    /// To [`Request::Open`]. Carries the AF_XDP socket and the socket of events.
    Opened(Device),
    /// To [`Request::Reserve`].
    Reserved {
        /// The reserved port.
        port: u16,
    },
    /// To [`Request::Resolve`].
    Resolved {
        /// The local address.
        source: IpAddr,
        /// The neighbour to send to.
        next_hop: IpAddr,
        /// Its Ethernet address.
        neighbour: Neighbour,
        /// Largest IP packet on the way, in bytes.
        mtu: u16,
    },
    /// To [`Request::NextHop`].
    NextHop {
        /// The neighbour to send to.
        address: IpAddr,
        /// Its Ethernet address, if it is known.
        mac: Option<Mac>,
    },
    /// To any request.
    Refused(Refusal),
}

/// A change that the helper announces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The interface has a new address.
    AddressAdded(IpAddr),
    /// The interface lost an address.
    AddressRemoved(IpAddr),
    /// The interface went up or down.
    LinkState {
        /// Whether it is up and has a carrier.
        up: bool,
    },
    /// The path MTU changed, in bytes.
    Mtu(u16),
    /// The Ethernet address changed.
    Mac(Mac),
    /// The interface is gone.
    LinkRemoved,
    /// The Ethernet address of a neighbour is known, or changed.
    Neighbour {
        /// The neighbour.
        address: IpAddr,
        /// Its Ethernet address.
        mac: Mac,
    },
    /// Some route changed.
    Routes,
    /// The helper takes the device away; the connection ends.
    Revoked {
        /// Why.
        text: String,
    },
}

fn decode<T>(
    bytes: &[u8],
    body: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    if bytes.len() > MOST_BYTES {
        return Err(DecodeError::Long);
    }
    let mut from = Reader::new(bytes);
    let decoded = body(&mut from)?;
    from.end()?;
    Ok(decoded)
}

impl Choice {
    fn encode(&self, to: &mut Writer) {
        match self {
            Self::Name(name) => {
                to.u8(0);
                to.text(name, MOST_NAME_BYTES);
            }
            Self::Address(address) => {
                to.u8(1);
                to.address(*address);
            }
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match from.u8()? {
            0 => Ok(Self::Name(from.text(MOST_NAME_BYTES, "interface name")?)),
            1 => Ok(Self::Address(from.address()?)),
            _ => Err(DecodeError::Invalid("choice of an interface")),
        }
    }
}

impl Sizes {
    fn encode(self, to: &mut Writer) {
        to.u32(self.receive_chunks);
        to.u32(self.transmit_chunks);
        to.u32(self.ring);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let sizes = Self { receive_chunks: from.u32()?, transmit_chunks: from.u32()?, ring: from.u32()? };
        Ok(sizes)
    }
}

impl Tagged<Request> {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u32(self.id);
        match &self.body {
            Request::Hello { version } => {
                to.u8(1);
                to.u16(*version);
            }
            Request::Open { interface, sizes } => {
                to.u8(2);
                interface.encode(&mut to);
                sizes.encode(&mut to);
            }
            Request::Reserve { address, port } => {
                to.u8(3);
                to.optional_address(*address);
                to.u16(*port);
            }
            Request::Release { address, port } => {
                to.u8(4);
                to.optional_address(*address);
                to.u16(*port);
            }
            Request::Resolve { destination, source } => {
                to.u8(5);
                to.address(*destination);
                to.optional_address(*source);
            }
            Request::NextHop { destination, source, confirm } => {
                to.u8(6);
                to.address(*destination);
                to.address(*source);
                to.flag(*confirm);
            }
        }
        to.done()
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// It is not a request of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        decode(bytes, |from| {
            let id = from.u32()?;
            let body = match from.u8()? {
                1 => Request::Hello { version: from.u16()? },
                2 => Request::Open { interface: Choice::decode(from)?, sizes: Sizes::decode(from)? },
                3 => Request::Reserve { address: from.optional_address()?, port: from.u16()? },
                4 => Request::Release { address: from.optional_address()?, port: from.u16()? },
                5 => Request::Resolve { destination: from.address()?, source: from.optional_address()? },
                6 => Request::NextHop {
                    destination: from.address()?,
                    source: from.address()?,
                    confirm: from.flag("confirm")?,
                },
                _ => return Err(DecodeError::Invalid("kind of request")),
            };
            Ok(Self { id, body })
        })
    }
}

impl Device {
    fn encode(&self, to: &mut Writer) {
        to.text(&self.name, MOST_NAME_BYTES);
        to.text(&self.carrier, MOST_NAME_BYTES);
        to.u32(self.index);
        to.mac(self.mac);
        to.u32(self.mtu);
        to.u16(self.path_mtu);
        to.u16(self.largest_mtu);
        to.flag(self.up);
        to.flag(self.generic);
        to.flag(self.multi_buffer);
        to.u8(self.vlans.len().min(MOST_VLANS) as u8);
        for id in self.vlans.iter().take(MOST_VLANS) {
            to.u16(*id);
        }
        to.u32(self.program_id);
        to.u8(self.addresses.len().min(MOST_ADDRESSES) as u8);
        for address in self.addresses.iter().take(MOST_ADDRESSES) {
            to.address(*address);
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut device = Self {
            name: from.text(MOST_NAME_BYTES, "interface name")?,
            carrier: from.text(MOST_NAME_BYTES, "interface name")?,
            index: from.u32()?,
            mac: from.mac()?,
            mtu: from.u32()?,
            path_mtu: from.u16()?,
            largest_mtu: from.u16()?,
            up: from.flag("link state")?,
            generic: from.flag("mode")?,
            multi_buffer: from.flag("form of frames")?,
            vlans: Vec::new(),
            program_id: 0,
            addresses: Vec::new(),
        };
        let vlans = usize::from(from.u8()?);
        if vlans > MOST_VLANS {
            return Err(DecodeError::Invalid("number of VLAN tags"));
        }
        for _ in 0..vlans {
            device.vlans.push(from.u16()?);
        }
        device.program_id = from.u32()?;
        let addresses = usize::from(from.u8()?);
        if addresses > MOST_ADDRESSES {
            return Err(DecodeError::Invalid("number of addresses"));
        }
        for _ in 0..addresses {
            device.addresses.push(from.address()?);
        }
        Ok(device)
    }
}

impl Refusal {
    fn encode(&self, to: &mut Writer) {
        let code = REASONS.iter().position(|reason| *reason == self.reason);
        to.u8(code.unwrap_or(REASONS.len()) as u8);
        to.text(&self.text, MOST_TEXT_BYTES);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let code = usize::from(from.u8()?);
        let reason = REASONS.get(code).copied().ok_or(DecodeError::Invalid("reason"))?;
        Ok(Self { reason, text: from.text(MOST_TEXT_BYTES, "text")? })
    }
}

impl Neighbour {
    fn encode(self, to: &mut Writer) {
        match self {
            Self::Pending => to.u8(0),
            Self::Failed => to.u8(1),
            Self::Known(mac) => {
                to.u8(2);
                to.mac(mac);
            }
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match from.u8()? {
            0 => Ok(Self::Pending),
            1 => Ok(Self::Failed),
            2 => Ok(Self::Known(from.mac()?)),
            _ => Err(DecodeError::Invalid("neighbour")),
        }
    }
}

impl Tagged<Reply> {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        to.u32(self.id);
        match &self.body {
            Reply::Refused(refusal) => {
                to.u8(0);
                refusal.encode(&mut to);
            }
            Reply::Hello { version } => {
                to.u8(1);
                to.u16(*version);
            }
            Reply::Opened(device) => {
                to.u8(2);
                device.encode(&mut to);
            }
            Reply::Reserved { port } => {
                to.u8(3);
                to.u16(*port);
            }
            Reply::Resolved { source, next_hop, neighbour, mtu } => {
                to.u8(5);
                to.address(*source);
                to.address(*next_hop);
                neighbour.encode(&mut to);
                to.u16(*mtu);
            }
            Reply::NextHop { address, mac } => {
                to.u8(6);
                to.address(*address);
                to.optional_mac(*mac);
            }
        }
        to.done()
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// It is not a reply of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        decode(bytes, |from| {
            let id = from.u32()?;
            let body = match from.u8()? {
                0 => Reply::Refused(Refusal::decode(from)?),
                1 => Reply::Hello { version: from.u16()? },
                2 => Reply::Opened(Device::decode(from)?),
                3 => Reply::Reserved { port: from.u16()? },
                5 => Reply::Resolved {
                    source: from.address()?,
                    next_hop: from.address()?,
                    neighbour: Neighbour::decode(from)?,
                    mtu: from.u16()?,
                },
                6 => Reply::NextHop { address: from.address()?, mac: from.optional_mac()? },
                _ => return Err(DecodeError::Invalid("kind of reply")),
            };
            Ok(Self { id, body })
        })
    }
}

impl Event {
    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut to = Writer::default();
        match self {
            Self::AddressAdded(address) => {
                to.u8(1);
                to.address(*address);
            }
            Self::AddressRemoved(address) => {
                to.u8(2);
                to.address(*address);
            }
            Self::LinkState { up } => {
                to.u8(3);
                to.flag(*up);
            }
            Self::Mtu(mtu) => {
                to.u8(4);
                to.u16(*mtu);
            }
            Self::Mac(mac) => {
                to.u8(5);
                to.mac(*mac);
            }
            Self::LinkRemoved => to.u8(6),
            Self::Neighbour { address, mac } => {
                to.u8(7);
                to.address(*address);
                to.mac(*mac);
            }
            Self::Routes => to.u8(8),
            Self::Revoked { text } => {
                to.u8(9);
                to.text(text, MOST_TEXT_BYTES);
            }
        }
        to.done()
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// It is not an event of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        decode(bytes, |from| {
            Ok(match from.u8()? {
                1 => Self::AddressAdded(from.address()?),
                2 => Self::AddressRemoved(from.address()?),
                3 => Self::LinkState { up: from.flag("link state")? },
                4 => Self::Mtu(from.u16()?),
                5 => Self::Mac(from.mac()?),
                6 => Self::LinkRemoved,
                7 => Self::Neighbour { address: from.address()?, mac: from.mac()? },
                8 => Self::Routes,
                9 => Self::Revoked { text: from.text(MOST_TEXT_BYTES, "text")? },
                _ => return Err(DecodeError::Invalid("kind of event")),
            })
        })
    }
}
