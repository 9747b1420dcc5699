//! Two connections over a virtual wire with faults; every byte taken is compared with the pattern.

use std::sync::Arc;

use super::{Stream, at_ms, path, pattern, unhashed};
use crate::{
    link::{Link, RxFrame, rx_pieces},
    seq::StreamOffset,
    sim::{Faults, SimLink, Wire, WireConfig},
    tcp::{Connection, Info, State, TcpConfig},
    time::Instant,
    ulp::CloseReason,
    wire::{Inbound, Segment, parse},
};

/// One end: its link, its connection, the stream that it sends, and its progress.
pub(crate) struct End {
    pub link: SimLink,
    pub conn: Option<Connection>,
    pub config: TcpConfig,
    pub source: Stream,
    /// Bytes of the peer's stream taken in order.
    pub taken: StreamOffset,
    pub acked: StreamOffset,
    pub established: bool,
    pub closed: Option<CloseReason>,
    /// Payload is not taken, as by a framing layer that may hold no more.
    pub refuse: bool,
    pub bad_frames: u64,
    here: bool,
    isn: u32,
}

impl End {
    pub(crate) fn conn(&self) -> &Connection {
        self.conn.as_ref().expect("a connection")
    }

    pub(crate) fn state(&self) -> State {
        self.conn.as_ref().map_or(State::Closed, Connection::state)
    }

    fn receive(&mut self, now: Instant) -> bool {
        let mut batch = Vec::new();
        self.link.receive(&mut batch, 64);
        let any = !batch.is_empty();
        for frame in batch {
            match parse(&self.link, &frame) {
                Ok(Inbound::Tcp(segment)) => self.segment(now, &segment, &frame),
                Ok(_) => {}
                Err(_) => self.bad_frames += 1,
            }
            self.link.recycle(frame);
        }
        any
    }

    fn segment(&mut self, now: Instant, segment: &Segment, frame: &RxFrame) {
        if self.conn.is_none() && segment.flags.is_plain_syn() {
            self.conn = Some(Connection::accept(
                now,
                &Arc::new(self.config),
                path(self.here),
                segment,
                unhashed(self.isn),
            ));
            return;
        }
        let Some(conn) = &mut self.conn else { return };
        let receipt = conn.receive_one(now, &mut self.link, segment);
        self.established |= receipt.established;
        self.closed = self.closed.or(receipt.closed);
        if let Some(acked) = receipt.acked {
            assert!(acked >= self.acked && acked <= self.source.at);
            self.acked = acked;
        }
        let Some(arrival) = receipt.arrival else { return };
        assert!(arrival.len > 0 && arrival.offset >= conn.contiguous());
        let bytes: Vec<u8> = rx_pieces(&self.link, frame, arrival.start, arrival.len)
            .iter()
            .flat_map(|p| p.to_vec())
            .collect();
        assert_eq!(bytes.len(), arrival.len);
        for (i, byte) in bytes.iter().enumerate() {
            assert_eq!(
                *byte,
                pattern(arrival.offset + i as u64),
                "byte {} of the stream",
                arrival.offset + i as u64
            );
        }
        if self.refuse {
            return;
        }
        conn.payload_taken(now, &arrival);
        assert_eq!(conn.contiguous(), arrival.contiguous);
        self.taken = conn.contiguous();
    }

    fn transmit(&mut self, now: Instant) -> bool {
        let Some(conn) = &mut self.conn else { return false };
        let mut any = false;
        loop {
            let sent = conn.transmit(now, &mut self.link, &mut self.source, 32);
            self.closed = self.closed.or(sent.closed);
            self.link.flush();
            any |= sent.frames > 0;
            let again = sent.more || sent.starved && sent.frames > 0;
            if !again {
                return any;
            }
        }
    }

    fn on_timer(&mut self, now: Instant) {
        if let Some(conn) = &mut self.conn
            && conn.deadline().is_some_and(|d| d <= now)
        {
            self.closed = self.closed.or(conn.on_timer(now));
        }
    }

    /// Releases the connection's frames; none may be missing.
    pub(crate) fn tear_down(&mut self) {
        if let Some(conn) = &mut self.conn {
            conn.release(&mut self.link);
        }
        self.link.flush();
        let census = self.link.census();
        assert_eq!((census.tx_out, census.rx_out), (0, 0), "frames leaked");
    }
}

