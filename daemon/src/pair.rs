//! [`Pair`]: the pair of virtual interfaces of one client, and what the threads that make and remove pairs report.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use anyhow::Result;
use xwarp_driver::netlink::Netlink;
use xwarp_prog::{PairLinks, Switch};

use crate::private::PrivateNamespace;

/// The pair of one client.
#[derive(Debug)]
pub(crate) struct Pair {
    slot: u32,
    ends: [u32; 2],
    namespace: PrivateNamespace,
    switch: Arc<Switch>,
    links: PairLinks,
}

impl Pair {
    pub(crate) fn new(
        slot: u32,
        ends: [u32; 2],
        namespace: PrivateNamespace,
        switch: Arc<Switch>,
        links: PairLinks,
    ) -> Self {
        Self { slot, ends, namespace, switch, links }
    }

    /// The number of the device.
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// The links that keep its programs attached.
    pub(crate) fn links(&self) -> &PairLinks {
        &self.links
    }

    /// The namespace of its far end.
    pub(crate) fn namespace(&self) -> &PrivateNamespace {
        &self.namespace
    }

    /// The switch that the pair is connected to.
    pub(crate) fn switch(&self) -> &Switch {
        &self.switch
    }

    /// Index of the near end.
    pub(crate) fn near(&self) -> u32 {
        self.ends[0]
    }

    /// Index of the far end, to which the client binds its socket.
    pub(crate) fn far(&self) -> u32 {
        self.ends[1]
    }

    /// Removes the pair. Returns its slot, and the namespace in which the client's socket may still be.
    pub(crate) fn remove(self, netlink: &mut Netlink) -> (u32, PrivateNamespace) {
        self.switch.disconnect_client(self.slot, self.ends);
        let Self { slot, ends, namespace, links, .. } = self;
        if let Err(error) = netlink.delete_link(ends[0]) {
            tracing::error!(slot, %error, "a pair could not be removed");
        }
        drop(links);
        (slot, namespace)
    }
}

/// A completed request of the thread.
pub(crate) enum Done {
    Made { client: u64, uid: u32, slot: u32, result: Result<(Pair, OwnedFd)> },
    Registered { client: u64, request: u32, result: io::Result<()> },
    Removed { slot: u32 },
}

/// A sender of completed requests, which rings the server loop's bell.
pub(crate) struct Results {
    done: Sender<Done>,
    bell: Arc<OwnedFd>,
}

impl Results {
    pub(crate) fn new(done: Sender<Done>, bell: Arc<OwnedFd>) -> Self {
        Self { done, bell }
    }

    /// Whether the server loop still exists.
    pub(crate) fn report(&self, done: Done) -> bool {
        let sent = self.done.send(done).is_ok();
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        sent
    }
}
