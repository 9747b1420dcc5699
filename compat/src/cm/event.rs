//! Events of the connection manager: the events of an identifier in the terms of librdmacm for an iWARP device.

use std::{
    ffi::c_int,
    ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::errno::Errno;
use xwarp_verbs::{
    CloseReason, FramingError, MpaError, PeerDepths,
    cm::{Event, EventKind, IncomingRequest},
};

use super::{
    channel::{Channel, Lane},
    id::{self, Id, Stage},
};
use crate::{
    abi::cm::{MAX_DEPTH, event, rdma_cm_event},
    boundary::{CPart, Handle, Object as _, object, zeroed},
    failure::{self, minus_one},
    verbs::text::name,
    wait::lock,
};

/// Longest time for which `DISCONNECTED` waits for the program to poll the completions of before, and the interval in which this looks.
const HOLD: Duration = Duration::from_millis(3);
const LOOK: Duration = Duration::from_micros(200);

/// An event that the program has not acknowledged.
pub struct CmEvent {
    c: CPart<rdma_cm_event>,
    /// The identifier whose destruction waits for the acknowledgement; for a request, the listener's.
    owner: Arc<Id>,
    /// The target of `param.conn.private_data`.
    _private_data: Vec<u8>,
}

object!(CmEvent: rdma_cm_event);

/// The fields of an event beside its kind.
#[derive(Default)]
struct Fields {
    status: c_int,
    private_data: Vec<u8>,
    /// `responder_resources` and `initiator_depth`.
    depths: [u16; 2],
}

impl CmEvent {
    /// `None` when the identifier is being destroyed: its events are no longer reported.
    fn new(id: &Arc<Id>, listener: Option<&Arc<Id>>, kind: c_int, fields: Fields) -> Option<Arc<Self>> {
        let Fields { status, private_data, depths } = fields;
        let [responder_resources, initiator_depth] =
            depths.map(|depth| u8::try_from(depth).unwrap_or(MAX_DEPTH));
        let mut c: rdma_cm_event = zeroed();
        c.id = id.c_ptr();
        c.listen_id = listener.map_or(ptr::null_mut(), |listener| listener.c_ptr());
        (c.event, c.status) = (kind, status);
        let mut conn = zeroed::<crate::abi::cm::rdma_conn_param>();
        if !private_data.is_empty() {
            conn.private_data = private_data.as_ptr().cast();
            // Longer data than the field can count is cut off, as librdmacm does.
            conn.private_data_len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        }
        (conn.responder_resources, conn.initiator_depth) = (responder_resources, initiator_depth);
        conn.qp_num = id.qp().map_or(0, |qp| qp.number());
        c.param.conn = conn;
        let owner = Arc::clone(listener.unwrap_or(id));
        // Either the destruction waits for this event, or the identifier is no longer found here.
        owner.unacknowledged.returned();
        if Handle::<Id>::of(owner.c_ptr()).object().is_err() {
            owner.unacknowledged.acknowledged(1);
            return None;
        }
        Some(Arc::new(Self { c: CPart::new(c), owner, _private_data: private_data }))
    }

    /// The end of a connection that ended with its queue pair.
    pub fn disconnected(id: &Arc<Id>) -> Option<Arc<Self>> {
        Self::new(id, None, event::DISCONNECTED, Fields::default())
    }

    /// Holds the end of a connection back while completions wait for another thread of the program, at most for [`HOLD`]
    /// (`docs/decisions/0025-disconnected-waits-for-completions.md`).
    pub fn hold_back(&self) {
        if self.kind() != event::DISCONNECTED || lock(&self.owner.inner).is_sync {
            return;
        }
        let begin = Instant::now();
        // No reference is kept during the sleeps: the other thread may destroy the queues.
        while self.owner.qp().is_some_and(|qp| qp.has_unpolled()) && begin.elapsed() < HOLD {
            thread::sleep(LOOK);
        }
    }

    pub fn kind(&self) -> c_int {
        self.c.update(|c| c.event)
    }

    pub fn status(&self) -> c_int {
        self.c.update(|c| c.status)
    }

    /// The identifier that the event is about.
    pub fn id(&self) -> Handle<Id> {
        Handle::of(self.c.update(|c| c.id))
    }
}

/// The C event for one of ours; `None` if its identifier is being destroyed meanwhile.
pub fn translate(channel: &Arc<Channel>, lane: &Lane, found: Event) -> Option<Arc<CmEvent>> {
    let id = lane.id(found.id)?;
    if let EventKind::ConnectRequest(request) = found.kind {
        return requested(channel, lane, &id, request);
    }
    if matches!(found.kind, EventKind::Refused) {
        explain_refusal(lane, &id);
    }
    let (kind, fields) = advanced(&id, found.kind)?;
    CmEvent::new(&id, None, kind, fields)
}

/// Gives the likely reason why an address of this host refuses: the listener of another process is not in this process's card.
fn explain_refusal(lane: &Lane, id: &Id) {
    let inner = lock(&id.inner);
    let [end] = &inner.ends[..] else { return };
    let (Some(own), Some(peer)) = (end.cm.local_address(), end.cm.peer_address()) else { return };
    if own.ip() == peer.ip() && !lane.context.card.device.attributes().interface.shared {
        failure::explain(&format_args!(
            "{peer} is an address of this host, and this process does not listen there: other processes of a host are reached \
             through xwarpd"
        ));
    }
}

/// Brings `id` to the stage after an event, and returns the event's kind and fields in C.
fn advanced(id: &Arc<Id>, kind: EventKind) -> Option<(c_int, Fields)> {
    let failed = |status| Fields { status, ..Fields::default() };
    let ended = |kind, status| {
        id.set_stage(Stage::Ended);
        (kind, failed(status))
    };
    let refused = -(Errno::ECONNREFUSED as c_int);
    let advanced = match kind {
        EventKind::AddressResolved => {
            id.resolved();
            (event::ADDR_RESOLVED, Fields::default())
        }
        EventKind::AddressError(error) => {
            id.set_stage(Stage::Idle);
            (event::ADDR_ERROR, failed(failure::route(&error)))
        }
        EventKind::RouteResolved => {
            id.set_stage(Stage::RouteResolved);
            (event::ROUTE_RESOLVED, Fields::default())
        }
        EventKind::Established { private_data, ird, ord, .. } => {
            id.established();
            (event::ESTABLISHED, Fields { private_data, depths: [ird, ord], ..Fields::default() })
        }
        EventKind::Rejected { private_data, .. } => {
            let (kind, fields) = ended(event::REJECTED, refused);
            (kind, Fields { private_data, ..fields })
        }
        EventKind::Refused => ended(event::REJECTED, refused),
        EventKind::Unreachable => ended(event::UNREACHABLE, -(Errno::EHOSTUNREACH as c_int)),
        EventKind::TimedOut => ended(event::UNREACHABLE, -(Errno::ETIMEDOUT as c_int)),
        EventKind::ConnectError(reason) => {
            let (kind, status) = attempt_failed(reason);
            ended(kind, status)
        }
        EventKind::RequestGone => ended(event::CONNECT_ERROR, -(Errno::ECONNRESET as c_int)),
        EventKind::Closed(CloseReason::InterfaceRemoved) => ended(event::DEVICE_REMOVAL, 0),
        EventKind::MacChanged => (event::ADDR_CHANGE, Fields::default()),
        EventKind::Disconnected | EventKind::Closed(_) => ended(event::DISCONNECTED, 0),
        EventKind::DeviceFailed => (event::DEVICE_REMOVAL, Fields::default()),
        // `Reports::wants` has dropped all others.
        _ => return None,
    };
    Some(advanced)
}

/// The event and its status for a connection attempt that failed. Without an MPA Reply in time the peer counts as unreachable, as
/// with the kernel's iWARP devices.
fn attempt_failed(reason: CloseReason) -> (c_int, c_int) {
    match reason {
        CloseReason::Startup(FramingError::Mpa(MpaError::StartupTimeout)) => {
            (event::UNREACHABLE, -(Errno::ETIMEDOUT as c_int))
        }
        reason => (event::CONNECT_ERROR, failure::closed(reason)),
    }
}

/// A connection request of a peer: creates a new identifier.
fn requested(
    channel: &Arc<Channel>,
    lane: &Lane,
    listener: &Arc<Id>,
    request: IncomingRequest,
) -> Option<Arc<CmEvent>> {
    let IncomingRequest { id: cm, private_data, depths, local, peer, .. } = request;
    let PeerDepths { ird, ord } = depths;
    // Where the peer leaves the depths to the applications, librdmacm has 0.
    let depths = [ord.unwrap_or(0), ird.unwrap_or(0)];
    let id = Id::of_request(channel, lane, listener, cm, [local, peer], depths)?;
    let fields = Fields { private_data, depths, ..Fields::default() };
    let event = CmEvent::new(&id, Some(listener), event::CONNECT_REQUEST, fields);
    if event.is_none() {
        // The listener is being destroyed: rejects the request.
        let _ = id::destroy(Handle::of(id.c_ptr()));
    }
    event
}

/// Acknowledges an event, which ends its life.
pub fn acknowledge(event: Handle<CmEvent>) -> Result<(), Errno> {
    let event = event.withdraw()?;
    event.owner.unacknowledged.acknowledged(1);
    Ok(())
}

pub extern "C" fn rdma_ack_cm_event(event: Handle<CmEvent>) -> c_int {
    minus_one(acknowledge(event))
}

pub extern "C" fn rdma_event_str(event: c_int) -> *const std::ffi::c_char {
    let names = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ];
    name(&names, event, c"UNKNOWN EVENT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_mpa_reply_is_an_unreachable_peer() {
        let silent = CloseReason::Startup(FramingError::Mpa(MpaError::StartupTimeout));
        assert_eq!(attempt_failed(silent), (event::UNREACHABLE, -110));
        assert_eq!(attempt_failed(CloseReason::Reset), (event::CONNECT_ERROR, -104));
    }
}
