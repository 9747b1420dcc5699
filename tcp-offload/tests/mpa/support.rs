//! Support for tests of sessions: a link that counts its frames, an upper layer that records everything, one end of a
//! connection that stands in for TCP, and an independent byte-by-byte framing of RFC 5044.

use std::collections::VecDeque;

use slab::Slab;
use xwarp_tcp::{
    framing::{self, AcceptParams, Carried, FramingError, SetupError, Taken},
    link::{ChunksMut, FrameWriter, Link, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame},
    mpa::{Agreed, Markers, MpaConfig, MpaError, Session},
    sim,
    tcp::{Filled, NewPayload},
    time::Instant,
    ulp::{self, ConnId, Event, ListenerId, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
    wire::Path,
};

pub const CONN: ConnId = ConnId { index: 7, generation: 1 };
pub const LISTENER: ListenerId = ListenerId(3);

/// Bytes before the payload in every received frame.
pub const HEADERS: usize = 54;

/// A link with a receive side only.
#[derive(Default)]
pub struct TestLink {
    frames: Slab<Vec<Vec<u8>>>,
    /// Bytes per chunk; 0 means one chunk per frame.
    pub chunk: usize,
    pub rx_chunks: usize,
}

impl TestLink {
    pub fn lend(&mut self, payload: &[u8]) -> RxFrame {
        let mut bytes = vec![0xaa; HEADERS];
        bytes.extend_from_slice(payload);
        let len = bytes.len() as u32;
        let chunk = if self.chunk == 0 { bytes.len() } else { self.chunk.max(HEADERS) };
        let chunks: Vec<_> = bytes.chunks(chunk).map(<[u8]>::to_vec).collect();
        let count = chunks.len() as u16;
        RxFrame::new(self.frames.insert(chunks) as u32, count, len, QueueId(0))
    }

    /// Frames that were lent and not recycled.
    pub fn lent(&self) -> usize {
        self.frames.len()
    }
}

impl Link for TestLink {
    fn chunk_bytes(&self) -> usize {
        4096
    }
    fn tx_available(&self) -> usize {
        0
    }
    fn rx_capacity(&self) -> usize {
        self.rx_chunks
    }

    fn rx_available(&self, _queue: QueueId) -> usize {
        self.rx_chunks.saturating_sub(self.lent())
    }
    fn receive(&mut self, _: &mut Vec<RxFrame>, _: usize) -> usize {
        0
    }
    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        self.frames[frame.head() as usize].iter().map(Vec::as_slice).collect()
    }
    fn recycle(&mut self, frame: RxFrame) {
        self.frames.remove(frame.head() as usize);
    }
    fn alloc(&mut self, _: usize) -> Option<TxFrame> {
        None
    }
    fn tx_chunks_into<'a>(&'a mut self, _: &mut TxFrame, _: &mut ChunksMut<'a>) -> bool {
        false
    }
    fn submit(&mut self, _: QueueId, _: &mut TxFrame, _: usize) -> Result<(), RingFull> {
        Err(RingFull)
    }
    fn release(&mut self, _: TxFrame) {}
    fn flush(&mut self) {}
    fn steer(&mut self, _: Steer) -> Result<(), SteerError> {
        Ok(())
    }
    fn unsteer(&mut self, _: Steer) {}
}

/// One ULPDU as it was placed.
#[derive(Debug, Clone)]
pub struct Placement {
    pub bytes: Vec<u8>,
    pub early: bool,
    pub delivered: bool,
}

/// An upper layer that records everything.
#[derive(Default)]
pub struct TestUlp {
    pub placed: Vec<Placement>,
    pub delivered: Vec<Vec<u8>>,
    pub events: Vec<Event>,
    pub to_send: VecDeque<Vec<u8>>,
    pub finish: bool,
    /// `(start, end)` of each ULPDU pulled, as the writer reported them.
    pub pulled: Vec<(u64, u64)>,
    pub mulpdu: usize,
    /// ULPDUs that may be placed in order before the upper layer withholds.
    pub receives: Option<usize>,
    /// Whether early ULPDUs need none of these receives, like tagged messages; otherwise they are refused.
    pub early_needs_no_receive: bool,
    /// ULPDUs that may be delivered before the upper layer withholds.
    pub deliveries: Option<usize>,
    /// Refuses to place early ULPDUs that begin with an odd byte.
    pub refuses_odd_early: bool,
    /// Stops at the ULPDU of this number.
    pub stop_at: Option<usize>,
}

