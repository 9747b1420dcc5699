//! [`End`]: a stack on any link, with an upper layer that numbers its ULPDUs and checks that each is placed once with
//! the right bytes and delivered once, in order. It panics on errors, because it is part of tests.

use std::collections::BTreeMap;

use super::{Node, congestion::CongestionCheck};
use crate::{
    framing::{AcceptParams, Offer},
    link::{Batch, Link},
    seq::StreamOffset,
    stack::{Stack, StackConfig},
    time::Instant,
    ulp::{Arrival, CloseReason, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
};

/// Every ULPDU begins with its number and zeros.
const HEADER: usize = 12;

/// Bytes of ULPDU `number`, unless MULPDU limits it.
pub fn numbered_len(number: u32) -> usize {
    HEADER + (number.wrapping_mul(2_654_435_761) >> 20) as usize % 3000
}

/// ULPDU `number`, for a peer that is not an [`End`]. [`Counting`] sends a shorter one when MULPDU is smaller.
pub fn numbered(number: u32) -> Vec<u8> {
    let mut ulpdu = vec![0; HEADER];
    ulpdu.splice(..4, number.to_be_bytes());
    ulpdu.extend((0..numbered_len(number) - HEADER).map(|at| byte_of(number, at)));
    ulpdu
}

fn byte_of(number: u32, at: usize) -> u8 {
    (number as usize * 31 + at * 7) as u8
}

/// An upper layer that sends `to_send` numbered ULPDUs of pseudo-random sizes and checks those that it receives.
#[derive(Debug, Default)]
pub struct Counting {
    /// Responder: the connection whose request [`End`] accepts in the same turn.
    requested: Option<ConnId>,
    /// Responder: the initiator's offer.
    pub offer: Option<Offer>,
    /// Full operation has begun.
    pub established: Option<ConnId>,
    /// ULPDUs to send; `sent` counts those that were sent.
    pub to_send: u32,
    /// See `to_send`.
    pub sent: u32,
    /// Stream offset of the end of each.
    pub sent_ends: Vec<StreamOffset>,
    /// Stream offset up to which the peer has acknowledged.
    pub acked: StreamOffset,
    /// Number of placements of each ULPDU; `early` counts those placed beyond a gap.
    pub placed: BTreeMap<u32, usize>,
    /// See `placed`.
    pub early: usize,
    /// Number of ULPDUs delivered.
    pub delivered: u32,
    /// Close when everything is sent. The peer's close also sets this.
    pub finish: bool,
    /// The peer has closed.
    pub peer_closed: bool,
    /// The close reason of the first connection.
    pub closed: Option<CloseReason>,
    /// Reset the connection with the next turn.
    abort: bool,
    /// Unexpected events.
    pub errors: Vec<String>,
}

impl Ulp for Counting {
    type Placed = u32;

    fn place(&mut self, _conn: ConnId, ulpdu: &Ulpdu<'_>, arrival: Arrival) -> Result<u32, Refusal> {
        let mut header = [0; HEADER];
        assert_eq!(ulpdu.peek(&mut header), HEADER);
        let number = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        ulpdu.for_each(HEADER, |offset, bytes| {
            for (i, byte) in bytes.iter().enumerate() {
                assert_eq!(*byte, byte_of(number, offset + i), "ULPDU {number} at {}", offset + i);
            }
        });
        *self.placed.entry(number).or_default() += 1;
        self.early += usize::from(arrival == Arrival::Early);
        Ok(number)
    }

    fn deliver(&mut self, _conn: ConnId, number: u32) -> Result<(), Refusal> {
        assert_eq!(number, self.delivered, "delivered in order");
        self.delivered += 1;
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        self.sent < self.to_send || self.finish
    }

    fn pull(&mut self, _conn: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        if self.sent == self.to_send {
            return if self.finish { Pulled::Finish } else { Pulled::Nothing };
        }
        let number = self.sent;
        let len = numbered_len(number).min(out.mulpdu());
        if out.room() < len {
            return Pulled::Nothing;
        }
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&number.to_be_bytes());
        out.put(&header);
        out.fill(len - HEADER, |offset, bytes| {
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = byte_of(number, offset + i);
            }
        });
        self.sent += 1;
        self.sent_ends.push(out.end());
        if self.sent < self.to_send || self.finish { Pulled::Ulpdu } else { Pulled::LastUlpdu }
    }

    fn acked(&mut self, _conn: ConnId, offset: StreamOffset) {
        assert!(offset >= self.acked, "acknowledgements never go back");
        self.acked = offset;
    }

    fn event(&mut self, conn: ConnId, event: Event) {
        match event {
            Event::Requested { offer, .. } => {
                self.offer = Some(offer);
                self.requested = Some(conn);
            }
            Event::Established { .. } => self.established = Some(conn),
            Event::PeerClosed => {
                self.peer_closed = true;
                self.finish = true;
            }
            // A late duplicate of a SYN can open another connection, which ends without any data. Its end does not
            // replace the reason recorded first.
            Event::SoftError(_) => {}
            Event::Closed(reason) => self.closed = self.closed.or(Some(reason)),
            other => {
                self.abort = true;
                self.errors.push(format!("{other:?}"));
            }
        }
    }
}

