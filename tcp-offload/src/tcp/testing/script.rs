//! One connection and hand-made segments at exact times, in the manner of packetdrill.

use std::sync::Arc;

use super::{Stream, at_ms, path, pattern, unhashed};
use crate::{
    link::{Link, rx_pieces},
    seq::SeqNum,
    sim::{CongestionCheck, SimLink, Wire, WireConfig},
    tcp::{Connection, Receipt, State, TcpConfig},
    time::Instant,
    ulp::CloseReason,
    wire::{
        Ecn, Fields, Flags, Headers, Inbound, MAX_HEADER_BYTES, Options, Path, SackBlock, Segment, Sum,
        Timestamps, parse,
    },
};

/// Our initial sequence number in scripts, and the peer's.
pub(crate) const ISS: u32 = 1000;
pub(crate) const IRS: u32 = 5000;

/// A connection under test, and its peer's end of the wire.
pub(crate) struct Script {
    wire: Wire,
    link: SimLink,
    peer: SimLink,
    headers: Headers,
    pub conn: Connection,
    pub source: Stream,
    pub now: Instant,
    /// Header fields of the peer's next segments.
    pub template: Fields,
    pub closed: Option<CloseReason>,
    acked: u64,
    check: CongestionCheck,
    /// Whether arriving payload is taken.
    pub take: bool,
}

impl Script {
    fn new(conn: Connection, now: Instant, source: Stream, wire: (Wire, SimLink, SimLink)) -> Self {
        let (wire, link, peer) = wire;
        let template = Fields {
            seq: SeqNum::new(IRS + 1),
            ack: SeqNum::new(ISS + 1),
            flags: Flags { ack: true, ..Flags::default() },
            window: 65_535,
            options: Options::default(),
            ecn: Ecn::NotEct,
        };
        let headers = Headers::new(&path(false));
        Self {
            wire,
            link,
            peer,
            headers,
            conn,
            source,
            now,
            template,
            closed: None,
            acked: 0,
            check: CongestionCheck::default(),
            take: true,
        }
    }

    /// The links of a script.
    pub(crate) fn links() -> WireConfig {
        WireConfig { tx_chunks: 256, rx_chunks: 256, ..WireConfig::default() }
    }

    /// An active open whose SYN has not been sent yet.
    pub(crate) fn connecting(config: TcpConfig, source: Stream) -> Self {
        Self::connecting_over(&Self::links(), path(true).mtu, config, source)
    }

    /// An active open over other links and a path with another MTU. Its SYN has not been sent yet.
    pub(crate) fn connecting_over(links: &WireConfig, mtu: u16, config: TcpConfig, source: Stream) -> Self {
        let now = at_ms(100);
        let path = Path { mtu, ..path(true) };
        let conn = Connection::connect(now, &Arc::new(config), path, unhashed(ISS));
        Self::new(conn, now, source, Wire::new(*links))
    }

    /// A passive open by a SYN with `options`.
    pub(crate) fn accepting(config: TcpConfig, options: Options) -> Self {
        let now = at_ms(100);
        let (wire, link, mut peer) = Wire::new(Self::links());
        let flags = Flags { syn: true, ..Flags::default() };
        let syn = Fields { seq: SeqNum::new(IRS), flags, window: 65_535, options, ..Fields::default() };
        send(&mut peer, &Headers::new(&path(false)), &syn, 0, 0);
        let mut link = link;
        let (segment, _) = receive(&mut link).pop().expect("the SYN");
        let conn = Connection::accept(now, &Arc::new(config), path(true), &segment, unhashed(ISS));
        Self::new(conn, now, Stream::new(0, 0, false), (wire, link, peer))
    }

    /// An established connection: MSS 1000 both ways, no scaling, no timestamps, SACK as `config` says, window 65535.
    pub(crate) fn established(config: TcpConfig, source: Stream) -> Self {
        Self::established_over(&Self::links(), config, source)
    }

