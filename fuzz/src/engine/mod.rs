//! Target: a whole engine with hostile peers on the wire.
//!
//! An input is: settings, then records until the end. A record is one event: a segment, an FPDU with correct
//! framing, a raw frame, time that passes, or a verb of the application.

mod card;
mod doors;
mod peer;
mod segments;

use xwarp_tcp::{framing::FramingConfig, mpa::MpaConfig, rdma_tcp::RdmaTcpConfig, time::Duration};

use self::{
    card::{Card, Reached, Settings},
    peer::{ACK, Addresses, FIN, Peer, RST, SYN, inspect},
    segments::{Numbers, key_of},
};
use crate::{input::Input, wire::mend};

/// Maximum number of records in one input.
const MAX_RECORDS: usize = 400;
/// Connections, by the peer's port.
const PORTS: std::ops::Range<u16> = 40_000..40_004;
/// Heap limit of a run, in bytes: an input has a few kilobytes, and the engine holds at most what the window
/// and MPA's limits allow.
const MAX_HEAP: u64 = 24 << 20;

/// First byte of records that are attacks of several segments.
const ATTACKS: u8 = 240;
/// Longest trickle, in segments.
const TRICKLE: usize = 32;

/// Flags of a ULPDU record besides sending its FPDU.
const TRANSLATE: u8 = 1;
const HOLD_BACK: u8 = 2;
const TWICE: u8 = 4;
const BAD_CRC: u8 = 8;
const SPLIT: u8 = 16;

/// Runs one input with MPA.
pub fn target(data: &[u8]) {
    run(data, &MpaConfig::default().into());
}

/// Runs one input with RDMA/TCP: a record of a ULPDU is one of a segment (see [`segments`]).
pub fn segments_target(data: &[u8]) {
    run(data, &RdmaTcpConfig::default().into());
}

fn run(data: &[u8], framing: &FramingConfig) {
    let used = allocation_counter::measure(|| {
        World::run(Input::new(data), framing);
    });
    assert!(used.bytes_max < MAX_HEAP, "{} bytes of heap", used.bytes_max);
}

/// The card, its peers, and the frames in flight to the card.
struct World {
    settings: Settings,
    addresses: Addresses,
    card: Card,
    peers: Vec<Peer>,
    /// The peers' numbers, on a connection with RDMA/TCP.
    numbers: Option<Vec<Numbers>>,
    current: usize,
    held: Vec<Vec<u8>>,
    /// Whether the peers withhold acknowledgements.
    mute: bool,
}

impl World {
    fn run(mut input: Input<'_>, framing: &FramingConfig) -> Reached {
        let settings = Settings(input.u8());
        let addresses = Addresses::new(settings.v6());
        let mut world = Self {
            settings,
            addresses,
            card: Card::new(settings, addresses, framing),
            peers: PORTS.map(|port| Peer::new(addresses, port, settings.timestamps())).collect(),
            numbers: matches!(framing, FramingConfig::RdmaTcp(_))
                .then(|| PORTS.map(|_| Numbers::default()).collect()),
            current: 0,
            held: Vec::new(),
            mute: false,
        };
        world.open();
        for _ in 0..MAX_RECORDS {
            if input.is_empty() {
                break;
            }
            world.record(&mut input);
        }
        world.card.over()
    }

    fn peer(&mut self) -> &mut Peer {
        &mut self.peers[self.current]
    }

    /// The TCP handshake of the current peer.
    fn open(&mut self) {
        if self.settings.initiator() {
            let port = self.peer().port();
            self.card.connect(port);
            self.settle();
        }
        let syn = self.peer().syn();
        self.arrive(&syn);
        self.say(ACK, 0, 0, 0xffff);
    }

    fn record(&mut self, input: &mut Input<'_>) {
        let kind = input.u8();
        if let Some(attack) = kind.checked_sub(ATTACKS) {
            return self.attack(attack, input);
        }
        match kind % 12 {
            0 => self.start_up(input),
            1 | 2 => self.ulpdu(input),
            3 => {
                let (delta, bytes) = (input.u16().cast_signed(), input.chunk());
                self.bytes(delta.into(), bytes);
            }
            4 => {
                let (flags, seq, ack) = (input.u8(), input.u16().cast_signed(), input.u16().cast_signed());
                let window = input.u16();
                self.say(flags & (FIN | SYN | RST | ACK | 8), seq.into(), ack.into(), window);
            }
            5 => {
                let patch = input.u8();
                let frame = input.chunk().to_vec();
                self.raw(patch, frame);
            }
            6 => {
                let ms = u64::from(input.u16());
                for peer in &mut self.peers {
                    peer.clock = peer.clock.wrapping_add(ms as u32);
                }
                self.card.wait(Duration::from_millis(ms));
                self.settle();
            }
            7 => {
                let backwards = input.u8() & 1 != 0;
                let mut held = std::mem::take(&mut self.held);
                if backwards {
                    held.reverse();
                }
                for frame in held {
                    self.arrive(&frame);
                }
            }
            8 | 9 => {
                self.card.verb(input);
                self.card.turn();
                self.settle();
            }
            10 => {
                self.current = usize::from(input.u8()) % self.peers.len();
                if !self.peer().met() {
                    self.open();
                }
            }
            _ => {
                let (what, mtu) = (input.u8(), input.u16());
                self.mute = what & 128 != 0;
                let frame = self.peer().icmp(what & 15, mtu);
                self.arrive(&frame);
            }
        }
    }

