//! Headers of transmitted segments. The part that is the same for all frames of a connection is built once
//! ([`Headers`]); the rest is filled in for each frame.

use std::{net::IpAddr, num::NonZeroU16};

use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, SingleVlanHeader, VlanId,
    VlanPcp,
};

use super::{
    Ecn, Flags, Flow, Options, Path, Segment, Timestamps,
    checksum::Sum,
    ip::{PROTOCOL_TCP, pseudo_header},
    options::{MAX_OPTION_BYTES, TIMESTAMPS_BYTES},
};
use crate::{
    link::{FrameWriter, Link},
    seq::SeqNum,
};

/// Bytes of the longest header: Ethernet, two tags, IPv6, TCP with all its options.
pub const MAX_HEADER_BYTES: usize = 14 + 8 + 40 + TCP_HEADER + MAX_OPTION_BYTES;

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// Bytes of an IPv4 header without options, and of an IPv6 header.
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

/// Bytes of Ethernet without tags, and with IP: the prefixes of most connections.
const ETHERNET_HEADER: usize = 14;
const UNTAGGED_V4: usize = ETHERNET_HEADER + IPV4_HEADER;
const UNTAGGED_V6: usize = ETHERNET_HEADER + IPV6_HEADER;

/// Bytes of the longest prefix: Ethernet, two tags and IPv6.
const MAX_PREFIX_BYTES: usize = 14 + 8 + 40;

/// Default TTL or hop limit of a packet, the recommendation of RFC 1700.
pub const HOP_LIMIT: u8 = 64;

/// The header fields that differ from frame to frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fields {
    /// Sequence number.
    pub seq: SeqNum,
    /// Acknowledgment number.
    pub ack: SeqNum,
    /// Control bits.
    pub flags: Flags,
    /// The window field.
    pub window: u16,
    /// Options; at most [`MAX_OPTION_BYTES`] when emitted.
    pub options: Options,
    /// ECN field of the IP header.
    pub ecn: Ecn,
}

/// The [`Fields`] of a segment that has no option but timestamps.
#[derive(Debug, Clone, Copy)]
struct CoreFields {
    pub seq: SeqNum,
    pub ack: SeqNum,
    pub flags: Flags,
    pub window: u16,
    pub timestamps: Timestamps,
    pub ecn: Ecn,
}

/// The headers of one connection's frames, except for [`Fields`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Headers {
    /// Ethernet, tags and IP.
    prefix: [u8; MAX_PREFIX_BYTES],
    prefix_len: usize,
    ip: usize,
    v6: bool,
    ports: [u8; 4],
    /// Sum over the IP header in `prefix`, whose length, ECN and checksum fields are 0.
    ip_sum: Sum,
    /// Sum over the pseudo-header without its length.
    pseudo: Sum,
}

impl Headers {
    /// The headers of frames on `path`.
    pub fn new(path: &Path) -> Self {
        let flow = path.flow;
        let mut headers = Self {
            prefix: [0; MAX_PREFIX_BYTES],
            prefix_len: 0,
            ip: 0,
            v6: flow.local.is_ipv6(),
            ports: [0; 4],
            ip_sum: Sum::default(),
            pseudo: pseudo_header(flow.local.ip(), flow.remote.ip(), PROTOCOL_TCP, 0),
        };
        let (local, remote) = (flow.local.port().to_be_bytes(), flow.remote.port().to_be_bytes());
        headers.ports = [local[0], local[1], remote[0], remote[1]];
        headers.push_ethernet(path);
        headers.ip = headers.prefix_len;
        headers.push_ip(&flow);
        headers.ip_sum = Sum::of(headers.prefix.get(headers.ip..headers.prefix_len).unwrap_or_default());
        headers
    }

    /// Sets the Differentiated Services codepoint (the lower six bits of `dscp`) and the TTL or hop limit.
    #[must_use]
    pub fn with_service(mut self, dscp: u8, hop_limit: u8) -> Self {
        let (dscp, v6) = (dscp & 0x3f, self.v6);
        if let Some(ip) = self.prefix.get_mut(self.ip..self.prefix_len) {
            let (traffic_class, hops) =
                if v6 { ([0x60 | dscp >> 2, dscp << 6], 7) } else { ([0x45, dscp << 2], 8) };
            if let Some(to) = ip.first_chunk_mut::<2>() {
                *to = traffic_class;
            }
            if let Some(to) = ip.get_mut(hops) {
                *to = hop_limit;
            }
            self.ip_sum = Sum::of(ip);
        }
        self
    }

    fn push(&mut self, bytes: &[u8]) {
        if let Some(to) = self.prefix.get_mut(self.prefix_len..self.prefix_len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.prefix_len += bytes.len();
        }
    }

