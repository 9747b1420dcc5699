//! The hot paths do not allocate once the queues are warm.

use allocation_counter::measure;

use super::*;

const MESSAGE: u32 = 65_536;

/// Transfers and acknowledges all ULPDUs from one end to the other, in a few reused buffers.
fn carry(from: &mut End, to: &mut End, memory: &mut [u8]) -> usize {
    let mut ulpdus = 0;
    loop {
        let (pulled, len, end) = sim::pull_into(&mut from.rnic, CONN, from.offset, MULPDU, MULPDU, memory);
        if !matches!(pulled, Pulled::Ulpdu | Pulled::LastUlpdu) {
            return ulpdus;
        }
        from.offset = end;
        let placed = to.place(&memory[2..2 + len], Arrival::InOrder).unwrap();
        to.rnic.deliver(CONN, placed).unwrap();
        from.rnic.acked(CONN, end);
        while from.rnic.next_deferred().or_else(|| to.rnic.next_deferred()).is_some() {}
        ulpdus += 1;
    }
}

#[test]
fn design_s3_moving_a_message_allocates_nothing() {
    let mut pair = Pair::new();
    let (near, from) = pair.a.region(MESSAGE as usize, 1, ALL);
    let (far, to) = pair.b.region(MESSAGE as usize, 2, ALL);
    let mut memory = vec![0; MULPDU + 16];
    for operation in [write_to(far, 0), SEND, read_from(far, 0)] {
        let mut round = |pair: &mut Pair| {
            pair.b.receive(1, &[whole(far, MESSAGE)]);
            pair.a.post(1, operation, &[whole(near, MESSAGE)]);
            let there = carry(&mut pair.a, &mut pair.b, &mut memory);
            let back = carry(&mut pair.b, &mut pair.a, &mut memory);
            assert_eq!(pair.a.ring.pop().map(|c| c.status), Some(WcStatus::Success));
            let _ = pair.b.ring.pop();
            there.max(back)
        };
        assert!((46..=47).contains(&round(&mut pair)));
        let used = measure(|| {
            for _ in 0..20 {
                round(&mut pair);
            }
        });
        assert_eq!(used.count_total, 0, "{operation:?}");
        assert_eq!(bytes(&from), bytes(&to));
    }
}
