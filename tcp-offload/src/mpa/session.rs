//! One connection's MPA.
use super::*;
use crate::{link::{FrameWriter, Link, RxFrame}, seq::StreamOffset, tcp, time::Instant, ulp::{ConnId, ListenerId, Ulp}, wire::Path};

/// MPA of one connection, between its TCP and the upper layer.
#[derive(Debug)]
pub struct Session<P> { counters: Counters, placed: Option<P> }

#[allow(missing_docs, unused_variables, clippy::all, clippy::pedantic)]
impl<P: Copy + std::fmt::Debug> Session<P> {
    pub fn initiator(now: Instant, config: MpaConfig, private_data: Vec<u8>, ird: u16, ord: u16) -> Result<Self, SetupError> { Err(SetupError::NoRequest) }
    pub fn responder(now: Instant, config: MpaConfig, listener: ListenerId) -> Self { Self { counters: Counters::default(), placed: None } }
    /// Emits Established.
    pub fn accept<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId, path: &Path, params: AcceptParams) -> Result<(), SetupError> { Err(SetupError::NoRequest) }
    pub fn reject(&mut self, now: Instant, private_data: &[u8]) -> Result<(), SetupError> { Err(SetupError::NoRequest) }
    /// `emss` is TCP's current EMSS, `out.room()` the smaller of it and what the window allows.
    pub fn fill<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId, offset: StreamOffset, emss: usize, out: &mut FrameWriter<'_>) -> tcp::Filled { tcp::Filled::Nothing }
    pub fn take<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId, path: &Path, link: &mut dyn Link, arrival: tcp::Arrival, frame: RxFrame) -> bool { link.recycle(frame); true }
    pub fn resume<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId, link: &mut dyn Link) {}
    pub fn peer_closed<U: Ulp<Placed = P>>(&mut self, ulp: &mut U, conn: ConnId) {}
    pub fn on_timer<U: Ulp<Placed = P>>(&mut self, now: Instant, ulp: &mut U, conn: ConnId) {}
    pub fn deadline(&self) -> Option<Instant> { None }
    /// The start-up failed: abort TCP, then tell `Closed(Startup(error))`. Look after take, on_timer, peer_closed.
    pub fn failed(&self) -> Option<MpaError> { None }
    pub fn held_bytes(&self) -> usize { 0 }
    pub fn holds_undelivered(&self) -> bool { false }
    pub fn counters(&self) -> Counters { self.counters }
    pub fn release(&mut self, link: &mut dyn Link) {}
}
