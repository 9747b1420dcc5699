//! [`Name`]: the names of the descriptors that survive this process. Together they are the table of the next helper: see
//! `docs/decisions/0026-a-restart-ends-nothing.md`.
//!
//! A name is the format, a letter for the kind, and numbers with points between them: `1p7.42` is the port that request 42 of the
//! device with slot 7 has reserved. Names are short because they are passed in one variable of the environment.

use std::fmt;
use std::str::FromStr;

use xwarp_control::Sizes;

use crate::slots::MAX_SLOTS;

/// The format of the names: the first character of each.
const FORMAT: char = '1';

/// Largest number of VLAN tags.
const MAX_VLANS: usize = 2;

/// What a descriptor is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    /// The listening socket, with device and inode of its file.
    Listener { device: u64, inode: u64 },
    /// The network namespace of the near ends.
    Home,
    /// The link of the program on an interface, by its index.
    Uplink { interface: u32, multi_buffer: bool, vlans: Vec<u16> },
    /// The connection of a client with a device on an interface.
    Client { slot: u32, interface: u32, protocol: u16, receive: u32, transmit: u32, ring: u32 },
    /// The client's process.
    Process { slot: u32 },
    /// The socket of its events.
    Events { slot: u32 },
    /// Its AF_XDP socket.
    Socket { slot: u32 },
    /// The link at the near end of its pair.
    Near { slot: u32 },
    /// The link at the far end.
    Far { slot: u32 },
    /// The network namespace of its socket, by which the device is charged to its user until nothing is left of it.
    Space { slot: u32, uid: u32, memory_bytes: u64 },
    /// A port, with the number of the request that reserved it.
    Port { slot: u32, request: u32 },
}

/// Why a name is not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    /// It was not given by xwarpd.
    #[error("no descriptor of xwarpd")]
    Foreign,
    /// Another version of xwarpd gave it.
    #[error("of another version of xwarpd")]
    Unknown,
}

impl Name {
    /// The connection of a client.
    pub(crate) fn client(slot: u32, interface: u32, sizes: Sizes) -> Self {
        let Sizes { receive_chunks: receive, transmit_chunks: transmit, ring } = sizes;
        Self::Client { slot, interface, protocol: xwarp_control::VERSION, receive, transmit, ring }
    }

    fn letter(&self) -> char {
        match self {
            Self::Listener { .. } => 'l',
            Self::Home => 'h',
            Self::Uplink { .. } => 'u',
            Self::Client { .. } => 'c',
            Self::Process { .. } => 'i',
            Self::Events { .. } => 'e',
            Self::Socket { .. } => 's',
            Self::Near { .. } => 'n',
            Self::Far { .. } => 'f',
            Self::Space { .. } => 'm',
            Self::Port { .. } => 'p',
        }
    }

    fn numbers(&self) -> Vec<u64> {
        match self {
            Self::Listener { device, inode } => vec![*device, *inode],
            Self::Home => Vec::new(),
            Self::Uplink { interface, multi_buffer, vlans } => {
                let mut numbers = vec![u64::from(*interface), u64::from(*multi_buffer)];
                numbers.extend(vlans.iter().map(|vlan| u64::from(*vlan)));
                numbers
            }
            Self::Client { slot, interface, protocol, receive, transmit, ring } => {
                [*slot, *interface, u32::from(*protocol), *receive, *transmit, *ring].map(u64::from).to_vec()
            }
            Self::Process { slot }
            | Self::Events { slot }
            | Self::Socket { slot }
            | Self::Near { slot }
            | Self::Far { slot } => vec![u64::from(*slot)],
            Self::Space { slot, uid, memory_bytes } => {
                vec![u64::from(*slot), u64::from(*uid), *memory_bytes]
            }
            Self::Port { slot, request } => vec![u64::from(*slot), u64::from(*request)],
        }
    }

