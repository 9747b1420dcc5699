//! The encoding of messages: a byte for the kind, then the fields in the order of their declaration.

use std::net::IpAddr;

use crate::codec::{DecodeError, Reader, Writer};
use crate::message::{
    Choice, Description, Device, Event, Hook, Host, MAX_ADDRESSES, MAX_BYTES, MAX_COUNTERS, Neighbour, Quota,
    Reason, Refusal, Reply, Request, Sizes, Tagged,
};

/// Largest length of an interface's name, in bytes (`IFNAMSIZ` without the final zero).
const MAX_NAME_BYTES: usize = 15;

/// Largest length of a text for users, in bytes.
const MAX_TEXT_BYTES: usize = 512;

/// Largest length of a counter's name, in bytes.
const MAX_COUNTER_BYTES: usize = 40;

/// Largest number of VLAN tags of a frame.
const MAX_VLANS: usize = 2;

/// All reasons, in the order of their codes.
const REASONS: [Reason; 13] = [
    Reason::Version,
    Reason::State,
    Reason::NotServed,
    Reason::Limit,
    Reason::Rate,
    Reason::PortInUse,
    Reason::Permission,
    Reason::NotOurAddress,
    Reason::PortsExhausted,
    Reason::Device,
    Reason::Memory,
    Reason::Route,
    Reason::System,
];

fn decode<T>(
    bytes: &[u8],
    body: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    if bytes.len() > MAX_BYTES {
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
                to.text(name, MAX_NAME_BYTES);
            }
            Self::Address(address) => {
                to.u8(1);
                to.address(*address);
            }
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match from.u8()? {
            0 => Ok(Self::Name(from.text(MAX_NAME_BYTES, "interface name")?)),
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
            Request::NextHop { destination, source, destination_port, source_port, confirm } => {
                to.u8(6);
                to.address(*destination);
                to.address(*source);
                to.u16(*destination_port);
                to.u16(*source_port);
                to.flag(*confirm);
            }
            Request::Describe { number } => {
                to.u8(7);
                to.u16(*number);
            }
            Request::Register => to.u8(8),
            Request::Host { name, join } => {
                to.u8(32);
                to.text(name, MAX_NAME_BYTES);
                to.flag(*join);
            }
            Request::Faults { from, to: there, words } => {
                to.u8(33);
                to.text(from, MAX_NAME_BYTES);
                to.text(there, MAX_NAME_BYTES);
                to.text(words, MAX_TEXT_BYTES);
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
                    destination_port: from.u16()?,
                    source_port: from.u16()?,
                    confirm: from.flag("confirm")?,
                },
                7 => Request::Describe { number: from.u16()? },
                8 => Request::Register,
                32 => Request::Host {
                    name: from.text(MAX_NAME_BYTES, "name of a host")?,
                    join: from.flag("join")?,
                },
                33 => Request::Faults {
                    from: from.text(MAX_NAME_BYTES, "name of a host")?,
                    to: from.text(MAX_NAME_BYTES, "name of a host")?,
                    words: from.text(MAX_TEXT_BYTES, "text")?,
                },
                _ => return Err(DecodeError::Invalid("kind of request")),
            };
            Ok(Self { id, body })
        })
    }
}

/// All hooks, in the order of their codes.
const HOOKS: [Hook; 3] = [Hook::Native, Hook::Generic, Hook::TrafficControl];

impl Hook {
    fn encode(self, to: &mut Writer) {
        let code = HOOKS.iter().position(|hook| *hook == self);
        to.u8(code.unwrap_or(HOOKS.len()) as u8);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        HOOKS.get(usize::from(from.u8()?)).copied().ok_or(DecodeError::Invalid("hook"))
    }
}

impl Device {
    fn encode(&self, to: &mut Writer) {
        to.text(&self.name, MAX_NAME_BYTES);
        to.text(&self.carrier, MAX_NAME_BYTES);
        to.u32(self.index);
        to.u32(self.socket_index);
        to.mac(self.mac);
        to.u32(self.mtu);
        to.u16(self.path_mtu);
        to.u16(self.largest_mtu);
        to.flag(self.up);
        self.hook.encode(to);
        to.flag(self.multi_buffer);
        to.u8(self.vlans.len().min(MAX_VLANS) as u8);
        for id in self.vlans.iter().take(MAX_VLANS) {
            to.u16(*id);
        }
        to.u32(self.program_id);
        encode_addresses(&self.addresses, to);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut device = Self {
            name: from.text(MAX_NAME_BYTES, "interface name")?,
            carrier: from.text(MAX_NAME_BYTES, "interface name")?,
            index: from.u32()?,
            socket_index: from.u32()?,
            mac: from.mac()?,
            mtu: from.u32()?,
            path_mtu: from.u16()?,
            largest_mtu: from.u16()?,
            up: from.flag("link state")?,
            hook: Hook::decode(from)?,
            multi_buffer: from.flag("form of frames")?,
            vlans: Vec::new(),
            program_id: 0,
            addresses: Vec::new(),
        };
        let vlans = usize::from(from.u8()?);
        if vlans > MAX_VLANS {
            return Err(DecodeError::Invalid("number of VLAN tags"));
        }
        for _ in 0..vlans {
            device.vlans.push(from.u16()?);
        }
        device.program_id = from.u32()?;
        device.addresses = decode_addresses(from)?;
        Ok(device)
    }
}

