//! ICMP errors about a connection, and its soft errors.

use super::Stack;
use crate::{
    link::Link,
    tcp::Connection,
    time::Instant,
    ulp::{ConnId, Event, Ulp},
    wire::IcmpError,
};

impl<U: Ulp> Stack<U> {
    pub(super) fn receive_icmp(&mut self, now: Instant, link: &mut dyn Link, error: IcmpError, ulp: &mut U) {
        let Some(&index) = self.flows.get(&error.flow) else { return };
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        self.counters.icmp_errors += 1;
        let closed = slot.tcp.icmp(now, &error);
        let conn = ConnId { index, generation: slot.generation };
        if pass_soft_error(conn, &mut slot.tcp, ulp) {
            self.lookups.insert(index, true);
        }
        self.after_change(now, link, index, closed, ulp);
    }
}

/// Reports a soft error to the upper layer; returns whether there was one.
pub(super) fn pass_soft_error<U: Ulp>(conn: ConnId, tcp: &mut Connection, ulp: &mut U) -> bool {
    let error = tcp.take_soft_error();
    if let Some(error) = error {
        ulp.event(conn, Event::SoftError(error));
    }
    error.is_some()
}
