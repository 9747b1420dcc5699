//! A bare stack for tests of its tables.

use super::{ConnectParams, Stack, StackConfig};
use crate::{
    framing::{AnySession, FramingConfig},
    mpa::MpaConfig,
    seq::SeqNum,
    sim::{Counting, Faults, SimLink, Wire, WireConfig},
    tcp::{Connection, testing::unhashed},
    time::Instant,
    ulp::ConnId,
    wire::Path,
};

/// Initial sequence number of the connections that [`Bench::insert`] makes.
pub(super) const ISS: SeqNum = SeqNum::new(7);

pub(super) struct Bench {
    pub stack: Stack<Counting>,
    pub link: SimLink,
    pub upper: Counting,
}

impl Bench {
    pub fn new() -> Self {
        let (_, mut links) = Wire::switch(&WireConfig::default(), &[Faults::default()]);
        let stack = Stack::new(StackConfig::default());
        Self { stack, link: links.remove(0), upper: Counting::default() }
    }

    /// A connection that has sent its SYN.
    pub fn connect(&mut self, path: Path) -> ConnId {
        let (mpa, params) = (MpaConfig::default(), ConnectParams::default());
        self.stack.connect(Instant::ZERO, &mut self.link, path, mpa, params).unwrap()
    }

    /// A connection that has not sent its SYN, which will have the number [`ISS`].
    pub fn insert(&mut self, path: Path) -> ConnId {
        let tcp = Connection::connect(Instant::ZERO, &self.stack.tcp, path, unhashed(ISS.value()));
        let config = FramingConfig::default();
        let session = AnySession::initiator(config, 0, Vec::new(), 0, 0).unwrap();
        self.stack.insert(path.flow, tcp, session, None)
    }
}
