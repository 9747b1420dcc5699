//! The thread that creates and removes the pairs of clients. Removing an interface takes tens of milliseconds in the
//! kernel, so the server loop does not wait for it.
//!
//! The thread runs in an unnamed network namespace of its own. All pairs are in this namespace, invisible to other
//! programs, and end with it.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rustix::event::{EventfdFlags, eventfd};
use xwarp_control::Sizes;
use xwarp_driver::netlink::Netlink;
use xwarp_driver::{DriverConfig, shared};
use xwarp_prog::{AttachMode, PairLinks, Switch};

use crate::privileges;

/// The pair of one client.
#[derive(Debug)]
pub(crate) struct Pair {
    pub slot: u32,
    ends: [u32; 2],
    switch: Arc<Switch>,
    _links: PairLinks,
}

impl Pair {
    /// The switch that the pair is connected to.
    pub(crate) fn switch(&self) -> &Switch {
        &self.switch
    }
}

/// A request for a pair, with a socket on its far end.
pub(crate) struct Order {
    pub client: u64,
    pub uid: u32,
    pub slot: u32,
    pub switch: Arc<Switch>,
    pub memory: OwnedFd,
    pub sizes: Sizes,
    pub multi_buffer: bool,
    pub mtu: u32,
    pub generic: bool,
}

enum Job {
    Make(Box<Order>),
    Remove(Box<Pair>),
    SetMtu { ends: [u32; 2], mtu: u32 },
    MakeRelay(RelayOrder),
}

/// The pair through which frames from the wire arrive when a foreign XDP program has the interface.
struct RelayOrder {
    /// Name of the near end, and the namespace that it is in.
    near: String,
    namespace: OwnedFd,
    switch: Arc<Switch>,
    mtu: u32,
    made: Sender<Result<()>>,
}

/// A completed request of the thread.
pub(crate) enum Done {
    Made { client: u64, uid: u32, slot: u32, result: Result<(Pair, OwnedFd)> },
    Removed { slot: u32 },
}

/// The jobs that wait, by user. Each user's are done in order, and the users take turns: making or removing a pair takes tens
/// of milliseconds, and one user's backlog is not another's.
#[derive(Default)]
struct Queue {
    /// The jobs of this program itself are those of nobody.
    users: BTreeMap<Option<u32>, VecDeque<Job>>,
    /// Users with jobs, the next one first.
    turns: VecDeque<Option<u32>>,
    ended: bool,
}