impl Ulp for TestUlp {
    type Placed = usize;

    fn place(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: ulp::Arrival) -> Result<usize, Refusal> {
        assert_eq!(conn, CONN);
        let mut bytes = vec![0; ulpdu.len()];
        assert_eq!(ulpdu.peek(&mut bytes), bytes.len());
        let early = arrival == ulp::Arrival::Early;
        if early && self.refuses_odd_early && bytes.first().is_some_and(|b| b % 2 == 1) {
            return Err(if bytes.len() % 2 == 1 { Refusal::Stop } else { Refusal::Withhold });
        }
        if !early && self.stop_at == Some(self.delivered.len()) {
            return Err(Refusal::Stop);
        }
        if let Some(receives) = &mut self.receives {
            match early {
                false => *receives = receives.checked_sub(1).ok_or(Refusal::Withhold)?,
                true if self.early_needs_no_receive => {}
                true => return Err(Refusal::Withhold),
            }
        }
        self.placed.push(Placement { bytes, early, delivered: false });
        Ok(self.placed.len() - 1)
    }

    fn take(&mut self, conn: ConnId, ulpdu: &Ulpdu<'_>) -> Result<(), Refusal> {
        if self.deliveries == Some(0) {
            return Err(Refusal::Withhold);
        }
        let placed = self.place(conn, ulpdu, ulp::Arrival::InOrder)?;
        self.deliver(conn, placed)
    }

    fn deliver(&mut self, conn: ConnId, placed: usize) -> Result<(), Refusal> {
        assert_eq!(conn, CONN);
        if let Some(deliveries) = &mut self.deliveries {
            *deliveries = deliveries.checked_sub(1).ok_or(Refusal::Withhold)?;
        }
        let placement = &mut self.placed[placed];
        assert!(!std::mem::replace(&mut placement.delivered, true), "delivered twice");
        self.delivered.push(placement.bytes.clone());
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        assert_eq!(conn, CONN);
        self.mulpdu = out.mulpdu();
        let Some(next) = self.to_send.front() else {
            return if self.finish { Pulled::Finish } else { Pulled::Nothing };
        };
        if next.len() > out.room() {
            return Pulled::Nothing;
        }
        let start = out.end();
        // One half is copied, the other half is filled into the frame's memory in place.
        let (head, tail) = next.split_at(next.len() / 2);
        // The correct length is announced, none, or a wrong one: the FPDU is the same.
        match next.len() % 3 {
            0 => out.announce(next.len()),
            1 => {}
            _ => out.announce(next.len() - 1),
        }
        out.put(head);
        out.fill(tail.len(), |at, space| space.copy_from_slice(&tail[at..at + space.len()]));
        assert_eq!(out.written(), next.len());
        assert!(out.end() >= start);
        self.pulled.push((start, out.end()));
        self.to_send.pop_front();
        Pulled::Ulpdu
    }

    fn acked(&mut self, _: ConnId, _: u64) {}

    fn event(&mut self, conn: ConnId, event: Event) {
        assert_eq!(conn, CONN);
        self.events.push(event);
    }
}

impl TestUlp {
    pub fn stream_errors(&self) -> Vec<MpaError> {
        let errors = self.events.iter();
        errors
            .filter_map(|e| {
                if let Event::StreamError(FramingError::Mpa(error)) = e { Some(*error) } else { None }
            })
            .collect()
    }

    pub fn established(&self) -> Option<Agreed> {
        self.events.iter().find_map(|e| {
            if let Event::Established { agreed: framing::Agreed::Mpa(agreed), .. } = e {
                Some(*agreed)
            } else {
                None
            }
        })
    }
}

