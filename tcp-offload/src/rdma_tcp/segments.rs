//! RDMA/TCP as a framing: segments in a TCP stream, found beyond a gap where a TCP segment begins (section 5 of the
//! proposal).

use super::{
    ConnectionId, SegmentError,
    crc::{Crc32, crc32},
    header::{PREFIX_BYTES, Prefix},
};
use crate::{
    framing::{Framing, FramingError, Mulpdu, Transmitter, hold::Hold},
    link::{FrameWriter, Link},
    seq::StreamOffset,
    ulp::{Ulpdu, UlpduWriter},
};

/// Bytes of the CRC-32.
pub(super) const CRC_BYTES: usize = 4;

/// The longest segment: its length field has 16 bits.
const MAX_BYTES: usize = u16::MAX as usize;

/// Bytes of a segment with header, control data and payload of `len` bytes, and its pad and CRC.
pub(super) const fn padded(len: usize) -> usize {
    len.next_multiple_of(4) + CRC_BYTES
}

/// Verifies the CRC at the end of `raw`, a whole segment. It covers everything before it, including the pad.
pub(super) fn verify(raw: &[&[u8]]) -> Result<(), SegmentError> {
    let mut covered = raw.iter().map(|p| p.len()).sum::<usize>().saturating_sub(CRC_BYTES);
    let mut field = [0; CRC_BYTES];
    let mut slots = field.iter_mut();
    let sum = crc32(raw.iter().map(|piece| {
        let (data, rest) = piece.split_at(piece.len().min(covered));
        covered -= data.len();
        for (byte, slot) in rest.iter().zip(slots.by_ref()) {
            *slot = *byte;
        }
        data
    }));
    if sum == u32::from_le_bytes(field) { Ok(()) } else { Err(SegmentError::Crc) }
}

/// The framing of one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Segments {
    /// `None` until the start-up has determined it.
    connection: Option<ConnectionId>,
}

impl Segments {
    pub fn of(connection: ConnectionId) -> Self {
        Self { connection: Some(connection) }
    }
}

impl Framing for Segments {
    type Head = [u8; PREFIX_BYTES];

    const OVERLAP: FramingError = FramingError::RdmaTcp(SegmentError::Overlap);

    fn starting_at(self, _origin: StreamOffset) -> Self {
        self
    }

    fn head(&self, start: StreamOffset) -> StreamOffset {
        start
    }

    fn ulpdu_len(&self, head: Self::Head) -> Result<usize, FramingError> {
        let prefix = Prefix::parse(head)?;
        if self.connection == Some(prefix.connection) {
            Ok(prefix.len)
        } else {
            Err(SegmentError::ConnectionId.into())
        }
    }

    fn end(&self, start: StreamOffset, ulpdu: usize) -> StreamOffset {
        start + padded(ulpdu) as u64
    }

    fn verify(&self, raw: &[&[u8]]) -> Result<(), FramingError> {
        verify(raw).map_err(FramingError::RdmaTcp)
    }

    /// The segment's bytes from its header on, without pad and CRC.
    fn cut<'a>(
        &self,
        raw: &'a [&'a [u8]],
        _start: StreamOffset,
        ulpdu: usize,
    ) -> Result<Ulpdu<'a>, FramingError> {
        Ok(Ulpdu::between_markers(raw, 0, ulpdu, usize::MAX))
    }

    /// The start of the held bytes that end where the received bytes begin: a segment that a hop has split begins there.
    fn first_probe(&self, hold: &Hold, fresh: StreamOffset) -> Option<StreamOffset> {
        Some(hold.island_start(fresh))
    }

    /// The start of the received bytes, which is the start of a TCP segment's payload.
    fn next_probe(
        &self,
        probe: StreamOffset,
        fresh: StreamOffset,
        _end: StreamOffset,
    ) -> Option<StreamOffset> {
        (probe < fresh).then_some(fresh)
    }

    /// A segment is assumed to begin at the probe; its Connection ID and its CRC confirm or refute this.
    fn frame_at(&self, _hold: &Hold, _link: &dyn Link, probe: StreamOffset) -> Option<StreamOffset> {
        Some(probe)
    }
}

/// Sends one segment in each TCP segment, as section 2 of the proposal recommends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SegmentTransmitter;

impl Transmitter for SegmentTransmitter {
    const ONE_FRAME: bool = true;

    fn waits_for_first(&self) -> bool {
        false
    }

    fn mulpdu(&self, emss: usize) -> Mulpdu {
        Mulpdu { emss, bytes: largest(emss), fits: emss }
    }

    fn probe_mulpdu(&self, _offset: StreamOffset, _emss: usize, room: usize) -> Mulpdu {
        self.mulpdu(room)
    }

    fn begin<'w, 'f>(
        &self,
        out: &'w mut FrameWriter<'f>,
        start: StreamOffset,
        mulpdu: Mulpdu,
    ) -> Option<UlpduWriter<'w, 'f>> {
        let room = largest(out.room()).min(mulpdu.bytes);
        (room > 0).then(|| UlpduWriter::begin_segment(out, start, mulpdu.bytes, room))
    }

    fn finish(&self, writer: &mut UlpduWriter<'_, '_>) -> usize {
        writer.finish_segment()
    }
}

/// Length of the longest segment, without pad and CRC, that fits in `room` bytes of a TCP segment.
fn largest(room: usize) -> usize {
    (room & !3).saturating_sub(CRC_BYTES).min(MAX_BYTES)
}

impl UlpduWriter<'_, '_> {
    /// Completes the segment with pad and CRC; returns its bytes.
    fn finish_segment(&mut self) -> usize {
        let pad = self.written.next_multiple_of(4) - self.written;
        self.put_raw([0; 3].get(..pad).unwrap_or_default());
        let end = self.position + self.written + pad;
        let mut crc = Crc32::new();
        self.frame.for_each(self.position, end, |piece| crc.update(piece));
        self.put_raw(&crc.value().to_le_bytes());
        self.written + pad + CRC_BYTES
    }
}

#[cfg(test)]
mod tests;
