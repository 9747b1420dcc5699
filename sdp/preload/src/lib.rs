//! `libxwarp-sdp.so`: connections of unmodified programs over SDP. `xwarp sdp -- PROGRAM` starts a program with it.
//!
//! The library replaces some functions of the C library. A connection over SDP has three parts:
//!
//! ```text
//! program ── its socket ── loopback ── leg ── relay ── SdpStream ── network
//! ```
//!
//! The program keeps a TCP socket of the kernel, whose other end, the leg, belongs to this library in the same process.
//! Every call and option of a TCP socket therefore works here, with every way of waiting: poll, epoll of every kind,
//! signals, fork and exec, with or without this library. Only set-up, names and the data path differ:
//!
//! | call | difference |
//! |---|---|
//! | `connect` | the port mapper of the host is asked; then SDP connects to the host, and the socket to the leg |
//! | `bind` | the library learns which sockets have a port of the program's choice, which only TCP can connect from |
//! | `listen` | an SDP listener and an entry of the port mapper are added; the relay connects its accepted connections to the socket |
//! | `accept`, `accept4`, `getsockname`, `getpeername` | the addresses are those of the connection over SDP |
//! | `read`, `write`, `recv`, `send` and their kin | in the process that made the connection, data goes straight from and to the stream, unless bytes are in transit on the loopback or the call must sleep |
//! | `close`, `dup`, `fcntl`, `fdopen`, `posix_spawn` and their kin | the library tracks which descriptors are the only ones of their socket |
//! | `_exit`, `_Exit`, exit handlers | data in transit is sent first |
//!
//! | file | owns |
//! |---|---|
//! | `calls` | the functions that replace those of the C library |
//! | `descriptors` | the functions that replace those which close, duplicate or pass on descriptors |
//! | `direct` | reads and writes that bypass the loopback |
//! | `incoming` | memory of long pieces in transit to the program |
//! | `locks` | locks that a call of the program may find left behind |
//! | `loopback` | the buffer sizes of the loopback |
//! | `next` | the functions of the C library that are replaced |
//! | `numbers` | the numbers of the library's descriptors |
//! | `outgoing` | memory of long pieces in transit to the network |
//! | `signals` | whether calls are restarted after the program's signal handlers |
//! | `tracking` | which descriptors are the only ones of their socket |
//! | `transfers` | the functions that replace those that transfer data |
//! | `sys` | system calls, past those functions, and hooks of the C library |
//! | `legs` | names of connections, in memory that is shared with forked children |
//! | `process` | rules, devices, listeners of this process |
//! | `relay` | copying between a leg and a stream |
//!
//! [Decision 17](../../docs/decisions/0017-programs-keep-their-tcp-sockets.md) has the reasons and the cost.

mod calls;
mod descriptors;
mod direct;
mod incoming;
mod legs;
mod locks;
mod loopback;
mod next;
mod numbers;
mod outgoing;
mod process;
mod relay;
mod resets;
mod signals;
mod sys;
mod tracking;
mod transfers;