pub fn path() -> Path {
    sim::path(([10, 0, 0, 1], 4000), ([10, 0, 0, 2], 4000))
}

/// One end of a connection: the session, its link and upper layer, and the few functions of TCP that it needs.
pub struct End {
    pub session: Session<usize>,
    pub ulp: TestUlp,
    pub link: TestLink,
    pub now: Instant,
    /// All bytes that this end has sent.
    pub sent: Vec<u8>,
    /// Whether each byte of the peer's stream was taken.
    pub taken: Vec<bool>,
    /// The first byte not taken.
    pub contiguous: usize,
}

impl End {
    pub fn new(session: Session<usize>) -> Self {
        Self {
            session,
            ulp: TestUlp::default(),
            link: TestLink { rx_chunks: 4096, ..TestLink::default() },
            now: Instant::ZERO,
            sent: Vec::new(),
            taken: Vec::new(),
            contiguous: 0,
        }
    }

    pub fn initiator(config: MpaConfig) -> Self {
        Self::new(Session::initiator(config, b"hello".to_vec(), 16, 8).unwrap())
    }

    pub fn responder(config: MpaConfig) -> Self {
        Self::new(Session::responder(Instant::ZERO, config, LISTENER))
    }

    /// One segment of at most `room` bytes.
    pub fn fill(&mut self, emss: usize, room: usize) -> Result<Vec<u8>, Filled> {
        let (mut first, mut second) = (vec![0xee; HEADERS + room / 3], vec![0xee; room - room / 3]);
        let chunks = ChunksMut::from_iter([&mut first[..], &mut second[..]]);
        let mut out = FrameWriter::new(chunks, HEADERS, HEADERS + room);
        let offset = self.sent.len() as u64;
        let filled = self.session.fill(self.now, &mut self.ulp, CONN, offset, emss, &mut out);
        drop(out);
        match filled {
            Filled::Segment { len, more } => {
                assert!(len > 0 && len <= room);
                assert!(more || !self.session.has_data(&self.ulp, CONN));
                first.extend_from_slice(&second);
                let payload = first[HEADERS..HEADERS + len].to_vec();
                self.sent.extend_from_slice(&payload);
                Ok(payload)
            }
            other => Err(other),
        }
    }

