//! [`Lease`]: the part of an owned interface that one of several owners has, and the steering program that they share.
//!
//! Each owner has queues of its own, with their sockets and frame memory. XDP can redirect a frame only to the socket
//! of the queue on which the frame arrived, and the sender or the NIC chooses that queue. A frame that arrives on a
//! queue of another owner than its flow's is handed over: a copy of its bytes goes to the inbox of the flow's owner.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smallvec::SmallVec;
use xwarp_prog::{AttachError, Kept, SteeringProgram};
use xwarp_tcp::link::{Steer, SteerError};
use xwarp_tcp::wire::Flow;

use crate::inbox::Inbox;
use crate::sys::NotInherited;

/// The attached program, whose rules are those of all owners.
#[derive(Debug)]
struct Steering {
    // Dropped before the descriptor of the program's link.
    not_inherited: Mutex<NotInherited>,
    program: SteeringProgram,
    rules: Mutex<Rules>,
    /// One for each owner; none when there is one owner only.
    inboxes: Vec<Inbox>,
}

/// The owners of each rule, by number. A flow has one, and a listening port one or several.
#[derive(Debug, Default)]
struct Rules(BTreeMap<Steer, SmallVec<[u16; 4]>>);

/// One owner's part of an interface. Dropping it removes the owner's steering rules; the last one detaches the program.
#[derive(Debug)]
pub(crate) struct Lease {
    steering: Arc<Steering>,
    number: u16,
    /// The process that made it; a child (`fork`) has a copy, and must not change rules.
    process: u32,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds one of these locks panics between two changes that belong together.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Rules {
    /// Whether `owner` may add the rule: a flow has one owner.
    fn admits(&self, rule: Steer, owner: u16) -> bool {
        matches!(rule, Steer::Listener { .. })
            || self.0.get(&rule).is_none_or(|owners| owners.contains(&owner))
    }

    fn add(&mut self, rule: Steer, owner: u16) {
        let owners = self.0.entry(rule).or_default();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }

    /// Removes the rule of `owner`. Returns whether it was the last owner's.
    fn remove(&mut self, rule: Steer, owner: u16) -> bool {
        let Some(owners) = self.0.get_mut(&rule) else { return false };
        owners.retain(|other| *other != owner);
        let last = owners.is_empty();
        if last {
            self.0.remove(&rule);
        }
        last
    }

    /// The owner other than `asking` to which frames of `flow` must go: that of the flow, or one that listens at the
    /// flow's local address while `asking` does not. Owners begin to listen one after another, but the program steers
    /// SYNs of all queues as soon as the first one listens.
    fn elsewhere(&self, flow: &Flow, asking: u16) -> Option<u16> {
        let has = |rule| self.0.get(&rule).map(SmallVec::as_slice);
        let (addr, port) = (flow.local.ip(), flow.local.port());
        let owners = has(Steer::Flow(*flow))
            .or_else(|| has(Steer::Listener { addr: Some(addr), port }))
            .or_else(|| has(Steer::Listener { addr: None, port }))?;
        if owners.contains(&asking) { None } else { owners.first().copied() }
    }

    fn of(&self, owner: u16) -> Vec<Steer> {
        self.0.iter().filter(|(_, owners)| owners.contains(&owner)).map(|(rule, _)| *rule).collect()
    }
}

impl Lease {
    /// The leases of `count` owners of an interface to which `program` is attached.
    pub(crate) fn split(program: SteeringProgram, count: u16) -> io::Result<Vec<Self>> {
        let inboxes = if count > 1 { count } else { 0 };
        let inboxes = (0..inboxes).map(|_| Inbox::new()).collect::<io::Result<_>>()?;
        let not_inherited = Mutex::new(program.with_link(|link| NotInherited::new(link)));
        let rules = Mutex::default();
        let steering = Arc::new(Steering { not_inherited, program, rules, inboxes });
        let process = std::process::id();
        Ok((0..count).map(|number| Self { steering: Arc::clone(&steering), number, process }).collect())
    }

    pub(crate) fn program(&self) -> &SteeringProgram {
        &self.steering.program
    }

    /// Attaches the program again if somebody else has detached it, and returns whether that was so.
    ///
    /// # Errors
    /// As [`SteeringProgram::keep_attached`].
    pub(crate) fn keep_attached(&self) -> Result<Kept, AttachError> {
        let kept = self.program().keep_attached()?;
        if kept == Kept::Again {
            *lock(&self.steering.not_inherited) = self.program().with_link(|link| NotInherited::new(link));
        }
        Ok(kept)
    }

    /// The rules of all owners; `None` for a single owner, who owns all rules of the program.
    fn rules(&self) -> Option<MutexGuard<'_, Rules>> {
        (!self.steering.inboxes.is_empty()).then(|| lock(&self.steering.rules))
    }

