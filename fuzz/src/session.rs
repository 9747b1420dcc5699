//! One end of an MPA connection: a session, its environment, and the parts of TCP that it needs.

use xwarp_tcp::{
    framing::{AcceptParams, Carried, FramingError, Taken},
    link::FrameWriter,
    mpa::{MpaConfig, MpaError, Session},
    sim,
    tcp::{Filled, NewPayload},
    time::Instant,
    ulp::{self, ConnId, Event, ListenerId, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
    wire::Path,
};

use crate::link::FuzzLink;

const CONN: ConnId = ConnId { index: 0, generation: 0 };
/// Number of bytes before the payload in every received frame.
const HEADERS: usize = 54;
/// Payload of a full segment, in bytes.
pub const SEGMENT: usize = 1448;

/// An upper layer that records its calls.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Placed ULPDUs, and whether each was delivered.
    pub placed: Vec<(Vec<u8>, bool)>,
    /// Indices into `placed`, in delivery order.
    pub delivered: Vec<usize>,
    /// The events in order.
    pub events: Vec<Event>,
    /// Number of ULPDUs that it accepts in order before it withholds placement.
    pub grants: Option<usize>,
    /// Whether it refuses early placement of ULPDUs that begin with an odd byte.
    pub refuses_early: bool,
}

impl Ulp for Recorder {
    type Placed = usize;

    fn place(&mut self, _: ConnId, ulpdu: &Ulpdu<'_>, arrival: ulp::Arrival) -> Result<usize, Refusal> {
        let mut bytes = vec![0; ulpdu.len()];
        assert_eq!(ulpdu.peek(&mut bytes), bytes.len());
        if arrival == ulp::Arrival::InOrder {
            if let Some(grants) = &mut self.grants {
                *grants = grants.checked_sub(1).ok_or(Refusal::Withhold)?;
            }
        } else if self.refuses_early && bytes.first().is_some_and(|byte| byte % 2 == 1) {
            return Err(Refusal::Withhold);
        }
        self.placed.push((bytes, false));
        Ok(self.placed.len() - 1)
    }

    fn deliver(&mut self, _: ConnId, placed: usize) -> Result<(), Refusal> {
        let delivered = &mut self.placed[placed].1;
        assert!(!std::mem::replace(delivered, true), "delivered twice");
        self.delivered.push(placed);
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, _: ConnId, _: &mut UlpduWriter<'_, '_>) -> Pulled {
        Pulled::Nothing
    }

    fn acked(&mut self, _: ConnId, _: u64) {}

    fn event(&mut self, _: ConnId, event: Event) {
        self.events.push(event);
    }
}

/// A session with its environment and the parts of TCP that it needs.
#[derive(Debug)]
pub struct End {
    /// The session.
    pub session: Session<usize>,
    /// Its upper layer.
    pub ulp: Recorder,
    /// The source of its frames.
    pub link: FuzzLink,
    hold_limit: usize,
    /// For each byte of the peer's stream: whether the session has taken it.
    taken: Vec<bool>,
    /// Offset of the first byte not taken.
    pub contiguous: usize,
}

impl End {
    /// Creates an initiator that has sent its Request, unless streaming data come first.
    pub fn initiator(config: MpaConfig) -> Self {
        let (hold_limit, requests) = (config.hold_bytes, config.streaming.is_none());
        let session = Session::initiator(config, Vec::new(), 4, 4).expect("a valid request");
        let mut end = Self::new(session, hold_limit);
        let mut room = [0; 128];
        let mut out = FrameWriter::new(std::iter::once(&mut room[..]).collect(), 0, 128);
        let filled = end.session.fill(Instant::ZERO, &mut end.ulp, CONN, 0, SEGMENT, &mut out);
        assert_eq!(matches!(filled, Filled::Segment { .. }), requests);
        end
    }

    /// Creates a responder that waits for a Request.
    pub fn responder(config: MpaConfig) -> Self {
        let hold_limit = config.hold_bytes;
        Self::new(Session::responder(Instant::ZERO, config, ListenerId(0)), hold_limit)
    }

    fn new(session: Session<usize>, hold_limit: usize) -> Self {
        let (ulp, link) = (Recorder::default(), FuzzLink::new(usize::MAX));
        Self { session, ulp, link, hold_limit, taken: Vec::new(), contiguous: 0 }
    }