    fn push_ethernet(&mut self, path: &Path) {
        let ip = if self.v6 { EtherType::IPV6 } else { EtherType::IPV4 };
        let tags: Vec<(u16, u16)> = path.vlan.0.iter().copied().flatten().collect();
        let ethertype = tags.first().map_or(ip, |t| EtherType(t.0));
        let ethernet = Ethernet2Header {
            source: path.source_mac.0,
            destination: path.next_hop_mac.0,
            ether_type: ethertype,
        };
        self.push(&ethernet.to_bytes());
        let next = tags.iter().skip(1).map(|t| EtherType(t.0)).chain([ip]);
        for ((_, tci), ether_type) in tags.iter().zip(next) {
            let tag = SingleVlanHeader {
                pcp: VlanPcp::try_new((tci >> 13) as u8).unwrap_or_default(),
                drop_eligible_indicator: tci & 0x1000 != 0,
                vlan_id: VlanId::try_new(tci & 0x0fff).unwrap_or_default(),
                ether_type,
            };
            self.push(&tag.to_bytes());
        }
    }

    /// Appends the IP header. DF is always set, because segments are sized by the path MTU (RFC 1191). The
    /// identification of such a datagram has no meaning (RFC 6864 section 4) and is 0.
    fn push_ip(&mut self, flow: &Flow) {
        match (flow.local.ip(), flow.remote.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut ip = Ipv4Header {
                    protocol: IpNumber::TCP,
                    time_to_live: HOP_LIMIT,
                    dont_fragment: true,
                    source: source.octets(),
                    destination: destination.octets(),
                    ..Ipv4Header::default()
                };
                ip.total_len = 0;
                ip.header_checksum = 0;
                self.push(&ip.to_bytes());
            }
            (source, destination) => {
                let octets = |ip| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    IpAddr::V6(ip) => ip.octets(),
                };
                let ip = Ipv6Header {
                    traffic_class: 0,
                    flow_label: Ipv6FlowLabel::default(),
                    payload_length: 0,
                    next_header: IpNumber::TCP,
                    hop_limit: HOP_LIMIT,
                    source: octets(source),
                    destination: octets(destination),
                };
                self.push(&ip.to_bytes());
            }
        }
    }

    /// Length in bytes of all headers of a frame with `options`.
    pub const fn len(&self, options: &Options) -> usize {
        self.prefix_len + TCP_HEADER + options.wire_len()
    }

    /// Whether the headers are empty, which never happens.
    pub const fn is_empty(&self) -> bool {
        self.prefix_len == 0
    }

    /// Where the TCP header begins, if `link` offloads checksums: for [`leave_checksum`](crate::link::TxFrame::leave_checksum).
    pub fn left_checksum(&self, link: &dyn Link) -> Option<NonZeroU16> {
        if link.offloads_checksums() { NonZeroU16::new(self.prefix_len as u16) } else { None }
    }

    /// Writes the headers of a frame whose payload has `payload_len` bytes and the checksum sum `payload`; with `None`, the checksum
    /// field gets the sum of the pseudo-header only, and the [link](Link::offloads_checksums) must do the rest. Returns their length,
    /// or `None` when `out` is too short or the options too long.
    #[expect(clippy::inline_always, reason = "its callers know most fields, which then cost nothing")]
    #[inline(always)]
    pub fn emit(
        &self,
        out: &mut [u8],
        fields: &Fields,
        payload_len: usize,
        payload: impl Into<Option<Sum>>,
    ) -> Option<usize> {
        let payload = payload.into();
        if let Some(timestamps) = fields.options.only_timestamps()
            && self.is_untagged()
        {
            let &Fields { seq, ack, flags, window, ecn, .. } = fields;
            let fields = CoreFields { seq, ack, flags, window, timestamps, ecn };
            return self.emit_core(out, &fields, payload_len, payload);
        }
        // A copy, so that the compiler keeps the core fields in registers.
        let fields = *fields;
        self.emit_any(out, &fields, payload_len, payload)
    }

    /// Whether [`Self::emit_core`] can write the headers: there are no tags.
    #[inline]
    fn is_untagged(&self) -> bool {
        self.ip == ETHERNET_HEADER
    }

    /// Writes headers of the form that nearly all segments have: no tags, and no option but timestamps. All positions are known,
    /// and the fields are added in registers instead of being read again.
    #[expect(clippy::inline_always, reason = "see `emit`")]
    #[inline(always)]
    fn emit_core(
        &self,
        out: &mut [u8],
        fields: &CoreFields,
        payload_len: usize,
        payload: Option<Sum>,
    ) -> Option<usize> {
        let tcp_len = TCP_HEADER + TIMESTAMPS_BYTES;
        let (prefix, tcp) = out.split_at_mut_checked(self.prefix_len)?;
        if self.v6 {
            *prefix.first_chunk_mut::<UNTAGGED_V6>()? = *self.prefix.first_chunk()?;
        } else {
            *prefix.first_chunk_mut::<UNTAGGED_V4>()? = *self.prefix.first_chunk()?;
        }
        self.finish_ip(prefix, fields.ecn, tcp_len + payload_len);
        let &CoreFields { seq, ack, flags, window, timestamps, .. } = fields;
        let head = tcp_header(self.ports, seq, ack, TIMESTAMPS_BYTES, flags, window);
        let options = timestamps.to_bytes();
        let pseudo = self.pseudo.and_word((tcp_len + payload_len) as u16);
        let rest_sum = payload.map(|payload| Sum::of_array(&options).and(payload));
        let (to, rest) = tcp.split_first_chunk_mut()?;
        *to = with_checksum(head, pseudo, rest_sum);
        *rest.first_chunk_mut()? = options;
        Some(self.prefix_len + tcp_len)
    }

    /// Writes headers of any form.
    #[inline(never)]
    fn emit_any(
        &self,
        out: &mut [u8],
        fields: &Fields,
        payload_len: usize,
        payload: Option<Sum>,
    ) -> Option<usize> {
        let options = fields.options.wire_len();
        if options > MAX_OPTION_BYTES {
            return None;
        }
        let tcp_len = TCP_HEADER + options;
        let out = out.get_mut(..self.prefix_len + tcp_len)?;
        let (prefix, tcp) = out.split_at_mut_checked(self.prefix_len)?;
        prefix.copy_from_slice(self.prefix.get(..self.prefix_len)?);
        self.finish_ip(prefix, fields.ecn, tcp_len + payload_len);
        let (head, rest) = tcp.split_first_chunk_mut::<TCP_HEADER>()?;
        fields.options.emit(rest)?;
        let pseudo = self.pseudo.and_word((tcp_len + payload_len) as u16);
        let rest_sum = payload.map(|payload| Sum::of(rest).and(payload));
        let &Fields { seq, ack, flags, window, .. } = fields;
        let header = tcp_header(self.ports, seq, ack, options, flags, window);
        *head = with_checksum(header, pseudo, rest_sum);
        Some(self.prefix_len + tcp_len)
    }

    /// Completes the IP header at the end of `prefix` for `payload` bytes.
    #[expect(clippy::inline_always, reason = "see `emit`")]
    #[inline(always)]
    fn finish_ip(&self, prefix: &mut [u8], ecn: Ecn, payload: usize) {
        let bits = ecn_bits(ecn);
        if self.v6 {
            let Some(ip) = prefix.last_chunk_mut::<IPV6_HEADER>() else { return };
            ip[1] |= bits << 4;
            [ip[4], ip[5]] = (payload as u16).to_be_bytes();
        } else {
            let Some(ip) = prefix.last_chunk_mut::<IPV4_HEADER>() else { return };
            let total = (IPV4_HEADER + payload) as u16;
            ip[1] |= bits;
            [ip[2], ip[3]] = total.to_be_bytes();
            [ip[10], ip[11]] = self.ip_sum.and_word(bits.into()).and_word(total).checksum().to_be_bytes();
        }
    }
}

