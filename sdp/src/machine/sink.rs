//! The receiving half: the Data Sink.
//!
//! Payload of messages goes to a ring; advertised data stays with the peer until it is read by RDMA or requested by
//! SendSm. Receives into memory of the program (wants) are filled from the ring, by RDMA Read, or after a SinkAvail by
//! RDMA Write.

use std::collections::VecDeque;

use super::{
    Control, Notice, Request, Violation,
    seeded::{Mistake, seeded},
};
use crate::wire::{Advert, Base, Flags, Half, Message, Mode, Seq};

/// A receive of the program into its own memory.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Want {
    id: u64,
    piece: Advert,
    /// A SinkAvail is outstanding for this receive. The receives with one precede those without.
    advertised: bool,
    /// Will be withdrawn soon, and is therefore never advertised.
    brief: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Sink {
    pub(super) mode: Mode,
    pub(super) ring: VecDeque<u8>,
    /// The untransferred parts of unprocessed SrcAvails.
    offers: VecDeque<Advert>,
    /// Length of the current RDMA Read, from the first offer into the first want.
    reading: Option<u32>,
    /// Bytes that SendSm requested and that have not arrived.
    expected: u64,
    pub(super) wants: VecDeque<Want>,
    /// NonDiscards (draft section 9.5.1).
    non_discards: u32,
    cancel: Request,
    /// The number of a SrcAvailCancel that waits for the current Read: MSeqAck stays below it (draft section 9.5.4).
    cancelled: Option<Seq>,
    /// A receive into memory was already waiting when the last SrcAvail arrived: a SinkAvail would have saved a round
    /// trip.
    preposted: bool,
    pub(super) eof: bool,
    pub(super) next_id: u64,
    /// OOB_PEND has arrived, but its byte has not.
    pub(super) urgent: bool,
    /// Bytes in the ring before the position of the last out-of-band byte.
    pub(super) mark: Option<usize>,
    pub(super) oob: Option<u8>,
}

impl Sink {
    pub(super) fn new() -> Self {
        Self {
            mode: Mode::Combined,
            ring: VecDeque::new(),
            offers: VecDeque::new(),
            reading: None,
            expected: 0,
            wants: VecDeque::new(),
            non_discards: 0,
            cancel: Request::None,
            cancelled: None,
            preposted: false,
            eof: false,
            next_id: 0,
            urgent: false,
            mark: None,
            oob: None,
        }
    }

    pub(super) fn buffered(&self) -> usize {
        self.ring.len()
    }

    /// Whether the peer has closed its direction and everything was read.
    pub(super) fn at_eof(&self) -> bool {
        self.eof && self.ring.is_empty()
    }

    /// The counts that both ends agree on when nothing is in flight.
    #[cfg(test)]
    pub(super) fn rest(&self) -> (Mode, u32, bool) {
        let quiet = self.offers.is_empty()
            && self.wants.is_empty()
            && self.expected == 0
            && self.cancel == Request::None
            && self.cancelled.is_none();
        (self.mode, self.non_discards, quiet)
    }

    /// The identifier of the next receive into memory.
    #[cfg(test)]
    pub(super) fn next_id(&self) -> u64 {
        self.next_id
    }

    pub(super) fn has_eof(&self) -> bool {
        self.eof
    }

    /// Whether nothing but bytes in the ring waits.
    pub(super) fn is_idle(&self) -> bool {
        self.offers.is_empty()
            && self.wants.is_empty()
            && self.cancel == Request::None
            && self.cancelled.is_none()
            && !self.eof
            && !self.is_urgent()
    }

    /// Whether advertised data waits that no receive takes.
    pub(super) fn has_offer(&self) -> bool {
        !self.offers.is_empty() && self.reading.is_none()
    }

    /// Bytes that one read may return: it ends before an out-of-band mark.
    fn readable(&self) -> usize {
        match self.mark {
            Some(mark) if mark > 0 => mark,
            _ => self.ring.len(),
        }
    }

