//! libibverbs: devices, memory, queues, posting and polling.

pub mod buffer;
pub mod card;
pub mod channel;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod device;
pub mod events;
pub mod memory;
pub mod pairing;
pub mod post;
pub mod post_ex;
pub mod qp;
pub mod qp_attributes;
pub mod refused;
pub mod srq;
pub mod text;
