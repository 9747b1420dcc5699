//! The public objects of the API, over the engine, and the threads that run the engine.
//!
//! | file | owns |
//! |---|---|
//! | `device` | opening a device, constructors |
//! | `handle` | the handle to a device, its waits, its closing |
//! | `engines` | the engines of a device |
//! | `shared` | an engine's lock, doorbell and turn, and what the engines of a device have in common |
//! | `progress` | who runs the engine, who sleeps and who is woken |
//! | `gather` | posts that wait for the next poll |
//! | `failure` | the state of a device whose engine panicked |
//! | `protection`, `window`, `queue_pair`, `completion`, `channel` | the nouns of verbs |
//! | `cm` | the connection manager |
//! | `observer` | queries of a device by other processes |
//! | `async_event`, `counters` | asynchronous events, counters |
//! | `tokio` | futures over the channels |

mod async_event;
mod channel;
pub mod cm;
mod completion;
mod counters;
mod device;
mod engines;
mod failure;
mod gather;
mod handle;
mod observer;
mod progress;
mod protection;
mod queue_pair;
mod shared;
#[cfg(feature = "tokio")]
pub mod tokio;
mod window;

pub use self::{
    async_event::AsyncEvents,
    channel::{CompletionChannel, CqNotification},
    completion::{CompletionQueue, CompletionQueueOptions, Rest},
    counters::Counters,
    device::{DeviceOptions, OpenError},
    failure::DeviceFailed,
    handle::{Device, DeviceAttributes},
    progress::{Progress, lead::Slept},
    protection::{MemoryRegion, ProtectionDomain, RegionOptions, RegisterError},
    queue_pair::{PostBatch, PostListError, QueuePair, SharedReceiveQueue},
    window::{FastRegion, FastRegionOptions, MemoryWindow},
};