    pub(crate) fn steer(&self, rule: Steer) -> Result<(), SteerError> {
        let mut rules = self.rules();
        if rules.as_ref().is_some_and(|rules| !rules.admits(rule, self.number)) {
            return Err(SteerError("another engine of the interface has this connection".into()));
        }
        let steered = match rule {
            Steer::Flow(flow) => self.program().add_flow(flow.local, flow.remote),
            Steer::Listener { addr, port } => self.program().add_listener(addr, port),
        };
        steered.map_err(|error| SteerError(error.to_string()))?;
        if let Some(rules) = &mut rules {
            rules.add(rule, self.number);
        }
        Ok(())
    }

    pub(crate) fn unsteer(&self, rule: Steer) {
        let mut rules = self.rules();
        if rules.as_mut().is_some_and(|rules| !rules.remove(rule, self.number)) {
            return;
        }
        match rule {
            Steer::Flow(flow) => self.program().remove_flow(flow.local, flow.remote),
            Steer::Listener { addr, port } => self.program().remove_listener(addr, port),
        }
    }

    /// The other owner to which frames of `flow` must be handed over, if there is one.
    pub(crate) fn owner_elsewhere(&self, flow: &Flow) -> Option<u16> {
        self.rules()?.elsewhere(flow, self.number)
    }

    /// Gives `frame` of `flow` to another owner; returns whether no frame had to be dropped for lack of room.
    pub(crate) fn hand_over(&self, owner: u16, flow: Flow, frame: Vec<u8>) -> bool {
        self.steering.inboxes.get(usize::from(owner)).is_some_and(|inbox| inbox.put(flow, frame))
    }

    /// Whether it is the first of the owners.
    pub(crate) fn is_first(&self) -> bool {
        self.number == 0
    }

    fn inbox(&self) -> Option<&Inbox> {
        self.steering.inboxes.get(usize::from(self.number))
    }

    /// The oldest frame that another owner has handed over.
    pub(crate) fn next_handed_over(&self) -> Option<Vec<u8>> {
        self.inbox()?.take()
    }

    /// Readable while [`next_handed_over`](Self::next_handed_over) has frames. `None` for the only owner.
    pub(crate) fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.inbox().map(Inbox::bell)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        let own = self.rules().map(|rules| rules.of(self.number)).unwrap_or_default();
        for rule in own {
            self.unsteer(rule);
        }
        while self.next_handed_over().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(port: u16) -> Flow {
        Flow { local: ([10, 0, 0, 1], port).into(), remote: ([10, 0, 0, 2], 7).into() }
    }

    #[test]
    fn a_flow_has_one_owner_and_a_listening_port_several() {
        let mut rules = Rules::default();
        let (first, listener) = (Steer::Flow(flow(1)), Steer::Listener { addr: None, port: 9 });
        rules.add(first, 0);
        assert_eq!((rules.admits(first, 0), rules.admits(first, 1)), (true, false));
        assert_eq!((rules.elsewhere(&flow(1), 1), rules.elsewhere(&flow(1), 0)), (Some(0), None));
        assert_eq!(rules.elsewhere(&flow(2), 1), None);
        for owner in [0, 1, 1] {
            assert!(rules.admits(listener, owner));
            rules.add(listener, owner);
        }
        assert_eq!((rules.of(0), rules.of(1)), (vec![first, listener], vec![listener]));
        assert!(!rules.remove(listener, 0), "owner 1 still listens");
        assert!(!rules.remove(first, 1), "the flow is not owner 1's");
        assert!(rules.remove(listener, 1));
        assert!(rules.remove(first, 0));
        assert!(rules.0.is_empty());
    }

    /// The most specific rule decides, as in the stack.
    #[test]
    fn a_syn_goes_to_an_owner_that_listens() {
        let mut rules = Rules::default();
        let port = flow(1).local.port();
        let (any, here) =
            (Steer::Listener { addr: None, port }, Steer::Listener { addr: Some(flow(1).local.ip()), port });
        rules.add(any, 1);
        assert_eq!([0, 1, 2].map(|asking| rules.elsewhere(&flow(1), asking)), [Some(1), None, Some(1)]);
        rules.add(here, 2);
        assert_eq!([0, 1, 2].map(|asking| rules.elsewhere(&flow(1), asking)), [Some(2), Some(2), None]);
        rules.remove(here, 2);
        rules.add(any, 0);
        assert_eq!([0, 1, 2].map(|asking| rules.elsewhere(&flow(1), asking)), [None, None, Some(1)]);
        assert_eq!(rules.elsewhere(&Flow { local: flow(2).local, ..flow(1) }, 2), None, "another port");
    }
}
