//! Reading and writing the fields of messages. Every read checks the remaining length, and every length has a limit.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use xwarp_tcp::wire::Mac;

/// Why a message cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The message ends in the middle of a field.
    #[error("the message is too short")]
    Short,
    /// Bytes follow the last field.
    #[error("the message is too long")]
    Long,
    /// A field has an invalid value.
    #[error("the message has an invalid {0}")]
    Invalid(&'static str),
}

/// A read position in a message.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The end of the message.
    pub(crate) fn end(self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::Long) }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(DecodeError::Short)?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.take().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(crate) fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Invalid(what)),
        }
    }

    pub(crate) fn address(&mut self) -> Result<IpAddr, DecodeError> {
        self.optional_address()?.ok_or(DecodeError::Invalid("address"))
    }

    pub(crate) fn optional_address(&mut self) -> Result<Option<IpAddr>, DecodeError> {
        match self.u8()? {
            0 => Ok(None),
            4 => Ok(Some(Ipv4Addr::from(self.take::<4>()?).into())),
            6 => Ok(Some(Ipv6Addr::from(self.take::<16>()?).into())),
            _ => Err(DecodeError::Invalid("address family")),
        }
    }

    pub(crate) fn mac(&mut self) -> Result<Mac, DecodeError> {
        self.take().map(Mac)
    }

    pub(crate) fn optional_mac(&mut self) -> Result<Option<Mac>, DecodeError> {
        if self.flag("Ethernet address")? { self.mac().map(Some) } else { Ok(None) }
    }

    /// Text of at most `most` bytes, without control characters.
    pub(crate) fn text(&mut self, most: usize, what: &'static str) -> Result<String, DecodeError> {
        let len = usize::from(self.u16()?);
        if len > most {
            return Err(DecodeError::Invalid(what));
        }
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(DecodeError::Short)?;
        self.0 = rest;
        let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::Invalid(what))?;
        if text.chars().any(char::is_control) {
            return Err(DecodeError::Invalid(what));
        }
        Ok(text.to_owned())
    }
}

/// A message that grows.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn done(self) -> Vec<u8> {
        self.0
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(crate) fn flag(&mut self, value: bool) {
        self.u8(u8::from(value));
    }

    pub(crate) fn address(&mut self, address: IpAddr) {
        self.optional_address(Some(address));
    }

    pub(crate) fn optional_address(&mut self, address: Option<IpAddr>) {
        match address {
            None => self.u8(0),
            Some(IpAddr::V4(v4)) => {
                self.u8(4);
                self.0.extend(v4.octets());
            }
            Some(IpAddr::V6(v6)) => {
                self.u8(6);
                self.0.extend(v6.octets());
            }
        }
    }

    pub(crate) fn mac(&mut self, mac: Mac) {
        self.0.extend(mac.0);
    }

    pub(crate) fn optional_mac(&mut self, mac: Option<Mac>) {
        self.flag(mac.is_some());
        if let Some(mac) = mac {
            self.mac(mac);
        }
    }

    /// The part of `text` that fits `most` bytes, without its control characters.
    pub(crate) fn text(&mut self, text: &str, most: usize) {
        let mut text: String = text.chars().filter(|c| !c.is_control()).collect();
        while text.len() > most {
            text.pop();
        }
        self.u16(text.len() as u16);
        self.0.extend(text.as_bytes());
    }
}