impl Queue {
    fn push(&mut self, user: Option<u32>, job: Job) {
        let jobs = self.users.entry(user).or_default();
        if jobs.is_empty() {
            self.turns.push_back(user);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<Job> {
        let user = self.turns.pop_front()?;
        let jobs = self.users.get_mut(&user)?;
        let job = jobs.pop_front();
        if jobs.is_empty() {
            self.users.remove(&user);
        } else {
            self.turns.push_back(user);
        }
        job
    }
}

/// The queue, and the bell of the thread.
#[derive(Default)]
struct Jobs {
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A job is pushed or popped as a whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job; `None` when there are no more.
    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.pop() {
                return Some(job);
            }
            if queue.ended {
                return None;
            }
            queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The handle to the thread.
pub(crate) struct Pairs {
    jobs: Arc<Jobs>,
    done: Receiver<Done>,
    bell: Arc<OwnedFd>,
}

impl Pairs {
    /// Starts the thread.
    pub(crate) fn start(threaded_napi: bool) -> Result<Self> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let jobs = Arc::new(Jobs::default());
        let orders = Arc::clone(&jobs);
        let (results, done) = channel();
        let (ready, is_ready) = channel();
        let ring = Arc::clone(&bell);
        thread::Builder::new().name("xwarpd-pairs".into()).spawn(move || match enter(threaded_napi) {
            Ok(namespace) => {
                let _ = ready.send(Ok(()));
                work(namespace, &orders, &results, &ring);
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        })?;
        is_ready.recv().context("the thread of the pairs ended")??;
        Ok(Self { jobs, done, bell })
    }

    /// Readable when [`next`](Self::next) has a result.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The next completed request. Call it until it returns `None`.
    pub(crate) fn next(&self) -> Option<Done> {
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
        self.done.try_recv().ok()
    }

    pub(crate) fn make(&self, order: Order) {
        self.send(Some(order.uid), Job::Make(Box::new(order)));
    }

    pub(crate) fn remove(&self, uid: u32, pair: Pair) {
        self.send(Some(uid), Job::Remove(Box::new(pair)));
    }

    pub(crate) fn set_mtu(&self, uid: u32, pair: &Pair, mtu: u32) {
        self.send(Some(uid), Job::SetMtu { ends: pair.ends, mtu });
    }

    /// Jobs that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.jobs.lock().users.values().map(VecDeque::len).sum()
    }

    /// Creates the relay of an interface, and waits for it. The near end gets this name and is in the calling thread's
    /// namespace.
    pub(crate) fn make_relay(&self, near: &str, switch: Arc<Switch>, mtu: u32) -> Result<()> {
        let namespace =
            fs::File::open("/proc/thread-self/ns/net").context("opening the network namespace")?;
        let (made, is_made) = channel();
        let order = RelayOrder { near: near.into(), namespace: namespace.into(), switch, mtu, made };
        self.send(None, Job::MakeRelay(order));
        is_made.recv().context("the thread of the pairs ended")?
    }

    fn send(&self, user: Option<u32>, job: Job) {
        self.jobs.lock().push(user, job);
        self.jobs.more.notify_one();
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        self.jobs.lock().ended = true;
        self.jobs.more.notify_one();
    }
}

/// The namespace of the pairs, which the calling thread is in.
struct Namespace {
    netlink: Netlink,
    /// The near ends of pairs process frames on kernel threads.
    threaded_napi: bool,
    /// The programs on the far ends of relays, while they are attached.
    relays: Vec<OwnedFd>,
}

/// Moves the calling thread into a new network namespace.
fn enter(threaded_napi: bool) -> Result<Namespace> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network namespace for the pairs needs CAP_SYS_ADMIN")?;
    if threaded_napi {
        // The setting is a file, and a mounted sysfs shows the namespace that it was mounted in: this thread needs its own.
        unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace for --threaded-napi")?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).context("mounting sysfs")?;
    }
    // Otherwise the kernel sends router solicitations on each pair.
    let ipv6 = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    if let Err(error) = ipv6 {
        tracing::debug!(%error, "IPv6 stays on in the namespace of the pairs");
    }
    let netlink = Netlink::open().context("opening a netlink socket")?;
    privileges::drop_others().context("dropping capabilities")?;
    Ok(Namespace { netlink, threaded_napi, relays: Vec::new() })
}

fn work(mut namespace: Namespace, orders: &Jobs, results: &Sender<Done>, bell: &OwnedFd) {
    while let Some(job) = orders.next() {
        let done = match job {
            Job::Make(order) => {
                let Order { client, uid, slot, .. } = *order;
                Done::Made { client, uid, slot, result: make(&mut namespace, *order) }
            }
            Job::Remove(pair) => {
                let Pair { slot, ends, switch, _links } = *pair;
                switch.disconnect_client(slot, ends);
                if let Err(error) = namespace.netlink.delete_link(ends[0]) {
                    tracing::error!(slot, %error, "a pair could not be removed");
                }
                Done::Removed { slot }
            }
            Job::MakeRelay(order) => {
                let _ = order.made.send(namespace.make_relay(&order));
                continue;
            }
            Job::SetMtu { ends, mtu } => {
                for end in ends {
                    if let Err(error) = namespace.netlink.set_mtu(end, mtu) {
                        tracing::warn!(mtu, %error, "a pair keeps its MTU");
                    }
                }
                continue;
            }
        };
        if results.send(done).is_err() {
            return;
        }
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }
}

impl Namespace {
    fn make_relay(&mut self, order: &RelayOrder) -> Result<()> {
        let RelayOrder { near, namespace, switch, mtu, .. } = order;
        let far = format!("relay{}", self.relays.len());
        let far = self.netlink.create_veth_to(namespace.as_fd(), [&far, near], *mtu);
        let far = far.context("creating the pair of a relay (veth)")?;
        self.relays.push(switch.attach_behind_relay(far).context("attaching the switch to a relay")?);
        Ok(())
    }
}

fn make(namespace: &mut Namespace, order: Order) -> Result<(Pair, OwnedFd)> {
    let Namespace { netlink, threaded_napi, .. } = namespace;
    let Order { slot, switch, memory, sizes, multi_buffer, mtu, generic, .. } = order;
    let names = [format!("near{slot}"), format!("far{slot}")];
    let ends = netlink
        .create_veth([&names[0], &names[1]], mtu)
        .context("creating a pair of virtual interfaces (veth)")?;
    let mode = if generic { AttachMode::Generic } else { AttachMode::Native };
    let send_buffer = DriverConfig::default().send_buffer_bytes;
    let connected = shared::client_socket(memory, ends[1], sizes, multi_buffer, send_buffer)
        .context("binding an AF_XDP socket to the client's memory")
        .and_then(|socket| {
            let links = switch.connect_client(slot, ends, socket.as_fd(), mode);
            Ok((links.context("connecting the client to the switch")?, socket))
        });
    match connected {
        Ok((links, socket)) => {
            if *threaded_napi {
                // Attaching the program created the NAPI instance. Generic XDP has none, so there is nothing to move.
                let setting = format!("/sys/class/net/{}/threaded", names[0]);
                if let Err(error) = fs::write(&setting, "1") {
                    tracing::warn!(setting, %error, "frames of a client are processed on its own time");
                }
            }
            Ok((Pair { slot, ends, switch, _links: links }, socket))
        }
        Err(error) => {
            switch.disconnect_client(slot, ends);
            let _ = netlink.delete_link(ends[0]);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten jobs of one user delay another user's job by one.
    #[test]
    fn attack_users_take_turns() {
        let mut queue = Queue::default();
        let job = |mtu| Job::SetMtu { ends: [0, 0], mtu };
        (0..10).for_each(|mtu| queue.push(Some(7), job(mtu)));
        queue.push(Some(8), job(100));
        queue.push(None, job(200));
        let mut order = Vec::new();
        while let Some(Job::SetMtu { mtu, .. }) = queue.pop() {
            order.push(mtu);
        }
        assert_eq!(order, [0, 100, 200, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(queue.users.is_empty() && queue.turns.is_empty());
    }
}
