//! [`RawPeer`]: one end of a connection without a TCP. The caller builds its segments one by one, valid or invalid.

use crate::{
    framing::Mulpdu,
    link::FrameWriter,
    mpa::layout::Layout,
    seq::SeqNum,
    ulp::UlpduWriter,
    wire::{Fields, Flags, Headers, MAX_HEADER_BYTES, Options, Path, SackBlock, Segment, Sum, Timestamps},
};

/// Shift count of the windows that the peer advertises.
const SHIFT: u8 = 7;

/// A raw peer and its state of the connection.
#[derive(Debug)]
pub struct RawPeer {
    path: Path,
    headers: Headers,
    iss: SeqNum,
    /// The other end's initial sequence number, once its SYN has arrived.
    irs: Option<SeqNum>,
    timestamps: bool,
    /// The latest timestamp of the other end.
    echo: u32,
    /// The clock of our timestamps.
    pub clock: u32,
    /// Bytes sent in order; a FIN counts as one.
    pub sent: u32,
    /// Bytes of the other end's stream up to the highest received one, including a FIN.
    pub received: u32,
    /// The highest number of these bytes that the peer has acknowledged.
    pub acknowledged: u32,
    /// The other end has sent a RST.
    pub reset: bool,
}

/// A segment to build. Its numbers are relative to the correct ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct RawSegment<'a> {
    /// Control bits.
    pub flags: Flags,
    /// Sequence number, relative to the next in order.
    pub seq: i32,
    /// Acknowledgment number, relative to all data received.
    pub ack: i32,
    /// The window field.
    pub window: u16,
    /// SACK blocks, relative to all data received.
    pub sack: &'a [(i32, i32)],
    /// Payload.
    pub payload: &'a [u8],
}

impl RawPeer {
    /// The local end of `path`, whose first sequence number is `iss`.
    pub fn new(path: Path, iss: u32, timestamps: bool) -> Self {
        Self {
            path,
            headers: Headers::new(&path),
            iss: SeqNum::new(iss),
            irs: None,
            timestamps,
            echo: 0,
            clock: 1,
            sent: 0,
            received: 0,
            acknowledged: 0,
            reset: false,
        }
    }

    /// The path from this peer.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the other end's SYN has arrived.
    pub fn has_peer_syn(&self) -> bool {
        self.irs.is_some()
    }

    /// Our SYN, or the SYN-ACK once the other end's SYN has arrived.
    pub fn syn(&self) -> Vec<u8> {
        let flags = Flags { syn: true, ack: self.has_peer_syn(), ..Flags::default() };
        let ack = self.irs.map_or_else(SeqNum::default, |irs| irs.add(1));
        self.frame(flags, self.iss, ack, u16::MAX, Options::default(), &[])
    }

    /// The next segment in order with `payload` and an acknowledgement of all data received.
    pub fn data(&mut self, payload: &[u8]) -> Vec<u8> {
        let frame = self.segment(&RawSegment { window: u16::MAX, payload, ..RawSegment::ack() });
        self.sent = self.sent.wrapping_add(payload.len() as u32);
        frame
    }

    /// The segment that `segment` describes.
    pub fn segment(&self, segment: &RawSegment<'_>) -> Vec<u8> {
        let seq = self.iss.add(1).add(self.sent).add(segment.seq.cast_unsigned());
        let received = self.irs.unwrap_or_default().add(1).add(self.received);
        let ack =
            if segment.flags.ack { received.add(segment.ack.cast_unsigned()) } else { SeqNum::default() };
        let mut options = Options::default();
        for (to, (left, right)) in options.sack.iter_mut().zip(segment.sack) {
            *to = SackBlock {
                left: received.add(left.cast_unsigned()),
                right: received.add(right.cast_unsigned()),
            };
            // Three blocks fit next to timestamps.
            options.sack_count = (options.sack_count + 1).min(3);
        }
        self.frame(segment.flags, seq, ack, segment.window, options, segment.payload)
    }

    fn frame(
        &self,
        flags: Flags,
        seq: SeqNum,
        ack: SeqNum,
        window: u16,
        mut options: Options,
        payload: &[u8],
    ) -> Vec<u8> {
        if flags.syn {
            (options.mss, options.window_scale, options.sack_permitted) = (Some(1460), Some(SHIFT), true);
        }
        options.timestamps = self.timestamps.then_some(Timestamps { value: self.clock, echo: self.echo });
        let fields = Fields { seq, ack, flags, window, options, ..Fields::default() };
        let mut frame = vec![0; MAX_HEADER_BYTES];
        let len = self.headers.emit(&mut frame, &fields, payload.len(), Sum::of(payload));
        frame.truncate(len.unwrap_or(0));
        frame.extend_from_slice(payload);
        frame
    }

    /// Processes a segment of the other end.
    pub fn receive(&mut self, segment: &Segment) {
        if segment.flags.rst {
            self.reset = true;
            return;
        }
        if segment.flags.syn && self.irs != Some(segment.seq) {
            (self.irs, self.received) = (Some(segment.seq), 0);
        }
        let Some(irs) = self.irs else { return };
        if let Some(timestamps) = segment.options.timestamps {
            self.echo = timestamps.value;
        }
        let sequence_len = segment.payload_len as u32 + u32::from(segment.flags.fin);
        let end = segment.seq.add(sequence_len).since(irs.add(1));
        if !segment.flags.syn {
            self.received = self.received.max(end.max(0).cast_unsigned());
        }
    }
}

impl RawSegment<'_> {
    /// An acknowledgement of all data received.
    pub fn ack() -> Self {
        Self { flags: Flags { ack: true, ..Flags::default() }, ..Self::default() }
    }
}

/// The FPDU of `ulpdu` that begins `start` bytes after the start-up frame, with a correct CRC.
pub fn fpdu(start: u64, markers: bool, ulpdu: &[u8]) -> Vec<u8> {
    let layout = Layout { origin: 0, markers };
    let mut memory = vec![0; (layout.end(start, ulpdu.len()) - start) as usize];
    let chunks = [&mut memory[..]].into_iter().collect();
    let mut out = FrameWriter::new(chunks, 0, usize::MAX);
    if let Some(mut writer) = UlpduWriter::begin(&mut out, layout, start, Mulpdu::of(ulpdu.len()), true) {
        writer.fill(ulpdu.len(), |offset, space| {
            for (to, from) in space.iter_mut().zip(ulpdu.iter().skip(offset)) {
                *to = *from;
            }
        });
        writer.finish();
    }
    drop(out);
    memory
}
