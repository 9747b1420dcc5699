//! An upper layer without TCP below: ULPDUs are pulled out of it one by one, into plain vectors.

use smallvec::smallvec;

use crate::{
    link::FrameWriter,
    mpa::layout::Layout,
    seq::StreamOffset,
    ulp::{ConnId, Pulled, Ulp, UlpduWriter},
};

/// What [`pull`] brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledUlpdu {
    /// The upper layer's answer.
    pub pulled: Pulled,
    /// The ULPDU, when it is [`Pulled::Ulpdu`].
    pub ulpdu: Vec<u8>,
    /// Where in the stream its FPDU ends.
    pub end: StreamOffset,
}

/// Asks `ulp` for the next ULPDU, whose FPDU begins at `start` of the stream (a multiple of 4), when
/// `room` bytes of ULPDU fit into what is left of the segment and `mulpdu` into a segment of its own.
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

/// As [`pull`], but the FPDU is built in `memory`, behind whose first two bytes the ULPDU lies then.
/// Returns the answer, the ULPDU's length, and where in the stream its FPDU ends.
pub fn pull_into<U: Ulp>(
    ulp: &mut U,
    conn: ConnId,
    start: StreamOffset,
    room: usize,
    mulpdu: usize,
    memory: &mut [u8],
) -> (Pulled, usize, StreamOffset) {
    let mut frame = FrameWriter::new(smallvec![memory], 0, usize::MAX);
    let layout = Layout { origin: start, markers: false };
    let Some(mut writer) = UlpduWriter::begin(&mut frame, layout, start, mulpdu) else {
        return (Pulled::Nothing, 0, start);
    };
    writer.room = writer.room.min(room);
    let pulled = ulp.pull(conn, &mut writer);
    (pulled, writer.written(), writer.end())
}
