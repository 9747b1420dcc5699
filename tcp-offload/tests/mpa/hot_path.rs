//! The guarantees of the hot paths: no allocation, one place and one deliver per FPDU.

use allocation_counter::measure;
use xwarp_tcp::{
    framing::{Carried, Taken},
    link::FrameWriter,
    mpa::Session,
    tcp::{Filled, NewPayload},
    time::Instant,
    ulp::{self, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu, UlpduWriter},
};

use crate::support::{CONN, End, HEADERS, Reference, TestLink, connected, path, ulpdus};

/// An upper layer that counts and does not allocate.
#[derive(Default)]
struct Counting {
    placed: usize,
    delivered: usize,
    to_send: usize,
}

impl Ulp for Counting {
    type Placed = usize;

    fn place(&mut self, _: ConnId, _: &Ulpdu<'_>, _: ulp::Arrival) -> Result<usize, Refusal> {
        self.placed += 1;
        Ok(self.placed)
    }

    fn deliver(&mut self, _: ConnId, _: usize) -> Result<(), Refusal> {
        self.delivered += 1;
        Ok(())
    }

    fn has_data(&self, _conn: ConnId) -> bool {
        true
    }

    fn pull(&mut self, _: ConnId, out: &mut UlpduWriter<'_, '_>) -> Pulled {
        if self.to_send == 0 || out.room() < 400 {
            return Pulled::Nothing;
        }
        self.to_send -= 1;
        out.put(&[7; 18]);
        out.fill(300, |_, space| space.fill(1));
        Pulled::Ulpdu
    }

    fn acked(&mut self, _: ConnId, _: u64) {}
    fn event(&mut self, _: ConnId, _: Event) {}
}

/// Receives the segments of `stream` in the order `order`. Returns the number of allocations.
fn allocations(
    session: &mut Session<usize>,
    link: &mut TestLink,
    ulp: &mut Counting,
    (start, stream): (usize, &Reference),
    order: impl Iterator<Item = usize>,
) -> u64 {
    let path = path();
    let mut count = 0;
    for n in order {
        let (from, to) = stream.ranges[n];
        let frame = link.lend(&stream.bytes[from..to]);
        let payload = NewPayload {
            offset: (start + from) as u64,
            start: HEADERS,
            len: to - from,
            contiguous: start as u64,
            pushed: true,
        };
        let carried = Carried { payload, frame, spare: usize::MAX, fast: session.allows_fast_path() };
        let mut taken = false;
        let used = measure(|| {
            let outcome = session.receive(Instant::ZERO, ulp, CONN, &path, link, carried);
            taken = outcome != Taken::Not;
        });
        assert!(taken);
        count += used.count_total;
    }
    count
}

#[test]
fn design_s5_in_order_segments_cost_no_allocation() {
    for markers in [false, true] {
        let (_, End { mut session, mut link, contiguous, .. }) = connected(markers, true);
        let stream = Reference::new(&ulpdus(&[1400; 50]), markers, true);
        let mut ulp = Counting::default();
        let used = allocations(&mut session, &mut link, &mut ulp, (contiguous, &stream), 0..50);
        assert_eq!((used, ulp.placed, ulp.delivered, link.lent()), (0, 50, 50, 0));
    }
}

#[test]
fn design_s5_out_of_order_segments_cost_no_allocation_once_warm() {
    let (_, End { mut session, mut link, contiguous, .. }) = connected(true, true);
    let stream = Reference::new(&ulpdus(&[1400; 100]), true, true);
    let mut ulp = Counting::default();
    let all = (contiguous, &stream);
    let warm = allocations(&mut session, &mut link, &mut ulp, all, (1..50).chain([0]));
    assert!(warm > 0, "the counter works");
    let used = allocations(&mut session, &mut link, &mut ulp, all, (51..100).chain([50]));
    assert_eq!((used, ulp.placed, ulp.delivered, link.lent()), (0, 100, 100, 0));
    assert_eq!(session.counters().placed_early, 98);
}

#[test]
fn design_s5_sending_costs_no_allocation() {
    let (End { mut session, sent, .. }, _) = connected(true, true);
    let mut ulp = Counting { to_send: 100, ..Counting::default() };
    let mut frame = vec![0; 1502];
    let mut offset = sent.len() as u64;
    let mut segments = 0;
    while ulp.to_send > 0 {
        let used = measure(|| {
            let chunks = [&mut frame[..]].into_iter().collect();
            let mut out = FrameWriter::new(chunks, HEADERS, HEADERS + 1448);
            let filled = session.fill(Instant::ZERO, &mut ulp, CONN, offset, 1448, &mut out);
            let Filled::Segment { len, .. } = filled else { panic!("{filled:?}") };
            offset += len as u64;
        });
        assert_eq!(used.count_total, 0);
        segments += 1;
    }
    assert_eq!((segments, session.counters().ulpdus_sent), (25, 100));
}