    /// Executes an attack of a peer that knows TCP well: lasting windows, overlapping segments, trickles, and
    /// successors of a connection.
    fn attack(&mut self, kind: u8, input: &mut Input<'_>) {
        match kind % 4 {
            // A lasting window, mostly closed, over the data in flight.
            0 => {
                let window = input.u16();
                self.peer().window = if window & 1 == 0 { 0 } else { window };
                let window = self.peer().window;
                self.say(ACK, 0, -i32::from(input.u8()), window);
            }
            1 => {
                let (back, len, more) = (input.u16(), input.u16(), input.chunk());
                let frame = self.peer().again(back.into(), len.into(), more);
                self.arrive(&frame);
            }
            2 => {
                let (ms, bytes) = (u64::from(input.u16()), input.chunk());
                for byte in bytes.iter().take(TRICKLE) {
                    self.card.wait(Duration::from_millis(ms));
                    self.settle();
                    self.bytes(0, &[*byte]);
                }
            }
            _ => {
                let last = input.chunk();
                let frames = self.peer().replace(&last[..last.len().min(1400)]);
                for frame in &frames {
                    self.card.link.arrive(frame);
                }
                self.card.turn();
                self.settle();
                self.say(ACK, 0, 0, 0xffff);
            }
        }
    }

    /// Encodes a start-up frame with these flags, revision and private data.
    fn start_up(&mut self, input: &mut Input<'_>) {
        let (flags, revision) = (input.u8(), input.u8());
        let private_data = input.chunk();
        if let Some(numbers) = &mut self.numbers {
            let heard = self.settings.initiator().then_some(&self.peers[self.current].heard[..]);
            let private_data = &private_data[..private_data.len().min(600)];
            let first = numbers[self.current].first(heard, flags & 1 != 0, revision, private_data);
            return self.bytes(0, &first);
        }
        let mut frame =
            if self.settings.initiator() { *b"MPA ID Rep Frame" } else { *b"MPA ID Req Frame" }.to_vec();
        frame.extend_from_slice(&[flags, revision]);
        frame.extend_from_slice(&(private_data.len() as u16).to_be_bytes());
        frame.extend_from_slice(private_data);
        self.bytes(0, &frame);
        let peer = self.peer();
        peer.origin = peer.sent;
    }