    /// All segments that this end has to send.
    pub fn fill_all(&mut self, emss: usize) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.fill(emss, emss).ok()).collect()
    }

    /// Trims an arriving segment as TCP does and passes it to the session. Returns whether the session took it.
    pub fn receive(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let skip = self.contiguous.saturating_sub(offset);
        let Some(payload) = bytes.get(skip..).filter(|b| !b.is_empty()) else { return true };
        let offset = offset + skip;
        let mut taken = self.taken.clone();
        taken.resize(taken.len().max(offset + payload.len()), false);
        taken[offset..offset + payload.len()].fill(true);
        let contiguous = taken.iter().position(|t| !t).unwrap_or(taken.len());
        let frame = self.link.lend(payload);
        let payload = NewPayload {
            offset: offset as u64,
            start: HEADERS,
            len: payload.len(),
            contiguous: contiguous as u64,
            pushed: true,
        };
        let path = path();
        let (session, ulp, link) = (&mut self.session, &mut self.ulp, &mut self.link);
        let carried = Carried { payload, frame, spare: usize::MAX, fast: session.allows_fast_path() };
        let took = session.receive(self.now, ulp, CONN, &path, link, carried);
        let held = session.held_bytes() > 0 || session.holds_undelivered() || !session.is_reading();
        assert!(
            took != Taken::Whole || !held,
            "TCP's window does not follow what is held after a whole payload"
        );
        if took != Taken::Not {
            (self.taken, self.contiguous) = (taken, contiguous);
        }
        took != Taken::Not
    }

    pub fn resume(&mut self) {
        self.session.resume(self.now, &mut self.ulp, CONN, &mut self.link);
    }

    /// Reports a connection that carries streaming data.
    pub fn report_streaming(&mut self) {
        self.session.report_streaming(self.now, &mut self.ulp, CONN, &path());
    }

    /// Streaming bytes of the peer, at most `most`.
    pub fn stream_recv(&mut self, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let len = self.session.stream_recv(&mut self.link, &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    pub fn begin_mpa(&mut self, last: &[u8]) -> Result<(), SetupError> {
        self.session.begin_mpa(self.now, &mut self.ulp, CONN, &path(), &mut self.link, last)
    }

    pub fn accept(&mut self) {
        let params = AcceptParams { ird: 32, ord: 4, private_data: b"welcome".to_vec() };
        self.session.accept(&mut self.ulp, CONN, &path(), params).unwrap();
    }

    pub fn peer_closed(&mut self) {
        self.session.peer_closed(&mut self.ulp, CONN, &mut self.link);
    }

    pub fn on_timer(&mut self) {
        self.session.on_timer(self.now, &mut self.ulp, CONN, &mut self.link);
    }
}

/// Two ends in full operation. The first is the initiator.
pub fn connected(markers: bool, crc: bool) -> (End, End) {
    let markers = if markers { Markers::Prefer } else { Markers::Off };
    let config = MpaConfig { markers, crc, ..MpaConfig::default() };
    connect(End::initiator(config.clone()), End::responder(config))
}

/// Runs the start-up.
pub fn connect(mut initiator: End, mut responder: End) -> (End, End) {
    for segment in initiator.fill_all(1448) {
        let offset = responder.contiguous;
        assert!(responder.receive(offset, &segment));
    }
    responder.accept();
    for segment in responder.fill_all(1448) {
        let offset = initiator.contiguous;
        assert!(initiator.receive(offset, &segment));
    }
    assert!(initiator.ulp.established().is_some() && responder.ulp.established().is_some());
    (initiator, responder)
}

/// FPDUs as RFC 5044 section 4 describes them, one byte after the other.
pub struct Reference {
    pub bytes: Vec<u8>,
    /// Begin and end of each FPDU's range.
    pub ranges: Vec<(usize, usize)>,
}

impl Reference {
    pub fn new(ulpdus: &[Vec<u8>], markers: bool, crc: bool) -> Self {
        let mut this = Self { bytes: Vec::new(), ranges: Vec::new() };
        for ulpdu in ulpdus {
            let start = this.bytes.len();
            if markers && start.is_multiple_of(512) {
                this.bytes.extend_from_slice(&[0; 4]);
            }
            let header = this.bytes.len();
            this.push(&(ulpdu.len() as u16).to_be_bytes(), header, markers);
            this.push(ulpdu, header, markers);
            this.push(&vec![0; (4 - (ulpdu.len() + 2) % 4) % 4], header, markers);
            this.push(&[], header, markers);
            let sum = if crc { crc32c::crc32c(&this.bytes[start..]) } else { 0 };
            this.bytes.extend_from_slice(&sum.to_le_bytes());
            this.ranges.push((start, this.bytes.len()));
        }
        this
    }

    /// Appends bytes, with the marker in front that is due before the next byte of this FPDU.
    fn push(&mut self, bytes: &[u8], header: usize, markers: bool) {
        for byte in bytes.iter().map(Some).chain([None]) {
            let at = self.bytes.len();
            if markers && at.is_multiple_of(512) && at > header {
                self.bytes.extend_from_slice(&[0, 0]);
                self.bytes.extend_from_slice(&((at - header) as u16).to_be_bytes());
            }
            self.bytes.extend(byte);
        }
    }
}

/// ULPDUs with different contents.
pub fn ulpdus(lengths: &[usize]) -> Vec<Vec<u8>> {
    let byte = |n: usize, at: usize| (n * 37 + at * 7 + at / 251) as u8;
    lengths.iter().enumerate().map(|(n, &len)| (0..len).map(|at| byte(n, at)).collect()).collect()
}
