//! Checks rules that every TCP on the wire must follow under any faults. Frames are checked when their link sends them,
//! before any fault, by code that shares nothing with our own parser. A violation panics.
//!
//! Flows whose SYN was not seen (frames that a test injects) are not checked.

use std::collections::{BTreeMap, VecDeque};

use etherparse::{NetSlice, SlicedPacket, TcpOptionElement, TcpSlice, TransportSlice};

/// Bytes of a stream that are kept for comparison: more than any window in use.
const REMEMBERED: usize = 8 << 20;

/// Addresses and ports, source first.
type FlowKey = (Vec<u8>, [u16; 2]);

/// The stream that one end of a connection has sent so far. Offsets count from the byte after the SYN.
#[derive(Debug, Default)]
struct AuditedEnd {
    iss: u32,
    /// The bytes of the stream from `base` on.
    stream: VecDeque<u8>,
    base: u64,
    fin: Option<u64>,
    /// Shift of the windows that this end advertises; it applies if the peer has one, too.
    shift: Option<u8>,
    /// Offset in the other stream up to which this end has acknowledged, and the highest right edge of its window.
    acked: u64,
    edge: Option<u64>,
}

impl AuditedEnd {
    fn highest(&self) -> u64 {
        self.base + self.stream.len() as u64
    }

    /// The offset of `seq`, which is near `highest`; negative for the SYN and numbers before it.
    fn offset(&self, seq: u32) -> i64 {
        let next = self.iss.wrapping_add(1).wrapping_add(self.highest() as u32);
        self.highest() as i64 + i64::from(seq.wrapping_sub(next) as i32)
    }

    /// Checks that the payload sent at `offset` equals the bytes sent there before and leaves no gap, and appends its
    /// new bytes.
    fn send(&mut self, offset: i64, payload: &[u8]) {
        let highest = self.highest();
        assert!(offset <= self.end() as i64, "sequence space skipped: {offset} after {}", self.end());
        if payload.is_empty() {
            return;
        }
        let fin = self.fin.map_or(i64::MAX, |fin| fin as i64);
        assert!((offset + payload.len() as i64) <= fin, "data after the FIN");
        let unknown = (self.base as i64 - offset).clamp(0, payload.len() as i64) as usize;
        let start = (offset.max(0) as u64).saturating_sub(self.base) as usize;
        let known = self.stream.iter().skip(start).zip(&payload[unknown..]);
        for (at, (before, now)) in known.enumerate() {
            let at = start as u64 + self.base + at as u64;
            assert_eq!(before, now, "byte {at} of a stream changed between transmissions");
        }
        let new = (offset + payload.len() as i64 - highest as i64).max(0) as usize;
        self.stream.extend(&payload[payload.len() - new.min(payload.len())..]);
        if self.stream.len() > REMEMBERED {
            self.stream.drain(..REMEMBERED / 2);
            self.base += REMEMBERED as u64 / 2;
        }
    }

    /// The highest offset that the peer may acknowledge, including a FIN.
    fn end(&self) -> u64 {
        self.highest() + u64::from(self.fin.is_some())
    }
}

/// Both ends of all flows.
#[derive(Debug, Default)]
pub(super) struct Audit {
    senders: BTreeMap<FlowKey, AuditedEnd>,
}

