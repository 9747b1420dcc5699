//! Connections: listening, connecting, answering, disconnecting.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use nix::errno::Errno;
use xwarp_verbs::{
    QueuePair,
    cm::{AcceptOptions, CmError, CmId, ConnectOptions, ListenOptions},
};

use super::{
    id::{self, Id, Inner, Sharing, Stage},
    options, parking,
};
use crate::{
    abi::cm::rdma_conn_param,
    boundary::{self, Handle, In},
    failure::{self, minus_one},
    faults,
    sleep::uncancelled,
    verbs::qp::Qp,
    wait::lock,
};

/// Smallest backlog of a listener. The kernel's connection manager counts requests that the program has not read yet;
/// ours counts connections in start-up as well. A SYN that is dropped for a full backlog also changes the order of
/// connections, on which programs rely: perftest pairs them by it.
const LEAST_BACKLOG: usize = 128;
/// The largest backlog.
const MAX_BACKLOG: usize = 65_536;

/// The fields of `rdma_conn_param` that concern iWARP.
struct Parameters {
    private_data: Vec<u8>,
    ird: u16,
    ord: u16,
    qp_number: u32,
}

impl Parameters {
    /// The parameters of the program; by default, those that the peer requested.
    fn of(given: In<rdma_conn_param>, inner: &Inner) -> Self {
        let limits = inner.ends.first().map(|end| end.lane.context.card.device.attributes().limits);
        let [most_ird, most_ord] = limits.map_or([0; 2], |limits| [limits.max_ird, limits.max_ord]);
        let (private_data, [ird, ord], qp_number) = match given.read() {
            Some(given) => (
                boundary::private_data(given.private_data, given.private_data_len),
                [given.responder_resources.into(), given.initiator_depth.into()],
                given.qp_num,
            ),
            None => (Vec::new(), inner.depths, 0),
        };
        Self { private_data, ird: ird.min(most_ird), ord: ord.min(most_ord), qp_number }
    }

    /// The queue pair in the identifier's public field, else the one in the parameters, as in librdmacm: programs move a prepared
    /// queue pair from one identifier to another by this field.
    fn qp(&self, id: &Id, inner: &Inner) -> Result<Arc<Qp>, Errno> {
        let shown = Handle::<Qp>::of(id.c.update(|c| c.qp));
        if !shown.is_null() {
            return shown.object();
        }
        let end = inner.ends.first().ok_or(Errno::EINVAL)?;
        end.lane.context.card.qp_by_number(self.qp_number).ok_or(Errno::EINVAL)
    }
}

pub fn listen(id: Handle<Id>, backlog: c_int) -> Result<(), Errno> {
    let id = id.object()?;
    // An identifier without an address listens at a free port of all IPv4 addresses.
    if lock(&id.inner).stage == Stage::Idle && lock(&id.inner).ends.is_empty() {
        id.bind(([0; 4], 0).into())?;
    }
    id.claim()?;
    let mut inner = lock(&id.inner);
    if inner.ends.is_empty() || inner.stage != Stage::Idle {
        return Err(Errno::EINVAL);
    }
    let backlog = usize::try_from(backlog).unwrap_or(0).clamp(LEAST_BACKLOG, MAX_BACKLOG);
    let Sharing { only_family, .. } = inner.sharing;
    let dscp = inner.dscp;
    for end in &mut inner.ends {
        if let Some(cm) = parking::take(end, &id, only_family) {
            end.lane.remove(end.cm.key());
            end.cm = cm;
            options::tune(&end.cm, dscp.unwrap_or(0))?;
            continue;
        }
        let options = ListenOptions { backlog, only_family, ..ListenOptions::default() };
        end.cm.listen(options).map_err(|error| failure::cm(&error))?;
    }
    inner.stage = Stage::Listening;
    Ok(())
}

pub extern "C" fn rdma_listen(id: Handle<Id>, backlog: c_int) -> c_int {
    minus_one(uncancelled(|| listen(id, backlog)))
}