    /// Sends stream bytes at the next position, or at this distance from it.
    fn bytes(&mut self, delta: i32, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(1500)];
        let peer = self.peer();
        let frame = if delta == 0 {
            peer.data(bytes)
        } else {
            peer.segment(ACK, peer.seq(delta), peer.ack(), 0xffff, bytes)
        };
        self.arrive(&frame);
    }

    /// Sends a segment without payload.
    fn say(&mut self, flags: u8, seq: i32, ack: i32, window: u16) {
        let peer = self.peer();
        let ack = peer.ack().wrapping_add_signed(ack);
        let frame = peer.segment(flags, peer.seq(seq), ack, window, &[]);
        self.arrive(&frame);
    }

    fn ulpdu(&mut self, input: &mut Input<'_>) {
        let (how, ulpdu) = (input.u8(), input.chunk());
        let mut ulpdu = ulpdu[..ulpdu.len().min(1500)].to_vec();
        if how & TRANSLATE != 0 {
            self.translate(&mut ulpdu);
        }
        let mut fpdu = if let Some(numbers) = &mut self.numbers {
            numbers[self.current].record(&ulpdu, &self.peers[self.current].heard)
        } else {
            let markers = self.card_wants_markers();
            let peer = self.peer();
            frame_ulpdu(&ulpdu, (peer.sent.wrapping_sub(peer.origin)) as usize, markers)
        };
        let peer = self.peer();
        if how & BAD_CRC != 0
            && let Some(last) = fpdu.last_mut()
        {
            *last ^= 1;
        }
        let (first, second) = fpdu.split_at(if how & SPLIT != 0 { fpdu.len() / 2 } else { fpdu.len() });
        let mut frames = vec![peer.data(first)];
        if !second.is_empty() {
            frames.insert(0, peer.data(second));
        }
        if how & TWICE != 0 {
            frames.extend_from_within(..);
        }
        for frame in frames {
            if how & HOLD_BACK != 0 {
                self.held.push(frame);
            } else {
                self.arrive(&frame);
            }
        }
    }

    /// Whether the card's start-up frame requests markers, if it has arrived.
    fn card_wants_markers(&mut self) -> bool {
        self.peer().heard.get(16).is_some_and(|flags| flags & 0x80 != 0)
    }

    /// Replaces small numbers in key fields by keys.
    fn translate(&self, ulpdu: &mut [u8]) {
        let tagged = ulpdu.first().is_some_and(|first| first & 0x80 != 0);
        let opcode = ulpdu.get(1).map_or(0, |control| control & 15);
        let numbered: Vec<usize> = key_of(ulpdu).into_iter().collect();
        let places: &[usize] = match (tagged, opcode) {
            _ if self.numbers.is_some() => &numbered,
            (false, 1) => &[18, 34],
            (false, 10) => &[26],
            _ => &[2],
        };
        for &at in places {
            if let Some(field) = ulpdu.get_mut(at..at + 4)
                && let Some(key) = self.card.key(u32::from_be_bytes([field[0], field[1], field[2], field[3]]))
            {
                field.copy_from_slice(&key.value().to_be_bytes());
            }
        }
    }

    /// Sends any frame: unchanged, with correct checksums, or placed in the current connection.
    fn raw(&mut self, patch: u8, mut frame: Vec<u8>) {
        let peer = &self.peers[self.current];
        let (addresses, ports) = self.addresses.places();
        let (numbers, end) = (ports + 4, ports + 20);
        if patch & 2 != 0 && frame.len() >= end {
            let template = peer.segment(ACK, peer.seq(0), peer.ack(), 0xffff, &[]);
            let mut copy =
                |range: std::ops::Range<usize>| frame[range.clone()].copy_from_slice(&template[range]);
            copy(0..14);
            copy(addresses..numbers);
            if patch & 4 != 0 {
                copy(numbers..numbers + 8);
            }
        }
        if patch & 1 != 0 {
            mend(&mut frame);
        }
        self.arrive(&frame);
    }

    /// Delivers a frame to the card, runs its turn, and takes its responses.
    fn arrive(&mut self, frame: &[u8]) {
        self.card.link.arrive(frame);
        self.card.turn();
        self.settle();
    }

    /// Delivers the card's frames to the peers, which acknowledge them, until there are no new frames.
    fn settle(&mut self) {
        for _ in 0..64 {
            let sent = std::mem::take(&mut self.card.link.sent);
            if sent.is_empty() {
                return;
            }
            for frame in sent {
                inspect(self.addresses, &frame, |port, tcp| {
                    if let Some(peer) = self.peers.iter_mut().find(|peer| peer.port() == port) {
                        peer.hear(tcp);
                    }
                });
            }
            if self.mute {
                return;
            }
            let acknowledgements: Vec<_> = self.peers.iter_mut().filter_map(Peer::acknowledge).collect();
            for frame in acknowledgements {
                self.card.link.arrive(&frame);
            }
            self.card.turn();
        }
    }
}

/// Encodes a ULPDU as an FPDU (RFC 5044 section 4) at this offset after the start-up frame.
fn frame_ulpdu(ulpdu: &[u8], at: usize, markers: bool) -> Vec<u8> {
    let mut body = (ulpdu.len() as u16).to_be_bytes().to_vec();
    body.extend_from_slice(ulpdu);
    body.resize(body.len().next_multiple_of(4), 0);
    let mut out = Vec::new();
    // The pointer of a marker directly before the length field is zero.
    let header = if markers && at.is_multiple_of(512) { at + 4 } else { at };
    let marker = |out: &mut Vec<u8>| {
        if markers && (at + out.len()).is_multiple_of(512) {
            let back = (at + out.len()).saturating_sub(header) as u16;
            out.extend_from_slice(&[0, 0]);
            out.extend_from_slice(&back.to_be_bytes());
        }
    };
    for byte in body {
        marker(&mut out);
        out.push(byte);
    }
    marker(&mut out);
    let sum = crc32c::crc32c(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::seeds;

    fn reached(capture: &str) -> Vec<Reached> {
        let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tcp-offload/tests/captures");
        let seeds = seeds::of_capture(&captures.join(capture).with_extension("pcap")).expect("a capture");
        let mpa = MpaConfig::default().into();
        seeds["engine"].iter().map(|input| World::run(Input::new(input), &mpa)).collect()
    }

    #[test]
    fn captures_reach_memory_and_completions() {
        for (name, bytes) in [("write-read-8k-crc", 1000), ("send-1x10001-crc", 1000), ("rping-rev2-crc", 10)]
        {
            let reached = reached(name);
            let successes = reached.iter().map(|reached| reached.successes).max();
            assert!(successes > Some(2), "{name}: {successes:?}");
            let changed = reached.iter().map(|reached| reached.bytes).max();
            assert!(changed > Some(bytes), "{name}: {changed:?}");
        }
    }

    #[test]
    fn seeds_of_segments_reach_memory_and_completions() {
        let rdma_tcp = RdmaTcpConfig::default().into();
        let reached: Vec<_> =
            seeds::of_segments().iter().map(|input| World::run(Input::new(input), &rdma_tcp)).collect();
        for Reached { successes, bytes, .. } in &reached {
            assert!(*successes > 2 && *bytes > 100, "{reached:?}");
        }
    }

    #[test]
    fn captures_reach_windows_and_fast_regions_over_ipv4_and_ipv6() {
        let reached = reached("rping-rev2-crc");
        assert_eq!(reached.iter().filter(|reached| reached.through_doors > 10).count(), 4);
    }
}