    /// Delivers a segment: trims it like TCP and passes it to the session. Returns whether the session took
    /// it.
    pub fn segment(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let skip = self.contiguous.saturating_sub(offset);
        let Some(payload) = bytes.get(skip..).filter(|bytes| !bytes.is_empty()) else { return true };
        let offset = offset + skip;
        let end = offset + payload.len();
        let contiguous = if offset > self.contiguous {
            self.contiguous
        } else {
            let behind = self.taken.get(end..).unwrap_or_default();
            end.max(self.contiguous) + behind.iter().take_while(|taken| **taken).count()
        };
        let mut frame = vec![0xaa; HEADERS];
        frame.extend_from_slice(payload);
        let frame = self.link.lend(&frame);
        let (offset64, len) = (offset as u64, payload.len());
        let payload =
            NewPayload { offset: offset64, start: HEADERS, len, contiguous: contiguous as u64, pushed: true };
        let (session, ulp, link) = (&mut self.session, &mut self.ulp, &mut self.link);
        let fast = session.allows_fast_path();
        let took = session.receive(
            Instant::ZERO,
            ulp,
            CONN,
            &path(),
            link,
            Carried { payload, frame, spare: usize::MAX, fast },
        );
        assert!(took != Taken::Whole || session.held_bytes() == 0, "bytes are held of a whole payload");
        let took = took != Taken::Not;
        if took {
            self.taken.resize(self.taken.len().max(end), false);
            self.taken[offset..end].fill(true);
            self.contiguous = contiguous;
        }
        self.check_bounds();
        took
    }

    /// Asserts the bound on held data: the limit, one frame, and the FPDU that blocks delivery.
    fn check_bounds(&self) {
        let most = self.hold_limit + 2 * 65_536;
        assert!(self.session.held_bytes() <= most, "{} bytes held", self.session.held_bytes());
        assert!(self.link.lent() <= 256 / 8 + 4, "{} frames held", self.link.lent());
    }

    /// Lets the upper layer accept `more` additional ULPDUs.
    pub fn grant(&mut self, more: usize) {
        if let Some(grants) = &mut self.ulp.grants {
            *grants += more;
            self.session.resume(Instant::ZERO, &mut self.ulp, CONN, &mut self.link);
        }
    }

    /// The errors that the session reported.
    pub fn stream_errors(&self) -> Vec<MpaError> {
        let errors = self.ulp.events.iter();
        errors
            .filter_map(|e| {
                if let Event::StreamError(FramingError::Mpa(error)) = e { Some(*error) } else { None }
            })
            .collect()
    }

    /// Takes up to `most` bytes of streaming data and begins MPA after them.
    pub fn begin_mpa(&mut self, most: usize) {
        let (session, ulp, link) = (&mut self.session, &mut self.ulp, &mut self.link);
        session.report_streaming(Instant::ZERO, ulp, CONN, &path());
        ulp.events.clear();
        let taken = session.stream_recv(link, &mut vec![0; most]).expect("it carries streaming data");
        assert!(taken <= most);
        session
            .begin_mpa(Instant::ZERO, ulp, CONN, &path(), link, b"ack")
            .expect("it carries streaming data");
        self.check_bounds();
    }

    /// Whether a Request waits for a reply.
    pub fn requested(&self) -> bool {
        self.session.failed().is_none() && matches!(self.ulp.events[..], [Event::Requested { .. }])
    }

    /// Accepts the Request.
    pub fn accept(&mut self) {
        let params = AcceptParams { ird: 4, ord: 4, private_data: Vec::new() };
        let accepted = self.session.accept(&mut self.ulp, CONN, &path(), params);
        accepted.expect("a request can be accepted");
    }

    /// Delivers the peer's FIN.
    pub fn peer_closed(&mut self) {
        if !self.session.holds_undelivered() {
            self.session.peer_closed(&mut self.ulp, CONN, &mut self.link);
        }
    }

    /// Ends the session and checks that no frame is left.
    pub fn over(mut self) {
        self.session.release(&mut self.link);
        assert_eq!(self.link.lent(), 0, "frames leaked");
        assert_eq!(self.session.held_bytes(), 0);
    }
}

fn path() -> Path {
    sim::path(([10, 0, 0, 1], 4000), ([10, 0, 0, 2], 4000))
}