/// Connects or accepts with `begin`, with the program's queue pair and parameters.
fn establish(
    id: &Id,
    parameters: In<rdma_conn_param>,
    begin: impl FnOnce(&CmId, &QueuePair, Parameters) -> Result<(), CmError>,
) -> Result<(), Errno> {
    faults::catch();
    let mut inner = lock(&id.inner);
    let parameters = Parameters::of(parameters, &inner);
    let qp = parameters.qp(id, &inner)?;
    let [end] = &inner.ends[..] else { return Err(Errno::EINVAL) };
    begin(&end.cm, &qp.qp, parameters).map_err(|error| failure::cm(&error))?;
    inner.qp = Arc::downgrade(&qp);
    inner.stage = Stage::Connecting;
    id.show_addresses(&inner);
    Ok(())
}

pub extern "C-unwind" fn rdma_connect(id: Handle<Id>, parameters: In<rdma_conn_param>) -> c_int {
    id::finish(begin_connect(id, parameters), id)
}

extern "C" fn begin_connect(id: Handle<Id>, parameters: In<rdma_conn_param>) -> c_int {
    let begin = |cm: &CmId, qp: &QueuePair, Parameters { private_data, ird, ord, .. }| {
        cm.connect(qp, ConnectOptions { private_data, ird, ord, framing: None, close_with_peer: true })
    };
    id::begin(id, |id| establish(id, parameters, begin))
}

pub extern "C-unwind" fn rdma_accept(id: Handle<Id>, parameters: In<rdma_conn_param>) -> c_int {
    id::finish(begin_accept(id, parameters), id)
}

extern "C" fn begin_accept(id: Handle<Id>, parameters: In<rdma_conn_param>) -> c_int {
    let begin = |cm: &CmId, qp: &QueuePair, Parameters { private_data, ird, ord, .. }| {
        cm.accept(qp, AcceptOptions { private_data, ird, ord, close_with_peer: true })
    };
    id::begin(id, |id| establish(id, parameters, begin))
}

pub extern "C" fn rdma_reject(id: Handle<Id>, data: *const c_void, len: u8) -> c_int {
    let reject = || {
        let id = id.object()?;
        let mut inner = lock(&id.inner);
        let [end] = &inner.ends[..] else { return Err(Errno::EINVAL) };
        end.cm.reject(&boundary::private_data(data, len)).map_err(|error| failure::cm(&error))?;
        inner.stage = Stage::Ended;
        Ok(())
    };
    minus_one(reject())
}

/// Posted work is sent first. The event follows when both directions are closed.
pub extern "C-unwind" fn rdma_disconnect(id: Handle<Id>) -> c_int {
    id::finish(begin_disconnect(id), id)
}

extern "C" fn begin_disconnect(id: Handle<Id>) -> c_int {
    id::begin(id, |id| {
        let inner = lock(&id.inner);
        let [end] = &inner.ends[..] else { return Err(Errno::EINVAL) };
        end.cm.disconnect().map_err(|error| failure::cm(&error))
    })
}

/// Reports InfiniBand's "communication established", which iWARP does not have. As in the kernel, an error without a
/// connection.
pub extern "C" fn rdma_notify(id: Handle<Id>, _event: c_int) -> c_int {
    minus_one(id.object().and_then(|id| {
        let connects = matches!(lock(&id.inner).stage, Stage::Connecting | Stage::Connected);
        if connects { Ok(()) } else { Err(Errno::EINVAL) }
    }))
}

/// The initiator of iWARP is established without a further step.
pub extern "C" fn rdma_establish(id: Handle<Id>) -> c_int {
    let has_qp = |id: Arc<Id>| !id.c.update(|c| c.qp).is_null();
    minus_one(id.object().and_then(|id| if has_qp(id) { Err(Errno::EINVAL) } else { Ok(()) }))
}