/// Two ends and the wire between them.
pub(crate) struct Pair {
    pub wire: Wire,
    pub now: Instant,
    pub ends: [End; 2],
}

impl Pair {
    /// Two ends that are not connected yet; call [`Pair::open`].
    pub(crate) fn new(
        configs: &[TcpConfig; 2],
        faults: &[Faults; 2],
        sources: [Stream; 2],
        seed: u64,
    ) -> Self {
        let (wire, a, b) = Wire::new(WireConfig {
            faults: *faults,
            seed,
            tx_chunks: 2048,
            rx_chunks: 2048,
            ..WireConfig::default()
        });
        let end = |link, config, source, here| End {
            link,
            conn: None,
            config,
            source,
            taken: 0,
            acked: 0,
            established: false,
            closed: None,
            refuse: false,
            bad_frames: 0,
            here,
            // Close to wrapping, so that the tests cover the wrap.
            isn: if here { 0xffff_f000 } else { 0x7fff_ff00 },
        };
        let [ca, cb] = *configs;
        let [sa, sb] = sources;
        Self { wire, now: at_ms(1), ends: [end(a, ca, sa, true), end(b, cb, sb, false)] }
    }

    /// Two ends with default settings, without faults but with 50 us of delay.
    pub(crate) fn plain(total: [u64; 2]) -> Self {
        let faults = Faults { delay: super::us(50), ..Faults::default() };
        let stream = |n| Stream::new(n, 0, false);
        Self::new(&[TcpConfig::default(); 2], &[faults; 2], total.map(stream), 1)
    }

    /// Starts an active open at `end`.
    pub(crate) fn open(&mut self, end: usize) {
        let end = &mut self.ends[end];
        end.conn =
            Some(Connection::connect(self.now, &Arc::new(end.config), path(end.here), unhashed(end.isn)));
    }

    /// One turn at the current time. Returns whether anything moved.
    pub(crate) fn turn(&mut self) -> bool {
        self.wire.advance(self.now);
        let mut any = false;
        for end in &mut self.ends {
            let received = end.receive(self.now);
            end.on_timer(self.now);
            let mut sent = end.transmit(self.now);
            if !received && end.conn.as_mut().is_some_and(Connection::flush_ack) {
                sent |= end.transmit(self.now);
            }
            any |= received | sent;
        }
        any
    }

    /// Turns until nothing moves any more at the current time.
    fn spin(&mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < 100_000, "the connections spin");
        }
    }

    /// Advances the clock to the next event. Returns false when there is none.
    fn advance(&mut self) -> bool {
        let timers = self.ends.iter().filter_map(|e| e.conn.as_ref()?.deadline());
        let next = timers.chain(self.wire.next_arrival()).min();
        match next {
            Some(next) => {
                assert!(next > self.now, "a timer that is due was not served: {:?}", self.now);
                self.now = next;
                true
            }
            None => false,
        }
    }

    fn info(&self) -> Vec<Option<Info>> {
        self.ends.iter().map(|e| e.conn.as_ref().map(Connection::info)).collect()
    }

    /// Runs until `done` returns true; panics after `limit`.
    pub(crate) fn run_until(&mut self, limit: Instant, mut done: impl FnMut(&mut Self) -> bool) {
        self.spin();
        while !done(self) {
            assert!(self.now <= limit, "not done at {:?}: {:#?}", self.now, self.info());
            assert!(self.advance(), "nothing more happens at {:?}: {:#?}", self.now, self.info());
            self.spin();
        }
    }

    /// Runs until both streams have arrived and are acknowledged.
    pub(crate) fn run_to_the_end(&mut self, limit: Instant) {
        self.run_until(limit, |p| {
            let [a, b] = &p.ends;
            a.acked == a.source.total && b.acked == b.source.total && a.established && b.established
        });
        let [a, b] = &self.ends;
        assert_eq!((a.taken, b.taken), (b.source.total, a.source.total));
    }

    pub(crate) fn tear_down(&mut self) {
        for end in &mut self.ends {
            end.tear_down();
        }
    }
}