    /// A connection as [`Script::established`] makes it, over other links.
    pub(crate) fn established_over(links: &WireConfig, config: TcpConfig, source: Stream) -> Self {
        let config = TcpConfig { timestamps: false, ..config };
        let mut script = Self::connecting_over(links, path(true).mtu, config, source);
        script.run();
        let options = Options { mss: Some(1000), sack_permitted: config.sack, ..Options::default() };
        script.syn_ack(options);
        assert_eq!(script.conn.state(), State::Established);
        script
    }

    /// The peer's SYN-ACK, 1 ms after the SYN.
    pub(crate) fn syn_ack(&mut self, options: Options) {
        self.syn_ack_after(super::ms(1), options);
    }

    /// The peer's SYN-ACK, `delay` after the SYN.
    pub(crate) fn syn_ack_after(&mut self, delay: std::time::Duration, options: Options) {
        self.now += delay;
        let flags = Flags { syn: true, ack: true, ..Flags::default() };
        self.inject(Fields { seq: SeqNum::new(IRS), flags, options, ..self.template }, 0);
        if options.timestamps.is_none() {
            self.template.options = Options::default();
        }
    }

    /// The peer sends a segment; the connection receives it and then may send.
    pub(crate) fn inject(&mut self, fields: Fields, payload: usize) -> Receipt {
        let offset = i64::from(fields.seq.since(SeqNum::new(IRS + 1)));
        send(&mut self.peer, &self.headers, &fields, payload, offset);
        let mut last = Receipt::default();
        for (segment, payload) in receive(&mut self.link) {
            last = self.conn.receive_one(self.now, &mut self.link, &segment);
            self.closed = self.closed.or(last.closed);
            self.acked = self.acked.max(last.acked.unwrap_or(0));
            if let Some(arrival) = last.arrival.filter(|_| self.take) {
                let skip = arrival.start - segment.payload_start;
                assert_eq!(payload[skip], pattern(arrival.offset), "the payload is where the arrival says");
                self.conn.payload_taken(self.now, &arrival);
            }
        }
        last
    }

    /// Like [`Script::inject`], but the payload is not compared with the pattern.
    pub(crate) fn inject_anything(&mut self, fields: Fields, payload: usize) {
        send(&mut self.peer, &self.headers, &fields, payload, 0);
        for (segment, _) in receive(&mut self.link) {
            let receipt = self.conn.receive_one(self.now, &mut self.link, &segment);
            if let Some(arrival) = receipt.arrival {
                assert!(arrival.start >= segment.payload_start);
                assert!(arrival.start + arrival.len <= segment.payload_start + segment.payload_len);
                self.conn.payload_taken(self.now, &arrival);
                assert_eq!(self.conn.contiguous(), arrival.contiguous);
            }
        }
    }

    /// Whether `syn`, which the connection does not receive, may replace it.
    pub(crate) fn replaceable_by(&mut self, syn: Fields) -> bool {
        send(&mut self.peer, &self.headers, &syn, 0, 0);
        receive(&mut self.link).iter().any(|(segment, _)| self.conn.replaceable_by(segment))
    }

    /// Limits the chunks that our transmit ring takes in one run: a segment that needs more is not sent.
    pub(crate) fn limit_ring(&mut self, chunks: usize) {
        self.link.set_ring(chunks);
    }

    /// Moves all payloads to the heap; see [`Connection::spill`].
    pub(crate) fn spill(&mut self) -> usize {
        self.conn.spill(&mut self.link, self.now, usize::MAX)
    }

    /// The offset up to which the peer has acknowledged our stream.
    pub(crate) fn acked(&self) -> u64 {
        self.acked
    }

