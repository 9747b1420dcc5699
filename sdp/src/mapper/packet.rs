//! Messages of the port mapper (draft section 7.3, figure 17). In this figure bit 0 is the most significant one.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

/// The UDP port of the port mapper.
pub const PORT: u16 = 3935;
/// Length of a message, in bytes.
pub const PACKET_BYTES: usize = 48;

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `PMReq`: where is this service?
    Request,
    /// `PMAccept`: there.
    Accept,
    /// `PMAck`: acknowledges the answer.
    Acknowledge,
    /// `PMDeny`: not over SDP.
    Deny,
}

/// The encoded validity of an answer (draft section 7.3.1.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PmTime(pub u8);

impl PmTime {
    /// The time; `None`: without a limit. Zero is a single use.
    pub fn duration(self) -> Option<Duration> {
        match self.0 {
            quarters @ 0..=127 => Some(Duration::from_millis(250 * u64::from(quarters))),
            seconds @ 128..=254 => Some(Duration::from_secs(u64::from(seconds))),
            255 => None,
        }
    }
}

/// A message of the port mapper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// What it is.
    pub kind: Kind,
    /// Validity of an Accept.
    pub valid: PmTime,
    /// `ApPort`: in a request the port of the service, in an Accept that of its SDP listener.
    pub service_port: u16,
    /// `CpPort`: the TCP port from which the connecting end connects.
    pub connecting_port: u16,
    /// `AssocHandle`: a random number that the answer repeats.
    pub handle: u64,
    /// `CpIPAddr`.
    pub connecting_ip: IpAddr,
    /// `ApIPAddr`.
    pub service_ip: IpAddr,
}

/// Why bytes are no message of the port mapper. Such datagrams are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Less than [`PACKET_BYTES`]. Longer datagrams are taken, since that of `iwpmd` has 64 bytes.
    #[error("a message of the port mapper has 48 bytes")]
    Short,
    /// A version other than 0.
    #[error("unknown version of the port mapper")]
    Version,
    /// Neither 4 nor 6.
    #[error("unknown IP version")]
    IpVersion,
}

impl Packet {
    /// Reads a message.
    pub fn parse(bytes: &[u8]) -> Result<Self, PacketError> {
        let bytes: &[u8; PACKET_BYTES] = bytes.first_chunk().ok_or(PacketError::Short)?;
        let [first, valid, _, _, ap0, ap1, cp0, cp1, rest @ ..] = bytes;
        let (handle, rest) = rest.split_first_chunk::<8>().ok_or(PacketError::Short)?;
        let (connecting, rest) = rest.split_first_chunk::<16>().ok_or(PacketError::Short)?;
        let service = rest.first_chunk::<16>().ok_or(PacketError::Short)?;
        let kind = match first >> 4 {
            0 => Kind::Request,
            1 => Kind::Accept,
            2 => Kind::Acknowledge,
            3 => Kind::Deny,
            _ => return Err(PacketError::Version),
        };
        let ip: fn(&[u8; 16]) -> IpAddr = match first & 0xf {
            4 => |&[a, b, c, d, ..]| Ipv4Addr::new(a, b, c, d).into(),
            6 => |bytes| Ipv6Addr::from(*bytes).into(),
            _ => return Err(PacketError::IpVersion),
        };
        Ok(Self {
            kind,
            valid: PmTime(*valid),
            service_port: u16::from_be_bytes([*ap0, *ap1]),
            connecting_port: u16::from_be_bytes([*cp0, *cp1]),
            handle: u64::from_be_bytes(*handle),
            connecting_ip: ip(connecting),
            service_ip: ip(service),
        })
    }

    /// Its bytes. Both addresses are of the connecting end's IP version.
    pub fn emit(&self) -> [u8; PACKET_BYTES] {
        let kind = match self.kind {
            Kind::Request => 0,
            Kind::Accept => 1,
            Kind::Acknowledge => 2,
            Kind::Deny => 3,
        };
        let version = if self.connecting_ip.is_ipv4() { 4 } else { 6 };
        let mut bytes = Vec::with_capacity(PACKET_BYTES);
        bytes.extend([kind << 4 | version, self.valid.0, 0, 0]);
        bytes.extend(self.service_port.to_be_bytes());
        bytes.extend(self.connecting_port.to_be_bytes());
        bytes.extend(self.handle.to_be_bytes());
        for ip in [self.connecting_ip, self.service_ip] {
            match ip {
                IpAddr::V4(ip) => bytes.extend(ip.octets().into_iter().chain([0; 12])),
                IpAddr::V6(ip) => bytes.extend(ip.octets()),
            }
        }
        let mut whole = [0; PACKET_BYTES];
        whole.copy_from_slice(&bytes);
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Packet {
        Packet {
            kind: Kind::Request,
            valid: PmTime(0),
            service_port: 80,
            connecting_port: 40000,
            handle: 0x0102_0304_0506_0708,
            connecting_ip: [10, 0, 0, 1].into(),
            service_ip: [10, 0, 0, 2].into(),
        }
    }

    #[test]
    fn sdp_s7_3_golden_bytes() {
        let mut golden = vec![4, 0, 0, 0, 0, 80, 0x9c, 0x40, 1, 2, 3, 4, 5, 6, 7, 8];
        golden.extend([10, 0, 0, 1].into_iter().chain([0; 12]));
        golden.extend([10, 0, 0, 2].into_iter().chain([0; 12]));
        assert_eq!(request().emit().as_slice(), golden);
        let firsts = [Kind::Request, Kind::Accept, Kind::Acknowledge, Kind::Deny]
            .map(|kind| Packet { kind, ..request() }.emit()[0]);
        assert_eq!(firsts, [0x04, 0x14, 0x24, 0x34]);
        let six = Packet {
            kind: Kind::Accept,
            connecting_ip: "fd77::1".parse().unwrap(),
            service_ip: "fd77::2".parse().unwrap(),
            ..request()
        };
        assert_eq!(six.emit()[0], 0x16);
        assert_eq!(Packet::parse(&six.emit()), Ok(six));
    }

    #[test]
    fn sdp_s7_3_lengths_versions_and_rests() {
        let bytes = request().emit();
        assert_eq!(Packet::parse(&bytes), Ok(request()));
        for len in 0..PACKET_BYTES {
            assert_eq!(Packet::parse(&bytes[..len]), Err(PacketError::Short));
        }
        let longer = [bytes.as_slice(), &[7; 16]].concat();
        assert_eq!(Packet::parse(&longer), Ok(request()), "as iwpmd's");
        let mut other = bytes;
        // The rest of an IPv4 address, and the reserved bytes, are not checked.
        (other[2], other[20]) = (1, 9);
        assert_eq!(Packet::parse(&other), Ok(request()));
        other[0] = 0x44;
        assert_eq!(Packet::parse(&other), Err(PacketError::Version));
        other[0] = 0x05;
        assert_eq!(Packet::parse(&other), Err(PacketError::IpVersion));
    }

    #[test]
    fn sdp_s7_3_1_4_times() {
        let times = [0, 1, 127, 128, 254, 255].map(|n| PmTime(n).duration().map(|d| d.as_millis()));
        assert_eq!(times, [Some(0), Some(250), Some(31_750), Some(128_000), Some(254_000), None]);
    }
}
