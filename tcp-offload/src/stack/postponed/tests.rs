use std::time::Duration;

use proptest::prelude::*;

use crate::{
    mpa::MpaConfig,
    sim::Checksums,
    stack::{
        Polling,
        twins::{Cabled, scene},
    },
    tcp::Info,
    time::Instant,
    ulp::ConnId,
};

/// Time from a message to its answer.
const STEP: Duration = Duration::from_micros(5);

/// A busy end, to which the peer has just sent the answer to a message.
struct Table {
    now: Instant,
    busy: Cabled,
    conn: ConnId,
    /// The frames with the peer's answer.
    frames: Vec<Vec<u8>>,
}

impl Table {
    fn set() -> Self {
        let mut now = Instant::ZERO;
        let [mut busy, mut peer] = [(); 2].map(|()| Cabled::new(true, 4096, Checksums::Partial));
        busy.listen(MpaConfig::default());
        peer.connect(MpaConfig::default());
        busy.end.stack.set_polling(Polling::Busy);
        let mut frames = Vec::new();
        // The start-up, and some messages, each of which is answered.
        for round in 0..20 {
            now += STEP;
            if round > 6 {
                peer.end.ulp.to_send += 1;
                busy.end.ulp.to_send += 1;
            }
            frames = peer.turn(now, &frames);
            frames = busy.turn(now, &frames);
        }
        now += STEP;
        busy.turn(now, &[]);
        peer.end.ulp.to_send += 1;
        frames = peer.turn(now, &frames);
        assert_eq!(frames.len(), 1);
        let conn = busy.end.ulp.established.unwrap();
        Self { now, busy, conn, frames }
    }

    /// Runs a turn with the peer's answer, which is `answered` at once or not. Returns the number of frames sent.
    fn receive(&mut self, answered: bool) -> usize {
        self.busy.end.ulp.to_send += u32::from(answered);
        self.busy.turn(self.now, &self.frames).len()
    }

    /// Runs a turn `later` in which no frame arrives. Returns the number of frames sent.
    fn idle(&mut self, later: Duration) -> usize {
        self.now += later;
        self.busy.turn(self.now, &[]).len()
    }

    fn info(&self) -> Info {
        self.busy.end.stack.info(self.conn).unwrap()
    }
}

#[test]
fn the_answer_is_sent_before_the_acknowledgment_is_processed() {
    let mut table = Table::set();
    let (acked, delivered) = (table.busy.end.ulp.acked, table.busy.end.ulp.delivered);
    assert_eq!(table.receive(true), 1);
    assert_eq!(table.busy.end.ulp.delivered, delivered + 1);
    assert!(table.busy.end.ulp.acked > acked, "the request completes before the message is delivered");
    assert_eq!(table.info().chunks_retained, 2);
    assert_eq!(table.idle(STEP), 0);
    assert_eq!(table.info().chunks_retained, 1, "only the answer is in flight");
}

/// Otherwise the answer would gather behind it.
#[test]
fn what_a_postponed_acknowledgment_covers_is_not_in_flight() {
    let mut table = Table::set();
    let in_flight = |table: &Table| table.busy.end.stack.emss_in_flight(table.conn).is_some();
    assert!(in_flight(&table));
    table.receive(false);
    assert!(!in_flight(&table));
    let mut table = Table::set();
    table.receive(true);
    assert!(in_flight(&table));
}

#[test]
fn the_round_trip_is_measured_when_the_acknowledgment_arrives() {
    let [soon, late] = [STEP, Duration::from_millis(20)].map(|later| {
        let mut table = Table::set();
        table.receive(true);
        table.idle(later);
        table.info().srtt
    });
    assert_eq!(soon, late);
}

#[test]
fn a_timer_does_not_fire_for_what_is_acknowledged() {
    let mut table = Table::set();
    table.receive(false);
    let end = &mut table.busy.end;
    let later = end.stack.next_deadline().unwrap() + Duration::from_secs(1);
    end.stack.on_timer(later, &mut end.link, &mut end.ulp);
    assert!(!end.stack.has_postponed());
    let Info { counters, chunks_retained, .. } = table.info();
    assert_eq!((counters.rto_expired, counters.tlp_probes, chunks_retained), (0, 0, 0));
}

#[test]
fn a_connection_can_end_before_its_postponed_work_is_done() {
    let mut table = Table::set();
    table.receive(false);
    table.busy.end.stack.abort(table.conn);
    let end = &mut table.busy.end;
    end.stack.transmit(table.now, &mut end.link, &mut end.ulp);
    assert!(end.stack.info(table.conn).is_none());
    table.idle(STEP);
    assert!(!table.busy.end.stack.has_postponed());
}

/// Its request completes, although the connection ends.
#[test]
fn an_acknowledgment_counts_if_the_framing_refuses_the_segment() {
    let mut table = Table::set();
    let acked = table.busy.end.ulp.acked;
    // The CRC is wrong, and a partial checksum does not cover the payload.
    *table.frames[0].last_mut().unwrap() ^= 1;
    table.receive(false);
    assert!(table.busy.end.ulp.acked > acked);
    assert!(!table.busy.end.ulp.errors.is_empty());
}

#[test]
fn the_acknowledgment_of_a_part_of_what_is_in_flight_is_not_postponed() {
    let mut table = Table::set();
    table.busy.end.ulp.to_send += 2;
    table.idle(STEP);
    table.receive(false);
    assert!(!table.busy.end.stack.has_postponed());
}

/// What can be seen of the twin's connections.
fn visible(twin: &Cabled) -> String {
    let (stack, works) = (&twin.end.stack, twin.works());
    let infos: Vec<_> = stack.slots.iter().map(|(_, slot)| (slot.tcp.info(), slot.supply)).collect();
    format!("{infos:?} {works:?} {:?} {:?} {:?}", stack.next_deadline(), stack.counters, twin.end.ulp)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// After the next turn, the outcome is the same as if nothing had been postponed.
    #[test]
    fn prop_postponed_work_has_the_outcome_of_work_done_at_once(scene in scene()) {
        scene.play([true, true], |now, twins, _, frames| {
            let [busy, other] = twins;
            busy.end.stack.set_polling(Polling::Busy);
            other.end.stack.set_polling(Polling::Yes);
            let [ours, at_once] = [busy, other].map(|twin| {
                let mut sent = twin.turn(now, frames);
                sent.extend(twin.turn(now, &[]));
                sent
            });
            prop_assert_eq!(&ours, &at_once);
            prop_assert!(!twins[0].end.stack.has_postponed());
            let [one, other] = twins.each_ref().map(visible);
            prop_assert_eq!(one, other);
            Ok(ours)
        })?;
    }
}
