//! [`Local`]: an interface with a loop for the connections of this device to itself.
//!
//! The kernel sends what goes to an address of the host over `lo`, so no frame of such a connection ever crosses the interface. A
//! NIC has a loop for them. A device gets this one when it connects to one of its own addresses for the first time, so other
//! devices do not pay for it. A helper's device needs none: the helper's switch returns its frames, and those of other
//! processes with the same address.

use std::net::IpAddr;

use xwarp_tcp::{
    forward_link,
    link::{ChunksMut, Link, LoopedFrames, Pieces, QueueId, RingFull, RxFrame, Steer, SteerError, TxFrame},
    wire::{Flow, Mac, VlanTags},
};

use crate::{
    forward_interface,
    interface::{Interface, NextHop, Route, RouteError},
};

/// An interface with the loop.
pub(crate) struct Local {
    inner: Box<dyn Interface>,
    frames: LoopedFrames,
}

impl Local {
    pub(crate) fn over(inner: Box<dyn Interface>) -> Self {
        Self { inner, frames: LoopedFrames::default() }
    }

    fn has(&self, address: IpAddr) -> bool {
        self.inner.attributes().addresses.contains(&address)
    }

    /// Whether a rule is for a connection whose frames do not come from the interface.
    fn is_looped(&self, rule: &Steer) -> bool {
        matches!(rule, Steer::Flow(flow) if self.has(flow.remote.ip()))
    }
}

/// The route from an interface that this process owns to one of the interface's own addresses; `None` to other addresses.
pub(crate) fn route(
    link: &dyn Interface,
    peer: IpAddr,
    source: Option<IpAddr>,
) -> Option<Result<Route, RouteError>> {
    let attributes = link.attributes();
    if attributes.shared || !attributes.addresses.contains(&peer) {
        return None;
    }
    let source = source.unwrap_or(peer);
    if !attributes.addresses.contains(&source) || source.is_ipv4() != peer.is_ipv4() {
        let text = format!("there is no path from {source} to {peer} on {}", attributes.name);
        return Some(Err(RouteError::Address(text)));
    }
    Some(Ok(Route {
        source,
        source_mac: Mac::LOOPED,
        next_hop: peer,
        next_hop_mac: Mac::LOOPED,
        vlan: VlanTags::default(),
        mtu: attributes.mtu,
        queues: 1,
    }))
}

impl Link for Local {
    forward_link!(inner: chunk_bytes, offloads_checksums, is_within_host, tx_available, rx_capacity, rx_available, alloc, tx_chunks_into,
        release, flush);

    fn receive(&mut self, batch: &mut Vec<RxFrame>, max: usize) -> usize {
        let looped = self.frames.receive(batch, max.div_ceil(2));
        looped + self.inner.receive(batch, max - looped)
    }

    fn rx_chunks(&self, frame: &RxFrame) -> Pieces<'_> {
        if LoopedFrames::owns(frame) { self.frames.pieces(frame) } else { self.inner.rx_chunks(frame) }
    }

    fn rx_head(&self, frame: &RxFrame) -> &[u8] {
        if LoopedFrames::owns(frame) { self.frames.bytes(frame) } else { self.inner.rx_head(frame) }
    }

    fn recycle(&mut self, frame: RxFrame) {
        if LoopedFrames::owns(&frame) {
            self.frames.recycle(frame);
        } else {
            self.inner.recycle(frame);
        }
    }

    fn reassemble(&mut self, frame: RxFrame) -> Option<RxFrame> {
        if LoopedFrames::owns(&frame) {
            self.frames.recycle(frame);
            return None;
        }
        self.inner.reassemble(frame)
    }

    fn submit(&mut self, queue: QueueId, frame: &mut TxFrame, len: usize) -> Result<(), RingFull> {
        let chunk_bytes = self.inner.chunk_bytes();
        let looped = {
            let mut chunks = ChunksMut::default();
            let is_looped =
                self.inner.tx_chunks_into(frame, &mut chunks) && chunks.chunk(0).starts_with(&Mac::LOOPED.0);
            let chunks = chunks.into_iter().map(|chunk| &*chunk);
            // The checksum may be left to the link: a receiver takes the sum of the pseudo-header for one of a local sender.
            is_looped.then(|| self.frames.push(chunks, len, chunk_bytes, queue))
        };
        looped.unwrap_or_else(|| self.inner.submit(queue, frame, len))
    }

    fn steer(&mut self, rule: Steer) -> Result<(), SteerError> {
        if self.is_looped(&rule) { Ok(()) } else { self.inner.steer(rule) }
    }

    fn unsteer(&mut self, rule: Steer) {
        if !self.is_looped(&rule) {
            self.inner.unsteer(rule);
        }
    }

    fn hand_over(&mut self, frame: &RxFrame, flow: &Flow) -> bool {
        !LoopedFrames::owns(frame) && self.inner.hand_over(frame, flow)
    }
}

impl Interface for Local {
    forward_interface!(inner: attributes, readiness, resolver, kicker, change, counters);

    fn next_hop(&mut self, flow: &Flow, unanswered: bool) -> Option<NextHop> {
        if self.has(flow.remote.ip()) {
            let (address, mac) = (flow.remote.ip(), Some(Mac::LOOPED));
            return Some(NextHop::Neighbour { address, mac, mtu: None });
        }
        self.inner.next_hop(flow, unanswered)
    }

    fn has_frames(&self) -> bool {
        self.frames.any()
    }
}
