//! The memory of queue pairs that have no work.

use allocation_counter::measure;

use super::*;

/// Bytes of a queue pair.
const MAX_BYTES: usize = 824;

/// Most queue pairs of many are idle: what the depths of its queues need is allocated with the work.
#[test]
fn a_queue_pair_without_work_has_only_its_box() {
    let mut end = End::new(|_, a| a);
    let attributes = QpAttributes::new(end.pd, end.cq, end.cq);
    // The table has room for the next queue pair afterwards.
    end.rnic.create_qp(attributes).unwrap();
    let used = measure(|| {
        end.rnic.create_qp(attributes).unwrap();
    });
    let size = size_of::<QueuePair>();
    assert_eq!((used.count_current, used.bytes_current), (1, size as i64));
    println!("{size} bytes");
    assert!(size <= MAX_BYTES, "{size} bytes");
}
