//! Pulls ULPDUs one by one from an upper layer into plain vectors, without TCP.

use crate::{
    framing::Mulpdu,
    link::FrameWriter,
    mpa::layout::Layout,
    seq::StreamOffset,
    ulp::{ConnId, Pulled, Ulp, UlpduWriter},
};

/// The result of [`pull`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledUlpdu {
    /// The upper layer's answer.
    pub pulled: Pulled,
    /// The ULPDU, when it is [`Pulled::Ulpdu`] or [`Pulled::LastUlpdu`].
    pub ulpdu: Vec<u8>,
    /// Stream offset of the end of the FPDU.
    pub end: StreamOffset,
}

/// Asks `ulp` for the next ULPDU, whose FPDU begins at `start` of the stream (a multiple of 4). `room` bytes of ULPDU
/// fit into the rest of the segment, and `mulpdu` bytes into a segment of its own.
pub fn pull<U: Ulp>(
    ulp: &mut U,
    conn: ConnId,
    start: StreamOffset,
    room: usize,
    mulpdu: usize,
) -> PulledUlpdu {
    let mut memory = vec![0; Layout::body(room)];
    let (pulled, written, end) = pull_into(ulp, conn, start, room, mulpdu, &mut memory);
    PulledUlpdu { pulled, ulpdu: memory.get(2..2 + written).unwrap_or_default().to_vec(), end }
}

/// Like [`pull`], but builds the FPDU in `memory`, where the ULPDU follows the first two bytes. Returns the upper
/// layer's answer, the ULPDU's length, and the stream offset of the FPDU's end.
pub fn pull_into<U: Ulp>(
    ulp: &mut U,
    conn: ConnId,
    start: StreamOffset,
    room: usize,
    mulpdu: usize,
    memory: &mut [u8],
) -> (Pulled, usize, StreamOffset) {
    let mut frame = FrameWriter::new(std::iter::once(memory).collect(), 0, usize::MAX);
    let layout = Layout { origin: start, markers: false };
    let Some(mut writer) = UlpduWriter::begin(&mut frame, layout, start, Mulpdu::of(mulpdu), false) else {
        return (Pulled::Nothing, 0, start);
    };
    writer.room = writer.room.min(room);
    let pulled = ulp.pull(conn, &mut writer);
    (pulled, writer.written(), writer.end())
}
