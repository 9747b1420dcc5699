//! Who runs an engine, and who sleeps until it must run (`docs/decisions/0005-*`).
//!
//! | file | owns |
//! |---|---|
//! | `policy` | the decisions: the progress thread's next [`policy::Step`], and a polling thread's rests; no clock, no thread |
//! | `calls` | the counts of the application's calls, which the policy observes |
//! | `sleeper` | the progress thread's sleep as other threads see it: who must ring the doorbell |
//! | `thread` | the progress thread, which does what the policy decides |
//! | `bell_queue` | a queue behind a descriptor, on which everybody else waits: applications that do not run the engine, pollers, futures |
//! | `waits` | the sets of descriptors in which threads wait for frames, in the order in which frames wake them |
//! | `spin` | the rests of threads that poll in vain on a busy processor |
//! | `lead` | every wait of an application that runs the engine meanwhile |

pub(super) mod bell_queue;
pub(super) mod calls;
pub(super) mod lead;
mod policy;
pub(super) mod sleeper;
pub(super) mod spin;
mod sync;
pub(super) mod thread;
pub(super) mod waits;

/// Which threads run the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Progress {
    /// The application when it polls an empty completion queue, and a progress thread while the application does not poll:
    /// peers can always reach our memory, and a busy-polling application does not pay for a second thread.
    #[default]
    Auto,
    /// Only the application, by polling and by [`Device::wait`](super::Device::wait). Between its calls nothing is received,
    /// acknowledged or retransmitted, and a peer may time out.
    Application,
    /// Only the progress thread. Polling a completion queue never takes the engine's lock.
    Thread,
}
