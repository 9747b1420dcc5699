//! Links: index, Ethernet address, MTU, state, and the parent of a VLAN interface.

use std::io;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use xwarp_tcp::wire::Mac;

use super::Netlink;

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelLink {
    /// Its index in the kernel.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address; zero when it has none.
    pub mac: Mac,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Whether it is up and has a carrier.
    pub up: bool,
    /// Whether the administrator has set it up, with or without a carrier.
    pub admin_up: bool,
    /// Whether it is Ethernet and not the loopback.
    pub ethernet: bool,
    /// Number of receive queues at creation; it may use fewer.
    pub receive_queues: u32,
    /// Number of transmit queues at creation.
    pub transmit_queues: u32,
    /// For an interface of kind vlan: the index of its parent, and its VLAN id.
    pub vlan: Option<(u32, u16)>,
    /// Whether it is an end of a pair of virtual interfaces.
    pub veth: bool,
}

impl Netlink {
    /// All interfaces of this namespace.
    pub fn links(&mut self) -> io::Result<Vec<KernelLink>> {
        let answers = self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        Ok(answers.iter().filter_map(link_of).collect())
    }

    /// The interface with this index.
    pub fn link(&mut self, index: u32) -> io::Result<KernelLink> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let answer = self.one(RouteNetlinkMessage::GetLink(message))?;
        link_of(&answer).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

fn link_of(answer: &RouteNetlinkMessage) -> Option<KernelLink> {
    match answer {
        RouteNetlinkMessage::NewLink(message) => Some(from_message(message)),
        _ => None,
    }
}

pub(super) fn from_message(message: &LinkMessage) -> KernelLink {
    let flags = message.header.flags;
    let mut link = KernelLink {
        index: message.header.index,
        name: String::new(),
        mac: Mac::default(),
        mtu: 0,
        up: flags.contains(LinkFlags::Up | LinkFlags::LowerUp),
        admin_up: flags.contains(LinkFlags::Up),
        ethernet: message.header.link_layer_type == LinkLayerType::Ether
            && !flags.contains(LinkFlags::Loopback),
        receive_queues: 1,
        transmit_queues: 1,
        vlan: None,
        veth: false,
    };
    let (mut below, mut vlan_id) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Address(bytes) => {
                link.mac = bytes.as_slice().try_into().map(Mac).unwrap_or_default();
            }
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::NumRxQueues(queues) => link.receive_queues = *queues,
            LinkAttribute::NumTxQueues(queues) => link.transmit_queues = *queues,
            LinkAttribute::Link(index) => below = Some(*index),
            LinkAttribute::LinkInfo(infos) if infos.contains(&LinkInfo::Kind(InfoKind::Veth)) => {
                link.veth = true;
            }
            LinkAttribute::LinkInfo(infos) if infos.contains(&LinkInfo::Kind(InfoKind::Vlan)) => {
                vlan_id = vlan_id_of(infos);
            }
            _ => {}
        }
    }
    link.vlan = below.zip(vlan_id);
    link
}

fn vlan_id_of(infos: &[LinkInfo]) -> Option<u16> {
    infos.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vlan(data)) => {
            data.iter().find_map(|d| if let InfoVlan::Id(id) = d { Some(*id) } else { None })
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vlan_interface_names_the_one_below() {
        let mut message = LinkMessage::default();
        message.header.index = 7;
        message.header.link_layer_type = LinkLayerType::Ether;
        message.header.flags = LinkFlags::Up | LinkFlags::LowerUp;
        message.attributes = vec![
            LinkAttribute::IfName("eth0.42".into()),
            LinkAttribute::Address(vec![2, 0, 0, 0, 0, 1]),
            LinkAttribute::Mtu(1496),
            LinkAttribute::Link(3),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vlan),
                LinkInfo::Data(InfoData::Vlan(vec![InfoVlan::Id(42)])),
            ]),
        ];
        let link = from_message(&message);
        assert_eq!(link.vlan, Some((3, 42)));
        assert_eq!((link.index, link.name.as_str(), link.mtu), (7, "eth0.42", 1496));
        assert_eq!(link.mac, Mac([2, 0, 0, 0, 0, 1]));
        assert!(link.up && link.ethernet);
    }

    #[test]
    fn the_loopback_is_no_ethernet() {
        let lo = Netlink::open().unwrap().link(1).unwrap();
        assert_eq!(lo.name, "lo");
        assert!(!lo.ethernet);
        assert!(Netlink::open().unwrap().links().unwrap().contains(&lo));
    }
}
