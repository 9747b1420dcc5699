//! Options and ports of identifiers.

use std::ffi::{c_int, c_void};

use nix::errno::Errno;
use xwarp_verbs::cm::CmId;

use super::id::{Id, Stage};
use crate::{
    boundary::{Handle, In},
    failure::{self, minus_one},
    wait::lock,
};

const LEVEL_ID: c_int = 0;
const TOS: c_int = 0;
const REUSE_ADDRESS: c_int = 1;
const ONLY_FAMILY: c_int = 2;
const ACK_TIMEOUT: c_int = 3;

/// Sets the codepoint of Differentiated Services of an identifier's connection.
pub fn tune(cm: &CmId, dscp: u8) -> Result<(), Errno> {
    let mut tuning = cm.tuning();
    tuning.dscp = dscp;
    cm.tune(tuning).map_err(|error| failure::cm(&error))
}

pub extern "C" fn rdma_set_option(
    id: Handle<Id>,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    let set = || {
        let id = id.object()?;
        if level != LEVEL_ID {
            // Paths of InfiniBand.
            return Err(Errno::ENOSYS);
        }
        match (name, len) {
            (TOS, 1) => {
                let tos = In::of(value.cast::<u8>()).read().ok_or(Errno::EINVAL)?;
                let mut inner = lock(&id.inner);
                inner.dscp = Some(tos >> 2);
                inner.ends.iter().try_for_each(|end| tune(&end.cm, tos >> 2))
            }
            (REUSE_ADDRESS | ONLY_FAMILY, 4) => {
                let wanted = In::of(value.cast::<c_int>()).read().ok_or(Errno::EINVAL)? != 0;
                let mut inner = lock(&id.inner);
                let is_unbound = inner.stage == Stage::Idle && inner.ends.is_empty();
                let reuses_later = name == REUSE_ADDRESS && wanted && inner.stage != Stage::Listening;
                if !is_unbound && !reuses_later {
                    return Err(Errno::EINVAL);
                }
                let sharing = &mut inner.sharing;
                *(if name == REUSE_ADDRESS { &mut sharing.reuses } else { &mut sharing.only_family }) =
                    wanted;
                Ok(())
            }
            // TCP's time-outs adapt themselves: no effect, as with every device of iWARP.
            (ACK_TIMEOUT, 1) => Ok(()),
            (TOS..=ACK_TIMEOUT, _) => Err(Errno::EINVAL),
            _ => Err(Errno::ENOSYS),
        }
    };
    minus_one(set())
}

/// The port of one of the identifier's addresses in network byte order, or 0.
fn port(id: Handle<Id>, local: bool) -> u16 {
    id.object().map_or(0, |id| {
        let address = id.c.update(|c| if local { c.route.addr.src } else { c.route.addr.dst });
        let address = crate::boundary::read_address(In::of((&raw const address).cast()));
        address.map_or(0, |address| address.port().to_be())
    })
}

pub extern "C" fn rdma_get_src_port(id: Handle<Id>) -> u16 {
    port(id, true)
}

pub extern "C" fn rdma_get_dst_port(id: Handle<Id>) -> u16 {
    port(id, false)
}
