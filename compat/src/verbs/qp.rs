//! Queue pairs: creation, the states of `ibv_modify_qp`, destruction.

use std::{
    ffi::c_int,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nix::errno::Errno;
use xwarp_verbs::{Access, Limits, QpState, QueuePair, QueuePairOptions, ResourceError};

use super::{
    card,
    context::Context,
    cq::Cq,
    memory::Pd,
    pairing::{self, Names},
    post_ex::{self, Draft},
    qp_attributes,
    srq::Srq,
};
use crate::{
    abi::device::{access, ibv_pd},
    abi::queue::{
        QP_INIT_CREATE_FLAGS, QP_INIT_PD, QP_INIT_SEND_OPS_FLAGS, QPT_OTHERS, QPT_RC, SEND_OPS, ibv_qp,
        ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex, qp_mask, qp_state,
    },
    boundary::{CPart, Handle, In, Object as _, Out, object, zeroed},
    config::{Face, config},
    failure::{self, number, pointer},
    faults,
    users::Used,
    wait::{HeldLock, Unacknowledged, lock},
};

/// Longest time that a reset waits for the end of the connection.
const RESET_WAIT: Duration = Duration::from_millis(500);
/// Inline data that every queue pair takes.
const INLINE_BYTES: u32 = 64;
/// Scatter and gather entries that every queue pair takes at least: programs post two pieces to a queue pair for which they asked
/// for one, because siw takes 6 and other devices round up.
pub const LEAST_SGE: u32 = 6;
/// Interval between two checks whether the peer is connected.
const PEER_WAIT: Duration = Duration::from_micros(200);

/// A queue pair.
pub struct Qp {
    pub c: CPart<ibv_qp_ex>,
    pub qp: QueuePair,
    /// The sending half of a queue pair that is its own peer: both ends of its TCP connection need a queue pair.
    companion: OnceLock<Companion>,
    /// Whether requests go to the companion.
    is_own_peer: AtomicBool,
    pub context: Arc<Context>,
    pd: Used<Pd>,
    cqs: [Used<Cq>; 2],
    srq: Option<Used<Srq>>,
    number: u32,
    cap: ibv_qp_cap,
    sq_sig_all: c_int,
    /// The attributes last set by `ibv_modify_qp`.
    attributes: Mutex<ibv_qp_attr>,
    /// Whether it is connected by GID and number.
    is_paired: AtomicBool,
    /// Whether the program has reset it: it takes no receives until it is in INIT again.
    is_reset: AtomicBool,
    /// Whether it was created with `send_ops_flags`, and so is an `ibv_qp_ex`.
    is_extended: AtomicBool,
    pub unacknowledged: Unacknowledged,
    /// Held from `ibv_wr_start` to `ibv_wr_complete` or `ibv_wr_abort`.
    pub drafting: HeldLock,
    /// The requests of `ibv_wr_*`, of the thread that holds `drafting`.
    pub draft: CPart<Draft>,
}

object!(Qp: ibv_qp is qp_base of ibv_qp_ex);

/// A second queue pair under the name of the first, in whose completions the program finds its own number.
struct Companion {
    qp: QueuePair,
    /// Its number in the pairing.
    number: u32,
}

/// Rounds requested capacities up to those that a queue pair gets. A queue pair with a shared receive queue has no receives of
/// its own.
fn grant_capacities(cap: &mut ibv_qp_cap, limits: &Limits, has_srq: bool) {
    // Programs that use one direction only request empty queues and lists.
    for depth in [&mut cap.max_send_wr, &mut cap.max_recv_wr] {
        *depth = granted(*depth, 1, limits.max_qp_wr);
    }
    for pieces in [&mut cap.max_send_sge, &mut cap.max_recv_sge] {
        *pieces = (*pieces).max(LEAST_SGE.min(limits.max_sge));
    }
    // Devices have room for some inline data, which programs use without asking for it.
    cap.max_inline_data = cap.max_inline_data.max(INLINE_BYTES);
    if has_srq {
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
}

fn options(number: u32, cap: &ibv_qp_cap, sq_sig_all: c_int) -> QueuePairOptions {
    QueuePairOptions {
        context: number.into(),
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
        signal_all: sq_sig_all != 0,
        ..QueuePairOptions::default()
    }
}

impl Qp {
    /// Creates a queue pair, and stores the capacities that it has.
    pub fn new(pd: &Arc<Pd>, init: &mut ibv_qp_init_attr) -> Result<Arc<Self>, Errno> {
        match init.qp_type {
            QPT_RC => {}
            known if QPT_OTHERS.contains(&known) => return Err(Errno::EOPNOTSUPP),
            _ => return Err(Errno::EINVAL),
        }
        let [send_cq, recv_cq] = [init.send_cq, init.recv_cq].map(|cq| Handle::<Cq>::of(cq).object());
        let (send_cq, recv_cq) = (send_cq?, recv_cq?);
        let srq = Handle::<Srq>::of(init.srq);
        let srq = if srq.is_null() { None } else { Some(srq.object()?) };
        // The kernel finds objects by the context's own numbers.
        if [&send_cq, &recv_cq].iter().any(|cq| !Arc::ptr_eq(&cq.context, &pd.context))
            || srq.as_ref().is_some_and(|srq| !Arc::ptr_eq(srq.context(), &pd.context))
        {
            return Err(Errno::EINVAL);
        }
        grant_capacities(&mut init.cap, &pd.context.card.device.attributes().limits, srq.is_some());
        let cap = &init.cap;
        let number = pd.context.card.qp_number();
        let options = options(number, cap, init.sq_sig_all);
        let qp = match &srq {
            Some(srq) => pd.pd.create_qp_with_srq(&send_cq.cq, &recv_cq.cq, &srq.srq, options),
            None => pd.pd.create_qp(&send_cq.cq, &recv_cq.cq, options),
        };
        let qp = qp.map_err(failure::resource)?;
        let mut c: ibv_qp_ex = zeroed();
        c.qp_base.context = pd.context.c_ptr();
        c.qp_base.qp_context = init.qp_context;
        c.qp_base.pd = pd.c_ptr();
        (c.qp_base.send_cq, c.qp_base.recv_cq, c.qp_base.srq) = (init.send_cq, init.recv_cq, init.srq);
        (c.qp_base.qp_num, c.qp_base.handle) = (number, number);
        c.qp_base.qp_type = init.qp_type;
        post_ex::show_functions(&mut c);
        let context = Arc::clone(&pd.context);
        // The state of an iWARP queue pair without a connection is INIT (siw and iw_cxgb4 show it so to a query). `state` of the C
        // structure begins as RESET with every device, as in rdma-core.
        let first = if config().face == Face::Roce { qp_state::RESET } else { qp_state::INIT };
        let qp = Arc::new(Self {
            c: CPart::new(c),
            qp,
            context: Arc::clone(&context),
            pd: Used::of(pd),
            companion: OnceLock::new(),
            is_own_peer: AtomicBool::new(false),
            cqs: [Used::of(&send_cq), Used::of(&recv_cq)],
            srq: srq.as_ref().map(Used::of),
            number,
            cap: *cap,
            sq_sig_all: init.sq_sig_all,
            attributes: Mutex::new(ibv_qp_attr { qp_state: first, ..zeroed() }),
            is_paired: AtomicBool::new(false),
            is_reset: AtomicBool::new(first == qp_state::RESET),
            is_extended: AtomicBool::new(false),
            unacknowledged: Unacknowledged::default(),
            drafting: HeldLock::new(!pd.is_of_one_thread()),
            draft: CPart::new(Draft::new(cap.max_send_wr)),
        });
        context.card.add_qp(&qp);
        Handle::publish(Arc::clone(&qp));
        Ok(qp)
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// The number of its companion, if it ever was its own peer.
    pub fn companion_number(&self) -> Option<u32> {
        self.companion.get().map(|companion| companion.number)
    }

    /// The queue pair of the engine that sends its requests.
    #[inline]
    pub fn sender(&self) -> &QueuePair {
        if self.is_own_peer.load(Ordering::Acquire)
            && let Some(companion) = self.companion.get()
        {
            return &companion.qp;
        }
        &self.qp
    }

    /// The queue pair of the engine that has `number` in the pairing.
    pub fn half(&self, number: u32) -> &QueuePair {
        let companion = self.companion.get().filter(|companion| companion.number == number);
        companion.map_or(&self.qp, |companion| &companion.qp)
    }

    /// Calls `f` with the queue pairs of the engine that are connected for it.
    fn each_half(&self, f: impl Fn(&QueuePair) -> Result<(), ResourceError>) -> Result<(), Errno> {
        f(&self.qp).map_err(failure::resource)?;
        if self.is_own_peer.load(Ordering::Acquire) {
            f(self.sender()).map_err(failure::resource)
        } else {
            Ok(())
        }
    }

    /// The state for the program: the one that it set, until the connection determines the state.
    fn state(&self) -> c_int {
        match self.sender().state() {
            QpState::Idle => {
                let set = lock(&self.attributes).qp_state;
                if self.is_paired.load(Ordering::Acquire) { set } else { set.min(qp_state::RTR) }
            }
            QpState::Rts => qp_state::RTS,
            QpState::Closing => qp_state::SQD,
            QpState::Terminate | QpState::Error => qp_state::ERR,
        }
    }

    /// Whether completions wait to be polled in its completion queues.
    pub fn has_unpolled(&self) -> bool {
        self.cqs.iter().any(|cq| !cq.cq.is_empty())
    }

    /// Stores a state that the connection manager or the program set.
    pub fn set_state(&self, state: c_int) {
        self.is_reset.store(state == qp_state::RESET, Ordering::Release);
        lock(&self.attributes).qp_state = state;
        self.c.update(|c| c.qp_base.state = state);
    }

    /// Whether the program has reset it, and not brought it to INIT since.
    pub fn is_reset(&self) -> bool {
        self.is_reset.load(Ordering::Acquire)
    }

    fn modify(self: &Arc<Self>, attributes: &ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
        qp_attributes::check(attributes, mask)?;
        if mask & qp_mask::STATE != 0 {
            self.change_state(attributes, mask)?;
        }
        let mut own = lock(&self.attributes);
        if mask & qp_mask::ACCESS_FLAGS != 0 {
            let allowed = Access::from_bits_truncate(attributes.qp_access_flags & access::REMOTE);
            self.qp.allow(allowed).map_err(failure::resource)?;
        }
        qp_attributes::keep(&mut own, attributes, mask);
        Ok(())
    }

    fn change_state(self: &Arc<Self>, attributes: &ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
        faults::catch();
        let (from, to) = (self.state(), attributes.qp_state);
        match (from, to) {
            (_, qp_state::RESET) => {
                self.unpair();
                self.reset()?;
            }
            (_, qp_state::ERR) => {
                // From here on, the program expects its work to be flushed.
                self.set_state(qp_state::ERR);
                self.each_half(QueuePair::abort)?;
            }
            // The connection manager has connected: a program that sets the states itself does so afterwards (rping -q).
            (qp_state::RTS, qp_state::INIT | qp_state::RTR)
                if mask & qp_mask::AV == 0 && self.is_managed() =>
            {
                return Ok(());
            }
            // The device begins to listen for peers that connect by queue pair number.
            (qp_state::RESET | qp_state::INIT, qp_state::INIT)
                if mask & qp_mask::PORT != 0 && config().pairing_port.is_some() =>
            {
                self.context.card.pairing()?;
            }
            (qp_state::INIT, qp_state::RTR) if mask & qp_mask::AV != 0 => self.pair(attributes)?,
            // iWARP's state for "no further sends" is Closing, from which there is no way back (as with siw and iw_cxgb4).
            (qp_state::RTS, qp_state::SQD) => self.sender().disconnect().map_err(failure::resource)?,
            // The connection manager connects; these steps of programs that set the states themselves do nothing more.
            (qp_state::RESET | qp_state::INIT, qp_state::INIT)
            | (qp_state::INIT | qp_state::RTR, qp_state::RTR)
            | (qp_state::RTR | qp_state::RTS, qp_state::RTS)
            | (qp_state::SQD, qp_state::SQD) => {}
            _ => return Err(Errno::EINVAL),
        }
        self.set_state(to);
        Ok(())
    }

    /// Whether the connection manager has connected the queue pair.
    fn is_managed(&self) -> bool {
        self.qp.state() == QpState::Rts && !self.is_paired.load(Ordering::Acquire)
    }

    /// Connects with the queue pair that the program names by GID and number.
    fn pair(self: &Arc<Self>, attributes: &ibv_qp_attr) -> Result<(), Errno> {
        let route = &attributes.ah_attr.grh;
        let card = &self.context.card;
        let local = card.addresses().get(usize::from(route.sgid_index)).copied();
        let local = local.filter(|_| attributes.ah_attr.is_global != 0).ok_or(Errno::EINVAL)?;
        let names = Names {
            local,
            peer: card::address(route.dgid),
            own_number: self.number,
            peer_number: attributes.dest_qp_num,
        };
        if names.peer.is_ipv4() != local.is_ipv4() {
            return Err(Errno::EINVAL);
        }
        let pairing = card.pairing()?;
        self.is_paired.store(true, Ordering::Release);
        if names.peer == names.local && names.peer_number == names.own_number {
            let companion = self.add_companion()?;
            self.is_own_peer.store(true, Ordering::Release);
            pairing.add(self, Names { own_number: companion, ..names });
            pairing.add(self, Names { peer_number: companion, ..names });
        } else {
            pairing.add(self, names);
        }
        Ok(())
    }

    /// The number of the companion, which is created the first time. It takes no receives.
    fn add_companion(self: &Arc<Self>) -> Result<u32, Errno> {
        if let Some(number) = self.companion_number() {
            return Ok(number);
        }
        let cap = ibv_qp_cap { max_recv_wr: 0, max_recv_sge: 0, ..self.cap };
        let options = options(self.number, &cap, self.sq_sig_all);
        let [send_cq, recv_cq] = &self.cqs;
        let qp = self.pd.pd.create_qp(&send_cq.cq, &recv_cq.cq, options).map_err(failure::resource)?;
        let number = self.context.card.qp_number();
        // A program that calls this from two threads has one companion.
        let number = self.companion.get_or_init(|| Companion { qp, number }).number;
        self.context.card.add_companion(self, number);
        Ok(number)
    }

    /// Whether the peer of a queue pair that is connected by number has left, while the program still uses it.
    pub fn was_left(&self) -> bool {
        self.is_paired.load(Ordering::Acquire) && lock(&self.attributes).qp_state != qp_state::ERR
    }

    fn unpair(&self) {
        if self.is_paired.swap(false, Ordering::AcqRel)
            && let Ok(pairing) = self.context.card.pairing()
        {
            pairing.remove(self.number);
            if let Some(companion) = self.companion_number() {
                pairing.remove(companion);
            }
        }
    }

    /// Waits for the peer of a queue pair that is connected by number: the program may post before the peer is ready. Returns
    /// whether there is such a peer.
    #[cold]
    pub fn awaits_peer(&self) -> bool {
        if !self.is_paired.load(Ordering::Acquire) {
            return false;
        }
        let begin = Instant::now();
        while self.sender().state() == QpState::Idle && begin.elapsed() < pairing::LIMIT {
            self.qp.device().progress();
            std::thread::sleep(PEER_WAIT);
        }
        true
    }

    /// Resets the queue pair; an existing connection ends first.
    fn reset(&self) -> Result<(), Errno> {
        let begin = Instant::now();
        self.each_half(|half| {
            if half.state() != QpState::Idle {
                half.abort()?;
            }
            while let Err(error) = half.reset() {
                if begin.elapsed() > RESET_WAIT {
                    return Err(error);
                }
                half.device().progress();
            }
            Ok(())
        })?;
        self.is_own_peer.store(false, Ordering::Release);
        Ok(())
    }

    fn query(&self) -> ibv_qp_attr {
        let mut attributes = *lock(&self.attributes);
        attributes.qp_state = self.state();
        attributes.cur_qp_state = attributes.qp_state;
        attributes.cap = self.cap;
        attributes.port_num = 1;
        if let Ok(info) = self.qp.query()
            && info.addresses.is_some()
        {
            let depth = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
            (attributes.max_rd_atomic, attributes.max_dest_rd_atomic) = (depth(info.ord), depth(info.ird));
        }
        self.c.update(|c| c.qp_base.state = attributes.qp_state);
        attributes
    }

    /// The attributes with which the queue pair was created.
    fn init_attributes(&self) -> ibv_qp_init_attr {
        let base = self.c.update(|c| c.qp_base);
        ibv_qp_init_attr {
            qp_context: base.qp_context,
            send_cq: base.send_cq,
            recv_cq: base.recv_cq,
            srq: base.srq,
            cap: self.cap,
            qp_type: base.qp_type,
            sq_sig_all: self.sq_sig_all,
        }
    }
}

/// The entries of a queue for which a program asked for `asked`: rounded up as other devices do, and not more than `most` unless the
/// program asked for more, which is refused.
pub fn granted(asked: u32, least: u32, most: u32) -> u32 {
    let rounded = asked.max(least).checked_next_power_of_two().unwrap_or(asked);
    asked.max(rounded.min(most))
}

/// Creates a queue pair with the attributes of the program's structure, and stores the capacities there.
pub fn create(pd: &Arc<Pd>, init: Out<ibv_qp_init_attr>) -> Result<Arc<Qp>, Errno> {
    let mut attributes = init.read().ok_or(Errno::EINVAL)?;
    let qp = Qp::new(pd, &mut attributes)?;
    init.write(attributes)?;
    Ok(qp)
}

pub extern "C" fn ibv_create_qp(pd: Handle<Pd>, init: Out<ibv_qp_init_attr>) -> Handle<Qp> {
    let made = pd.object().and_then(|pd| create(&pd, init));
    pointer(made.map(|qp| Handle::of(qp.c_ptr())))
}

/// The domain that `ibv_qp_init_attr_ex` names, or null.
pub fn domain_of(attributes: &ibv_qp_init_attr_ex) -> *mut ibv_pd {
    if attributes.comp_mask & QP_INIT_PD != 0 { attributes.pd } else { std::ptr::null_mut() }
}

/// Creates a queue pair as `ibv_create_qp_ex` and `rdma_create_qp_ex` do, in `pd`, and stores its capacities.
pub fn create_ex(pd: &Arc<Pd>, attributes: &mut ibv_qp_init_attr_ex) -> Result<Arc<Qp>, Errno> {
    let known = QP_INIT_PD | QP_INIT_CREATE_FLAGS | QP_INIT_SEND_OPS_FLAGS;
    let has = |bit| attributes.comp_mask & bit != 0;
    if attributes.comp_mask & !known != 0
        || has(QP_INIT_CREATE_FLAGS) && attributes.create_flags != 0
        || has(QP_INIT_SEND_OPS_FLAGS) && attributes.send_ops_flags & !SEND_OPS != 0
    {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut base = attributes.base();
    let qp = Qp::new(pd, &mut base)?;
    qp.is_extended.store(has(QP_INIT_SEND_OPS_FLAGS), Ordering::Release);
    attributes.cap = base.cap;
    Ok(qp)
}

pub extern "C" fn create_qp_ex(context: Handle<Context>, init: Out<ibv_qp_init_attr_ex>) -> Handle<Qp> {
    let make = || {
        context.object()?;
        let mut attributes = init.read().ok_or(Errno::EINVAL)?;
        let pd = Handle::<Pd>::of(domain_of(&attributes)).object()?;
        let qp = create_ex(&pd, &mut attributes)?;
        init.write(attributes)?;
        Ok(Handle::of(qp.c_ptr()))
    };
    pointer(make())
}

/// Null unless the program asked for the functions of `ibv_qp_ex`.
pub extern "C" fn ibv_qp_to_qp_ex(qp: Handle<Qp>) -> Handle<Qp> {
    let is_extended = qp.object().is_ok_and(|qp| qp.is_extended.load(Ordering::Acquire));
    if is_extended { qp } else { Handle::NULL }
}

pub extern "C" fn ibv_modify_qp(qp: Handle<Qp>, attributes: In<ibv_qp_attr>, mask: c_int) -> c_int {
    number(qp.object().and_then(|qp| qp.modify(attributes.get().ok_or(Errno::EINVAL)?, mask)))
}

pub extern "C" fn ibv_query_qp(
    qp: Handle<Qp>,
    attributes: Out<ibv_qp_attr>,
    mask: c_int,
    init: Out<ibv_qp_init_attr>,
) -> c_int {
    number(qp.object().and_then(|qp| {
        qp_attributes::check_query(mask)?;
        attributes.write(qp.query())?;
        init.write(qp.init_attributes())
    }))
}

/// Bytes of a message are placed as segments arrive, in no guaranteed order.
pub extern "C" fn ibv_query_qp_data_in_order(_qp: Handle<Qp>, _operation: c_int, _flags: u32) -> c_int {
    0
}

/// Destroys a queue pair, after the program has acknowledged its events.
pub fn destroy(qp: Handle<Qp>) -> Result<(), Errno> {
    qp.retire(|qp| {
        qp.unpair();
        qp.context.card.remove_qp(qp);
        qp.unacknowledged.drain();
        qp.drafting.drain();
        qp.pd.release();
        qp.cqs.iter().for_each(Used::release);
        qp.srq.iter().for_each(Used::release);
    })
}

pub extern "C" fn ibv_destroy_qp(qp: Handle<Qp>) -> c_int {
    number(destroy(qp))
}