    /// Releases the connection's frames; none may be missing.
    pub(crate) fn tear_down(&mut self) {
        self.conn.release(&mut self.link);
        self.link.flush();
        let census = self.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "frames leaked");
    }

    /// Injects a segment as [`Script::inject`] does, and returns the segments sent in response.
    pub(crate) fn exchange(&mut self, fields: Fields, payload: usize) -> Vec<Segment> {
        self.inject(fields, payload);
        self.run()
    }

    /// Injects a pure ACK of our stream up to `offset`, with SACK blocks as offsets, and returns the segments sent in
    /// response.
    pub(crate) fn ack(&mut self, offset: u32, sack: &[(u32, u32)]) -> Vec<Segment> {
        let mut fields = Fields { ack: SeqNum::new(ISS + 1).add(offset), ..self.template };
        for (to, (left, right)) in fields.options.sack.iter_mut().zip(sack) {
            let seq = |o: &u32| SeqNum::new(ISS + 1).add(*o);
            *to = SackBlock { left: seq(left), right: seq(right) };
        }
        fields.options.sack_count = sack.len() as u8;
        self.exchange(fields, 0)
    }

    /// Injects data of the peer's stream at `offset`, and returns the segments sent in response.
    pub(crate) fn data(&mut self, offset: u32, len: usize) -> Vec<Segment> {
        self.exchange(Fields { seq: SeqNum::new(IRS + 1).add(offset), ..self.template }, len)
    }

    /// Sends the segments that are due now, and returns those that the peer receives.
    pub(crate) fn run(&mut self) -> Vec<Segment> {
        self.run_with_room(64)
    }

    pub(crate) fn run_with_room(&mut self, room: usize) -> Vec<Segment> {
        self.wire.advance(self.now);
        let sent = self.conn.transmit(self.now, &mut self.link, &mut self.source, room);
        self.closed = self.closed.or(sent.closed);
        self.link.flush();
        self.check.observe(&self.conn.info(), self.acked);
        receive(&mut self.peer)
            .into_iter()
            .map(|(s, payload)| {
                for (i, byte) in payload.iter().enumerate() {
                    let offset = i64::from(s.seq.since(SeqNum::new(ISS + 1))) as u64 + i as u64;
                    assert_eq!(*byte, pattern(offset), "a byte that has a sequence number never changes");
                }
                s
            })
            .collect()
    }

    /// Advances the clock by `time` and fires the timers on time. Returns the segments that the peer receives, with
    /// their times in microseconds from now.
    pub(crate) fn wait(&mut self, time: std::time::Duration) -> Vec<(u64, Segment)> {
        let start = self.now;
        let end = start + time;
        let mut seen = Vec::new();
        while let Some(next) = self.conn.deadline().filter(|d| *d <= end) {
            self.now = self.now.max(next);
            self.closed = self.closed.or(self.conn.on_timer(self.now));
            let next = self.conn.deadline();
            assert!(next.is_none_or(|at| at > self.now), "a timer was armed at or before now: {next:?}");
            let after = self.now.since(start).as_micros() as u64;
            seen.extend(self.run().into_iter().map(|s| (after, s)));
            assert!(seen.len() < 10_000, "a timer spins");
        }
        self.now = end;
        seen
    }

    /// Sets the timestamp option of the peer's next segments.
    pub(crate) fn stamp(&mut self, value: u32, echo: u32) {
        self.template.options.timestamps = Some(Timestamps { value, echo });
    }
}

/// The stream offset of a segment that we sent.
pub(crate) fn offset(segment: &Segment) -> i32 {
    segment.seq.since(SeqNum::new(ISS + 1))
}

fn send(link: &mut SimLink, headers: &Headers, fields: &Fields, payload: usize, offset: i64) {
    let payload: Vec<u8> = (0..payload as i64).map(|i| pattern((offset + i) as u64)).collect();
    let mut frame = vec![0; MAX_HEADER_BYTES];
    let len = headers.emit(&mut frame, fields, payload.len(), Sum::of(&payload)).expect("room");
    frame.truncate(len);
    frame.extend(payload);
    link.inject(&frame);
}

fn receive(link: &mut SimLink) -> Vec<(Segment, Vec<u8>)> {
    let mut batch = Vec::new();
    link.receive(&mut batch, 256);
    batch
        .into_iter()
        .map(|frame| {
            let parsed = parse(link, &frame);
            let Ok(Inbound::Tcp(segment)) = parsed else { panic!("not TCP: {parsed:?}") };
            let pieces = rx_pieces(link, &frame, segment.payload_start, segment.payload_len);
            let payload = pieces.iter().flat_map(|p| p.to_vec()).collect();
            drop(pieces);
            link.recycle(frame);
            (segment, payload)
        })
        .collect()
}
