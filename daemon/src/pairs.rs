//! The thread that creates the pairs of clients, so that the server loop does not wait for the kernel. Another one
//! [removes](crate::removals) them.
//!
//! Both run in an unnamed network namespace of their own. The near ends of all pairs are in this namespace, invisible to
//! other programs, and end with it. Each far end is in a namespace of its own: see [`private`](crate::private).

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use xwarp_control::Sizes;
use xwarp_driver::netlink::Netlink;
use xwarp_driver::netlink::link::KernelLink;
use xwarp_driver::netlink::veth::VethEnd;
use xwarp_driver::shared;
use xwarp_prog::{AttachMode, ProgramError, Switch};

use crate::pair::{Done, Pair, Results};
use crate::private::{FarEnd, Order, PrivateNamespace, make_far_end, set_up};
use crate::privileges;
use crate::removals::{Removal, remove_all};
use crate::turns::Turns;

/// Name of each near end, before the number of its slot.
const NEAR: &str = "near";

/// A request to register the memory of a client.
pub(crate) struct Registration {
    pub client: u64,
    /// The number of the client's request.
    pub request: u32,
    pub socket: OwnedFd,
    pub memory: OwnedFd,
    pub sizes: Sizes,
}

enum Job {
    Make(Box<Order>),
    Register(Box<Registration>),
    SetMtu { near: u32, mtu: u32 },
    MakeRelay(RelayOrder),
    Find(Sender<BTreeMap<u32, u32>>),
    Adopt(Box<Adoption>),
}

