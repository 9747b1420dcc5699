//! The public objects of the API, over the engine, and the threads that run the engine.
//!
//! | file | owns |
//! |---|---|
//! | `device` | opening and closing; the attributes of a device |
//! | `engines` | the engines of a device, and what they have in common |
//! | `shared`, `progress`, `sleep` | an engine's lock, the turn, the progress thread, who sleeps and who is woken |
//! | `gather` | posts that wait for the next poll |
//! | `failure` | the state of a device whose engine panicked |
//! | `protection`, `window`, `queue_pair`, `completion` | the nouns of verbs |
//! | `cm` | the connection manager |
//! | `observer` | queries of a device by other processes |
//! | `async_event`, `counters` | asynchronous events, counters |
//! | `tokio` | futures over the channels |

mod async_event;
pub mod cm;
mod completion;
mod counters;
mod device;
mod engines;
mod failure;
mod gather;
mod observer;
mod progress;
mod protection;
mod queue_pair;
mod shared;
mod sleep;
#[cfg(feature = "tokio")]
pub mod tokio;
mod window;

pub use self::{
    async_event::AsyncEvents,
    completion::{CompletionChannel, CompletionQueue, CompletionQueueOptions, CqNotification},
    counters::Counters,
    device::{Device, DeviceAttributes, DeviceOptions, OpenError},
    failure::DeviceFailed,
    progress::Progress,
    protection::{MemoryRegion, ProtectionDomain, RegionOptions, RegisterError},
    queue_pair::{PostBatch, PostListError, QueuePair, SharedReceiveQueue},
    sleep::Slept,
    window::{FastRegion, FastRegionOptions, MemoryWindow},
};
