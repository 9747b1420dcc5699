//! Pairs of virtual interfaces (veth), which the helper creates for its clients.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};

use super::Netlink;

impl Netlink {
    /// Makes a pair of interfaces with these names and this MTU, sets both up, and returns their indices.
    pub fn create_veth(&mut self, [near, far]: [&str; 2], mtu: u32) -> io::Result<[u32; 2]> {
        self.create_pair(near, far, mtu, None)?;
        let ends = [self.index_of(near)?, self.index_of(far)?];
        // The kernel refuses a pair whose peer is up before the first end exists.
        for end in ends {
            self.set_up(end)?;
        }
        Ok(ends)
    }

    /// Makes a pair with one end in this namespace, which is set up, and the other, `there`, in `namespace`. Returns the index of
    /// the end in this namespace.
    pub fn create_veth_to(
        &mut self,
        namespace: BorrowedFd<'_>,
        [here, there]: [&str; 2],
        mtu: u32,
    ) -> io::Result<u32> {
        self.create_pair(here, there, mtu, Some(namespace))?;
        let end = self.index_of(here)?;
        self.set_up(end)?;
        Ok(end)
    }

    fn create_pair(
        &mut self,
        first: &str,
        second: &str,
        mtu: u32,
        namespace_of_second: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let attributes = |name: &str| vec![LinkAttribute::IfName(name.into()), LinkAttribute::Mtu(mtu)];
        let mut peer = LinkMessage::default();
        peer.attributes = attributes(second);
        peer.attributes.extend(namespace_of_second.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
        let mut message = LinkMessage::default();
        message.attributes = attributes(first);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The index of the interface with this name.
    pub fn index_of(&mut self, name: &str) -> io::Result<u32> {
        let links = self.links()?;
        let found = links.iter().find(|link| link.name == name);
        found.map(|link| link.index).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Sets an interface up.
    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        self.change(RouteNetlinkMessage::NewLink(message), 0)
    }

    /// Changes the MTU of an interface.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes.push(LinkAttribute::Mtu(mtu));
        self.change(RouteNetlinkMessage::NewLink(message), 0)
    }

    /// Deletes an interface; of a pair, both ends.
    pub fn delete_link(&mut self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.change(RouteNetlinkMessage::DelLink(message), 0)
    }
}