    pub(super) fn peek(&self, out: &mut [u8]) -> usize {
        let n = self.readable().min(out.len());
        let (first, second) = self.ring.as_slices();
        let in_first = n.min(first.len());
        for (place, bytes) in [(0..in_first, first), (in_first..n, second)] {
            if let (Some(place), Some(bytes)) = (out.get_mut(place.clone()), bytes.get(..place.len())) {
                place.copy_from_slice(bytes);
            }
        }
        n
    }

    pub(super) fn read(&mut self, out: &mut [u8]) -> usize {
        let n = self.peek(out);
        self.consume(n);
        n
    }

    fn consume(&mut self, n: usize) {
        self.mark = match self.mark {
            // A read that begins at the mark passes it.
            Some(0) if n > 0 => None,
            Some(mark) => Some(mark.saturating_sub(n)),
            None => None,
        };
        self.ring.drain(..n.min(self.ring.len()));
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.urgent || self.oob.is_some()
    }

    pub(super) fn take_oob(&mut self) -> Option<u8> {
        self.oob.take()
    }

    pub(super) fn has_oob(&self) -> bool {
        self.oob.is_some()
    }

    pub(super) fn at_mark(&self) -> bool {
        self.mark == Some(0)
    }

    /// Posts a receive into memory; [`Notice::Received`] ends it.
    pub(super) fn want(&mut self, piece: Advert, brief: bool, notices: &mut VecDeque<Notice>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.wants.push_back(Want { id, piece, advertised: false, brief });
        self.fill_from_ring(notices);
        id
    }

    /// Completes receives with bytes of the ring, or with 0 bytes at the end of the stream.
    fn fill_from_ring(&mut self, notices: &mut VecDeque<Notice>) {
        while let Some(want) = self.wants.front()
            && !want.advertised
            && self.reading.is_none()
            && (self.eof || !self.ring.is_empty())
        {
            let n = self.readable().min(want.piece.len as usize);
            let id = want.id;
            let mut copied = vec![0; n];
            self.read(&mut copied);
            self.wants.pop_front();
            notices.push_back(Notice::Received { id, len: n as u32, copied });
        }
    }

    /// Whether a receive into memory waits for data that may still arrive.
    pub(super) fn is_waiting(&self) -> bool {
        !self.wants.is_empty() && self.offers.is_empty() && !self.eof
    }

    /// Whether an RDMA Read is in progress.
    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// The mode that this sink would prefer the peer to use: REQ_PIPE, as long as receives into memory wait for their data.
    pub(super) fn preference(&self) -> Flags {
        if self.preposted || !self.wants.is_empty() { Flags::REQ_PIPE } else { Flags::empty() }
    }

    fn is_advertised(&self) -> bool {
        self.wants.front().is_some_and(|want| want.advertised)
    }

    /// SinkAvails that are outstanding.
    pub(super) fn adverts(&self) -> usize {
        self.wants.iter().take_while(|want| want.advertised).count()
    }

    /// Payload of any message.
    pub(super) fn payload(
        &mut self,
        payload: &[u8],
        flags: Flags,
        notices: &mut VecDeque<Notice>,
    ) -> Result<(), Violation> {
        if flags.contains(Flags::OOB_PEND) {
            self.urgent = true;
        }
        if payload.is_empty() {
            return Ok(());
        }
        if self.eof {
            return Err(Violation::AfterDisConn);
        }
        let beyond = (payload.len() as u64).saturating_sub(self.expected);
        if beyond > 0 && !self.offers.is_empty() {
            return Err(Violation::DataBesideSrcAvail);
        }
        self.expected = self.expected.saturating_sub(payload.len() as u64);
        let stream = self.take_out_of_band(payload, flags);
        if self.is_advertised() {
            // Exactly one message completes an advertised buffer (draft section 9.5.1). It fits, because our receive buffers are
            // smaller than every buffer that we advertise.
            if let Some(want) = self.wants.pop_front() {
                // The buffer takes the bytes before the mark.
                self.mark = self.mark.map(|_| 0);
                let copied = stream.to_vec();
                notices.push_back(Notice::Received { id: want.id, len: copied.len() as u32, copied });
            }
            if matches!(self.cancel, Request::Sent(_)) && seeded(Mistake::DataEndsSinkCancel) {
                self.drop_adverts(notices);
            }
            self.settle_cancel(notices);
        } else {
            self.non_discards = self.non_discards.wrapping_add(1);
            self.ring.extend(stream);
            self.fill_from_ring(notices);
            if flags.contains(Flags::OOB_PRES) && self.ring.is_empty() && stream.is_empty() {
                // A receive ends before an out-of-band byte, so that the program notices its position.
                if let Some(want) = self.wants.pop_front() {
                    notices.push_back(Notice::Received { id: want.id, len: 0, copied: Vec::new() });
                }
            }
        }
        Ok(())
    }

