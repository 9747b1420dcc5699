//! [`Inbox`]: copies of frames that arrived on queues of other owners than their flows'.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use xwarp_tcp::wire::Flow;

use crate::lease::lock;

/// Most frames that wait in an inbox. Further ones are dropped, as by a full receive ring, and TCP recovers.
const MAX_HANDED_OVER: usize = 64;

/// The frames that wait for one owner. When there is no room, the peer with the most frames loses one, and of that peer the flow
/// with the most frames: a flood takes no room from peers, or from flows, that have fewer frames than their share.
#[derive(Debug)]
pub(crate) struct Inbox {
    waiting: Mutex<Waiting>,
    /// Whether there are frames, for a look without the lock. Changes under the lock only.
    any: AtomicBool,
    /// Readable while there are frames.
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct Waiting {
    frames: VecDeque<(Flow, Vec<u8>)>,
    /// Number of frames of each peer.
    peers: BTreeMap<IpAddr, usize>,
    /// Number of frames of each flow.
    flows: BTreeMap<Flow, usize>,
}

/// Adds to a count, or takes from it; no entry stands for 0.
fn count<K: Ord + Copy>(counts: &mut BTreeMap<K, usize>, key: K, more: bool) {
    let count = counts.get(&key).copied().unwrap_or(0);
    match if more { count + 1 } else { count.saturating_sub(1) } {
        0 => counts.remove(&key),
        count => counts.insert(key, count),
    };
}

impl Waiting {
    fn count(&mut self, flow: Flow, more: bool) {
        count(&mut self.peers, flow.remote.ip(), more);
        count(&mut self.flows, flow, more);
    }

    fn push(&mut self, flow: Flow, frame: Vec<u8>) {
        self.count(flow, true);
        self.frames.push_back((flow, frame));
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        let (flow, frame) = self.frames.pop_front()?;
        self.count(flow, false);
        Some(frame)
    }

    /// The flow that must lose a frame so that `flow` gets room; `None` if that is `flow` itself.
    fn to_drop(&self, flow: Flow) -> Option<Flow> {
        let own = flow.remote.ip();
        let (peer, _) = self.peers.iter().max_by_key(|(peer, count)| (**count, **peer == own))?;
        let flows = self.flows.iter().filter(|(flow, _)| flow.remote.ip() == *peer);
        let (most, _) = flows.max_by_key(|(other, count)| (**count, **other == flow))?;
        (*most != flow).then_some(*most)
    }

    /// Drops the newest frame of `flow`.
    fn drop_newest(&mut self, flow: Flow) {
        if let Some(place) = self.frames.iter().rposition(|(other, _)| *other == flow) {
            self.frames.remove(place);
            self.count(flow, false);
        }
    }
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { waiting: Mutex::default(), any: AtomicBool::new(false), bell })
    }

    /// Adds a frame; returns whether no frame was dropped, this one or another.
    pub(crate) fn put(&self, flow: Flow, frame: Vec<u8>) -> bool {
        let mut waiting = lock(&self.waiting);
        let full = waiting.frames.len() >= MAX_HANDED_OVER;
        if full {
            let Some(other) = waiting.to_drop(flow) else { return false };
            waiting.drop_newest(other);
        }
        waiting.push(flow, frame);
        if !self.any.swap(true, Ordering::Release) {
            // Fails only when the counter is at its limit, and then the descriptor is readable.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
        !full
    }

    /// The oldest frame.
    pub(crate) fn take(&self) -> Option<Vec<u8>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let mut waiting = lock(&self.waiting);
        let frame = waiting.pop();
        if waiting.frames.is_empty() && self.any.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        }
        frame
    }

    /// Readable while there are frames.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn flow(peer: u8, port: u16) -> Flow {
        Flow { local: ([10, 0, 0, 1], 7).into(), remote: ([10, 0, 0, peer], port).into() }
    }

    /// The peer and the port in each waiting frame, in order.
    fn drain(inbox: &Inbox) -> Vec<(u8, u8)> {
        let taken: Vec<_> = std::iter::from_fn(|| inbox.take()).map(|frame| (frame[0], frame[1])).collect();
        let waiting = lock(&inbox.waiting);
        assert!(waiting.peers.is_empty() && waiting.flows.is_empty(), "counts are left");
        taken
    }

    fn put(inbox: &Inbox, peer: u8, port: u8) -> bool {
        inbox.put(flow(peer, port.into()), vec![peer, port])
    }

    #[test]
    fn an_inbox_is_bounded_and_readable_while_it_has_frames() {
        let inbox = Inbox::new().unwrap();
        let readable = || {
            let mut set = [PollFd::new(&inbox.bell, PollFlags::IN)];
            poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
        };
        assert!(inbox.take().is_none());
        assert!(!readable());
        for number in 0..MAX_HANDED_OVER {
            assert!(inbox.put(flow(2, 7), vec![number as u8]));
        }
        assert!(!inbox.put(flow(2, 7), vec![0]));
        for number in 0..MAX_HANDED_OVER {
            assert!(readable());
            assert_eq!(inbox.take(), Some(vec![number as u8]));
        }
        assert!(!readable());
        assert!(inbox.take().is_none());
        assert!(put(&inbox, 2, 1));
        assert!(readable());
    }

    #[test]
    fn a_flood_of_a_peer_leaves_others_their_share() {
        let inbox = Inbox::new().unwrap();
        // A flood with many flows, into an inbox that is full of it.
        for number in 0..1000 {
            put(&inbox, 2, number as u8 % 40);
        }
        let honest: Vec<_> = (0..20).map(|number| (3, number)).collect();
        for &(peer, port) in &honest {
            assert!(!put(&inbox, peer, port), "a frame of the flood is dropped for it");
            for number in 0..100 {
                put(&inbox, 2, number % 40);
            }
        }
        let waiting = drain(&inbox);
        assert_eq!(waiting.len(), MAX_HANDED_OVER);
        assert_eq!(
            waiting.into_iter().filter(|(peer, _)| *peer == 3).collect::<Vec<_>>(),
            honest,
            "in order"
        );
    }

    #[test]
    fn a_flood_in_one_flow_leaves_other_flows_of_its_peer_their_share() {
        let inbox = Inbox::new().unwrap();
        for _ in 0..1000 {
            put(&inbox, 2, 1);
        }
        for _ in 0..50 {
            put(&inbox, 2, 2);
            put(&inbox, 2, 1);
        }
        let honest = drain(&inbox).into_iter().filter(|(_, port)| *port == 2).count();
        assert_eq!(honest, MAX_HANDED_OVER / 2);
    }

    #[test]
    fn with_equal_shares_the_newest_frame_is_dropped() {
        let inbox = Inbox::new().unwrap();
        for number in 0..MAX_HANDED_OVER as u8 {
            put(&inbox, number, 1);
        }
        let before = inbox.waiting.lock().unwrap().frames.clone();
        assert!(!put(&inbox, 5, 1));
        assert_eq!(inbox.waiting.lock().unwrap().frames, before);
        assert_eq!(drain(&inbox).len(), MAX_HANDED_OVER);
    }
}
