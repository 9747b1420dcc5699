//! Infrastructure of xwarp's network tests: a lab of two namespaces, programs that run in it, and checkers of
//! captured traffic. The tests are in `tests/`, named `netns_*`; they need root.
//!
//! | module | owns |
//! |---|---|
//! | [`lab`] | namespaces, the veth pair, and running code inside them |
//! | [`hop`] | a bridge with losses, delay and other faults between the namespaces |
//! | [`operations`] | what both transports do while hosts and networks are operated |
//! | [`goodput`] | the table of goodput through the hop |
//! | [`nobody`] | programs that run without privileges |
//! | [`exports`] | the symbols of the drop-in library and of a distribution's libraries |
//! | [`exchange`] | programs that exchange messages over a shared interface |
//! | [`process`] | programs under test: readiness by output, time limits, kill |
//! | [`perf`] | `xwarp-perf` between the two ends |
//! | [`unmodified`] | programs of rdma-core and others, which know nothing of xwarp |
//! | [`documents`] | the commands that README and the guide show |
//! | [`user`] | an ordinary user without capabilities, whose programs run over the fabric |
//! | [`programs`] | those programs in the root of another distribution, row by row of the table in `docs/compat.md` |
//! | [`capture`] | pcapng files as TCP streams |
//! | [`foreign`] | another owner's XDP program on an interface |
//! | [`framing`] | a second MPA parser: FPDUs, markers, CRCs |
//! | [`hostile`] | a raw MPA, DDP and RDMAP sender over a TCP socket, for traffic that no RNIC would send |
//! | [`tshark`] | Wireshark's verdict on a capture |
//! | [`recorded`] | a lab whose captures SDP's dissector reads |
//! | [`leaks`] | descriptors and threads of a process |
//! | [`shared`] | `xwarpd`, and programs without privileges |
//! | [`rounds`] | measurements in interleaved rounds |
//! | [`sdp_speed`] | the speed of unmodified programs over SDP |
//! | [`sharing`] | the cost of sharing an interface |
//! | [`compat_cost`] | the cost of the drop-in libraries |
//! | [`vm`] | virtual machines: with Linux Soft-iWARP for the tests named `siw_*`, with a new kernel for `zerocopy_*` |
#![forbid(unsafe_code)]

pub mod capture;
pub mod compat_cost;
pub mod documents;
pub mod exchange;
pub mod exports;
pub mod foreign;
pub mod framing;
pub mod goodput;
mod granted;
mod havoc;
pub mod hop;
pub mod hostile;
pub mod lab;
pub mod lasting;
pub mod leaks;
mod linger;
pub mod nobody;
pub mod operations;
pub mod perf;
pub mod process;
pub mod programs;
pub mod pyverbs;
mod raw;
pub mod recorded;
pub mod rounds;
pub mod sdp_speed;
pub mod shared;
pub mod sharing;
pub mod tshark;
pub mod unmodified;
pub mod user;
pub mod vm;
