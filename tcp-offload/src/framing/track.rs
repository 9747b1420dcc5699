//! The known frames from the cursor on, and the steps of each: check, place and deliver.

use super::{
    Framing, FramingError,
    hold::{Hold, Range},
    ordered::{Extent, Ordered},
};
use crate::{
    framing::FramingCounters,
    seq::StreamOffset,
    ulp::{ConnId, Refusal, Ulp, Ulpdu},
};

/// Largest number of known FPDUs beyond the cursor. When there are that many, further FPDUs wait as if their start were
/// unknown.
const MAX_KNOWN: usize = 1 << 13;

/// Largest number of stored FPDUs that failed a check beyond the cursor. Each is checked again only when the cursor
/// reaches it, so that a peer cannot make the check of a long FPDU repeat with every byte. At the limit, nothing more
/// is placed early.
const MAX_INVALID: usize = 16;

/// The upper layer, and the id of the connection that it knows.
pub(crate) struct Upper<'a, U> {
    pub ulp: &'a mut U,
    pub conn: ConnId,
}

/// The reason why the receiver has halted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Halt {
    /// The upper layer withholds the FPDU at the cursor: it has no buffer yet.
    Withheld,
    /// The upper layer has stopped reading.
    Stopped,
    /// The stream contains an error.
    Broken(FramingError),
}

impl Halt {
    /// Whether the stream cannot continue.
    pub fn is_final(self) -> bool {
        self != Self::Withheld
    }
}

/// An FPDU at or beyond the cursor that was checked.
#[derive(Debug)]
pub(super) struct Known<P> {
    pub start: StreamOffset,
    pub end: StreamOffset,
    pub ulpdu: usize,
    /// `None`: the upper layer has refused the FPDU, which is held and offered again in order.
    pub placed: Option<P>,
}

impl<P> Extent for Known<P> {
    fn end(&self) -> StreamOffset {
        self.end
    }
}

/// State of the FPDUs from the cursor on.
#[derive(Debug)]
pub(super) struct Track<P, F> {
    pub framing: F,
    /// Start of the range of the next FPDU to deliver. Everything before it has been delivered.
    pub cursor: StreamOffset,
    pub known: Ordered<Known<P>>,
    /// Starts of the FPDUs that failed a check beyond the cursor.
    invalid: Vec<StreamOffset>,
    /// A valid FPDU has been received.
    pub begun: bool,
    pub counters: FramingCounters,
}

impl<P: Copy, F: Framing> Track<P, F> {
    /// A track at the start of the stream, before the framing is negotiated.
    pub fn new() -> Self {
        Self {
            framing: F::default(),
            cursor: 0,
            known: Ordered::default(),
            invalid: Vec::new(),
            begun: false,
            counters: FramingCounters::default(),
        }
    }

    /// Checks, places and delivers the FPDU at the cursor, which consists of `raw` and ends at `end`.
    pub fn accept<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        raw: &[&[u8]],
        ulpdu: usize,
        end: StreamOffset,
    ) -> Result<(), Halt> {
        let cut = self.check(raw, self.cursor, ulpdu).map_err(Halt::Broken)?;
        self.take(upper, &cut, end)
    }

    /// Places and delivers `cut`, the ULPDU of the FPDU at the cursor, which was checked and ends at `end`.
    #[inline]
    pub fn take<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        cut: &Ulpdu<'_>,
        end: StreamOffset,
    ) -> Result<(), Halt> {
        self.begun = true;
        if let Err(refusal) = upper.ulp.take(upper.conn, cut) {
            let (start, ulpdu) = (self.cursor, cut.len());
            self.known.push_front(Known { start, end, ulpdu, placed: None });
            return Err(refusal.into());
        }
        self.taken(end);
        Ok(())
    }

    /// Moves the cursor to `end`, past an FPDU that was placed and delivered in one step.
    #[inline]
    pub fn taken(&mut self, end: StreamOffset) {
        self.counters.placed_in_order += 1;
        self.counters.delivered += 1;
        self.cursor = end;
    }

    pub fn deliver<U: Ulp<Placed = P>>(
        &mut self,
        upper: &mut Upper<'_, U>,
        placed: P,
        end: StreamOffset,
    ) -> Result<(), Halt> {
        upper.ulp.deliver(upper.conn, placed)?;
        self.counters.delivered += 1;
        self.cursor = end;
        Ok(())
    }

    /// Checks the CRC, then the markers, and extracts the ULPDU. No field of an FPDU can be trusted before its CRC.
    fn check<'a>(
        &mut self,
        raw: &'a [&'a [u8]],
        start: StreamOffset,
        ulpdu: usize,
    ) -> Result<Ulpdu<'a>, FramingError> {
        self.framing.verify(raw).inspect_err(|_| self.counters.crc_errors += 1)?;
        self.framing.cut(raw, start, ulpdu).inspect_err(|_| self.counters.marker_errors += 1)
    }

    /// Like [`Self::check`], for an FPDU beyond the cursor.
    pub fn check_early<'a>(
        &mut self,
        raw: &'a [&'a [u8]],
        start: StreamOffset,
        ulpdu: usize,
    ) -> Option<Ulpdu<'a>> {
        let checked = self.check(raw, start, ulpdu);
        if checked.is_err() {
            self.invalid.push(start);
        }
        checked.ok()
    }

    /// Whether an FPDU that begins at `start` may be checked before the cursor reaches it.
    pub fn may_check_early(&mut self, start: StreamOffset) -> bool {
        let cursor = self.cursor;
        if self.invalid.len() >= MAX_INVALID {
            self.invalid.retain(|start| *start > cursor);
        }
        self.invalid.len() < MAX_INVALID && self.known.len() < MAX_KNOWN && !self.invalid.contains(&start)
    }

    /// The ranges of the placed FPDUs that have bytes in `offset..end`, in order.
    pub fn placed_within(&self, offset: StreamOffset, end: StreamOffset) -> impl Iterator<Item = Range> {
        let known = self.known.iter_from(self.known.seek(offset)).take_while(move |k| k.start < end);
        known.filter(|k| k.placed.is_some()).map(|k| (k.start, k.end))
    }

    /// Removes the known FPDUs in `range` that are neither placed nor completely held.
    pub fn forget_parts(&mut self, hold: &Hold, (mut offset, end): Range) {
        loop {
            let place = self.known.seek(offset);
            let Some(known) = self.known.get(place).filter(|k| k.start < end) else { break };
            offset = known.end;
            if known.placed.is_none() && hold.contiguous_from(known.start) < known.end {
                self.known.remove(place);
            }
        }
    }

    /// Removes everything known beyond the cursor, when the stream has ended.
    pub fn stop(&mut self) {
        self.known.clear();
        self.invalid.clear();
    }
}

impl From<Refusal> for Halt {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Withhold => Self::Withheld,
            Refusal::Stop => Self::Stopped,
        }
    }
}