/// The bits of the IP header's ECN field.
#[inline]
const fn ecn_bits(ecn: Ecn) -> u8 {
    match ecn {
        Ecn::NotEct => 0,
        Ecn::Ect1 => 1,
        Ecn::Ect0 => 2,
        Ecn::Ce => 3,
    }
}

/// A TCP header without options and with checksum 0 (RFC 9293 section 3.1).
#[expect(clippy::inline_always, reason = "see `Headers::emit`")]
#[inline(always)]
fn tcp_header(
    ports: [u8; 4],
    seq: SeqNum,
    ack: SeqNum,
    options: usize,
    flags: Flags,
    window: u16,
) -> [u8; TCP_HEADER] {
    let [s0, s1, d0, d1] = ports;
    let [q0, q1, q2, q3] = seq.value().to_be_bytes();
    let [a0, a1, a2, a3] = ack.value().to_be_bytes();
    let [w0, w1] = window.to_be_bytes();
    let words = ((TCP_HEADER + options) / 4) as u8;
    [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, words << 4, flags.to_byte(), w0, w1, 0, 0, 0, 0]
}

/// The header with the checksum over the pseudo-header, itself and the `rest` of the segment, or without `rest` with the sum of the
/// pseudo-header.
#[expect(clippy::inline_always, reason = "see `Headers::emit`")]
#[inline(always)]
fn with_checksum(mut header: [u8; TCP_HEADER], pseudo: Sum, rest: Option<Sum>) -> [u8; TCP_HEADER] {
    let checksum = match rest {
        Some(rest) => pseudo.and(Sum::of_array(&header)).and(rest).checksum(),
        None => pseudo.fold(),
    };
    [header[16], header[17]] = checksum.to_be_bytes();
    header
}