    fn of(letter: char, numbers: &[u64]) -> Option<Self> {
        let narrow = |number: &u64| u32::try_from(*number).ok();
        let slot_of = |number: &u64| narrow(number).filter(|slot| (1..=MAX_SLOTS).contains(slot));
        Some(match (letter, numbers) {
            ('l', [device, inode]) => Self::Listener { device: *device, inode: *inode },
            ('h', []) => Self::Home,
            ('u', [interface, multi_buffer @ 0..=1, vlans @ ..]) if vlans.len() <= MAX_VLANS => {
                let vlans = vlans.iter().map(|vlan| u16::try_from(*vlan).ok());
                Self::Uplink {
                    interface: narrow(interface)?,
                    multi_buffer: *multi_buffer == 1,
                    vlans: vlans.collect::<Option<_>>()?,
                }
            }
            ('c', [slot, interface, protocol, receive, transmit, ring]) => Self::Client {
                slot: slot_of(slot)?,
                interface: narrow(interface)?,
                protocol: u16::try_from(*protocol).ok()?,
                receive: narrow(receive)?,
                transmit: narrow(transmit)?,
                ring: narrow(ring)?,
            },
            ('i', [slot]) => Self::Process { slot: slot_of(slot)? },
            ('e', [slot]) => Self::Events { slot: slot_of(slot)? },
            ('s', [slot]) => Self::Socket { slot: slot_of(slot)? },
            ('n', [slot]) => Self::Near { slot: slot_of(slot)? },
            ('f', [slot]) => Self::Far { slot: slot_of(slot)? },
            ('m', [slot, uid, memory_bytes]) => {
                Self::Space { slot: slot_of(slot)?, uid: narrow(uid)?, memory_bytes: *memory_bytes }
            }
            ('p', [slot, request]) => Self::Port { slot: slot_of(slot)?, request: narrow(request)? },
            _ => return None,
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORMAT}{}", self.letter())?;
        for (at, number) in self.numbers().into_iter().enumerate() {
            let point = if at == 0 { "" } else { "." };
            write!(f, "{point}{number}")?;
        }
        Ok(())
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // Names of other origin are those of units of systemd, which begin with letters.
        let mut characters = text.chars();
        let format = characters.next().filter(char::is_ascii_digit).ok_or(NameError::Foreign)?;
        let letter = characters.next().ok_or(NameError::Unknown)?;
        let rest = characters.as_str();
        let numbers: Vec<u64> = if rest.is_empty() {
            Vec::new()
        } else {
            let numbers = rest.split('.').map(|number| number.parse().ok());
            numbers.collect::<Option<_>>().ok_or(NameError::Unknown)?
        };
        let name = Self::of(letter, &numbers).filter(|_| format == FORMAT).ok_or(NameError::Unknown)?;
        // Each name has one spelling.
        if name.to_string() == text { Ok(name) } else { Err(NameError::Unknown) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name() -> impl Strategy<Value = Name> {
        let slot = 1..=MAX_SLOTS;
        prop_oneof![
            any::<(u64, u64)>().prop_map(|(device, inode)| Name::Listener { device, inode }),
            Just(Name::Home),
            (any::<u32>(), any::<bool>(), proptest::collection::vec(any::<u16>(), 0..=MAX_VLANS))
                .prop_map(|(interface, multi_buffer, vlans)| Name::Uplink { interface, multi_buffer, vlans }),
            (slot.clone(), any::<u32>(), any::<u16>(), any::<[u32; 3]>()).prop_map(
                |(slot, interface, protocol, [receive, transmit, ring])| Name::Client {
                    slot,
                    interface,
                    protocol,
                    receive,
                    transmit,
                    ring
                }
            ),
            slot.clone().prop_map(|slot| Name::Process { slot }),
            slot.clone().prop_map(|slot| Name::Events { slot }),
            slot.clone().prop_map(|slot| Name::Socket { slot }),
            slot.clone().prop_map(|slot| Name::Near { slot }),
            slot.clone().prop_map(|slot| Name::Far { slot }),
            (slot.clone(), any::<u32>(), any::<u64>()).prop_map(|(slot, uid, memory_bytes)| Name::Space {
                slot,
                uid,
                memory_bytes
            }),
            (slot, any::<u32>()).prop_map(|(slot, request)| Name::Port { slot, request }),
        ]
    }

    proptest! {
        /// Systemd's rule: at most 255 characters of ASCII, no control characters, no colon.
        #[test]
        fn prop_names_are_read_as_they_were_written(name in name()) {
            let text = name.to_string();
            prop_assert_eq!(text.parse::<Name>(), Ok(name));
            prop_assert!(text.len() <= 255 && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':'));
        }

        #[test]
        fn prop_whatever_is_read_has_one_spelling(text in "[0-2]?[a-z]?[0-9.+ -]{0,12}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[test]
    fn names_of_other_versions_are_told_from_foreign_ones() {
        for unknown in
            ["2h", "1z", "1", "1p7", "1p7.1.2", "1p0.1", "1p4096.1", "1h0", "1e07", "1u3.2", "1p7.", "1p+7.1"]
        {
            assert_eq!(unknown.parse::<Name>(), Err(NameError::Unknown), "{unknown}");
        }
        for foreign in ["", "xwarpd.socket", "connection", "h", ":"] {
            assert_eq!(foreign.parse::<Name>(), Err(NameError::Foreign), "{foreign}");
        }
        assert_eq!("1p7.42".parse(), Ok(Name::Port { slot: 7, request: 42 }));
    }
}
