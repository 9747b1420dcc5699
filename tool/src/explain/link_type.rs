//! Link types: the form of a packet's first bytes, and the names of the forms that are not explained.

/// The form of a packet's first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkType {
    /// An Ethernet header.
    Ethernet,
    /// An IPv4 or IPv6 header.
    Ip,
    /// Four bytes with an address family, then IP: loopback interfaces of BSD and macOS, and Windows' Npcap.
    Loopback,
    /// The header of Linux' cooked captures, version 1 (`tcpdump -i any` of old versions).
    Cooked,
    /// Version 2 of that header.
    CookedTwo,
    /// A form that is not explained.
    Other(u32),
}

impl LinkType {
    /// The form with this number in a capture.
    pub fn from_number(number: u32) -> Self {
        match number {
            0 | 108 => Self::Loopback,
            1 => Self::Ethernet,
            12 | 14 | 101 | 228 | 229 => Self::Ip,
            113 => Self::Cooked,
            276 => Self::CookedTwo,
            other => Self::Other(other),
        }
    }

    /// Bytes before the IP header of a form without an EtherType.
    pub const fn bytes_before_ip(self) -> usize {
        match self {
            Self::Loopback => 4,
            Self::Cooked => 16,
            Self::CookedTwo => 20,
            Self::Ethernet | Self::Ip | Self::Other(_) => 0,
        }
    }

    /// The name of a form that is not explained.
    pub fn unexplained(self) -> Option<String> {
        let Self::Other(number) = self else { return None };
        let name = OTHERS.iter().find(|(known, _)| *known == number).map(|(_, name)| name);
        Some(name.map_or_else(
            || format!("link type {number} (not explained)"),
            |name| format!("{name}, link type {number} (not explained)"),
        ))
    }
}

/// Names of the link types that people meet, by the list of the Tcpdump Group.
const OTHERS: [(u32, &str); 22] = [
    (6, "Token Ring"),
    (9, "PPP"),
    (10, "FDDI"),
    (50, "PPP in HDLC framing"),
    (51, "PPPoE"),
    (105, "IEEE 802.11"),
    (107, "Frame Relay"),
    (119, "IEEE 802.11 with a Prism header"),
    (127, "IEEE 802.11 with a radiotap header"),
    (138, "IP over FireWire"),
    (147, "first user-defined type"),
    (187, "Bluetooth HCI"),
    (189, "USB with Linux' short header"),
    (192, "Per-Packet Information"),
    (195, "IEEE 802.15.4"),
    (197, "Endace ERF"),
    (220, "USB with Linux' long header"),
    (239, "netfilter log"),
    (247, "InfiniBand"),
    (249, "USB of USBPcap"),
    (252, "payload exported by Wireshark"),
    (253, "netlink"),
];
