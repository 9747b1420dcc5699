//! Pairs of virtual interfaces (veth), which the helper creates for its clients.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage,
};

use super::Netlink;

/// One end of a pair that is to be made.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its index; 0: the kernel chooses one.
    pub index: u32,
    /// Its MTU in bytes. The end drops received frames that are longer.
    pub mtu: u32,
}

impl VethEnd<'_> {
    fn message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = self.index;
        message.attributes = vec![LinkAttribute::IfName(self.name.into()), LinkAttribute::Mtu(self.mtu)];
        message
    }
}

impl Netlink {
    /// Makes a pair with `here` in this namespace and `there` in `namespace`, both down.
    pub fn create_veth(
        &mut self,
        here: VethEnd<'_>,
        there: VethEnd<'_>,
        namespace: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut peer = there.message();
        peer.attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
        let mut message = here.message();
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The index of the interface with this name.
    pub fn index_of(&mut self, name: &str) -> io::Result<u32> {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.into())];
        let answer = self.one(RouteNetlinkMessage::GetLink(message))?;
        match answer {
            RouteNetlinkMessage::NewLink(message) => Ok(message.header.index),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Gives an interface no link-local address, also when it is set up. Without this, the kernel sends router solicitations on each
    /// new interface.
    pub fn without_link_local(&mut self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        message.attributes = vec![LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])])];
        self.change(RouteNetlinkMessage::NewLink(message), 0)
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
