//! Work requests that manage local memory: binding of windows, fast registration, local invalidation. They send
//! nothing, so they are executed as soon as they are next in the send queue.

use super::{
    Shared,
    qp::QueuePair,
    send_queue::{Position, Progress},
    work::{Operation, WcStatus},
};

impl QueuePair {
    /// Executes the requests of this kind that are next in the send queue. Their changes apply to all later requests.
    /// Earlier requests have already read their memory, except that the responses of Reads and atomics may be
    /// outstanding; a fence waits for these.
    pub(crate) fn do_local_work(&mut self, shared: &mut Shared) {
        while self.may_begin() {
            let position = self.sq.next;
            let Some(operation) = self.sq.get(position).map(|entry| entry.operation) else { return };
            if !operation.is_local() {
                return;
            }
            self.sq.next += 1;
            if let Err(error) = self.manage(position, operation, shared) {
                tracing::warn!(qp = self.id.number(), ?operation, %error, "a request on memory is rejected");
                self.fail_request(position, WcStatus::MemoryManagement, shared);
            } else {
                self.set_progress(position, Progress::Done(WcStatus::Success));
                self.complete_sends(shared);
            }
        }
    }

    fn manage(
        &mut self,
        position: Position,
        operation: Operation,
        shared: &mut Shared,
    ) -> Result<(), super::keys::ManagementError> {
        let user = self.user();
        match operation {
            Operation::LocalInvalidate { key } => shared.keys.invalidate_locally(user, key),
            Operation::BindWindow { window, binding } => shared.keys.bind(user, window, &binding),
            Operation::FastRegister { key, access, base } => {
                let memory = self.sq.get_mut(position).and_then(|entry| entry.memory.take());
                shared.keys.register_fast(user, key, memory.into_iter().flatten(), access, base)
            }
            _ => Ok(()),
        }
    }
}