impl Audit {
    /// Checks a frame that a link sends.
    pub fn sent(&mut self, frame: &[u8]) {
        let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return };
        let (Some(net), Some(TransportSlice::Tcp(tcp))) = (&packet.net, &packet.transport) else { return };
        let (here, there) = flow(net, tcp);
        let what = || format!("{net:?} {:?}", tcp.to_header());
        check_sum(net, tcp).unwrap_or_else(|| panic!("bad checksum sent: {}", what()));
        if tcp.rst() {
            return;
        }
        if tcp.syn() {
            return self.syn(here, &there, tcp);
        }
        let Some(mut sender) = self.senders.remove(&here) else { return };
        let offset = sender.offset(tcp.sequence_number());
        sender.send(offset, tcp.payload());
        if tcp.fin() {
            let at = offset as u64 + tcp.payload().len() as u64;
            assert_eq!(*sender.fin.get_or_insert(at), at, "the FIN moved: {}", what());
        }
        if let Some(receiver) = self.senders.get(&there) {
            let last = offset + tcp.payload().len() as i64 + i64::from(tcp.fin());
            // A probe of a closed window may be one byte beyond (RFC 9293 section 3.8.6.1).
            let edge = receiver.edge.unwrap_or(0) as i64 + 1;
            assert!(last <= edge, "{last} is outside of the window, which ends at {edge}: {}", what());
            if tcp.ack() {
                sender.acknowledge(receiver, tcp, &what);
            }
        }
        self.senders.insert(here, sender);
    }

    fn syn(&mut self, here: FlowKey, there: &FlowKey, tcp: &TcpSlice<'_>) {
        let iss = tcp.sequence_number();
        if self.senders.get(&here).is_some_and(|s| s.iss == iss) {
            return;
        }
        // A new incarnation: the data that the peer sent to the old one no longer counts. An answer to a late duplicate
        // SYN begins no incarnation (RFC 9293 section 3.5, figure 9).
        let late = tcp.ack() && self.senders.get(there).is_some_and(|peer| peer.end() > 0);
        if late || !tcp.ack() {
            self.senders.remove(there);
        }
        if late {
            self.senders.remove(&here);
            return;
        }
        let shift = tcp.options_iterator().find_map(|o| match o {
            Ok(TcpOptionElement::WindowScale(shift)) => Some(shift.min(14)),
            _ => None,
        });
        let edge = Some(u64::from(tcp.window_size()));
        self.senders.insert(here, AuditedEnd { iss, shift, edge, ..AuditedEnd::default() });
    }
}

impl AuditedEnd {
    /// Checks an acknowledgment of data that `peer` has sent, with its window and SACK blocks.
    fn acknowledge(&mut self, peer: &Self, tcp: &TcpSlice<'_>, what: &dyn Fn() -> String) {
        let acked = peer.offset(tcp.acknowledgment_number());
        assert!(acked >= 0 && acked as u64 <= peer.end(), "acknowledges data that was not sent: {}", what());
        assert!(acked as u64 >= self.acked, "acknowledges {acked} after {}: {}", self.acked, what());
        self.acked = acked as u64;
        let shift = self.shift.filter(|_| peer.shift.is_some()).unwrap_or(0);
        let edge = self.acked + (u64::from(tcp.window_size()) << shift);
        let before = self.edge.unwrap_or(0);
        // RFC 7323 section 2.4: by rounding, the window may shrink by less than its unit.
        assert!(edge + (1 << shift) > before, "the window shrinks from {before} to {edge}: {}", what());
        self.edge = Some(edge.max(before));
        for option in tcp.options_iterator() {
            let Ok(TcpOptionElement::SelectiveAcknowledgement(first, rest)) = option else { continue };
            for (left, right) in [Some(first)].into_iter().chain(rest).flatten() {
                let (left, right) = (peer.offset(left), peer.offset(right));
                let sent = left < right && right <= peer.end() as i64;
                assert!(sent, "a SACK block of data that was not sent, {left}..{right}: {}", what());
            }
        }
    }
}

fn flow(net: &NetSlice<'_>, tcp: &TcpSlice<'_>) -> (FlowKey, FlowKey) {
    let (source, destination) = match net {
        NetSlice::Ipv4(ip) => (ip.header().source().to_vec(), ip.header().destination().to_vec()),
        NetSlice::Ipv6(ip) => (ip.header().source().to_vec(), ip.header().destination().to_vec()),
        NetSlice::Arp(_) => Default::default(),
    };
    let (from, to) = (tcp.source_port(), tcp.destination_port());
    let key = |a: &[u8], b: &[u8], ports| ([a, b].concat(), ports);
    (key(&source, &destination, [from, to]), key(&destination, &source, [to, from]))
}

fn check_sum(net: &NetSlice<'_>, tcp: &TcpSlice<'_>) -> Option<()> {
    let right = match net {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            if header.header_checksum != header.calc_header_checksum() {
                return None;
            }
            tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()).ok()?
        }
        NetSlice::Ipv6(ip) => tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()).ok()?,
        NetSlice::Arp(_) => return None,
    };
    (right == tcp.checksum()).then_some(())
}
