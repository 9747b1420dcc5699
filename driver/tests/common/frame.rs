//! Frames for the tests, built by etherparse.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Extensions, Ipv4Header, Ipv4Options, Ipv6Extensions,
    Ipv6Header, NetHeaders, SingleVlanHeader, TcpHeader, VlanId,
};
use xwarp_tcp::wire::Mac;

/// A frame to be: addresses, tags, and a TCP segment or other payload.
#[derive(Clone)]
pub struct Frame {
    pub from: Mac,
    pub to: Mac,
    /// (`EtherType`, id), outermost first.
    pub tags: Vec<(u16, u16)>,
    pub ip_options: Vec<u8>,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub syn: bool,
    pub ack: bool,
    pub payload: Vec<u8>,
}

impl Frame {
    pub fn tcp(from: Mac, to: Mac, source: SocketAddr, destination: SocketAddr) -> Self {
        let (tags, ip_options, payload) = (Vec::new(), Vec::new(), Vec::new());
        Self { from, to, tags, ip_options, source, destination, syn: false, ack: true, payload }
    }

    pub fn syn(mut self) -> Self {
        (self.syn, self.ack) = (true, false);
        self
    }

    pub fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    pub fn tags(mut self, tags: &[(u16, u16)]) -> Self {
        self.tags = tags.to_vec();
        self
    }

    /// The IP packet with its TCP segment.
    pub fn packet(&self) -> Vec<u8> {
        let mut tcp = TcpHeader::new(self.source.port(), self.destination.port(), 1000, 8192);
        (tcp.syn, tcp.ack) = (self.syn, self.ack);
        let bytes = tcp.header_len() + self.payload.len();
        let mut net = match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(s), IpAddr::V4(d)) => {
                let mut ip =
                    Ipv4Header::new(bytes as u16, 64, IpNumber::TCP, s.octets(), d.octets()).unwrap();
                ip.options = Ipv4Options::try_from(self.ip_options.as_slice()).unwrap();
                ip.set_payload_len(bytes).unwrap();
                NetHeaders::Ipv4(ip, Ipv4Extensions::default())
            }
            (IpAddr::V6(s), IpAddr::V6(d)) => {
                let ip = Ipv6Header {
                    payload_length: bytes as u16,
                    next_header: IpNumber::TCP,
                    hop_limit: 64,
                    source: s.octets(),
                    destination: d.octets(),
                    ..Default::default()
                };
                NetHeaders::Ipv6(ip, Ipv6Extensions::default())
            }
            _ => panic!("addresses of two families"),
        };
        let mut out = Vec::new();
        match &mut net {
            NetHeaders::Ipv4(ip, _) => {
                ip.header_checksum = ip.calc_header_checksum();
                tcp.checksum = tcp.calc_checksum_ipv4(ip, &self.payload).unwrap();
                ip.write_raw(&mut out).unwrap();
            }
            NetHeaders::Ipv6(ip, _) => {
                tcp.checksum = tcp.calc_checksum_ipv6(ip, &self.payload).unwrap();
                ip.write(&mut out).unwrap();
            }
            NetHeaders::Arp(_) => {}
        }
        tcp.write(&mut out).unwrap();
        out.extend_from_slice(&self.payload);
        out
    }

    pub fn build(&self) -> Vec<u8> {
        let proto = if self.source.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
        ethernet(self.from, self.to, &self.tags, proto, &self.packet())
    }

    /// The frame with only the sum of the pseudo-header in its checksum field, and where its TCP header begins.
    pub fn partial(&self) -> (Vec<u8>, usize) {
        let mut bytes = self.build();
        let start = bytes.len() - self.payload.len() - TcpHeader::MIN_LEN;
        let address = |of: SocketAddr| match of.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let len = (bytes.len() - start) as u16;
        let mut pseudo = [address(self.source), address(self.destination), vec![0, 6]].concat();
        pseudo.extend(len.to_be_bytes());
        let sum = !internet_checksum(&pseudo);
        bytes[start + 16..start + 18].copy_from_slice(&sum.to_be_bytes());
        (bytes, start)
    }
}

/// A frame around `packet`.
pub fn ethernet(from: Mac, to: Mac, tags: &[(u16, u16)], proto: EtherType, packet: &[u8]) -> Vec<u8> {
    let mut types: Vec<EtherType> = tags.iter().map(|(tpid, _)| EtherType(*tpid)).collect();
    types.push(proto);
    let mut out =
        Ethernet2Header { source: from.0, destination: to.0, ether_type: types[0] }.to_bytes().to_vec();
    for ((_, id), next) in tags.iter().zip(&types[1..]) {
        let tag = SingleVlanHeader {
            vlan_id: VlanId::try_new(*id).unwrap(),
            ether_type: *next,
            ..Default::default()
        };
        out.extend_from_slice(&tag.to_bytes());
    }
    out.extend_from_slice(packet);
    out
}

/// An ICMP or ICMPv6 error (`kind`, `code`) that quotes `quoted`, from `source` to `destination`.
pub fn icmp_error(source: IpAddr, destination: IpAddr, kind: u8, code: u8, quoted: &[u8]) -> Vec<u8> {
    let mut icmp = vec![kind, code, 0, 0, 0, 0, 0x05, 0];
    icmp.extend_from_slice(quoted);
    let mut out = Vec::new();
    match (source, destination) {
        (IpAddr::V4(s), IpAddr::V4(d)) => {
            let sum = internet_checksum(&icmp);
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            let mut ip =
                Ipv4Header::new(icmp.len() as u16, 64, IpNumber::ICMP, s.octets(), d.octets()).unwrap();
            ip.header_checksum = ip.calc_header_checksum();
            ip.write_raw(&mut out).unwrap();
        }
        (IpAddr::V6(s), IpAddr::V6(d)) => {
            let mut pseudo = [s.octets(), d.octets()].concat();
            pseudo.extend_from_slice(&(icmp.len() as u32).to_be_bytes());
            pseudo.extend_from_slice(&[0, 0, 0, 58]);
            pseudo.extend_from_slice(&icmp);
            let sum = internet_checksum(&pseudo);
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            let ip = Ipv6Header {
                payload_length: icmp.len() as u16,
                next_header: IpNumber::IPV6_ICMP,
                hop_limit: 64,
                source: s.octets(),
                destination: d.octets(),
                ..Default::default()
            };
            ip.write(&mut out).unwrap();
        }
        _ => panic!("addresses of two families"),
    }
    out.extend_from_slice(&icmp);
    out
}

/// RFC 1071.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
