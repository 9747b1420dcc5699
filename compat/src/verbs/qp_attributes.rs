//! The attributes of `ibv_modify_qp` and `ibv_query_qp`: which values a kernel refuses, and which are kept.

use std::ffi::c_int;

use nix::errno::Errno;

use crate::abi::queue::{ibv_ah_attr, ibv_qp_attr, qp_mask, qp_state};

/// Bits of the mask of `ibv_modify_qp` that kernels accept: those up to `IBV_QP_DEST_QPN`.
const KNOWN_MASK: c_int = (qp_mask::DEST_QPN << 1) - 1;
/// `ibv_mtu`: from 256 to 4096 bytes.
const MTUS: std::ops::RangeInclusive<c_int> = 1..=5;

/// Refuses attributes that the kernel refuses before it asks a driver.
pub fn check(attributes: &ibv_qp_attr, mask: c_int) -> Result<(), Errno> {
    if mask & !KNOWN_MASK != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let has = |bit| mask & bit != 0;
    let is_state = |state: c_int| (qp_state::RESET..=qp_state::ERR).contains(&state);
    let is_other_port = |route: &ibv_ah_attr| route.port_num != 1;
    if has(qp_mask::STATE) && !is_state(attributes.qp_state)
        || has(qp_mask::CUR_STATE) && !is_state(attributes.cur_qp_state)
        || has(qp_mask::PORT) && attributes.port_num != 1
        || has(qp_mask::AV) && is_other_port(&attributes.ah_attr)
        || has(qp_mask::ALT_PATH) && (attributes.alt_port_num != 1 || is_other_port(&attributes.alt_ah_attr))
        || has(qp_mask::PATH_MTU) && !MTUS.contains(&attributes.path_mtu)
    {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Refuses a mask of `ibv_query_qp` with bits that its command cannot carry.
pub fn check_query(mask: c_int) -> Result<(), Errno> {
    if mask & !(qp_mask::RATE_LIMIT - 1) != 0 { Err(Errno::EOPNOTSUPP) } else { Ok(()) }
}

/// Keeps the attributes of `mask`: programs read them, and connect with them again after a reset. The state and the capacities
/// are the queue pair's own.
pub fn keep(own: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: c_int) {
    macro_rules! keep {
        ($($bit:ident => $($field:ident),+;)+) => {
            $(if mask & qp_mask::$bit != 0 {
                $(own.$field = from.$field;)+
            })+
        };
    }
    keep! {
        EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify;
        ACCESS_FLAGS => qp_access_flags;
        PKEY_INDEX => pkey_index;
        QKEY => qkey;
        AV => ah_attr;
        PATH_MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RNR_RETRY => rnr_retry;
        RQ_PSN => rq_psn;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        ALT_PATH => alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        MIN_RNR_TIMER => min_rnr_timer;
        SQ_PSN => sq_psn;
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        PATH_MIG_STATE => path_mig_state;
        DEST_QPN => dest_qp_num;
    }
}
