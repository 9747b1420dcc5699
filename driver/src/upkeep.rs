//! What happens to an interface while it is open and the kernel does not announce: somebody detaches the program, or adds queues.

use std::io;

use xwarp_prog::{AttachError, Attached, Kept, MAX_QUEUES};

use crate::interface::Interface;
use crate::netlink::monitor::Event;
use crate::sys;

/// The outcome of [`Interface::check`] for an interface that cannot be used any more.
pub(crate) type Ended = Option<String>;

/// Whether a program is still attached, from an attempt to keep it; the reason to give the interface up, if there is one. `is_gone`
/// says whether the interface is gone, which is announced.
pub(crate) fn attached(
    interface: &str,
    kept: Result<Kept, AttachError>,
    is_gone: impl FnOnce() -> bool,
) -> Ended {
    match kept {
        Ok(Kept::Attached) => None,
        Ok(Kept::Again) => {
            tracing::warn!(
                interface,
                "somebody detached the XDP program, and it is attached again; the kernel may have reset connections meanwhile"
            );
            None
        }
        Err(AttachError::Foreign(Attached { name, id, .. })) => Some(format!(
            "somebody detached the XDP program from {interface}, and attached another one ({name:?}, id {id})"
        )),
        Err(AttachError::System(_)) if is_gone() => None,
        Err(AttachError::System(source)) => Some(format!(
            "somebody detached the XDP program from {interface}, and it cannot be attached again: {source}"
        )),
    }
}

/// Reports whether the program runs on queues that were added.
pub(crate) fn covered(interface: &str, covered: io::Result<()>) {
    match covered {
        Ok(()) => {
            tracing::info!(interface, "the number of queues has changed, and the XDP program runs on all");
        }
        Err(error) => {
            tracing::warn!(interface, %error, "the XDP program may not run on queues that were added");
        }
    }
}

impl Interface {
    /// Checks what the kernel does not announce, if it is time for that.
    pub(crate) fn check(&mut self, notify: &mut impl FnMut(Event)) {
        let Some((lease, watch)) = self.owned() else { return };
        if !watch.check_due() {
            return;
        }
        let name = watch.state.attributes.carrier.clone();
        if let Some(reason) = attached(&name, lease.keep_attached(), || watch.link_is_gone()) {
            watch.end(reason, notify);
            return;
        }
        if watch.queues_changed() {
            covered(&name, lease.program().cover_queues());
        }
        if let Err(error) = self.serve_added_queues() {
            // A queue is busy for some milliseconds after another socket of it was closed.
            tracing::debug!(interface = name, %error, "a queue that was added is not served yet");
        }
    }

    /// Binds sockets to the queues that the interface has more than before (`ethtool -L`). Queues are not removed while they have
    /// sockets: the kernel refuses that.
    fn serve_added_queues(&mut self) -> io::Result<()> {
        let Some((_, watch)) = self.owned() else { return Ok(()) };
        let carrier = &watch.state.attributes.carrier;
        let Some(counts) = sys::active_queues(watch.any_socket(), carrier) else { return Ok(()) };
        let all = counts.receive.min(u32::from(MAX_QUEUES)) as u16;
        while self.rings.queues() < self.sizes.of_all(all) {
            let queue = self.rings.queues();
            let number = self.sizes.number_of(queue);
            self.rings.bind_added(self.sizes)?;
            self.sizes.queues = self.rings.queues();
            self.serve(queue, number)?;
            tracing::info!(queue = number, "a queue was added to the interface, and is served");
        }
        Ok(())
    }
}