/// Answers a segment without a connection with the RST of RFC 9293 section 3.10.7.1; a RST is never answered. Returns
/// false when no frame or ring slot was free. The packet carries `dscp` and `hop_limit` (RFC 9293 sections 3.9.1.9
/// and 3.9.2).
pub fn send_reset(link: &mut dyn Link, segment: &Segment, dscp: u8, hop_limit: u8) -> bool {
    if segment.flags.rst {
        return true;
    }
    let path = Path {
        flow: segment.flow,
        source_mac: segment.destination_mac,
        next_hop: None,
        next_hop_mac: segment.source_mac,
        vlan: segment.vlan,
        mtu: u16::MAX,
        queue: segment.queue,
    };
    let octets = segment.payload_len as u32 + u32::from(segment.flags.syn) + u32::from(segment.flags.fin);
    // RFC 7323 section 5.2: the echo lets the peer distinguish an answer from a forgery.
    let timestamps = segment.options.timestamps.map(|t| Timestamps { value: 0, echo: t.value });
    let fields = Fields { options: Options { timestamps, ..Options::default() }, ..Fields::default() };
    let fields = if segment.flags.ack {
        Fields { seq: segment.ack, flags: Flags { rst: true, ..Flags::default() }, ..fields }
    } else {
        let flags = Flags { rst: true, ack: true, ..Flags::default() };
        Fields { ack: segment.seq.add(octets), flags, ..fields }
    };
    send_bare(link, &Headers::new(&path).with_service(dscp, hop_limit), &path, &fields)
}

/// Sends a segment without payload. Returns false when no frame or ring slot was free.
pub fn send_bare(link: &mut dyn Link, headers: &Headers, path: &Path, fields: &Fields) -> bool {
    let len = headers.len(&fields.options);
    let Some(mut frame) = link.alloc(len) else { return false };
    let mut writer = FrameWriter::closed();
    let left_checksum = headers.left_checksum(link);
    frame.leave_checksum(left_checksum);
    let sum = left_checksum.is_none().then(Sum::default);
    let opened = writer.open(link, &mut frame, 0, len);
    let written = opened.then(|| headers.emit(writer.front(len), fields, 0, sum)).flatten();
    drop(writer);
    let sent = written.is_some_and(|len| link.submit(path.queue, &mut frame, len).is_ok());
    link.release(frame);
    sent
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::{
        link::QueueId,
        wire::{Mac, VlanTags},
    };

    proptest! {
        #[test]
        fn prop_the_core_form_has_the_bytes_of_the_general_one(
            v6: bool,
            local: ([u8; 16], u16),
            remote: ([u8; 16], u16),
            (seq, ack) in any::<(u32, u32)>(),
            (value, echo) in any::<(u32, u32)>(),
            (control, window) in any::<(u8, u16)>(),
            ecn in prop::sample::select(&[Ecn::NotEct, Ecn::Ect0, Ecn::Ect1, Ecn::Ce][..]),
            (dscp, hop_limit) in any::<(u8, u8)>(),
            payload in prop::collection::vec(any::<u8>(), 0..3000),
            partial: bool,
        ) {
            let address = |(ip @ [a, b, c, d, ..], port): ([u8; 16], u16)| {
                SocketAddr::new(if v6 { ip.into() } else { [a, b, c, d].into() }, port)
            };
            let path = Path {
                flow: Flow { local: address(local), remote: address(remote) },
                source_mac: Mac([1; 6]),
                next_hop: None,
                next_hop_mac: Mac([2; 6]),
                vlan: VlanTags::default(),
                mtu: 9000,
                queue: QueueId(0),
            };
            let headers = Headers::new(&path).with_service(dscp, hop_limit);
            let fields = Fields {
                seq: SeqNum::new(seq),
                ack: SeqNum::new(ack),
                flags: Flags::from_byte(control),
                window,
                options: Options { timestamps: Some(Timestamps { value, echo }), ..Options::default() },
                ecn,
            };
            prop_assert!(fields.options.only_timestamps().is_some() && headers.ip == ETHERNET_HEADER);
            let len = headers.prefix_len + TCP_HEADER + TIMESTAMPS_BYTES;
            let (mut core, mut general) = ([0xee; 100], [0xee; 100]);
            let sum = (!partial).then(|| Sum::of(&payload));
            prop_assert_eq!(headers.emit(&mut core, &fields, payload.len(), sum), Some(len));
            prop_assert_eq!(headers.emit_any(&mut general, &fields, payload.len(), sum), Some(len));
            prop_assert_eq!(&core[..], &general[..]);
        }
    }
}