/// A stack with its link and its upper layer.
#[derive(Debug)]
pub struct End<L> {
    /// The stack.
    pub stack: Stack<Counting>,
    /// Its upper layer.
    pub ulp: Counting,
    /// Its link.
    pub link: L,
    /// The connection, once its id is known.
    pub conn: Option<ConnId>,
    batch: Batch,
    check: CongestionCheck,
}

impl<L: Link> Node for End<L> {
    fn turn(&mut self, now: Instant) -> bool {
        let received = self.batch.fill(&mut self.link, 64);
        while !self.batch.is_empty() {
            self.stack.receive_run(now, &mut self.link, &mut self.batch, &mut self.ulp);
        }
        if let Some(conn) = self.ulp.requested.take() {
            self.conn = Some(conn);
            let params = AcceptParams { ird: 4, ord: 4, private_data: b"welcome".to_vec() };
            self.stack.accept(conn, params, &mut self.ulp).expect("the request can be accepted");
        }
        if self.stack.next_deadline().is_some_and(|d| d <= now) {
            self.stack.on_timer(now, &mut self.link, &mut self.ulp);
        }
        if !received {
            self.stack.catch_up(now, &mut self.link, &mut self.ulp);
            self.stack.idle();
        }
        if let Some(conn) = self.ulp.established {
            self.stack.wake(conn);
        }
        if std::mem::take(&mut self.ulp.abort)
            && let Some(conn) = self.conn
        {
            self.stack.abort(conn);
        }
        self.stack.transmit(now, &mut self.link, &mut self.ulp);
        if let Some(info) = self.conn.and_then(|conn| self.stack.info(conn)) {
            self.check.observe(&info, self.ulp.acked);
        }
        received
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.stack.next_deadline()
    }
}

impl<L: Link> End<L> {
    /// A stack without connections.
    pub fn new(link: L, stack: StackConfig) -> Self {
        let stack = Stack::new(stack);
        Self {
            stack,
            ulp: Counting::default(),
            link,
            conn: None,
            batch: Batch::default(),
            check: CongestionCheck::default(),
        }
    }

    /// Checks the state after all connections have ended.
    pub fn check_end(&self, context: &str) {
        assert_eq!(self.stack.connections(), 0, "{context}: slots leaked");
        assert!(self.ulp.placed.values().all(|n| *n == 1), "{context}: a ULPDU was placed twice");
        assert!(self.ulp.closed.is_some() || self.conn.is_none(), "{context}: never closed");
    }

    /// Checks, in addition, the state after a run without irreparable faults: the peer has acknowledged all our data,
    /// all `theirs` ULPDUs were delivered in order, and the connection was closed by both ends.
    pub fn check_success(&self, theirs: u32, context: &str) {
        self.check_end(context);
        assert_eq!(self.ulp.errors, Vec::<String>::new(), "{context}");
        assert_eq!(self.ulp.delivered, theirs, "{context}");
        assert_eq!(self.ulp.sent, self.ulp.to_send, "{context}");
        assert_eq!(self.ulp.acked, self.ulp.sent_ends.last().copied().unwrap_or_default(), "{context}");
        assert_eq!(self.ulp.closed, Some(CloseReason::Graceful), "{context}");
    }
}
