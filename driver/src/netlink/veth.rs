//! Pairs of virtual interfaces (veth), which the helper makes for its clients.

use std::io;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};

use super::Netlink;

impl Netlink {
    /// Makes a pair of interfaces with these names and this MTU, sets both up, and returns their indices.
    pub fn create_veth(&mut self, names: [&str; 2], mtu: u32) -> io::Result<[u32; 2]> {
        let attributes = |name: &str| vec![LinkAttribute::IfName(name.into()), LinkAttribute::Mtu(mtu)];
        let [near, far] = names;
        let mut peer = LinkMessage::default();
        peer.attributes = attributes(far);
        let mut message = LinkMessage::default();
        message.attributes = attributes(near);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        self.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)?;
        let links = self.links()?;
        let index = |name: &str| {
            let link = links.iter().find(|link| link.name == name);
            link.map(|link| link.index).ok_or(io::ErrorKind::NotFound)
        };
        let ends = [index(near)?, index(far)?];
        // The kernel refuses a pair whose peer is up before the first end exists.
        for end in ends {
            self.set_up(end)?;
        }
        Ok(ends)
    }

    fn set_up(&mut self, index: u32) -> io::Result<()> {
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