fn encode_addresses(addresses: &[IpAddr], to: &mut Writer) {
    to.u8(addresses.len().min(MAX_ADDRESSES) as u8);
    for address in addresses.iter().take(MAX_ADDRESSES) {
        to.address(*address);
    }
}

fn decode_addresses(from: &mut Reader<'_>) -> Result<Vec<IpAddr>, DecodeError> {
    let count = usize::from(from.u8()?);
    if count > MAX_ADDRESSES {
        return Err(DecodeError::Invalid("number of addresses"));
    }
    (0..count).map(|_| from.address()).collect()
}

impl Host {
    fn encode(&self, to: &mut Writer) {
        to.u16(self.number);
        to.mac(self.mac);
        encode_addresses(&self.addresses, to);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { number: from.u16()?, mac: from.mac()?, addresses: decode_addresses(from)? })
    }
}

impl Quota {
    fn encode(self, to: &mut Writer) {
        to.u64(self.used);
        to.u64(self.most);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self { used: from.u64()?, most: from.u64()? })
    }
}

impl Description {
    fn encode(&self, to: &mut Writer) {
        to.u16(self.interfaces);
        to.text(&self.name, MAX_NAME_BYTES);
        to.text(&self.carrier, MAX_NAME_BYTES);
        to.u32(self.mtu);
        to.flag(self.up);
        self.hook.encode(to);
        to.flag(self.generic_clients);
        to.u32(self.devices);
        for quota in [self.own_devices, self.own_ports, self.own_memory_bytes] {
            quota.encode(to);
        }
        to.u8(self.counters.len().min(MAX_COUNTERS) as u8);
        for (name, value) in self.counters.iter().take(MAX_COUNTERS) {
            to.text(name, MAX_COUNTER_BYTES);
            to.u64(*value);
        }
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut description = Self {
            interfaces: from.u16()?,
            name: from.text(MAX_NAME_BYTES, "interface name")?,
            carrier: from.text(MAX_NAME_BYTES, "interface name")?,
            mtu: from.u32()?,
            up: from.flag("link state")?,
            hook: Hook::decode(from)?,
            generic_clients: from.flag("mode")?,
            devices: from.u32()?,
            own_devices: Quota::decode(from)?,
            own_ports: Quota::decode(from)?,
            own_memory_bytes: Quota::decode(from)?,
            counters: Vec::new(),
        };
        let counters = usize::from(from.u8()?);
        if counters > MAX_COUNTERS {
            return Err(DecodeError::Invalid("number of counters"));
        }
        for _ in 0..counters {
            description.counters.push((from.text(MAX_COUNTER_BYTES, "name of a counter")?, from.u64()?));
        }
        Ok(description)
    }
}

impl Refusal {
    fn encode(&self, to: &mut Writer) {
        let code = REASONS.iter().position(|reason| *reason == self.reason);
        to.u8(code.unwrap_or(REASONS.len()) as u8);
        to.text(&self.text, MAX_TEXT_BYTES);
    }

    fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let code = usize::from(from.u8()?);
        let reason = REASONS.get(code).copied().ok_or(DecodeError::Invalid("reason"))?;
        Ok(Self { reason, text: from.text(MAX_TEXT_BYTES, "text")? })
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
            Reply::Registered => to.u8(4),
            Reply::Resolved { source, next_hop, neighbour, mtu } => {
                to.u8(5);
                to.address(*source);
                to.address(*next_hop);
                neighbour.encode(&mut to);
                to.u16(*mtu);
            }
            Reply::NextHop { address, mac, mtu } => {
                to.u8(6);
                to.address(*address);
                to.optional_mac(*mac);
                to.u16(*mtu);
            }
            Reply::Described(description) => {
                to.u8(7);
                description.encode(&mut to);
            }
            Reply::Restarted => to.u8(8),
            Reply::Host(host) => {
                to.u8(32);
                host.encode(&mut to);
            }
            Reply::Done => to.u8(33),
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
                4 => Reply::Registered,
                5 => Reply::Resolved {
                    source: from.address()?,
                    next_hop: from.address()?,
                    neighbour: Neighbour::decode(from)?,
                    mtu: from.u16()?,
                },
                6 => Reply::NextHop { address: from.address()?, mac: from.optional_mac()?, mtu: from.u16()? },
                7 => Reply::Described(Description::decode(from)?),
                8 => Reply::Restarted,
                32 => Reply::Host(Host::decode(from)?),
                33 => Reply::Done,
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
                to.text(text, MAX_TEXT_BYTES);
            }
            Self::Restarted => to.u8(10),
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
                9 => Self::Revoked { text: from.text(MAX_TEXT_BYTES, "text")? },
                10 => Self::Restarted,
                _ => return Err(DecodeError::Invalid("kind of event")),
            })
        })
    }
}
