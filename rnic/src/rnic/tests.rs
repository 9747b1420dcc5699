//! Two RNICs connected by a pipe: ULPDUs pass from one upper-layer interface to the other without TCP and MPA, in order
//! or with gaps.

mod blame;
mod conformance;
mod connections;
mod hot_path;
mod one_step;
mod operations;
mod order_field;
mod ordering;
mod placement;
mod queues;
mod registry;
mod rights;
mod sizes;
mod states;
mod versions;
mod windows;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use xwarp_tcp::{
    mpa::{Agreed, MpaConfig, Revision, Rtr},
    secret::Secret,
    sim::{self, PulledUlpdu},
    stack::ConnectParams,
    ulp::{Arrival, ConnId, Event, Pulled, Refusal, Ulp, Ulpdu},
    wire::Path,
};

use super::*;
use crate::{
    ddp::STag,
    memory::{Memory, Pages},
    rdmap::TerminateHeader,
};

/// The one connection of these tests.
const CONN: ConnId = ConnId { index: 0, generation: 0 };
/// MULPDU of a path of 1500 bytes.
const MULPDU: usize = 1442;
const ALL: Access = Access::all();

/// Counts notifications.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Notify for Bell {
    fn notify(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A registry without objects.
fn registry(limits: Limits, secret: u64) -> Arc<Registry> {
    Arc::new(Registry::new(limits, &Secret::from_number(secret)))
}

/// The first attempt of an initiator with these settings.
fn attempt(mpa: MpaConfig) -> Attempt {
    let (fallbacks, params) = (VecDeque::new(), ConnectParams::default());
    Attempt { path: path(), fallbacks, framing: mpa.into(), params, tuning: None, lacks: Lacks::default() }
}

impl Rnic {
    /// Posts to a shared receive queue of this engine alone.
    fn post_srq_recv(&mut self, srq: SrqId, request: &RecvRequest<'_>) -> Result<(), PostError> {
        if !self.registry().srq(srq).unwrap().post(request)?.is_empty() {
            self.srq_refilled(srq);
        }
        Ok(())
    }

    /// All deferred work.
    fn deferred(&mut self) -> Vec<Deferred> {
        std::iter::from_fn(|| self.next_deferred()).collect()
    }

    /// The next connection to resume. Other work before it is dropped.
    fn next_resume(&mut self) -> Option<ConnId> {
        loop {
            match self.next_deferred()? {
                Deferred::Resume(conn) => return Some(conn),
                Deferred::Refilled(srq) => {
                    if let Some(conn) = self.next_starved(srq) {
                        let rest = self.deferred();
                        self.srq_refilled(srq);
                        self.shared.deferred.extend(rest);
                        return Some(conn);
                    }
                }
                _ => {}
            }
        }
    }
}

/// One end.
struct End {
    rnic: Rnic,
    pd: PdId,
    cq: CqId,
    ring: Arc<CompletionRing>,
    qp: QpId,
    /// Stream offset of the next FPDU.
    offset: u64,
    /// ULPDUs in flight to the other end, with the stream offset of each end.
    wire: VecDeque<(Vec<u8>, u64)>,
    /// The end has finished its direction.
    finished: bool,
    mulpdu: usize,
}

impl End {
    fn new(attributes: impl FnOnce(&mut Rnic, QpAttributes) -> QpAttributes) -> Self {
        let mut rnic = Rnic::new(registry(Limits::default(), 7));
        let pd = rnic.registry().alloc_pd().unwrap();
        let (cq, ring) = rnic.registry().create_cq(4096, None).unwrap();
        let attributes = attributes(&mut rnic, QpAttributes::new(pd, cq, cq));
        let qp = rnic.create_qp(attributes).unwrap();
        rnic.connecting(qp, CONN, attempt(MpaConfig::default()));
        Self { rnic, pd, cq, ring, qp, offset: 0, wire: VecDeque::new(), finished: false, mulpdu: MULPDU }
    }

    fn establish(&mut self, ird: u16, ord: u16, rtr: Option<Rtr>) {
        self.establish_with(Revision::Two, ird, ord, rtr);
    }

    fn establish_with(&mut self, revision: Revision, ird: u16, ord: u16, rtr: Option<Rtr>) {
        let agreed = Agreed {
            ird,
            ord,
            peer_ird: ord,
            peer_ord: ird,
            crc: true,
            markers_sent: false,
            markers_received: false,
            revision,
            peer_to_peer: rtr.is_some(),
            rtr,
            send_immediate: revision == Revision::Two,
        };
        let agreed = xwarp_tcp::framing::Agreed::Mpa(agreed);
        self.rnic.event(CONN, Event::Established { path: path(), agreed, private_data: Vec::new() });
    }

    /// Registers a region of `len` bytes with ascending values from `first`.
    fn region(&mut self, len: usize, first: u8, access: Access) -> (STag, Memory) {
        let memory = Memory::anonymous(len.max(1), Pages::Normal).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| first.wrapping_add(i as u8)).collect();
        memory.write(0, &bytes).unwrap();
        let registration =
            Registration { pd: self.pd, memory: memory.clone(), access, base: 0, stream: None };
        (self.rnic.registry().register(registration).unwrap(), memory)
    }

    fn post(&mut self, wr_id: u64, operation: Operation, pieces: &[Sge]) {
        self.post_with(wr_id, operation, Payload::Gather(pieces), SendFlags::SIGNALED);
    }

    fn post_with(&mut self, wr_id: u64, operation: Operation, payload: Payload<'_>, flags: SendFlags) {
        self.rnic.post_send(self.qp, &WorkRequest { wr_id, operation, payload, flags }).unwrap();
    }

    fn receive(&mut self, wr_id: u64, scatter: &[Sge]) {
        self.rnic.post_recv(self.qp, &RecvRequest { wr_id, scatter }).unwrap();
    }

    /// Pulls one ULPDU, if there is one.
    fn pull(&mut self) -> Option<Vec<u8>> {
        let PulledUlpdu { pulled, ulpdu, end } =
            sim::pull(&mut self.rnic, CONN, self.offset, self.mulpdu, self.mulpdu);
        match pulled {
            Pulled::Ulpdu | Pulled::LastUlpdu => {
                assert!(ulpdu.len() <= self.mulpdu);
                self.offset = end;
                Some(ulpdu)
            }
            Pulled::Nothing => None,
            Pulled::Finish => {
                self.finished = true;
                None
            }
        }
    }

    /// Pulls everything onto the wire.
    fn pull_all(&mut self) {
        while let Some(ulpdu) = self.pull() {
            self.wire.push_back((ulpdu, self.offset));
        }
    }

    fn place(&mut self, ulpdu: &[u8], arrival: Arrival) -> Result<Placed, Refusal> {
        self.rnic.place(CONN, &Ulpdu::new(&[ulpdu]), arrival)
    }

    /// Places and delivers a ULPDU in order.
    fn take(&mut self, ulpdu: &[u8]) -> Result<(), Refusal> {
        let placed = self.place(ulpdu, Arrival::InOrder)?;
        self.rnic.deliver(CONN, placed)
    }

    fn poll(&mut self) -> Vec<WorkCompletion> {
        let mut completions = Vec::new();
        self.ring.poll(&mut completions, usize::MAX);
        completions
    }

    /// Completions as (`wr_id`, status).
    fn outcomes(&mut self) -> Vec<(u64, WcStatus)> {
        self.poll().iter().map(|c| (c.wr_id, c.status)).collect()
    }

    fn state(&self) -> QpState {
        self.rnic.query_qp(self.qp).unwrap().state
    }

    fn cm_events(&mut self) -> Vec<CmEvent> {
        std::iter::from_fn(|| self.rnic.next_cm_event()).collect()
    }

    fn async_events(&mut self) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| self.rnic.next_async_event()).collect()
    }

    fn user(&self) -> User {
        User { pd: self.pd, qp: self.qp, rights: Access::all() }
    }

    /// Pulls the Terminate, which must be next.
    fn terminate(&mut self) -> TerminateHeader {
        let ulpdu = self.pull().expect("a Terminate is due");
        assert_eq!(ulpdu[..2], [0x41, 0x47], "L, DDP version 1, RDMAP version 1, opcode 7");
        assert_eq!(ulpdu[6..18], [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0], "queue 2, MSN 1, MO 0");
        assert_eq!(self.pull(), None);
        assert!(self.finished, "nothing follows a Terminate");
        TerminateHeader::parse(&ulpdu[18..]).unwrap()
    }
}

