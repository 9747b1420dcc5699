//! RFC 6581 through the whole engine: ready-to-receive indications.

use xwarp_rnic::{QpState, WcStatus, engine::ConnectParams};
use xwarp_tcp::{
    framing::AcceptParams,
    mpa::{MpaConfig, Rtr},
};

use crate::peer::*;

fn initiator(mpa: MpaConfig, ird: u16) -> ConnectParams {
    ConnectParams { ird, ord: 4, framing: Some(mpa.into()), ..ConnectParams::default() }
}

#[test]
fn rfc6581_s9_2_each_rtr_indication_lets_the_responder_begin() {
    for rtr in [Rtr::EmptyFpdu, Rtr::Send, Rtr::Write, Rtr::Read] {
        let mut world = World::unconnected(|_, attributes| attributes);
        world.connect_card(
            initiator(MpaConfig { peer_to_peer: vec![rtr], ..MpaConfig::default() }, 4),
            AcceptParams { ird: 4, ord: 4, ..AcceptParams::default() },
        );
        assert_eq!(world.state(), QpState::Rts);
        let heard = world.heard();
        let want: &[&[u8]] = match rtr {
            Rtr::EmptyFpdu => &[&[]],
            Rtr::Send => &[&[0x41, 0x43]],
            Rtr::Write => &[&[0xc1, 0x40]],
            Rtr::Read => &[&[0x41, 0x41]],
        };
        let heads: Vec<&[u8]> = heard.iter().map(|u| &u[..u.len().min(2)]).collect();
        assert_eq!(heads, want, "{rtr:?}");
        let (key, _) = world.region(4, 0, ALL);
        world.receive(1, &[whole(key, 4)]);
        world.say([send(1, 0, true, b"peer")]);
        assert_eq!(world.outcomes(), [(1, WcStatus::Success)], "{rtr:?}: the responder may speak");
    }
}