/// A pair that a former helper has made.
struct Adoption {
    slot: u32,
    ends: [u32; 2],
    switch: Arc<Switch>,
    socket: OwnedFd,
    done: Sender<Result<(), ProgramError>>,
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

/// The handle to the threads.
pub(crate) struct Pairs {
    jobs: Arc<Turns<Job>>,
    removals: Arc<Turns<Removal>>,
    done: Receiver<Done>,
    bell: Arc<OwnedFd>,
}

impl Pairs {
    /// Starts the threads, in the namespace of a former helper's near ends or in a new one. Returns the namespace, too.
    pub(crate) fn start(threaded_napi: bool, home: Option<OwnedFd>) -> Result<(Self, OwnedFd)> {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (jobs, removals) = (Arc::new(Turns::default()), Arc::new(Turns::default()));
        let (sender, done) = channel();
        let (ready, is_ready) = channel();
        let results = || Results::new(sender.clone(), Arc::clone(&bell));
        let (made, removed) = (results(), results());
        let (orders, removes) = (Arc::clone(&jobs), Arc::clone(&removals));
        thread::Builder::new().name("xwarpd-pairs".into()).spawn(move || {
            let entered = enter(threaded_napi, home).and_then(|namespace| {
                // A new thread is in the namespace of the one that starts it.
                remove_all(removes, removed)?;
                privileges::drop_others_of_pairs().context("dropping capabilities")?;
                let home = namespace.home.try_clone()?;
                Ok((namespace, home))
            });
            match entered {
                Ok((namespace, home)) => {
                    let _ = ready.send(Ok(home));
                    work(namespace, &orders, &made);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
        let home = is_ready.recv().context("the thread of the pairs ended")??;
        Ok((Self { jobs, removals, done, bell }, home))
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

    pub(crate) fn register(&self, uid: u32, registration: Registration) {
        self.send(Some(uid), Job::Register(Box::new(registration)));
    }

    /// Removes a pair, and closes the helper's own descriptor of its socket. Slots are reported when nothing of the client's is
    /// left in its namespace.
    pub(crate) fn remove(&self, uid: u32, pair: Pair, socket: OwnedFd) {
        self.removals.push(Some(uid), Removal::Pair(pair, socket));
    }

    /// Removes what a former helper has left of a slot.
    pub(crate) fn remove_remains(&self, slot: u32, near: Option<u32>, namespace: Option<PrivateNamespace>) {
        self.removals.push(None, Removal::Remains { slot, near, namespace });
    }

    /// The near ends that are there, by slot. Waits for the thread.
    pub(crate) fn near_ends(&self) -> Result<BTreeMap<u32, u32>> {
        let (sender, found) = channel();
        self.send(None, Job::Find(sender));
        found.recv().context("the thread of the pairs ended")
    }

    /// Adds a pair that is there to a switch. Waits for the thread.
    pub(crate) fn adopt(
        &self,
        slot: u32,
        ends: [u32; 2],
        switch: Arc<Switch>,
        socket: OwnedFd,
    ) -> Result<()> {
        let (done, is_done) = channel();
        self.send(None, Job::Adopt(Box::new(Adoption { slot, ends, switch, socket, done })));
        Ok(is_done.recv().context("the thread of the pairs ended")??)
    }

    pub(crate) fn set_mtu(&self, uid: u32, pair: &Pair, mtu: u32) {
        self.send(Some(uid), Job::SetMtu { near: pair.near(), mtu });
    }

    /// Jobs that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.jobs.len() + self.removals.len()
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
        self.jobs.push(user, job);
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        self.jobs.end();
        self.removals.end();
    }
}

/// The namespace of the near ends, which the calling thread is in.
struct Namespace {
    /// Its descriptor, to return to it.
    home: OwnedFd,
    netlink: Netlink,
    /// The near ends of pairs process frames on kernel threads.
    threaded_napi: bool,
    /// The programs on the far ends of relays, while they are attached.
    relays: Vec<OwnedFd>,
}

/// Moves the calling thread into the network namespace of the near ends.
fn enter(threaded_napi: bool, home: Option<OwnedFd>) -> Result<Namespace> {
    let entered = match &home {
        Some(home) => setns(home, CloneFlags::CLONE_NEWNET),
        None => unshare(CloneFlags::CLONE_NEWNET),
    };
    entered.context("a network namespace for the pairs needs CAP_SYS_ADMIN")?;
    if threaded_napi {
        // The setting is a file, and a mounted sysfs shows the namespace that it was mounted in: this thread needs its own.
        unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace for --threaded-napi")?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).context("mounting sysfs")?;
    }
    let new = || fs::File::open("/proc/thread-self/ns/net").context("opening the network namespace");
    let home = home.map_or_else(|| new().map(OwnedFd::from), Ok)?;
    let netlink = Netlink::open().context("opening a netlink socket")?;
    Ok(Namespace { home, netlink, threaded_napi, relays: Vec::new() })
}

fn work(mut namespace: Namespace, orders: &Turns<Job>, results: &Results) {
    while let Some(job) = orders.next() {
        if !namespace.execute(job).is_none_or(|done| results.report(done)) {
            return;
        }
    }
}

impl Namespace {
    fn execute(&mut self, job: Job) -> Option<Done> {
        match job {
            Job::Make(order) => {
                let Order { client, uid, slot, .. } = *order;
                Some(Done::Made { client, uid, slot, result: self.make(&order) })
            }
            Job::Register(registration) => {
                let Registration { client, request, socket, memory, sizes } = *registration;
                let result = shared::register_for(socket.as_fd(), memory, sizes);
                Some(Done::Registered { client, request, result })
            }
            Job::MakeRelay(order) => {
                let _ = order.made.send(self.make_relay(&order));
                None
            }
            Job::Find(found) => {
                let links = self.netlink.links().unwrap_or_default();
                let near =
                    |link: &KernelLink| Some((link.name.strip_prefix(NEAR)?.parse().ok()?, link.index));
                let _ = found.send(links.iter().filter_map(near).collect());
                None
            }
            Job::Adopt(adoption) => {
                let Adoption { slot, ends, switch, socket, done } = *adoption;
                let _ = done.send(switch.add_client(slot, ends, socket.as_fd()));
                None
            }
            Job::SetMtu { near, mtu } => {
                match self.netlink.set_mtu(near, mtu) {
                    // It was removed meanwhile.
                    Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
                    Err(error) => tracing::warn!(mtu, %error, "a pair keeps its MTU"),
                    Ok(()) => {}
                }
                None
            }
        }
    }

    fn make_relay(&mut self, order: &RelayOrder) -> Result<()> {
        let RelayOrder { near, namespace, switch, mtu, .. } = order;
        let far = format!("relay{}", self.relays.len());
        let end = |name| VethEnd { name, index: 0, mtu: *mtu };
        self.netlink
            .create_veth(end(&far), end(near), namespace.as_fd())
            .context("creating the pair of a relay (veth)")?;
        let far = self.netlink.index_of(&far).context("finding the far end of a relay")?;
        set_up(&mut self.netlink, far)?;
        self.relays.push(switch.attach_behind_relay(far).context("attaching the switch to a relay")?);
        Ok(())
    }

    fn make(&mut self, order: &Order) -> Result<(Pair, OwnedFd)> {
        let name = format!("{NEAR}{}", order.slot);
        let FarEnd { index: far, link, socket, namespace } = make_far_end(&self.home, &name, order)?;
        let near = self.netlink.index_of(&name).context("finding the near end of a pair")?;
        let ends = [near, far];
        let mode = if order.generic { AttachMode::Generic } else { AttachMode::Native };
        let connected =
            self.netlink.set_up(near).context("setting the near end of a pair up").and_then(|()| {
                let links = order.switch.connect_client(order.slot, ends, link, socket.as_fd(), mode);
                links.context("connecting the client to the switch")
            });
        match connected {
            Ok(links) => {
                self.move_to_kernel_thread(&name);
                let switch = Arc::clone(&order.switch);
                Ok((Pair::new(order.slot, ends, namespace, switch, links), socket))
            }
            Err(error) => {
                order.switch.disconnect_client(order.slot, ends);
                let _ = self.netlink.delete_link(near);
                Err(error)
            }
        }
    }

    /// Lets kernel threads process the frames of the client behind `near`, if the helper was started so.
    fn move_to_kernel_thread(&self, near: &str) {
        if !self.threaded_napi {
            return;
        }
        // Attaching the program created the NAPI instance. Generic XDP has none, so there is nothing to move.
        let setting = format!("/sys/class/net/{near}/threaded");
        if let Err(error) = fs::write(&setting, "1") {
            tracing::warn!(setting, %error, "frames of a client are processed on its own time");
        }
    }
}