fn path() -> Path {
    sim::path(([192, 0, 2, 1], 1), ([192, 0, 2, 1], 2))
}

/// Both ends, and the pipe between them.
struct Pair {
    a: End,
    b: End,
}

impl Pair {
    fn new() -> Self {
        Self::with(|_, attributes| attributes)
    }

    /// Both ends, with default attributes as changed by `attributes`; IRD and ORD are 4.
    fn with(attributes: impl Fn(&mut Rnic, QpAttributes) -> QpAttributes) -> Self {
        let mut pair = Self { a: End::new(&attributes), b: End::new(&attributes) };
        pair.a.establish(4, 4, None);
        pair.b.establish(4, 4, None);
        pair
    }

    /// Transfers everything in both directions, in order and acknowledged, until nothing is left.
    fn run(&mut self) {
        while Self::carry(&mut self.a, &mut self.b) | Self::carry(&mut self.b, &mut self.a) {}
    }

    /// Transfers the ULPDUs of `from`; returns whether there were any.
    fn carry(from: &mut End, to: &mut End) -> bool {
        from.pull_all();
        let mut moved = false;
        while let Some((ulpdu, end)) = from.wire.pop_front() {
            match to.take(&ulpdu) {
                Ok(()) => {
                    moved = true;
                    from.rnic.acked(CONN, end);
                }
                Err(Refusal::Withhold) => {
                    from.wire.push_front((ulpdu, end));
                    break;
                }
                Err(Refusal::Stop) => {
                    from.wire.clear();
                    break;
                }
            }
        }
        moved
    }
}

fn whole(key: STag, len: u32) -> Sge {
    Sge { key, offset: 0, len }
}

fn bytes(memory: &Memory) -> Vec<u8> {
    let mut out = vec![0; memory.len()];
    memory.read(0, &mut out).unwrap();
    out
}

const SEND: Operation = Operation::Send { invalidate: None };

fn write_to(key: STag, offset: u64) -> Operation {
    Operation::Write { remote: Remote { key, offset } }
}

fn read_from(key: STag, offset: u64) -> Operation {
    Operation::Read { remote: Remote { key, offset }, invalidate: false }
}