    /// Takes the out-of-band byte out of the stream. It replaces an unread one.
    fn take_out_of_band<'p>(&mut self, payload: &'p [u8], flags: Flags) -> &'p [u8] {
        match payload.split_last() {
            Some((byte, before)) if flags.contains(Flags::OOB_PRES) => {
                self.oob = Some(*byte);
                self.urgent = false;
                self.mark = Some(self.ring.len() + before.len());
                before
            }
            _ => payload,
        }
    }

    pub(super) fn src_avail(
        &mut self,
        advert: Advert,
        payload: &[u8],
        flags: Flags,
        most: usize,
        notices: &mut VecDeque<Notice>,
    ) -> Result<(), Violation> {
        if self.eof {
            return Err(Violation::AfterDisConn);
        }
        let fits = match self.mode {
            Mode::Buffered => false,
            Mode::Combined => !payload.is_empty() && self.offers.is_empty(),
            Mode::Pipelined => payload.is_empty(),
        };
        if !fits {
            return Err(Violation::AdvertMode);
        }
        if self.is_advertised() {
            // Write has priority over Read when both cross (draft section 11.3).
            return Ok(());
        }
        if self.offers.len() >= most && !seeded(Mistake::AdvertsUnbounded) {
            return Err(Violation::TooManyAdverts);
        }
        self.preposted = !self.wants.is_empty();
        self.payload(payload, flags, notices)?;
        let skip = payload.len() as u32;
        self.offers.push_back(Advert {
            len: advert.len - skip,
            offset: advert.offset.wrapping_add(u64::from(skip)),
            ..advert
        });
        Ok(())
    }

    /// The next RDMA Read: from the oldest offer into the oldest want.
    pub(super) fn take_read(&mut self) -> Option<(Advert, Advert)> {
        let (offer, want) = (self.offers.front()?, self.wants.front()?);
        let free = self.reading.is_none() && self.cancelled.is_none() && !want.advertised;
        if !free || self.expected > 0 || !self.ring.is_empty() {
            return None;
        }
        let len = offer.len.min(want.piece.len);
        self.reading = Some(len);
        Some((Advert { len, ..*offer }, Advert { len, ..want.piece }))
    }

    /// The current RDMA Read is complete.
    pub(super) fn read_done(&mut self, control: &mut VecDeque<Control>, notices: &mut VecDeque<Notice>) {
        let (Some(len), Some(offer)) = (self.reading.take(), self.offers.front_mut()) else { return };
        offer.len = offer.len.saturating_sub(len);
        offer.offset = offer.offset.wrapping_add(u64::from(len));
        let invalidate = (offer.len == 0).then_some(offer.stag);
        if offer.len == 0 {
            self.offers.pop_front();
        }
        if let Some(want) = self.wants.pop_front() {
            notices.push_back(Notice::Received { id: want.id, len, copied: Vec::new() });
        }
        let flags = self.preference();
        control.push_back(Control { message: Message::RdmaRdCompl { len }, flags, invalidate });
        if self.cancelled.take().is_some() {
            self.drop_offers(control);
        }
        self.fill_from_ring(notices);
    }

    /// Drops the SrcAvails that the source has withdrawn, and confirms this if there were any.
    fn drop_offers(&mut self, control: &mut VecDeque<Control>) {
        if !self.offers.is_empty() {
            self.offers.clear();
            control.push_back(Message::SendSm.into());
        }
    }

    pub(super) fn src_cancelled(&mut self, seq: Seq, control: &mut VecDeque<Control>) {
        if self.reading.is_some() {
            self.cancelled = Some(seq);
        } else {
            self.drop_offers(control);
        }
    }

    /// The MSeqAck to send during a cancellation.
    pub(super) fn frozen_ack(&self) -> Option<Seq> {
        self.cancelled.map(|seq| Seq(seq.0.wrapping_sub(1)))
    }

    /// Requests the oldest advertised data in messages; returns false if there is none.
    pub(super) fn force_messages(&mut self, control: &mut VecDeque<Control>) -> bool {
        if self.reading.is_some() || self.cancelled.is_some() {
            return false;
        }
        let Some(offer) = self.offers.pop_front() else { return false };
        self.expected += u64::from(offer.len);
        control.push_back(Message::SendSm.into());
        true
    }

    /// Whether advertised data waits and no receive into memory does.
    pub(super) fn offer_is_unwanted(&self) -> bool {
        self.has_offer() && self.wants.is_empty()
    }

    /// The next SinkAvail, if one may be sent: its buffer and NonDiscards.
    pub(super) fn take_sink_avail(&mut self, own_bytes: u32) -> Option<(Advert, u32)> {
        let may = self.mode == Mode::Pipelined
            && self.offers.is_empty()
            && self.expected == 0
            && self.ring.is_empty()
            && self.cancel == Request::None
            && !self.eof;
        if !may {
            return None;
        }
        let want = self.wants.iter_mut().find(|want| !want.advertised)?;
        if want.brief || want.piece.len <= own_bytes {
            return None;
        }
        want.advertised = true;
        Some((want.piece, self.non_discards))
    }

    pub(super) fn write_completed(
        &mut self,
        len: u32,
        invalidated: Option<u32>,
        notices: &mut VecDeque<Notice>,
    ) -> Result<(), Violation> {
        if !self.is_advertised() {
            return Err(Violation::Completion);
        }
        let Some(want) = self.wants.pop_front() else { return Err(Violation::Completion) };
        if len > want.piece.len {
            return Err(Violation::Completion);
        }
        if invalidated.is_some_and(|stag| stag != want.piece.stag) {
            return Err(Violation::Invalidation);
        }
        notices.push_back(Notice::Received { id: want.id, len, copied: Vec::new() });
        self.settle_cancel(notices);
        Ok(())
    }

    /// Withdraws all receives into memory. [`Notice::Withdrawn`] follows for each, unless it completes first.
    pub(super) fn withdraw(&mut self, control: &mut VecDeque<Control>, notices: &mut VecDeque<Notice>) {
        self.preposted = false;
        let mut keep = self.adverts();
        if self.reading.is_some() {
            keep = keep.max(1);
        }
        for want in self.wants.drain(keep..) {
            notices.push_back(Notice::Withdrawn { id: want.id });
        }
        if self.is_advertised() && self.cancel == Request::None {
            self.cancel = Request::Queued;
            control.push_back(Message::SinkAvailCancel.into());
        }
    }

    /// The cancellation is about to be sent with number `seq`; returns false when nothing is left to cancel.
    pub(super) fn send_cancel(&mut self, seq: Seq) -> bool {
        let useful = self.is_advertised();
        self.cancel = if useful { Request::Sent(seq) } else { Request::None };
        useful
    }

    pub(super) fn cancel_acknowledged(&mut self, ack: Seq, notices: &mut VecDeque<Notice>) {
        if let Request::Sent(seq) = self.cancel
            && ack.since(seq) >= 0
        {
            self.drop_adverts(notices);
        }
    }

    /// The peer has dropped the SinkAvails that we cancelled.
    fn drop_adverts(&mut self, notices: &mut VecDeque<Notice>) {
        while self.is_advertised() {
            if let Some(want) = self.wants.pop_front() {
                notices.push_back(Notice::Withdrawn { id: want.id });
            }
        }
        self.settle_cancel(notices);
    }

    /// None is outstanding, so the cancellation is complete (decision 16).
    fn settle_cancel(&mut self, notices: &mut VecDeque<Notice>) {
        if !self.is_advertised() {
            if matches!(self.cancel, Request::Sent(_)) {
                self.cancel = Request::None;
            }
            self.fill_from_ring(notices);
        }
    }

    /// The source has changed its mode.
    pub(super) fn change_mode(
        &mut self,
        mode: Mode,
        notices: &mut VecDeque<Notice>,
    ) -> Result<(), Violation> {
        match (self.mode, mode) {
            (Mode::Combined, Mode::Buffered) if self.offers.is_empty() => {}
            (Mode::Combined, Mode::Pipelined) => {}
            (Mode::Pipelined, Mode::Combined) => {
                // All SinkAvails are void (draft section 12.4). Receives that were not withdrawn stay, without an
                // advertisement.
                if self.cancel == Request::None {
                    for want in &mut self.wants {
                        want.advertised = false;
                    }
                } else {
                    self.drop_adverts(notices);
                }
            }
            _ => return Err(Violation::ModeChange),
        }
        self.mode = mode;
        Ok(())
    }

    /// Ends Buffered mode, as only the sink can.
    pub(super) fn leave_buffered(&mut self, control: &mut VecDeque<Control>) -> bool {
        if self.mode != Mode::Buffered {
            return false;
        }
        self.mode = Mode::Combined;
        control.push_back(Message::ModeChange { half: Half::Send, mode: Mode::Combined }.into());
        true
    }

    /// The source has closed its direction: SinkAvails are no longer used (draft section 8.2.1).
    pub(super) fn close(&mut self, notices: &mut VecDeque<Notice>) -> Result<(), Violation> {
        if self.eof {
            return Err(Violation::AfterDisConn);
        }
        if !self.offers.is_empty() || self.expected > 0 {
            return Err(Violation::EarlyDisConn);
        }
        self.eof = true;
        for want in &mut self.wants {
            want.advertised = false;
        }
        self.cancel = Request::None;
        self.fill_from_ring(notices);
        Ok(())
    }

    /// Restarts after a suspension: no advertisement, Combined mode. Received data stays, and so do receives into
    /// memory that were not being withdrawn.
    pub(super) fn start_again(&mut self, notices: &mut VecDeque<Notice>) {
        self.mode = Mode::Combined;
        self.offers.clear();
        self.reading = None;
        self.expected = 0;
        self.non_discards = 0;
        self.cancelled = None;
        self.preposted = false;
        if std::mem::replace(&mut self.cancel, Request::None) != Request::None {
            self.drop_adverts(notices);
        }
        for want in &mut self.wants {
            want.advertised = false;
        }
        self.fill_from_ring(notices);
    }

    /// Gives the memory of a receive a new key.
    pub(super) fn rekey(&mut self, id: u64, stag: u32) {
        if let Some(want) = self.wants.iter_mut().find(|want| want.id == id) {
            want.piece.stag = stag;
        }
    }

    /// Discards everything at the end of the connection.
    pub(super) fn abandon(&mut self, notices: &mut VecDeque<Notice>) {
        for want in self.wants.drain(..) {
            notices.push_back(Notice::Withdrawn { id: want.id });
        }
        self.offers.clear();
        self.reading = None;
    }

    /// The number of our SinkAvailCancel, until it is answered.
    pub(super) fn cancel_sent(&self) -> Option<Seq> {
        self.cancel.sent()
    }

    /// Number of unprocessed SrcAvails.
    pub(super) fn offers(&self) -> usize {
        self.offers.len()
    }

    /// Whether a message is only a credit update.
    pub(super) fn is_update(base: &Base, message: &Message, payload: &[u8]) -> bool {
        *message == Message::Data && payload.is_empty() && !base.flags.contains(Flags::OOB_PEND)
    }
}
